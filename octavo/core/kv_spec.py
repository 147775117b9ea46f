"""The KV cache of each layer of a network, and which layers share block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: Bytes of a number of each type, scales left out; a GGUF file's numbers have 4 bits or more. The last ones are
#: names of ``CheckpointQuantization``.
NUMBER_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 0.5,
    "gguf": 0.5,
    "gptq-int4": 0.5,
    "gptq-int8": 1.0,
    "awq-int4": 0.5,
    "compressed-tensors-int4": 0.5,
    "compressed-tensors-int8": 1.0,
}
#: Bytes of a scale, of which int8 and fp8 caches have one for each head's key and one for its value.
_SCALE_BYTES = 4

KVKind = Literal["full", "sliding", "cross", "latent", "none"]


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of one layer on one rank."""

    #: Context that a token attends to: all before it, the last ``window`` tokens, an encoder's tokens, all before it in
    #: one compressed vector (whose size is ``head_dim``), or nothing that is cached.
    kind: KVKind
    #: KV heads that this rank holds.
    num_kv_heads: int
    head_dim: int
    #: Type of the numbers: float32, bfloat16, float16, int8 or fp8.
    dtype: str
    #: Tokens that a token of a "sliding" layer attends to, itself included.
    window: int | None = None

    @property
    def vectors(self) -> int:
        """Vectors of ``head_dim`` numbers that a token has for each head: a key and a value, or a latent one."""
        return {"none": 0, "latent": 1}.get(self.kind, 2)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in this layer's cache: keys, values and scales, without padding."""
        scale = _SCALE_BYTES if self.dtype in ("int8", "fp8") else 0
        return int(self.vectors * self.num_kv_heads * (self.head_dim * NUMBER_BYTES[self.dtype] + scale))


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal specs: they share block tables."""

    spec: KVSpec
    #: Indices among the layers of this rank, ascending; none if they belong to other pipeline stages.
    layers: tuple[int, ...]


def group_layers(specs: Sequence[KVSpec], stage: range | None = None) -> list[LayerGroup]:
    """The groups of layers with these specs, in the order of their first layers.

    ``stage``: those that this rank has, if it has not all. The groups are alike on every stage, with or without layers.
    """
    groups: dict[KVSpec, list[int]] = {}
    stage = range(len(specs)) if stage is None else stage
    for layer, spec in enumerate(specs):
        members = groups.setdefault(spec, [])
        if layer in stage:
            members.append(layer - stage.start)
    return [LayerGroup(spec, tuple(layers)) for spec, layers in groups.items()]
