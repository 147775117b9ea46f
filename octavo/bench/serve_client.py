"""The client of ``octavo bench serve``: one streamed request to an OpenAI-compatible server, with the time of each chunk.

Times are taken as bytes arrive, before they are parsed, and all requests share one event loop and one decoder, so that
the client stays out of what it measures.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from octavo.bench.serve_workload import Request

#: Bytes kept of an answer that is no stream, to say what the error was.
ERROR_BYTES = 4_096
#: An event longer than this is not from a server of completions.
EVENT_BYTES = 16 << 20


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds, on the clock of ``time.perf_counter()``."""

    #: When it was due and when it was sent.
    due: float
    sent: float
    #: When its last byte came, or the error.
    ended: float = 0.0
    #: When the chunks came that carried text; if none did, the one that ended it.
    chunks: array[float] = field(default_factory=lambda: array("d"))
    #: As the server counted them; output tokens are the chunks where it did not.
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    #: "http 429", "connect", "timeout", "cut off", "error in stream" and so on; None if all went well.
    error: str | None = None
    #: What the server said of it.
    error_text: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.chunks[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None if there is none."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


class Client:
    """Sends requests to one endpoint of a server; to be used within ``async with``."""

    def __init__(self, base_url: str, endpoint: str, body: dict[str, Any], api_key: str | None, timeout: float) -> None:
        """Every request has ``body`` but for the prompt and the length; ``timeout`` in seconds is for a whole request.

        A field of ``body`` that is None is left out, also one that would be set here.
        """
        self._chat = endpoint == "chat"
        self._url = f"{base_url.rstrip('/')}/v1/{'chat/completions' if self._chat else 'completions'}"
        self._body = body
        self._timeout = timeout
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            # Answers over a connection of an earlier request save the server accepting a new one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._http.aclose()

    async def send(self, request: Request, due: float | None = None) -> Outcome:
        """Sends it and reads the answer to its end; never raises for what the server does."""
        content = msgspec.json.encode(self._fields(request))
        sent = time.perf_counter()
        outcome = Outcome(due=sent if due is None else due, sent=sent)
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._http.stream("POST", self._url, content=content) as response,
            ):
                if response.status_code == 200:
                    await self._read(response.aiter_raw(), outcome)
                else:
                    outcome.error = f"http {response.status_code}"
                    outcome.error_text = await _beginning(response.aiter_raw())
        except TimeoutError:
            outcome.error = "timeout"
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as e:
            outcome.error, outcome.error_text = "connect", str(e)
        except httpx.HTTPError as e:
            outcome.error, outcome.error_text = "cut off", str(e) or type(e).__name__
        outcome.ended = time.perf_counter()
        return outcome

    def _fields(self, request: Request) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self._chat:
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        fields = {
            **prompt,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._body,
        }
        return {name: value for name, value in fields.items() if value is not None}

    async def _read(self, pieces: AsyncIterator[bytes], outcome: Outcome) -> None:
        rest = b""
        ended: float | None = None
        done = False
        async for piece in pieces:
            now = time.perf_counter()
            *lines, rest = (rest + piece if rest else piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    done = True
                    continue
                text, finished = _take(line[5:], outcome)
                if outcome.error:
                    return
                if text:
                    outcome.chunks.append(now)
                if finished:
                    ended = now
            if len(rest) > EVENT_BYTES:
                outcome.error = "bad event"
                return
        if not done and ended is None:
            outcome.error = "cut off"
        elif not outcome.chunks:
            # Nothing to show, as of special tokens alone.
            outcome.chunks.append(ended or time.perf_counter())
        if not outcome.has_usage:
            outcome.output_tokens = len(outcome.chunks)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


def _take(data: bytes, outcome: Outcome) -> tuple[bool, bool]:
    """Notes what an event says beside text; returns whether it carries text, and whether it ends the completion."""
    try:
        event = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        outcome.error, outcome.error_text = "bad event", str(e)
        return False, False
    if event.error is not None:
        outcome.error = "error in stream"
        outcome.error_text = msgspec.json.encode(event.error).decode()[:ERROR_BYTES]
        return False, False
    if event.usage is not None:
        outcome.has_usage = True
        outcome.prompt_tokens = event.usage.prompt_tokens
        outcome.output_tokens = event.usage.completion_tokens
    text = finished = False
    for choice in event.choices:
        delta = choice.delta
        text = text or bool(choice.text or (delta and (delta.content or delta.reasoning_content)))
        finished = finished or choice.finish_reason is not None
    return text, finished


async def _beginning(pieces: AsyncIterator[bytes]) -> str:
    found = b""
    async for piece in pieces:
        found += piece
        if len(found) >= ERROR_BYTES:
            break
    return found[:ERROR_BYTES].decode("utf-8", "replace")
