"""Random weights of the right shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.layers.layer import Layer


def dummy_weights(
    network: Layer, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for each tensor that ``network`` expects, made on ``device`` in ``dtype``.

    A matrix is uniform around 0 with variance 1 / inputs, which preserves the magnitude of activations: they stay
    finite and logits are about normal, as those of a trained network are. Norms are 1, biases 0. Each tensor depends on
    ``seed``, its name, its shape and the type of device alone.
    """
    expected = [(name, layer.expected[shard]) for name, layer, shard in network.tensors()]
    for name, shape in expected:
        if len(shape) == 1:
            yield name, torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
            continue
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = math.sqrt(3.0 / shape[-1])
        yield name, torch.empty(shape, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)
