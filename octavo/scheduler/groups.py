"""Sequences, and the groups of them (one per request) that are scheduled, preempted and resumed whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from octavo.core.garbage import exclude_from_gc
from octavo.core.request import (
    AdmissionStats,
    Beam,
    BeamResumePoint,
    CompletionResumePoint,
    DraftStats,
    EngineCoreRequest,
    Generate,
    Hypothesis,
    Preparation,
    ResumePoint,
    SequenceStatus,
    preparations_of,
)
from octavo.core.sampling_params import BeamSearchParams
from octavo.memory.block_manager import BlockManager
from octavo.memory.prefix_cache import FeatureSpan, PrefixChain, PrefixMatch


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation of a prompt.

    The KV entries of its first ``num_computed`` tokens are in its blocks, or will be when the steps in flight are done.
    It always has one more token: when all of ``token_ids`` are computed, a step in flight is sampling that token. With
    several steps in flight it may await several tokens, ``num_computed - len(token_ids) + 1`` of them.
    """

    seq_id: int
    group: SequenceGroup
    #: Index among the group's completions.
    index: int
    token_ids: list[int]
    num_computed: int = 0
    #: Tokens up to here have slots: they may be computed without another ``BlockManager.grow``.
    slots_end: int = 0
    #: Where the prompt leaves tokens that others have cached, but not with their state: a chunk ends here, and the next
    #: prompt that branches off here finds a checkpoint. 0: nowhere.
    checkpoint_at: int = 0
    on_workers: bool = False
    #: While the workers do not hold it: the sequence to fork it from.
    fork_of: Sequence | None = None
    #: After preemption by recompute: the sequence whose first blocks it will share, and their number.
    shared_prefix: tuple[Sequence, int] | None = None
    #: The status of its group, unless it has ended before the group.
    status: SequenceStatus = SequenceStatus.WAITING
    stop_token_ids: frozenset[int] = field(init=False)
    max_length: int = field(init=False)
    prediction: list[int] = field(init=False)

    def __post_init__(self) -> None:
        exclude_from_gc(self.token_ids)
        self.stop_token_ids, self.max_length = self.group.stop_token_ids, self.group.max_length
        self.prediction = self.group.request.prediction

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.group.request.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self.group.totals.num_cached_tokens

    @property
    def context(self) -> str:
        return self.group.context

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute, one in flight included: 1 while decoding, more while prefilling."""
        return max(1, len(self.token_ids) - self.num_computed)

    @property
    def awaits_token(self) -> bool:
        """Whether a step in flight samples its next token, or ends it."""
        return self.num_computed >= len(self.token_ids)

    @property
    def is_ending(self) -> bool:
        """Whether the last token that its limit allows is in flight: there is nothing left to compute."""
        return self.num_computed + 1 >= self.max_length


@dataclass(slots=True, eq=False, repr=False)
class SequenceGroup:
    """The sequences of one request: first one, which computes the prompt and forks. A group samples together."""

    request: EngineCoreRequest
    number: InitVar[int]
    seq_id: InitVar[int]
    max_model_len: InitVar[int]
    #: Whether each step needs the result of the last one, so that none is planned ahead.
    plans_on_results: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    #: Whether a sequence has more than its last token to compute.
    prefilling: bool = True
    is_long: bool = False
    #: Whether it has waited beyond ``aging_limit``: no later arrival goes before it.
    urgent: bool = False
    #: The last step planned before its preemption: its result may still add tokens.
    resumable_after: int = 0
    #: The waiting group that it was last preempted for; None: running groups lacked blocks.
    preempted_for: int | None = None
    #: Whether it was decided, since it began to wait, if the KV stores are asked for its prefix; whether it waits for
    #: them now (``Fetches``).
    looked_up: bool = False
    is_held: bool = False
    #: Whether ``StoredPrompts`` knows that its prompt is computed.
    prompt_noted: bool = False
    #: Digests of its blocks from the first look-up until it runs.
    chain: PrefixChain | None = None
    #: The policy's own.
    policy_data: Any = None
    draft_stats: DraftStats | None = None
    totals: AdmissionStats = field(init=False)
    group_id: int = field(init=False)
    #: Seconds, and a number where these are equal.
    arrival: tuple[float, int] = field(init=False)
    priority: float = field(init=False)
    #: What its KV entries depend on besides the tokens.
    context: str = field(init=False)
    features: list[FeatureSpan] = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    samples: bool = field(init=False)
    #: Of a sequence, in tokens. The last one is not computed, so without sampling one more than the prompt.
    max_length: int = field(init=False)
    beam: BeamSearch | None = field(init=False, default=None)
    #: Whether its sequences may have drafts: not beams, and not if a user's code, which may keep state, samples.
    drafts: bool = field(init=False, default=False)
    preparations: list[Preparation] = field(init=False)
    #: Sequences to fork when the prompt is computed.
    num_pending_forks: int = field(init=False)
    #: Unfinished sequences, in order of their index (beams: best first).
    seqs: list[Sequence] = field(init=False)
    #: The encoder output, of an encoder-decoder model.
    cross: CrossContext | None = None

    def __post_init__(self, number: int, seq_id: int, max_model_len: int) -> None:
        request = self.request
        task, prompt = request.task, len(request.prompt_token_ids)
        self.group_id, self.priority = request.group_id, request.options.priority
        self.arrival = request.arrival_time, number
        self.totals = AdmissionStats(self.group_id)
        self.context = request.cache_context
        self.features = exclude_from_gc([FeatureSpan(f.offset, f.length, f.key) for f in request.features])
        self.stop_token_ids = exclude_from_gc(frozenset(task.stop_token_ids))
        self.plans_on_results = self.plans_on_results or task.plans_on_results
        self.samples = task.samples
        self.max_length = max_model_len if task.max_tokens is None else min(prompt + task.max_tokens, max_model_len)
        if not self.samples:
            self.max_length = prompt + 1
        if isinstance(task, Beam):
            self.beam = BeamSearch(task.params, self.stop_token_ids, self.max_length - prompt, task.num_forced)
        elif isinstance(task, Generate):
            self.drafts = not task.params.runs_custom_code
        self.preparations = preparations_of(request)
        self.num_pending_forks = task.num_sequences - 1
        self.seqs = [Sequence(seq_id, self, 0, list(request.prompt_token_ids))]

    @property
    def num_seqs(self) -> int:
        """Its sequences, pending forks included: they count against ``max_num_seqs``."""
        return len(self.seqs) + self.num_pending_forks

    @property
    def num_computed(self) -> int:
        return sum(s.num_computed for s in self.seqs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, counted once, and of all outputs, without those in flight."""
        seqs = self.seqs
        if len(seqs) == 1:
            return len(seqs[0].token_ids)
        prompt = len(self.request.prompt_token_ids)
        return prompt + sum(len(s.token_ids) - prompt for s in seqs)

    @property
    def awaits_result(self) -> bool:
        return self.plans_on_results and self.seqs[0].awaits_token

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last token of each sequence is left to compute, and the group has forked."""
        if not self.samples:  # then the last token is computed, too
            return self.seqs[0].awaits_token
        forked = not self.num_pending_forks or self.beam is not None  # beams fork when their first tokens are chosen
        return forked and all(s.shared_prefix is None and s.num_uncomputed == 1 for s in self.seqs)

    @property
    def seq_ids(self) -> list[int]:
        return [s.seq_id for s in self.seqs]

    @property
    def holder_ids(self) -> list[int]:
        """Ids under which it holds blocks: of its sequences and its encoder output."""
        return self.seq_ids if self.cross is None else [*self.seq_ids, self.cross.context_id]

    @property
    def num_recomputed(self) -> int:
        """Tokens that are lost with its blocks, those of an encoder input included."""
        context = self.cross.num_tokens if self.cross is not None and self.cross.is_computed else 0
        return self.num_computed + context


# Groups that resume as after a preemption by recompute, at another engine core or in this one.


def suspend(group: SequenceGroup) -> EngineCoreRequest | None:
    """The request with which ``resume`` continues a group whose tokens are all reported; None if it is inconsistent."""
    seqs = [seq for seq in group.seqs if not seq.status.finished]
    if group.status.finished or not seqs:
        return None
    request, prompt = group.request, len(group.request.prompt_token_ids)
    if group.totals.first_scheduled_time is None:
        return request  # never scheduled
    progress = ResumePoint([], None, group.totals, group.draft_stats)
    generated = [seq.token_ids[prompt:] for seq in seqs]
    if group.beam is not None:
        progress.beams = group.beam.progress(generated)
        if progress.beams is not None and len(progress.beams.cumulative_logprobs) != len(generated):
            return None  # the search is a step ahead of its sequences
    else:
        begun = [(seq, tokens) for seq, tokens in zip(seqs, generated, strict=True) if tokens]
        progress.completions = [CompletionResumePoint(seq.index, tokens) for seq, tokens in begun]
    return msgspec.structs.replace(request, progress=progress)


def resume(group: SequenceGroup, progress: ResumePoint, seq_ids: Iterator[int], blocks: BlockManager) -> None:
    """Gives a new group the sequences and totals of its ``ResumePoint``; the tokens show which blocks were shared."""
    if progress.totals is not None:
        lost = len(group.request.prompt_token_ids) + sum(len(c.token_ids) for c in progress.completions)
        group.totals = msgspec.structs.replace(
            progress.totals,
            group_id=group.group_id,
            num_recomputes=progress.totals.num_recomputes + 1,
            num_recomputed_tokens=progress.totals.num_recomputed_tokens + lost,
        )
    if progress.drafts is not None:
        group.draft_stats = msgspec.structs.replace(progress.drafts, group_id=group.group_id)
    generated = [(c.index, c.token_ids) for c in progress.completions]
    if progress.beams is not None and group.beam is not None:
        group.beam.resume(progress.beams)
        generated = [(0, tokens) for tokens in progress.beams.token_ids]
    if not generated:
        return
    num_seqs = group.num_seqs if group.beam is not None else len(generated)
    prompt, first_id = group.request.prompt_token_ids, group.seqs[0].seq_id
    group.seqs = []
    for index, token_ids in generated:
        seq_id = next(seq_ids) if group.seqs else first_id
        group.seqs.append(Sequence(seq_id, group, index, prompt + token_ids))
    group.num_pending_forks = num_seqs - len(generated)
    # Each sequence shares its first full blocks with the earlier sequence that has most tokens in common with it.
    for position, seq in enumerate(group.seqs[1:], 1):
        others = group.seqs[:position]
        common = [(_num_common(o.token_ids, seq.token_ids, len(prompt)) // blocks.block_size, o) for o in others]
        count, earlier = max(common, key=lambda pair: pair[0])
        count -= count % blocks.checkpoint_blocks
        seq.shared_prefix = (earlier, count) if count else None


def _num_common(first: SequenceOf[int], second: SequenceOf[int], start: int) -> int:
    """Length of the common prefix, without the last token, which is not computed; ``start`` tokens are equal."""
    end = min(len(first), len(second)) - 1
    return next((i for i in range(start, end) if first[i] != second[i]), end)


@dataclass(slots=True, eq=False)
class CrossContext:
    """The blocks of one encoder input, which the sequences of a group attend to beside their own tokens.

    The block manager keeps them under an id of their own, like those of a sequence. They are computed at once, and
    never written again. In the prefix cache a block is named by the whole input and its index: all of them match, or
    none is of use. The last one may be partly filled, and is cached as a full one.
    """

    context_id: int
    num_tokens: int
    #: Of its prepared input.
    key: str
    #: The context of its blocks' digests.
    name: str
    #: Whether its keys and values are in its blocks when the steps in flight are done.
    is_computed: bool = False
    on_workers: bool = False
    chain: PrefixChain | None = None

    @classmethod
    def of(cls, request: EngineCoreRequest, ids: Iterator[int]) -> CrossContext | None:
        encoder_input = request.encoder_input
        if encoder_input is None:
            return None
        return cls(next(ids), encoder_input.num_tokens, encoder_input.key, f"context of {request.cache_context}")

    def blocks_needed(self, blocks: BlockManager) -> int:
        return max(0, blocks.blocks_for(self.num_tokens) - blocks.num_entries(self.context_id))

    def find(self, blocks: BlockManager) -> PrefixMatch | None:
        if not blocks.prefixes.enabled:
            return None
        tokens = self._tokens(blocks)
        if self.chain is None:
            self.chain = blocks.prefixes.chain(tokens, self.name)
        match = blocks.prefixes.match(tokens, self.chain)
        return match if match.num_full == blocks.blocks_for(self.num_tokens) else None

    def no_match(self, blocks: BlockManager) -> PrefixMatch:
        tokens = self._tokens(blocks)
        chain = self.chain or blocks.prefixes.chain(tokens, self.name)
        return PrefixMatch(0, len(tokens), [[] for _ in blocks.groups], 0, chain)

    def register(self, blocks: BlockManager) -> None:
        tokens = self._tokens(blocks)
        blocks.prefixes.register(self.context_id, tokens, len(tokens) - 1, self.name)

    def _tokens(self, blocks: BlockManager) -> list[int]:
        """Stand-ins for its content in full blocks, and one more, as a match leaves the last token out."""
        return [0] * (blocks.blocks_for(self.num_tokens) * blocks.block_size + 1)


class Candidates(NamedTuple):
    """The most likely next tokens of one running beam, best first, and their logprobs (natural logarithm)."""

    token_ids: SequenceOf[int]
    logprobs: SequenceOf[float]


class BeamStep(NamedTuple):
    #: The next running beams, best first: (index of the continued beam, its new token). Empty if ``done``.
    survivors: list[tuple[int, int]]
    done: bool
    #: Summed logprobs of the survivors.
    cumulative_logprobs: list[float]
    #: Whether the hypotheses have changed.
    completed: bool


class _Continuation(NamedTuple):
    negated_logprob: float
    beam: int
    token_id: int


class BeamSearch:
    """One beam search. Owns the running beams' summed logprobs and the best hypotheses, at most ``beam_width`` of each.

    The caller owns the running beams' tokens, and after each step replaces its beams by the survivors, in their order.
    """

    def __init__(
        self, params: BeamSearchParams, stop_token_ids: Collection[int], max_new_tokens: int, num_forced: int = 0
    ) -> None:
        """``num_forced``: tokens before the generated ones that count in the length penalty."""
        self._width = params.beam_width
        self._length_penalty = float(params.length_penalty)
        # One beam is greedy search to transformers: it ends with the first hypothesis.
        self._early_stopping = params.early_stopping if self._width > 1 else True
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_new_tokens = max_new_tokens
        self._num_generated, self._num_forced = 0, num_forced
        self._cumulative_logprobs = [0.0]
        self._hypotheses: list[Hypothesis] = []

    def resume(self, progress: BeamResumePoint) -> None:
        self._num_generated = len(progress.token_ids[0])
        self._cumulative_logprobs = progress.cumulative_logprobs
        self._hypotheses = [*progress.hypotheses]

    def progress(self, token_ids: list[list[int]]) -> BeamResumePoint | None:
        """The argument of ``resume``, with the running beams' generated tokens; None before the first step."""
        if not self._num_generated:
            return None
        return BeamResumePoint(token_ids, list(self._cumulative_logprobs), self.hypotheses())

    def step(
        self, candidates: SequenceOf[Candidates], tokens: SequenceOf[SequenceOf[int]], num_prompt_tokens: int = 0
    ) -> BeamStep:
        """Takes every running beam one token further, with its ``Beam.num_candidates`` most likely next tokens.

        ``tokens`` are those so far, prompt included. There are fewer than ``beam_width`` survivors only if the
        candidates that do not end were fewer. A step without any candidate (a model that yields NaN) ends the search.
        """
        self._num_generated += 1
        beams = enumerate(zip(self._cumulative_logprobs, candidates, strict=True))
        ranked = sorted(
            _Continuation(-(cumulative + logprob), beam, token_id)
            for beam, (cumulative, (token_ids, logprobs)) in beams
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )
        before = self.hypotheses()
        for continuation in ranked[: self._width]:
            if self._ends(continuation.token_id):
                self._complete(continuation, tokens[continuation.beam], num_prompt_tokens)
        running = [c for c in ranked if not self._ends(c.token_id)][: self._width]
        if not running or not self._worth_continuing(-running[0].negated_logprob):
            running = []
        self._cumulative_logprobs = [-c.negated_logprob for c in running]
        survivors = [(c.beam, c.token_id) for c in running]
        return BeamStep(survivors, not running, self._cumulative_logprobs, completed=before != self._hypotheses)

    def hypotheses(self) -> list[Hypothesis]:
        """The complete sequences so far, best first; at the end ``beam_width`` of them, or all if fewer."""
        return list(self._hypotheses)

    def _ends(self, token_id: int) -> bool:
        return self._num_generated >= self._max_new_tokens or token_id in self._stop_token_ids

    def _complete(self, continuation: _Continuation, tokens: SequenceOf[int], num_prompt_tokens: int) -> None:
        cumulative = -continuation.negated_logprob
        score = self._score(cumulative, self._num_generated)
        if len(self._hypotheses) == self._width:
            if score <= self._hypotheses[-1].score:
                return
            self._hypotheses.pop()
        reason: Literal["stop", "length"] = "stop" if continuation.token_id in self._stop_token_ids else "length"
        generated = [*tokens[num_prompt_tokens:], continuation.token_id]
        self._hypotheses.append(Hypothesis(generated, cumulative, score, reason))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)

    def _worth_continuing(self, best_running: float) -> bool:
        """Whether the hypotheses are too few, or the best running beam could still displace one, as estimated."""
        if len(self._hypotheses) < self._width:
            return True
        if self._early_stopping is True:
            return False
        at_limit = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_new_tokens if at_limit else self._num_generated
        return self._score(best_running, length) > self._hypotheses[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        try:
            divisor = (length + self._num_forced) ** self._length_penalty
        except OverflowError:
            return 0.0
        return cumulative_logprob / divisor if divisor else -math.inf
