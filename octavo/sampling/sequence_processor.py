"""What changes the logits of one sequence: edits on the host, and masks of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np
from numpy.typing import NDArray


class SequenceProcessor:
    """A processor of one sequence (``LogitsProcessor`` is a user's callable).

    It is called with the known tokens, int32 [n], prompt included. Each call has all tokens of the call before, so a
    stateful processor may count the new ones only.
    """

    #: Whether it reads the token ids; if not, only their number matters and the ids may be unknown yet.
    reads_tokens = False

    def fork(self) -> Self:
        """A processor for a copy of the sequence; the same one if it has no state."""
        return self


class LogitsEdit(SequenceProcessor, ABC):
    """Changes a row of logits on the host."""

    @abstractmethod
    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """Edits logits [vocab_size] in place.

        Raises:
            RowError: the sequence cannot continue.
        """


class TokenMask(SequenceProcessor, ABC):
    """Restricts the next token to some tokens."""

    @abstractmethod
    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        """The tokens allowed next, packed (see ``mask_words``) and not to be modified; None allows all.

        Raises:
            RowError: the sequence cannot continue.
        """
