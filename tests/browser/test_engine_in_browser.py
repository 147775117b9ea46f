"""The engine's page in a real browser: lives of requests, and what it calls requests and adapters."""

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
from tests.browser.browser import MISSING, Visit, visit
from tests.browser.test_page_in_browser import showing, step_record
from tests.server.running_server import Running

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


#: Prefix hits, forks, both kinds of preemption and a killed core.
BUSY = Path(__file__).resolve().parents[2] / "docs" / "recordings" / "a_busy_half_minute.jsonl"


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_the_life_of_a_preempted_request_is_read_with_the_keyboard_alone(browser: Any, scheme: str) -> None:
    with showing(browser, BUSY, color_scheme=scheme) as shown:
        page = shown.page
        rows = page.locator(".life")
        rows.nth(10).wait_for()
        words = [row.inner_text() for row in rows.all()]
        number = next(i for i, text in enumerate(words) if "preempted" in text and "another engine core" in text)
        for _ in range(60):  # the rows are one stop of the keyboard; arrow keys go through them
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.classList.contains('life')"):
                break
        for _ in range(number):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        details = page.locator(".life-details")
        phases = details.locator(".phases").inner_text()
        for expected in ("Waited", "computed in", "Decoded", "Its engine core had ended", "Computed again"):
            assert expected in phases
        assert "Preempted" in phases or "Swapped out" in phases
        facts = dict(zip(details.locator("dt").all_inner_texts(), details.locator("dd").all_inner_texts(), strict=True))
        assert {"Computed", "Found", "Block-seconds", "Waited", "Set back", "Ran"} == set(facts)
        assert "preempted" in facts["Set back"] and "resumed on another core" in facts["Set back"]
        last = page.locator(".step").inner_text()
        for _ in range(20):  # to a phase that has a step
            page.keyboard.press("Tab")
            if page.evaluate("Boolean(document.activeElement.closest('.phases button'))"):
                break
        page.keyboard.press("Enter")
        page.wait_for_function(f"document.querySelector('.step').innerText !== {last!r}")
        assert shown.violations() == [] and shown.overflow <= 0


def test_what_is_pointed_at_stands_out_in_rows_map_and_charts(browser: Any) -> None:
    with showing(browser, BUSY) as shown:
        page = shown.page
        page.locator(".life").first.wait_for()
        steps = int(page.get_by_label("Step", exact=True).get_attribute("max"))
        page.get_by_label("Step", exact=True).fill(str(steps // 3))
        words = tip_of_the_first_block(shown)
        focused = page.locator(".life.focus .id")
        focused.wait_for()
        name = focused.get_attribute("title")
        assert f"request {name}," in words
        page.locator(".strip canvas").first.hover(position={"x": 60, "y": 40})
        page.locator(".over .hover").wait_for(state="attached")
        assert page.locator(".strip .tip").inner_text().startswith("Step ")
        page.locator(".map canvas").first.click(position={"x": 4, "y": 4})
        assert name in page.locator(".life-details").inner_text()


def test_an_idle_engine_sends_examples_and_shows_their_lives(browser: Any, site: Running) -> None:
    with visit(browser, site.url, "/#engine") as shown:
        page = shown.page
        button = page.get_by_role("button", name="Send 20 example requests")
        button.wait_for()
        assert "Nothing runs" in page.locator(".now").inner_text()
        button.press("Enter")
        page.locator(".life").nth(19).wait_for()
        button.wait_for()
        site.wait_until_idle()
        page.get_by_text("Nothing runs").wait_for()
        states = page.locator(".life-state").all_inner_texts()
        assert set(states) == {"ended at its limit"}
        assert page.locator(".life-strip .decode").count() >= 20
        assert shown.violations() == []
