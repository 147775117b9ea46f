"""From logits to tokens, for the rows of one step."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from octavo.core.plan import NewSequence, PositionLogprobs
from octavo.runner import noise
from octavo.runner.adjustments import Adjustments, RowError
from octavo.runner.arithmetic import REASONS, Arithmetic, fastest_arithmetic
from octavo.runner.filters import RECORD, Filters
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

    def __init__(self, vocab_size: int, tokens: TokenTable, arithmetic: Arithmetic | None = None) -> None:
        """For the rows of the table; the fastest arithmetic there is unless one is given."""
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._arithmetic = arithmetic or fastest_arithmetic(vocab_size)
        rows = tokens.num_rows
        self._special = np.zeros(rows, bool)
        self._adjusted = np.zeros(rows, bool)
        self._num_logprobs = np.full(rows, -1, np.int64)
        self._seeds = np.zeros(rows, np.uint64)
        self._filters = np.zeros(rows, RECORD)  # a temperature of 0 where nothing is drawn
        self._adjustments: dict[int, Adjustments] = {}

    def add(self, row: int, sequence: NewSequence) -> None:
        """The sequence joins at this row, for the first time or back from preemption with its outputs."""
        self.remove(row)
        params = sequence.params
        random = not params.greedy and params.top_k != 1
        if random:
            self._seeds[row] = sequence.seed & 0xFFFFFFFFFFFFFFFF
            self._filters[row] = astuple(Filters.of(params, self._vocab_size))
        if Adjustments.needed(sequence):
            self._adjusted[row] = True
            self._adjustments[row] = Adjustments(self._vocab_size, self._tokens, sequence)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        self._special[row] = random or self._adjusted[row] or params.logprobs is not None

    def fork(self, parent: int, child: int, seed: int) -> None:
        """A copy of the sequence at row ``parent`` joins at row ``child``, where it draws by its own seed."""
        for state in (self._special, self._adjusted, self._num_logprobs, self._filters):
            state[child] = state[parent]
        self._seeds[child] = seed & 0xFFFFFFFFFFFFFFFF
        self._adjustments.pop(child, None)
        if self._adjusted[parent]:
            self._adjustments[child] = self._adjustments[parent].fork()

    def remove(self, row: int) -> None:
        """Forgets what the row asked for, if anything."""
        self._special[row] = self._adjusted[row] = False
        self._num_logprobs[row] = -1
        self._filters[row] = 0
        self._adjustments.pop(row, None)

    def sample(self, logits: Tensor, rows: NDArray[np.int64]) -> SampleOutput:
        """Chooses a token for each row; the caller appends it to the table.

        Args:
            logits: [n, vocab_size]; may be changed in place.
            rows: [n], the row of each, all different. The token chosen gets position ``tokens.num_tokens[row]``.
        """
        values = _as_array(logits)
        if self._special[rows].any():
            return self._sample_special(values, rows)
        nothing = np.zeros((len(rows), 2), np.uint32)
        return _output(self._arithmetic.choose(values, self._filters[rows], nothing), {})

    def prompt_logprobs(self, logits: Tensor, targets: ArrayLike, k: int) -> list[PositionLogprobs]:
        """Logprobs of known tokens.

        Args:
            logits: [n, vocab_size], those that the model gave at the positions before the targets.
            targets: [n] token ids.
            k: number of most likely tokens to name at each position.
        """
        tokens = np.asarray(targets, np.int64)
        every = np.arange(len(tokens))
        return self._arithmetic.logprobs(_as_array(logits), every, tokens, np.full_like(tokens, k))

    def _sample_special(self, values: NDArray[np.float32], rows: NDArray[np.int64]) -> SampleOutput:
        adjusted, scored = self._adjusted[rows], self._num_logprobs[rows] >= 0
        changed = np.flatnonzero(adjusted & scored)
        originals = values[changed]
        failed = self._adjust(values, rows, np.flatnonzero(adjusted))
        keys = noise.keys(self._seeds[rows], self._tokens.num_tokens[rows])
        output = _output(self._arithmetic.choose(values, self._filters[rows], keys), failed)
        unchanged = np.flatnonzero(scored & ~adjusted)
        self._add_logprobs(output, values, unchanged, rows, unchanged)
        self._add_logprobs(output, originals, np.arange(len(changed)), rows, changed)
        return output

    def _adjust(self, values: NDArray[np.float32], rows: NDArray[np.int64], which: NDArray[np.int64]) -> dict[int, str]:
        """Edits the logits of these indices of the batch in place; returns the errors of those that failed."""
        failed: dict[int, str] = {}
        with np.errstate(over="ignore"):
            for i in which.tolist():
                row = int(rows[i])
                try:
                    self._adjustments[row].apply(row, values[i])
                except RowError as error:
                    failed[i] = str(error)
        return failed

    def _add_logprobs(
        self,
        output: SampleOutput,
        logits: NDArray[np.float32],
        places: NDArray[np.int64],
        rows: NDArray[np.int64],
        which: NDArray[np.int64],
    ) -> None:
        """Adds logprobs for the indices ``which`` of the batch, whose logits are at ``places`` of ``logits``."""
        if not len(which):
            return
        found = self._arithmetic.logprobs(logits, places, output.token_ids[which], self._num_logprobs[rows[which]])
        output.logprobs.update((i, f) for i, f in zip(which.tolist(), found, strict=True) if i not in output.errors)


def _as_array(logits: Tensor) -> NDArray[np.float32]:
    """The same memory where it can be: float32 on the CPU, contiguous in the last dimension."""
    values = logits.detach().float().cpu()
    return (values if values.stride(-1) == 1 else values.contiguous()).numpy()


def _output(chosen: NDArray[np.int64], failed: dict[int, str]) -> SampleOutput:
    """What was chosen, token 0 and an error where there is none."""
    output = SampleOutput(chosen)
    for i in np.flatnonzero(chosen < 0).tolist():
        output.errors[i] = REASONS[int(chosen[i])]
    output.errors.update(failed)
    chosen[list(output.errors)] = 0
    return output
