"""``octavo top``: the engine of a server as text; a server that refuses or does not answer is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console

from octavo.cli.main import main
from octavo.cli.top import StepHistory, render
from octavo.core.stats import (
    AdapterSlot,
    AdapterStats,
    BlockMap,
    BlockRun,
    Change,
    EngineEvent,
    EngineView,
    GroupRow,
    LifeEvent,
    ReplicaRow,
    SchedulerState,
    StepRecord,
    StoreStats,
    StoreTierStats,
)


def event(num_blocks: int = 20, bin_size: int = 0) -> EngineEvent:
    runs = [BlockRun(5, 2, 1, 7, 0, 1), BlockRun(3, 3, 2, 8, 0, 1), BlockRun(num_blocks - 8, 0, 0, -1, 0, 0)]
    blocks = BlockMap(0, False, 16, None, 0, num_blocks, [num_blocks - 8, 0, 5, 3, 0], runs)
    if bin_size:
        blocks.runs, blocks.bin_size, blocks.bins = [], bin_size, [[num_blocks - 8, 0, 5, 3, 0]]
    group = GroupRow(7, "running", 2, 40, 12, 52, 16, 3.5, 0, 0, 1, 4, 8)
    steps = [StepRecord(i, i * 0.1, 0.1, 0.09, 0.08, 0.0, 0, 4, 1, 0, 0, 8, 0, 12, 0, 100, 40) for i in range(1, 30)]
    state = SchedulerState(steps=29, num_running=1, blocks_used=8, blocks_free=num_blocks - 8, preemptions_by_swap=1)
    changes = [Change("copy", 28, -1, [3, 4]), Change("swap", 27, 7, [], 4, 8)]
    view = EngineView(0, 3.0, 512, 64, state, [blocks], [group], steps, changes, 2, 0)
    return EngineEvent(1.0, [ReplicaRow(0, "ready", 1, 0)], [view], [], True)


def test_tiers_of_kv_stores_and_fetches_are_shown() -> None:
    shown = event()
    [view] = shown.views
    disk = StoreTierStats("disk", 10, 7, 5, bytes_read=3 << 20, read_seconds=2.0, held_bytes=2048, max_bytes=4 << 30)
    view.state.stores = StoreStats(tiers=[disk, StoreTierStats("shared", errors=2, trouble="no answer")])
    view.groups.append(GroupRow(9, "waiting", 1, 40, 0, 0, 0, 0.5, 0, 0, 0, 0, None, True))
    view.changes.append(Change("evict", 29, -1, [5], why="ended"))
    lines = text(shown).splitlines()
    assert "disk: 2 KiB of 4.0 GiB held, 7 of 10 blocks found, 5 written, reads 2 MiB/s" in [
        line.rstrip() for line in lines
    ]
    assert any(line.startswith("shared: ") and "does not work: no answer" in line for line in lines)
    assert any(line.lstrip().startswith("9 ") and "fetching its prefix" in line for line in lines)
    assert any("step 29: evict (ended) 5" in line for line in lines)


def text(shown: EngineEvent, width: int = 100) -> str:
    history = StepHistory()
    history.add(shown)
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(shown, history, width))
    return capture.get()


def test_an_event_is_shown_as_text() -> None:
    shown = text(event())
    assert "1 running, 0 waiting, 0 swapped" in shown and "40.0 output tokens/s" in shown
    assert "20 blocks: 12 free, 5 used, 3 shared" in shown and "■■■■■■■■············" in shown
    assert "7 x 2" in shown and "1 swapped (4 blocks), for 8" in shown
    assert "step 28: copy 3 4" in shown and "step 27: swap of request 7" in shown


LONG_ID = "chatcmpl-0123456789abcdef0123456789abcdef"


def named() -> EngineEvent:
    shown = event()
    shown.views[0].request_ids = {7: LONG_ID, 8: "mine"}
    return shown


def test_requests_are_called_by_the_ids_that_clients_know() -> None:
    narrow, wide = text(named(), 120), text(named(), 160)
    assert "chatcmpl-0123…abcdef x 2" in narrow and LONG_ID not in narrow
    assert f"{LONG_ID} x 2" in wide and f"step 27: swap of request {LONG_ID}" in wide
    assert "1 swapped (4 blocks), for mine" in wide


def test_adapters_in_slots_are_named() -> None:
    shown = event()
    shown.views[0].state.adapters = AdapterStats(in_slots=12)
    adapters = [AdapterSlot(0, "0f" * 32, 2, ["sql", "tables"]), AdapterSlot(1, "ab" * 32, 0)]
    shown.views[0].adapters = [*adapters, *(AdapterSlot(i, "", 0, [f"a{i}"]) for i in range(2, 12))]
    words = text(shown, 400)
    assert "adapters: sql = tables (2 running), abababababab (0 running), a2 (0 running)" in words
    assert "a7 (0 running) and 4 more" in words


def test_each_request_has_its_life_so_far() -> None:
    history, console = StepHistory(), Console(width=140, force_terminal=False)

    def seen(status: Any, computed: int, output: int, lives: Sequence[LifeEvent] = (), **more: Any) -> EngineEvent:
        shown = event()
        [view] = shown.views
        row = GroupRow(7, status, 1, 40, output, computed, 0, 1.0, int(status == "waiting"), 0, 0, 0, None, **more)
        view.groups, view.lives = [row], [*lives]
        history.add(shown)
        return shown

    seen("running", 20, 0)
    seen("running", 44, 5)
    seen("running", 45, 6, [LifeEvent("recompute", 2.0, 28, 7, 44)])
    last = seen("waiting", 0, 6, waits_for="blocks", num_blocks=0)
    with console.capture() as capture:
        console.print(render(last, history, 140))
    [row] = [line for line in capture.get().splitlines() if line.lstrip().startswith("7 ")]
    assert "waiting for blocks" in row and "▒█xx" in row
    assert "▒ prompt, █ decoding, x preempted" in capture.get()
    seen("running", 44, 5, [LifeEvent("end", 3.0, 29, 7, 9, why="stop")])
    assert not history.lives


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("shown", [event(), named()], ids=["numbers", "ids"])
def test_it_fits_any_terminal(shown: EngineEvent, width: int) -> None:
    for line in text(shown, width).splitlines():
        assert len(line) <= width


def test_very_many_blocks_share_cells() -> None:
    shown = text(event(100_000, bin_size=100_000))
    assert "(a cell is 167)" in shown and len(shown.splitlines()) < 40


def test_a_core_that_starts_is_named() -> None:
    shown = msgspec.structs.replace(event(), views=[], replicas=[ReplicaRow(0, "starting", 3, 1)])
    assert "0 starting (3 requests)" in text(shown)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that gives every request this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ok = status == 200 or self.headers.get("authorization") == "Bearer right"
            self.send_response(200 if ok else status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_once_prints_the_first_view_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    empty = msgspec.structs.replace(event(), views=[])
    stream = b"".join(b"data: " + msgspec.json.encode(one) + b"\n\n" for one in (empty, event()))
    with answering(200, stream) as url:
        assert main(["top", url, "--once"]) == 0
        assert "step 29" in capsys.readouterr().out
    with answering(200, b"") as url:
        assert main(["top", url, "--once"]) == 1


def test_a_server_that_refuses_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = msgspec.json.encode({"error": {"message": "no API key was sent"}})
    with answering(401, refusal) as url:
        assert main(["top", url]) == 2
        assert "answered 401: no API key was sent" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ftp://x"], ["http://127.0.0.1:9"], ["http://a", "http://b"]])
def test_what_is_no_server_is_refused(words: list[str]) -> None:
    assert main(["top", *words]) == 2


def test_used_blocks_of_a_large_cache_are_drawn_without_the_free_ones() -> None:
    shown = text(event(100_000))
    assert "free ones are not drawn" in shown and "■■■■■■■■\n" in shown.replace(" ", "") and "·■" not in shown
