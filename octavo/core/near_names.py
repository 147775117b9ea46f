"""What somebody may have meant who names what is not there."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def did_you_mean(
    name: str,
    names: Iterable[str],
    otherwise: str | None = None,
    *,
    cutoff: float = 0.6,
    written: Callable[[str], str] = repr,
) -> str:
    """A hint such as ``did you mean 'fcfs'?``.

    Args:
        name: what was named.
        names: what is there.
        otherwise: the hint where nothing is like it; default: all names.
        cutoff: least likeness, from 0 to 1.
        written: how the name is written in the hint.
    """
    names = list(names)
    for near in difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
        return f"did you mean {written(near)}?"
    return f"known: {', '.join(names)}" if otherwise is None else otherwise
