"""Recordings over HTTP: OpenAI's client, streams, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import soundfile

from tests.busy_machine import PATIENCE
from tests.server.running_server import Running, running

SPEECH = Path(__file__).resolve().parent.parent / "data" / "speech.ogg"
MAX_BYTES, MAX_SECONDS = 4 << 20, 90


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("speech-server") / "log"
    flags = ("--num-threads", "1", "--max-num-seqs", "16", "--status-interval", "0", "--served-model-name", "ears")
    limits = ("--max-audio-bytes", str(MAX_BYTES), "--max-audio-seconds", str(MAX_SECONDS))
    with running("whisper-tiny.en", log, *flags, *limits) as found:
        yield found


def speech(seconds: float = 3.0) -> bytes:
    """The beginning of the recording, or several of it."""
    samples, rate = soundfile.read(SPEECH, dtype="float32")
    repeated = np.tile(samples, int(seconds * rate / len(samples)) + 1)[: int(seconds * rate)]
    out = io.BytesIO()
    soundfile.write(out, repeated, rate, format="FLAC")
    return out.getvalue()


def post(server: Running, route: str = "transcriptions", **parts: Any) -> httpx.Response:
    files = {"file": ("speech.flac", parts.pop("file", speech()))}
    with server.http() as http:
        return http.post(f"/v1/audio/{route}", data=parts, files=files)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_openai_client(server: Running) -> None:
    data = SPEECH.read_bytes()
    with server.client() as client:
        assert client.models.retrieve("ears").model_extra["input_modalities"] == ["audio"]  # type: ignore[index]
        made = client.audio.transcriptions.create(model="ears", file=("speech.ogg", data))
        assert "lazy dog" in made.text
        assert made.usage is not None
        assert made.usage.type == "duration"
        assert made.usage.seconds == 8
        verbose = client.audio.transcriptions.create(
            model="ears", file=("speech.ogg", data), response_format="verbose_json", language="en", prompt="A story."
        )
        assert verbose.language == "english"
        assert verbose.segments is not None
        assert verbose.segments[0].start == 0.0
        assert "".join(segment.text for segment in verbose.segments).strip() == verbose.text
        assert all(0 <= segment.no_speech_prob < 0.6 for segment in verbose.segments)
        timed = client.audio.transcriptions.create(
            model="ears",
            file=("speech.ogg", data),
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert timed.words is not None
        assert " ".join(word.word for word in timed.words) == timed.text
        times = [time for word in timed.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= timed.duration
        assert timed.segments
        text = client.audio.transcriptions.create(model="ears", file=("speech.ogg", data), response_format="text")
        assert str(text).strip() == made.text
        events = list(client.audio.transcriptions.create(model="ears", file=("speech.ogg", data), stream=True))
    *deltas, done = events
    assert [event.type for event in deltas] == ["transcript.text.delta"] * len(deltas)
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text == made.text  # type: ignore[union-attr]
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


@pytest.mark.parametrize(("form", "start"), [("srt", "1\n00:00:00,000 --> "), ("vtt", "WEBVTT\n\n00:00:00.000 --> ")])
def test_subtitles(server: Running, form: str, start: str) -> None:
    answer = post(server, response_format=form)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/")
    assert answer.text.startswith(start)


def test_the_same_recording_has_the_same_answer_in_company(server: Running) -> None:
    alone = post(server, response_format="verbose_json").json()

    async def many() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
            parts = [{"file": ("a.flac", speech(3.0 + i % 2))} for i in range(6)]
            data = {"response_format": "verbose_json"}
            return await asyncio.gather(*(http.post("/v1/audio/transcriptions", data=data, files=p) for p in parts))

    answers = asyncio.run(many())
    assert [answer.json() for answer in answers[::2]] == [alone] * 3


NO_AUDIO = {
    "text": (b"No audio at all, but a text.\n" * 10, "is a text file"),
    "nothing": (b"", "is empty: 0 bytes"),
    "video": (b"\x00\x00\x00\x20ftypisom" + bytes(200), "is an MP4 or M4A file"),
    "cut off": (speech(6.0)[:20_000], "cut off|damaged"),
    "too long": (speech(MAX_SECONDS + 5), f"at most {MAX_SECONDS} s are taken"),
}


@pytest.mark.parametrize("what", NO_AUDIO)
def test_what_cannot_be_read_is_refused_by_name(server: Running, what: str) -> None:
    import re

    data, reason = NO_AUDIO[what]
    answer = post(server, file=data)
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["param"], error["code"]) == ("file", "invalid_audio")
    assert "'speech.flac'" in error["message"]
    assert re.search(reason, error["message"])


def test_an_upload_that_is_too_large_is_refused(server: Running) -> None:
    answer = post(server, file=bytes(MAX_BYTES + (2 << 20)))
    assert answer.status_code == 413
    assert "max_audio_bytes" in error_of(answer)["message"]


def test_the_bound_of_other_bodies_is_as_before(server: Running) -> None:
    with server.http() as http:
        answer = http.post("/tokenize", content=bytes(9 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "max_body_bytes" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("parts", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": "3"}, "temperature", "less than or equal to 2"),
        ({"response_format": "pdf"}, "response_format", "not 'pdf'"),
        ({"language": "klingon"}, "language", "not known"),
        ({"language": "de"}, "language", "the model is English"),
        ({"tempo": "1"}, "tempo", "unknown field"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"top_p": "0.5"}, "top_p", "not supported"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
def test_fields_that_are_wrong(server: Running, parts: dict[str, str], param: str, words: str) -> None:
    error = error_of(post(server, **parts))
    assert error["param"] == param
    assert words in error["message"]


def test_hints_and_values_that_mean_what_is_done_are_accepted(server: Running) -> None:
    parts = {"chunking_strategy": "auto", "top_p": "1.0", "stream": "false", "seed": "7", "temperature": "0"}
    assert post(server, **parts).status_code == 200


def test_a_body_that_is_no_form(server: Running) -> None:
    with server.http() as http:
        answer = http.post("/v1/audio/transcriptions", json={"file": "x"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_form")
        answer = http.post("/v1/audio/transcriptions", data={"model": "ears"}, files={"other": b"x"})
        assert (answer.status_code, error_of(answer)["code"]) == (400, "missing_file")
        torn = {"content-type": "multipart/form-data; boundary=x"}
        answer = http.post("/v1/audio/transcriptions", content=b"--x\r\nnonsense", headers=torn)
        assert answer.status_code == 400


def test_requests_of_the_other_kind_are_refused_by_name(server: Running, vector_server: Running) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError, match="cannot generate text; it can: transcribe recordings"):
            client.chat.completions.create(model="ears", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(openai.BadRequestError, match="cannot generate text"):
            client.completions.create(model="ears", prompt="a")
        with pytest.raises(openai.BadRequestError, match="cannot embed"):
            client.embeddings.create(model="ears", input="a")
        with pytest.raises(openai.BadRequestError, match="needs a multilingual model"):
            client.audio.translations.create(model="ears", file=("a.flac", speech()))
    answer = post(vector_server)
    assert answer.status_code == 400
    assert "cannot transcribe recordings" in error_of(answer)["message"]


def test_clients_that_hang_up_leave_the_server_alive(server: Running) -> None:
    data = speech(45.0)

    async def hang_up(http: httpx.AsyncClient, seconds: float) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            await http.post("/v1/audio/transcriptions", files={"file": ("long.flac", data)}, timeout=seconds)

    async def hang_up_all() -> None:
        async with httpx.AsyncClient(base_url=server.url) as http:
            for number in range(10):
                await asyncio.gather(*(hang_up(http, 0.01 + 0.03 * number + 0.02 * i) for i in range(4)))

    asyncio.run(hang_up_all())
    server.wait_until_idle()
    assert server.process.poll() is None
    assert post(server).status_code == 200


def test_recordings_outlive_processes_that_decode_them(server: Running) -> None:
    expected, data = post(server, file=SPEECH.read_bytes()).json(), SPEECH.read_bytes()

    def decoders() -> list[psutil.Process]:
        children = psutil.Process(server.process.pid).children()
        return [child for child in children if "octavo.process.sandbox_process" in child.cmdline()]

    assert decoders()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(post, server, file=data) for _ in range(4)]
        for process in decoders():
            process.kill()
    for answer in answers:
        assert answer.result().status_code == 200
        assert answer.result().json() == expected


@pytest.mark.parametrize("error", ["OSError('no library')", "ModuleNotFoundError('_soundfile_data')"])
def test_without_what_decodes_the_server_says_so_at_start_and_clients_do_not_try_again(
    error: str, tmp_path: Path
) -> None:
    (tmp_path / "soundfile.py").write_text(f"raise {error}")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with running("whisper-tiny.en", tmp_path / "log", "--num-threads", "1", env=env) as server:
        assert "soundfile" in server.wait_for_log("pip install")
        for stream in ("false", "true"):
            answer = post(server, stream=stream)
            assert answer.status_code == 400
            assert error_of(answer)["code"] == "audio_not_installed"
            assert "octavo[audio]" in error_of(answer)["message"]


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_recording(server: Running) -> None:
    data = speech(45.0)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
            parts = {"data": {"stream": "true"}, "files": {"file": ("long.flac", data)}}
            async with http.stream("POST", "/v1/audio/transcriptions", **parts) as answer:  # type: ignore[arg-type]
                async for _ in answer.aiter_lines():
                    break

    asyncio.run(leave())
    server.wait_until_idle()
    assert post(server).status_code == 200


def test_the_description_has_the_form(server: Running) -> None:
    with server.http() as http:
        page = http.get("/openapi.json").json()
    form = page["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file"]
    assert {"file", "language", "response_format", "stream"} <= form["properties"].keys()
    assert "top_p" not in form["properties"]


@pytest.mark.slow
def test_32_clients_lose_nothing(server: Running) -> None:
    """Recordings of 5 to 60 s, half of them as streams; each answer is that of the same recording alone."""
    lengths = [5.0 + 55.0 * i / 31 for i in range(32)]

    async def one(http: httpx.AsyncClient, number: int) -> str:
        data = {"temperature": "0.01"}  # one alone: speech that is repeated is no reason to draw again
        files = {"file": (f"{number}.flac", speech(lengths[number]))}
        if number % 2:
            answer = await http.post("/v1/audio/transcriptions", data={**data, "stream": "true"}, files=files)
            assert answer.status_code == 200
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            assert "".join(event.get("delta", "") for event in events) == events[-1]["text"]
            return str(events[-1]["text"])
        answer = await http.post("/v1/audio/transcriptions", data=data, files=files)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["text"])

    async def many(numbers: list[int]) -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
            return await asyncio.gather(*(one(http, number) for number in numbers))

    together = asyncio.run(many(list(range(32))))
    assert all(together)
    for number in (0, 7, 20, 31):
        assert asyncio.run(many([number])) == [together[number]]
    server.wait_until_idle()
