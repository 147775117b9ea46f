"""Classes that a user names: one of those that come with the package, or ``module:Class``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from octavo.core.errors import ConfigError

T = TypeVar("T")


def load_class(name: str, known: Mapping[str, type[T]], base: type[Any], kind: str, base_name: str) -> type[T]:
    """The class of this name among ``known``, or the one that ``module:Class`` names, which derives from ``base``.

    ``kind`` is what messages call it, ``base_name`` where users import the base from.

    Raises:
        ConfigError: there is none, or it is not derived from ``base``.
    """
    if ":" not in name:
        if name not in known:
            raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(known)}, or module:Class")
        return known[name]
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"{kind} {name!r} cannot be imported: {e}") from e
    derived = inspect.isclass(found) and issubclass(found, base)
    if not derived:
        raise ConfigError(f"{kind} {name!r} is not a class derived from {base_name}")
    return found
