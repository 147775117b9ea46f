"""Requests that say what later ones share: found again, until the time comes, at the cost of nobody's place."""

from __future__ import annotations

import msgspec
import pytest

from octavo.config.kv_spec import GroupBlocks
from octavo.config.options import SchedulerOptions
from octavo.core.cache_hints import Breakpoint, CacheHints
from octavo.core.request import EngineCoreRequest, RequestOptions
from octavo.memory.block_manager import BlockManager
from tests.scheduler.builders import BLOCK, finish, make, request
from tests.scheduler.fake_worker import Engine


def hinted(group_id: int, prompt: int | list[int], hints: CacheHints, client: str = "a") -> EngineCoreRequest:
    options = RequestOptions(cache_hints=hints, client=client)
    return msgspec.structs.replace(request(group_id, prompt, 2), options=options)


def cached(engine: Engine, asked: EngineCoreRequest) -> int:
    """Runs a request alone; returns its tokens that were found."""
    answer = engine.add(asked)
    finish(engine)
    return answer.group.totals.num_cached_tokens


def flood(engine: Engine, start: int = 1000) -> None:
    for i in range(20):
        engine.add(request(start + i, 5 * BLOCK, 2, arrival=engine.now))
        finish(engine)


def test_a_marked_prefix_is_found_until_its_time_comes() -> None:
    engine = make(32, prefix_caching=True)
    system = [7] * (4 * BLOCK + 3)
    marked = CacheHints((Breakpoint(len(system), 300.0),))
    first = hinted(1, [*system, *range(9)], marked)
    assert cached(engine, first) == 0
    assert engine.answers[1].group.totals.num_held_tokens == 4 * BLOCK
    for now, group_id, found in ((200.0, 2, True), (450.0, 3, True), (751.0, 4, False)):
        engine.now = now
        flood(engine, 1000 * group_id)
        # Use renews the time.
        assert (cached(engine, hinted(group_id, [*system, 90 + group_id, 5], marked)) >= 4 * BLOCK) == found


@pytest.mark.parametrize("depth", [1, 2])
def test_hints_make_no_request_wait(depth: int) -> None:
    """Prompts without anything in common begin in the same steps or earlier, whatever they ask to hold.

    Earlier, as a preempted one may find what it holds itself.
    """
    begins = []
    for asks in (False, True):
        engine = make(40, prefix_caching=True, depth=depth)
        engine.blocks.retention._limit = engine.blocks.retention._client_limit = 40
        for i in range(30):
            hints = CacheHints(ttl=1e6, key="" if i % 3 else "k")
            asked = request(i, 3 * BLOCK + i, 20)
            if asks:
                asked = msgspec.structs.replace(asked, options=RequestOptions(cache_hints=hints, client=str(i % 4)))
            engine.add(asked)
            engine.step()
        finish(engine)
        computed = [engine.computed(plan) for plan in engine.plans]
        begins.append({i: next(n for n, plan in enumerate(computed) if i in plan) for i in range(30)})
        stats = engine.scheduler.stats()
        assert (stats.retention is not None and stats.retention.held_blocks > 20) == asks
    assert all(begins[1][i] <= begins[0][i] for i in range(30))


def test_the_state_at_a_mark_is_kept_although_no_other_prompt_has_left_there() -> None:
    sizes = [GroupBlocks(80), GroupBlocks(40, window=2, state_tokens=16 * BLOCK)]
    found = []
    for hints in (CacheHints(), CacheHints((Breakpoint(2 * BLOCK + 1, 300.0),))):
        blocks = BlockManager(sizes, BLOCK, prefix_caching=True, max_num_batched_tokens=64)
        options = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64)
        engine = Engine(blocks, options, 40 * BLOCK)
        system = [7] * (2 * BLOCK + 1)
        cached(engine, hinted(1, [*system, *range(20)], hints))
        found.append(cached(engine, hinted(2, [*system, *range(50, 70)], hints)))
    assert found == [0, 2 * BLOCK + 1]
