"""What layers are built with: kernel backend, dtype, device, and the rank's share of the network."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.kernels.interface import Kernels
from octavo.kernels.lora import LowRankShape


@dataclass(frozen=True)
class LayerContext:
    """Common to all layers of a network. Collectives of the ranks are operations of ``kernels``."""

    kernels: Kernels
    #: Type of weights and activations.
    dtype: DType
    #: Format of the matrices of linear layers and of the head: "int8", "int4", "fp8", that of the checkpoint ("gguf" or
    #: ``CheckpointQuantization.name``), or None (``dtype``).
    quantization: str | None = None
    #: Type of the KV cache, as in ``KVSpec.dtype``; "auto": ``dtype``.
    kv_cache_dtype: str = "auto"
    #: Positions that tables of positions have at first, see ``Network.extend_positions``; None: all of the model's.
    positions: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    #: Indices of the network's layers that this pipeline stage computes; None: all.
    layers: range | None = None
    #: Slots for adapters' low-rank products, and the greatest rank of one; 0: layers have none.
    max_loras: int = 0
    max_lora_rank: int = 0
    #: Rows of the embedding for virtual tokens of prompt adapters.
    virtual_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank must be 0 to {self.tp_size - 1} (tp_size - 1), not {self.tp_rank}")

    @property
    def tensor_quantization(self) -> str | None:
        """What ``Kernels.pack`` makes of matrices that come as arrays: "int8", "int4", "fp8", or None (``dtype``)."""
        return self.quantization if self.quantization in ("int8", "int4", "fp8") else None

    @property
    def kv_dtype_name(self) -> str:
        """Type of the KV cache's numbers, as in ``KVSpec.dtype``."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def low_rank_shape(self, inputs: int, *outputs: int) -> LowRankShape:
        """The slots for adapters of a layer of these sizes, of this rank; see ``LowRankShape``."""
        return LowRankShape(inputs, outputs, self.max_loras, self.max_lora_rank, self.dtype)

    def layers_of(self, num_layers: int) -> range:
        """The layers of this stage, in a network of ``num_layers``.

        Raises:
            ConfigError: ``layers`` is not a range within the network.
        """
        layers = range(num_layers) if self.layers is None else self.layers
        if not 0 <= layers.start < layers.stop <= num_layers or layers.step != 1:
            raise ConfigError(f"a pipeline stage has a run of the layers 0 to {num_layers - 1}, not {layers}")
        return layers

    def share(self, size: int, what: str, unit: int) -> slice:
        """This rank's part of 0 to ``size``; the parts of the ranks follow each other.

        They are equal if the number of ranks divides ``size``. Otherwise each has whole units (the last unit may be
        smaller), and the first ranks one more than the others. ``what`` names the quantity in the error.

        Raises:
            ConfigError: there are fewer units than ranks.
        """
        rank, ranks = self.tp_rank, self.tp_size
        unit = unit if size % ranks else size // ranks
        units = -(-size // unit)
        if units < ranks:
            raise ConfigError(
                f"{what} ({size}) cannot be shared by {ranks} tensor-parallel workers: each needs at least {unit}"
            )
        each, larger = divmod(units, ranks)
        start = rank * each + min(rank, larger)
        stop = start + each + (rank < larger)
        return slice(start * unit, min(stop * unit, size))
