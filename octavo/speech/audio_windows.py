"""Windows of a recording, in the order in which a transcription hears them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.speech.log_mel import WINDOW_SAMPLES


class AudioWindows:
    """Windows of 30 s over pieces of audio, which are taken as they are needed.

    Invariant: it holds a window and a piece at most, however long the recording is.
    """

    def __init__(self, pieces: Iterator[NDArray[np.float32]]) -> None:
        self._pieces = pieces
        self._held = np.empty(0, np.float32)
        #: Sample of the recording that is held first.
        self._first = 0

    def window(self, start: int) -> NDArray[np.float32]:
        """float32 [n], from sample ``start`` on, which is none before that of the last call; n = 0 after the end.

        Raises:
            AudioError: see ``Recording.pieces``.
        """
        if start < self._first:
            raise ValueError(f"window at {start}, but what is before {self._first} was given up")
        parts = [self._held[start - self._first :]]
        held, behind = len(parts[0]), max(0, start - self._first - len(self._held))
        while held < WINDOW_SAMPLES and (piece := next(self._pieces, None)) is not None:
            part = piece[min(behind, len(piece)) :]
            behind -= len(piece) - len(part)
            parts.append(part)
            held += len(part)
        self._held, self._first = np.concatenate(parts), start
        return self._held[:WINDOW_SAMPLES]
