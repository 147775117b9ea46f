"""Images over HTTP: OpenAI's and Anthropic's clients, and what cannot be taken is refused, alone and within bounds."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from octavo import LLM, SamplingParams
from tests.image_models import picture, save_llava
from tests.images.image_cases import bomb, file_of, noise
from tests.images.test_image_sources import answered, web
from tests.server.running_server import Running, running

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

FLAGS = ("--num-threads", "1", "--max-num-seqs", "16", "--status-interval", "0", "--num-gpu-blocks-override", "400")
LIMITS = ("--limit-mm-per-prompt", '{"image": 3}', "--max-body-bytes", str(48 << 20), "--max-image-bytes", "3MiB")
URLS = ("--allow-image-urls", "--image-url-networks", "127.0.0.1/32", "--image-url-seconds", "3")
A, B = picture(40, 56, 1), picture(90, 31, 2)
WHAT: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    save_llava(path)
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("image-server") / "log"
    names = ("--served-model-name", "eyes", "--dtype", "float32")
    with running(folder, log, *FLAGS, *LIMITS, *URLS, *names) as found:
        yield found


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", num_gpu_blocks_override=400, max_num_seqs=16)


def data_url(image: np.ndarray | bytes) -> str:
    content = image if isinstance(image, bytes) else file_of(image)
    return "data:image/png;base64," + base64.b64encode(content).decode()


def image_part(image: np.ndarray | bytes | str, **more: Any) -> dict[str, Any]:
    url = image if isinstance(image, str) else data_url(image)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(server: Running, *parts: Any, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], "return_token_ids": True, **WHAT, **more}
    with server.http() as http:
        return http.post("/v1/chat/completions", json=body)


def tokens_of(answer: httpx.Response) -> tuple[list[int], list[int]]:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["prompt_token_ids"], found["choices"][0]["token_ids"]


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert error["param"] == "messages", error
    return str(error["message"])


def offline(llm: LLM, text: str, *images: Any) -> tuple[list[int], list[int]]:
    prompt = {"prompt": f"<user>{text}<assistant>", "multi_modal_data": {"image": list(images)}}
    [output] = llm.generate(prompt, SamplingParams(**WHAT), use_tqdm=False)
    return output.prompt_token_ids, output.outputs[0].token_ids


def test_a_mark_behind_an_image_holds_its_tokens_and_none_after_it(server: Running) -> None:
    def usage(*parts: dict[str, Any]) -> Any:
        body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}
        return server.post("/v1/chat/completions", **body)["usage"]

    image = image_part(picture(30, 44, 9))
    marked = {**image, "cache_control": {"type": "ephemeral"}}
    without = usage(text_part("Look at this: "), text_part("one"))["prompt_tokens"]
    first = usage(text_part("Look at this: "), marked, text_part("one"))
    details = first["prompt_tokens_details"]
    held = details["cached_tokens"] + details["cache_write_tokens"]
    assert held > first["prompt_tokens"] - without - 16, "all but a part of a block of the image"
    second = usage(text_part("Look at this: "), image, text_part("another text"))["prompt_tokens_details"]
    assert second["cached_tokens"] >= held


def test_a_chat_has_the_tokens_of_the_prompt_with_its_images(server: Running, llm: LLM) -> None:
    assert tokens_of(chat(server, image_part(A), text_part("what?"))) == offline(llm, "<image>what?", A)
    parts = [text_part("one "), image_part(A, detail="low"), text_part("two "), image_part(B), image_part(A)]
    assert tokens_of(chat(server, *parts)) == offline(llm, "one <image>two <image><image>", A, B, A)
    usage = chat(server, *parts).json()["usage"]
    assert usage["prompt_tokens"] == len(offline(llm, "one <image>two <image><image>", A, B, A)[0])
    assert chat(server, image_part(A), text_part("what?")).json() != chat(server, image_part(B), text_part("what?"))


def test_ollamas_routes_take_images_in_base64(server: Running) -> None:
    """Images come before the text of their message."""
    image = base64.b64encode(file_of(A)).decode()
    body = {"messages": [{"role": "user", "content": [image_part(A), text_part("what?")]}], **WHAT}
    options = {"temperature": WHAT["temperature"], "num_predict": WHAT["max_tokens"]}
    message = {"role": "user", "content": "what?", "images": [image]}
    with server.http() as http:
        expected = http.post("/v1/chat/completions", json=body).json()
        common = {"model": "eyes", "stream": False, "options": options}
        made = http.post("/api/chat", json={**common, "messages": [message]}).json()
        text = http.post("/api/generate", json={**common, "prompt": "what?", "images": [image]}).json()
        assert "vision" in http.post("/api/show", json={"model": "eyes"}).json()["capabilities"]
        wrong = http.post("/api/generate", json={**common, "prompt": "what?", "images": ["no image"]})
    assert made["message"]["content"] == text["response"] == expected["choices"][0]["message"]["content"]
    assert made["prompt_eval_count"] == text["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert "context" not in text  # token ids alone do not say which images there were
    assert wrong.status_code == 400 and "base64" in wrong.json()["error"]


def test_llm_chat_takes_the_same_messages(server: Running, llm: LLM) -> None:
    expected = tokens_of(chat(server, image_part(A), text_part("what?")))
    for part in (
        image_part(A),
        {"type": "image", "image": A},
        {"type": "image_pil", "image_pil": Image.fromarray(A)},
        {"type": "image", "image": file_of(A)},
    ):
        message = {"role": "user", "content": [part, text_part("what?")]}
        [output] = llm.chat([message], SamplingParams(**WHAT), use_tqdm=False)
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == expected


IMAGES = [A, B]
MIXES = st.lists(st.one_of(st.integers(0, 1), st.text("abc .", min_size=1, max_size=6)), min_size=1, max_size=6).filter(
    lambda parts: sum(isinstance(part, int) for part in parts) <= 3
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(MIXES)
def test_any_mix_of_parts_is_the_same_on_all_routes(server: Running, llm: LLM, mix: list[int | str]) -> None:
    """And offline. Texts beside each other are joined by a line break."""
    expected = ""
    for i, part in enumerate(mix):
        follows = i > 0 and isinstance(part, str) and isinstance(mix[i - 1], str)
        expected += "<image>" if isinstance(part, int) else f"\n{part}" if follows else part
    images = [IMAGES[part] for part in mix if isinstance(part, int)]
    made = chat(server, *(text_part(p) if isinstance(p, str) else image_part(IMAGES[p]) for p in mix))
    assert tokens_of(made) == offline(llm, expected, *images)
    said = made.json()["choices"][0]["message"]["content"]
    blocks = [text_part(p) if isinstance(p, str) else anthropic_block(IMAGES[p]) for p in mix]
    items = [{"type": "input_text", "text": p} if isinstance(p, str) else
             {"type": "input_image", "image_url": data_url(IMAGES[p])} for p in mix]  # fmt: skip
    with server.http() as http:
        messages = [{"role": "user", "content": blocks}]
        message = http.post("/v1/messages", json={"model": "eyes", "messages": messages, **WHAT}).json()
        given_items = [{"role": "user", "content": items}]
        body = {"input": given_items, "max_output_tokens": 8, "temperature": 0.0, "seed": 5}
        response = http.post("/v1/responses", json=body).json()
    assert "".join(block["text"] for block in message["content"]) == said
    assert "".join(part["text"] for item in response["output"] for part in item["content"]) == said


def anthropic_block(image: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(file_of(image)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_openai_client(server: Running, llm: LLM) -> None:
    expected = tokens_of(chat(server, image_part(A), text_part("what?")))
    with server.client() as client:
        message: Any = {"role": "user", "content": [image_part(A, detail="high"), text_part("what?")]}
        made = client.chat.completions.create(model="eyes", messages=[message], **WHAT)
        stream = client.chat.completions.create(model="eyes", messages=[message], stream=True, **WHAT)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == made.choices[0].message.content
        given: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data_url(A), "detail": "auto"},
                    {"type": "input_text", "text": "what?"},
                ],
            }
        ]
        response = client.responses.create(model="eyes", input=given, max_output_tokens=8, temperature=0.0)
        assert response.output_text == made.choices[0].message.content
        assert response.usage is not None and response.usage.input_tokens == len(expected[0])
        further = client.responses.create(
            model="eyes", input="and?", previous_response_id=response.id, max_output_tokens=4
        )
        assert further.usage is not None and further.usage.input_tokens > len(expected[0])
        items = client.responses.input_items.list(response.id)
        assert items.data[0].content[0].image_url == data_url(A)  # type: ignore[union-attr, index]
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[\d\]\.image_url"):
            bad: Any = {"role": "user", "content": [image_part(b"nothing")]}
            client.chat.completions.create(model="eyes", messages=[bad], **WHAT)


def test_anthropic_client(server: Running) -> None:
    expected = chat(server, image_part(A), text_part("what?")).json()
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        source: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(A)).decode()}
        messages: Any = [
            {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]}
        ]
        made = client.messages.create(model="eyes", messages=messages, max_tokens=8, extra_body={"temperature": 0.0})
        assert made.content[0].text == expected["choices"][0]["message"]["content"]  # type: ignore[union-attr]
        counted = client.messages.count_tokens(model="eyes", messages=messages)
        assert counted.input_tokens == expected["usage"]["prompt_tokens"]
        source["data"] = base64.b64encode(file_of(A)[:100]).decode()
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[\d\]\.image_url"):
            client.messages.create(model="eyes", messages=messages, max_tokens=8)
        messages[0]["content"][0] = {"type": "image", "source": {"type": "url"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.url"):
            client.messages.create(model="eyes", messages=messages, max_tokens=8)


def test_the_models_page_says_that_images_are_read(server: Running) -> None:
    with server.http() as http:
        [model] = http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]


def animated() -> bytes:
    frames = [Image.fromarray(noise(8, 8, seed=i)) for i in range(3)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (bomb(), "image_url has 100000 x 100000 pixels; at most 67108864 in all are taken"),
        (file_of(noise(64, 64))[:2000], "image_url is damaged or cut off"),
        (animated(), "image_url is animated"),
        (b"%PDF-1.7 " + bytes(50), "image_url is no image that can be decoded"),
        (b"", "image_url is empty"),
        (file_of(noise(1, 300)), "300 x 1 pixels is too long"),
        ("data:image/png;base64,####", "image_url is not valid base64"),
        ("data:text/plain,hello", "image_url must begin as data:image/png;base64,"),
        ("file:///etc/passwd", "must be a URL that begins with http://, https:// or data:"),
        ("data:image/png;base64," + "A" * (20 << 20), "image_url has about 15728640 bytes; at most 3145728 are taken"),
        ("http://169.254.169.254/latest/meta-data", "has an address that is not public"),
        ("http://localhost:1/", "is not public|there is no connection"),
    ],
    ids=["bomb", "cut", "animated", "pdf", "empty", "long", "base64", "text", "file", "large", "metadata", "local"],
)
def test_bad_images_are_refused_and_nothing_else_is_disturbed(
    server: Running, image: bytes | str, message: str
) -> None:
    before = server.process.poll()
    words = refusal(chat(server, text_part("a"), image_part(image), text_part("b")))
    assert any(part in words for part in message.split("|")), words
    assert before is None and server.process.poll() is None
    tokens_of(chat(server, image_part(A), text_part("and this?")))


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P", "RGBA", "I;16", "EXIF"])
def test_images_of_all_kinds_are_taken(server: Running, mode: str) -> None:
    options: dict[str, Any] = {}
    if mode == "I;16":
        image = Image.fromarray(np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 60)
    elif mode == "EXIF":
        image, options["exif"] = Image.fromarray(A), Image.Exif()
        options["exif"][0x0112] = 6
    else:
        image = Image.fromarray(A).convert(mode)
    tokens_of(chat(server, image_part(file_of(image, "JPEG" if mode == "CMYK" else "PNG", **options))))


def test_places_and_images_have_to_agree(server: Running) -> None:
    message = refusal_text(chat(server, text_part("no image at <image>")))
    assert "<image>" in message and "0 images" in message
    message = refusal(chat(server, *[image_part(A)] * 4))
    assert all(word in message for word in ("4 images", "at most 3", "limit_mm_per_prompt"))
    message = refusal_text(chat(server, image_part(A), truncate_prompt_tokens=5))
    assert "truncate_prompt_tokens" in message


def refusal_text(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_one_bad_image_among_several_is_named(server: Running) -> None:
    message = refusal(chat(server, image_part(A), image_part(b"nothing"), image_part(B)))
    assert message.startswith("messages[0].content[1].image_url ")


def test_a_body_that_is_too_large_is_refused_by_its_length(server: Running) -> None:
    answer = chat(server, image_part("data:image/png;base64," + "A" * (49 << 20)))
    assert answer.status_code == 413 and "max_body_bytes" in answer.text


def test_images_come_from_urls(server: Running) -> None:
    """Of networks that the operator named; slow, endless and redirected ones end."""

    async def answer(request: str, writer: asyncio.StreamWriter) -> None:
        path = request.split()[1]
        if path == "/slow":
            await asyncio.sleep(60)
        if path == "/away":
            head = "Location: http://127.0.0.2:1/\r\n"
            return await answered(b"", head, "302 Found")(request, writer)
        if path == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        return await answered(file_of(A))(request, writer)

    ports: list[int] = []
    ended = threading.Event()

    async def serve() -> None:
        async with web(answer) as port:
            ports.append(port)
            while not ended.is_set():
                await asyncio.sleep(0.05)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, serve())
        try:
            while not ports:
                time.sleep(0.01)
            base = f"http://127.0.0.1:{ports[0]}"
            same = tokens_of(chat(server, image_part(A), text_part("x")))
            assert tokens_of(chat(server, image_part(f"{base}/a.png"), text_part("x"))) == same
            assert "3 seconds" in refusal(chat(server, image_part(f"{base}/slow")))
            assert "not public" in refusal(chat(server, image_part(f"{base}/away")))
            assert "more than the 3145728 bytes" in refusal(chat(server, image_part(f"{base}/endless")))
        finally:
            ended.set()


def test_clients_with_and_without_images_all_get_their_answers(server: Running) -> None:
    """6 with images beside 6 with text: each gets what it gets alone."""
    images = [picture(20 + 3 * i, 50, i) for i in range(6)]
    asked: list[list[dict[str, Any]]] = []
    for i, image in enumerate(images):
        asked += [[image_part(image), text_part(f"what is {i}?")], [text_part(f"count from {i}")]]
    alone = [tokens_of(chat(server, *parts)) for parts in asked]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda parts: tokens_of(chat(server, *parts)), asked))
    assert together == alone
    server.wait_until_idle()
