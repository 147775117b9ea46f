"""Sequences, and the groups of them that are scheduled, preempted and resumed whole."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any

from octavo.core.preparation import Preparation, preparations_of
from octavo.core.progress import AdmissionStats
from octavo.core.request import Beam, EngineCoreRequest, Generate, SequenceStatus
from octavo.core.untracked import untracked
from octavo.memory.prefix_chain import FeatureSpan, PrefixChain
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.cross_context import CrossContext


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
        untracked(self.token_ids)
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
        self.features = untracked([FeatureSpan(f.offset, f.length, f.key) for f in request.features])
        self.stop_token_ids = untracked(frozenset(task.stop_token_ids))
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
