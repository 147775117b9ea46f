"""The configuration of a network: the values of config.json, whose names differ by family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.outputs import PoolerConfig

ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True)
class EncoderFacts:
    """An encoder-decoder model's encoder input, and the start of its decoder."""

    #: Maximum positions of the input; None: no limit.
    max_tokens: int | None
    #: First tokens of the decoder: every prompt of it starts with the first of them.
    decoder_start_ids: tuple[int, ...]
    #: First tokens of every answer; beam search counts them as generated when it scores lengths.
    forced_ids: tuple[int, ...] = ()
    #: float32 numbers in each row of the prepared input; None: rows are token ids.
    feature_width: int | None = None
    #: Of audio: samples a second, maximum samples, and positions of every input; 0: the input is text.
    audio_rate: int = 0
    audio_samples: int = 0
    audio_tokens: int = 0

    @property
    def takes_audio(self) -> bool:
        return self.audio_rate > 0


@dataclass(frozen=True)
class ImageFacts:
    #: The ``ImageProcessor`` (``octavo/images/``).
    family: Literal[
        "llava",
        "idefics3",
        "gemma3",
        "gemma4",
        "internvl",
        "lfm2_vl",
        "llava_next",
        "pixtral",
        "qwen2_5_vl",
        "qwen3_vl",
    ]
    token_id: int
    #: Maximum tokens of an image that attend to each other in both directions, all computed in one step; 0: none do.
    whole: int = 0
    #: Decoder layers before which further vectors of a feature are added to the residual stream (DeepStack: Meng et al.
    #: 2024, arXiv 2406.04334), ascending; the number of layers: after the last.
    layers: tuple[int, ...] = ()

    @property
    def vectors(self) -> int:
        """Vectors of a feature: the token's embedding, and one for each of ``layers``."""
        return 1 + len(self.layers)

    @property
    def is_whole(self) -> bool:
        return self.whole > 0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling."""

    theta: float = 10000.0
    rope_type: str = "default"
    #: Share of the head dimension that is rotated.
    partial_rotary_factor: float = 1.0
    #: Parameters of the scaling as in config.json, and its max_position_embeddings.
    scaling: dict[str, Any] = field(default_factory=dict)
    #: Pairs rotated by time, height and width in turn, and by time again (M-RoPE: Wang et al. 2024, section 2.1; with
    #: sections of one pair, interleaved M-RoPE); empty: all by the position.
    sections: tuple[int, ...] = ()

    @property
    def axes(self) -> int:
        """Positions of a token in time, height and width; 0: it has one position."""
        return 3 if self.sections else 0


@dataclass(frozen=True)
class QuantizationScheme:
    """How some matrices of a quantised checkpoint are stored."""

    #: Type of a weight: "int4", "int8", "fp8" (e4m3), or "mxfp4" (e2m1, with scales of e8m0).
    number: str
    #: Consecutive weights of a row that share a scale.
    group: int | None = None
    #: Rows and columns of blocks that share a scale. Without ``group`` and ``block``: a scale for a row or the matrix.
    block: tuple[int, int] | None = None
    #: Whether there are no zero points.
    symmetric: bool = True


@dataclass(frozen=True)
class CheckpointQuantization:
    """``quantization_config`` of a config.json. Tensors show which matrices it applies to."""

    #: "gptq", "awq", "compressed-tensors", "fp8" or "mxfp4".
    method: str
    #: None if only unread tensors are quantised, such as the KV cache.
    schemes: tuple[QuantizationScheme, ...]
    #: GPTQ: zero points are stored minus one (checkpoint_format "gptq", not "gptq_v2").
    zeros_minus_one: bool = False
    #: GPTQ: groups are not consecutive weights (desc_act), which no kernel supports.
    reordered: bool = False

    @property
    def name(self) -> str:
        """The method and its smallest number, such as "gptq-int4"."""
        numbers = [scheme.number for scheme in self.schemes if scheme.number not in self.method]
        return "-".join([self.method, *sorted(numbers, key=("int4", "int8", "fp8").index)[:1]])

    @property
    def has_codes(self) -> bool:
        """Whether there are codes in groups of consecutive weights, which kernels may use as they are."""
        return not self.reordered and any(scheme.number in ("int4", "int8", "mxfp4") for scheme in self.schemes)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and settings of a decoder-only transformer; networks define subclasses for settings of their family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    #: Biases of q, k and v; of the attention's output; of the MLP; of the head.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    #: RMS norm on each head of q and k, before the rotation.
    qk_norm: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    #: Attention window of each layer in tokens; None: the whole context.
    sliding_windows: tuple[int | None, ...] = ()
    #: float32, bfloat16 or float16.
    checkpoint_dtype: str = "bfloat16"
    quantization: CheckpointQuantization | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    #: Output: logits of the next token (lm), class scores of a text (sequence) or of each token, or hidden states.
    head: Literal["lm", "sequence", "token", "none"] = "lm"
    #: Whether attention is bidirectional: a text is then computed in one step, without a KV cache.
    is_encoder: bool = False
    #: Of an encoder-decoder network; the other fields are those of its decoder.
    encoder_facts: EncoderFacts | None = None
    image_facts: ImageFacts | None = None
    #: A ``TowerConfig`` (``models/network.py``), unless the network makes a tower itself.
    tower: Any = None
    #: Architecture whose network is the language model behind a tower; "": ``architecture``.
    text_architecture: str = ""
    labels: tuple[str, ...] = ()
    pooler: PoolerConfig = field(default_factory=lambda: PoolerConfig(kind="last"))
    #: Whose code computes it: a network of ``octavo.models``, or transformers'.
    model_impl: Literal["octavo", "transformers"] = "octavo"
    #: Why ``max_position`` is below the checkpoint's longest context, for errors; "": it is not.
    context_note: str = ""

    @property
    def default_length(self) -> int:
        """Default maximum sequence length in tokens; embedding models have the length of their training."""
        trained = self.pooler.max_seq_length if self.pooler.is_from_files else None
        return self.max_position if trained is None else min(self.max_position, trained)

    def longest_input(self, max_model_len: int) -> int | None:
        """Maximum positions of the encoder's input in an engine with ``max_model_len``; None: no encoder."""
        return None if self.encoder_facts is None else self.encoder_facts.max_tokens or max_model_len

    @property
    def has_only_states(self) -> bool:
        """Whether all layers have recurrent states, so that blocks of the KV cache are their checkpoints."""
        return False

    @property
    def attention_width(self) -> int:
        """Numbers for each token in a layer's attention: q, its result, k and v."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def feed_forward_width(self) -> int:
        """Numbers for each token in a layer's MLP: three times its inner values."""
        return 3 * self.intermediate_size


# Tasks.

#: Tasks by head. "score" without class scores compares two vectors.
_BY_HEAD: dict[str, tuple[str, ...]] = {
    "lm": ("generate", "embed", "token_embed"), "none": ("embed", "token_embed", "score"),
    "sequence": ("classify",), "token": ("token_classify",),
}  # fmt: skip
#: Tasks of a language model by the option ``task``.
_OF_LANGUAGE_MODELS: dict[str, tuple[str, ...]] = {
    "generate": ("generate",), "embed": ("embed", "token_embed", "score"), "score": ("score",),
}  # fmt: skip


def model_tasks(config: ModelConfig, task: str = "auto") -> tuple[str, ...]:
    """ "generate", "transcribe", or some of ``PoolingTask``, as the option ``task`` allows; raises ConfigError."""
    if config.encoder_facts is not None:
        tasks: tuple[str, ...] = ("transcribe",) if config.encoder_facts.takes_audio else ("generate",)
    elif config.head == "lm" and config.pooler.pairs is not None:  # a language model that scores pairs
        tasks = ("score",)
    elif config.head == "lm" and config.pooler.is_from_files:  # a language model trained for embeddings
        tasks = ("embed", "token_embed", "score", "generate")
    else:
        tasks = _BY_HEAD[config.head]
    if config.head == "sequence" and (len(config.labels) == 1 or config.pooler.pairs is not None):
        tasks = ("classify", "score")
    if task == "auto":
        return tasks
    if config.head == "lm" and config.encoder_facts is None and task in _OF_LANGUAGE_MODELS:
        return _OF_LANGUAGE_MODELS[task]
    if task not in tasks:
        raise ConfigError(f"task {task!r} is nothing that {config.architecture} does; it does: {', '.join(tasks)}")
    return tasks


# Reasoning.


class ReasoningMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The texts around the reasoning of an output."""

    start: str
    end: str
    #: Whether outputs start with reasoning although neither model nor template writes the start.
    begins_inside: bool = False
    #: Whether the output starts inside reasoning; None: by the end of the prompt.
    inside: bool | None = None
    #: Texts that end open reasoning, and belong to the content.
    interrupts: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to a prompt starts inside reasoning."""
        if self.inside is not None:
            return self.inside
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.begins_inside and not prompt.endswith(self.end))


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """``SamplingParams.thinking_token_budget`` in tokens of a model."""

    most: int
    #: Tokens that start it, and the token that ends it.
    start: list[int]
    end: int
    inside: bool
    #: Tokens that end it, too, and belong to the content.
    interrupts: list[int] = []
