"""Two convolutions over time as matrix products over rows: the first layers of a network that hears.

A row of the input has all that one position of the second convolution depends on, so that rows need not see each other,
and any number of inputs may stand in one batch.
"""

from __future__ import annotations

import numpy as np

from octavo.core.dtypes import DType
from octavo.kernels.arrays import Array
from octavo.kernels.packed_weight import Activation, PackedWeight
from octavo.layers.context import LayerContext
from octavo.layers.layer import Layer, Weight

#: Frames that an output of either convolution depends on.
TAPS = 3
#: Numbers of a window are a multiple of it, for the registers of kernels.
_ALIGNMENT = 16


def window_size(channels: int) -> int:
    """Numbers of a window: the channels of three frames, a one, and zeros."""
    return (TAPS * channels // _ALIGNMENT + 1) * _ALIGNMENT


def convolution_rows(frames: np.ndarray) -> np.ndarray:
    """The input of ``TwoConvolutions`` for frames [2 T, channels] of any float type: float32 [T, 3 * window_size].

    Row p has the windows of frames 2 p - 1, 2 p and 2 p + 1: each with the frames on either side of it, of which those
    outside the input are zero, and a one, which the bias is multiplied by. Frame -1 is padding of the second
    convolution, and not an output of the first: its window is all zero, and so is what is made of it.
    """
    count, channels = frames.shape
    padded = np.zeros((count + 2, channels), np.float32)
    padded[1:-1] = frames
    windows = np.zeros((count + 1, window_size(channels)), np.float32)  # of the frames from -1 on
    windows[1:, : TAPS * channels] = np.lib.stride_tricks.sliding_window_view(padded, (TAPS, channels)).reshape(
        count, -1
    )
    windows[1:, TAPS * channels] = 1.0
    width = windows.shape[1]
    rows = np.empty((count // 2, TAPS, width), np.float32)
    for tap in range(TAPS):
        rows[:, tap] = windows[tap : tap + count - 1 : 2]
    return rows.reshape(count // 2, -1)


class TwoConvolutions(Layer):
    """activation(convolution of activation(convolution of x)), of width 3 both, the second with stride 2.

    Tensors are conv1.{weight, bias} and conv2.{weight, bias}, weights [outputs, inputs, 3]. Every rank computes all.
    """

    def __init__(self, context: LayerContext, channels: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.kernels, self.dtype = context.kernels, context.dtype
        self._channels, self._activation = channels, activation
        self._placed: dict[str, np.ndarray] = {}
        self._first: PackedWeight
        self._second: list[PackedWeight]
        for name, inputs in (("conv1", channels), ("conv2", hidden)):
            self.expected[f"{name}.weight"] = (hidden, inputs, TAPS)
            self.expected[f"{name}.bias"] = (hidden,)
        window = window_size(channels)
        self.holds.append(Weight("conv1.weight", (hidden, window), "linear", context.dtype))
        self.holds.append(Weight("conv2.weight", (hidden, TAPS * hidden), "linear", context.dtype))
        self.holds.append(Weight("conv2.bias", (hidden,), "vector", context.dtype))

    def __call__(self, rows: Array) -> Array:
        """Rows as of ``convolution_rows``, float32 [T, 3 * window], to float32 [T, hidden]."""
        window, out = window_size(self._channels), None
        for tap, weight in enumerate(self._second):
            x = self._first(rows[:, tap * window : (tap + 1) * window], self.dtype, None, self._activation)
            out = weight(x, DType.FLOAT32, out, self._activation if tap == TAPS - 1 else None)
        return out

    def place(self, shard: str, tensor: np.ndarray) -> None:
        """Keeps the tensor until all are there."""
        self._placed[shard] = tensor

    def complete(self) -> None:
        """Packs the first matrix with its bias as a column, and the second one tap by tap."""
        first, bias = self._placed["conv1.weight"], self._placed["conv1.bias"]
        matrix = np.zeros((len(first), window_size(self._channels)), np.float32)
        size = TAPS * self._channels
        matrix[:, :size] = first.transpose(0, 2, 1).reshape(len(first), size)
        matrix[:, size] = bias
        pack = self.kernels.pack
        self._first = pack([matrix], dtype=self.dtype)
        second, bias = self._placed["conv2.weight"], self._placed["conv2.bias"]
        self._second = [
            pack([np.ascontiguousarray(second[:, :, tap])], bias if tap == TAPS - 1 else None, dtype=self.dtype)
            for tap in range(TAPS)
        ]
        self._placed.clear()
