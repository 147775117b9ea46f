"""Rows of sequences: what a fork copies, and how block tables and last tokens change."""

from __future__ import annotations

from octavo.core.plan import NewSequence, StepPlan, TableChange
from octavo.core.sampling_params import SamplingParams
from octavo.runner.input_batch import InputBatch


def make(num_computed: int = 0) -> InputBatch:
    """A sequence 7 of five tokens, in blocks of two."""
    batch = InputBatch(max_num_seqs=3, max_model_len=8, block_size=2)
    batch.add(NewSequence(7, [10, 11, 12, 13, 14], 4, num_computed, SamplingParams(), 0, [], []))
    batch.change_table(TableChange(7, 0, [20, 21, 22]))
    return batch


def table(batch: InputBatch, seq_id: int) -> list[int]:
    row = batch.row(seq_id)
    return batch.block_tables[row, : batch.num_blocks[row]].tolist()


def test_a_fork_is_a_copy_and_goes_its_own_way() -> None:
    batch = make(num_computed=4)
    row = batch.fork(7, 9)
    assert row == batch.row(9) != batch.row(7)
    assert batch.num_rows == 2
    batch.set_last_token(9, 15)
    batch.change_table(TableChange(9, 2, [30]))
    inputs = batch.build(StepPlan(step=1, seq_ids=[9, 7], num_tokens=[1, 1]))
    assert inputs.token_ids.tolist() == [15, 14]
    assert inputs.slots.tolist() == [60, 44]
    assert inputs.seq_lens.tolist() == [5, 5]
    assert (table(batch, 7), table(batch, 9)) == ([20, 21, 22], [20, 21, 30])
    assert batch.tokens.num_prompt[row] == 4


def test_tables_grow_and_are_written_in_place() -> None:
    batch = make()
    batch.change_table(TableChange(7, 1, [31]))
    assert table(batch, 7) == [20, 31, 22]
    batch.change_table(TableChange(7, 2, [32, 33]))
    assert table(batch, 7) == [20, 31, 32, 33]
    batch.change_table(TableChange(7, 0, []))
    assert table(batch, 7) == [20, 31, 32, 33]


def test_a_row_that_was_given_back_starts_with_an_empty_table() -> None:
    batch = make()
    batch.fork(7, 8)
    assert batch.forget(7) is not None
    assert batch.forget(7) is None
    batch.add(NewSequence(9, [1], 1, 0, SamplingParams(), 0, [], []))
    assert table(batch, 9) == []
    assert table(batch, 8) == [20, 21, 22]
