"""``octavo top``: the engine of a server in the terminal, live."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from octavo.cli.parsing import EXIT_FAILED, Arguments, Parser
from octavo.core.errors import ConfigError

if TYPE_CHECKING:
    import httpx

    from octavo.core.engine_view import EngineEvent

EXAMPLE = """\
examples:
  octavo top
  octavo top http://127.0.0.1:9000
  OCTAVO_API_KEY=... octavo top https://models.example
  octavo top --once

Ctrl-C ends it; the server does not notice more than a few milliseconds a second.
"""
DEFAULT = "http://127.0.0.1:8000"
KEY_VARIABLE = "OCTAVO_API_KEY"
#: Seconds without anything from the server, after which it counts as lost.
_PATIENCE = 15.0


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo top",
        usage="octavo top [options] [URL]",
        description="Shows the blocks, queues and steps of a server's engine as text, live.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"API key of the server (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument("--once", action="store_true", help="print the engine as it is now, and end")
    return parser


def run(arguments: Arguments) -> int:
    """Shows views until Ctrl-C or the end of the server; 1 if it could not be reached, or was lost."""
    from rich.console import Console
    from rich.live import Live

    from octavo.cli.top_view import StepHistory, render

    if len(arguments.words) > 1:
        raise ConfigError(f"octavo top takes one URL, not {len(arguments.words)}")
    url = (arguments.words or [DEFAULT])[0].rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the URL of a server begins with http:// or https://, not {url!r}")
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    console, history = Console(), StepHistory()
    live = not arguments.once and console.is_terminal
    with suppress(KeyboardInterrupt), _events(url, key) as events:
        if not live:
            for event in events:
                history.add(event)
                if event.views:
                    console.print(render(event, history, console.width))
                    return 0
            return _lost(url)
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            for event in events:
                history.add(event)
                screen.update(render(event, history, console.width), refresh=True)
        return _lost(url)
    return 0


def _lost(url: str) -> int:
    print(f"octavo: error: the server at {url} has ended the stream", file=sys.stderr)
    return EXIT_FAILED


@contextmanager
def _events(url: str, key: str | None) -> Iterator[Iterator[EngineEvent]]:
    """The events of a server's engine.

    Raises:
        ConfigError: it does not answer, or refuses.
    """
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.stream("GET", f"{url}/engine/events", headers=headers, timeout=_PATIENCE) as response:
            if response.status_code != 200:
                response.read()
                raise ConfigError(f"the server at {url} answered {response.status_code}: {_message(response)}")
            yield _decoded(response)
    except httpx.HTTPError as e:
        raise ConfigError(f"the server at {url} does not answer: {e or type(e).__name__}") from None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _decoded(response: httpx.Response) -> Iterator[EngineEvent]:
    import msgspec

    from octavo.core.engine_view import EngineEvent

    decoder = msgspec.json.Decoder(EngineEvent)
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield decoder.decode(line.removeprefix("data: "))
