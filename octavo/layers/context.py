"""Where a layer lives: the backend that computes it, its type and device, and its share of a tensor-parallel group."""

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
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank must be 0 to {self.tp_size - 1} (tp_size - 1), not {self.tp_rank}")

    def share(self, size: int, what: str) -> int:
        """``size / tp_size``.

        Raises:
            ConfigError: the ranks cannot share ``size`` equally.
        """
        if size % self.tp_size:
            raise ConfigError(f"{what} ({size}) cannot be shared by {self.tp_size} tensor-parallel workers")
        return size // self.tp_size
