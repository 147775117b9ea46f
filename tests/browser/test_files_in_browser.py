"""Images and recordings on the page in a real browser: given in every way, answered, kept within bounds, refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.browser.browser import MISSING, Visit, chromium, visit
from tests.browser.chatting import open_settings
from tests.busy_machine import PATIENCE
from tests.image_models import picture, save_llava
from tests.images.image_cases import file_of, noise
from tests.server.running_server import TINY, Running, running

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"NO TEST OF THE PAGE WAS RUN: {MISSING}")

SPEECH = Path(__file__).resolve().parent.parent / "data" / "speech.ogg"
#: A file is dropped on the page: [name, type, bytes or how many]. Whether the page took it.
DROP = """([name, type, bytes]) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
    const event = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
    document.querySelector(".turns").dispatchEvent(event);
    return event.defaultPrevented;
}"""
#: An image is copied.
COPY = """(bytes) => navigator.clipboard.write(
    [new ClipboardItem({ "image/png": new Blob([new Uint8Array(bytes)], { type: "image/png" }) })])"""


def png(seed: int, height: int = 40, width: int = 56) -> bytes:
    return file_of(picture(height, width, seed))


def chosen(name: str, content: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """A file as Playwright chooses it."""
    return {"name": name, "mimeType": media_type, "buffer": content}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium with a microphone that hears the recording."""
    heard = tmp_path_factory.mktemp("microphone") / "speech.wav"
    samples, rate = soundfile.read(SPEECH, dtype="float32")
    soundfile.write(heard, np.concatenate([samples, np.zeros(rate, np.float32)]), rate)
    microphone = ("--use-fake-device-for-media-stream", f"--use-file-for-fake-audio-capture={heard}")
    with chromium(*microphone) as browser:
        yield browser


@pytest.fixture(scope="module")
def eyes(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a small model of random weights that sees images."""
    folder = tmp_path_factory.mktemp("eyes")
    save_llava(folder)
    with running(folder, folder / "log", *TINY, "--served-model-name", "eyes", "--max-image-bytes", "128KiB") as server:
        yield server


@pytest.fixture(scope="module")
def ears(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of Whisper."""
    log = tmp_path_factory.mktemp("ears") / "log"
    flags = ("--num-threads", "1", "--max-num-seqs", "16", "--status-interval", "0", "--served-model-name", "ears")
    with running("whisper-tiny.en", log, *flags, "--max-audio-seconds", "20") as server:
        yield server


@pytest.fixture
def sees(browser: Any, eyes: Running) -> Iterator[Visit]:
    with visit(browser, eyes.url, permissions=["clipboard-read", "clipboard-write"]) as shown:
        open_settings(shown)
        shown.page.locator("#setting-max_tokens").fill("8")
        yield shown


@pytest.fixture
def hears(browser: Any, ears: Running) -> Iterator[Visit]:
    with visit(browser, ears.url, permissions=["microphone"]) as shown:
        open_settings(shown)
        yield shown


def send(shown: Visit, text: str) -> Any:
    """Sends a message and waits for the end of its answer; the body of the request."""
    shown.page.locator("#question").fill(text)
    with shown.page.expect_request("**/v1/chat/completions") as sent:
        shown.page.get_by_role("button", name="Send", exact=True).click()
    shown.page.locator(".turn.assistant").last.get_by_role("button", name="Regenerate").wait_for()
    return sent.value.post_data_json


def images_of(body: Any) -> list[int]:
    """How many images each message has."""
    contents = [message["content"] for message in body["messages"]]
    return [0 if isinstance(one, str) else sum(part["type"] == "image_url" for part in one) for one in contents]


def alerts(shown: Visit) -> str:
    shown.page.get_by_role("alert").first.wait_for()
    return "\n".join(shown.page.get_by_role("alert").all_inner_texts())


# --- images ---------------------------------------------------------------------------------------------------------


def test_images_are_chosen_dropped_and_pasted_and_go_with_the_conversation(sees: Visit) -> None:
    page = sees.page
    page.get_by_label("Add pictures").set_input_files([chosen("one.png", png(1)), chosen("two.png", png(2))])
    assert page.evaluate(DROP, ["three.png", "image/png", list(png(3))])
    page.evaluate(COPY, list(png(4)))
    page.locator("#question").focus()
    page.keyboard.press("Control+V")
    page.locator(".composer img").nth(3).wait_for()
    page.get_by_role("button", name="Remove two.png").click()
    assert images_of(send(sees, "What is it?")) == [3]
    shown = page.locator(".turn.user img")
    assert [image.get_attribute("alt") for image in shown.all()] == ["one.png", "three.png", "image.png"]
    assert shown.evaluate_all("all => all.every(one => one.naturalWidth === 56)")
    assert images_of(send(sees, "And now?")) == [3, 0, 0]

    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Regenerate").first.click()
    assert images_of(sent.value.post_data_json) == [3]
    page.get_by_text("2 / 2").wait_for()
    page.locator(".stats").first.wait_for()
    page.locator(".turn.user").first.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Remove one.png").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".turn.user").get_by_role("button", name="Send", exact=True).click()
    assert images_of(sent.value.post_data_json) == [2]
    page.locator(".stats").wait_for()

    page.wait_for_function("indexedDB.databases().then(all => all.length)")
    page.reload()
    page.get_by_role("button", name="What is it?", exact=True).click()
    page.locator(".turn.user img").nth(1).wait_for()
    assert images_of(send(sees, "Still there?")) == [2, 0, 0]


def test_what_is_no_image_or_too_large_is_refused_and_the_conversation_goes_on(sees: Visit) -> None:
    page = sees.page
    page.get_by_label("Add pictures").set_input_files(chosen("a.pdf", b"%PDF\xff", "application/pdf"))
    assert alerts(sees) == "a.pdf was left out: it is neither text nor a picture nor a recording."
    for content, words in (
        (b"no image", "is no image that can be decoded"),
        (bytes(200_000), "131072 are taken"),
    ):
        page.get_by_label("Add pictures").set_input_files(chosen("wrong.png", content))
        page.locator(".composer .file").wait_for()
        send(sees, "Look")
        assert words in page.locator(".turn.assistant .error").last.inner_text()
    assert images_of(send(sees, "Only this")) == [0]
    assert page.locator(".turn.assistant").last.get_by_role("alert").count() == 0
    sees.forgive("400")


def lower_bound(route: Any) -> None:
    """The script of files, with 1 MB for its 64."""
    answer = route.fetch()
    assert "MOST_KEPT = 64 << 20;" in answer.text()
    route.fulfill(response=answer, body=answer.text().replace("MOST_KEPT = 64 << 20;", "MOST_KEPT = 1 << 20;"))


def test_files_stay_within_a_bound_and_what_goes_is_said(sees: Visit) -> None:
    page = sees.page
    # A hundredth of the bound, as so much takes long; the server is left out.
    page.route("**/files.js", lower_bound)
    page.reload()
    page.locator(".welcome").wait_for()
    page.evaluate("globalThis.fetch = async () => Response.json({ error: { message: 'large' } }, { status: 413 })")
    for name in ("first", "second"):
        page.get_by_role("button", name="New", exact=True).click()
        assert page.evaluate(DROP, [f"{name}.png", "image/png", 600 << 10])
        page.locator(".composer .file").wait_for()
        page.locator("#question").fill(name)
        page.get_by_role("button", name="Send", exact=True).click()
        assert alerts(sees) == "large"
    page.locator(".foot .note").wait_for()
    assert "There is room for 1 MB of files" in page.locator(".foot .note").inner_text()
    assert "first.png" in page.locator(".foot .note").inner_text()
    page.reload()
    page.get_by_role("button", name="first", exact=True).click()
    page.locator(".gone").wait_for()


@pytest.mark.slow
def test_the_request_with_an_image_runs_as_curl_and_python(sees: Visit, tmp_path: Path) -> None:
    page = sees.page
    large = file_of(noise(170, 200))
    assert len(large) > 100_000  # in base64 longer than an argument of a program may be
    page.get_by_label("Add pictures").set_input_files(chosen("large.png", large))
    page.locator(".composer img").wait_for()
    send(sees, 'It\'s "quoted" $HOME')
    assert len(page.locator(".samples pre").inner_text()) < 2000
    for language, command in (("curl", ["bash"]), ("Python", [sys.executable])):
        page.get_by_role("button", name=language, exact=True).click()
        page.locator(".samples").get_by_role("button", name="Copy code").click()
        page.locator(".samples").get_by_role("button", name="Copied").wait_for()
        script = tmp_path / language
        script.write_text(page.evaluate("navigator.clipboard.readText()"))
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0 and done.stdout, done.stderr
        assert language == "Python" or "data: [DONE]" in done.stdout


@pytest.mark.slow  # by default test_page_in_browser.py says so of a model of text, as far as what is shown
def test_a_model_without_images_takes_none(browser: Any, eyes: Running) -> None:
    with visit(browser, eyes.url, path="/#engine") as shown:
        page = shown.page
        [model] = httpx.get(f"{eyes.url}/v1/models").json()["data"]
        model["input_modalities"] = ["text"]  # as that of any other model
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
        page.reload()
        page.get_by_role("link", name="Chat").click()
        page.get_by_label("Add text files").wait_for()
        assert page.evaluate(DROP, ["a.png", "image/png", [1]])
        assert alerts(shown) == "a.png was left out: this model reads text files only."
        kinds = page.locator(".kind option").all_inner_texts()
        assert kinds == ["Chat", "Completion"]


# --- recordings -----------------------------------------------------------------------------------------------------


def transcribed(shown: Visit) -> str:
    """The text that the recording in the composer becomes."""
    shown.page.locator(".composer .file").wait_for()
    shown.page.get_by_role("button", name="Transcribe", exact=True).click()
    shown.page.get_by_role("button", name="Transcribe again").wait_for()
    text: str = shown.page.locator(".turn.assistant .text").last.inner_text()
    return text


def test_a_recording_becomes_text_and_subtitles(hears: Visit, tmp_path: Path) -> None:
    page = hears.page
    page.get_by_label("Add recordings").set_input_files(SPEECH)
    assert "lazy dog" in transcribed(hears)
    assert "first token after" in page.locator(".stats").inner_text()
    page.get_by_role("button", name="curl", exact=True).click()
    command = page.locator(".samples pre").inner_text()
    done = subprocess.run(["bash", "-c", command], cwd=SPEECH.parent, capture_output=True, text=True, timeout=PATIENCE)
    assert "lazy dog" in done.stdout and "transcript.text.done" in done.stdout
    page.locator("#setting-response_format").select_option("srt")
    page.get_by_role("button", name="Transcribe again").click()
    page.get_by_text("00:00:00,000 -->").wait_for()
    page.get_by_label("Add recordings").set_input_files(chosen("talk.mp3", b"no recording", "audio/mpeg"))
    transcribed(hears)
    assert "'talk.mp3'" in alerts(hears)
    assert hears.violations() == []
    hears.forgive("400")


@pytest.mark.slow
def test_what_is_spoken_becomes_text(hears: Visit) -> None:
    page = hears.page
    page.get_by_role("button", name="Record", exact=True).click()
    page.get_by_role("button", name=re.compile(r"Stop recording \(3 s\)")).click()
    assert re.search(r"[a-z]{3}", transcribed(hears))


@pytest.mark.slow
def test_the_recording_as_python_runs(hears: Visit, tmp_path: Path) -> None:
    page = hears.page
    page.get_by_label("Add recordings").set_input_files(SPEECH)
    transcribed(hears)
    script = tmp_path / "sample.py"
    for response_format in ("", "vtt"):
        page.locator("#setting-response_format").select_option(response_format)
        script.write_text(page.locator(".samples pre").inner_text())
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=SPEECH.parent, capture_output=True, text=True, timeout=PATIENCE)
        assert "lazy dog" in done.stdout and ("WEBVTT" in done.stdout) == bool(response_format), done.stderr
    page.get_by_label("Kind of request").select_option("translation")
    page.get_by_label("Add recordings").set_input_files(SPEECH)
    page.get_by_role("button", name="Translate").click()
    assert "translate" in alerts(hears)
    hears.forgive("400")
