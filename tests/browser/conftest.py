"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.browser import MISSING, chromium
from tests.server.running_server import TINY, Running, running


@pytest.fixture(scope="module")  # while it is there, Playwright's event loop runs, beside which there may be no other
def browser() -> Iterator[Any]:
    """Chromium."""
    if MISSING:
        pytest.skip(f"NO TEST OF THE PAGE WAS RUN: {MISSING}")
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(browser: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a page, of the tiny model; tests leave it idle, with a core that may be another one."""
    with running(tiny_model, tmp_path_factory.mktemp("site") / "log", *TINY, "--served-model-name", "tiny") as server:
        yield server
