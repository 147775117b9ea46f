"""The client of ``octavo bench serve``: a streamed request to an OpenAI-compatible server, timed chunk by chunk.

Times are taken as bytes arrive, before they are parsed, and all requests share one event loop and one decoder, so that
the client adds little to the latencies that it measures.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.errors import ConfigError
from octavo.lab.bench.serve_http import CutOffError, Poster, ProtocolError
from octavo.lab.bench.serve_workload import Request

#: Most bytes kept of an error response.
ERROR_BYTES = 4_096
#: Longest event in bytes.
EVENT_BYTES = 16 << 20
#: Seconds in which a server has to accept the first connection.
CONNECT_SECONDS = 10.0


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. Times in seconds, on the clock of ``time.perf_counter()``."""

    #: When it was due and when it was sent.
    due: float
    sent: float
    #: When the last byte arrived, or the error.
    ended: float = 0.0
    #: Arrival of each chunk with text; if there was none, of the last chunk.
    chunks: array[float] = field(default_factory=lambda: array("d"))
    #: Token counts of the server's usage; without usage, output tokens are the number of chunks.
    prompt_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    #: "http 429", "connect", "timeout", "cut off", "error in stream" and so on; None: no error.
    error: str | None = None
    #: The server's message.
    error_text: str = ""
    #: The request's own limits of latency, see ``Request``.
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text."""
        return self.chunks[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last byte."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first; None with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)


class Client:
    """Sends requests to one endpoint of a server."""

    def __init__(self, base_url: str, endpoint: str, body: dict[str, Any], api_key: str | None, timeout: float) -> None:
        """``body`` holds fields of every request; ``timeout`` in seconds is for a whole request.

        ``base_url`` may end in ``/v1`` or not. A field that is None in ``body`` is left out of the request.

        Raises:
            ConfigError: the URL has no host, or the key cannot be sent.
        """
        self._chat = endpoint == "chat"
        self._body = body
        self._timeout = timeout
        self._url = base_url
        base = base_url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "User-Agent": "octavo-bench"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            self._poster = Poster(f"{base}/v1/{'chat/completions' if self._chat else 'completions'}", headers)
        except ValueError as e:
            raise ConfigError(f"cannot send requests to {base_url!r}: {e}") from None

    async def connect(self) -> None:
        """Looks whether there is a server, so that a run without one ends before its first request.

        Raises:
            ConfigError: no connection can be made.
        """
        try:
            async with asyncio.timeout(min(self._timeout, CONNECT_SECONDS)):
                await self._poster.connect()
        except OSError as e:  # includes TimeoutError
            reason = str(e) or f"no answer within {CONNECT_SECONDS:g} s"
            raise ConfigError(
                f"there is no server at {self._url} ({reason}): start one in another terminal ('octavo serve MODEL') "
                "and wait until it says 'serving'; or name its address with --base-url"
            ) from None

    async def send(self, request: Request, due: float | None = None) -> RequestOutcome:
        """Sends a request and reads the response; failures of the server go into the outcome."""
        content = msgspec.json.encode(self._fields(request))
        sent = time.perf_counter()
        outcome = RequestOutcome(due=sent if due is None else due, sent=sent, limits=request.limits)
        reader = _ResponseReader(outcome)
        try:
            async with asyncio.timeout(self._timeout):
                status = await self._poster.post(content, reader.feed)
            reader.end(status)
        except TimeoutError:
            outcome.error = "timeout"
        except ResponseError as e:
            outcome.error, outcome.error_text = e.kind, e.text
        except (CutOffError, ProtocolError) as e:
            outcome.error, outcome.error_text = "cut off" if isinstance(e, CutOffError) else "not HTTP", str(e)
        except OSError as e:
            outcome.error, outcome.error_text = "connect", str(e)
        outcome.ended = time.perf_counter()
        return outcome

    def close(self) -> None:
        """Closes the connections."""
        self._poster.close()

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
            **request.body,
            **self._body,
        }
        return {name: value for name, value in fields.items() if value is not None}


class ResponseError(Exception):
    """A response that is not a completion."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


class EventReader:
    """Reads the events of a streamed response as they arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, status: int, piece: bytes, now: float) -> None:
        """Reads a piece of the body.

        Raises:
            ResponseError: the request failed, or the body is not a stream of completions.
        """
        *lines, self._rest = (self._rest + piece if self._rest else piece).split(b"\n")
        if status != 200:
            self._rest = b"\n".join((*lines, self._rest))[:ERROR_BYTES]
            return
        for line in lines:
            if line.startswith(b"data:"):
                self.read_event(line[5:].strip(), now)
        if len(self._rest) > EVENT_BYTES:
            raise ResponseError("bad event", f"longer than {EVENT_BYTES} bytes")

    def end(self, status: int) -> None:
        """The response has ended.

        Raises:
            ResponseError: the status is an error.
        """
        if status != 200:
            raise ResponseError(f"http {status}", self._rest.decode("utf-8", "replace"))

    def read_event(self, data: bytes, now: float) -> None:
        """Reads the data of an event that arrived ``now``."""
        raise NotImplementedError


class _ResponseReader(EventReader):
    """Reads the events of a response into its outcome."""

    def __init__(self, outcome: RequestOutcome) -> None:
        super().__init__()
        self._outcome = outcome
        self._finished = False

    def end(self, status: int) -> None:
        """As of the base class; raises also if the completion is not finished."""
        super().end(status)
        outcome = self._outcome
        if not self._finished:
            raise ResponseError("cut off", "the stream ended without [DONE] or a finish reason")
        if not outcome.has_usage:
            outcome.output_tokens = len(outcome.chunks)

    def read_event(self, data: bytes, now: float) -> None:
        """As of the base class; raises ``ResponseError`` if the event is none of a completion."""
        outcome = self._outcome
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise ResponseError("bad event", str(e)) from None
        if event.error is not None:
            raise ResponseError("error in stream", msgspec.json.encode(event.error).decode()[:ERROR_BYTES])
        if event.usage is not None:
            outcome.has_usage = True
            outcome.prompt_tokens = event.usage.prompt_tokens
            outcome.output_tokens = event.usage.completion_tokens
        for choice in event.choices:
            delta = choice.delta
            self._finished = self._finished or choice.finish_reason is not None
            text = choice.text or (delta and (delta.content or delta.reasoning_content))
            # An output without text, as of special tokens alone, counts as one chunk at its end.
            if text or (self._finished and not outcome.chunks):
                outcome.chunks.append(now)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _UsageField(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _UsageField | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
