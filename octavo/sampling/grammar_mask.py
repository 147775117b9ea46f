"""The tokens that a sequence's grammar allows."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.request import Generate
from octavo.core.structured_outputs import TOO_COSTLY
from octavo.kernels.sampling import mask_words, pack_mask
from octavo.sampling.sampler_outputs import RowError

if TYPE_CHECKING:  # who has a grammar has imported them
    from llguidance import LLExecutor, LLMatcher

    from octavo.grammar.matcher import GrammarTokenizer

#: From so many masks on it pays to wake other threads for them.
_PARALLEL_FROM = 8
#: Most tokens that are appended at once without sampling; a step computes them together.
_MAX_FORCED = 64


@dataclass(frozen=True)
class CompiledGrammar:
    """What sequences with one grammar share."""

    #: Of a sequence without tokens; never changed.
    matcher: LLMatcher
    tokenizer: GrammarTokenizer


class GrammarMask:
    """Where one sequence is in its grammar.

    Invariant: ``matcher`` has consumed the output tokens before ``_position``, as far as the grammar binds them. These
    may be more than the sequence has so far: forced tokens, which must follow.
    """

    def __init__(self, grammar: CompiledGrammar, task: Generate, num_prompt: int) -> None:
        """For a sequence whose first ``num_prompt`` tokens are the prompt, with any number of tokens behind it."""
        assert task.grammar is not None
        #: The matcher of this sequence alone.
        self.matcher = grammar.matcher.deep_copy()
        self.tokenizer = grammar.tokenizer
        self._eos = frozenset(grammar.tokenizer.eos_token_ids)
        self._begin_after = list(task.grammar.begin_after)
        #: Whether the grammar binds the next token.
        self.binds = not self._begin_after
        #: Whether end-of-sequence tokens do not end it.
        self.ignores_eos = not self._eos.isdisjoint({*task.ignored_eos_ids} - {*task.stop_token_ids})
        self._ended = False
        most = task.params.max_tokens
        #: Tokens of the longest sequence.
        self._limit = sys.maxsize if most is None else num_prompt + most
        self._start = self._position = num_prompt

    def fork(self) -> GrammarMask:
        """A copy that goes on by itself."""
        child = copy.copy(self)
        child.matcher = self.matcher.deep_copy()
        return child

    def advance(self, token_ids: NDArray[np.int32]) -> None:
        """Consumes the tokens that have come since the last call.

        Raises:
            RowError: the grammar does not allow them, or has become too costly.
        """
        if self._position >= len(token_ids):
            return
        if not self.binds:
            self._find_begin(token_ids)
        self._consume(token_ids[self._position :].tolist())
        self._position = len(token_ids)

    def _find_begin(self, token_ids: NDArray[np.int32]) -> None:
        """Moves to behind the first occurrence of ``begin_after`` in the output, or to its end if there is none."""
        marker, count = self._begin_after, len(self._begin_after)
        first = max(self._start, self._position - count + 1)
        found = token_ids[first:].tolist()
        for i in range(len(found) - count + 1):
            if found[i : i + count] == marker:
                self.binds, self._position = True, first + i + count
                return
        self._position = len(token_ids)

    def _consume(self, tokens: list[int]) -> None:
        if self._ended:
            return
        count = self.matcher.try_consume_tokens(tokens)
        taken = tokens[: count + 1]
        if not self._eos.isdisjoint(taken) and self.matcher.is_accepting():
            self._ended = True
        elif self.matcher.is_error():
            raise RowError(TOO_COSTLY + self.matcher.get_error())
        elif count < len(tokens):
            raise RowError(f"the output has left its grammar at token {tokens[count]}")

    def forced_tokens(self, token_ids: NDArray[np.int32]) -> list[int]:
        """The tokens that must follow, none if there is a choice; they count as consumed.

        Raises:
            RowError: as ``advance``.
        """
        self.advance(token_ids)
        forced: list[int] = []
        most = min(_MAX_FORCED, self._limit - len(token_ids))
        while self.binds and not self._ended and len(forced) < most:
            # The first alone: what follows it is decided anew, as it is where tokens are sampled one at a time.
            following = self.matcher.compute_ff_tokens()[:1]
            if not following and len(self._eos) == 1 and not self.ignores_eos and self.matcher.is_stopped():
                following = [*self._eos] if not self.matcher.is_error() else []
            if not following or following[0] >= self.tokenizer.network_vocab_size:
                break
            self._consume(following)
            forced += following
        self._position += len(forced)
        return forced


class GrammarMasks:
    """Computes the masks of the rows of a step that are bound by grammars, on several threads."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        """``vocab_size`` is the network's."""
        self._vocab_size = vocab_size
        self._words = mask_words(vocab_size)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._buffer = np.empty((0, 0), np.uint32)
        #: Ids of the network, where the tokenizer has more; and its end-of-sequence tokens. Known with the first row.
        self._inside: NDArray[np.uint32] | None = None
        self._eos = np.empty(0, np.uint32)

    def add_to(self, masks: dict[int, NDArray[np.uint32]], bound: Mapping[int, GrammarMask]) -> dict[int, str]:
        """Restricts the masks of rows, by index, to what their grammars allow next; valid until the next call.

        End-of-sequence tokens are allowed where the grammar may end. Where it can do nothing but end they are allowed
        whatever other masks say, and only there if the request ignores them.

        Returns:
            Why rows cannot continue, by index.
        """
        failed = {}
        allowed = self._compute([*bound.values()])
        for (i, grammar), bits in zip(bound.items(), allowed, strict=True):
            if grammar.matcher.is_error():
                failed[i] = TOO_COSTLY + grammar.matcher.get_error()
                continue
            others = masks.get(i)
            if grammar.ignores_eos:
                others = ~self._eos if others is None else others & ~self._eos
            if others is not None and (bits & ~self._eos).any():
                bits &= others
            masks[i] = bits
        return failed

    def _compute(self, masks: Sequence[GrammarMask]) -> NDArray[np.uint32]:
        """The tokens that each allows next, packed: [n, words]."""
        if not self._buffer.shape[1]:
            self._measure(masks[0].tokenizer)
        rows, width = len(masks), self._buffer.shape[1]
        if self._buffer.shape[0] < rows:
            self._buffer = np.empty((rows, width), np.uint32)
        buffer = self._buffer[:rows]
        if rows >= _PARALLEL_FROM and self._num_threads > 1:
            from llguidance import LLExecutor

            executor = self._executor = self._executor or LLExecutor(self._num_threads)
            pairs = [(mask.matcher, i) for i, mask in enumerate(masks)]
            executor.unsafe_compute_mask_ptr(pairs, buffer.ctypes.data, 4 * width, rows)
        else:
            start = buffer.ctypes.data
            for i, mask in enumerate(masks):
                mask.matcher.unsafe_compute_mask_ptr(start + 4 * width * i, 4 * width)
        buffer = buffer[:, : self._words]
        if self._inside is not None:
            buffer &= self._inside
        return buffer

    def _measure(self, tokenizer: GrammarTokenizer) -> None:
        self._buffer = np.empty((0, mask_words(tokenizer.vocab_size)), np.uint32)
        if tokenizer.vocab_size > self._vocab_size:
            self._inside = pack_mask(np.ones(self._vocab_size, bool))
        eos = np.zeros(self._vocab_size, bool)
        eos[[token for token in tokenizer.eos_token_ids if token < self._vocab_size]] = True
        self._eos = pack_mask(eos)
