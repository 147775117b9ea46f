"""A feature of rows needs a class and a line: a worker with a feature that no module of the engine knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.plan import Fork, NewSequence, StepPlan, StepResult, TableChange
from octavo.kernels.forward_batch import ForwardBatch, ForwardOutput
from octavo.runner.input_batch import FlatInputs, Int64Array, StepInputs
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.model_runner import QueuedStep
from octavo.runner.row_feature import RowFeature
from tests.runner.plan_worker import PROMPT, Worker, greedy, introduce


class TokenCounts(RowFeature):
    """Counts the computed tokens of each sequence, as a network with a state for each row would update it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        #: By row; and of ids without a row, the blocks that they got.
        self.counts: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def begin(self, plan: StepPlan) -> None:
        self.calls.append("begin")

    def add(self, sequence: NewSequence, row: int) -> None:
        if sequence.token_ids[0] == 63:
            raise ValueError("no count begins with 63")
        self.calls.append("add")
        self.counts[row] = sequence.num_computed

    def fork(self, parent: int, row: int) -> None:
        self.calls.append("fork")
        self.counts[row] = self.counts[parent]

    def forget(self, seq_id: int, row: int) -> None:
        self.calls.append("forget")
        del self.counts[row]

    def change_table(self, change: TableChange) -> bool:
        if change.seq_id < 1000:
            return False
        self.blocks[change.seq_id] = change.blocks
        return True

    def change_plan(self, plan: StepPlan, result: StepResult) -> StepPlan:
        self.calls.append("change_plan")
        return plan

    def add_arrays(self, inputs: FlatInputs, rows: Int64Array, starts: Int64Array) -> None:
        self.calls.append("add_arrays")
        assert starts.tolist() == [self.counts[row] for row in rows.tolist()]

    def before_step(self, inputs: StepInputs) -> None:
        self.calls.append("before_step")

    def after_step(self, inputs: StepInputs, batch: ForwardBatch, output: ForwardOutput, step: QueuedStep) -> None:
        self.calls.append("after_step")
        assert len(output.hidden) == sum(inputs.ends - inputs.starts)
        for seq_id, row, end in zip(inputs.seq_ids, inputs.rows.tolist(), inputs.ends.tolist(), strict=True):
            self.counts[row] = end
            step.on_wait.append(lambda seq_id=seq_id, end=end: self._report(step, seq_id, end))  # type: ignore[misc]

    def _report(self, step: QueuedStep, seq_id: int, end: int) -> None:
        step.extra(seq_id).pooled = b"%d" % end

    def release(self) -> None:
        self.calls.append("release")

    def capture(self) -> None:
        self.calls.append("capture")

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> TokenCounts:
    feature, make = TokenCounts(), LoadedModel.make_features
    monkeypatch.setattr(LoadedModel, "make_features", lambda loaded, longest: [*make(loaded, longest), feature])
    return feature


def test_a_feature_follows_rows_and_steps(network: Path, counts: TokenCounts) -> None:
    worker = Worker(network, kernels="reference")
    assert counts.taken() == ["capture"]
    table = TableChange(1, 0, [0, 1, 2, 3])
    step = ["begin", "add", "change_plan", "add_arrays", "before_step", "after_step"]
    first = worker.step(new=[introduce(1, PROMPT, greedy())], table_changes=[table], seq_ids=[1], num_tokens=[10])
    assert counts.taken() == step
    assert first.extras[1].pooled == b"10"
    child = TableChange(2, 2, [4, 5])
    changes = [child, TableChange(1000, 0, [7])]
    forked = worker.step(
        forks=[Fork(1, 2, 0)], blocks_to_copy=[(2, 4)], table_changes=changes, seq_ids=[1, 2], num_tokens=[1, 1]
    )
    assert counts.taken() == ["begin", "fork", "change_plan", "add_arrays", "before_step", "after_step"]
    assert {seq_id: extra.pooled for seq_id, extra in forked.extras.items()} == {1: b"11", 2: b"11"}
    assert counts.blocks == {1000: [7]}
    worker.step(seq_ids=[1, 2], num_tokens=[1, 1])
    assert counts.taken() == ["begin", "change_plan", "before_step", "after_step"], "the step repeats the last one"
    worker.step(forget=[1, 2])
    assert counts.taken() == ["begin", "forget", "forget", "change_plan"]
    assert not counts.counts


def test_a_feature_sleeps_and_wakes_with_the_worker(network: Path, counts: TokenCounts) -> None:
    worker = Worker(network, kernels="reference")
    counts.taken()
    worker.runner.sleep(1)
    assert counts.taken() == ["release"]
    assert worker.runner.wake_up()
    assert counts.taken() == ["capture"]


def test_a_sequence_that_a_feature_refuses_fails_alone(network: Path, counts: TokenCounts) -> None:
    worker = Worker(network, kernels="reference")
    with pytest.raises(Exception, match="no count begins with 63") as error:
        worker.step(new=[introduce(3, [63, 1], greedy())])
    assert getattr(error.value, "seq_id", None) == 3


def test_blocks_of_an_id_that_nobody_has_are_an_error(network: Path) -> None:
    worker = Worker(network, kernels="reference")
    with pytest.raises(KeyError, match="1000"):
        worker.step(table_changes=[TableChange(1000, 0, [7])])
