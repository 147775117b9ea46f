"""``KVStore``: the interface of a tier of KV cache blocks behind host memory.

Blocks are named by content, so a stored value is the value that would be computed: a store may lose values, be shared,
or be half full, and no answer changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from octavo.core.stats import StoreTierStats

#: Bytes of a key: the digest of a namespace (all that decides the bits of a value), a KV group and a content digest.
KEY_BYTES = 32


class KVStore(ABC):
    """Values of fixed sizes by key; bounded, and lossy.

    All methods may be called from several threads at once, never from the one that runs steps; none raises because of
    what is stored, or because the medium fails: a value is there and whole, or it is missing. Keys are ``KEY_BYTES``
    long and say nothing of a prompt.
    """

    #: "disk" or "shared": the label in metrics.
    name: str

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys have values, without reading them; a value may be lost before it is read."""

    @abstractmethod
    def read(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        """Reads the values of the leading keys, and marks them as used; returns how many there are.

        ``values``: writable memory of exactly the size of each value. A value of another size, of another key, torn or
        changed counts as missing, and is removed. What is in the memory of missing ones is undefined.
        """

    @abstractmethod
    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> int:
        """Stores values, in place of the least recently used others; returns how many. Present ones count as used."""

    @abstractmethod
    def stats(self) -> StoreTierStats:
        """Totals of this object since it was made, and what the store holds now."""

    @abstractmethod
    def close(self) -> None:
        """Ends all use; may be called again."""
