"""What the heads of tokens are rotated by where images have positions in time, height and width (M-RoPE).

Wang et al. 2024, "Qwen2-VL", section 2.1: the three positions of a text token are equal and count from token to token.
Those of an image's tokens are the place in its grid, counted from the position where it begins; the text after it goes
on behind the largest of them. So a token's rotary position is at most its position in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.request import Feature

#: Time, height and width.
AXES = 3
#: ``ForwardBatch.rotary_positions`` of networks that rotate by the positions of tokens.
NO_ROTARY_POSITIONS: NDArray[np.int64] = np.zeros((0, 0), np.int64)


class RotaryPositions:
    """Owns those of each row's sequence up to the end of its last image, and how far its text is shifted from there."""

    def __init__(self, max_num_seqs: int) -> None:
        #: Tokens up to the end of the row's last image, 0 without one; and what is added to positions from there on.
        self._ends = np.zeros(max_num_seqs, np.int64)
        self._shifts = np.zeros(max_num_seqs, np.int64)
        #: By row: int64 [AXES, end].
        self._beginnings: dict[int, NDArray[np.int64]] = {}

    def add(self, row: int, features: Sequence[Feature]) -> None:
        """The row's sequence has these images."""
        if features:
            self._beginnings[row] = beginning = image_positions(features)
            self._ends[row] = beginning.shape[1]
            self._shifts[row] = beginning.max() + 1 - beginning.shape[1]

    def copy(self, source: int, row: int) -> None:
        """The row's sequence begins as that of another."""
        if source in self._beginnings:
            self._beginnings[row] = self._beginnings[source]
            self._ends[row], self._shifts[row] = self._ends[source], self._shifts[source]

    def forget(self, row: int) -> None:
        """The row's sequence is gone."""
        if self._beginnings.pop(row, None) is not None:
            self._ends[row] = self._shifts[row] = 0

    def are_text(self, rows: NDArray[np.int64], starts: NDArray[np.int64]) -> bool:
        """Whether the tokens of these rows from ``starts`` on are behind all images."""
        return not self._beginnings or bool((starts >= self._ends[rows]).all())

    def array(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """``ForwardBatch.rotary_positions`` [AXES, T] of the tokens from ``starts`` [S] on of these rows.

        ``offsets`` [S + 1]: where each row's tokens begin among the ``positions`` [T].
        """
        if not self._beginnings:
            return np.tile(positions, (AXES, 1))
        rotary = np.tile(positions + np.repeat(self._shifts[rows], np.diff(offsets)), (AXES, 1))
        for i in np.flatnonzero(starts < self._ends[rows]).tolist():
            beginning = self._beginnings[int(rows[i])][:, starts[i] :]
            count = min(beginning.shape[1], int(offsets[i + 1] - offsets[i]))
            rotary[:, offsets[i] : offsets[i] + count] = beginning[:, :count]
        return rotary


def image_positions(features: Sequence[Feature]) -> NDArray[np.int64]:
    """Positions in time, height and width [AXES, end] of the tokens of a prompt up to the end of its last image.

    Args:
        features: its images, each whole, in the order of their offsets.

    Raises:
        RuntimeError: one has no grid, or another one than its number of tokens.
    """
    beginning = np.empty((AXES, features[-1].offset + features[-1].length), np.int64)
    start = position = 0
    for feature in features:
        if feature.grid is None or np.prod(feature.grid) != feature.length:
            raise RuntimeError(f"an image of {feature.length} features has the grid {feature.grid}")
        end, text = feature.offset + feature.length, feature.offset - start
        beginning[:, start : feature.offset] = np.arange(position, position + text)
        position += text
        beginning[:, feature.offset : end] = np.indices(feature.grid).reshape(AXES, -1) + position
        start, position = end, position + max(feature.grid)
    return beginning
