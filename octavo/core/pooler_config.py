"""How a model makes vectors and scores of hidden states: what its files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Which of a text's hidden states make its vector: that of the first token, their mean, that of the last token, the
#: largest of each dimension, their mean by position (weight of the i-th: i), their sum divided by the square root of
#: their number.
PoolingKind = Literal["cls", "mean", "last", "max", "weighted_mean", "sqrt_mean"]
#: What follows a dense layer, or makes class scores probabilities.
PoolerActivation = Literal[
    "identity",
    "tanh",
    "relu",
    "gelu",
    "sigmoid",
    "softmax",
    "silu",
    "mish",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "relu6",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "softsign",
    "log_sigmoid",
    "tanhshrink",
    "softshrink",
    "hardshrink",
    "softmin",
]


@dataclass(frozen=True)
class DenseConfig:
    """A matrix that a vector is multiplied with after pooling, as sentence-transformers stores it."""

    #: Folder of its weights (``linear.weight`` [outputs, inputs], ``linear.bias``), relative to the model's.
    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: PoolerActivation = "tanh"
    #: Whether its input is added to its result; where sizes differ, its product with ``residual.weight`` is.
    residual: bool = False
    #: Whether its input gets length 1 first.
    normalizes: bool = False


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling of one model, and what its prompts have around them."""

    kind: PoolingKind = "mean"
    #: Whether vectors get length 1.
    normalize: bool = True
    #: Applied to the pooled vector, in order.
    dense: tuple[DenseConfig, ...] = ()
    #: Whether tokens of a named prompt count among those that are pooled.
    include_prompt: bool = True
    #: Texts that are put before an input, by name, such as "query"; and the one that is used where none is named.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    #: Tokens after which the model's own library cuts texts: as its modules say, or its tokenizer; None: neither does.
    max_seq_length: int | None = None
    #: Numbers of a vector that the model was trained for beside all (Matryoshka); None: its files name none, and any
    #: number up to all may be asked for; empty: none.
    dimensions: tuple[int, ...] | None = None
    #: How the model's vectors are compared.
    similarity: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"
    #: Of class scores: what makes them probabilities.
    activation: PoolerActivation = "sigmoid"
    #: Whether its files say so; else it is what is usual for its network.
    is_from_files: bool = False
