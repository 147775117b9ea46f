"""Makes the modules of the table importable, under this package's name and under ``vllm``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from octavo.compat.vllm.served_modules import ABSENT_MODULES, ABSENT_NAMES, SERVED

PACKAGE = "octavo.compat.vllm"
ALIAS = "vllm"


class NoCounterpartError(ModuleNotFoundError):
    """A module or a name of vLLM that Octavo does not have; the message says what it has instead."""


class Finder(MetaPathFinder):
    """Finds modules of the table; refuses those that have no counterpart."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of the table that has this name, of this package or as ``vllm`` names it."""
        if not fullname.startswith(f"{self._prefix}."):
            return None
        name = fullname.removeprefix(f"{self._prefix}.")
        if name in SERVED:
            loader = ServedModule(name) if self._prefix == PACKAGE else AliasedModule(name)
            return ModuleSpec(fullname, loader, is_package=True)
        if self._prefix == PACKAGE and PathFinder.find_spec(fullname, path) is not None:
            return None  # a file of this package
        raise NoCounterpartError(_refusal(name), name=fullname)


class ServedModule(Loader):
    """A module whose names are found in the table when they are asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Gives it the names of the table."""

        def find(name: str) -> object:
            value = value_of(self._name, name)
            setattr(module, name, value)
            return value

        module.__doc__ = f"``vllm.{self._name}``, as far as Octavo has a counterpart."
        module.__getattr__ = find  # type: ignore[method-assign]
        module.__all__ = [*SERVED[self._name]]  # type: ignore[attr-defined]


class AliasedModule(Loader):
    """A module of this package under its name in vLLM: the same object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """That of this package."""
        return importlib.import_module(f"{PACKAGE}.{self._name}")

    def exec_module(self, module: ModuleType) -> None:
        """It has its names."""


def value_of(module: str, name: str) -> object:
    """What a name of a module means: of the package itself, if ``module`` is empty.

    Raises:
        NoCounterpartError: Octavo has something else instead.
        AttributeError: there is no such name.
    """
    place = SERVED[module].get(name)
    if place is not None:
        source, _, attribute = place.partition(":")
        return getattr(importlib.import_module(source), attribute)
    inner = f"{module}.{name}".lstrip(".")
    if inner in SERVED:
        return importlib.import_module(f"{PACKAGE}.{inner}")
    if name in ABSENT_NAMES or inner in ABSENT_MODULES:
        raise NoCounterpartError(_refusal(inner), name=f"{ALIAS}.{inner}")
    raise AttributeError(f"module 'vllm{'.' if module else ''}{module}' has no attribute {name!r} in Octavo")


def _refusal(name: str) -> str:
    """Why there is no such module or name, and what there is instead."""
    parts = name.split(".")
    reasons = (ABSENT_MODULES.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    listed = "docs/coming-from.md lists what it has"
    reason = ABSENT_NAMES.get(parts[-1]) or next((r for r in reasons if r), listed)
    return f"Octavo has no vllm.{name}: {reason}"


def register() -> None:
    """Makes the modules importable as ``octavo.compat.vllm.…``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(PACKAGE))


def install() -> None:
    """From now on ``import vllm`` gives this package.

    Raises:
        RuntimeError: vLLM itself was imported before.
    """
    package = importlib.import_module(PACKAGE)
    if sys.modules.get(ALIAS, package) is not package:
        raise RuntimeError("vllm is imported already: install() must come before")
    if ALIAS not in sys.modules:
        sys.meta_path.insert(0, Finder(ALIAS))
        sys.modules[ALIAS] = package
