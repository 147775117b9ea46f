"""Token ids of all running sequences, as arrays that the input batch and the sampler read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenTable:
    """Token ids of every row of the persistent batch.

    Owns ``ids`` int32 [rows, max_len], ``num_tokens`` int64 [rows] (known tokens: prompt and generated) and
    ``num_prompt`` int64 [rows]. Invariant: ``num_prompt <= num_tokens <= max_len``; ids past ``num_tokens`` are stale.
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.ids: NDArray[np.int32] = np.zeros((rows, max_len), np.int32)
        self.num_tokens: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.num_prompt: NDArray[np.int64] = np.zeros(rows, np.int64)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.ids.shape[0]
