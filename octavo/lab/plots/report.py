"""A report of a run: one HTML file that needs nothing else, the same bytes for the same run."""

from __future__ import annotations

import numbers
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError
from octavo.lab.plots.style import as_svg

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class _ReportPart:
    """One part of the page: its kind, which says what the template does with the rest."""

    kind: str
    text: str = ""
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()


class Report:
    """Texts, tables and figures in the order in which they are added; all text is escaped.

    The page shows the command and its options at its end, so that the run can be repeated. It follows the reader's
    choice of light and dark.
    """

    def __init__(self, title: str, command: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> None:
        """``command``: words of the command line; ``options``: what was in force, those with defaults too."""
        self.title = title
        self.command, self.options = shlex.join(command), dict(options or {})
        self._parts: list[_ReportPart] = []
        self._figures = 0

    def heading(self, text: str) -> None:
        """Begins a section."""
        self._parts.append(_ReportPart("heading", text))

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(_ReportPart("text", text))

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        """A table; floats are shown with four digits, and are in the page with all (``<data value=...>``).

        ``None`` and NaN become a dash. Raises ``ValueError`` if a row is not as long as ``headers``.
        """
        cells = [[_cell(value) for value in row] for row in rows]
        for row in cells:
            if len(row) != len(headers):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(headers)} columns: {row}")
        self._parts.append(_ReportPart("table", caption, list(headers), cells))

    def figure(self, figure: Any, caption: str = "") -> None:
        """A figure of matplotlib, in the page as SVG."""
        self._figures += 1
        self._parts.append(_ReportPart("figure", caption, rows=[[as_svg(figure, self._figures)]]))

    def html(self) -> str:
        """The page."""
        return _template().render(
            title=self.title, parts=self._parts, command=self.command, options=sorted(self.options.items())
        )

    def write(self, path: Path) -> None:
        """Writes the page.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.write_text(self.html(), encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"cannot write the report {path}: {e.strerror}") from None


@dataclass(frozen=True)
class _Cell:
    shown: str
    #: The number with all its digits; empty if the cell is text.
    number: str = ""


def _cell(value: Any) -> _Cell:
    if value is None or value != value:
        return _Cell("–")  # noqa: RUF001  a dash
    if isinstance(value, float):
        return _Cell(f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}", repr(float(value)))
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return _Cell(f"{int(value):,}", str(int(value)))
    return _Cell(str(value))


@cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(resources.files("octavo.lab.plots").joinpath("report.html").read_text("utf-8"))
