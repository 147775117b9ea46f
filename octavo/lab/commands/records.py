"""Records of measurements: lines of a table, or JSON lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import IO, Any

from octavo.cli.parsing import write_line


def show(records: Iterable[Any], stream: IO[str] | None, title: str, line: Callable[[Any], str]) -> None:
    """Prints each record (a dataclass) when it is measured: as a line of a table, or as JSON to ``stream``."""
    if stream is None:
        print(title)
    for record in records:
        show_one(record, stream, line(record))


def show_one(record: Any, stream: IO[str] | None, text: str) -> None:
    """Prints one record: this text, or JSON to ``stream``."""
    if stream is None:
        print(text, flush=True)
    else:
        write_line(stream, _rounded(dataclasses.asdict(record)))


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Floats rounded to six significant digits."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}
