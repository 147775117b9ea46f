"""Convolutions as products over rows beside those of torch, and positions of sines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d, gelu

from octavo.core.dtypes import DType
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.layers.layer import LayerContext
from octavo.layers.linear import TwoConvolutions, convolution_rows, window_size
from octavo.layers.rope import sinusoids
from tests.models.zoo import _backends


@pytest.mark.parametrize("channels", [5, 16, 80])
def test_convolutions_are_those_of_torch(channels: int) -> None:
    """Two inputs in one batch, whose edges are padding and not each other; recorded, too."""
    generator = torch.Generator().manual_seed(0)
    width, frames = 24, 20
    weights = {
        "conv1.weight": torch.randn(width, channels, 3, generator=generator) * 0.3,
        "conv1.bias": torch.randn(width, generator=generator),
        "conv2.weight": torch.randn(width, width, 3, generator=generator) * 0.3,
        "conv2.bias": torch.randn(width, generator=generator),
    }
    sounds = torch.randn(2, channels, frames, generator=generator)
    w = {name: tensor.double() for name, tensor in weights.items()}
    hidden = gelu(conv1d(sounds.double(), w["conv1.weight"], w["conv1.bias"], padding=1))
    expected = gelu(conv1d(hidden, w["conv2.weight"], w["conv2.bias"], padding=1, stride=2)).transpose(1, 2)
    rows = np.concatenate([convolution_rows(sound.numpy().T) for sound in sounds])
    assert rows.shape == (frames, 3 * window_size(channels)) and rows.dtype == np.float32
    for kernels in _backends():
        layer = TwoConvolutions(LayerContext(kernels, DType.FLOAT32), channels, width, "gelu")
        for name, child, shard in list(layer.tensors()):
            child.load(shard, weights[name].numpy())
        inputs = kernels.wrap(rows)

        def forward(batch: ForwardBatch, layer: TwoConvolutions = layer, inputs: object = inputs) -> ForwardOutput:
            return ForwardOutput(layer(inputs[: len(batch.token_ids)]))  # type: ignore[index]

        captured = kernels.capture(forward, BatchSize(frames, 1, 1, frames, 4))
        batch = make_batch([frames], [frames], np.arange(5)[None], 4, kernels)
        for run in (forward, captured):
            with kernels.mode():
                found = kernels.to_numpy(run(batch).hidden)
            np.testing.assert_allclose(found, expected.reshape(frames, width).numpy(), atol=2e-5)


@pytest.mark.parametrize("width", [12, 7])
def test_sines_are_those_of_transformers(width: int) -> None:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(50, width).create_weight()
    np.testing.assert_allclose(sinusoids(50, width), theirs.numpy(), atol=1e-6)
