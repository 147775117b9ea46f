"""What ranks that plan and sample for themselves find out about each other, beside one process of them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from octavo.config.engine_config import make_config
from octavo.core.errors import EngineDeadError
from octavo.core.plan import StepPlan, StepResult
from octavo.executor import uniproc
from octavo.executor.uniproc import ExternalLauncherExecutor
from octavo.executor.worker import RankCheck, WorkerSpec, find_difference
from octavo.models.config_files import read_model_config

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x"}


class Runner:
    """Samples the tokens that it is given, two in each step."""

    def __init__(self) -> None:
        self.tokens: deque[int] = deque(range(100))

    def submit(self, plan: StepPlan) -> Runner:
        self.step = plan.step
        return self

    def wait(self) -> StepResult:
        return StepResult(self.step, seq_ids=[1, 2], token_ids=[self.tokens.popleft(), self.tokens.popleft()])


class Pair:
    """Two processes of a launcher in one: what each would gather is what both have said so far."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        for name, value in {**PLACE, "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        self.messages: list[int] = []
        self._said: bytes | None = None
        monkeypatch.setattr(uniproc, "_gather_equal", self._gather)
        config = make_config(
            model=str(model), tensor_parallel_size=2, distributed_executor_backend="external_launcher", **options
        )
        spec = WorkerSpec.of(config, read_model_config(model), model, "float32")
        self.ranks = [ExternalLauncherExecutor(config, spec, 0) for _ in range(2)]
        self.runners = [Runner(), Runner()]
        for executor, runner in zip(self.ranks, self.runners, strict=True):
            executor._alive()._runner = runner  # type: ignore[assignment]

    def _gather(self, data: bytes) -> list[bytes]:
        """The second one hears what the first said; the first one, that all is well."""
        if self._said is None:
            self._said = data
            self.messages.append(len(data))
            return [data, data]
        said, self._said = self._said, None
        return [said, data]

    def step(self, first: StepPlan, second: StepPlan) -> None:
        for executor, plan in zip(self.ranks, (first, second), strict=True):
            executor.submit(plan).wait()


@pytest.fixture
def model(tiny_model: Path) -> Path:
    return tiny_model


def test_plans_are_compared_by_default_before_they_are_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(model, monkeypatch)
    pair.step(StepPlan(1, seq_ids=[1]), StepPlan(1, seq_ids=[1]))
    with pytest.raises(EngineDeadError, match=r"the plans of step 2 differ: those of ranks \[1\] are not"):
        pair.step(StepPlan(2, seq_ids=[1]), StepPlan(2, seq_ids=[2]))
    assert len(pair.runners[1].tokens) == 98, "the second step was not computed there"


def test_what_was_sampled_is_compared_with_the_next_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(model, monkeypatch)
    pair.step(StepPlan(1), StepPlan(1))
    pair.runners[1].tokens[0] += 1
    pair.step(StepPlan(2), StepPlan(2))
    with pytest.raises(EngineDeadError, match=r"in step 2 ranks \[1\] have sampled other tokens than rank 0"):
        pair.step(StepPlan(3), StepPlan(3))
    assert pair.messages == [32] * 3, "one message a step, of the same length whatever is compared"


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"check_plans": False}, 0),
        ({"check_plans": False, "check_ranks": 4}, 2),
        ({"check_ranks": 0}, 9),
    ],
)
def test_nothing_is_sent_for_what_is_not_compared(
    options: dict[str, Any], messages: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(model, monkeypatch, **options)
    if options != {"check_plans": False, "check_ranks": 4}:
        pair.runners[1].tokens[0] += 1
    for number in range(1, 10):
        pair.step(StepPlan(number), StepPlan(number))
    assert len(pair.messages) == messages


def test_steps_between_two_comparisons_are_compared_together() -> None:
    ours, theirs = RankCheck(3), RankCheck(3)
    digests = []
    for number in range(1, 7):
        ours.add(StepResult(number, seq_ids=[5], token_ids=[number]))
        theirs.add(StepResult(number, seq_ids=[5], token_ids=[9 if number == 5 else number]))
        digests.append((ours.take(), theirs.take()))
    assert [mine[:2] for mine, _ in digests] == [(0, 0), (0, 0), (1, 3), (0, 0), (0, 0), (4, 6)]
    assert [mine == other for mine, other in digests] == [True] * 5 + [False]
    first, last, digest = digests[-1][0]
    assert find_difference({2: digest, 3: digest}, first, last) is None
    found = find_difference({2: digest, 3: digests[-1][1][2], 4: b""}, first, last)
    assert found is not None and found.startswith("in one of the steps 4 to 6 ranks [3, 4] have sampled other")


def test_drafts_that_were_accepted_apart_are_not_the_same() -> None:
    """The same tokens in all, divided among the sequences in another way."""
    one, other = RankCheck(1), RankCheck(1)
    one.add(StepResult(1, seq_ids=[1, 2], token_ids=[7, 7, 7], num_tokens=[1, 2]))
    other.add(StepResult(1, seq_ids=[1, 2], token_ids=[7, 7, 7], num_tokens=[2, 1]))
    assert one.take() != other.take()
