"""The page of a server that does all at once: adapters, drafts, two replicas, timed kernels, a small cache."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.browser.browser import MISSING, Visit, visit
from tests.browser.chatting import open_settings
from tests.server.running_server import Running, running

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"NO TEST OF THE PAGE WAS RUN: {MISSING}"),
    pytest.mark.slow,
]

#: A function whose only call is known.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


@pytest.fixture(scope="module")
def everything(browser: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("everything")
    model = shutil.copytree(tiny_model, folder / "model")
    config = json.loads((model / "config.json").read_text())
    # A tool takes some hundred tokens of bytes.
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    adapters = [f"{name}={write_adapter(folder / name, model, seed=i)}" for i, name in enumerate(("one", "two"))]
    flags = ["--num-threads", "1", "--status-interval", "0", "--max-num-seqs", "8", "--served-model-name", "base"]
    flags += [
        "--num-gpu-blocks-override",
        "48",
        "--num-host-blocks-override",
        "48",
        "--preemption-mode",
        "by_sequences",
    ]
    flags += ["--enable-lora", "--lora-modules", *adapters, "--data-parallel-size", "2", "--time-kernels"]
    flags += ["--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 4})]
    with running(model, folder / "log", *flags) as server:
        yield server


@pytest.fixture
def shown(browser: Any, everything: Running) -> Iterator[Visit]:
    with visit(browser, everything.url) as shown:
        open_settings(shown)
        yield shown


def ask(shown: Visit, text: str) -> Any:
    """Sends a message; the body of the request, after its answer."""
    shown.page.locator("#question").fill(text)
    with shown.page.expect_request("**/v1/chat/completions") as sent:
        shown.page.get_by_role("button", name="Send", exact=True).click()
    shown.page.get_by_role("button", name="Regenerate").last.wait_for()
    return sent.value.post_data_json


def test_an_adapter_answers_side_by_side_with_accepted_drafts(shown: Visit) -> None:
    page = shown.page
    page.get_by_label("Model", exact=True).select_option("one")
    for name, value in (("n", "2"), ("max_tokens", "60"), ("temperature", "0")):
        page.locator(f"#setting-{name}").fill(value)
    assert ask(shown, "abcabcabc" * 8)["model"] == "one"
    for figures in page.locator(".stats").all_inner_texts():
        assert re.search(r"tokens/s of all 2 answers · first token after .* · 120 tokens of all 2 answers", figures)
        assert "drafted tokens accepted" in figures
    assert ask(shown, "again")["messages"][1]["role"] == "assistant"
    for _ in range(4):  # a replica that did not answer before has nothing of it
        ask(shown, "and again")
        if "of them cached" in page.locator(".stats").last.inner_text():
            return
    pytest.fail("no prompt was found in the cache of either replica")


def test_a_schema_and_a_tool_bind_the_answer(shown: Visit) -> None:
    page = shown.page
    page.get_by_label("JSON schema").fill('{"enum": ["yes"]}')
    ask(shown, "Is it?")
    assert page.locator(".answer .text").inner_text().strip() == '"yes"'
    page.get_by_label("JSON schema").fill("")
    page.get_by_label("Tools", exact=True).fill(json.dumps(TOOLS))
    page.locator("#setting-tool_choice").select_option("required")
    page.locator("#setting-max_tokens").fill("60")
    page.get_by_role("button", name="New", exact=True).click()
    ask(shown, "Weather?")
    page.get_by_label("Call of the tool weather").first.wait_for()
    page.locator("#setting-tool_choice").select_option("none")
    results = page.get_by_label("Result of weather")
    for field in results.all():
        field.fill("sunny")
    roles = ["user", "assistant", *["tool"] * results.count()]
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send the result").click()
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == roles
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    page.locator(".turn.assistant").nth(1).get_by_role("button", name="Regenerate").wait_for()


def test_the_engine_shows_all_that_happens(shown: Visit, everything: Running) -> None:
    page = shown.page
    page.get_by_role("link", name="Engine").click()
    page.get_by_role("status").get_by_text("Live").wait_for()

    def complete(i: int) -> None:
        body = {"prompt": "a prefix that all have, long enough " * 2, "max_tokens": 300, "n": 1 + i % 2, "seed": i}
        body |= {"ignore_eos": True, "model": ("base", "one", "two")[i % 3]}
        with everything.http() as http:
            assert http.post("/v1/completions", json=body).status_code == 200

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(complete, range(16)))
    everything.wait_until_idle()
    tiles = page.locator(".tiles")
    page.locator(".replicas input").nth(1).wait_for()
    for number in (0, 1):
        page.locator(".replicas input").nth(number).check()
        tiles.get_by_text("0 of 48").wait_for()
        assert {"Drafts accepted", "Adapters in slots", "Prefix hits", "Evictions"} <= set(
            tiles.locator("dt").all_inner_texts()
        )
    page.get_by_text("in kernels").wait_for()
    assert page.locator(".latency").count() == 3
    assert page.locator(".changes li").count() > 0
    page.get_by_role("button", name="Pause").click()
    # Back to a step in which requests ran.
    page.get_by_label("Step", exact=True).focus()
    for _ in range(400):
        page.keyboard.press("ArrowLeft")
        if page.locator(".queue tbody tr").count():
            break
    assert page.locator(".queue tbody tr").count()
    page.locator(".map canvas").first.focus()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
        if "request" in (words := page.locator(".tip").first.inner_text()):
            break
    assert re.match(r"Block \d+: request cmpl-\w+, tokens \d+ to \d+", words)
