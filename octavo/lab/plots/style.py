"""Matplotlib, loaded when something is drawn, and how all drawings look."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.plugins import how_to_install

#: Of text and axes; in a report's page it becomes the color of the page's text.
FOREGROUND = "#262626"
_GRID = "#808080"
_COLORS = ("#1f77b4", "#e8710a", "#2ca02c", "#d62728", "#9467bd", "#a0695d", "#e377c2", "#7f7f7f", "#b0a020", "#17a2b8")


def load_matplotlib() -> Any:
    """Matplotlib's ``Figure``, which draws without a display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"drawing a run needs matplotlib: {how_to_install('plot')}") from None
    return Figure


@contextmanager
def styled() -> Iterator[None]:
    """Figures made and saved inside look like all others, whatever the user's own settings of matplotlib are."""
    load_matplotlib()
    import matplotlib

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    look = {
        **dict.fromkeys(names, FOREGROUND),
        "axes.prop_cycle": matplotlib.cycler(linestyle=["-", "--", ":"]) * matplotlib.cycler(color=_COLORS),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "font.family": ["DejaVu Sans"],
        "grid.color": _GRID,
        "grid.alpha": 0.25,
        "lines.linewidth": 1.4,
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(look)
        yield


def as_svg(figure: Any, number: int = 0) -> str:
    """An ``svg`` element for a page: transparent, in the color of its text; the same bytes for the same figure.

    ``number`` tells the page's figures apart, as their elements' names must differ.
    """
    import matplotlib

    stream = io.StringIO()
    with styled(), matplotlib.rc_context({"svg.hashsalt": f"octavo {number}", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # numbered anew in each figure, and nothing refers to them
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows them
    return svg.replace(FOREGROUND, "currentColor")


def check_image(path: Path) -> None:
    """Refuses a kind of image that ``save`` does not write.

    Raises:
        ConfigError: the suffix is not ``.png`` or ``.svg``.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"an image is a .png or .svg file, not {path.name!r}")


def save(figure: Any, path: Path) -> None:
    """Writes an image of the kind that the path's suffix says: ``.png`` or ``.svg``; the same bytes each time.

    Raises:
        ConfigError: the suffix is another one, or the file cannot be written.
    """
    check_image(path)
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with styled(), matplotlib.rc_context({"svg.hashsalt": "octavo"}):
            figure.savefig(path, dpi=120, metadata=metadata)
    except OSError as e:
        raise ConfigError(f"cannot write the image {path}: {e.strerror}") from None
