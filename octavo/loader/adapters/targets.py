"""The matrices of a network that adapters may change, and how a checkpoint's names lead to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.core.errors import AdapterError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.models.checkpoint import CheckpointEntry, Pairs, is_transposed
from octavo.models.sizes import build_without_weights


@dataclass(frozen=True, slots=True)
class Target:
    """A part of a layer: a matrix [outputs, inputs], of all ranks together; of an embedding [width, vocabulary]."""

    #: Name of the layer in the network, and of the part below it, as in ``LoraLayer.lora_parts``.
    layer: str
    part: str
    outputs: int
    inputs: int


class AdapterTargets:
    """All of a network's matrices that take low-rank products.

    An adapter names a module of transformers' network. Where that is stored as other matrices than the network has
    (fused, of reordered rows, transposed), ``Network.checkpoint_map`` does to the rows of the product's second matrix
    what it does to the rows of the weight; the first matrix concerns the inputs, which are the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        """``config`` is that of the whole network.

        Raises:
            UnsupportedModelError, ConfigError: as ``make_network``.
        """
        network = build_without_weights(config, "float32", max_loras=1)
        self.config = config
        self._entries: tuple[CheckpointEntry, ...] = network.checkpoint_map
        self._targets: dict[str, Target] = {}
        for layer, lora in network.lora_layers():
            for part, (outputs, inputs) in lora.lora_parts.items():
                name = f"{layer}.{part}.weight" if part else f"{layer}.weight"
                self._targets[name] = Target(layer, part, outputs, inputs)
        self._matrices = {name: (target.outputs, target.inputs) for name, target in self._targets.items()}
        #: Of all tensors of the network.
        self.shapes = network.tensor_shapes()

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets.values())

    def find(self, module: str, rows: np.ndarray) -> list[tuple[Target, np.ndarray]]:
        """The matrices that a module of a checkpoint consists of, each with its rows of ``rows`` [outputs, any].

        Raises:
            AdapterError: the network has no such matrix, or it takes no adapters; or the number of rows is wrong.
        """
        name = f"{module}.weight"
        pairs: Pairs = [(name, rows.T if is_transposed(name, self._entries) else rows)]
        for entry in self._entries:
            pairs = entry.apply(pairs, self._matrices)
        try:
            found = [(name, part) for name, part in pairs if isinstance(part, np.ndarray)]
        except WeightError as e:
            raise AdapterError(f"it does not fit {module!r}: {e}") from None
        if not found:
            raise AdapterError(self._refusal(module, name))
        for target, part in found:
            if target not in self._targets:
                raise AdapterError(self._refusal(module, target))
            if len(part) != self._targets[target].outputs:
                raise AdapterError(f"it has {len(part)} rows, but {module!r} has {self._targets[target].outputs}")
        return [(self._targets[target], part) for target, part in found]

    def _refusal(self, module: str, tensor: str) -> str:
        last = {target.part or target.layer.rpartition(".")[2] for target in self}
        if tensor in self.shapes:
            why = "which takes no adapters"
        else:
            why = f"which a {self.config.architecture} of {self.config.num_layers} layers does not have"
        return f"it adapts {module!r}, {why}; matrices that do: {', '.join(sorted(last))}"
