"""The inputs of a step on the host, and where what it samples belongs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class FlatInputs:
    """A network's inputs on the host: T tokens of S sequences, N sampled rows."""

    #: The arrays of ``ForwardBatch`` by name. Token ids are stale where a token is still on the device.
    arrays: dict[str, NDArray[Any]]
    num_decodes: int
    max_seq_len: int
    all_sampled: bool
    has_adapters: bool
    #: Whether a token of an image sees later ones.
    has_spans: bool = field(default=False, kw_only=True)


@dataclass(slots=True)
class StepInputs(FlatInputs):
    """A step's inputs, and what the runner knows of them."""

    #: The sequences: those with one token first. How many further steps may differ from this one in nothing but one
    #: more token for each.
    seq_ids: list[int]
    repeats: int
    #: Row of each sequence, first position computed, and one past the last: [S].
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    #: The sequences that sample, as indices into ``seq_ids``, and children that sample with them.
    sampling: NDArray[np.int64]
    forked: ForkedRows | None
    #: Drafts that are computed with them, if the plan has any.
    drafted: DraftedTokens | None


@dataclass(slots=True)
class DraftedTokens:
    """Draft tokens behind the known tokens of the sequences that sample, forked ones last."""

    #: The drafts of each.
    tokens: list[list[int]]
    #: Rows that each samples: one more than it has drafts.
    counts: NDArray[np.int64]
    #: Which of its sequence's sampled rows each sampled row is: 0 follows the last known token.
    offsets: NDArray[np.int64]

    def accept(self, sampled: list[int]) -> list[list[int]]:
        """The accepted tokens of each sequence: up to the first sampled one that differs from its draft, included."""
        accepted, start = [], 0
        for draft in self.tokens:
            tokens = sampled[start : start + len(draft) + 1]
            right = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
            accepted.append(tokens[: right + 1])
            start += len(tokens)
        return accepted


@dataclass(slots=True)
class ForkedRows:
    """Sequences just forked, without tokens of their own to compute, whose parents sample in the step."""

    seq_ids: list[int]
    #: Row of each: [F].
    rows: NDArray[np.int64]
    #: Index of each one's parent into ``StepInputs.seq_ids``: [F].
    parents: NDArray[np.int64]


@dataclass(slots=True)
class NewTokens:
    """Where the tokens that a step samples belong, once they are known."""

    #: Row of each sequence that appends what it samples: [n].
    rows: NDArray[np.int64]
    #: The token's position: [n].
    places: NDArray[np.int64]
    #: Which of the step's sampled tokens it is: [n].
    indices: NDArray[np.int64]
    #: Generation of the rows: sequences that had been forgotten until then.
    generation: int
