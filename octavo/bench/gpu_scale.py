"""How large the measurements of a GPU are, what they are measured against, and what comes of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: A figure's name, value, unit and formula.
Row = tuple[str, float | None, str, str]


@dataclass(frozen=True)
class Figure:
    """One number, and where it came from; without a value the formula says what went wrong."""

    part: str
    shape: str
    name: str
    value: float | None
    unit: str
    formula: str


@dataclass(frozen=True)
class Limits:
    """What the device can do at best, as measured before; 0 where that is not known."""

    gb_s: float = 0.0
    tflops: float = 0.0


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    kernels: str
    #: Tokens in context of decoding sequences, how many sequences, and for how many tokens each.
    context: int
    decode_batches: tuple[int, ...]
    decode_tokens: int
    #: Tokens of the long prompt.
    prefill: int
    #: Decode attention: sequences, and tokens in each one's context.
    attention: tuple[int, int]
    #: Rows of the products.
    rows: tuple[int, ...]
    #: Both engines do the same work: batches, and tokens in and out.
    batches: tuple[int, ...]
    input_len: int
    output_len: int
    #: For the limits.
    copied_bytes: int
    product_size: int
    engine: dict[str, Any] = field(default_factory=dict)


FULL = Scale(
    device="cuda",
    kernels="auto",
    context=1024,
    decode_batches=(1, 64),
    decode_tokens=96,
    prefill=8192,
    attention=(32, 8192),
    rows=(1, 64, 8192),
    batches=(1, 8, 64),
    input_len=1024,
    output_len=128,
    copied_bytes=4 << 30,
    product_size=8192,
)
#: The same on a CPU within seconds: to know that every line works before a GPU's minutes are spent.
SMOKE = Scale(
    device="cpu",
    kernels="reference",
    context=24,
    decode_batches=(1, 3),
    decode_tokens=12,
    prefill=48,
    attention=(2, 40),
    rows=(1, 5),
    batches=(1, 2),
    input_len=8,
    output_len=4,
    copied_bytes=1 << 20,
    product_size=64,
    engine={"num_gpu_blocks_override": 64, "num_host_blocks_override": 0},
)
#: config.json of the smallest shape worth running, for ``SMOKE``.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def each(measurements: list[tuple[str, Callable[[], Iterator[Row]]]]) -> Iterator[Row]:
    """The rows of each measurement; one that fails does not take the others along."""
    for name, measurement in measurements:
        try:
            yield from measurement()
        except Exception as e:
            traceback.print_exc()
            yield name, None, "", f"failed: {type(e).__name__}: {e}"


def same_work(scale: Scale, batch: int) -> str:
    """Name of what both engines do."""
    return f"{batch} x ({scale.input_len} in, {scale.output_len} out)"
