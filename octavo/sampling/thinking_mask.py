"""Ends the reasoning of a sequence that has used up its budget."""

from __future__ import annotations

import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octavo.core.reasoning import ThinkingBudget
from octavo.kernels.sampling import pack_mask


class ThinkingMask:
    """How many tokens of reasoning a sequence has, and whether it is within it.

    It depends on the sequence's own output tokens alone. Invariant: those before ``_position`` are counted.
    """

    def __init__(self, budget: ThinkingBudget, num_prompt: int, vocab_size: int) -> None:
        """For a sequence whose first ``num_prompt`` tokens are the prompt."""
        self._budget = budget
        self._inside = budget.inside
        self._count = 0
        self._first = self._position = num_prompt
        end = np.zeros(vocab_size, bool)
        end[budget.end] = True
        self._end = pack_mask(end)

    def fork(self) -> Self:
        """The mask of a copy of the sequence."""
        return copy.copy(self)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        """The only token allowed next, packed, where the reasoning has to end; None: the budget forbids nothing.

        ``token_ids``: all of the sequence so far, int32 [n], prompt included.
        """
        budget, width = self._budget, len(self._budget.start)
        tokens = token_ids[max(self._first, self._position - width + 1) :].tolist()
        for i in range(len(tokens) - (len(token_ids) - self._position), len(tokens)):
            if not self._inside:
                self._inside = i + 1 >= width and tokens[i + 1 - width : i + 1] == budget.start
            elif tokens[i] == budget.end or tokens[i] in budget.interrupts:
                self._inside = False
            else:
                self._count += 1
        self._position = len(token_ids)
        return self._end if self._inside and self._count >= budget.most else None
