"""What a flight recorder says of the last steps, for whatever follows whatever."""

from __future__ import annotations

import os
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.blame import FlightRecorder, read_recorder, recorder_memory

#: Two sequences of each group.
_STEPS = st.lists(st.sampled_from([[0, 1, 2], [2, 1, 0], [2, 3], [4], [0, 1, 2, 3, 4, 5]]), max_size=12)


@given(steps=_STEPS, in_flight=st.integers(1, 3))
def test_memory_names_the_groups_of_the_last_steps(steps: list[list[int]], in_flight: int) -> None:
    memory = recorder_memory()
    recorder = FlightRecorder(os.dup(memory), in_flight)
    expected = deque[set[int]](maxlen=in_flight)
    try:
        assert read_recorder(memory) == set()
        for seq_ids in steps:
            recorder.note(list(seq_ids), lambda seq_id: 100 + seq_id // 2)
            expected.append({100 + seq_id // 2 for seq_id in seq_ids})
            assert read_recorder(memory) == recorder.groups == set().union(*expected)
    finally:
        os.close(memory)


def test_groups_of_a_repeated_step_are_not_looked_up() -> None:
    memory = recorder_memory()
    recorder = FlightRecorder(os.dup(memory), 2)
    looked_up: list[int] = []

    def group_of(seq_id: int) -> int:
        looked_up.append(seq_id)
        return seq_id

    for _ in range(5):
        recorder.note([7, 8], group_of)
    os.close(memory)
    assert looked_up == [7, 8]


def test_a_group_that_is_being_added_is_noted_until_the_next_step() -> None:
    memory = recorder_memory()
    recorder = FlightRecorder(os.dup(memory), 2)
    recorder.attempt(0)
    assert read_recorder(memory) == recorder.groups == {0}
    recorder.note([7], lambda seq_id: 100)
    recorder.attempt(5)
    assert read_recorder(memory) == recorder.groups == {100, 5}
    recorder.note([7], lambda seq_id: 100)
    assert read_recorder(memory) == recorder.groups == {100}
    recorder.begin_trial(9)
    assert read_recorder(memory) == recorder.groups == {9}
    recorder.note([8], lambda seq_id: 9)
    assert read_recorder(memory) == recorder.groups == {9}
