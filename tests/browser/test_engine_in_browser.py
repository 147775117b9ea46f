"""The engine's page in a real browser: what it calls requests and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from octavo.core.stats import (
    AdapterSlot,
    AdapterStats,
    BlockMap,
    BlockRun,
    Change,
    EngineEvent,
    EngineView,
    GroupRow,
    SchedulerState,
    write_recording,
)
from tests.browser.browser import MISSING, Visit
from tests.browser.test_page_in_browser import showing, step_record

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"NO TEST OF THE PAGE WAS RUN: {MISSING}")

LONG_ID = "chatcmpl-0123456789abcdef0123456789abcdef"


def recorded(path: Path, adapters: AdapterStats | None = None, more: Mapping[str, Any] = {}) -> Path:
    """A recording of one view: request 7 runs in 6 of 40 blocks, request 8 waits."""
    runs = [BlockRun(6, 2, 1, 7, 0, 1), BlockRun(34, 0, 0, -1, 0, 0)]
    blocks = BlockMap(0, False, 16, None, 0, 40, [34, 0, 6, 0, 0], runs)
    rows = [
        GroupRow(7, "running", 1, 80, 9, 88, 0, 1.5, 0, 0, 0, 0, None),
        GroupRow(8, "waiting", 1, 40, 0, 0, 0, 0.5, 1, 40, 0, 0, 7),
    ]
    changes = [Change("recompute", 1, 8, [], 40, 7)]
    state = SchedulerState(steps=1, num_running=1, num_waiting=1, blocks_used=6, blocks_free=34, adapters=adapters)
    view = EngineView(0, 1.0, 512, 64, state, [blocks], rows, [step_record(1)], changes, 1, 0, **more)
    write_recording(path, "recorded", [EngineEvent(1.0, [], [view])])
    return path


def tip_of_the_first_block(shown: Visit) -> str:
    map_ = shown.page.locator(".map canvas").first
    map_.hover(position={"x": 4, "y": 4})
    shown.page.locator(".tip", has_text="Block 0:").wait_for()
    text: str = shown.page.locator(".tip").first.inner_text()
    return text


def test_requests_are_called_by_the_ids_of_their_clients(browser: Any, tmp_path: Path) -> None:
    with showing(browser, recorded(tmp_path / "a.jsonl", more={"request_ids": {7: LONG_ID, 8: "mine"}})) as shown:
        page = shown.page
        page.locator(".queue table").first.wait_for()
        assert tip_of_the_first_block(shown) == f"Block 0: request {LONG_ID}, tokens 0 to 15"
        running, waiting = page.locator(".queue tbody tr th").all()
        assert (running.inner_text(), waiting.inner_text()) == ("chatcmpl-0123…abcdef", "mine")
        assert running.locator(".id").get_attribute("title") == LONG_ID
        assert "for request chatcmpl-0123…abcdef" in page.locator(".changes li").inner_text()
        page.get_by_role("button", name="Whole ids").click()
        page.locator(".queue tbody th", has_text=LONG_ID).wait_for()
        assert running.inner_text() == LONG_ID
        assert shown.violations() == []


def test_adapters_in_slots_are_named(browser: Any, tmp_path: Path) -> None:
    adapters = [AdapterSlot(1, "0f" * 32, 2, ["sql", "tables"]), AdapterSlot(0, "ab" * 32, 0)]
    path = recorded(tmp_path / "a.jsonl", adapters=AdapterStats(in_slots=5), more={"adapters": adapters})
    with showing(browser, path) as shown:
        card = shown.page.get_by_label("Adapters", exact=True)
        rows = card.locator("tbody tr")
        rows.nth(1).wait_for()
        assert [row.inner_text().split("\t") for row in rows.all()] == [
            ["sql = tables", "2", "1"],
            ["unloaded, abababababab", "0", "0"],
        ]
        assert card.get_by_text("and 3 more").count() == 1
        assert shown.violations() == []


def test_a_recording_without_ids_shows_the_engines_numbers(browser: Any, tmp_path: Path) -> None:
    path = recorded(tmp_path / "old.jsonl")
    path.write_text(path.read_text().replace(',"adapters":[],"request_ids":{}', ""))
    assert "request_ids" not in path.read_text() and '"adapters":[' not in path.read_text()
    with showing(browser, path) as shown:
        shown.page.locator(".queue table").first.wait_for()
        assert tip_of_the_first_block(shown) == "Block 0: request 7, tokens 0 to 15"
        assert shown.page.locator(".queue tbody tr th").first.inner_text() == "7"
        assert shown.page.get_by_role("button", name="Whole ids").count() == 0
