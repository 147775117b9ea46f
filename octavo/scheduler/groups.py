"""Sequences, and the groups of them that are scheduled, preempted and resumed whole."""

from __future__ import annotations

from typing import Any

from octavo.core.preparations import preparations_of
from octavo.core.request import Beam, EngineCoreRequest, Generate, SequenceStatus
from octavo.core.untracked import untracked
from octavo.memory.prefix_chain import FeatureSpan, PrefixChain
from octavo.scheduler.beam_search import BeamSearch


class Sequence:
    """One continuation of a prompt.

    The KV entries of its first ``num_computed`` tokens are in the blocks that the block manager keeps under ``seq_id``,
    or will be when the steps in flight are done. It always has one more token than these: when all of ``token_ids``
    are computed, a step in flight is sampling that token, which counts already; only its id is still to come. With
    several steps in flight it may await several tokens, ``num_computed - len(token_ids) + 1`` of them.
    """

    __slots__ = (
        "fork_of",
        "free_slots",
        "group",
        "index",
        "max_length",
        "num_computed",
        "on_workers",
        "prediction",
        "seq_id",
        "shared_prefix",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, seq_id: int, group: SequenceGroup, index: int, token_ids: list[int]) -> None:
        self.seq_id = seq_id
        self.group = group
        #: Which of the group's completions it is.
        self.index = index
        self.token_ids = untracked(token_ids)
        self.num_computed = 0
        #: Slots in its blocks that may be written without asking the block manager again.
        self.free_slots = 0
        #: Whether the workers hold this sequence.
        self.on_workers = False
        #: While the workers do not hold it: the sequence that they can fork to make it.
        self.fork_of: Sequence | None = None
        #: After preemption by recompute: the sequence whose first blocks it shares once computed, and how many.
        self.shared_prefix: tuple[Sequence, int] | None = None
        self.stop_token_ids = group.stop_token_ids
        self.max_length = group.max_length
        #: What its output is likely to be, as the request says.
        self.prediction = group.request.prediction
        #: The status of its group, unless it has ended before the group.
        self.status = SequenceStatus.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.group.request.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return self.group.num_cached_tokens

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


class SequenceGroup:
    """The sequences of one request.

    It begins with one, which computes the prompt and then forks. While one of several is still prefilling (after
    preemption by recompute), none decodes: a group samples together.
    """

    __slots__ = (
        "arrival",
        "beam",
        "chain",
        "context",
        "drafts",
        "features",
        "first_scheduled_time",
        "group_id",
        "is_long",
        "max_length",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_pending_forks",
        "num_recomputed_tokens",
        "num_recomputes",
        "num_swapped_blocks",
        "num_swaps",
        "plans_on_results",
        "policy_data",
        "prefilling",
        "preparations",
        "priority",
        "request",
        "resumable_after",
        "samples",
        "seqs",
        "status",
        "stop_token_ids",
        "urgent",
    )

    def __init__(
        self, request: EngineCoreRequest, number: int, seq_id: int, max_model_len: int, plans_on_results: bool = False
    ) -> None:
        """``number`` tells apart groups that arrived at the same time; ``seq_id`` is the id of the first sequence.

        ``plans_on_results``: whether planning a step of it needs the ids of all tokens before.
        """
        self.request = request
        self.group_id = request.group_id
        #: Orders groups by arrival: seconds, and a number where these are equal.
        self.arrival = (request.arrival_time, number)
        self.priority = request.options.priority
        task = request.task
        self.stop_token_ids = untracked(frozenset(task.stop_token_ids))
        #: Whether tokens follow the prompt.
        self.samples = task.samples
        wanted, prompt = task.max_tokens, len(request.prompt_token_ids)
        #: Most tokens of a sequence. The last one is not computed, so without sampling it is one more than the prompt.
        self.max_length = max_model_len if wanted is None else min(prompt + wanted, max_model_len)
        if not self.samples:
            self.max_length = prompt + 1
        #: What the contents of its blocks depend on besides their tokens.
        self.context = request.cache_context
        self.features = untracked([FeatureSpan(f.offset, f.length, f.key) for f in request.features])
        self.status = SequenceStatus.WAITING
        self.beam: BeamSearch | None = None
        if isinstance(task, Beam):
            self.beam = BeamSearch(task.params, self.stop_token_ids, self.max_length - prompt)
        #: Whether its next step depends on the result of the last one, so that it cannot be planned ahead.
        self.plans_on_results = plans_on_results or task.plans_on_results
        #: Whether its sequences may have drafts: beams are chosen by every step, and a user's callables may keep state.
        self.drafts = isinstance(task, Generate) and not task.params.runs_custom_code
        #: What its tokens are held to.
        #: What must be ready on the workers before it can run.
        self.preparations = preparations_of(request)
        #: Unfinished sequences, in order of their index (beams: best first).
        self.seqs = [Sequence(seq_id, self, 0, list(request.prompt_token_ids))]
        #: Sequences still to be forked off when the prompt is computed.
        self.num_pending_forks = task.num_sequences - 1
        #: Whether any sequence has more than its last token to compute.
        self.prefilling = True
        self.is_long = False
        #: Whether it has waited beyond ``aging_limit``: no later arrival goes before it.
        self.urgent = False
        #: Number of the last step planned before its preemption, whose result may still add tokens to it.
        self.resumable_after = 0
        #: Until it runs: digests of its blocks' contents, for the prefix cache; computed at the first lookup.
        self.chain: PrefixChain | None = None
        #: What the policy keeps of it.
        self.policy_data: Any = None
        self.first_scheduled_time: float | None = None
        self.num_cached_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_recomputes = 0
        self.num_recomputed_tokens = 0
        self.num_swaps = 0
        self.num_swapped_blocks = 0

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
