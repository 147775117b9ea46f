"""``open_stores``: the KV stores of an engine's options."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config.options import CacheOptions
from octavo.kvstore.store import KEY_BYTES, KVStore


def open_stores(options: CacheOptions, namespace: bytes, about: Mapping[str, str] | None = None) -> list[KVStore]:
    """The stores of ``kv_disk`` and ``kv_store``, the nearest first; none without these options.

    ``namespace``: of all keys; ``about``: its label.

    Raises:
        ConfigError: the folder cannot be used, the URL is wrong, or a package is missing.
    """
    stores: list[KVStore] = []
    if options.kv_disk is not None:
        from octavo.kvstore.disk import DiskStore

        stores.append(DiskStore(options.kv_disk, int(options.kv_disk_bytes), namespace, about))
    if options.kv_store is not None:
        from octavo.kvstore.redis import RedisStore

        stores.append(RedisStore(options.kv_store, namespace, about))
    return stores


def check_stores(options: CacheOptions) -> None:
    """Raises the ConfigError of ``open_stores``, before the namespace is known."""
    for store in open_stores(options, bytes(KEY_BYTES)):
        store.close()
