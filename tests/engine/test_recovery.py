"""An offline engine whose workers are lost: others take their place, and the answers are as without it."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import LLM, LoRARequest, SamplingParams
from octavo.core.errors import EngineDeadError
from tests.adapters import write_adapter
from tests.embedding_models import make_encoder
from tests.engine.test_resumption import PARAMS, PROMPTS
from tests.engine_state import workers_of
from tests.whole_outputs import everything

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 4, "num_gpu_blocks_override": 200}


class Killer:
    """A stat logger that ends or stops the last worker after some steps, counted over all cores."""

    def __init__(self, *steps: int, signal: int = signal.SIGKILL) -> None:
        self._steps, self._signal, self._count = set(steps), signal, itertools.count(1)
        self.llm: LLM | None = None
        #: All workers that there were when one was lost.
        self.lost: list[psutil.Process] = []

    def log(self, stats: Any) -> None:
        if self.llm is not None and next(self._count) in self._steps:
            workers = workers_of(self.llm)
            os.kill(workers[-1].pid, self._signal)
            self.lost += workers


def connections() -> list[str]:
    """Of this process: sockets and shared memory, by their kinds."""
    names = (os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())
    return sorted(name.partition(":")[0] for name in names if name.startswith(("socket:", "/memfd:")))


def make(model: Path, killer: Killer | None = None, **options: Any) -> LLM:
    llm = LLM(str(model), **{**OPTIONS, **options}, stat_loggers=[killer] if killer else [])
    if killer is not None:
        killer.llm = llm
    return llm


def answers(llm: LLM) -> list[Any]:
    return [everything(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[Any]:
    """The answers of one process."""
    return answers(make(tiny_model))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"tensor_parallel_size": 2}, (6, 9)),
        pytest.param({"pipeline_parallel_size": 2}, (14,), marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, (5, 30, 31), marks=pytest.mark.slow),
    ],
    ids=["tensor parallel", "pipeline", "both"],
)
def test_answers_go_on_when_a_worker_was_killed(
    options: dict[str, Any], steps: tuple[int, ...], tiny_model: Path, undisturbed: list[Any], caplog: Any
) -> None:
    killer = Killer(*steps)
    llm = make(tiny_model, killer, **options)
    descriptors = connections()
    assert answers(llm) == undisturbed
    assert len(killer.lost) == len(steps) * len(workers_of(llm))
    assert not any(process.is_running() for process in killer.lost)
    restarts = [record.getMessage() for record in caplog.records if "started again" in record.getMessage()]
    assert len(restarts) == len(steps) and all("SIGKILL" in message for message in restarts)
    stats = llm.stats()
    assert (stats.blocks_used, stats.num_running) == (0, 0)
    assert stats.decode_tokens > sum(len(ids) for completions, _ in undisturbed for ids, *_ in completions) // 2
    assert connections() == descriptors
    workers = workers_of(llm)
    llm.core.shutdown()
    assert not any(process.is_running() for process in workers)


@pytest.mark.slow
def test_answers_go_on_when_a_worker_hangs(tiny_model: Path, undisturbed: list[Any]) -> None:
    llm = make(tiny_model, Killer(9, signal=signal.SIGSTOP), tensor_parallel_size=2, step_timeout=2.0)
    assert answers(llm) == undisturbed


def test_what_was_pinned_is_there_again(tiny_model: Path, tmp_path: Path) -> None:
    """Workers that are lost while nothing is computed are missed with the next request."""
    lora = LoRARequest("poet", 1, str(write_adapter(tmp_path, tiny_model)))
    killer = Killer(2)
    llm = make(tiny_model, killer, tensor_parallel_size=2, enable_lora=True, max_loras=2)
    prefix = "the quick brown fox "
    llm.add_shared_prefix(prefix, "fox")
    assert llm.shared_prefixes()[0].name == "fox"
    pinned = llm.stats().blocks_pinned
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
    llm.add_lora(lora)
    llm.pin_lora(1)

    def ask() -> list[Any]:
        outputs = llm.generate([prefix + "a", prefix + "b"], params, lora_request=[lora, None], use_tqdm=False)
        return [everything(output) for output in outputs]

    first = ask()
    assert killer.lost
    os.kill(workers_of(llm)[0].pid, signal.SIGKILL)
    assert ask() == first
    assert llm.stats().blocks_pinned == pinned > 0
    output = llm.generate(prefix + "d", params, use_tqdm=False)[0]
    assert output.metrics is not None and output.metrics.num_cached_tokens >= len(prefix) // 4 * 4
    assert list(llm.list_loras()) == [1]


@pytest.mark.slow
def test_vectors_are_those_of_one_process(tmp_path: Path) -> None:
    model = make_encoder(tmp_path)
    options: dict[str, Any] = {"num_gpu_blocks_override": None, "max_num_batched_tokens": 8}
    texts = [f"a river and {i} boats" for i in range(12)]
    killer = Killer(3)
    vectors = [
        [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
        for llm in (make(model, **options), make(model, killer, tensor_parallel_size=2, **options))
    ]
    assert killer.lost
    assert vectors[0] == vectors[1]


@pytest.mark.slow
def test_after_so_many_losses_the_error_is_raised(tiny_model: Path) -> None:
    killer = Killer(4, 6)
    llm = make(tiny_model, killer, tensor_parallel_size=2, engine_restarts=1)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            answers(llm)
    assert not any(process.is_running() for process in killer.lost)
    llm.core.shutdown()
    with pytest.raises(EngineDeadError):
        answers(llm)


@pytest.mark.slow
def test_an_answer_does_not_go_on_with_another_model(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    llm = make(tmp_path, Killer(4), tensor_parallel_size=2)
    os.utime(tmp_path / "model.safetensors", (1, 1))
    with pytest.raises(EngineDeadError, match="the model's files were changed"):
        answers(llm)
