"""The paged KV cache of a backend: its memory, and copies of its blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.core.kv_spec import KVSpec, LayerGroup
from octavo.kernels.arrays import Array


@dataclass(slots=True)
class LayerCache:
    """KV cache of one layer, in the layout of the backend that made it."""

    key: Array
    #: The same array as ``key`` in a latent cache.
    value: Array
    #: KV group of the layer: index of its block tables and slot mapping in the batch.
    group: int = field(default=0, kw_only=True)


class CacheKernels(ABC):
    """What a backend does for the KV cache."""

    @abstractmethod
    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        """Bytes of one KV cache block of one layer: keys, values, scales and padding.

        Raises:
            ConfigError: the backend does not support such a cache.
        """

    @abstractmethod
    def make_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """The KV cache of ``layers`` layers of one group, all zero.

        Raises:
            ConfigError: the backend does not support such a cache.
        """

    def make_host_group_cache(self, spec: KVSpec, layers: int, blocks: int, block_size: int) -> list[LayerCache]:
        """As ``make_group_cache``, in host memory, for swapped blocks."""
        return self.make_group_cache(spec, layers, blocks, block_size)

    def make_cache(self, groups: Sequence[LayerGroup], blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """The KV cache of all layers, in order, with ``blocks[i]`` blocks for group i."""
        return _in_layer_order(groups, blocks, block_size, self.make_group_cache)

    def make_host_cache(self, groups: Sequence[LayerGroup], blocks: Sequence[int], block_size: int) -> list[LayerCache]:
        """As ``make_cache``, in host memory, for swapped blocks."""
        return _in_layer_order(groups, blocks, block_size, self.make_host_group_cache)

    @abstractmethod
    def copy_blocks(self, caches: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks (source, target) in every layer.

        A source may have several targets, a target has one source. All sources are read before any target is written.
        """

    @abstractmethod
    def swap_blocks(self, sources: list[LayerCache], targets: list[LayerCache], pairs: list[tuple[int, int]]) -> None:
        """Copies blocks (source, target) from one cache to another, in every layer.

        Both are caches of this backend, with equal shapes and types except for the number of blocks.
        """


def check_pairs(pairs: Sequence[tuple[int, int]], sources: int, targets: int) -> None:
    """Refuses to copy blocks (source, target) that caches of so many blocks do not have.

    Raises:
        IndexError: there is no such block.
    """
    for source, target in pairs:
        if not (0 <= source < sources and 0 <= target < targets):
            raise IndexError(
                f"cannot copy block {source} of {sources} to block {target} of {targets}: index out of range"
            )


def _in_layer_order(
    groups: Sequence[LayerGroup],
    blocks: Sequence[int],
    block_size: int,
    make: Callable[[KVSpec, int, int, int], list[LayerCache]],
) -> list[LayerCache]:
    caches: dict[int, LayerCache] = {}
    for index, (group, count) in enumerate(zip(groups, blocks, strict=True)):
        made = make(group.spec, len(group.layers), count, block_size)
        for layer, cache in zip(group.layers, made, strict=True):
            cache.group = index
            caches[layer] = cache
    return [caches[layer] for layer in sorted(caches)]
