"""Requests that kill their engine core: ``Blame`` finds them by the notes of the ``FlightRecorder``, and they end."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import AsyncLLM, RequestOutput, SamplingParams
from octavo.core.sampling_params import RequestOutputKind
from octavo.engine.blame import Blame, FlightRecorder, read_recorder, recorder_memory
from tests.engine.deadly_policy import DEADLY
from tests.engine.test_restarts import run, stream
from tests.whole_outputs import everything

LONG = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)


@dataclass
class _Open:
    """What ``Blame`` reads of an open request."""

    group_id: int
    num_generated: int = 0
    is_begun: bool = True


Open: Any = _Open


# --- by itself --------------------------------------------------------------------------------------------------------


def test_one_of_many_is_found_with_the_third_death() -> None:
    blame, requests = Blame(), [Open(i, 10 * i) for i in range(17)]
    everybody = {request.group_id for request in requests}
    assert blame.observe_death(set(everybody), requests) is None
    assert not any(map(blame.alone, requests))
    assert blame.observe_death(set(everybody), requests, 1) is None
    assert all(map(blame.alone, requests))
    assert blame.observe_death({5}, requests) == (5, [0, 1, 0])


def test_one_that_nothing_is_computed_beside_is_found_with_the_second_death() -> None:
    blame, requests = Blame(), [Open(1, 7), Open(2, 9)]
    assert blame.observe_death({1, 99}, requests) is None
    requests[0].num_generated += 2  # more of what it had got was reported this time
    assert blame.observe_death({1}, requests) == (1, [0, 0])


def test_one_that_was_not_begun_is_a_suspect() -> None:
    blame, requests = Blame(), [Open(1, 7), Open(2, is_begun=False)]
    for _ in range(2):
        assert blame.observe_death({1}, [requests[1]]) is None
    assert blame.alone(requests[1])
    assert not blame.alone(requests[0])


def test_what_goes_on_is_acquitted() -> None:
    blame, requests = Blame(), [Open(1), Open(2)]
    for _ in range(6):
        assert blame.observe_death({1, 2}, requests) is None
        for request in requests:
            request.num_generated += 20
        assert not any(map(blame.alone, requests))
    blame.forget(1)
    assert blame.observe_death({1}, requests) is None


# --- in processes -----------------------------------------------------------------------------------------------------


async def poisoned(llm: AsyncLLM, name: str, user: str) -> RequestOutput:
    params = SamplingParams(max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = [output async for output in await llm.submit(name, "poison", params, user=user)]
    return output


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"async_scheduling": True}, marks=pytest.mark.slow)], ids=["one step", "two steps"]
)
@pytest.mark.parametrize("place", [pytest.param(p, marks=[] if p == "step" else pytest.mark.slow) for p in DEADLY])
def test_a_request_that_ends_its_core_each_time_ends(place: str, options: dict[str, Any], tiny_model: Path) -> None:
    """Twice, as clients try again; the cores that it has cost do not count against ``engine_restarts``."""

    async def scenario(llm: AsyncLLM) -> None:
        right = [everything(await stream(llm, f"r{i}", f"stream {i}", LONG)) for i in range(16)]
        streams = [asyncio.ensure_future(stream(llm, f"s{i}", f"stream {i}", LONG)) for i in range(16)]
        for attempt in range(2):
            output = await poisoned(llm, f"p{attempt}", place)
            assert output.outputs[0].finish_reason == "error" and output.outputs[0].error
        assert [everything(output) for output in await asyncio.gather(*streams)] == right
        assert not llm.died.is_set()

    policy = "tests.engine.deadly_policy:Deadly"
    run(tiny_model, scenario, engine_restarts=3, scheduling_policy=policy, **options)


# --- the recorder -----------------------------------------------------------------------------------------------------


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
