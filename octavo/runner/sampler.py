"""From logits to tokens, for the rows of one step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import NewSequence, PositionLogprobs
from octavo.runner import noise
from octavo.runner.adjustments import Adjustments, RowError
from octavo.runner.draw import Drawer
from octavo.runner.filters import Filters
from octavo.runner.logprobs import position_logprobs
from octavo.runner.token_table import TokenTable


@dataclass(slots=True)
class SampleOutput:
    """What came of the rows of a step; the dictionaries are by index in the batch, not by row.

    ``token_ids`` int64 [n] holds 0 where ``errors`` names the index: that sequence has no token and ends.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Chooses the next token of each row as its request asks.

    Owns what each row of the persistent batch asks for, and reads the tokens so far from the table. Invariant: the
    result of a row depends on its logits, its tokens and its request only, bit for bit, and not on the other rows.
    """

    def __init__(self, vocab_size: int, tokens: TokenTable) -> None:
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._drawer = Drawer(vocab_size)
        rows = tokens.num_rows
        self._special = np.zeros(rows, bool)
        self._adjusted = np.zeros(rows, bool)
        self._random = np.zeros(rows, bool)
        self._num_logprobs = np.full(rows, -1, np.int64)
        self._seeds = np.zeros(rows, np.uint64)
        self._filters: dict[int, Filters] = {}
        self._adjustments: dict[int, Adjustments] = {}

    def add(self, row: int, sequence: NewSequence) -> None:
        """The sequence joins at this row, for the first time or back from preemption with its outputs."""
        self.remove(row)
        params = sequence.params
        if not params.greedy and params.top_k != 1:
            self._random[row] = True
            self._seeds[row] = sequence.seed & 0xFFFFFFFFFFFFFFFF
            self._filters[row] = Filters.of(params, self._vocab_size)
        if Adjustments.needed(sequence):
            self._adjusted[row] = True
            self._adjustments[row] = Adjustments(self._vocab_size, self._tokens, sequence)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        self._special[row] = self._random[row] or self._adjusted[row] or params.logprobs is not None

    def remove(self, row: int) -> None:
        """Forgets what the row asked for, if anything."""
        self._special[row] = self._adjusted[row] = self._random[row] = False
        self._num_logprobs[row] = -1
        self._filters.pop(row, None)
        self._adjustments.pop(row, None)

    def sample(self, logits: Tensor, rows: NDArray[np.int64]) -> SampleOutput:
        """Chooses a token for each row; the caller appends it to the table.

        Args:
            logits: [n, vocab_size]; may be changed in place.
            rows: [n], the row of each, all different. The token chosen gets position ``tokens.num_tokens[row]``.
        """
        # numpy: its argmax over CPU memory is 13 times as fast as torch's, and in both the lowest id wins a tie.
        values = logits.detach().float().contiguous().cpu().numpy()
        if not self._special[rows].any():
            return _most_likely(values)
        with np.errstate(over="ignore"):  # overflows to infinity are meant: such a token is out of the race
            return self._sample_special(values, rows)

    def _sample_special(self, values: NDArray[np.float32], rows: NDArray[np.int64]) -> SampleOutput:
        wants_logprobs = np.flatnonzero(self._num_logprobs[rows] >= 0).tolist()
        failed: dict[int, str] = {}
        originals: dict[int, NDArray[np.float32]] = {}
        for i in np.flatnonzero(self._adjusted[rows]).tolist():
            row = int(rows[i])
            if self._num_logprobs[row] >= 0:
                originals[i] = values[i].copy()
            try:
                self._adjustments[row].apply(row, values[i])
            except RowError as error:
                failed[i] = str(error)

        output = _most_likely(values)
        output.errors.update(failed)
        random = np.flatnonzero(self._random[rows])
        keys = noise.keys(self._seeds[rows[random]], self._tokens.num_tokens[rows[random]])
        for i, key in zip(random.tolist(), keys, strict=True):
            if i not in output.errors:
                top = values[i, output.token_ids[i]]
                output.token_ids[i] = self._drawer.draw(values[i], top, self._filters[int(rows[i])], key)

        for i in wants_logprobs:
            if i not in output.errors:
                k = int(self._num_logprobs[rows[i]])
                output.logprobs[i] = position_logprobs(originals.get(i, values[i]), int(output.token_ids[i]), k)
        return output


def _most_likely(values: NDArray[np.float32]) -> SampleOutput:
    """The most likely token of each row, the lowest id among equals; an error where there is none."""
    token_ids = values.argmax(axis=-1)
    best = values[np.arange(len(values)), token_ids]
    output = SampleOutput(token_ids)
    if not np.isfinite(best).all():  # argmax finds NaN where there is one
        for i in np.flatnonzero(~np.isfinite(best)).tolist():
            output.errors[i] = _why_not(float(best[i]))
            token_ids[i] = 0
    return output


def _why_not(best: float) -> str:
    if math.isnan(best):
        return "the logits are NaN"
    if best > 0:
        return "the logits are infinite"
    return "no token is left to choose: every one of the vocabulary is masked"
