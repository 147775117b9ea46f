"""Records of measurements: lines of a table, or JSON lines; and the flag of the guard over runs by the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import IO, Any

from octavo.cli.parsing import Parser, write_line


def add_again_flag(parser: Parser, default: int = 2) -> None:
    """Adds ``--again``, for a ``Guard`` (``octavo.lab.bench.steady``)."""
    parser.add_argument(
        "--again",
        type=int,
        default=default,
        metavar="N",
        help="most repeats of a run that other processes, the hypervisor or a slower machine disturbed by more than "
        f"5 %% ({default})",
    )


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
