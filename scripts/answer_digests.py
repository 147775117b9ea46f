"""Digests of the demo model's outputs under many schedules, to check that a change keeps every bit.

    python scripts/answer_digests.py compare        # with tests/data/answer_digests.json; exit code 1 if any differs
    python scripts/answer_digests.py record         # adds or replaces those of the sets and kinds that are named
    python scripts/answer_digests.py compare --kinds int8 --schedules "one batch" --requests 0,4      # a part

A digest covers the tokens, logprobs (every bit), ranks, finish reasons and scores of one request. Digests are specific
to an instruction set of floats and a kind (types of weights and cache). They must be the same under all schedules, run
with the best instruction set of integers, and those of quantised weights with every set of integers. All sets are taken
that the kernels are built for and the processor runs, or those of ``OCTAVO_CPU_ISA``; but generic must be named: its
integers take some eight times as long as AVX2's, its floats twice.

Of processors other than x86 the record's name is that of the set and of the machine (``generic aarch64``), as these
fuse products with sums. The generic set compiled for x86 with ``-mfma`` does so too and gives the same bits in a
hundredth of an emulator's time: ``--name`` records its digests under the other's name.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import random
import struct
import sys
from collections.abc import Iterable, Iterator
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
QUANTISED = ("int8", "int4", "gguf")
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


def run(kind: str, way: str, sets: str, requests: Iterable[int] = range(len(PROMPTS))) -> list[str]:
    """The digests of these requests in one configuration; ``sets`` is "FLOATS+INTEGERS"."""
    defaults: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "watermark": 0.0,
    }
    os.environ["OCTAVO_CPU_ISA"] = sets  # chosen when a model is loaded
    llm = LLM("smollm2-135m", kernels="cpu", max_model_len=256, **{**defaults, **KINDS[kind], **SCHEDULES[way]})
    prompts: list[Any] = [{"prompt_token_ids": PROMPTS[i]} for i in requests]
    outputs = llm.generate(prompts, [PARAMS[i] for i in requests], use_tqdm=False)
    preempted = sum(o.metrics.num_preemptions for o in outputs)
    if len(prompts) == len(PROMPTS) and SCHEDULES[way].get("num_gpu_blocks_override") and not preempted:
        raise AssertionError(f"{kind}, {way}: nothing was preempted, so the run tests nothing")
    return [digest(output) for output in outputs]


def record_name(floats: str) -> str:
    """Under which name the digests of this processor's kernels are recorded."""
    machine = platform.machine()
    return floats if machine in ("x86_64", "AMD64") else f"{floats} {machine}"


def read() -> dict[str, dict[str, list[str]]]:
    """What is recorded: by name and kind, of all requests."""
    found: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def runs(kind: str, schedules: list[str], integers: list[str]) -> Iterator[tuple[str, str]]:
    """The schedules of a kind, each with a set of integers; that which all others are compared with comes first."""
    yield from ((way, integers[0]) for way in schedules)
    if kind in QUANTISED:
        yield from ((schedules[0], other) for other in integers[1:])


def main(arguments: list[str] | None = None) -> int:
    cpu: Any = importlib.import_module("octavo._cpu")  # compiled, without types
    floats, integers = (names[:-1] or names for names in (cpu.available_isas().floats, cpu.available_isas().integers))
    if named := os.environ.get("OCTAVO_CPU_ISA"):
        cpu.choose_isa(named)
        floats, integers = [cpu.float_isa()], [cpu.integer_isa()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "record"))
    options = {
        "kinds": list(KINDS),
        "floats": floats,
        "integers": integers,
        "schedules": list(SCHEDULES),
        "requests": [str(i) for i in range(len(PROMPTS))],
    }
    for option, values in options.items():
        parser.add_argument(f"--{option}", type=lambda text: text.split(","), default=values, help=", ".join(values))
    parser.add_argument("--name", help="the record's, instead of this machine's")
    chosen = parser.parse_args(arguments)
    requests = [int(i) for i in chosen.requests]
    if chosen.what == "record" and requests != [*range(len(PROMPTS))]:
        parser.error("all requests are recorded")
    recorded, failed = read(), False
    for isa in chosen.floats:
        name = chosen.name or record_name(isa)
        for kind in chosen.kinds:
            wanted = recorded.get(name, {}).get(kind)
            if chosen.what == "compare" and wanted is None:
                print(f"nothing is recorded for {kind} on {name}; recorded: {', '.join(recorded)}", file=sys.stderr)
                return 2
            first: list[str] = []
            for way, integer in runs(kind, chosen.schedules, chosen.integers):
                found = run(kind, way, f"{isa}+{integer}", requests)
                first = first or found
                old = first if wanted is None or chosen.what == "record" else [wanted[i] for i in requests]
                differing = [i for i, one, other in zip(requests, found, first, strict=True) if one != other]
                changed = [i for i, one, other in zip(requests, found, old, strict=True) if one != other]
                failed |= bool(differing or changed)
                verdict = f"requests {differing} differ from the first run, {changed} from the record"
                print(
                    f"{isa + '+' + integer:24} {kind:11} {way:23} {len(requests)} requests: "
                    f"{verdict if differing or changed else 'same'}",
                    flush=True,
                )
            recorded.setdefault(name, {})[kind] = first
    if chosen.what == "record" and not failed:
        FILE.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
