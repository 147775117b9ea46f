"""Requests of the engine core: a prompt, and one of several tasks."""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from octavo.core.adapters import AdapterRef
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.encoder_input import EncoderInput
from octavo.core.image_input import PromptImage
from octavo.core.pooler_config import PoolingKind
from octavo.core.pooling_params import PoolingParams, PoolingTask
from octavo.core.progress import Progress
from octavo.core.reasoning import ThinkingBudget
from octavo.core.request_options import DEFAULT_OPTIONS, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import Grammar
from octavo.core.timestamp_rules import TimestampRules
from octavo.core.untracked import untracked

_MASK64 = (1 << 64) - 1
#: Most tokens that a step of a beam search looks at, of each beam.
_MAX_CANDIDATES = 100


class SequenceStatus(enum.Enum):
    """State of a sequence; the finished states give the reason."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_IGNORED = "ignored"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self not in _UNFINISHED


_UNFINISHED = frozenset({SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED})


class Task(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """What to compute for a prompt; one of ``AnyTask``. The base class computes its KV entries only."""

    @property
    def num_sequences(self) -> int:
        """Most sequences that run at once."""
        return 1

    @property
    def max_tokens(self) -> int | None:
        """Most tokens to generate; None: as many as the context length allows."""
        return 0

    @property
    def samples(self) -> bool:
        """Whether tokens follow the prompt. If not, the request ends when its prompt is computed."""
        return self.max_tokens != 0

    @property
    def plans_on_results(self) -> bool:
        """Whether what a step computes depends on the result of the one before it."""
        return False

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to name at each position of the prompt, which is then computed whole."""
        return None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether each token of the prompt must be computed for it, so that nothing of it is taken from a cache."""
        return self.prompt_logprobs is not None

    @property
    def is_kept_by_workers(self) -> bool:
        """Whether the workers hold more of a partly computed prompt than its KV entries, which swapping would lose."""
        return False


class Generate(Task):
    """Completions that the workers sample."""

    #: ``max_tokens`` may be 0: then only the prompt and its logprobs are computed.
    params: SamplingParams
    #: Unsigned 64-bit; never None, so a resumed sequence draws the same numbers.
    seed: int
    #: End-of-sequence and stop tokens (without the former if ``ignore_eos``).
    stop_token_ids: list[int] = []
    #: ``bad_words`` as token id sequences.
    bad_words_ids: list[list[int]] = []
    #: End-of-sequence tokens that do not end it (``ignore_eos``); forbidden before ``min_tokens`` like the others.
    ignored_eos_ids: list[int] = []
    #: Of ``params.structured_outputs``.
    grammar: Grammar | None = None
    #: Of ``params.thinking_token_budget``.
    thinking_budget: ThinkingBudget | None = None
    #: Of a transcription.
    timestamps: TimestampRules | None = None
    #: (layer, head) whose cross attention weights of the prompt's tokens are the result beside logprobs, in this order.
    alignment_heads: list[tuple[int, int]] = []

    def __post_init__(self) -> None:
        for ids in (self.stop_token_ids, self.bad_words_ids, self.ignored_eos_ids):
            untracked(ids)

    @property
    def num_sequences(self) -> int:
        """See ``Task``. Without sampled tokens all completions are equal, and one sequence computes them."""
        return self.params.num_sequences if self.samples else 1

    @property
    def max_tokens(self) -> int | None:
        """See ``Task``."""
        return self.params.max_tokens

    @property
    def prompt_logprobs(self) -> int | None:
        """See ``Task``."""
        return self.params.prompt_logprobs

    @property
    def needs_all_tokens(self) -> bool:
        """See ``Task``."""
        return bool(self.alignment_heads) or self.prompt_logprobs is not None

    @property
    def is_kept_by_workers(self) -> bool:
        """See ``Task``: weights of attention."""
        return bool(self.alignment_heads)

    def sequence_seed(self, index: int) -> int:
        """The seed of completion ``index``."""
        return (self.seed + index) & _MASK64

    def stop_reason(self, token_id: int) -> int | None:
        """``token_id``, which ended a completion, if it is among the user's stop tokens; None otherwise."""
        return token_id if token_id in (self.params.stop_token_ids or ()) else None


class Beam(Task):
    """A beam search: the workers name the most likely tokens of each beam, and the scheduler chooses."""

    params: BeamSearchParams
    #: End-of-sequence tokens, unless they are ignored.
    stop_token_ids: list[int] = []
    #: Tokens at the end of the prompt that count as generated where hypotheses are scored by their lengths.
    num_forced: int = 0

    @property
    def num_sequences(self) -> int:
        """See ``Task``."""
        return self.params.beam_width

    @property
    def max_tokens(self) -> int:
        """See ``Task``."""
        return self.params.max_tokens

    @property
    def plans_on_results(self) -> bool:
        """See ``Task``."""
        return True

    @property
    def num_candidates(self) -> int:
        """Tokens that a step of the search needs of each beam (or all there are, in a smaller vocabulary).

        A beam contributes at most W (beam width) hypotheses and at most W survivors, all among its best
        W + (number of stop tokens), as only stop tokens rank between survivors. The choice is that of transformers,
        which looks at the best W * max(2, 1 + number of stop tokens) of all beams. The most that a worker computes
        is enough for up to 68 stop tokens.
        """
        return min(self.params.beam_width + len(self.stop_token_ids), _MAX_CANDIDATES)


class Pool(Task):
    """A vector or scores, made of the hidden states of the prompt."""

    #: Resolved: its ``task`` is named.
    params: PoolingParams
    #: Which hidden states make a vector or class scores; those of a task by token are taken as they are.
    kind: PoolingKind = "last"
    #: First position that counts among the pooled ones.
    first: int = 0
    #: Position of the first token of the second text of a pair, of networks that tell both apart; 0: there is one text.
    second_text: int = 0
    #: Of a score that a language model gives: its logits of these tokens, of which the last means that it fits.
    answer_ids: list[int] = []

    stop_token_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def name(self) -> PoolingTask:
        """What is computed."""
        assert self.params.task is not None
        return self.params.task

    @property
    def is_by_token(self) -> bool:
        """Whether each token has a result."""
        return self.params.task in ("token_embed", "token_classify")

    @property
    def needs_all_tokens(self) -> bool:
        """See ``Task``."""
        return self.is_by_token or self.kind != "last"

    @property
    def is_kept_by_workers(self) -> bool:
        """See ``Task``: sums of rows, or rows."""
        return self.needs_all_tokens


AnyTask = Generate | Beam | Pool


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """A part of the prompt whose embeddings come from an input other than text, such as an image or audio."""

    #: Position of its first placeholder token, and how many there are.
    offset: int
    length: int
    #: Digest of the input's content, and of all else that its embeddings depend on.
    key: bytes
    #: Key of the image that it comes from (``EngineCoreRequest.images``), and the first of its features.
    image: str = ""
    first: int = 0
    #: Whether one step computes all of its tokens, as they see each other.
    is_whole: bool = False
    #: Features along time, height and width, of networks with such positions.
    grid: tuple[int, int, int] | None = None


class EngineCoreRequest(msgspec.Struct, kw_only=True, gc=False):
    """A prompt and its task: tokenized and validated; nothing in it needs a tokenizer."""

    group_id: int
    prompt_token_ids: list[int]
    task: AnyTask
    #: Seconds of ``time.monotonic()``.
    arrival_time: float = 0.0
    #: As the caller said them; what the front end has resolved of them is a field here instead.
    options: RequestOptions = DEFAULT_OPTIONS
    #: The adapter that the network runs with.
    adapter: AdapterRef | None = None
    #: Of an encoder-decoder network: what its encoder reads. ``prompt_token_ids`` are the decoder's then.
    encoder_input: EncoderInput | None = None
    #: Images of the prompt, each once.
    images: list[PromptImage] = []
    #: In the order of their offsets; they do not overlap.
    features: list[Feature] = []
    #: What the output is likely to be: it is drafted, and changes nothing of it.
    prediction: list[int] = []
    #: Of one that another engine core has begun.
    progress: Progress | None = None

    def __post_init__(self) -> None:
        untracked(self.prompt_token_ids)
        untracked(self.prediction)
        untracked(self.features)

    @property
    def cache_context(self) -> str:
        """What block contents depend on besides tokens and features: salt, adapter and encoder input, one text each."""
        context = f"{len(self.options.cache_salt)}:{self.options.cache_salt}"
        if self.adapter is not None:
            context = f"{context}/{self.adapter.key}"
        return context if self.encoder_input is None else f"{context}/{self.encoder_input.key}"
