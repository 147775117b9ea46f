"""Random weights of the right shapes, for benchmarks without a checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.layers.layer import Layer


def dummy_weights(network: Layer, dtype: DType, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) for each tensor that ``network`` expects, of ``dtype``.

    A matrix is uniform around 0 with variance 1 / inputs, which preserves the magnitude of activations: they stay
    finite and logits are about normal, as those of a trained network are. Norms are 1, biases 0. Each tensor depends on
    ``seed``, its name and its shape alone.
    """
    expected = [(name, layer.expected[shard]) for name, layer, shard in network.tensors()]
    for name, shape in expected:
        if len(shape) == 1:
            yield name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype.numpy)
            continue
        generator = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
        values = generator.random(shape, np.float32)
        values -= np.float32(0.5)
        values *= np.float32(2 * math.sqrt(3.0 / shape[-1]))
        yield name, rounded(values, dtype)
