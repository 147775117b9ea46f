"""What a request changes in its logits before the choice: processors, masks, bias and penalties.

Only rows that ask for one of these have an ``Adjustments``; it edits that row in place and costs the others nothing.
"""

from __future__ import annotations

import copy
import inspect

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import NewSequence
from octavo.core.sampling_params import LogitsProcessor, SamplingParams
from octavo.runner.token_table import TokenTable

_LARGEST = float(np.finfo(np.float32).max)


class RowError(Exception):
    """One sequence cannot go on; the message says why."""


class Adjustments:
    """The edits of one sequence's logits, in the order that ``SamplingParams`` documents.

    Owns the counts behind the penalties; they follow the token table, so they hold whoever appended the tokens.
    """

    def __init__(self, vocab_size: int, tokens: TokenTable, sequence: NewSequence) -> None:
        params = sequence.params
        self._tokens = tokens
        self._prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        self._processors = [(f, _takes_prompt(f)) for f in params.logits_processors or ()]
        self._forbidden = None
        if params.allowed_token_ids is not None:
            self._forbidden = np.ones(vocab_size, bool)
            self._forbidden[_in_vocabulary(params.allowed_token_ids, vocab_size)] = False
        self._bad_ids = _in_vocabulary([w[0] for w in sequence.bad_words_ids if len(w) == 1], vocab_size)
        self._bad_phrases = [(w[:-1], w[-1]) for w in sequence.bad_words_ids if len(w) > 1 and w[-1] < vocab_size]
        self._longest = max((len(start) for start, _ in self._bad_phrases), default=0)
        self._min_tokens = params.min_tokens
        self._stop_ids = _in_vocabulary(sequence.stop_token_ids, vocab_size)
        bias = {t: b for t, b in (params.logit_bias or {}).items() if t < vocab_size}
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._penalties = _Penalties(params, sequence, vocab_size) if _penalised(params) else None

    @staticmethod
    def needed(sequence: NewSequence) -> bool:
        """Whether the sequence asks for any edit."""
        params = sequence.params
        return (
            bool(params.logits_processors or sequence.bad_words_ids or params.logit_bias)
            or params.allowed_token_ids is not None
            or _penalised(params)
            or len(sequence.token_ids) - sequence.num_prompt_tokens < params.min_tokens
        )

    def fork(self) -> Adjustments:
        """The same edits for a sequence that goes on from here: its tokens are counted apart, the rest is shared."""
        child = copy.copy(self)
        if self._penalties is not None:
            child._penalties = self._penalties.fork()
        return child

    def apply(self, row: int, logits: NDArray[np.float32]) -> None:
        """Edits the row's logits [vocab_size] in place.

        Raises:
            RowError: a custom processor raised, or returned something else than logits.
        """
        if self._processors:
            self._process(row, logits)
        if self._forbidden is not None:
            logits[self._forbidden] = -np.inf
        logits[self._bad_ids] = -np.inf
        if self._bad_phrases:
            self._ban_phrases(row, logits)
        if self._tokens.num_tokens[row] - self._tokens.num_prompt[row] < self._min_tokens:
            logits[self._stop_ids] = -np.inf
        logits[self._bias_ids] += self._bias
        if self._penalties is not None:
            self._penalties.apply(self._tokens, row, logits)

    def _process(self, row: int, logits: NDArray[np.float32]) -> None:
        outputs = self._tokens.outputs(row)
        # A copy: a processor may keep or spoil what it was given.
        current = torch.from_numpy(logits.copy())
        for processor, takes_prompt in self._processors:
            try:
                before = (list(self._prompt), list(outputs)) if takes_prompt else (list(outputs),)
                current = _checked(processor(*before, current), logits.size)
            except Exception as error:
                name = getattr(processor, "__qualname__", type(processor).__qualname__)
                raise RowError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
        # +inf is how some processors force a token; a finite number does the same and has no NaN in its wake.
        np.minimum(current.numpy(), _LARGEST, out=logits)

    def _ban_phrases(self, row: int, logits: NDArray[np.float32]) -> None:
        """Masks the last token of each phrase whose other tokens are the latest output."""
        latest = self._tokens.outputs(row, last=self._longest)
        for start, end in self._bad_phrases:
            if latest[-len(start) :] == start:
                logits[end] = -np.inf


def _checked(result: object, vocab_size: int) -> Tensor:
    if not isinstance(result, Tensor):
        raise TypeError(f"it must return a tensor of logits, not {type(result).__name__}")
    if tuple(result.shape) != (vocab_size,):
        raise ValueError(f"it must return logits of shape [{vocab_size}], not {list(result.shape)}")
    return result.detach().to("cpu", torch.float32)


def _takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether the processor cannot be called with two arguments, so it wants the prompt tokens too."""
    try:
        inspect.signature(processor).bind(None, None)
    except TypeError:
        return True
    except ValueError:  # no signature to be had
        return False
    return False


def _in_vocabulary(ids: list[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array([t for t in ids if 0 <= t < vocab_size], np.int64)


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class _Penalties:
    """Counts of the tokens that one sequence's penalties concern, and the penalties.

    Owns the distinct tokens in the order first met and how often each was generated (0 for prompt tokens). Invariant:
    tokens up to ``_counted`` of the row are in the counts.
    """

    def __init__(self, params: SamplingParams, sequence: NewSequence, vocab_size: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int32)
        self._counted = sequence.num_prompt_tokens
        if self._repetition != 1.0:  # the other two look at the output alone
            for token in dict.fromkeys(sequence.token_ids[: self._counted]):
                self._place(token)

    def fork(self) -> _Penalties:
        child = copy.copy(self)
        child._index, child._ids, child._counts = dict(self._index), self._ids.copy(), self._counts.copy()
        return child

    def _place(self, token: int) -> int:
        """Index of the token in the arrays, where it gets a place if it has none."""
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place

    def apply(self, tokens: TokenTable, row: int, logits: NDArray[np.float32]) -> None:
        """Counts the tokens that are new in the table, then edits the logits of all those counted."""
        known = int(tokens.num_tokens[row])
        for token in tokens.ids[row, self._counted : known].tolist():
            place = self._place(token)
            self._counts[place] += 1
        self._counted = known
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        if len(ids) and int(ids.max()) >= self._vocab_size:
            inside = ids < self._vocab_size
            ids, counts = ids[inside], counts[inside]
        values = logits[ids].astype(np.float64)
        values = np.where(values > 0.0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        # A tiny or huge penalty must not make infinities, except of tokens that are masked already.
        logits[ids] = np.where(np.isneginf(values), -np.inf, np.clip(values, -_LARGEST, _LARGEST))
