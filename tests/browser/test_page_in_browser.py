"""The page in a real browser: it streams, stops, survives its server, shows what /metrics say, and shuts nobody out."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.cli.view import make_server
from octavo.core.stats import EngineEvent, EngineView, SchedulerState, StepRecord, write_recording
from octavo.memory.block_manager import BlockManager
from octavo.memory.block_map import block_maps
from tests.browser.browser import MISSING, Visit, visit
from tests.busy_machine import PATIENCE, eventually
from tests.server.running_server import TINY, Running, running

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"NO TEST OF THE PAGE WAS RUN: {MISSING}")

#: What a model may write to get at the user.
HOSTILE = """Hello <script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">
[click](javascript:window.hacked=3) ![a picture](https://evil.example/a.png) <https://evil.example>

# A title with <b>markup</b>

- one **bold**
- two `code <i>`

| a | b |
| --- | --- |
| <svg onload="window.hacked=4"> | 2 |

```html
<iframe src="https://evil.example"></iframe>
```
"""


#: What a test calls the element that has the keyboard.
ACTIVE = "document.activeElement.ariaLabel || document.activeElement.id || document.activeElement.innerText || ''"


def ask(shown: Visit, text: str, **settings: str) -> None:
    """Sends a message with these settings."""
    for name, value in settings.items():
        shown.page.locator(f"#setting-{name}").fill(value)
    shown.page.locator("#question").fill(text)
    shown.page.get_by_role("button", name="Send").click()


def answered(shown: Visit, text: str, finish: str = "stop") -> None:
    """Makes the server answer with this text from now on, as if a model had written it."""
    chunks: list[dict[str, Any]]
    parts = [text[i : i + 7] for i in range(0, len(text), 7)]
    chunks = [{"choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]} for part in parts]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream"}
    shown.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, headers=headers, body=body))


def stats(shown: Visit) -> Any:
    return shown.page.locator(".stats").last


@pytest.fixture
def playground(browser: Any, site: Running) -> Iterator[Visit]:
    with visit(browser, site.url) as shown:
        shown.page.locator(".setting").first.wait_for()
        yield shown


# --- the playground -------------------------------------------------------------------------------------------------


def test_a_chat_streams_and_stays_in_the_browser(playground: Visit) -> None:
    page = playground.page
    assert page.locator(".composer input[type=file]").count() == 0, "the model reads text alone"
    ask(playground, "Hello there", max_tokens="12", temperature="0")
    stats(playground).wait_for()
    assert "first token after" in stats(playground).inner_text()
    page.reload()
    page.get_by_role("button", name="Hello there", exact=True).click()
    assert page.locator(".asked").inner_text() == "Hello there"


@pytest.mark.slow
def test_settings_come_from_the_servers_description_and_reach_the_request(playground: Visit, site: Running) -> None:
    page = playground.page
    fields = httpx.get(f"{site.url}/openapi.json").json()["components"]["schemas"]["ChatCompletionRequest"][
        "properties"
    ]
    assert page.locator("#setting-top_k-help").inner_text() == fields["top_k"]["description"]
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(playground, "x", max_tokens="3", top_k="7", seed="5", n="2", stop="zzz")
    body = sent.value.post_data_json
    assert (body["max_tokens"], body["top_k"], body["seed"], body["n"], body["stop"]) == (3, 7, 5, 2, "zzz")
    page.locator(".branches .answer").nth(1).locator(".stats").wait_for()
    page.get_by_role("radio", name="Answer 2 of 2").check()


@pytest.mark.slow
def test_each_tokens_probability_is_shown_with_the_keyboard_alone(playground: Visit) -> None:
    page = playground.page
    page.get_by_label("Each token's probability").check()
    ask(playground, "Say it", max_tokens="6", temperature="0")
    stats(playground).wait_for()
    page.get_by_role("button", name="Tokens").press("Enter")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    chosen = page.locator(".alternatives strong").inner_text()
    others = page.locator(".alternatives .alternative").all_inner_texts()
    assert len(others) == 4 and chosen not in others
    page.keyboard.press("End")
    assert "chosen" in str(page.locator(".token").last.get_attribute("class"))
    page.locator(".token").first.hover()
    assert "chosen" in str(page.locator(".token").first.get_attribute("class"))


@pytest.mark.slow
def test_an_answer_is_regenerated_beside_the_first_and_a_question_edited(playground: Visit) -> None:
    page = playground.page
    answered(playground, "An answer.")
    ask(playground, "First words")
    stats(playground).wait_for()
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".branches .answer").nth(1).locator(".stats").wait_for()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Changed question").fill("Other words")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".turn.user").get_by_role("button", name="Send").click()
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Other words"]


def test_markdown_is_shown_and_nothing_in_it_runs(playground: Visit) -> None:
    page = playground.page
    answered(playground, HOSTILE)
    ask(playground, "Be bad")
    stats(playground).wait_for()
    answer = page.locator(".answer .markdown")
    assert answer.locator("script, img, svg, iframe, b").count() == 0
    assert answer.locator("strong").inner_text() == "bold" and answer.locator("td").count() == 2
    assert "<script>window.hacked = 1</script>" in answer.inner_text()
    links = answer.locator("a").evaluate_all("all => all.map(one => [one.href, one.rel])")
    assert links and all(href.startswith("https://") and "noopener" in rel for href, rel in links)
    assert page.evaluate("window.hacked") is None
    assert [heading.inner_text() for heading in answer.get_by_role("heading").all()] == ["A title with <b>markup</b>"]


def test_an_answer_that_is_json_is_shown_as_code(playground: Visit) -> None:
    page = playground.page
    answered(playground, '{"a": [1.50, 12345678901234567890], "*b*": {}}')
    ask(playground, "Give JSON")
    stats(playground).wait_for()
    code = page.locator(".answer .text .code code")
    assert code.inner_text() == '{\n  "a": [\n    1.50,\n    12345678901234567890\n  ],\n  "*b*": {}\n}'
    answered(playground, "[a link](https://a.example) and {braces}")
    ask(playground, "Give text")
    page.locator(".answer .markdown a").wait_for()
    assert page.locator(".answer .text .code").count() == 1


def test_a_chat_ends_at_a_limit_that_is_shown_and_goes_on(playground: Visit) -> None:
    page = playground.page
    limit = page.locator("#setting-max_tokens").input_value()
    assert 0 < int(limit) < 256  # of the model's context
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(playground, "Say much", temperature="0")
    assert sent.value.post_data_json["max_tokens"] == int(limit)
    stats(playground).wait_for()
    answered(playground, "One *two", finish="length")
    page.get_by_role("button", name="Regenerate").click()
    page.locator(".answer.chosen .limit").get_by_text(f"limit of {limit} tokens").wait_for()
    answered(playground, "* three")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Continue").click()
    begun = sent.value.post_data_json["messages"][-1]
    assert (begun["role"], begun["content"]) == ("assistant", "One *two")
    page.locator(".answer.chosen em").wait_for()
    assert page.locator(".answer.chosen .text").inner_text().strip() == "One two three"
    assert page.locator(".answer").count() == 2 and page.locator(".answer.chosen .limit").count() == 0


def test_the_server_goes_on_with_an_answer(playground: Visit) -> None:
    page = playground.page
    page.get_by_text("All other settings").click()
    page.locator("#setting-ignore_eos").select_option("true")
    ask(playground, "x", max_tokens="4", logit_bias='{"97": 100}')
    page.get_by_text("its limit of 4 tokens").wait_for()
    begun = page.locator(".answer .text").inner_text().strip()
    with page.expect_response("**/v1/chat/completions") as answer:
        page.get_by_role("button", name="Continue").click()
    assert answer.value.status == 200
    page.get_by_role("button", name="Regenerate").wait_for()
    whole = page.locator(".answer .text").inner_text().strip()
    assert begun and whole.startswith(begun) and len(whole) == 2 * len(begun)


def test_the_pages_limit_gives_way_to_a_long_question(playground: Visit) -> None:
    with playground.page.expect_response(lambda one: one.status == 200 and one.url.endswith("/v1/chat/completions")):
        ask(playground, "abc " * 45)
    stats(playground).wait_for()
    playground.forgive("400")
    assert playground.page.get_by_role("alert").count() == 0


def test_the_models_own_defaults_are_shown_and_left_to_it(browser: Any, tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.2, "top_p": 0.9}))
    with running(model, tmp_path / "log", *TINY) as server, visit(browser, server.url) as shown:
        page = shown.page
        page.get_by_text("This model's default: 0.2.").wait_for()
        for name, value in (("temperature", "0.2"), ("top_p", "0.9")):
            setting = page.locator(f"#setting-{name}")
            assert setting.input_value() == "" and value in str(setting.get_attribute("placeholder"))
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(shown, "x", max_tokens="2")
        assert not {"temperature", "top_p"} & set(sent.value.post_data_json)
        stats(shown).wait_for()


@pytest.mark.slow
def test_a_wrong_schema_is_named_and_a_right_one_is_sent(playground: Visit) -> None:
    page = playground.page
    page.get_by_text("JSON schema", exact=True).click()
    page.get_by_label("JSON schema").fill("{nonsense")
    ask(playground, "x")
    assert "JSON schema" in page.get_by_role("alert").inner_text()
    page.get_by_label("JSON schema").fill('{"type": "object"}')
    answered(playground, "{}")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send").click()
    assert sent.value.post_data_json["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.slow
def test_the_request_as_python_runs(playground: Visit, site: Running, tmp_path: Path) -> None:
    page = playground.page
    ask(playground, 'It\'s "quoted" $HOME', max_tokens="4", top_k="3", temperature="0")
    stats(playground).wait_for()
    page.get_by_text("Copy as curl or Python").click()
    page.get_by_label("Python").check()
    script = tmp_path / "sample.py"
    script.write_text(page.locator(".samples pre").inner_text())
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    page.get_by_label("curl").check()
    command = page.locator(".samples pre").inner_text()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert "data: [DONE]" in done.stdout


def test_stop_stops_the_engine_too(playground: Visit, site: Running) -> None:
    before = site.metric("octavo_requests_finished_total", reason="abort")
    core = site.core_pid()
    os.kill(core, signal.SIGSTOP)
    try:
        ask(playground, "x", max_tokens="200")
        eventually(lambda: site.metric("octavo_http_open_requests") > 1)
        playground.page.get_by_role("button", name="Stop").click()
        stats(playground).wait_for()
        assert "stopped" in stats(playground).inner_text()
    finally:
        os.kill(core, signal.SIGCONT)
    eventually(lambda: site.metric("octavo_requests_finished_total", reason="abort") == before + 1)


def test_a_killed_core_is_a_pause(playground: Visit, site: Running) -> None:
    core = site.core_pid()
    os.kill(core, signal.SIGSTOP)
    ask(playground, "x", max_tokens="40")
    eventually(lambda: site.metric("octavo_http_open_requests") > 1)
    os.kill(core, signal.SIGKILL)
    stats(playground).wait_for()
    assert playground.page.get_by_role("alert").count() == 0 and "tokens" in stats(playground).inner_text()


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
        page.locator(".setting").first.wait_for()
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
        shown.page.locator(".setting").first.wait_for()
        shown.page.get_by_text("System prompt").click()
        answered(shown, HOSTILE)
        ask(shown, "x", n="1")
        stats(shown).wait_for()
        assert shown.violations() == []
        shown.page.get_by_role("link", name="Engine").click()
        shown.page.locator(".map canvas").first.wait_for()
        assert shown.violations() == []


#: A phone, and a window of 1280 x 800 pixels at 200 %.
@pytest.mark.slow
@pytest.mark.parametrize("size", [(360, 740, 2), (640, 400, 2)])
def test_the_page_fits_a_phone_and_a_zoom_of_two(browser: Any, site: Running, size: tuple[int, int, int]) -> None:
    width, height, scale = size
    options: dict[str, Any] = {"viewport": {"width": width, "height": height}, "device_scale_factor": scale}
    with visit(browser, site.url, **options) as shown:
        answered(shown, HOSTILE + "long" * 100)
        ask_box = shown.page.locator("#question")
        ask_box.fill("x" * 300)
        shown.page.get_by_role("button", name="Send").click()
        stats(shown).wait_for()
        assert shown.overflow <= 0
        shown.page.get_by_role("link", name="Engine").click()
        shown.page.locator(".map canvas").first.wait_for()
        assert shown.overflow <= 0


@pytest.mark.slow
def test_everything_is_reached_by_the_keyboard(playground: Visit) -> None:
    page = playground.page
    reached = set()
    page.locator("h1 a").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(f"({ACTIVE}).trim()"))
    assert {"Playground", "Engine", "New", "question", "setting-temperature", "setting-seed"} <= reached


@pytest.mark.slow
def test_the_theme_is_chosen_and_kept(playground: Visit) -> None:
    page: Any = playground.page

    def background(theme: str) -> str:
        page.locator(".theme select").select_option(theme)
        page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
        color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return color

    assert background("dark") != background("light")
    page.reload()
    assert page.locator(".theme select").input_value() == "light"
