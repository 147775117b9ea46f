"""The whole of a GPU's step but the GPU: Triton's kernels, replayed decode steps, sampling there, two steps in flight.

Under Triton's interpreter, with a fake in the place of CUDA graphs; on a GPU, with real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.config.engine_config import make_config
from octavo.core.plan import NewSequence, StepPlan, StepResult, TableChange
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardOutput
from octavo.kernels.triton.backend import GraphedForward, TritonKernels
from octavo.models.config_files import read_model_config
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.model_runner import ModelRunner, QueuedStep

BLOCK = 16
PARAMS = [
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=20, logprobs=1),
]


def make(folder: Path, kernels: str, device: str) -> ModelRunner:
    config = make_config(
        model=str(folder),
        kernels=kernels,
        device=device,
        block_size=BLOCK,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_threads=1,
    )
    return ModelRunner(LoadedModel(config, read_model_config(folder), folder, "float32"), [24], [4], 64)


def plans() -> list[dict[str, Any]]:
    """Three sequences in batches of three, one and two, a prompt beside decodes, and a row that is used again."""
    new = [NewSequence(i, [5 + i, 30, 9 * i][: 1 + i] * 7, 7 * (1 + i), 0, Generate(PARAMS[i], i)) for i in range(3)]
    tables = [TableChange(i, 0, list(range(3 * i, 3 * i + 3))) for i in range(3)]
    last = NewSequence(7, [1, 2, 3], 3, 0, Generate(PARAMS[1], 5))
    return [
        {"new": new[:2], "table_changes": tables[:2], "seq_ids": [0, 1], "num_tokens": [7, 14]},
        {"new": new[2:], "table_changes": tables[2:], "seq_ids": [1, 0, 2], "num_tokens": [1, 1, 21]},
        {"seq_ids": [0, 1, 2], "num_tokens": [1, 1, 1]},
        {"seq_ids": [2, 0, 1], "num_tokens": [1, 1, 1]},
        {"seq_ids": [1], "num_tokens": [1]},
        {
            "forget": [0],
            "new": [last],
            "table_changes": [TableChange(7, 0, [20])],
            "seq_ids": [2, 7],
            "num_tokens": [1, 3],
        },
        {"seq_ids": [7, 2], "num_tokens": [1, 1]},
    ]


def run(runner: ModelRunner, depth: int) -> list[StepResult]:
    results: list[StepResult] = []
    flying: deque[QueuedStep] = deque()
    for i, plan in enumerate(plans()):
        if len(flying) == depth:
            results.append(flying.popleft().wait())
        flying.append(runner.submit(StepPlan(step=i, **plan)))
    return results + [step.wait() for step in flying]


def record(execute: Callable[[], ForwardOutput]) -> tuple[Callable[[], None], ForwardOutput]:
    """A graph as far as a CPU has one: the same inputs and outputs each time."""
    output = execute()

    def replay() -> None:
        for buffer, value in zip(output, execute(), strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)

    return replay, output


def capture(self: TritonKernels, forward: Forward, largest: BatchSize) -> Forward:
    return GraphedForward(forward, record, largest, self)


def assert_same(found: list[StepResult], expected: list[StepResult]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.seq_ids, ours.token_ids) == (theirs.seq_ids, theirs.token_ids)
        assert ours.extras.keys() == theirs.extras.keys()
        for seq_id, extra in ours.extras.items():
            [mine], [other] = extra.logprobs, theirs.extras[seq_id].logprobs
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert mine.top_ids == other.top_ids


@pytest.mark.slow
def test_interpreted(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU here")
    monkeypatch.setattr(TritonKernels, "capture", capture)
    runner = make(network, "triton", "cpu")
    assert_same(run(runner, 2), run(make(network, "reference", "cpu"), 1))
    graphs = runner._forward
    assert isinstance(graphs, GraphedForward)
    assert sorted(size for size, _ in graphs._graphs) == [1, 2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2])
def test_on_a_gpu(network: Path, depth: int) -> None:
    results = run(make(network, "triton", "cuda"), depth)
    assert_same(results, run(make(network, "reference", "cpu"), 1))
    assert all(0.0 < result.device_seconds <= result.seconds for result in results)
    assert results[0].idle_seconds == 0.0
