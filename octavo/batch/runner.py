"""Answers the rows of a batch: the server's own application, called in this process, many requests at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tqdm import tqdm

from octavo.batch.result_files import BatchRowError, Response, Result, ResultFile, new_id
from octavo.batch.rows import Row, index_rows, read_rows
from octavo.core.config import EngineConfig
from octavo.core.server_options import ServerOptions
from octavo.engine.async_llm import AsyncLLM
from octavo.server.api_errors import ApiError, unsupported
from octavo.server.app import make_app
from octavo.server.logging import new_request_id
from octavo.server.metrics import Metrics
from octavo.server.serve_app import check_plug_ins
from octavo.server.service import Service, make_service

logger = logging.getLogger("octavo")


@dataclass
class Summary:
    """What a run has done. Times in seconds."""

    #: Rows of the input, those that an earlier run has answered, and the errors among all of them.
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
        """The figures as a line of text."""
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

    With ``retry_failed`` rows whose result is an error are answered again. Progress is shown on a terminal.

    Raises:
        ConfigError: a file cannot be used, or a ``custom_id`` is in the input twice; nothing has run then.
        OctavoError: the model cannot be loaded, the engine has died or the output cannot be written; the rows answered
            so far are in the output, and another run goes on from there.
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


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


class _Request(msgspec.Struct):
    stream: Any = None


class _Runner:
    """Sends rows to the application and appends the results."""

    def __init__(self, service: Service, results: ResultFile, summary: Summary) -> None:
        self._llm = service.llm
        self._results = results
        self._summary = summary
        transport = httpx.ASGITransport(make_app(service))
        headers = {"content-type": "application/json"}
        self._client = httpx.AsyncClient(transport=transport, base_url="http://octavo", headers=headers, timeout=None)
        self._answer_decoder = msgspec.json.Decoder(_Answer)
        self._request_decoder = msgspec.json.Decoder(_Request)

    async def run(self, rows: Iterator[Row], max_in_flight: int) -> None:
        """Answers the rows; each task takes the next one when it has ended one."""
        summary, start = self._summary, time.monotonic()
        # None: on a terminal only.
        with tqdm(
            total=summary.requests, initial=summary.skipped, desc="Requests", disable=None, dynamic_ncols=True
        ) as bar:

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
        """The result of a row.

        Raises:
            EngineDeadError: the engine has died before it answered.
        """
        if row.error is not None:
            return Result(new_id(), row.custom_id, None, BatchRowError("invalid_request", row.error, row.line))
        if self._streams(row.body):
            return Result(new_id(), row.custom_id, _refusal(unsupported("stream", "a batch cannot be streamed")), None)
        # 503: the replica that had it has died
        while (response := await self._client.post(row.url, content=row.body)).status_code == 503:
            self._llm.check_alive()
        body = response.content
        if response.status_code == 200:
            usage = self._answer_decoder.decode(body).usage
            self._summary.prompt_tokens += usage.prompt_tokens
            self._summary.output_tokens += usage.completion_tokens
        content = Response(response.status_code, response.headers["x-request-id"], msgspec.Raw(body))
        return Result(new_id(), row.custom_id, content, None)

    def _streams(self, body: bytes) -> bool:
        try:
            return self._request_decoder.decode(body).stream is True
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False  # the route says what is wrong


def _refusal(error: ApiError) -> Response:
    return Response(error.status, new_request_id(), msgspec.Raw(error.body()))
