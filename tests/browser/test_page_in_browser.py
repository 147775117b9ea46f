"""The page in a real browser: it survives its server, shows what /metrics say, and shuts nobody out."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.view import make_server
from octavo.core.stats import EngineEvent, EngineView, SchedulerState, StepRecord, write_recording
from octavo.memory.block_manager import BlockManager
from octavo.memory.block_map import block_maps
from tests.browser.browser import MISSING, Visit, visit
from tests.browser.chatting import HOSTILE, answered, ask, done, open_settings
from tests.server.running_server import TINY, Running, running

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"NO TEST OF THE PAGE WAS RUN: {MISSING}")

#: What a test calls the element that has the keyboard.
ACTIVE = "document.activeElement.ariaLabel || document.activeElement.id || document.activeElement.innerText || ''"


def test_a_lost_server_is_shown_and_found_again(browser: Any, tiny_model: Path, tmp_path: Path) -> None:
    with running(tiny_model, tmp_path / "log", *TINY) as server:
        port = str(server.address[1])
        with visit(browser, server.url, "/#engine") as shown:
            page = shown.page
            page.get_by_role("status").get_by_text("Live").wait_for()
            server.process.kill()
            server.process.wait()
            page.get_by_text("This page tries again").wait_for()
            with running(tiny_model, tmp_path / "again", *TINY, "--port", port):
                page.get_by_role("status").get_by_text("Live").wait_for()
                page.get_by_text("This page tries again").wait_for(state="hidden")
            shown.forgive("ERR_", "Failed to load resource")


@pytest.mark.slow
def test_a_key_is_asked_for_and_a_wrong_one_refused(browser: Any, tiny_model: Path, tmp_path: Path) -> None:
    environment = {"OCTAVO_API_KEYS": "right-key"}
    with running(tiny_model, tmp_path / "log", *TINY, env=environment) as server, visit(browser, server.url) as shown:
        page = shown.page
        page.get_by_label("API key").fill("wrong-key")
        assert shown.violations() == []
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("not known").wait_for()
        page.get_by_label("API key").fill("right-key")
        page.get_by_role("button", name="Use this key").click()
        page.locator(".welcome").wait_for()
        page.get_by_role("link", name="Engine").click()
        page.get_by_role("status").get_by_text("Live").wait_for()
        assert page.evaluate("JSON.stringify(localStorage)").count("right-key") == 0
        shown.forgive("401")


# --- the engine -----------------------------------------------------------------------------------------------------


def test_the_maps_counts_are_those_of_the_metrics(browser: Any, site: Running) -> None:
    with site.http() as http, visit(browser, site.url, "/#engine") as shown:
        body = {"prompt": "a long enough prompt to fill some blocks of the cache", "max_tokens": 30, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        site.wait_until_idle()
        used, cached, free = (int(site.metric("octavo_kv_cache_blocks", state=s)) for s in ("used", "cached", "free"))
        assert cached > 0
        words = f"{used + cached + free} blocks of 16 tokens: {used} blocks used, {cached} cached, {free} free."
        shown.page.locator(".pool-title").get_by_text(words).wait_for()
        map_ = shown.page.locator(".map canvas").first
        assert words in str(map_.get_attribute("aria-label"))
        map_.focus()
        shown.page.keyboard.press("ArrowRight")
        assert re.match(r"Block 0: (cached|free)", shown.page.locator(".tip").first.inner_text())


@pytest.mark.slow
def test_the_engine_can_be_paused_stepped_back_saved_and_opened(browser: Any, site: Running, tmp_path: Path) -> None:
    with site.http() as http, visit(browser, site.url, "/#engine") as shown:
        page = shown.page
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 20, "ignore_eos": True})
        last = int(site.metric("octavo_step_duration_seconds_count"))
        page.get_by_text(f"step {last:,}", exact=True).wait_for()
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="One step back").click()
        page.get_by_text(f"step {last - 1:,}", exact=True).wait_for()
        with page.expect_download() as download:
            page.get_by_role("button", name="Save").click()
        saved = tmp_path / "saved.jsonl"
        download.value.save_as(saved)
        page.get_by_role("button", name="Resume").click()
        page.get_by_text("Live", exact=True).wait_for()
        page.get_by_label("Open").set_input_files(saved)
        page.get_by_role("status").get_by_text("Recording").wait_for()
        assert page.locator(".map canvas").count() >= 1
        page.get_by_label("Open").set_input_files({"name": "x.jsonl", "mimeType": "", "buffer": b"no recording"})
        assert "no recording" in page.get_by_role("alert").inner_text()


@pytest.mark.slow
def test_a_recording_is_shown_by_the_same_page(browser: Any, tmp_path: Path) -> None:
    from octavo.cli.main import main

    path = tmp_path / "run.jsonl"
    flags = ["--num-requests", "12", "--request-rate", "50", "--num-gpu-blocks-override", "100", "--record", str(path)]
    assert main(["simulate", *flags]) == 0
    with showing(browser, path) as shown:
        page = shown.page
        page.locator(".engine-status").get_by_text("simulated").wait_for()
        page.get_by_label("Step", exact=True).fill("40")
        page.locator(".map canvas").first.wait_for()
        assert page.locator(".queue table").count() >= 1
        assert shown.violations() == []


@pytest.mark.slow
def test_three_hundred_thousand_blocks_are_drawn_in_aggregate(browser: Any, tmp_path: Path) -> None:
    manager = BlockManager(300_000, 16)
    for seq in range(50):
        manager.grow([(seq, 0, 16 * 1000)])
    view = EngineView(0, 1.0, 512, 64, SchedulerState(), block_maps(manager, []), [], [step_record(1)], [], 0, 0)
    path = tmp_path / "large.jsonl"
    write_recording(path, "large", [EngineEvent(1.0, [], [view])])
    assert path.stat().st_size < 60_000
    with showing(browser, path) as shown:
        shown.page.get_by_text("300,000 blocks of 16 tokens: 50,000 blocks used, 0 cached, 250,000 free.").wait_for()
        map_ = shown.page.locator(".map canvas").first
        map_.hover(position={"x": 2, "y": 2})
        assert shown.page.locator(".map .tip").inner_text() == "Blocks 0 to 146: 147 used"


def step_record(number: int) -> StepRecord:
    return StepRecord(number, 1.0, *[0] * 15)


@contextlib.contextmanager
def showing(browser: Any, path: Path, **options: Any) -> Iterator[Visit]:
    """The page over a recording, as ``octavo view`` serves it."""
    server = make_server(path.read_bytes())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with visit(browser, f"http://127.0.0.1:{server.server_address[1]}", **options) as shown:
            yield shown
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- for everybody --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colors", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing(browser: Any, site: Running, colors: str) -> None:
    with visit(browser, site.url, color_scheme=colors) as shown:
        page = shown.page
        page.locator(".welcome").wait_for()
        assert page.evaluate("document.documentElement.dataset.theme") == colors
        assert shown.violations() == []
        answered(shown, HOSTILE)
        ask(shown, "x", n="1")
        done(shown)
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_text("2 / 2").wait_for()
        assert shown.violations() == []
        page.get_by_role("link", name="Engine").click()
        page.locator(".map canvas").first.wait_for()
        assert shown.violations() == []


#: A wide screen, a tablet, a phone, and a window of 1,280 pixels at 400 %.
WIDTHS = [*(pytest.param(width, marks=pytest.mark.slow) for width in (1440, 768, 320)), 360]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_the_chat_comes_first(browser: Any, site: Running, width: int) -> None:
    with visit(browser, site.url, viewport={"width": width, "height": 740}) as shown:
        page = shown.page
        page.locator(".welcome").wait_for()
        assert page.locator("#question").bounding_box()["y"] < 740, "in sight without scrolling"
        if width < 960:
            assert page.locator(".history, .settings").count() == 0
            page.get_by_role("button", name="Conversations").press("Enter")
            assert shown.violations() == []
            page.keyboard.press("Escape")
            assert page.locator(".history").count() == 0
        answered(shown, HOSTILE + "long" * 100)
        ask(shown, "x" * 300)
        done(shown)
        assert shown.overflow <= 0
        open_settings(shown)
        assert shown.overflow <= 0 and shown.violations() == []
        if width < 960:
            page.keyboard.press("Escape")
        page.get_by_role("link", name="Engine").click()
        page.locator(".map canvas").first.wait_for()
        assert shown.overflow <= 0


@pytest.mark.slow
def test_everything_is_reached_by_the_keyboard(browser: Any, site: Running) -> None:
    with visit(browser, site.url) as shown:
        page = shown.page
        page.locator(".welcome").wait_for()
        page.get_by_role("button", name="Settings", exact=True).press("Enter")
        page.locator(".setting").first.wait_for()
        reached = set()
        page.locator("h1 a").focus()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(page.evaluate(f"({ACTIVE}).trim()"))
        assert {"Chat", "Engine", "New", "question", "Add text files", "setting-temperature", "setting-seed"} <= reached


def test_the_theme_is_chosen_and_kept(browser: Any, site: Running) -> None:
    with visit(browser, site.url) as shown:
        page: Any = shown.page
        page.locator(".welcome").wait_for()

        def background(theme: str) -> str:
            page.get_by_role("button", name="Colours").click()
            page.locator(f'html[data-theme="{theme}"]').wait_for()
            color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
            return color

        assert background("light") != background("dark")
        page.reload()
        page.locator(".welcome").wait_for()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
