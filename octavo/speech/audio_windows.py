"""Windows of a recording, in the order in which a transcription hears them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.speech.log_mel import WINDOW_SAMPLES


class AudioWindows:
    """Windows of 30 s over pieces of audio, which are taken as they are needed.

    Pieces are taken from an iterator, or given by ``add`` while a window is ``missing``.
    Invariant: it holds a window and a piece at most, however long the recording is.
    """

    def __init__(self, pieces: Iterable[NDArray[np.float32]] = ()) -> None:
        self._pieces: Iterator[NDArray[np.float32]] = iter(pieces)
        self._held = np.empty(0, np.float32)
        #: Sample of the recording that is held first.
        self._first = 0
        #: Where the last window began.
        self._begun = 0

    def missing(self, start: int) -> bool:
        """Whether the window from sample ``start`` on needs another piece, if there is one."""
        return self._first + len(self._held) < start + WINDOW_SAMPLES

    def add(self, start: int, piece: NDArray[np.float32]) -> None:
        """Takes the next piece; what is before sample ``start`` is given up."""
        self._give_up(start)
        behind = min(len(piece), max(0, start - self._first - len(self._held)))
        if behind:
            self._first += len(self._held) + behind
            self._held = piece[behind:]
        else:
            self._held = np.concatenate([self._held, piece])

    def window(self, start: int) -> NDArray[np.float32]:
        """float32 [n], from sample ``start`` on, which is none before that of the last call; n = 0 after the end.

        Raises:
            AudioError: see ``Recording.pieces``.
        """
        if start < self._begun:
            raise ValueError(f"window at {start}, but what is before {self._begun} was given up")
        self._begun = start
        while self.missing(start) and (piece := next(self._pieces, None)) is not None:
            self.add(start, piece)
        self._give_up(start)
        return self._held[:WINDOW_SAMPLES]

    def _give_up(self, start: int) -> None:
        known = min(len(self._held), max(0, start - self._first))
        self._held = self._held[known:]
        self._first += known
