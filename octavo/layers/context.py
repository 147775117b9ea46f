"""Where a layer lives: the backend that computes it, its type and device, and its share of the network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.errors import ConfigError
from octavo.kernels.interface import Kernels


@dataclass(frozen=True)
class LayerContext:
    """What every layer of a network shares. The ranks' collectives are those of ``kernels``."""

    kernels: Kernels
    #: Type of weights and activations.
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    #: How the matrices of linear layers and of the head are held: "int8", "int4", "gguf" (as the file has them), or
    #: None: in ``dtype``.
    quantization: str | None = None
    #: Type of the KV cache, as in ``KVSpec.dtype``; "auto": ``dtype``.
    kv_cache_dtype: str = "auto"
    tp_rank: int = 0
    tp_size: int = 1
    #: Layers that this pipeline stage computes, of all of the network's; None: all.
    layers: range | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank must be 0 to {self.tp_size - 1} (tp_size - 1), not {self.tp_rank}")

    @property
    def dtype_name(self) -> str:
        """``dtype`` as options name it, as in "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_dtype_name(self) -> str:
        """Type of the KV cache's numbers, as in ``KVSpec.dtype``."""
        return self.dtype_name if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def layers_of(self, num_layers: int) -> range:
        """The layers of this stage, of ``num_layers`` in all.

        Raises:
            ConfigError: there are no such layers.
        """
        layers = range(num_layers) if self.layers is None else self.layers
        if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
            raise ConfigError(f"a pipeline stage has a run of the layers 0 to {num_layers - 1}, not {layers}")
        return layers

    def share(self, size: int, what: str) -> int:
        """``size / tp_size``.

        Raises:
            ConfigError: the ranks cannot share ``size`` equally.
        """
        if size % self.tp_size:
            raise ConfigError(f"{what} ({size}) cannot be shared by {self.tp_size} tensor-parallel workers")
        return size // self.tp_size
