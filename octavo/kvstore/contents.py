"""What a KV store holds, for ``octavo cache``: namespaces, their values and bytes; without an engine.

A namespace is the digest of all that decides the bits of its values (``octavo.kvstore.namespace``): a model, dtypes, a
layout, a rank. Stores keep a label of each, in which no text of a prompt is.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod

import msgspec

from octavo.core.errors import ConfigError, did_you_mean

#: Scheme of a URL -> module with ``open_contents(place: str) -> StoreContents``; "" are folders.
_MODULES = {
    "": "octavo.kvstore.disk",
    "redis": "octavo.kvstore.redis",
    "rediss": "octavo.kvstore.redis",
    "unix": "octavo.kvstore.redis",
}


class StoredNamespace(msgspec.Struct, frozen=True):
    """The values of one namespace."""

    #: First 16 hexadecimal digits of the namespace.
    name: str
    #: What it was made of, such as {"model": "smollm2-135m", "dtype": "bfloat16"}; empty: unknown.
    about: dict[str, str]
    values: int
    bytes: int
    #: Seconds since the values were written or used: the least and the most recent one. None: unknown.
    oldest: float | None = None
    newest: float | None = None


class StoreContents(ABC):
    """A store that is looked at or cleared; engines may use it meanwhile.

    Methods raise ConfigError if the store does not answer.
    """

    @abstractmethod
    def namespaces(self) -> list[StoredNamespace]:
        """All namespaces that have values, by name."""

    @abstractmethod
    def clear(self, name: str | None = None) -> tuple[int, int]:
        """Removes the values of a namespace, or all; returns how many, and their bytes."""


def open_contents(place: str) -> StoreContents:
    """The store at a path or URL; raises ConfigError if there is none."""
    scheme, separator, _ = place.partition("://")
    scheme = scheme if separator else ""
    if scheme not in _MODULES:
        hint = did_you_mean(scheme, [name for name in _MODULES if name])
        raise ConfigError(f"{scheme}:// is no scheme of KV stores; {hint}, or the path of a folder")
    contents: StoreContents = importlib.import_module(_MODULES[scheme]).open_contents(place)
    return contents
