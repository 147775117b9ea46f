"""Servers that several tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.embedding_models import make_encoder
from tests.server.running_server import TINY, Running, running
from tests.special_model import make_special_model


@pytest.fixture(scope="module")
def http(tiny_server: Running) -> Iterator[httpx.Client]:
    """A client of ``tiny_server``."""
    with tiny_server.http() as http:
        yield http


@pytest.fixture(scope="session")
def demo_server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the demo model."""
    log = tmp_path_factory.mktemp("demo-server") / "log"
    flags = ("--num-gpu-blocks-override", "600", "--max-model-len", "2048", "--num-threads", "1")
    with running(demo_model, log, *flags, "--served-model-name", "demo") as server:
        yield server


@pytest.fixture(scope="session")
def special_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the tiny model that has tokens to fill gaps, and to mark reasoning."""
    folder = tmp_path_factory.mktemp("special") / "model"
    make_special_model(tiny_model, folder)
    with running(folder, folder.parent / "log", *TINY, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture(scope="session")
def vector_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny encoder that gives vectors, with prompts and dimensions of its own."""
    folder = tmp_path_factory.mktemp("vectors")
    flags = (*TINY, "--served-model-name", "vectors", "--max-inputs-per-request", "512")
    with running(make_encoder(folder / "model"), folder / "log", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def pair_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny encoder that scores pairs of texts."""
    folder = tmp_path_factory.mktemp("pairs")
    model = make_encoder(folder / "model", labels=1)
    with running(model, folder / "log", *TINY, "--served-model-name", "pairs") as server:
        yield server


@pytest.fixture(scope="session")
def class_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny encoder that tells three classes apart."""
    folder = tmp_path_factory.mktemp("classes")
    model = make_encoder(folder / "model", labels=3)
    with running(model, folder / "log", *TINY, "--served-model-name", "classes") as server:
        yield server


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers of the tiny model with flags of a test's own: ``serve("--max-queued-requests", "1")``."""
    with contextlib.ExitStack() as stack:
        count = 0

        def make(*flags: str, env: dict[str, str] | None = None) -> Running:
            nonlocal count
            count += 1
            return stack.enter_context(running(tiny_model, tmp_path / f"log{count}", *TINY, *flags, env=env))

        yield make
