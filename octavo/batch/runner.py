"""Answers the rows of a batch by the server's own application, called in this process. Read ``run_batch`` first."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import stat
import time
import uuid
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tqdm import tqdm

from octavo.config.engine_config import EngineConfig
from octavo.config.server_options import ServerOptions
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.files import JSON_ERRORS, numbered_lines, open_binary
from octavo.engine.async_llm import AsyncLLM
from octavo.server.app import make_app
from octavo.server.http.errors import as_api_error, unsupported
from octavo.server.logging import new_request_id
from octavo.server.metrics import Metrics
from octavo.server.serve import check_plug_ins
from octavo.server.state import ServerState, make_service

logger = logging.getLogger("octavo")

# The input file: one request per line, ``{"custom_id", "method", "url", "body"}``.

#: Routes that a row may name.
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score")

#: Identifies a row: its ``custom_id``, or the number of its line if it has none.
Key = str | int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the input: a request, or an error."""

    #: Number of the line, from 1.
    line: int
    custom_id: str | None
    url: str = ""
    #: JSON; the route decides whether it is valid.
    body: bytes = b""
    error: str | None = None

    @property
    def key(self) -> Key:
        return self.line if self.custom_id is None else self.custom_id


class _Name(msgspec.Struct):
    custom_id: str


class _Envelope(msgspec.Struct):
    method: str
    url: str
    body: msgspec.Raw


def read_rows(path: Path) -> Iterator[Row]:
    """The rows, in order, without empty lines; raises ``ConfigError`` if the file cannot be read."""
    with open_binary(path) as stream:
        if not stream.seekable():  # it is read twice: to find duplicates before anything runs, and to run
            raise ConfigError(f"{path} must be a file, not a pipe")
        for number, line in numbered_lines(stream):
            yield _read_row(number, line)


def _read_row(number: int, line: bytes) -> Row:
    custom_id: str | None = None
    try:
        custom_id = msgspec.json.decode(line, type=_Name).custom_id
        envelope = msgspec.json.decode(line, type=_Envelope)
    except JSON_ERRORS as e:
        return Row(number, custom_id, error=f"line {number}: {e}")
    if envelope.method != "POST":
        return Row(number, custom_id, error=f"line {number}: method must be 'POST', not {envelope.method!r}")
    if envelope.url not in URLS:
        error = f"line {number}: url must be one of {', '.join(URLS)}, not {envelope.url!r}"
        return Row(number, custom_id, error=error)
    return Row(number, custom_id, envelope.url, bytes(envelope.body))


def index_rows(path: Path) -> dict[Key, int]:
    """The line number of each row."""
    lines: dict[Key, int] = {}
    for row in read_rows(path):
        if row.key in lines:
            raise ConfigError(
                f"custom_id {row.key!r} is on lines {lines[row.key]} and {row.line} of {path}; each may be there once"
            )
        lines[row.key] = row.line
    if not lines:
        raise ConfigError(f"{path} holds no request")
    return lines


# The output file: one line per answered row, appended by one write, so that a run can be resumed.

#: The start of every line.
_PREFIX = b'{"id":"batch_req_'


class Response(msgspec.Struct):
    """The response of a route, which may have an error status."""

    status_code: int
    request_id: str
    #: JSON.
    body: msgspec.Raw


class BatchRowError(msgspec.Struct):
    """The error of a row that did not reach a route."""

    code: str
    message: str
    #: Number of the line in the input; identifies a row without ``custom_id``.
    line: int


class Result(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: BatchRowError | None

    @property
    def key(self) -> Key | None:
        """The row in the input, if it can be identified."""
        if self.custom_id is not None:
            return self.custom_id
        return None if self.error is None else self.error.line

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


def new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


class ResultFile:
    """The output file, open for appending and locked against other runs.

    Invariant: it holds complete lines; opening it cuts off an incomplete last line, left by a killed run.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it, and reads its keys."""
        self._path = path
        #: Key of each row in the file -> whether it has failed.
        self.done: dict[Key, bool] = {}
        self._descriptor = self._open()
        try:
            size = 0
            for number, (line, result) in enumerate(self._results(), start=1):
                if result is None and not line.endswith(b"\n") and line[: len(_PREFIX)] == _PREFIX[: len(line)]:
                    os.ftruncate(self._descriptor, size)  # a kill has cut it short
                    return
                if result is None or result.key is None:
                    raise ConfigError(f"line {number} of {path} is not a result of a batch; name another output file")
                self.done[result.key] = result.failed
                size += len(line)
        except BaseException:
            self.close()
            raise

    def append(self, result: Result) -> None:
        """Adds a line, which is in the file when this returns, even if the process is killed then."""
        line = msgspec.json.encode(result) + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as e:
            raise OctavoError(f"cannot write {self._path}: {e.strerror}") from None
        if written < len(line):
            raise OctavoError(f"cannot write {self._path}: no space left")
        if result.key is not None:
            self.done[result.key] = result.failed

    def drop_failed(self, index: Container[Key]) -> None:
        """Removes failed rows, so that they are answered again; the file is replaced atomically."""
        dropped = {key for key, failed in self.done.items() if failed and key in index}
        copy = self._path.with_name(self._path.name + ".tmp")
        try:
            with copy.open("wb") as stream:
                stream.writelines(line for line, result in self._results() if result and result.key not in dropped)
                stream.flush()
                os.fsync(stream.fileno())
            copy.replace(self._path)
        except OSError as e:
            raise ConfigError(f"cannot write {copy}: {e.strerror}") from None
        before, self._descriptor = self._descriptor, self._open()
        os.close(before)
        for key in dropped:
            del self.done[key]

    def close(self) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _open(self) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise ConfigError(f"cannot write {self._path}: {e.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"{self._path} must be a file, as it is read when a run goes on")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"another run writes to {self._path}") from None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _results(self) -> Iterator[tuple[bytes, Result | None]]:
        """The lines and their results; None: the line is incomplete or no result."""
        with self._path.open("rb") as stream:
            for line in stream:
                try:
                    yield line, msgspec.json.decode(line, type=Result) if line.endswith(b"\n") else None
                except JSON_ERRORS:
                    yield line, None


# The run.


@dataclass
class Summary:
    """Figures of a run; times in seconds."""

    #: Rows of the input, rows that an earlier run has answered, and errors among all of them.
    requests: int = 0
    skipped: int = 0
    failed: int = 0
    #: Tokens of the rows that this run has answered.
    prompt_tokens: int = 0
    output_tokens: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput of this run, prefill included."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def as_text(self) -> str:
        return (
            f"octavo: {self.requests} requests, {self.skipped} answered before, {self.failed} failed; "
            f"{self.prompt_tokens} tokens in, {self.output_tokens} out in {self.seconds:.2f} s: "
            f"{self.output_tokens_per_second:.1f} tokens/s (loaded in {self.load_seconds:.2f} s)"
        )


def run_batch(
    config: EngineConfig,
    options: ServerOptions,
    input_file: Path,
    output_file: Path,
    *,
    max_in_flight: int,
    retry_failed: bool = False,
) -> Summary:
    """Answers the rows of the input that the output does not hold yet, ``max_in_flight`` at a time.

    With ``retry_failed`` rows whose result is an error are answered again. A terminal shows the progress.

    Raises:
        ConfigError: a file cannot be used, or a ``custom_id`` is in the input twice; nothing has run then.
        OctavoError: the model cannot be loaded, the engine has died or the output cannot be written; the rows answered
            so far are in the output, and another run resumes there.
    """
    options.check_engine(config)
    check_plug_ins(options)
    index = index_rows(input_file)
    results = ResultFile(output_file)
    try:
        if retry_failed:
            results.drop_failed(index)
        if others := len(results.done.keys() - index.keys()):
            logger.warning("%s holds %d results of rows that %s does not have", output_file, others, input_file)
        summary = Summary(requests=len(index), skipped=len(index.keys() & results.done.keys()))
        if summary.skipped < summary.requests:
            rows = (row for row in read_rows(input_file) if row.key not in results.done)
            asyncio.run(_run(config, options, rows, results, max_in_flight, summary))
        summary.failed = sum(results.done[key] for key in index)
        return summary
    finally:
        results.close()


async def _run(
    config: EngineConfig,
    options: ServerOptions,
    rows: Iterator[Row],
    results: ResultFile,
    max_in_flight: int,
    summary: Summary,
) -> None:
    start = time.monotonic()
    llm = await AsyncLLM.start(config)
    try:
        summary.load_seconds = time.monotonic() - start
        names = options.model_names(config.model)
        service = make_service(llm, options, Metrics(names[0]), names)
        await service.load_modules()
        await _Runner(service, results, summary).run(rows, min(max_in_flight, summary.requests - summary.skipped))
    finally:
        await llm.shutdown()


class _Answer(msgspec.Struct):
    usage: dict[str, Any] = {}  # each instance gets a new one


class _Request(msgspec.Struct):
    stream: Any = None


class _Runner:
    """Sends rows to the application and appends the results."""

    def __init__(self, service: ServerState, results: ResultFile, summary: Summary) -> None:
        self._llm = service.llm
        self._results = results
        self._summary = summary
        transport = httpx.ASGITransport(make_app(service))
        headers = {"content-type": "application/json"}
        self._client = httpx.AsyncClient(transport=transport, base_url="http://octavo", headers=headers, timeout=None)

    async def run(self, rows: Iterator[Row], max_in_flight: int) -> None:
        """Answers the rows; each task takes the next row when it has finished one."""
        summary, start = self._summary, time.monotonic()
        total, done = summary.requests, summary.skipped
        # disable=None: shown on a terminal only.
        with tqdm(total=total, initial=done, desc="Requests", disable=None, dynamic_ncols=True) as bar:

            async def take_rows() -> None:
                for row in rows:
                    self._results.append(await self._answer(row))
                    summary.seconds = time.monotonic() - start
                    bar.set_postfix_str(f"out {summary.output_tokens_per_second:.0f} tok/s", refresh=False)
                    bar.update()

            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(max_in_flight):
                        tasks.create_task(take_rows())
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _answer(self, row: Row) -> Result:
        """The result of a row; raises ``EngineDeadError`` if the engine has died before it answered."""
        if row.error is not None:
            return Result(new_id(), row.custom_id, None, BatchRowError("invalid_request", row.error, row.line))
        try:
            streams = msgspec.json.decode(row.body, type=_Request).stream is True
        except JSON_ERRORS:
            streams = False  # the route refuses the body
        if streams:
            refusal = as_api_error(unsupported("stream", "a batch cannot be streamed"))
            response = Response(refusal.status, new_request_id(), msgspec.Raw(refusal.body()))
            return Result(new_id(), row.custom_id, response, None)
        # 503: the replica that had the request has died.
        while (answer := await self._client.post(row.url, content=row.body)).status_code == 503:
            self._llm.check_alive()
        if answer.status_code == 200:
            usage = msgspec.json.decode(answer.content, type=_Answer).usage
            self._summary.prompt_tokens += usage.get("prompt_tokens", 0)
            self._summary.output_tokens += usage.get("completion_tokens", 0)
        response = Response(answer.status_code, answer.headers["x-request-id"], msgspec.Raw(answer.content))
        return Result(new_id(), row.custom_id, response, None)
