"""Logits processors of a request: custom callables, allowed tokens, bad words, minimum tokens, bias and penalties.

A sequence has one object for each of them, of one of two kinds: an edit of the row of logits on the host, or a mask of
tokens, which a backend applies on the logits' device. Masks commute with edits, as -inf stays -inf under bias and
penalties and custom processors come first; so all masks are applied last, when tokens are chosen.
"""

from __future__ import annotations

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.core.model_config import ThinkingBudget
from octavo.core.plan import PositionLogprobs
from octavo.core.plugins import LogitsPlugins
from octavo.core.request import Generate
from octavo.core.sampling_params import TOO_COSTLY, LogitsProcessor, SamplingParams, TimestampRules
from octavo.kernels.sampling import NO_TOKEN, PendingLogprobs, mask_words, pack_mask

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from octavo.grammar.matcher import GrammarTokenizer


# Outputs of the sampler: tokens on the device immediately, host values after ``wait``.


class RowError(Exception):
    """One sequence cannot continue; the message says why."""


class RowFailure(Exception):
    """What was raised while one row was processed, by a fault that is not the request's: nothing of the step counts."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(f"row {row}: {type(error).__name__}: {error}")
        self.row, self.error = row, error


@dataclass(slots=True)
class SamplerOutput:
    """Sampled tokens of a step. The keys of the dictionaries are indices in the batch, not rows of the table.

    ``token_ids`` int64 [n] is 0 at the indices in ``errors``: such a sequence has no token and ends.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class PendingSamplerOutput:
    """The sampled tokens of a step, which the device may still be computing.

    It holds all inputs of the step, so later changes of the rows do not affect it.
    """

    __slots__ = ("_failed", "_fetched", "_scored", "tokens")

    def __init__(
        self,
        tokens: Any,
        fetched: Callable[[], NDArray[np.int64]],
        failed: dict[int, str] | None = None,
        scored: Sequence[tuple[NDArray[np.int64], PendingLogprobs]] = (),
    ) -> None:
        #: int64 [n] where the logits are, ready in stream order; negative where there is no token (``NO_TOKEN``).
        self.tokens = tokens
        self._fetched = fetched
        self._failed = failed
        self._scored = scored

    def wait(self) -> SamplerOutput:
        """The output on the host; may be called repeatedly."""
        chosen = self._fetched()
        output = SamplerOutput(chosen)
        if self._failed or min(chosen.tolist(), default=0) < 0:
            none = {i: NO_TOKEN[int(chosen[i])] for i in np.flatnonzero(chosen < 0).tolist()}
            output.errors = none | (self._failed or {})
            output.token_ids = chosen.copy()
            output.token_ids[list(output.errors)] = 0
        for which, logprobs in self._scored:
            for i, position in zip(which.tolist(), logprobs.wait(), strict=True):
                # The first is the sampled token's; others are those that the request lists.
                if i not in output.errors and (own := output.logprobs.setdefault(i, position)) is not position:
                    own.add(position)
        return output


# The tokens that a sequence's grammar allows.

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


# What changes the logits of one sequence: edits on the host, and masks of tokens.


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


# Ends the reasoning of a sequence that has used up its budget.


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


# Obeys the rules of a speech model's answers, see ``TimestampRules``.


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
