"""What each process of a launcher runs in ``test_launchers``: writes its answers, and disagrees with the others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.core.errors import EngineDeadError


def main(model: str, folder: str) -> None:
    llm = LLM(
        model,
        device="cpu",
        num_threads=2,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        block_size=4,
        num_gpu_blocks_override=36,
        max_num_batched_tokens=16,
        max_num_seqs=8,
    )
    prompts = ["ab", "the quick brown fox jumps over the lazy dog", "c" * 33]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True, logprobs=1) for t in (0.0, 1.0, 0.5)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    first = [output.outputs[0] for output in outputs]
    answers = [(c.token_ids, [next(iter(p.values())).logprob for p in c.logprobs or []]) for c in first]
    error = ""
    try:
        llm.generate("x" * (3 + int(os.environ["RANK"])), use_tqdm=False)
    except EngineDeadError as e:
        error = str(e)
    # A file of its own: lines of several processes on one stream may mix.
    rank = os.environ["RANK"]
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"rank": int(rank), "answers": answers, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
