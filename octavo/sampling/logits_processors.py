"""Logits processors of a request: custom callables, allowed tokens, bad words, minimum tokens, bias and penalties.

A sequence has one object for each of them, of one of two kinds: an edit of the row of logits on the host, or a mask of
tokens, which a backend applies on the logits' device. Masks commute with edits, as -inf stays -inf under bias and
penalties and custom processors come first; so all masks are applied last, when tokens are chosen.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.core.logits_plugins import LogitsPlugins
from octavo.core.request import Generate
from octavo.core.sampling_params import LogitsProcessor, SamplingParams
from octavo.kernels.sampling import pack_mask
from octavo.sampling.grammar_mask import GrammarMask
from octavo.sampling.sampler_outputs import RowError
from octavo.sampling.sequence_processor import LogitsEdit, TokenMask
from octavo.sampling.thinking_mask import ThinkingMask
from octavo.sampling.timestamp_edit import TimestampEdit

NO_PLUGINS = LogitsPlugins()
_LARGEST = float(np.finfo(np.float32).max)


class LogitsProcessors:
    """The processors of one sequence, in the order that ``SamplingParams`` documents."""

    def __init__(
        self,
        task: Generate,
        token_ids: list[int],
        num_prompt: int,
        vocab_size: int,
        grammar: GrammarMask | None = None,
        plugins: LogitsPlugins = NO_PLUGINS,
    ) -> None:
        """For a sequence of these tokens, of which the first ``num_prompt`` are the prompt."""
        params = task.params
        custom = [*(params.logits_processors or ()), *plugins.processors(params)]
        #: Its mask is computed with those of the other rows, see ``Sampler``.
        self.grammar = grammar
        #: Wins over the other masks, which may not leave its token.
        self._thinking: ThinkingMask | None = None
        if task.thinking_budget is not None:
            self._thinking = ThinkingMask(task.thinking_budget, num_prompt, vocab_size)
        self._edits: list[LogitsEdit] = []
        self._masks: list[TokenMask] = []
        if custom:
            self._edits.append(CustomProcessors(custom, token_ids[:num_prompt], vocab_size))
        #: Whether logprobs are those of the edited logits, and not of the model's own.
        self.scores_edited = task.timestamps is not None
        if task.timestamps is not None:
            self._edits.append(TimestampEdit(task.timestamps, num_prompt, vocab_size))
        banned = _in_vocabulary([word[0] for word in task.bad_words_ids if len(word) == 1], vocab_size)
        if params.allowed_token_ids is not None or len(banned):
            self._masks.append(AllowedTokens(params.allowed_token_ids, banned, vocab_size))
        phrases = [word for word in task.bad_words_ids if len(word) > 1 and word[-1] < vocab_size]
        if phrases:
            self._masks.append(BadPhrases(phrases, num_prompt, vocab_size))
        if len(token_ids) - num_prompt < params.min_tokens:
            stop_ids = _in_vocabulary([*task.stop_token_ids, *task.ignored_eos_ids], vocab_size)
            self._masks.append(MinTokens(num_prompt + params.min_tokens, stop_ids, vocab_size))
        if params.logit_bias:
            self._edits.append(LogitBias(params.logit_bias, vocab_size))
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._edits.append(Penalties(params, token_ids[:num_prompt], vocab_size))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._edits or self._masks or self.grammar or self._thinking)

    @property
    def edits_logits(self) -> bool:
        """Whether ``edit`` changes logits."""
        return bool(self._edits)

    @property
    def reads_tokens(self) -> bool:
        """Whether any of them reads the token ids, and not their number alone."""
        if self.grammar is not None or self._thinking is not None:
            return True
        return any(p.reads_tokens for p in (*self._edits, *self._masks))

    @property
    def may_force(self) -> bool:
        """Whether a token that the grammar forces is chosen whatever the logits are, and nothing is to be called."""
        return (
            self.grammar is not None
            and not self._masks
            and not any(isinstance(edit, CustomProcessors) for edit in self._edits)
        )

    def fork(self) -> LogitsProcessors:
        """The processors of a copy of the sequence."""
        child = copy.copy(self)
        child._edits = [edit.fork() for edit in self._edits]
        child._masks = [mask.fork() for mask in self._masks]
        child.grammar = self.grammar.fork() if self.grammar is not None else None
        child._thinking = self._thinking.fork() if self._thinking is not None else None
        return child

    def edit(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """Applies all edits in order; see ``LogitsEdit.apply``."""
        for edit in self._edits:
            edit.apply(logits, token_ids)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        """The tokens that all masks but the grammar's allow; see ``TokenMask.bitmask``."""
        if self._thinking is not None and (end := self._thinking.bitmask(token_ids)) is not None:
            return end
        allowed = None
        for mask in self._masks:
            bits = mask.bitmask(token_ids)
            if bits is not None:
                allowed = bits if allowed is None else allowed & bits
        return allowed


class CustomProcessors(LogitsEdit):
    """The callables of ``SamplingParams.logits_processors``, then those of plug-ins, in order."""

    reads_tokens = True

    def __init__(self, processors: list[LogitsProcessor], prompt: list[int], vocab_size: int) -> None:
        self._num_prompt = len(prompt)
        #: Without the virtual tokens of an adapter, which are no tokens of the vocabulary.
        self._prompt = [token for token in prompt if token < vocab_size]
        self._processors = [(f, _takes_prompt(f)) for f in processors]

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """See ``LogitsEdit``; a callable that raises, or returns something other than logits, is a ``RowError``."""
        outputs = token_ids[self._num_prompt :].tolist()
        # A copy, as a processor may keep or modify its argument.
        current = logits.copy()
        for processor, takes_prompt in self._processors:
            try:
                before = (list(self._prompt), list(outputs)) if takes_prompt else (list(outputs),)
                current = _checked(processor(*before, _as_written_for(current)), logits.size)
            except Exception as error:
                name = getattr(processor, "__qualname__", type(processor).__qualname__)
                raise RowError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
        # Some processors force a token by +inf; the largest finite number has the same effect and yields no NaN.
        np.minimum(current, _LARGEST, out=logits)


def _as_written_for(logits: NDArray[np.float32]) -> Any:
    """A tensor over the array where torch is imported, as it is by a processor's module that computes with it."""
    torch = sys.modules.get("torch")
    return logits if torch is None else torch.from_numpy(logits)


def _checked(result: Any, vocab_size: int) -> NDArray[np.float32]:
    """The logits that a processor returned, a tensor of torch or an array of any numbers that float32 stands for."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(result, torch.Tensor):
        result = result.detach().to("cpu", torch.float32).numpy()
    elif not isinstance(result, np.ndarray):
        raise TypeError(f"it must return an array or tensor of logits, not {type(result).__name__}")
    if result.shape != (vocab_size,):
        raise ValueError(f"it must return logits of shape [{vocab_size}], not {list(result.shape)}")
    values: NDArray[np.float32] = np.ascontiguousarray(result).astype(np.float32, casting="same_kind", copy=False)
    return values


def _takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether the processor cannot be called with two arguments, so it expects the prompt tokens too."""
    try:
        inspect.signature(processor).bind(None, None)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False


class AllowedTokens(TokenMask):
    """Allows the allowed tokens (None: all) except the banned ones."""

    def __init__(self, allowed_ids: list[int] | None, banned_ids: NDArray[np.int64], vocab_size: int) -> None:
        allowed = np.full(vocab_size, allowed_ids is None)
        if allowed_ids is not None:
            allowed[_in_vocabulary(allowed_ids, vocab_size)] = True
        allowed[banned_ids] = False
        self._bits = pack_mask(allowed)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
        """See ``TokenMask``."""
        return self._bits


class BadPhrases(TokenMask):
    """Forbids the last token of a phrase if the latest output is the rest of the phrase."""

    reads_tokens = True

    def __init__(self, phrases: list[list[int]], num_prompt: int, vocab_size: int) -> None:
        self._phrases = [(phrase[:-1], phrase[-1]) for phrase in phrases]
        self._longest = max(len(start) for start, _ in self._phrases)
        self._num_prompt = num_prompt
        self._vocab_size = vocab_size

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        """See ``TokenMask``."""
        latest = token_ids[max(self._num_prompt, len(token_ids) - self._longest) :].tolist()
        ends = [end for start, end in self._phrases if latest[-len(start) :] == start]
        return _all_but(np.array(ends), self._vocab_size) if ends else None


class MinTokens(TokenMask):
    """Forbids stop and end-of-sequence tokens until the sequence has ``min_tokens`` tokens, prompt included."""

    def __init__(self, min_tokens: int, stop_ids: NDArray[np.int64], vocab_size: int) -> None:
        self._min_tokens = min_tokens
        self._bits = _all_but(stop_ids, vocab_size)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        """See ``TokenMask``."""
        return self._bits if len(token_ids) < self._min_tokens else None


class LogitBias(LogitsEdit):
    """Adds a number to the logits of some tokens."""

    def __init__(self, bias: dict[int, float], vocab_size: int) -> None:
        known = {token: value for token, value in bias.items() if token < vocab_size}
        self._ids = np.array(list(known), np.int64)
        self._bias = np.array(list(known.values()), np.float32)

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """See ``LogitsEdit``."""
        logits[self._ids] += self._bias


class Penalties(LogitsEdit):
    """Repetition, frequency and presence penalties.

    Owns the distinct tokens in order of occurrence and how often each was generated (0 for prompt tokens). Invariant:
    the counts include the sequence's first ``_counted`` tokens.
    """

    reads_tokens = True

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int32)
        self._counted = len(prompt)
        if self._repetition != 1.0:  # the other two penalties apply to output tokens only
            for token in dict.fromkeys(prompt):
                self._index_of(token)

    def fork(self) -> Self:
        """A copy with separate counts."""
        child = copy.copy(self)
        child._index, child._ids, child._counts = dict(self._index), self._ids.copy(), self._counts.copy()
        return child

    def _index_of(self, token: int) -> int:
        """Index of the token in the arrays, which are extended for a new token."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        return index

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        """Counts the new tokens, then edits the logits of all counted ones."""
        for token in token_ids[self._counted :].tolist():
            index = self._index_of(token)
            self._counts[index] += 1
        self._counted = len(token_ids)
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        if len(ids) and int(ids.max()) >= self._vocab_size:
            inside = ids < self._vocab_size
            ids, counts = ids[inside], counts[inside]
        values = logits[ids].astype(np.float64)
        values = np.where(values > 0.0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        # Extreme penalties must not produce infinities, except for tokens that are masked already.
        logits[ids] = np.where(np.isneginf(values), -np.inf, np.clip(values, -_LARGEST, _LARGEST))


def _all_but(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.uint32]:
    allowed = np.ones(vocab_size, bool)
    allowed[ids] = False
    return pack_mask(allowed)


def _in_vocabulary(ids: list[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array([t for t in ids if 0 <= t < vocab_size], np.int64)
