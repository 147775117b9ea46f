"""The table of vLLM's modules and names, and the finder that makes them importable, also as ``vllm``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import msgspec


class _Table(msgspec.Struct):
    """``names.json``: what is served, by source, and what is not."""

    #: Octavo's module, its names (``vLLM's=Octavo's`` where they differ), and vLLM's modules (``.``: the package).
    served: list[tuple[str, str, str]]
    #: Names, and what Octavo has instead.
    absent_modules: list[tuple[str, str]]
    absent_names: list[tuple[str, str]]


_table = msgspec.json.decode(Path(__file__).with_name("names.json").read_bytes(), type=_Table)

#: Module ("": the package) -> name -> "module:attribute".
SERVED: dict[str, dict[str, str]] = {}
for _source, _names, _modules in _table.served:
    for _module in _modules.split():
        _parts = [] if _module == "." else _module.split(".")
        for _length in range(len(_parts) + 1):  # a module's packages are modules, too
            SERVED.setdefault(".".join(_parts[:_length]), {})
        for _name in _names.split():
            SERVED[".".join(_parts)][_name.partition("=")[0]] = f"{_source}:{_name.rpartition('=')[2]}"
#: Modules, and names in any module, without a counterpart -> what Octavo has instead.
ABSENT_MODULES = {name: reason for names, reason in _table.absent_modules for name in names.split()}
ABSENT_NAMES = {name: reason for names, reason in _table.absent_names for name in names.split()}

PACKAGE = "octavo.compat.vllm"
ALIAS = "vllm"


class NoCounterpartError(ModuleNotFoundError):
    """A module or name of vLLM without a counterpart; the message names the replacement."""


class Finder(MetaPathFinder):
    """Finds modules of the table; refuses other modules."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of the table with this name."""
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
    """A module that looks its names up in the table on demand."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """Default module creation."""

    def exec_module(self, module: ModuleType) -> None:
        """Sets the module's ``__getattr__`` and ``__all__``."""

        def getattribute(name: str) -> object:
            value = value_of(self._name, name)
            setattr(module, name, value)
            return value

        module.__doc__ = f"``vllm.{self._name}``, as far as Octavo has a counterpart."
        module.__getattr__ = getattribute  # type: ignore[method-assign]
        module.__all__ = [*SERVED[self._name]]  # type: ignore[attr-defined]


class AliasedModule(Loader):
    """The same module object under its name in ``vllm``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns this package's module."""
        return importlib.import_module(f"{PACKAGE}.{self._name}")

    def exec_module(self, module: ModuleType) -> None:
        """Has nothing to do."""


def value_of(module: str, name: str) -> object:
    """The value of a name in a module (empty: the package); raises NoCounterpartError or AttributeError."""
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
    parts = name.split(".")
    reasons = (ABSENT_MODULES.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    reason = ABSENT_NAMES.get(parts[-1]) or next((r for r in reasons if r), "docs/coming-from.md lists what it has")
    return f"Octavo has no vllm.{name}: {reason}"


def register() -> None:
    """Makes the modules importable as ``octavo.compat.vllm.…``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(PACKAGE))


def install() -> None:
    """Makes ``import vllm`` import this package; raises RuntimeError if vLLM itself is imported already."""
    package = importlib.import_module(PACKAGE)
    if sys.modules.get(ALIAS, package) is not package:
        raise RuntimeError("vllm is imported already: install() must come before")
    if ALIAS not in sys.modules:
        sys.meta_path.insert(0, Finder(ALIAS))
        sys.modules[ALIAS] = package
