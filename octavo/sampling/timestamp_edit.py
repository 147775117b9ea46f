"""Obeys the rules of a speech model's answers, see ``TimestampRules``."""

from __future__ import annotations

import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octavo.core.timestamp_rules import TimestampRules
from octavo.sampling.sequence_processor import LogitsEdit


class TimestampEdit(LogitsEdit):
    """Leaves of a row what may come next.

    It depends on the row's logits and the sequence's own output tokens alone. Invariant: of the output before
    ``_position`` the last time is known, and whether the last two tokens are times.
    """

    reads_tokens = True

    def __init__(self, rules: TimestampRules, num_prompt: int, vocab_size: int) -> None:
        """For a sequence whose first ``num_prompt`` tokens are the prompt."""
        self._rules = rules
        self._first = self._position = num_prompt
        never = [*rules.suppress, *([] if rules.has_times else range(rules.first_time, vocab_size))]
        self._never = _ids(never, vocab_size)
        self._not_first = _ids(rules.suppress_first, vocab_size)
        self._latest: int | None = None
        # Before its first token an answer is as after text.
        self._pair = (False, True)

    def fork(self) -> Self:
        """The edit of a copy of the sequence."""
        return copy.copy(self)

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """See ``LogitsEdit``."""
        rules, is_first = self._rules, len(token_ids) == self._first
        logits[self._never] = -np.inf
        if is_first:
            logits[self._not_first] = -np.inf
        if not rules.has_times:
            return
        self._follow(token_ids)
        before_last, last = self._pair
        if is_first:
            logits[: rules.first_time] = -np.inf
            logits[rules.first_time + rules.latest_first + 1 :] = -np.inf
            return
        if last and before_last:
            logits[rules.first_time :] = -np.inf
            return
        if last:  # the other of the pair, or the end
            logits[: rules.end] = -np.inf
        if self._latest is not None:
            logits[rules.first_time : self._latest + (not last)] = -np.inf
        # Times are likely together before one of them is likelier than every text.
        text, times = logits[: rules.first_time], logits[rules.first_time :]
        highest = times.max(initial=-np.inf)
        if highest > -np.inf:
            total = highest + np.log(np.exp(times - highest).sum(dtype=np.float64))
            if total > text.max():
                text[:] = -np.inf

    def _follow(self, token_ids: NDArray[np.int32]) -> None:
        for token in token_ids[self._position :].tolist():
            is_time = token >= self._rules.first_time
            # The first token has none before it: it is one of a pair with the beginning.
            before = self._pair[1] if self._position > self._first else True
            self._pair = (before, is_time)
            if is_time:
                self._latest = token
            self._position += 1


def _ids(ids: list[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array([token for token in ids if 0 <= token < vocab_size], np.int64)
