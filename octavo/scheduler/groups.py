"""What the scheduler moves: sequences, and the groups that are scheduled, preempted and resumed whole."""

from __future__ import annotations

from octavo.core.request import Beam, EngineCoreRequest, SequenceStatus
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
        "group",
        "index",
        "known",
        "max_length",
        "num_computed",
        "resume",
        "room",
        "seq_id",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, seq_id: int, group: SequenceGroup, index: int, token_ids: list[int]) -> None:
        self.seq_id = seq_id
        self.group = group
        #: Which of the group's completions it is.
        self.index = index
        self.token_ids = token_ids
        self.num_computed = 0
        #: Tokens that its blocks take before the block manager must be asked again.
        self.room = 0
        #: Whether the workers hold it.
        self.known = False
        #: The sequence whose row the workers can copy to make this one, if it is not known.
        self.fork_of: Sequence | None = None
        #: After preemption by recompute: shares this many blocks with that sequence, once those are computed.
        self.resume: tuple[Sequence, int] | None = None
        self.stop_token_ids = group.stop_token_ids
        self.max_length = group.max_length
        #: That of its group until it ends before it.
        self.status = SequenceStatus.WAITING

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.group.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.group.request.prompt_token_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute, one whose id is awaited included: 1 while decoding, more while prefilling."""
        return max(1, len(self.token_ids) - self.num_computed)

    @property
    def awaits_token(self) -> bool:
        """Whether a step in flight samples its next token, or ends it."""
        return self.num_computed >= len(self.token_ids)

    @property
    def is_ending(self) -> bool:
        """Whether it awaits the last token that its limit allows: there is nothing left to compute."""
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
        "features",
        "first_scheduled_time",
        "group_id",
        "is_long",
        "max_length",
        "num_cached_tokens",
        "num_pending_forks",
        "num_recomputed_tokens",
        "num_recomputes",
        "num_swapped_blocks",
        "num_swaps",
        "plans_on_results",
        "prefilling",
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
        self, request: EngineCoreRequest, arrival: int, seq_id: int, max_model_len: int, drafted: bool = False
    ) -> None:
        """``arrival`` numbers the groups in the order they came; ``seq_id`` is its first sequence's.

        ``drafted``: whether tokens are guessed, which wants all tokens before them.
        """
        self.request = request
        self.group_id = request.group_id
        self.arrival = arrival
        self.priority = request.priority
        task = request.task
        self.stop_token_ids = frozenset(task.stop_token_ids)
        #: Whether tokens follow the prompt.
        self.samples = task.samples
        wanted, prompt = task.max_tokens, len(request.prompt_token_ids)
        #: Tokens at which a sequence has reached its limit, the last of which is not computed; all of a prompt are.
        self.max_length = max_model_len if wanted is None else min(prompt + wanted, max_model_len)
        if not self.samples:
            self.max_length = prompt + 1
        #: What decides the contents of its blocks beside their tokens.
        self.context = request.cache_context
        self.features = [FeatureSpan(f.offset, f.length, f.key) for f in request.features]
        self.status = SequenceStatus.WAITING
        self.beam: BeamSearch | None = None
        if isinstance(task, Beam):
            self.beam = BeamSearch(task.params, self.stop_token_ids, self.max_length - prompt)
        #: Whether what it computes next depends on the result of its last step, so that it is not planned before that.
        self.plans_on_results = drafted or task.plans_on_results
        #: Unfinished sequences, in order of their index (beams: best first).
        self.seqs = [Sequence(seq_id, self, 0, list(request.prompt_token_ids))]
        #: Sequences still to be forked off when the prompt is computed.
        self.num_pending_forks = task.num_sequences - 1
        #: Whether some sequence has more than its last token to compute.
        self.prefilling = True
        self.is_long = False
        #: Whether it has waited so long that no later arrival goes before it.
        self.urgent = False
        #: The last step that may still bring tokens to it, where it was preempted with steps in flight.
        self.resumable_after = 0
        #: Digests of its blocks' contents, for the prefix cache; made when first looked up.
        self.chain: PrefixChain | None = None
        self.first_scheduled_time: float | None = None
        self.num_cached_tokens = 0
        self.num_recomputes = 0
        self.num_recomputed_tokens = 0
        self.num_swaps = 0
        self.num_swapped_blocks = 0

    @property
    def width(self) -> int:
        """Sequences that it runs, those to be forked included: what counts against ``max_num_seqs``."""
        return len(self.seqs) + self.num_pending_forks

    @property
    def num_computed(self) -> int:
        """Tokens with KV entries, over all its sequences."""
        return sum(s.num_computed for s in self.seqs)

    @property
    def num_preemptions(self) -> int:
        """Times it was put out, in either way."""
        return self.num_recomputes + self.num_swaps

    @property
    def awaits_result(self) -> bool:
        """Whether a step in flight decides what it computes next: it chooses beams, or verifies drafts."""
        return self.plans_on_results and self.seqs[0].awaits_token

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last token of each of its sequences is left to compute, and the group has forked.

        A beam search forks when the first tokens are chosen. Where nothing is sampled, no token is left.
        """
        if not self.samples:
            return self.seqs[0].awaits_token
        forked = not self.num_pending_forks or self.beam is not None
        return forked and all(s.resume is None and s.num_uncomputed == 1 for s in self.seqs)

    @property
    def seq_ids(self) -> list[int]:
        """Ids of its unfinished sequences."""
        return [s.seq_id for s in self.seqs]
