"""Classes that users name, as ``module:Class`` or by the name of a built-in one; logits processor plug-ins; extras."""

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
    """One of ``classes`` by name, or a class ``module:Class`` derived from ``base``; raises ConfigError for others.

    The current folder comes last on the import path. ``kind``, ``base_name``: for messages.
    """
    if ":" not in name:
        if name not in classes:
            raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(classes)}, or module:Class")
        return classes[name]
    loaded = load_attribute(name, kind)
    is_derived = inspect.isclass(loaded) and issubclass(loaded, base)  # mypy would narrow the type in the condition
    if not is_derived:
        raise ConfigError(f"{kind} {name!r} is not a class derived from {base_name}")
    return loaded


def load_attribute(name: str, kind: str) -> Any:
    """What ``module:Name`` names; raises ConfigError if it cannot be imported. ``kind``: for messages."""
    module, _, attribute = name.partition(":")
    try:
        with _current_folder_on_the_path():
            return getattr(importlib.import_module(module), attribute)
    except Exception as e:  # modules may raise anything
        raise ConfigError(
            f"{kind} {name!r} cannot be imported: {type(e).__name__}: {e} (looked for among installed modules, in "
            f"PYTHONPATH and in the current folder, {os.getcwd()})"
        ) from e


@contextlib.contextmanager
def _current_folder_on_the_path() -> Iterator[None]:
    """Last, so that it hides no installed module; only during the import, so that no folder passes for a library."""
    if (folder := os.getcwd()) in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the module may have changed the path
            sys.path.remove(folder)


# Extras of the package.


def how_to_install(extra: str) -> str:
    """The extra and the command that installs it into this Python, for a message about a missing package."""
    return f"install the extra octavo[{extra}]: {pip_install(*requirements(extra))}"


def pip_install(*requirements: str) -> str:
    """The shell command that installs requirements into this environment; with uv if it lacks pip."""
    if importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *requirements])
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def requirements(extra: str) -> list[str]:
    """An extra's requirements by the package's metadata; the folder of a checkout that is not installed."""
    try:
        declared = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    condition = re.compile(rf""";.*extra\s*==\s*["']{re.escape(extra)}["']""", re.DOTALL)
    result = [requirement.partition(";")[0].strip() for requirement in declared if condition.search(requirement)]
    return result or [f"{Path(__file__).resolve().parents[2]}[{extra}]"]


# Logits processors that requests activate by the names of their arguments.


class LogitsProcessorPlugin(ABC):
    """Makes logits processors for requests. One object serves all requests of a process."""

    #: Keys of ``extra_args`` that activate the processor.
    arguments: ClassVar[tuple[str, ...]]

    @abstractmethod
    def make(self, params: SamplingParams) -> LogitsProcessor:
        """The processor of a request with these parameters.

        Called to check the request, and again wherever it runs, also after a preemption: the processor's results must
        depend on its arguments alone, not on state that earlier calls left behind.

        Raises:
            ValueError: an argument is invalid; the request is refused with the message.
        """


class LogitsPlugins:
    """The plug-ins of an engine, by the names of their arguments."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names``: ``module:Class`` in order of application; raises ConfigError for invalid or conflicting ones."""
        self._by_argument: dict[str, LogitsProcessorPlugin] = {}
        built_in: dict[str, type[LogitsProcessorPlugin]] = {}
        for name in names:
            kind, base_name = "logits processor", "octavo.LogitsProcessorPlugin"
            plugin = load_class(name, built_in, LogitsProcessorPlugin, kind, base_name)()
            arguments = getattr(plugin, "arguments", ())
            if not arguments or isinstance(arguments, str):
                raise ConfigError(f"logits processor {name!r} must name its arguments, as in arguments = ('scale',)")
            for argument in arguments:
                if argument in self._by_argument:
                    raise ConfigError(f"logits processor {name!r} has the argument {argument!r} of one before it")
                self._by_argument[argument] = plugin

    def processors(self, params: SamplingParams) -> list[LogitsProcessor]:
        """A request's processors in the order of the plug-ins; raises InvalidRequestError for bad arguments."""
        if not (arguments := params.extra_args or {}):
            return []
        for name in arguments:
            if name not in self._by_argument:
                names = ", ".join(map(repr, self._by_argument)) or "none: the option logits_processors loads some"
                raise InvalidRequestError(
                    f"has {name!r}, but no logits processor takes it; taken: {names}", path="extra_args"
                )
        plugins = dict.fromkeys(plugin for name, plugin in self._by_argument.items() if name in arguments)
        try:
            return [plugin.make(params) for plugin in plugins]
        except ValueError as e:
            raise InvalidRequestError(f"{arguments!r}: {e}", path="extra_args") from e
