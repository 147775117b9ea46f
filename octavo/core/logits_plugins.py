"""Logits processors that an engine is started with and that requests ask for by the names of their arguments.

A request brings no code to another process (``SamplingParams.logits_processors`` is for one process alone). A plug-in
is code of whoever starts the engine, loaded by name in every process; a request brings ``extra_args`` for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.plugins import load_class
from octavo.core.sampling_params import LogitsProcessor, SamplingParams


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
