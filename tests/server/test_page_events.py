"""``/engine/events``: bounded, the same for all, only while somebody listens, and with the counts of /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from octavo.core.stats import BlockState, EngineEvent, EngineView, SchedulerState, StepRecord
from octavo.server import page as engine_events
from octavo.server.http.errors import ApiError
from octavo.server.page import EngineEvents
from tests.busy_machine import PATIENCE, eventually
from tests.server.running_server import Running

Serve = Callable[..., Running]


@contextlib.contextmanager
def events(server: Running) -> Iterator[Iterator[EngineEvent]]:
    with server.http(timeout=PATIENCE) as http, http.stream("GET", "/engine/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")

        def decoded() -> Iterator[EngineEvent]:
            for line in stream.iter_lines():
                if line:
                    yield msgspec.json.decode(line.removeprefix("data: "), type=EngineEvent)

        yield decoded()


@contextlib.contextmanager
def busy(server: Running, body: dict[str, Any]) -> Iterator[list[str]]:
    """Requests run until the end of the block, one after the other, as one is over in a moment; gives their ids."""
    ended, known = threading.Event(), list[str]()

    def ask() -> None:
        with server.http(timeout=PATIENCE) as http:
            while not ended.is_set():
                known.append(http.post("/v1/completions", json=body).json()["id"])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield known
    finally:
        ended.set()
        thread.join()


LONG = {"prompt": "x", "max_tokens": 250, "ignore_eos": True, "n": 2}


def test_a_view_shows_requests_that_run_and_its_counts_are_those_of_the_metrics(serve: Serve) -> None:
    server = serve("--num-gpu-blocks-override", "40")
    with events(server) as stream:
        first = next(stream)
        assert first.whole
        with busy(server, LONG):
            views = (view for event in stream for view in event.views if view.steps)
            view = next(view for view in views if any(group.status == "running" for group in view.groups))
        assert view.groups[0].num_seqs == 2
        assert view.blocks[0].num_blocks == 40 and sum(view.blocks[0].counts) == 40
        server.wait_until_idle()
        steps = server.metric("octavo_step_duration_seconds_count")
        idle = next(view for event in stream for view in event.views if view.state.steps >= steps and not view.groups)
    counts = idle.blocks[0].counts
    for state, number in (
        ("used", counts[BlockState.USED] + counts[BlockState.SHARED]),
        ("cached", counts[BlockState.CACHED]),
        ("free", counts[BlockState.FREE]),
    ):
        assert server.metric("octavo_kv_cache_blocks", state=state) == number


def test_a_running_request_is_called_by_the_id_that_its_client_knows(tiny_server: Running) -> None:
    with events(tiny_server) as stream:
        next(stream)
        with busy(tiny_server, LONG) as known:
            view = next(view for event in stream for view in event.views if view.groups and view.request_ids)
    [group] = view.groups
    assert next(iter(view.request_ids)) == group.group_id and view.request_ids[group.group_id] in known
    assert view.request_ids[group.group_id].startswith("cmpl-")


def test_steps_come_once_each_and_one_who_comes_later_gets_all_that_are_known(serve: Serve) -> None:
    server = serve()
    with events(server) as stream, server.http() as http:
        next(stream)
        numbers: list[int] = []
        for _ in range(3):
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "ignore_eos": True})
            numbers += [
                step.step
                for step in next(event for event in stream if event.views and event.views[0].steps).views[0].steps
            ]
        eventually(lambda: server.metric("octavo_step_duration_seconds_count") > 0)
        while numbers[-1] < server.metric("octavo_step_duration_seconds_count"):
            numbers += [step.step for view in next(stream).views for step in view.steps]
        assert numbers == list(range(1, len(numbers) + 1))
        with events(server) as later:
            whole = next(later)
            assert whole.whole and [step.step for step in whole.views[0].steps] == numbers


def test_there_are_at_most_four_updates_a_second(tiny_server: Running) -> None:
    with events(tiny_server) as stream:
        next(stream)
        with busy(tiny_server, LONG):
            times = [next(stream).time for _ in range(6)]
    assert times[-1] - times[0] >= 5 * engine_events.INTERVAL * 0.9


@pytest.mark.slow
def test_a_killed_core_is_shown_as_one_that_starts_and_the_stream_goes_on(serve: Serve) -> None:
    server = serve()
    with events(server) as stream:
        assert next(event for event in stream if event.views).replicas[0].status == "ready"
        os.kill(server.core_pid(), signal.SIGKILL)
        assert next(event for event in stream if event.replicas[0].status == "starting").views == []
        back = next(event for event in stream if event.views)
        assert back.replicas[0].status == "ready" and back.replicas[0].restarts == 1


def test_an_open_stream_does_not_hold_the_shutdown_up(serve: Serve) -> None:
    server = serve("--shutdown-timeout", "60")
    with events(server) as stream:
        next(event for event in stream if event.views)
        start = time.monotonic()
        ended = threading.Thread(target=lambda: [*stream])
        ended.start()
        assert server.stop() == 0
        assert time.monotonic() - start < 30
        ended.join(PATIENCE)


# --- the watcher ----------------------------------------------------------------------------------------------------


#: Seconds that a timer may be late on a busy machine.
PATIENCE_OF_TIMERS = 2.0


class FakeEngine:
    """Gives views, and counts how often it is asked."""

    def __init__(self, cost: float = 0.0) -> None:
        self.asked: list[bool] = []
        self.cost = cost

    async def engine_views(self, *, fresh: bool) -> list[EngineView]:
        self.asked.append(fresh)
        number = len(self.asked)
        step = StepRecord(number, float(number), *[0] * 15)
        return [EngineView(0, number, 1, 1, SchedulerState(steps=number), [], [], [step], [], 0, 0, self.cost)]

    def replica_states(self) -> list[Any]:
        return []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "INTERVAL", 0.001)


def make(engine: FakeEngine) -> EngineEvents:
    return EngineEvents(engine, list)  # type: ignore[arg-type]


def read(data: bytes) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    return event


@pytest.mark.usefixtures("quick")
def test_the_engine_is_asked_only_while_somebody_listens_and_once_for_all() -> None:
    async def main() -> None:
        engine = FakeEngine()
        events = make(engine)
        await asyncio.sleep(0.02)
        assert engine.asked == []
        streams = [events.listen() for _ in range(3)]
        for stream in streams:
            await anext(stream)
        got = [[read(await anext(stream))["views"][0]["steps"][0][0] for _ in range(4)] for stream in streams]
        assert got[0] == [1, 2, 3, 4] and engine.asked[0] and not any(engine.asked[1:])
        for stream in streams:
            await stream.aclose()
        asked = len(engine.asked)
        await asyncio.sleep(0.02)
        assert len(engine.asked) == asked and events.num_listeners == 0
        again = events.listen()
        await anext(again)
        await anext(again)
        assert engine.asked[asked]  # all that is known, as others may have asked meanwhile
        await again.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_one_who_reads_slowly_gets_everything_anew_and_holds_nobody_up() -> None:
    async def main() -> None:
        engine = FakeEngine()
        events = make(engine)
        slow, fast = events.listen(), events.listen()
        await anext(slow)
        await anext(fast)
        steps = [step[0] for _ in range(40) for step in read(await anext(fast))["views"][0]["steps"]]
        caught_up = read(await anext(slow))
        assert caught_up["whole"]
        assert [step[0] for step in caught_up["views"][0]["steps"]][:40] == steps[:40]
        await slow.aclose()
        await fast.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_a_stream_that_ends_repeats_nothing() -> None:
    async def main() -> None:
        events = make(FakeEngine(cost=1.0))  # one view, and then a long pause
        stream = events.listen()
        while not read(await anext(stream))["views"]:
            pass
        rest = asyncio.ensure_future(anext(stream, b"the end"))
        await asyncio.sleep(0.01)
        await events.close()
        assert await rest == b"the end"

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_views_that_take_long_are_made_less_often() -> None:
    async def main() -> None:
        engine = FakeEngine(cost=0.2 * engine_events.COST_SHARE)
        stream = make(engine).listen()
        start = time.monotonic()
        for _ in range(4):
            await anext(stream)
        assert time.monotonic() - start >= 2 * 0.2
        await stream.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("seconds", [0.0, 0.35])
def test_something_is_sent_every_two_seconds_whatever_a_view_costs(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that costs 50 ms is asked for every 20 seconds; and one may take longer than that to come."""
    monkeypatch.setattr(engine_events, "HEARTBEAT", 0.1)

    class Slow(FakeEngine):
        async def engine_views(self, *, fresh: bool) -> list[EngineView]:
            await asyncio.sleep(seconds)
            return await super().engine_views(fresh=fresh)

    async def main() -> None:
        engine = Slow(cost=0.05)
        stream = make(engine).listen()
        times, sent = [], []
        for _ in range(9):
            sent.append(read(await anext(stream)))
            times.append(time.monotonic())
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(gaps) < 0.1 + PATIENCE_OF_TIMERS and sum(gaps) >= 6 * 0.1
        assert len(engine.asked) == 1 and sum(bool(event["views"]) for event in sent) == 1
        await stream.aclose()

    asyncio.run(main())


@pytest.mark.usefixtures("quick")
def test_one_client_has_not_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "MAX_LISTENERS_PER_CLIENT", 2)

    async def main() -> None:
        events = make(FakeEngine())
        streams = [events.listen(client) for client in ("a", "b", "a", "b", "c")]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError, match="2 of your pages") as error:
            await anext(events.listen("a"))
        assert error.value.status == 429 and events.num_listeners == 5
        await streams[0].aclose()
        again = events.listen("a")
        await anext(again)
        for stream in (*streams, again):
            await stream.aclose()
        assert events.num_listeners == 0

    asyncio.run(main())


def test_a_server_counts_the_streams_of_an_address(tiny_server: Running) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(events(tiny_server)) for _ in range(engine_events.MAX_LISTENERS_PER_CLIENT)]
        for stream in streams:
            next(stream)
        with tiny_server.http() as http:
            with http.stream("GET", "/engine/events") as refused:  # what is not refused does not end
                assert refused.status_code == 429
                refused.read()
            assert refused.json()["error"]["code"] == "too_many_watchers"
            assert http.get("/health").status_code == 200


@pytest.mark.usefixtures("quick")
def test_streams_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_events, "MAX_LISTENERS", 2)

    async def main() -> None:
        events = make(FakeEngine())
        streams = [events.listen() for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError, match="2 pages") as error:
            await anext(events.listen())
        assert error.value.status == 429
        await events.close()
        for stream in streams:
            rest = [data async for data in stream]
            assert len(rest) <= 1
        assert events.num_listeners == 0

    asyncio.run(main())
