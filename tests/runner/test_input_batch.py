"""Rows of sequences: what a fork copies, and how block tables and last tokens change."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.core.plan import NewSequence, StepPlan, TableChange
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.runner.input_batch import InputBatch, StepInputs

GREEDY = Generate(SamplingParams(temperature=0.0), 0)


def make(num_computed: int = 0) -> InputBatch:
    """A sequence 7 of five tokens, in blocks of two."""
    batch = InputBatch(max_num_seqs=3, max_model_len=8, block_size=2)
    batch.add(NewSequence(7, [10, 11, 12, 13, 14], 4, num_computed, GREEDY))
    batch.change_table(TableChange(7, 0, [20, 21, 22]))
    return batch


def table(batch: InputBatch, seq_id: int) -> list[int]:
    row: list[int] = batch.block_tables[0, batch.row(seq_id)].tolist()
    return row


def test_a_fork_is_a_copy_and_goes_its_own_way() -> None:
    batch = make(num_computed=4)
    row = batch.fork(7, 9)
    assert row == batch.row(9) != batch.row(7)
    batch.tokens.num_tokens[row] -= 1
    batch.append(9, [15])
    batch.change_table(TableChange(9, 2, [30]))
    inputs = batch.build(StepPlan(step=1, seq_ids=[9, 7], num_tokens=[1, 1]))
    assert inputs.arrays["token_ids"].tolist() == [15, 14]
    assert inputs.arrays["slot_mapping"][0].tolist() == [60, 44]
    assert inputs.arrays["seq_lens"].tolist() == [5, 5]
    assert (table(batch, 7), table(batch, 9)) == ([20, 21, 22, 0], [20, 21, 30, 0])
    assert batch.tokens.num_prompt[row] == 4


def test_tables_grow_and_are_written_in_place() -> None:
    batch = make()
    batch.change_table(TableChange(7, 1, [31]))
    assert table(batch, 7) == [20, 31, 22, 0]
    batch.change_table(TableChange(7, 2, [32, 33]))
    assert table(batch, 7) == [20, 31, 32, 33]
    batch.change_table(TableChange(7, 0, []))
    assert table(batch, 7) == [20, 31, 32, 33]


def test_a_row_that_was_given_back_is_handed_out_again() -> None:
    batch = make()
    batch.fork(7, 8)
    row = batch.forget(7)
    assert row is not None
    assert batch.forget(7) is None
    assert batch.add(NewSequence(9, [1], 1, 0, GREEDY)) == row
    assert table(batch, 8)[:3] == [20, 21, 22]


# --- a step that repeats the last one -------------------------------------------------------------------------------

BLOCK = 4


class Decoding:
    """Sequences by id, each with its tokens and its blocks, beside the batch that holds them."""

    def __init__(self) -> None:
        self.batch = InputBatch(max_num_seqs=4, max_model_len=40, block_size=BLOCK)
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.steps = 0

    def add(self, seq_id: int, known: int) -> None:
        self.tokens[seq_id] = [100 * seq_id + i for i in range(known)]
        self.blocks[seq_id] = [20 * seq_id + i for i in range(known // BLOCK + 1)]
        tokens = list(self.tokens[seq_id])
        self.batch.add(NewSequence(seq_id, tokens, known, known - 1, GREEDY))
        self.batch.change_table(TableChange(seq_id, 0, list(self.blocks[seq_id])))

    def build(self, *seq_ids: int) -> StepInputs:
        """Every one's last token, with what the inputs must be worked out from the lists; nothing is advanced."""
        for seq_id in seq_ids:
            if len(self.tokens[seq_id]) > BLOCK * len(self.blocks[seq_id]):
                self.replace_block(seq_id, len(self.blocks[seq_id]), 500 + self.steps)
        self.steps += 1
        inputs = self.batch.build(StepPlan(step=self.steps, seq_ids=list(seq_ids), num_tokens=[1] * len(seq_ids)))
        positions = [len(self.tokens[s]) - 1 for s in seq_ids]
        blocks = [self.blocks[s][p // BLOCK] for s, p in zip(seq_ids, positions, strict=True)]
        assert inputs.arrays["token_ids"].tolist() == [self.tokens[s][-1] for s in seq_ids]
        assert inputs.arrays["positions"].tolist() == inputs.starts.tolist() == positions
        assert inputs.arrays["seq_lens"].tolist() == inputs.ends.tolist() == [p + 1 for p in positions]
        assert inputs.arrays["slot_mapping"][0].tolist() == [
            b * BLOCK + p % BLOCK for b, p in zip(blocks, positions, strict=True)
        ]
        assert inputs.max_seq_len == max(positions) + 1
        assert inputs.arrays["block_tables"].shape[2] == max(positions) // BLOCK + 1
        for row, seq_id in zip(inputs.arrays["block_tables"][0].tolist(), seq_ids, strict=True):
            held = self.blocks[seq_id][: len(row)]
            assert row[: len(held)] == held
        assert inputs.arrays["query_start_loc"].tolist() == list(range(len(seq_ids) + 1))
        assert inputs.sampling.tolist() == list(range(len(seq_ids)))
        assert inputs.num_decodes == len(seq_ids) and inputs.all_sampled
        return inputs

    def step(self, *seq_ids: int) -> StepInputs:
        inputs = self.build(*seq_ids)
        new = self.batch.advance(inputs, inputs.rows)
        sampled = [1000 + self.steps * 10 + i for i in range(len(seq_ids))]
        self.batch.fill(new, np.array(sampled))
        for seq_id, token in zip(seq_ids, sampled, strict=True):
            self.tokens[seq_id].append(token)
        return inputs

    def replace_block(self, seq_id: int, index: int, block: int) -> None:
        self.blocks[seq_id][index : index + 1] = [block]
        self.batch.change_table(TableChange(seq_id, index, [block]))

    def fork(self, parent: int, child: int) -> None:
        self.batch.fork(parent, child)
        self.tokens[child], self.blocks[child] = list(self.tokens[parent]), list(self.blocks[parent])

    def forget(self, seq_id: int) -> None:
        self.batch.forget(seq_id)
        del self.tokens[seq_id], self.blocks[seq_id]


def test_decodes_of_the_same_sequences_reuse_the_arrays_inside_a_block() -> None:
    decoding = Decoding()
    decoding.add(1, 5)
    decoding.add(2, 9)
    first = decoding.step(1, 2)
    for _ in range(3):
        assert decoding.step(1, 2) is first
    assert decoding.step(1, 2) is not first
    decoding.add(3, 8)
    assert decoding.step(3) is not decoding.step(3)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_changes_between_two_steps_the_inputs_are_those_of_the_sequences(seed: int) -> None:
    rng = random.Random(seed)
    decoding = Decoding()
    for seq_id in (1, 2, 3):
        decoding.add(seq_id, rng.randrange(1, 9))
    for _ in range(60):
        event = rng.randrange(9)
        held = list(decoding.tokens)
        if event == 0:
            decoding.build(*held)  # a step that fails after its inputs were built: nothing was computed
        elif event == 1:
            seq_id = rng.choice(held)
            decoding.replace_block(seq_id, len(decoding.blocks[seq_id]) - 1, 300 + decoding.steps)
        elif event == 2:
            seq_id = rng.choice(held)
            decoding.tokens[seq_id][-1] = 7
            decoding.batch.tokens.num_tokens[decoding.batch.row(seq_id)] -= 1
            decoding.batch.append(seq_id, [7])
        elif event == 3:
            decoding.step(rng.choice(held))
        elif event == 4:
            rng.shuffle(held)
        elif event == 6:  # comes back as a copy of another, with no table of its own
            child, parent = rng.sample(held, 2)
            decoding.forget(child)
            decoding.fork(parent, child)
        for seq_id in held if event == 5 else []:  # preempted and resumed, with the same id and maybe another row
            known = len(decoding.tokens[seq_id])
            decoding.forget(seq_id)
            if known > 25:
                known = rng.randrange(1, 9)
            decoding.add(seq_id, known)
        for seq_id in held:
            if len(decoding.tokens[seq_id]) > 35:
                decoding.forget(seq_id)
                decoding.add(seq_id, rng.randrange(1, 9))
        decoding.step(*held)


def test_a_token_is_not_given_to_the_next_sequence_of_its_row() -> None:
    batch = make(num_computed=4)
    batch.add(NewSequence(8, [1, 2], 2, 1, GREEDY))
    batch.change_table(TableChange(8, 0, [30]))
    inputs = batch.build(StepPlan(step=1, seq_ids=[7, 8], num_tokens=[1, 1]))
    new = batch.advance(inputs, inputs.rows)
    row = batch.forget(7)
    assert batch.add(NewSequence(9, [5, 6, 7, 8, 9, 10], 6, 0, GREEDY)) == row
    assert batch.holds(new).tolist() == [False, True]
    batch.fill(new, np.array([60, 61]))
    assert batch.tokens.ids[row, :6].tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.tokens.ids[batch.row(8), :3].tolist() == [1, 2, 61]


def test_a_token_past_the_longest_sequence_changes_no_other() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=4, block_size=2)
    batch.add(NewSequence(1, [1, 2, 3, 4], 4, 3, GREEDY))
    batch.add(NewSequence(2, [5, 6, 7], 3, 2, GREEDY))
    for seq_id in (1, 2):
        batch.change_table(TableChange(seq_id, 0, [seq_id, seq_id + 5]))
    inputs = batch.build(StepPlan(step=1, seq_ids=[1, 2], num_tokens=[1, 1]))
    batch.fill(batch.advance(inputs, inputs.rows), np.array([8, 9]))
    assert batch.tokens.ids[batch.row(1), :4].tolist() == [1, 2, 3, 4]
    assert batch.tokens.ids[batch.row(2), :4].tolist() == [5, 6, 7, 9]
