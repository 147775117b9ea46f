"""``Sampler``: from the logits of one step to tokens and logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.core.failures import SequenceFailure
from octavo.core.plan import NewSequence
from octavo.core.plugins import LogitsPlugins
from octavo.core.request import Beam, Generate
from octavo.kernels import sampling as noise
from octavo.kernels.interface import Array
from octavo.kernels.sampling import FILTERS, Filters, PendingLogprobs, SamplingBackend, mask_words
from octavo.sampling.logits_processors import (
    NO_PLUGINS,
    CompiledGrammar,
    GrammarMask,
    GrammarMasks,
    LogitsProcessors,
    PendingSamplerOutput,
    RowError,
    RowFailure,
)

Int64Array = NDArray[np.int64]


class Sampler:
    """Samples the next token of each row by the sampling parameters of its request.

    Owns the sampling state of each row of the persistent batch, and reads token ids from the table. Batch-invariant:
    the result of a row depends, bit for bit, on its logits, its tokens and its request alone.
    """

    def __init__(
        self,
        vocab_size: int,
        tokens: TokenTable,
        backend: SamplingBackend,
        num_threads: int = 1,
        plugins: LogitsPlugins = NO_PLUGINS,
        find_grammar: Callable[[Generate], CompiledGrammar | None] = lambda task: None,
    ) -> None:
        """``num_threads`` compute the masks of grammars; ``plugins``: logits processors for ``extra_args``.

        ``find_grammar``: the compiled grammar of a task, if it has one.
        """
        self._plugins, self._find_grammar = plugins, find_grammar
        self.vocab_size = vocab_size
        #: Rows of logits to have beside a step's; None: any number.
        self.rows_at_once = backend.rows_at_once
        self._tokens = tokens
        self._backend = backend
        rows = tokens.num_rows
        #: Rows that need more than the most likely token.
        self._special: set[int] = set()
        self._num_logprobs = np.full(rows, -1, np.int64)
        #: By row: ``logprob_token_ids`` of its request.
        self._listed: dict[int, list[int]] = {}
        self._seeds = np.zeros(rows, np.uint64)
        self._filters = np.zeros(rows, FILTERS)  # temperature 0: greedy
        self._processors: dict[int, LogitsProcessors] = {}
        #: Rows whose processors need token ids.
        self._token_readers: set[int] = set()
        #: Rows whose grammar may force tokens that need not be sampled.
        self._forcing: set[int] = set()
        self._masks = np.empty((0, mask_words(vocab_size)), np.uint32)
        self._grammar_masks = GrammarMasks(vocab_size, num_threads)

    def add(self, row: int, sequence: NewSequence) -> None:
        self.remove(row)
        task = sequence.task
        if isinstance(task, Beam):
            self._num_logprobs[row] = min(task.num_candidates, self.vocab_size)
            self._special.add(row)
        if not isinstance(task, Generate):
            return
        params = task.params
        random = not params.greedy and params.top_k != 1
        if random:
            self._seeds[row] = task.seed & 0xFFFFFFFFFFFFFFFF
            self._filters[row] = astuple(Filters.of(params, self.vocab_size))
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        if params.logprob_token_ids:
            self._listed[row] = params.logprob_token_ids
        num_prompt = sequence.num_prompt_tokens
        grammar = self._find_grammar(task)
        mask = GrammarMask(grammar, task, num_prompt) if grammar is not None else None
        tokens, vocab_size = sequence.token_ids, self.vocab_size
        self._set_processors(row, LogitsProcessors(task, tokens, num_prompt, vocab_size, mask, self._plugins))
        # Forced tokens have no logits, so no logprobs; sequences of one request sample together.
        alone = params.logprobs is None and params.num_sequences == 1
        if mask is not None and alone and self._processors[row].may_force:
            self._forcing.add(row)
        if random or row in self._processors or params.logprobs is not None:
            self._special.add(row)

    def _set_processors(self, row: int, processors: LogitsProcessors) -> None:
        if processors:
            self._processors[row] = processors
            if processors.reads_tokens:
                self._token_readers.add(row)

    def fork(self, parent: int, child: int, seed: int) -> None:
        """Adds a copy of the sequence at row ``parent`` at row ``child``, with another seed."""
        self.remove(child)
        for state in (self._num_logprobs, self._filters):
            state[child] = state[parent]
        self._seeds[child] = seed & 0xFFFFFFFFFFFFFFFF
        if parent in self._listed:
            self._listed[child] = self._listed[parent]
        if parent in self._special:
            self._special.add(child)
        if parent in self._processors:
            self._set_processors(child, self._processors[parent].fork())

    def remove(self, row: int) -> None:
        self._special.discard(row)
        self._token_readers.discard(row)
        self._forcing.discard(row)
        self._num_logprobs[row] = -1
        self._listed.pop(row, None)
        self._filters[row] = 0
        self._processors.pop(row, None)

    def needs_tokens(self, rows: Int64Array) -> bool:
        """Whether ``start`` needs the ids of all tokens of these rows in the table, and not only their number.

        True if a row has penalties, bad words of several tokens, a grammar or custom processors.
        """
        return bool(self._token_readers) and not self._token_readers.isdisjoint(rows.tolist())

    def may_force(self, rows: Int64Array) -> bool:
        return bool(self._forcing) and not self._forcing.isdisjoint(rows.tolist())

    def forced_tokens(self, row: int) -> list[int]:
        """Tokens that are sampled next whatever the logits are, as a grammar allows no other.

        All tokens of the row must be in the table. The caller must append the forced tokens, or remove the row.
        """
        if row not in self._forcing:
            return []
        grammar = self._processors[row].grammar
        assert grammar is not None
        try:
            return grammar.forced_tokens(self._tokens.ids[row, : self._tokens.num_tokens[row]])
        except RowError:  # raised again when the next token is sampled, where it ends the sequence
            return []

    def start(self, logits: Array, rows: Int64Array, positions: Int64Array | None = None) -> PendingSamplerOutput:
        """Samples a token for each row; the caller appends it to the table.

        Rows may be added, removed and changed before ``wait``: the result stays the same. For rows of which
        ``needs_tokens`` is true, the table must hold the ids of all tokens before each position.

        Args:
            logits: [n, vocab_size]; may be changed in place.
            rows: [n]. A row may occur several times, with different positions (to verify drafts).
            positions: [n], position of each sampled token in its sequence; by default ``tokens.num_tokens[rows]``.
                Tokens of the table from ``tokens.num_tokens[row]`` up to the position may be replaced later (drafts).

        Raises:
            RowFailure: a row's processors failed by no fault of its request.
        """
        backend = self._backend
        logits = backend.prepare(logits)
        row_list = rows.tolist()
        if self._special.isdisjoint(row_list):
            tokens = backend.choose_most_likely(logits)
            return PendingSamplerOutput(tokens, backend.fetch(tokens))
        if positions is None:
            positions = self._tokens.num_tokens[rows]
        most, processors = self.rows_at_once, self._processors
        if most is None or sum(self._is_copied(row) for row in row_list if row in processors) <= most:
            tokens, failed, logprobs = self._sample(logits, rows, positions)
            return PendingSamplerOutput(tokens, backend.fetch(tokens), failed, logprobs)
        parts, failed, logprobs = list[Any](), {}, []
        for first in range(0, len(rows), most):
            which = slice(first, first + most)
            tokens, failures, scored = self._sample(logits[which], rows[which], positions[which])
            parts.append(tokens)
            failed |= {first + i: failure for i, failure in failures.items()}
            logprobs += [(first + indices, pending) for indices, pending in scored]
        tokens = np.concatenate(parts)
        return PendingSamplerOutput(tokens, backend.fetch(tokens), failed, logprobs)

    def _is_copied(self, row: int) -> bool:
        """Whether the row's logits are copied before its processors edit them, as its logprobs are the model's."""
        return bool(self._num_logprobs[row] >= 0) and not self._processors[row].scores_edited

    def _sample(
        self, logits: Any, rows: Int64Array, positions: Int64Array
    ) -> tuple[Any, dict[int, SequenceFailure], list[tuple[Int64Array, PendingLogprobs]]]:
        """Tokens, failures by index, and logprobs, of rows of which some are special."""
        backend, row_list = self._backend, rows.tolist()
        keys = noise.keys(self._seeds[rows], positions)
        counts = self._num_logprobs[rows]
        scored = counts >= 0
        processed = [i for i, row in enumerate(row_list) if row in self._processors]
        edited = [i for i in processed if self._is_copied(row_list[i])]
        changed = np.array(edited, np.int64)
        originals = backend.copy_rows(logits, changed) if len(changed) else logits
        failed, mask = self._process(logits, row_list, positions, processed)
        tokens = backend.choose(logits, self._filters[rows], keys, mask)
        scored[edited] = False
        unchanged = np.flatnonzero(scored)
        logprobs = self._logprobs(tokens, logits, unchanged, unchanged, counts, rows)
        logprobs += self._logprobs(tokens, originals, np.arange(len(changed)), changed, counts, rows)
        return tokens, failed, logprobs

    def draft(self, logits: Array, rows: Int64Array, positions: Int64Array, *, edited: bool = True) -> Int64Array:
        """Chooses draft tokens [n] as ``start`` would with these logits; waits for the device. Negative: no token.

        The noise of a position is that of ``start``, so a draft agrees with the model's token more often than one that
        is drawn independently.

        Args:
            logits: [n, vocab_size], of another network; may be changed in place.
            rows: [n]. The table must hold the ids of all tokens before each position.
            positions: [n], position of each token in its sequence.
            edited: whether to apply logits processors; if not, there may be fewer logits than ``vocab_size``.
        """
        backend = self._backend
        logits = backend.prepare(logits)
        row_list = rows.tolist()
        if self._special.isdisjoint(row_list):
            return backend.fetch(backend.choose_most_likely(logits))()
        processed = [i for i, row in enumerate(row_list) if row in self._processors] if edited else []
        mask = self._process(logits, row_list, positions, processed)[1]
        keys = noise.keys(self._seeds[rows], positions)
        return backend.fetch(backend.choose(logits, self._filters[rows], keys, mask))()

    def start_prompt_logprobs(self, logits: Array, targets: ArrayLike, k: int) -> PendingLogprobs:
        """Logprobs of prompt tokens ``targets`` [n], and of the ``k`` most likely tokens at each position.

        ``logits``: [n, vocab_size], the model's at the positions before the targets.
        """
        tokens, backend = np.asarray(targets, np.int64), self._backend
        every = np.arange(len(tokens))
        return backend.logprobs(backend.prepare(logits), every, backend.to_device(tokens), np.full_like(tokens, k))

    def _logprobs(
        self,
        tokens: Any,
        logits: Any,
        logits_rows: Int64Array,
        indices: Int64Array,
        counts: Int64Array,
        rows: Int64Array,
    ) -> list[tuple[Int64Array, PendingLogprobs]]:
        """Logprobs of the tokens at these indices of the batch, from ``logits_rows``; and of ``logprob_token_ids``."""
        if not len(indices):
            return []
        backend = self._backend
        scored = tokens if len(indices) == len(tokens) else backend.select(tokens, indices)
        logprobs = [(indices, backend.logprobs(logits, logits_rows, scored, counts[indices]))]
        if self._listed:
            table_rows = rows[indices].tolist()
            listed = [(k, token) for k, row in enumerate(table_rows) for token in self._listed.get(row, ())]
            if listed:
                which, ids = np.array(listed, np.int64).T
                targets = backend.to_device(np.ascontiguousarray(ids))
                logprobs.append(
                    (indices[which], backend.logprobs(logits, logits_rows[which], targets, np.zeros_like(ids)))
                )
        return logprobs

    def _process(
        self, logits: Any, rows: list[int], positions: Int64Array, indices: list[int]
    ) -> tuple[dict[int, SequenceFailure], NDArray[np.uint32] | None]:
        """Edits the logits at these indices of the batch: failures by index, and the masks of all rows, if any.

        The next call overwrites the masks.
        """
        if not indices:
            return {}, None
        edited = [i for i in indices if self._processors[rows[i]].edits_logits]
        editable = self._backend.edit_rows(logits, edited) if edited else {}
        failed: dict[int, SequenceFailure] = {}
        masks: dict[int, NDArray[np.uint32]] = {}
        bound: dict[int, GrammarMask] = {}
        with np.errstate(over="ignore"):
            for i in indices:
                row, position = rows[i], int(positions[i])
                processors, token_ids = self._processors[row], self._tokens.ids[row, :position]
                if position > self._tokens.num_tokens[row]:
                    processors = processors.fork()  # tokens that may be replaced must not be counted
                try:
                    if i in editable:
                        processors.edit(editable[i], token_ids)
                    bits = processors.bitmask(token_ids)
                    if processors.grammar is not None:
                        processors.grammar.advance(token_ids)
                        if processors.grammar.binds:
                            bound[i] = processors.grammar
                except RowError as error:
                    failed[i] = error.failure
                except Exception as error:
                    raise RowFailure(row, error) from error
                else:
                    if bits is not None:
                        masks[i] = bits
        if edited:
            self._backend.put_rows(logits, editable)
        if bound:
            failed |= self._grammar_masks.add_to(masks, bound)
        if not masks:
            return failed, None
        if len(self._masks) < len(rows):
            self._masks = np.empty((len(rows), mask_words(self.vocab_size)), np.uint32)
        stacked = self._masks[: len(rows)]
        if len(masks) < len(rows):
            stacked.fill(0xFFFFFFFF)
        for i, bits in masks.items():
            stacked[i] = bits
        return failed, stacked


class TokenTable:
    """Token ids of every row of the persistent batch.

    ``num_tokens`` counts known tokens: prompt and generated. Invariant: ``num_prompt <= num_tokens <= max_len``; later
    ids are stale.
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.ids: NDArray[np.int32] = np.zeros((rows, max_len), np.int32)
        self.num_tokens: Int64Array = np.zeros(rows, np.int64)
        self.num_prompt: Int64Array = np.zeros(rows, np.int64)

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]
