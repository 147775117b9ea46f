"""The KV caches of a worker's layers: those of the network and, in the same blocks, those of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core.errors import ConfigError
from octavo.core.kv_spec import KVSpec, LayerGroup, group_layers
from octavo.kernels.cache import LayerCache
from octavo.kernels.interface import Kernels


@dataclass(frozen=True)
class Workspace:
    """Keys and values of the layers of an encoder: of the tokens of one step, and of one layer at a time."""

    spec: KVSpec
    blocks: int
    num_layers: int


class KVLayers:
    """Makes the caches of all layers. Owns which layers share block tables.

    The layers of an encoder are in no group: they have one cache together, which is no memory of what was computed.

    A drafter's layers are in no groups of their own: they have caches of their shape, with as many blocks as the group
    of the network whose block tables they read. So a block of that group is larger by theirs.
    """

    def __init__(
        self,
        kernels: Kernels,
        groups: Sequence[LayerGroup],
        block_size: int,
        drafter: Sequence[KVSpec] = (),
        workspace: Workspace | None = None,
    ) -> None:
        """``groups``: of the network's layers on this rank; ``drafter``: of each of the drafter's layers.

        ``workspace``: of an encoder, which has no groups, or has those of the decoder behind it.

        Raises:
            ConfigError: as ``find_groups``.
        """
        self._kernels, self.groups, self._block_size = kernels, list(groups), block_size
        self._drafter = find_groups(drafter, [group.spec.window for group in groups])
        self._workspace = workspace
        self._num_layers = sum(len(group.layers) for group in groups)
        if not groups and workspace is not None:
            self._num_layers = workspace.num_layers

    def group_bytes(self) -> list[tuple[int, int | None]]:
        """For each group: bytes of a block in all its layers, with those of the drafter; and its window."""
        return [
            (self._size(group) + drafts, group.spec.window)
            for group, drafts in zip(self.groups, self._drafter_bytes(), strict=True)
        ]

    def block_bytes(self) -> int:
        """Bytes of a block in all layers of this rank."""
        return sum(size for size, _ in self.group_bytes())

    def drafter_share(self) -> float:
        """What the drafter's layers have of ``block_bytes``."""
        return sum(self._drafter_bytes()) / self.block_bytes()

    def _drafter_bytes(self) -> list[int]:
        sizes = [0] * len(self.groups)
        for group, index in self._drafter:
            sizes[index] += self._size(group)
        return sizes

    def _size(self, group: LayerGroup) -> int:
        return len(group.layers) * self._kernels.block_bytes(group.spec, self._block_size)

    def make(self, blocks: Sequence[int]) -> list[LayerCache]:
        """Caches of so many blocks of each group on the device: the network's layers, then the drafter's."""
        if self.groups or self._workspace is None:
            return self._make(self._kernels.make_cache, blocks)
        return [self.make_workspace()] * self._num_layers

    def make_workspace(self) -> LayerCache:
        """The cache that the layers of the encoder share, of a group of its own behind the others."""
        assert self._workspace is not None
        shared = LayerGroup(self._workspace.spec, (0,))
        cache = self._kernels.make_cache([shared], [self._workspace.blocks], self._block_size)[0]
        cache.group = len(self.groups)
        return cache

    def workspace_bytes(self) -> int:
        """Bytes of ``make_workspace``; 0 without one."""
        if self._workspace is None:
            return 0
        return self._workspace.blocks * self._kernels.block_bytes(self._workspace.spec, self._block_size)

    def make_host(self, blocks: Sequence[int]) -> list[LayerCache]:
        """As ``make``, in host memory."""
        return self._make(self._kernels.make_host_cache, blocks)

    def _make(
        self, make: Callable[[Sequence[LayerGroup], Sequence[int], int], list[LayerCache]], blocks: Sequence[int]
    ) -> list[LayerCache]:
        caches = make(self.groups, blocks, self._block_size)
        own = [group for group, _ in self._drafter]
        drafts = make(own, [blocks[index] for _, index in self._drafter], self._block_size)
        for group, index in self._drafter:
            for layer in group.layers:
                drafts[layer].group = index
        return caches + drafts

    def split(self, caches: list[LayerCache]) -> tuple[list[LayerCache], list[LayerCache]]:
        """Those of the network, and those of the drafter."""
        return caches[: self._num_layers], caches[self._num_layers :]


def find_groups(specs: Sequence[KVSpec], windows: Sequence[int | None]) -> list[tuple[LayerGroup, int]]:
    """The groups of a drafter's layers, and the KV group of the network in whose blocks each is.

    ``windows``: of the network's KV groups. Blocks behind a group's window belong to others, so it is the narrowest
    that keeps what the layers attend to.

    Raises:
        ConfigError: no group keeps enough.
    """
    found = []
    for group in group_layers(specs):
        window = group.spec.window
        wide = [i for i, kept in enumerate(windows) if kept is None or (window is not None and window <= kept)]
        if not wide:
            longest = max(kept for kept in windows if kept is not None)
            raise ConfigError(
                f"speculative_config: the drafter attends to {'all tokens' if window is None else f'{window} tokens'}, "
                f"but the model's KV cache keeps the last {longest} only; take method 'ngram' or 'suffix'"
            )
        found.append((group, min(wide, key=lambda i: windows[i] or float("inf"))))
    return found
