"""Servers that several tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.embedding_models import make_encoder
from tests.server.running_server import TINY, Running, Serve, running
from tests.special_model import make_special_model


@pytest.fixture(scope="module")
def http(tiny_server: Running) -> Iterator[httpx.Client]:
    """A client of ``tiny_server``."""
    with tiny_server.http() as http:
        yield http


def _start(stack: contextlib.ExitStack, factory: pytest.TempPathFactory) -> Serve:
    def start(model: Path | str, *flags: str, env: dict[str, str] | None = None) -> Running:
        return stack.enter_context(running(model, factory.mktemp("server") / "log", *TINY, *flags, env=env))

    return start


@pytest.fixture(scope="session")
def start_session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """``start(model, *flags, env=None)``: a server with the flags ``TINY``, until the session ends."""
    with contextlib.ExitStack() as stack:
        yield _start(stack, tmp_path_factory)


@pytest.fixture(scope="module")
def start_module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server until the module's tests have ended."""
    with contextlib.ExitStack() as stack:
        yield _start(stack, tmp_path_factory)


@pytest.fixture
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server until the test has ended."""
    with contextlib.ExitStack() as stack:
        yield _start(stack, tmp_path_factory)


@pytest.fixture
def serve(tiny_model: Path, start_server: Serve) -> Serve:
    """Serves servers of the tiny model with flags of a test's own: ``serve("--max-queued-requests", "1")``."""
    return partial(start_server, tiny_model)


@pytest.fixture(scope="session")
def demo_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the demo model."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    flags = ("--num-gpu-blocks-override", "600", "--max-model-len", "2048", "--num-threads", "1")
    with running(demo_model, log, *flags, "--served-model-name", "demo") as server:
        yield server


@pytest.fixture(scope="session")
def special_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, start_session_server: Serve) -> Running:
    """A server of the tiny model that has tokens to fill gaps, and to mark reasoning."""
    folder = tmp_path_factory.mktemp("special") / "model"
    make_special_model(tiny_model, folder)
    return start_session_server(folder, "--served-model-name", "tiny")


@pytest.fixture(scope="session")
def vector_server(tmp_path_factory: pytest.TempPathFactory, start_session_server: Serve) -> Running:
    """A server of a tiny encoder that gives vectors, with prompts and dimensions of its own."""
    model = make_encoder(tmp_path_factory.mktemp("vectors") / "model")
    return start_session_server(model, "--served-model-name", "vectors", "--max-inputs-per-request", "512")


@pytest.fixture(scope="session")
def pair_server(tmp_path_factory: pytest.TempPathFactory, start_session_server: Serve) -> Running:
    """A server of a tiny encoder that scores pairs of texts."""
    model = make_encoder(tmp_path_factory.mktemp("pairs") / "model", labels=1)
    return start_session_server(model, "--served-model-name", "pairs")


@pytest.fixture(scope="session")
def class_server(tmp_path_factory: pytest.TempPathFactory, start_session_server: Serve) -> Running:
    """A server of a tiny encoder that tells three classes apart."""
    model = make_encoder(tmp_path_factory.mktemp("classes") / "model", labels=3)
    return start_session_server(model, "--served-model-name", "classes")
