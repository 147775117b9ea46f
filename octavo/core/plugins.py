"""Classes that a user names: one of those that come with the package, or ``module:Class``.

Modules are looked for where Python looks, and then in the current folder, which is not on the path of programs that pip
installs, such as ``octavo``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.sampling_params import LogitsProcessor, SamplingParams

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


# Extras of the package: how to install one into the environment that runs.


def how_to_install(extra: str) -> str:
    """The end of a message about a package that is missing: the extra, and the command that installs it.

    The command names the running Python, as another ``pip`` may come first on the path, and the extra's requirements
    instead of ``octavo[...]``, as the package may be a checkout or a wheel that no index has.
    """
    return f"install the extra octavo[{extra}]: {pip_install(*requirements(extra))}"


def pip_install(*wanted: str) -> str:
    """The shell command that installs requirements into the running environment; with uv where that has no pip."""
    if importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *wanted])
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])


def requirements(extra: str) -> list[str]:
    """What an extra needs, from the installed package's metadata; of a checkout that is not installed, its folder."""
    try:
        declared = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    found = []
    for requirement in declared:
        name, _, marker = requirement.partition(";")
        if re.search(rf"""extra\s*==\s*["']{re.escape(extra)}["']""", marker):
            found.append(name.strip())
    return found or [f"{Path(__file__).resolve().parents[2]}[{extra}]"]


# Logits processors that an engine is started with and that requests ask for by the names of their arguments.


class LogitsProcessorPlugin(ABC):
    """Makes logits processors of the arguments of requests. One object serves all requests of a process."""

    #: Keys of ``extra_args``: a request that has one of them gets a processor, others are not touched.
    arguments: ClassVar[tuple[str, ...]]

    @abstractmethod
    def make(self, params: SamplingParams) -> LogitsProcessor:
        """The processor of a request with these parameters.

        It is made once to check the request, and again wherever the request runs, after a preemption too. So what it
        returns must depend on its arguments alone: on no state of its own that calls leave behind.

        Raises:
            ValueError: an argument is wrong; the request is refused with the message.
        """


#: Those that come with the package.
_OWN: dict[str, type[LogitsProcessorPlugin]] = {}


class LogitsPlugins:
    """The plug-ins of an engine, by the names of their arguments."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names``: ``module:Class`` of each, in the order in which they are applied.

        Raises:
            ConfigError: a class cannot be loaded, names no argument, or names one of another.
        """
        self._by_argument: dict[str, LogitsProcessorPlugin] = {}
        for name in names:
            plugin = load_class(name, _OWN, LogitsProcessorPlugin, "logits processor", "octavo.LogitsProcessorPlugin")()
            arguments = getattr(plugin, "arguments", ())
            if not arguments or isinstance(arguments, str):
                raise ConfigError(f"logits processor {name!r} must name its arguments, as in arguments = ('scale',)")
            for argument in arguments:
                if argument in self._by_argument:
                    raise ConfigError(f"logits processor {name!r} has the argument {argument!r} of one before it")
                self._by_argument[argument] = plugin

    def processors(self, params: SamplingParams) -> list[LogitsProcessor]:
        """The processors that a request asks for, in the order of the plug-ins.

        Raises:
            InvalidRequestError: an argument is of no plug-in, or wrong.
        """
        arguments = params.extra_args or {}
        if not arguments:
            return []
        for name in arguments:
            if name not in self._by_argument:
                names = ", ".join(map(repr, self._by_argument)) or "none: the option logits_processors loads some"
                raise InvalidRequestError(f"extra_args has {name!r}, but no logits processor takes it; taken: {names}")
        plugins = dict.fromkeys(plugin for name, plugin in self._by_argument.items() if name in arguments)
        try:
            return [plugin.make(params) for plugin in plugins]
        except ValueError as e:
            raise InvalidRequestError(f"extra_args {arguments!r}: {e}") from e
