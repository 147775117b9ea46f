"""``LogitsProcessors``: the changes that a request makes to its logits.

Each change is one object per sequence, of one of two kinds: an edit of the row of logits on the host, or a mask of
tokens, which a backend applies on the logits' device. Masks commute with edits, as -inf stays -inf under bias and
penalties, and custom processors come first; so all masks are applied last, when tokens are chosen.
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

from octavo.core.failures import GRAMMAR, SequenceFailure
from octavo.core.model_config import ThinkingBudget
from octavo.core.plan import PositionLogprobs
from octavo.core.plugins import LogitsPlugins
from octavo.core.request import Generate
from octavo.core.sampling_params import LogitsProcessor, SamplingParams, TimestampRules
from octavo.kernels.sampling import NO_TOKEN, PendingLogprobs, mask_words, pack_mask

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from octavo.grammar.matcher import GrammarTokenizer

NO_PLUGINS = LogitsPlugins()
_LARGEST = float(np.finfo(np.float32).max)
#: Minimum number of masks for which other threads are woken.
_PARALLEL_FROM = 8
#: Maximum number of forced tokens that are appended at once; a step computes them together.
_MAX_FORCED = 64


class RowError(Exception):
    """One sequence cannot continue, for the reason in the message; ``kind``: of ``SequenceFailure``."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.failure = SequenceFailure(message, kind)


class RowFailure(Exception):
    """An exception in a row's processors that is not the request's fault: the step fails."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(f"row {row}: {type(error).__name__}: {error}")
        self.row, self.error = row, error


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
        params = task.params
        custom = [*(params.logits_processors or ()), *plugins.processors(params)]
        #: ``GrammarMasks`` computes the masks of all rows together.
        self.grammar = grammar
        #: Overrides the other masks, which may forbid its token.
        self._thinking: ThinkingMask | None = None
        if task.thinking_budget is not None:
            self._thinking = ThinkingMask(task.thinking_budget, num_prompt, vocab_size)
        self._edits: list[LogitsEdit] = []
        self._masks: list[TokenMask] = []
        if custom:
            self._edits.append(CustomProcessors(custom, token_ids[:num_prompt], vocab_size))
        #: Whether logprobs are those of the edited logits, not the model's.
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
        return bool(self._edits or self._masks or self.grammar or self._thinking)

    @property
    def edits_logits(self) -> bool:
        return bool(self._edits)

    @property
    def reads_tokens(self) -> bool:
        """Whether any of them needs the token ids, not only their number."""
        if self.grammar is not None or self._thinking is not None:
            return True
        return any(p.reads_tokens for p in (*self._edits, *self._masks))

    @property
    def may_force(self) -> bool:
        """Whether a token that the grammar forces is chosen whatever the logits are: no mask, no custom processor."""
        calls = any(isinstance(edit, CustomProcessors) for edit in self._edits)
        return self.grammar is not None and not self._masks and not calls

    def fork(self) -> LogitsProcessors:
        child = copy.copy(self)
        child._edits = [edit.fork() for edit in self._edits]
        child._masks = [mask.fork() for mask in self._masks]
        child.grammar = self.grammar.fork() if self.grammar is not None else None
        child._thinking = self._thinking.fork() if self._thinking is not None else None
        return child

    def edit(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        for edit in self._edits:
            edit.apply(logits, token_ids)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        """The tokens that all masks but the grammar's allow; None: all."""
        if self._thinking is not None and (end := self._thinking.bitmask(token_ids)) is not None:
            return end
        allowed = None
        for mask in self._masks:
            bits = mask.bitmask(token_ids)
            if bits is not None:
                allowed = bits if allowed is None else allowed & bits
        return allowed


class SequenceProcessor:
    """A change of one sequence's logits (``LogitsProcessor`` is a user's callable).

    Each call gets the known tokens, int32 [n], prompt included: those of the call before, and new ones after them.
    """

    #: Whether it reads the token ids; if not, it needs their number alone, and the ids may be unknown yet.
    reads_tokens = False

    def fork(self) -> Self:
        """A processor with a state of its own, for a copy of the sequence."""
        return copy.copy(self)


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
        """The allowed tokens, packed (``mask_words``), not to be modified; None allows all.

        Raises:
            RowError: the sequence cannot continue.
        """


class CustomProcessors(LogitsEdit):
    """The callables of ``SamplingParams.logits_processors``, then those of plug-ins, in order."""

    reads_tokens = True

    def __init__(self, processors: list[LogitsProcessor], prompt: list[int], vocab_size: int) -> None:
        self._num_prompt = len(prompt)
        #: Without the virtual tokens of an adapter.
        self._prompt = [token for token in prompt if token < vocab_size]
        self._processors = [(f, _takes_prompt(f)) for f in processors]

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        outputs = token_ids[self._num_prompt :].tolist()
        # A copy, as a processor may keep or modify its argument.
        current = logits.copy()
        for processor, takes_prompt in self._processors:
            try:
                before = (list(self._prompt), list(outputs)) if takes_prompt else (list(outputs),)
                torch = sys.modules.get("torch")  # imported by processors that compute with tensors
                argument = current if torch is None else torch.from_numpy(current)
                current = _check_logits(processor(*before, argument), logits.size)
            except Exception as error:
                name = getattr(processor, "__qualname__", type(processor).__qualname__)
                raise RowError(f"logits processor {name} failed: {type(error).__name__}: {error}") from error
        # Some processors force a token by +inf; the largest finite number has the same effect without NaN.
        np.minimum(current, _LARGEST, out=logits)


def _check_logits(result: Any, vocab_size: int) -> NDArray[np.float32]:
    """Checks the logits that a processor returned: a torch tensor, or an array that casts to float32."""
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
    """Whether the processor takes three arguments: prompt tokens, output tokens, logits."""
    try:
        inspect.signature(processor).bind(None, None)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False


class AllowedTokens(TokenMask):
    """Allows ``allowed_ids`` (None: all) except ``banned_ids``."""

    def __init__(self, allowed_ids: list[int] | None, banned_ids: NDArray[np.int64], vocab_size: int) -> None:
        allowed = np.full(vocab_size, allowed_ids is None)
        if allowed_ids is not None:
            allowed[_in_vocabulary(allowed_ids, vocab_size)] = True
        allowed[banned_ids] = False
        self._bits = pack_mask(allowed)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32]:
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
        latest = token_ids[max(self._num_prompt, len(token_ids) - self._longest) :].tolist()
        ends = [end for start, end in self._phrases if latest[-len(start) :] == start]
        return _all_but(np.array(ends), self._vocab_size) if ends else None


class MinTokens(TokenMask):
    """Forbids stop and EOS tokens until the sequence has ``min_tokens`` tokens, prompt included."""

    def __init__(self, min_tokens: int, stop_ids: NDArray[np.int64], vocab_size: int) -> None:
        self._min_tokens = min_tokens
        self._bits = _all_but(stop_ids, vocab_size)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
        return self._bits if len(token_ids) < self._min_tokens else None


class LogitBias(LogitsEdit):
    def __init__(self, bias: dict[int, float], vocab_size: int) -> None:
        bias = {token: value for token, value in bias.items() if token < vocab_size}
        self._ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        logits[self._ids] += self._bias


class Penalties(LogitsEdit):
    """Repetition, frequency and presence penalties.

    Owns the distinct tokens in order of occurrence, and how often each was generated (0 for prompt tokens). Invariant:
    the sequence's first ``_counted`` tokens are counted.
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
        child = copy.copy(self)
        child._index, child._ids, child._counts = dict(self._index), self._ids.copy(), self._counts.copy()
        return child

    def _index_of(self, token: int) -> int:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        return index

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
        for token in token_ids[self._counted :].tolist():
            index = self._index_of(token)  # may replace the arrays
            self._counts[index] += 1
        self._counted = len(token_ids)
        ids, counts = self._ids[: len(self._index)], self._counts[: len(self._index)]
        if len(ids) and int(ids.max()) >= self._vocab_size:
            inside = ids < self._vocab_size
            ids, counts = ids[inside], counts[inside]
        values = logits[ids].astype(np.float64)
        values = np.where(values > 0.0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0)
        # Extreme penalties must not produce infinities, except for masked tokens.
        logits[ids] = np.where(np.isneginf(values), -np.inf, np.clip(values, -_LARGEST, _LARGEST))


def _all_but(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.uint32]:
    allowed = np.ones(vocab_size, bool)
    allowed[ids] = False
    return pack_mask(allowed)


def _in_vocabulary(ids: list[int], vocab_size: int) -> NDArray[np.int64]:
    return np.array([t for t in ids if 0 <= t < vocab_size], np.int64)


class TimestampEdit(LogitsEdit):
    """Applies the ``TimestampRules`` of a speech model.

    Invariant: ``_latest`` is the last timestamp in the output before ``_position``, and ``_pair`` tells whether each of
    its last two tokens is one.
    """

    reads_tokens = True

    def __init__(self, rules: TimestampRules, num_prompt: int, vocab_size: int) -> None:
        self._rules = rules
        self._first = self._position = num_prompt
        never = [*rules.suppress, *([] if rules.has_times else range(rules.first_time, vocab_size))]
        self._never = _in_vocabulary(never, vocab_size)
        self._not_first = _in_vocabulary(rules.suppress_first, vocab_size)
        self._latest: int | None = None
        # At first as after text.
        self._pair = (False, True)

    def apply(self, logits: NDArray[np.float32], token_ids: NDArray[np.int32]) -> None:
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
        # All timestamps together may be likelier than every text token, though none of them is.
        text, times = logits[: rules.first_time], logits[rules.first_time :]
        highest = times.max(initial=-np.inf)
        if highest > -np.inf:
            total = highest + np.log(np.exp(times - highest).sum(dtype=np.float64))
            if total > text.max():
                text[:] = -np.inf

    def _follow(self, token_ids: NDArray[np.int32]) -> None:
        for token in token_ids[self._position :].tolist():
            is_time = token >= self._rules.first_time
            # The first token makes a pair with the beginning.
            before = self._pair[1] if self._position > self._first else True
            self._pair = (before, is_time)
            if is_time:
                self._latest = token
            self._position += 1


class ThinkingMask(TokenMask):
    """Ends the reasoning of a sequence that has used up its thinking budget.

    Invariant: output tokens before ``_position`` are counted.
    """

    reads_tokens = True

    def __init__(self, budget: ThinkingBudget, num_prompt: int, vocab_size: int) -> None:
        self._budget = budget
        self._inside = budget.inside
        self._count = 0
        self._first = self._position = num_prompt
        end = np.zeros(vocab_size, bool)
        end[budget.end] = True
        self._end = pack_mask(end)

    def bitmask(self, token_ids: NDArray[np.int32]) -> NDArray[np.uint32] | None:
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


# --- grammars (structured outputs) ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompiledGrammar:
    #: At the beginning of the grammar; copied, never changed.
    matcher: LLMatcher
    tokenizer: GrammarTokenizer


class GrammarMask:
    """The state of one sequence in its grammar.

    Invariant: ``matcher`` has consumed the output tokens before ``_position`` that the grammar binds. Forced tokens are
    consumed before the sequence has them.
    """

    def __init__(self, grammar: CompiledGrammar, task: Generate, num_prompt: int) -> None:
        assert task.grammar is not None
        self.matcher = grammar.matcher.deep_copy()
        self.tokenizer = grammar.tokenizer
        self._eos = frozenset(grammar.tokenizer.eos_token_ids)
        self._begin_after = list(task.grammar.begin_after)
        #: Whether the grammar binds the next token.
        self.binds = not self._begin_after
        #: Whether EOS tokens do not end the sequence.
        self.ignores_eos = not self._eos.isdisjoint({*task.ignored_eos_ids} - {*task.stop_token_ids})
        self._ended = False
        max_tokens = task.params.max_tokens
        self._max_len = sys.maxsize if max_tokens is None else num_prompt + max_tokens
        self._start = self._position = num_prompt

    def fork(self) -> GrammarMask:
        child = copy.copy(self)
        child.matcher = self.matcher.deep_copy()
        return child

    def advance(self, token_ids: NDArray[np.int32]) -> None:
        """Consumes the tokens since the last call; RowError if the grammar forbids them, or has become too costly."""
        if self._position >= len(token_ids):
            return
        if not self.binds:  # move behind the first occurrence of begin_after in the output, or to its end
            marker, count = self._begin_after, len(self._begin_after)
            first = max(self._start, self._position - count + 1)
            tokens = token_ids[first:].tolist()
            begins = (first + i + count for i in range(len(tokens) - count + 1) if tokens[i : i + count] == marker)
            begin = next(begins, None)
            self.binds = begin is not None
            self._position = len(token_ids) if begin is None else begin
        self._consume(token_ids[self._position :].tolist())
        self._position = len(token_ids)

    def _consume(self, tokens: list[int]) -> None:
        if self._ended:
            return
        count = self.matcher.try_consume_tokens(tokens)
        taken = tokens[: count + 1]
        if not self._eos.isdisjoint(taken) and self.matcher.is_accepting():
            self._ended = True
        elif self.matcher.is_error():
            raise RowError(*_too_costly(self.matcher))
        elif count < len(tokens):
            raise RowError(f"the output has left its grammar at token {tokens[count]}")

    def forced_tokens(self, token_ids: NDArray[np.int32]) -> list[int]:
        """Consumes and returns the tokens that must follow (jump-forward decoding); none if there is a choice."""
        self.advance(token_ids)
        forced: list[int] = []
        most = min(_MAX_FORCED, self._max_len - len(token_ids))
        while self.binds and not self._ended and len(forced) < most:
            # One at a time, as tokens are sampled: the next choice may differ after it.
            following = self.matcher.compute_ff_tokens()[:1]
            if not following and len(self._eos) == 1 and not self.ignores_eos and self.matcher.is_stopped():
                following = [*self._eos] if not self.matcher.is_error() else []
            if not following or following[0] >= self.tokenizer.network_vocab_size:
                break
            self._consume(following)
            forced += following
        self._position += len(forced)
        return forced


def _too_costly(matcher: LLMatcher) -> tuple[str, str]:
    return f"the grammar became too costly: {matcher.get_error()}", GRAMMAR


class GrammarMasks:
    """Computes the masks of the rows of a step with grammars, on several threads."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._vocab_size = vocab_size
        self._words = mask_words(vocab_size)
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._buffer = np.empty((0, 0), np.uint32)
        #: Set with the first row: a mask of the network's ids, if the tokenizer has more; and one of the EOS tokens.
        self._inside: NDArray[np.uint32] | None = None
        self._eos = np.empty(0, np.uint32)

    def add_to(
        self, masks: dict[int, NDArray[np.uint32]], bound: Mapping[int, GrammarMask]
    ) -> dict[int, SequenceFailure]:
        """Restricts the masks of rows, by index, to the tokens that their grammars allow, until the next call.

        Returns the failures of rows that cannot continue, by index.

        EOS tokens are allowed where the grammar may end; if the request ignores EOS, only where the grammar must end.
        There they are allowed whatever other masks forbid.
        """
        failed = {}
        allowed = self._compute([*bound.values()])
        for (i, grammar), bits in zip(bound.items(), allowed, strict=True):
            if grammar.matcher.is_error():
                failed[i] = SequenceFailure(*_too_costly(grammar.matcher))
                continue
            others = masks.get(i)
            if grammar.ignores_eos:
                others = ~self._eos if others is None else others & ~self._eos
            if others is not None and (bits & ~self._eos).any():
                bits &= others
            masks[i] = bits
        return failed

    def _compute(self, masks: Sequence[GrammarMask]) -> NDArray[np.uint32]:
        if not self._buffer.shape[1]:
            tokenizer = masks[0].tokenizer
            self._buffer = np.empty((0, mask_words(tokenizer.vocab_size)), np.uint32)
            if tokenizer.vocab_size > self._vocab_size:
                self._inside = pack_mask(np.ones(self._vocab_size, bool))
            eos = np.zeros(self._vocab_size, bool)
            eos[[token for token in tokenizer.eos_token_ids if token < self._vocab_size]] = True
            self._eos = pack_mask(eos)
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


# --- outputs of the sampler -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SamplerOutput:
    """Sampled tokens of a step, int64 [n]. Dictionaries are by index in the batch, not by row of the table.

    A sequence in ``errors`` has no token (its id is 0) and ends.
    """

    token_ids: NDArray[np.int64]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, SequenceFailure] = field(default_factory=dict)


@dataclass(slots=True)
class PendingSamplerOutput:
    """The sampled tokens of a step, which the device may still be computing; later changes of rows do not matter."""

    #: int64 [n] on the device of the logits, in stream order; a key of ``NO_TOKEN`` where there is no token.
    tokens: Any
    #: Waits for the tokens, and returns them on the host.
    fetch: Callable[[], NDArray[np.int64]]
    failed: dict[int, SequenceFailure] | None = None
    scored: Sequence[tuple[NDArray[np.int64], PendingLogprobs]] = ()

    def wait(self) -> SamplerOutput:
        chosen = self.fetch()
        output = SamplerOutput(chosen)
        if self.failed or min(chosen.tolist(), default=0) < 0:
            missing = {i: NO_TOKEN[int(chosen[i])] for i in np.flatnonzero(chosen < 0).tolist()}
            output.errors = missing | (self.failed or {})
            output.token_ids = chosen.copy()
            output.token_ids[list(output.errors)] = 0
        for which, logprobs in self.scored:
            for i, position in zip(which.tolist(), logprobs.wait(), strict=True):
                # The sampled token's first, then those of tokens that the request lists.
                if i not in output.errors and (own := output.logprobs.setdefault(i, position)) is not position:
                    own.add(position)
        return output
