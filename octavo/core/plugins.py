"""Classes that a user names: one of those that come with the package, or ``module:Class``.

Modules are looked for where Python looks, and then in the current folder, which is not on the path of programs that pip
installs, such as ``octavo``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from octavo.core.errors import ConfigError

T = TypeVar("T")


def load_class(name: str, classes: Mapping[str, type[T]], base: type[Any], kind: str, base_name: str) -> type[T]:
    """The class of this name among ``classes``, or the one that ``module:Class`` names, which derives from ``base``.

    ``kind`` is what messages call it, ``base_name`` where users import the base from.

    Raises:
        ConfigError: there is none, or it is not derived from ``base``.
    """
    if ":" not in name:
        if name not in classes:
            raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(classes)}, or module:Class")
        return classes[name]
    module, _, attribute = name.partition(":")
    try:
        with _current_folder_on_the_path():
            loaded: Any = getattr(importlib.import_module(module), attribute)
    except Exception as e:  # a module may raise anything
        raise ConfigError(
            f"{kind} {name!r} cannot be imported: {type(e).__name__}: {e} (looked for among installed modules, in "
            f"PYTHONPATH and in the current folder, {os.getcwd()})"
        ) from e
    derived = inspect.isclass(loaded) and issubclass(loaded, base)
    if not derived:
        raise ConfigError(f"{kind} {name!r} is not a class derived from {base_name}")
    return loaded


@contextlib.contextmanager
def _current_folder_on_the_path() -> Iterator[None]:
    """Last, so that no file there takes the place of an installed module; and not longer than for the import, as a
    folder named like a library that is not installed would pass for it.
    """
    folder = os.getcwd()
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path
            sys.path.remove(folder)
