"""The configuration of a network: the values of config.json, whose spellings differ by family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.outputs import PoolerConfig

#: Scalings of the rotary embedding that can be computed.
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True)
class EncoderFacts:
    """What an encoder-decoder model says of its encoder's input, and of how its decoder begins."""

    #: Positions of the longest input; None: its encoder sets no limit.
    max_tokens: int | None
    #: First tokens of the decoder: every prompt of it begins with the first of them.
    decoder_start_ids: tuple[int, ...]
    #: Tokens that the answer begins with in any case; they count as generated where a beam search scores lengths.
    forced_ids: tuple[int, ...] = ()
    #: Numbers of each row of the prepared input, float32; None: the rows are token ids.
    feature_width: int | None = None
    #: Of sound: samples a second, those of the longest input, and the positions of every input; 0: none is taken.
    audio_rate: int = 0
    audio_samples: int = 0
    audio_tokens: int = 0

    @property
    def takes_audio(self) -> bool:
        """Whether its input is sound, and not text."""
        return self.audio_rate > 0


@dataclass(frozen=True)
class ImageFacts:
    """What a model that sees images says of them."""

    #: Which ``ImageProcessor`` (``octavo/images/``) makes pixels and placeholders.
    family: Literal["llava", "idefics3", "gemma3", "qwen2_5_vl"]
    #: The token that stands for each feature in a prompt.
    token_id: int
    #: Tokens of an image that see each other in both directions, so that one step computes all of them; 0: a chunk of
    #: the prompt may end anywhere.
    whole: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether one step computes all tokens of an image."""
        return self.whole > 0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling."""

    theta: float = 10000.0
    #: One of ``ROPE_TYPES``.
    rope_type: str = "default"
    #: Share of the head that is rotated.
    partial_rotary_factor: float = 1.0
    #: The scaling's own parameters, under the names config.json gives them, and its max_position_embeddings.
    scaling: dict[str, Any] = field(default_factory=dict)
    #: Pairs of a head that are rotated by time, height and width (M-RoPE: Wang et al. 2024, section 2.1); empty: all by
    #: the token's position.
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuantizationScheme:
    """How some matrices of a quantised checkpoint are stored."""

    #: Type of a weight: "int4", "int8", or "fp8" (e4m3).
    number: str
    #: Consecutive weights of a row that share a scale.
    group: int | None = None
    #: Rows and columns of blocks that share a scale. Neither this nor ``group``: a row has one, or the whole matrix.
    block: tuple[int, int] | None = None
    #: Whether no zeros are stored beside the scales.
    symmetric: bool = True


@dataclass(frozen=True)
class CheckpointQuantization:
    """What ``quantization_config`` of a config.json says. Which matrices it concerns is decided by their tensors."""

    #: "gptq", "awq", "compressed-tensors" or "fp8".
    method: str
    #: None if only what is not read is quantised, such as the KV cache.
    schemes: tuple[QuantizationScheme, ...]
    #: GPTQ: the zeros are stored minus one (checkpoint_format "gptq", not "gptq_v2").
    zeros_minus_one: bool = False
    #: GPTQ: the groups are not consecutive weights of a row (desc_act), so that no kernel computes with their bits.
    reordered: bool = False

    @property
    def name(self) -> str:
        """The method and its smallest number, such as "gptq-int4"."""
        numbers = [scheme.number for scheme in self.schemes if scheme.number not in self.method]
        return "-".join([self.method, *sorted(numbers, key=("int4", "int8", "fp8").index)[:1]])

    @property
    def has_integers(self) -> bool:
        """Whether there are integers in groups of consecutive weights, with which a backend may compute as they are."""
        return not self.reordered and any(scheme.number in ("int4", "int8") for scheme in self.schemes)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and settings of a decoder-only transformer.

    Settings of one family alone are fields of a subclass in the module of its network.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Longest sequence in tokens.
    max_position: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    #: Bias on q, k and v; on the attention's output; on the MLP; on the head.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    #: RMS norm on each head of q and k before the rotation.
    qk_norm: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    #: For each layer the attention window in tokens, or None for the whole context.
    sliding_windows: tuple[int | None, ...] = ()
    #: float32, bfloat16 or float16: what the checkpoint says its weights are.
    checkpoint_dtype: str = "bfloat16"
    #: None: the checkpoint is not quantised.
    quantization: CheckpointQuantization | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    #: What the network makes of hidden states: logits of the next token (lm), class scores of a text (sequence) or of
    #: each token (token), or nothing.
    head: Literal["lm", "sequence", "token", "none"] = "lm"
    #: Whether every token sees the whole text: then a text is computed in one step, and nothing of it is kept.
    is_encoder: bool = False
    #: Of an encoder-decoder network; the other fields are those of its decoder.
    encoder_facts: EncoderFacts | None = None
    #: Of a network that sees images.
    image_facts: ImageFacts | None = None
    #: Names of the classes.
    labels: tuple[str, ...] = ()
    #: How vectors and class scores are made.
    pooler: PoolerConfig = field(default_factory=lambda: PoolerConfig(kind="last"))

    @property
    def default_length(self) -> int:
        """Longest sequence in tokens where no option names one: of a model for vectors, as it was trained."""
        trained = self.pooler.max_seq_length if self.pooler.is_from_files else None
        return self.max_position if trained is None else min(self.max_position, trained)

    def longest_input(self, max_model_len: int) -> int | None:
        """Positions of the longest input of its encoder, in an engine for so many tokens; None: it has no encoder."""
        if self.encoder_facts is None:
            return None
        return self.encoder_facts.max_tokens or max_model_len

    @property
    def attention_width(self) -> int:
        """Numbers of a token in the activations of a layer's attention: q, its result, k and v."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def feed_forward_width(self) -> int:
        """Numbers of a token in the activations of a layer's feed-forward network: its inner values three times."""
        return 3 * self.intermediate_size


# What a model can be asked for.

#: By what the network makes of hidden states. "score" of a network without class scores compares two vectors.
_BY_HEAD: dict[str, tuple[str, ...]] = {
    "lm": ("generate", "embed", "token_embed"),
    "none": ("embed", "token_embed", "score"),
    "sequence": ("classify",),
    "token": ("token_classify",),
}
#: What the option ``task`` leaves of the tasks of a language model.
_OF_LANGUAGE_MODELS: dict[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "embed": ("embed", "token_embed", "score"),
    "score": ("score",),
}


def model_tasks(config: ModelConfig, task: str = "auto") -> tuple[str, ...]:
    """The tasks of a model: "generate", "transcribe" and those of ``PoolingTask``. ``task`` is the option of this name.

    Raises:
        ConfigError: the model cannot be used for the task.
    """
    if config.encoder_facts is not None:
        tasks: tuple[str, ...] = ("transcribe",) if config.encoder_facts.takes_audio else ("generate",)
    elif config.head == "lm" and config.pooler.is_from_files:  # a language model that was trained for vectors
        tasks = ("embed", "token_embed", "score", "generate")
    else:
        tasks = _BY_HEAD[config.head]
    if config.head == "sequence" and len(config.labels) == 1:
        tasks = ("classify", "score")
    if task == "auto":
        return tasks
    if config.head == "lm" and config.encoder_facts is None and task in _OF_LANGUAGE_MODELS:
        return _OF_LANGUAGE_MODELS[task]
    if task not in tasks:
        raise ConfigError(f"task {task!r} is nothing that {config.architecture} does; it does: {', '.join(tasks)}")
    return tasks


# How models mark what they think before they answer.


class ReasoningMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The texts between which an output has its reasoning."""

    start: str
    end: str
    #: Whether the model begins with reasoning although neither it nor its template writes the start.
    begins_inside: bool = False
    #: Whether the output begins within reasoning; None: as the end of the prompt says.
    inside: bool | None = None
    #: Texts that end reasoning which was not closed before them, and are the beginning of what follows it.
    interrupts: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins within reasoning."""
        if self.inside is not None:
            return self.inside
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.begins_inside and not prompt.endswith(self.end))


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """``SamplingParams.thinking_token_budget`` in tokens of one model."""

    #: Most tokens of reasoning.
    most: int
    #: The tokens that begin it, and the one that ends it.
    start: list[int]
    end: int
    #: Whether the output begins within it.
    inside: bool
    #: Tokens that end it too, though they do not belong to it.
    interrupts: list[int] = []
