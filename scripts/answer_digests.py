"""Digests of the demo model's outputs under many schedules, to check that a change keeps every bit.

    python scripts/answer_digests.py compare        # with tests/data/answer_digests.json; exit code 1 if any differs
    python scripts/answer_digests.py record         # adds or replaces those of this machine's instruction set
    python scripts/answer_digests.py compare --kinds int8 --schedules "one batch" --requests 0,4      # a part

A digest covers the tokens, logprobs (every bit), ranks, finish reasons and scores of one request. Outputs of one kind
(types of weights and cache) must also agree between all schedules. Digests are specific to an instruction set of
floats, and the same with every one of integers; ``OCTAVO_CPU_ISA`` selects others than the machine's best. Of
processors other than x86 the record's name is that of the set and of the machine (``generic aarch64``), as these fuse
products with sums. The generic set compiled for x86 with ``-mfma`` does so too and gives the same bits in a hundredth
of an emulator's time: ``--name`` records its digests under the other's name.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import platform
import random
import struct
import sys
from pathlib import Path
from typing import Any

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams

FILE = Path(__file__).resolve().parents[1] / "tests" / "data" / "answer_digests.json"

#: Type of weights and KV cache.
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
}
#: Schedules: engine options.
SCHEDULES: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks": {"max_num_batched_tokens": 24},
    "prefill_first": {"batching": "prefill_first", "max_num_batched_tokens": 256},
    "recompute": {"preemption_mode": "recompute", "num_gpu_blocks_override": 30},
    "swap": {"preemption_mode": "swap", "num_gpu_blocks_override": 30, "num_host_blocks_override": 100},
    "lcfs": {"scheduling_policy": "lcfs", "num_gpu_blocks_override": 30, "num_host_blocks_override": 40},
    "ahead": {"async_scheduling": True, "num_gpu_blocks_override": 40, "num_host_blocks_override": 100},
    "no cache on one thread": {"enable_prefix_caching": False, "num_threads": 1},
}

_RNG = random.Random(17)
_SHARED = [_RNG.randrange(100, 40000) for _ in range(40)]
_LENGTHS = (9, 60, 44, 70, 1, 16, 52, 130, 48, 17, 33, 100)
PROMPTS = [
    (_SHARED if n in (44, 52, 48) else []) + [_RNG.randrange(100, 40000) for _ in range(n - 40 * (n in (44, 52, 48)))]
    for n in _LENGTHS
]
PARAMS: list[SamplingParams | BeamSearchParams] = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=30, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=1),
    BeamSearchParams(beam_width=3, max_tokens=25),
    SamplingParams(temperature=0.7, seed=4, n=2, best_of=3, max_tokens=35, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=35, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, seed=6, top_k=40, min_p=0.02, max_tokens=20, ignore_eos=True, logprobs=5),
    BeamSearchParams(beam_width=2, max_tokens=30, ignore_eos=True, length_penalty=0.5),
    SamplingParams(
        temperature=0.8, seed=8, presence_penalty=0.5, frequency_penalty=0.4, max_tokens=30, ignore_eos=True, logprobs=1
    ),
    SamplingParams(
        temperature=0.6,
        seed=9,
        bad_words=["the", " and"],
        logit_bias={260: 3.0},
        min_tokens=12,
        max_tokens=24,
        logprobs=1,
    ),
    SamplingParams(temperature=1.0, max_tokens=24, allowed_token_ids=list(range(200, 4000, 3)), logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=0),
]


def numbers(logprobs: Any) -> bytes:
    """Every bit of a list of logprobs."""
    parts = [b"" if logprobs is None else b"logprobs"]
    for position in logprobs or ():
        parts.append(b"-" if position is None else b"+")
        for token, found in (position or {}).items():
            parts.append(struct.pack("<qdq", token, found.logprob, found.rank))
    return b"".join(parts)


def digest(output: RequestOutput) -> str:
    """The digest of one request's output."""
    found = hashlib.sha256(numbers(output.prompt_logprobs))
    for o in output.outputs:
        found.update(struct.pack(f"<{len(o.token_ids)}q", *o.token_ids))
        found.update(f"{o.finish_reason} {o.stop_reason} {o.cumulative_logprob!r} {o.score!r}".encode())
        found.update(numbers(o.logprobs))
    return found.hexdigest()[:16]


def record_name(cpu: Any) -> str:
    """Under which name the digests of this processor's kernels are recorded."""
    machine = platform.machine()
    return str(cpu.float_isa()) if machine in ("x86_64", "AMD64") else f"{cpu.float_isa()} {machine}"


def run(kind: str, way: str, requests: list[int]) -> list[str]:
    """The digests of these requests in one configuration."""
    defaults: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "watermark": 0.0,
    }
    llm = LLM("smollm2-135m", kernels="cpu", max_model_len=256, **{**defaults, **KINDS[kind], **SCHEDULES[way]})
    prompts: list[Any] = [{"prompt_token_ids": PROMPTS[i]} for i in requests]
    outputs = llm.generate(prompts, [PARAMS[i] for i in requests], use_tqdm=False)
    preempted = sum(o.metrics.num_preemptions for o in outputs)
    if len(requests) == len(PROMPTS) and SCHEDULES[way].get("num_gpu_blocks_override") and not preempted:
        raise AssertionError(f"{kind}, {way}: nothing was preempted, so the run tests nothing")
    return [digest(output) for output in outputs]


def report(what: str, found: dict[str, list[str]], wanted: list[str]) -> int:
    """Prints for each schedule whether its digests are the first one's and those wanted; returns how many are not."""
    failed = 0
    first_way, first = next(iter(found.items()))
    for way, digests in found.items():
        differing = [i for i, (one, other) in enumerate(zip(digests, first, strict=True)) if one != other]
        changed = [i for i, (one, old) in enumerate(zip(digests, wanted, strict=True)) if one != old]
        failed += bool(differing or changed)
        verdict = "same"
        if differing or changed:
            verdict = f"requests {differing} differ from {first_way}, {changed} from the record"
        print(f"{what} {way:22} {len(digests)} requests: {verdict}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "record"))
    parser.add_argument("--kinds", default=",".join(KINDS), help="a part of %(default)s")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="a part of %(default)s")
    parser.add_argument("--requests", metavar="NUMBERS", help=f"a part of those below {len(PROMPTS)}, of a comparison")
    parser.add_argument("--name", help="the record's, instead of this machine's")
    arguments = parser.parse_args()
    if arguments.what == "record" and arguments.requests:
        parser.error("all requests are recorded")
    requests = [int(i) for i in arguments.requests.split(",")] if arguments.requests else [*range(len(PROMPTS))]
    cpu: Any = importlib.import_module("octavo._cpu")  # compiled, without types
    recorded: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    failed = 0
    for kind in arguments.kinds.split(","):
        found = {way: run(kind, way, requests) for way in arguments.schedules.split(",")}
        first = next(iter(found.values()))
        name = arguments.name or record_name(cpu)  # the instruction set is chosen when a model is loaded
        wanted = recorded.get(name, {}).get(kind, [])
        if arguments.what == "compare" and not wanted:
            print(f"nothing is recorded for {kind} on {name}; recorded: {', '.join(recorded)}", file=sys.stderr)
            return 2
        failed += report(
            f"{cpu.isa():23} {kind:12}", found, [wanted[i] for i in requests] if arguments.what == "compare" else first
        )
        recorded.setdefault(name, {})[kind] = first
    if arguments.what == "record" and not failed:
        FILE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
