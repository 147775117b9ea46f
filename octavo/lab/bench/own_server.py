"""An ``octavo serve`` in a process of its own, for the time of a measurement."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from octavo.config.engine_config import EngineConfig
from octavo.config.sources import OPTIONS, PREFIX
from octavo.core.errors import ConfigError
from octavo.engine.tokenizer import NoTokenizer, Tokenizer, find_tokenizer
from octavo.lab.workloads.tokens import ID_RANGE
from octavo.loader.resolve import resolve_model
from octavo.models.config_files import read_model_config

#: The model's name in requests.
SERVED_NAME = "measured"
#: Seconds that a request may take.
REQUEST_TIMEOUT = 36_000.0
#: Seconds that a server may take to start, and to end.
_START, _END = 900.0, 30.0
#: So that no request is turned away: how many may wait is the measurement's business.
_MOST_WAITING = 1 << 30


@dataclass(frozen=True)
class OwnServer:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]
    #: What it has logged.
    log: Path


@contextmanager
def running_server(options: EngineConfig) -> Iterator[str]:
    """The URL of a server with these options, for the time of a block; see ``own_server``."""
    with own_server(options) as server:
        yield server.url


@contextmanager
def own_server(
    options: EngineConfig, more: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[OwnServer]:
    """A server with these options, for the time of a block; it serves the model as ``SERVED_NAME``.

    It turns no request away. A shape without a tokenizer gets one of a word for each id. ``more``: further options of
    the engine or the server; ``environ``: further variables.

    Raises:
        ConfigError: it does not start.
    """
    content = options.model_dump(mode="json", exclude_unset=True) | dict(more or {})
    if options.kv_store is not None:  # the whole URL: its password is left out for reports
        content["kv_store"] = options.kv_store
    server = {
        "port": 0,
        "served_model_name": SERVED_NAME,
        "max_queued_requests": _MOST_WAITING,
        "max_queued_tokens": _MOST_WAITING,
        "request_timeout": REQUEST_TIMEOUT,
        "sandbox_seconds_per_client": _MOST_WAITING,
    }
    with tempfile.TemporaryDirectory(prefix="octavo-lab-") as name:
        folder = Path(name)
        config, log = folder / "options.yaml", folder / "log"
        if isinstance(_tokenizer(options), NoTokenizer):
            _write_words(_vocab_size(options.model, options.revision), folder)
            content |= {"tokenizer": name, "skip_tokenizer_init": False}
        config.write_text(json.dumps(content | server), encoding="utf-8")  # JSON is YAML
        # Variables win over the file, and what they say is in it already.
        options_of_file = {PREFIX + option.upper() for option in OPTIONS} | {"OCTAVO_CONFIG", "OCTAVO_API_KEYS"}
        inherited = {key: value for key, value in os.environ.items() if key not in options_of_file}
        with log.open("wb") as stream, _terminable():
            process = subprocess.Popen(
                [sys.executable, "-m", "octavo", "serve", "--config", str(config)],
                stdout=stream,
                stderr=stream,
                env={**inherited, **(environ or {})},
            )
            try:
                yield OwnServer(_url(process, log), process, log)
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_END)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends this process as an exception does, so that it leaves no server behind. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, once it does.

    Raises:
        ConfigError: it ended, or takes too long.
    """
    end = time.monotonic() + _START
    while True:
        text = log.read_text(errors="replace")
        if match := re.search(r'serving .* on (http://[^\s"]+)', text):
            return match.group(1)
        if process.poll() is not None or time.monotonic() > end:
            raise ConfigError(f"the server did not start: {text[-2000:].strip()}")
        time.sleep(0.02)


def _tokenizer(options: EngineConfig) -> Tokenizer:
    return find_tokenizer(options, resolve_model(options.model, revision=options.revision, weights=False))


def _write_words(count: int, folder: Path) -> None:
    """A tokenizer of a word for each id, for shapes that have none: each token is a text, which the client can time."""
    words = models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


@functools.lru_cache(maxsize=8)
def _vocab_size(model: str, revision: str | None) -> int:
    return read_model_config(resolve_model(model, revision=revision, weights=False)).vocab_size


def token_id_range(options: EngineConfig) -> tuple[int, int]:
    """Token ids of prompts: common ones, or all of a small vocabulary."""
    size = _vocab_size(options.model, options.revision)
    return ID_RANGE if ID_RANGE[1] < size else (0, size - 1)
