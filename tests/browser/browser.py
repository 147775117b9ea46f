"""A real browser for tests of the page: Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.busy_machine import PATIENCE

AXE = Path(__file__).resolve().parent / "vendor" / "axe.min.js.gz"
#: Names a browser that is not found by its usual names.
VARIABLE = "OCTAVO_TEST_BROWSER"
#: Why no test with a browser can run here; empty: they can.
MISSING = ""


@cache
def browser_path() -> str | None:
    """The program, if there is one."""
    named = os.environ.get(VARIABLE)
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


if importlib.util.find_spec("playwright") is None:
    MISSING = "the package playwright is not installed (pip install playwright)"
elif browser_path() is None:
    MISSING = f"no browser was found (apt install chromium, or name one in {VARIABLE})"


class Visit:
    """A page, and everything that it should not have done: errors of its console, requests to other places."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.set_default_timeout(min(PATIENCE, 60) * 1000)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self._check(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.errors.append(text)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data") and f"{parts.scheme}://{parts.netloc}" != self.url:
            self.foreign.append(url)

    def forgive(self, *words: str) -> None:
        """Errors that a test brings about: requests that fail are errors of the console."""
        self.errors = [error for error in self.errors if not any(word in error for word in words)]

    def violations(self) -> list[str]:
        """What axe-core finds at levels A and AA."""
        self.page.evaluate(gzip.decompress(AXE.read_bytes()).decode())
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
        found = self.page.evaluate(f"axe.run(document, {{runOnly: {tags!r}}})")
        return [
            f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary']}"
            for one in found["violations"]
        ]

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return width


@contextlib.contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """A browser for the time of a block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Within containers, where tests often run, its own sandbox cannot be made.
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", *flags])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def visit(browser: Any, url: str, path: str = "/", **options: Any) -> Iterator[Visit]:
    """A page in a browser's context of its own; at the end it must have done nothing that it should not."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options})
    try:
        shown = Visit(context.new_page(), url.rstrip("/"))
        shown.page.goto(f"{shown.url}{path}")
        yield shown
        assert shown.foreign == [], shown.foreign
        assert shown.errors == [], shown.errors
    finally:
        context.close()
