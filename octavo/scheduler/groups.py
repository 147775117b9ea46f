"""Sequences, and the groups of them that are scheduled, preempted and resumed whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceABC
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

# Beam search: which continuations live on, which hypotheses are complete, and when the search is over.


class Candidates(NamedTuple):
    """The most likely next tokens of one running beam, best first, and their logprobs (natural logarithm)."""

    token_ids: SequenceABC[int]
    logprobs: SequenceABC[float]


class BeamStep(NamedTuple):
    """What a step of the search decided."""

    #: The next running beams, best first: (index of the beam that it continues, its new token). Empty if ``done``.
    survivors: list[tuple[int, int]]
    done: bool
    #: Of the next running beams: their summed logprobs.
    cumulative_logprobs: list[float]
    #: Whether the complete sequences are others than before.
    completed: bool


class _Continuation(NamedTuple):
    """A running beam with one more token; sorts as it ranks."""

    negated_logprob: float
    beam: int
    token_id: int


class BeamSearch:
    """One search. Owns the running beams' summed logprobs and the best hypotheses so far, at most ``beam_width`` each.

    The caller owns the running beams' tokens: it starts with one beam that has generated nothing, and after each step
    replaces its beams by the survivors, in their order.
    """

    def __init__(
        self, params: BeamSearchParams, stop_token_ids: Collection[int], max_new_tokens: int, num_forced: int = 0
    ) -> None:
        """``num_forced``: tokens before the generated ones that count where lengths do."""
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
        """Goes on after the steps that another engine core has done of this search."""
        self._num_generated = len(progress.token_ids[0])
        self._cumulative_logprobs = progress.cumulative_logprobs
        self._hypotheses = [*progress.hypotheses]

    def progress(self, token_ids: list[list[int]]) -> BeamResumePoint | None:
        """What ``resume`` goes on from, with the running beams' generated tokens; None before the first step."""
        if not self._num_generated:
            return None
        return BeamResumePoint(token_ids, list(self._cumulative_logprobs), self.hypotheses())

    def step(
        self, candidates: SequenceABC[Candidates], tokens: SequenceABC[SequenceABC[int]], num_prompt_tokens: int = 0
    ) -> BeamStep:
        """Takes every running beam one token further.

        Args:
            candidates: For each running beam, its most likely next tokens, as many as ``Beam.num_candidates``.
            tokens: For each running beam, its tokens so far; copied where a hypothesis completes.
            num_prompt_tokens: Of them, those of the prompt.

        There are fewer than ``beam_width`` survivors only if the candidates that do not end were fewer. A step without
        any candidate (a model that yields NaN) ends the search with the hypotheses that it has.
        """
        self._num_generated += 1
        ranked = self._rank(candidates)
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
        """The complete sequences so far, best first.

        Exactly ``beam_width`` of them when the search is done, unless the candidates were too few to form as many.
        """
        return list(self._hypotheses)

    def _rank(self, candidates: SequenceABC[Candidates]) -> list[_Continuation]:
        return sorted(
            _Continuation(-(cumulative + logprob), beam, token_id)
            for beam, (cumulative, (token_ids, logprobs)) in enumerate(
                zip(self._cumulative_logprobs, candidates, strict=True)
            )
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )

    def _ends(self, token_id: int) -> bool:
        return self._num_generated >= self._max_new_tokens or token_id in self._stop_token_ids

    def _complete(self, continuation: _Continuation, tokens: SequenceABC[int], num_prompt_tokens: int) -> None:
        """Adds a hypothesis if it is one of the best."""
        cumulative = -continuation.negated_logprob
        score = self._score(cumulative, self._num_generated)
        if self._full:
            if score <= self._hypotheses[-1].score:
                return
            self._hypotheses.pop()
        reason: Literal["stop", "length"] = "stop" if continuation.token_id in self._stop_token_ids else "length"
        generated = [*tokens[num_prompt_tokens:], continuation.token_id]
        self._hypotheses.append(Hypothesis(generated, cumulative, score, reason))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)

    @property
    def _full(self) -> bool:
        return len(self._hypotheses) == self._width

    def _worth_continuing(self, best_running: float) -> bool:
        """Whether the hypotheses are too few, or the best running beam could still displace one.

        Its score is guessed: as if the logprob that it has now were its logprob at the end, and the end were here; or,
        for "never" where length is rewarded, at the length limit.
        """
        if not self._full:
            return True
        if self._early_stopping is True:
            return False
        at_limit = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_new_tokens if at_limit else self._num_generated
        return self._score(best_running, length) > self._hypotheses[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        """The score of a sequence; infinitely bad or 0 where the penalty leaves no number between."""
        try:
            divisor = (length + self._num_forced) ** self._length_penalty
        except OverflowError:
            return 0.0
        return cumulative_logprob / divisor if divisor else -math.inf


# What the sequences of a group attend to beside their own tokens: the output of an encoder, in blocks.


@dataclass(slots=True, eq=False)
class CrossContext:
    """The blocks of one encoder input. The block manager knows them under an id of its own, as it knows a sequence's.

    They are computed at once, and never written again. In the prefix cache a block is named by the content of the
    whole input and its index: all of them are found, or none is of use. The last one may be partly filled, and is
    cached as a full one: how many tokens there are is part of the content.
    """

    context_id: int
    num_tokens: int
    #: Of its prepared input.
    key: str
    #: What names its blocks.
    name: str
    #: Whether its keys and values are in its blocks, or will be when the steps in flight are done.
    is_computed: bool = False
    on_workers: bool = False
    #: Digests of its blocks; computed at the first look-up.
    chain: PrefixChain | None = None

    @classmethod
    def of(cls, request: EngineCoreRequest, ids: Iterator[int]) -> CrossContext | None:
        """That of a request, with an id of its own; None if it has none."""
        given = request.encoder_input
        if given is None:
            return None
        return cls(next(ids), given.num_tokens, given.key, f"context of {request.cache_context}")

    def blocks_needed(self, blocks: BlockManager) -> int:
        """Blocks that it needs in addition to those that it holds: all, or none."""
        return max(0, blocks.blocks_for(self.num_tokens) - blocks.num_entries(self.context_id))

    def find(self, blocks: BlockManager) -> PrefixMatch | None:
        """All of its blocks, if the prefix cache has them."""
        if not blocks.prefixes.enabled:
            return None
        tokens = self._tokens(blocks)
        if self.chain is None:
            self.chain = blocks.prefixes.chain(tokens, self.name)
        match = blocks.prefixes.match(tokens, self.chain)
        return match if match.num_full == blocks.blocks_for(self.num_tokens) else None

    def nothing_found(self, blocks: BlockManager) -> PrefixMatch:
        """As the result of a look-up, where not all of its blocks are there."""
        tokens = self._tokens(blocks)
        chain = self.chain or blocks.prefixes.chain(tokens, self.name)
        return PrefixMatch(0, len(tokens), [[] for _ in blocks.groups], 0, chain)

    def register(self, blocks: BlockManager) -> None:
        """Offers its blocks to the prefix cache, once they are computed."""
        tokens = self._tokens(blocks)
        blocks.prefixes.register(self.context_id, tokens, len(tokens) - 1, self.name)

    def _tokens(self, blocks: BlockManager) -> list[int]:
        """What stands for its content in full blocks, and one more, as a match leaves the last token out."""
        return [0] * (blocks.blocks_for(self.num_tokens) * blocks.block_size + 1)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One continuation of a prompt.

    The KV entries of its first ``num_computed`` tokens are in the blocks that the block manager keeps under ``seq_id``,
    or will be when the steps in flight are done. It always has one more token than these: when all of ``token_ids``
    are computed, a step in flight is sampling that token, which counts already; only its id is still to come. With
    several steps in flight it may await several tokens, ``num_computed - len(token_ids) + 1`` of them.
    """

    seq_id: int
    group: SequenceGroup
    #: Which of the group's completions it is.
    index: int
    token_ids: list[int]
    num_computed: int = 0
    #: So many of its tokens may be computed without asking the block manager for slots again.
    slots_end: int = 0
    #: Whether the workers hold this sequence.
    on_workers: bool = False
    #: While the workers do not hold it: the sequence that they can fork to make it.
    fork_of: Sequence | None = None
    #: After preemption by recompute: the sequence whose first blocks it shares once computed, and how many.
    shared_prefix: tuple[Sequence, int] | None = None
    #: The status of its group, unless it has ended before the group.
    status: SequenceStatus = SequenceStatus.WAITING
    stop_token_ids: frozenset[int] = field(init=False)
    max_length: int = field(init=False)
    #: What its output is likely to be, as the request says.
    prediction: list[int] = field(init=False)

    def __post_init__(self) -> None:
        exclude_from_gc(self.token_ids)
        self.stop_token_ids, self.max_length = self.group.stop_token_ids, self.group.max_length
        self.prediction = self.group.request.prediction

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.group.request.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return self.group.totals.num_cached_tokens

    @property
    def context(self) -> str:
        """What its tokens depend on besides those before them."""
        return self.group.context

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute, including one whose id is still in flight: 1 while decoding, more while prefilling."""
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
    """The sequences of one request.

    It begins with one, which computes the prompt and then forks. While one of several is still prefilling (after
    preemption by recompute), none decodes: a group samples together.
    """

    request: EngineCoreRequest
    #: Tells apart groups that arrived at the same time.
    number: InitVar[int]
    #: The id of the first sequence.
    seq_id: InitVar[int]
    max_model_len: InitVar[int]
    #: Whether its next step depends on the result of the last one, so that it cannot be planned ahead.
    plans_on_results: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    #: Whether any sequence has more than its last token to compute.
    prefilling: bool = True
    is_long: bool = False
    #: Whether it has waited beyond ``aging_limit``: no later arrival goes before it.
    urgent: bool = False
    #: Number of the last step planned before its preemption, whose result may still add tokens to it.
    resumable_after: int = 0
    #: The group that it was preempted for the last time; None: the running ones lacked blocks.
    preempted_for: int | None = None
    #: Until it runs: digests of its blocks' contents, for the prefix cache; computed at the first lookup.
    chain: PrefixChain | None = None
    #: What the policy keeps of it.
    policy_data: Any = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    #: What is reported of it when it is admitted.
    totals: AdmissionStats = field(init=False)
    group_id: int = field(init=False)
    #: Orders groups by arrival: seconds, and a number where these are equal.
    arrival: tuple[float, int] = field(init=False)
    priority: float = field(init=False)
    #: What the contents of its blocks depend on besides their tokens.
    context: str = field(init=False)
    features: list[FeatureSpan] = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    #: Whether tokens follow the prompt.
    samples: bool = field(init=False)
    #: Most tokens of a sequence. The last one is not computed, so without sampling it is one more than the prompt.
    max_length: int = field(init=False)
    beam: BeamSearch | None = field(init=False, default=None)
    #: Whether its sequences may have drafts: beams are chosen by every step, and a user's callables may keep state.
    drafts: bool = field(init=False, default=False)
    #: What must be ready on the workers before it can run.
    preparations: list[Preparation] = field(init=False)
    #: Sequences still to be forked off when the prompt is computed.
    num_pending_forks: int = field(init=False)
    #: Unfinished sequences, in order of their index (beams: best first).
    seqs: list[Sequence] = field(init=False)
    #: What all of them attend to, of an encoder-decoder model.
    cross: CrossContext | None = None

    def __post_init__(self, number: int, seq_id: int, max_model_len: int) -> None:
        request = self.request
        task, prompt = request.task, len(request.prompt_token_ids)
        self.group_id, self.arrival, self.priority = (
            request.group_id,
            (request.arrival_time, number),
            request.options.priority,
        )
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
        """Its sequences, including those to be forked: what counts against ``max_num_seqs``."""
        return len(self.seqs) + self.num_pending_forks

    @property
    def num_computed(self) -> int:
        """Tokens with KV entries, over all its sequences."""
        return sum(s.num_computed for s in self.seqs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, which its sequences share, and of all their outputs; those in flight do not count."""
        seqs = self.seqs
        if len(seqs) == 1:
            return len(seqs[0].token_ids)
        prompt = len(self.request.prompt_token_ids)
        return prompt + sum(len(s.token_ids) - prompt for s in seqs)

    @property
    def awaits_result(self) -> bool:
        """Whether its next step depends on one in flight, which chooses beams or verifies drafts."""
        return self.plans_on_results and self.seqs[0].awaits_token

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last token of each of its sequences is left to compute, and the group has forked.

        A beam search forks when its first tokens are chosen. Where nothing is sampled, no token is left.
        """
        if not self.samples:
            return self.seqs[0].awaits_token
        forked = not self.num_pending_forks or self.beam is not None
        return forked and all(s.shared_prefix is None and s.num_uncomputed == 1 for s in self.seqs)

    @property
    def seq_ids(self) -> list[int]:
        """Ids of its unfinished sequences."""
        return [s.seq_id for s in self.seqs]

    @property
    def holder_ids(self) -> list[int]:
        """Ids under which it holds blocks: those of its sequences, and of what they attend to."""
        return self.seq_ids if self.cross is None else [*self.seq_ids, self.cross.context_id]

    @property
    def num_recomputed(self) -> int:
        """Tokens that are lost with its blocks, those of an encoder's input among them."""
        context = self.cross.num_tokens if self.cross is not None and self.cross.is_computed else 0
        return self.num_computed + context


# Groups that go on as after a preemption by recompute: at another engine core, or when they were set aside.


def suspend(group: SequenceGroup) -> EngineCoreRequest | None:
    """The request of an unfinished group as ``resume`` goes on with it; None if what is known of it is torn.

    Tokens of steps in flight are lost, and will be sampled again. All tokens of its sequences must have been reported.
    """
    seqs = [seq for seq in group.seqs if not seq.status.finished]
    if group.status.finished or not seqs:
        return None
    request, prompt = group.request, len(group.request.prompt_token_ids)
    if group.totals.first_scheduled_time is None:
        return request  # nothing of it was computed
    drafts = DraftStats(group.group_id, group.num_draft_tokens, group.num_accepted_tokens)
    progress = ResumePoint([], None, group.totals, drafts if group.num_draft_tokens else None)
    generated = [seq.token_ids[prompt:] for seq in seqs]
    if group.beam is not None:
        progress.beams = group.beam.progress(generated)
        if progress.beams is not None and len(progress.beams.cumulative_logprobs) != len(generated):
            return None  # the search has gone on, and its sequences have not
    else:
        begun = [(seq, tokens) for seq, tokens in zip(seqs, generated, strict=True) if tokens]
        progress.completions = [CompletionResumePoint(seq.index, tokens) for seq, tokens in begun]
    return msgspec.structs.replace(request, progress=progress)


def resume(group: SequenceGroup, progress: ResumePoint, seq_ids: Iterator[int], block_size: int) -> None:
    """Gives a new group the sequences and totals that it had when its engine core was lost, or it was taken from it.

    What is not known to the front end, such as which blocks were shared, is found out from the tokens; tokens that the
    core had sampled and not reported are sampled again, and are the same.
    """
    if progress.totals is not None:
        known = len(group.request.prompt_token_ids) + sum(len(c.token_ids) for c in progress.completions)
        group.totals = msgspec.structs.replace(
            progress.totals,
            group_id=group.group_id,
            num_recomputes=progress.totals.num_recomputes + 1,
            num_recomputed_tokens=progress.totals.num_recomputed_tokens + known,
        )
    if (drafts := progress.drafts) is not None:
        group.num_draft_tokens, group.num_accepted_tokens = drafts.num_draft_tokens, drafts.num_accepted_tokens
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
    _share_prefixes(group.seqs, len(prompt), block_size)


def _share_prefixes(seqs: list[Sequence], prompt: int, block_size: int) -> None:
    """Has each sequence share its first full blocks with the earlier sequence whose tokens agree with most of its."""
    for position, seq in enumerate(seqs[1:], 1):
        common = [
            (_num_common(other.token_ids, seq.token_ids, prompt) // block_size, other) for other in seqs[:position]
        ]
        count, earlier = max(common, key=lambda pair: pair[0])
        seq.shared_prefix = (earlier, count) if count else None


def _num_common(first: SequenceOf[int], second: SequenceOf[int], start: int) -> int:
    """First tokens that both have, of those that can be computed: all but the last. The first ``start`` agree."""
    end = min(len(first), len(second)) - 1
    return next((i for i in range(start, end) if first[i] != second[i]), end)
