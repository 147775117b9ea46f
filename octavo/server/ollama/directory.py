"""The models that Ollama's routes name: ``ModelDirectory``, and that of a server with one model.

A server of many models puts its own directory in ``app.state.directory``.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request

from octavo.config.server_options import ServerOptions
from octavo.core.errors import ModelNotFoundError, OctavoError, did_you_mean
from octavo.engine import model_catalog
from octavo.engine.chat_messages import template_variables
from octavo.engine.model_catalog import CatalogModel, ModelFacts, PullProgress
from octavo.server.answer_format import ChatFormats
from octavo.server.http.errors import ApiError
from octavo.server.prompt_inputs import THINKING_VARIABLES
from octavo.server.state import ServerState, state_of

#: Most aliases at a time (/api/copy).
MAX_ALIASES = 256
#: Most downloads at a time (/api/pull). A download goes on to its end if its client leaves.
MAX_PULLS = 4
_LATEST = ":latest"
#: The path of a model whose files were not found.
_NOWHERE = Path("/nonexistent")


def tagged(name: str) -> str:
    """The name with a tag, as Ollama's lists have it: ``latest`` if it has none."""
    return name if ":" in name.rpartition("/")[2] else f"{name}{_LATEST}"


def bare(name: str) -> str:
    return name.removesuffix(_LATEST)


def not_found(name: str, hint: str = "") -> ApiError:
    message = f"model {name[:200]!r} not found{f'; {hint}' if hint else ''}"
    return ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class ListedEntry:
    """A model of a directory, and what its files say; ``facts`` is None if they cannot be read."""

    #: With a tag.
    name: str
    model: CatalogModel
    facts: ModelFacts | None


@dataclass(frozen=True, slots=True)
class LoadedEntry:
    """A model that answers requests."""

    entry: ListedEntry
    #: Bytes of its weights, and of them on a GPU.
    size: int
    size_vram: int
    context_length: int
    #: Seconds since 1970 at which it is unloaded; None: never.
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """All that a client may ask about a model."""

    entry: ListedEntry
    template: str
    #: Default sampling parameters by Ollama's names, and stop texts.
    parameters: list[tuple[str, Any]]
    capabilities: list[str]
    #: Longest prompt and answer together, in tokens, if it is loaded.
    context_length: int | None = None


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that is loaded for a request."""

    service: ServerState
    #: The name that the server's other routes know.
    name: str
    #: Nanoseconds that loading took.
    load_duration: int = 0
    #: Default system prompt and stop texts.
    system: str = ""
    stop: tuple[str, ...] = ()


class ModelDirectory(ABC):
    """The models of a server. Names come with or without the tag ``latest``; unknown ones are 404 (``not_found``)."""

    @abstractmethod
    async def list_models(self) -> list[ListedEntry]:
        """All models that there are."""

    @abstractmethod
    async def list_loaded(self) -> list[LoadedEntry]:
        """Those that are in memory."""

    @abstractmethod
    async def describe(self, name: str) -> Description: ...

    @abstractmethod
    async def open(self, name: str, keep_alive: float | None) -> OpenModel:
        """The model for a request, which loads it if need be.

        ``keep_alive``: seconds that it stays loaded after the request; negative: for ever; None: the default.
        """

    @abstractmethod
    async def unload(self, name: str) -> bool:
        """Unloads the model once no request uses it; false: it stays loaded."""

    @abstractmethod
    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Downloads a model, unless it is there."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Removes a model's files, or an alias."""

    @abstractmethod
    async def copy(self, source: str, destination: str) -> None:
        """Makes ``destination`` another name of a model."""


def directory_of(request: Request) -> ModelDirectory:
    """The server's directory; by default that of its one model."""
    state = request.app.state
    if not hasattr(state, "directory"):
        state.directory = OneModelDirectory(state_of(request)) if state.models is None else state.make_directory()
    directory: ModelDirectory = state.directory
    return directory


@dataclass(slots=True)
class OneModelDirectory(ModelDirectory):
    """The served model, its adapters and aliases; with ``allow_pull`` also the models on this machine, which are not
    loaded: clients would offer them, so without it they are not listed.

    The model stays loaded as long as the server runs, so ``keep_alive`` has no effect.
    """

    service: ServerState
    #: The served model's files, once they were looked for; None: they were not found.
    _served: list[CatalogModel | None] = field(default_factory=list)
    _aliases: set[str] = field(default_factory=set)
    _pulls: Pulls = field(default_factory=lambda: Pulls())

    @property
    def _names(self) -> list[str]:
        adapters = [adapter.name for adapter in self.service.llm.adapters]
        return [*self.service.model_names, *adapters]

    def _known(self, name: str) -> str | None:
        """The served name that is meant, or None."""
        names = self._names
        return name if name in names else bare(name) if bare(name) in names else None

    async def open(self, name: str, keep_alive: float | None) -> OpenModel:
        served = self._known(name)
        if served is None:
            if self.service.resolver is None:
                raise await self._not_served(name)
            served = bare(name)  # a resolver may load an adapter of this name
            try:
                await self.service.model(served)
            except ApiError:
                raise await self._not_served(name) from None
        self.service.check_running()
        model = await self._files()
        return OpenModel(
            self.service, served, 0, "" if model is None else model.system, () if model is None else model.stop
        )

    async def _not_served(self, name: str) -> ApiError:
        names, others = self._names, await self._others()
        if any(bare(name) == bare(model.name) for model in others):
            return not_found(name, f"it is on this machine, but this server serves {', '.join(names)}")
        return not_found(name, did_you_mean(bare(name), names, f"this server serves {', '.join(names)}", cutoff=0.5))

    async def _others(self) -> Sequence[CatalogModel]:
        """The models on this machine, if clients may know of them."""
        return await asyncio.to_thread(model_catalog.list_models) if self.service.options.allow_pull else ()

    async def _files(self) -> CatalogModel | None:
        if not self._served:
            config = self.service.llm.config

            def find() -> CatalogModel | None:
                try:
                    return model_catalog.find_model(config.model, config.revision)
                except OctavoError:
                    return None

            self._served.append(await asyncio.to_thread(find))
        return self._served[0]

    async def _served_entry(self, name: str) -> ListedEntry:
        model = await self._files()
        if model is None:  # removed since the start
            config = self.service.llm.config
            model = missing_model(config.model, self.service.created)
        facts = await asyncio.to_thread(facts_of, model)
        return ListedEntry(tagged(name), model, facts)

    async def list_models(self) -> list[ListedEntry]:
        entries = [await self._served_entry(name) for name in self._names]
        there = {entry.name for entry in entries}
        digests = {entry.model.digest for entry in entries}
        others = [m for m in await self._others() if m.digest not in digests and tagged(m.name) not in there]
        facts = await asyncio.to_thread(lambda: list(map(facts_of, others)))
        return [*entries, *(ListedEntry(tagged(m.name), m, f) for m, f in zip(others, facts, strict=True))]

    async def list_loaded(self) -> list[LoadedEntry]:
        llm = self.service.llm
        if llm.is_sleeping:
            return []
        entry = await self._served_entry(self.service.model_names[0])
        size = entry.model.size
        return [LoadedEntry(entry, size, size if llm.config.device == "cuda" else 0, llm.max_model_len)]

    async def describe(self, name: str) -> Description:
        served, service = self._known(name), self.service
        if served is None:
            models = await self._others()
            for model in models:
                if bare(model.name) == bare(name):
                    facts = await asyncio.to_thread(facts_of, model)
                    return describe_files(ListedEntry(tagged(model.name), model, facts), service.formats)
            names = [*self._names, *(model.name for model in models)]
            raise not_found(name, did_you_mean(bare(name), names, f"there is {', '.join(names)}", cutoff=0.5))
        entry = await self._served_entry(served)
        return describe_served(service, entry)

    async def unload(self, name: str) -> bool:
        if self._known(name) is None:
            raise await self._not_served(name)
        return False

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        check_may_change(self.service.options)
        if self._known(name) is not None:
            yield PullProgress("success")
            return
        async with aclosing(self._pulls.run(bare(name))) as steps:
            async for progress in steps:
                yield progress

    async def delete(self, name: str) -> None:
        check_may_change(self.service.options)
        served = self._known(name)
        if served is not None and served in self._aliases:
            self._aliases.discard(served)
            self.service.model_names.remove(served)
            return
        if served is not None:
            raise ApiError(400, f"model {name!r} is served now and stays", code="model_in_use")
        model = await self._files()
        if model is not None and bare(model.name) == bare(name):
            raise ApiError(400, f"model {name!r} is served now and stays", code="model_in_use")
        await remove_files(bare(name))

    async def copy(self, source: str, destination: str) -> None:
        check_may_change(self.service.options)
        if self._known(source) is None:
            raise await self._not_served(source)
        name = bare(destination)
        if self._known(name) is not None:
            raise ApiError(400, f"model {destination!r} already exists", param="destination", code="name_taken")
        if len(self._aliases) >= MAX_ALIASES:
            raise ApiError(400, f"there are {MAX_ALIASES} aliases already; delete one", code="too_many_aliases")
        if self._known(source) not in self.service.model_names:
            raise ApiError(400, "an adapter has one name", param="source", code="cannot_copy")
        self._aliases.add(name)
        self.service.model_names.append(name)
        self.service.llm.adapters.reserved += [name]


@dataclass(slots=True)
class Pulls:
    """Downloads that clients have asked for."""

    _number: int = 0

    async def run(self, name: str) -> AsyncGenerator[PullProgress, None]:
        if self._number >= MAX_PULLS:
            raise ApiError(
                429, f"{MAX_PULLS} downloads run; try again later", kind="rate_limit_error", code="pulls_full"
            )
        stop = threading.Event()
        steps = model_catalog.pull(name, stop)
        self._number += 1
        try:
            while (progress := await asyncio.to_thread(next, steps, None)) is not None:
                yield progress
        except ModelNotFoundError as e:
            raise ApiError(404, str(e), code="model_not_found") from None
        except OctavoError as e:
            raise ApiError(502, str(e), kind="server_error", code="pull_failed") from None
        finally:
            self._number -= 1
            stop.set()


async def remove_files(name: str) -> None:
    """Removes a model from a cache."""
    try:
        await asyncio.to_thread(model_catalog.remove, name)
    except ModelNotFoundError as e:
        raise ApiError(404, str(e), param="model", code="model_not_found") from None
    except OctavoError as e:
        raise ApiError(400, str(e), code="cannot_delete") from None


def check_may_change(options: ServerOptions) -> None:
    if not options.allow_pull:
        message = "this server's models are not changed by clients: it was started without --allow-pull"
        raise ApiError(403, message, kind="permission_error", code="pull_not_allowed")


def facts_of(model: CatalogModel) -> ModelFacts | None:
    try:
        return model.facts()
    except (OctavoError, OSError):
        return None


def missing_model(name: str, created: int) -> CatalogModel:
    """A model whose files are not here."""
    return CatalogModel(name, "served", _NOWHERE, 0, float(created), "0" * 64)


def describe_served(service: ServerState, entry: ListedEntry) -> Description:
    """A model that is loaded."""
    template = service.llm.tokenizer.chat_templates.get("default") or ""
    defaults = service.llm.inputs.default_sampling
    names_here = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    parameters = [(names_here.get(key, key), int(value) if key == "max_tokens" else value)
                  for key, value in defaults.items()]  # fmt: skip
    parameters += [("stop", text) for text in entry.model.stop]
    return Description(entry, template, parameters, capabilities_of(service), service.llm.max_model_len)


def describe_files(entry: ListedEntry, formats: ChatFormats) -> Description:
    """A model that is not loaded."""
    facts = entry.facts
    template = (facts and facts.chat_template) or ""
    capabilities = _capabilities_of_files(facts, formats)
    stops: list[tuple[str, Any]] = [("stop", text) for text in entry.model.stop]
    return Description(entry, template, stops, capabilities)


# What models can do, in Ollama's words.


def capabilities_of(service: ServerState) -> list[str]:
    """Of the served model."""
    llm = service.llm
    found = []
    if "generate" in service.tasks:
        found.append("completion")
        template = llm.tokenizer.chat_templates.get("default") or ""
        found += _capabilities_of_template(template, service.formats)
        if llm.tokenizer.fill_in_middle is not None:
            found.append("insert")
    if service.images.are_seen:
        found.append("vision")
    if "embed" in service.tasks and "generate" not in service.tasks:
        found.append("embedding")
    return found


def _capabilities_of_files(facts: ModelFacts | None, formats: ChatFormats) -> list[str]:
    if facts is not None and facts.has_vectors:
        return ["embedding"]
    return ["completion", *_capabilities_of_template((facts and facts.chat_template) or "", formats)]


def _capabilities_of_template(template: str, formats: ChatFormats) -> list[str]:
    if not template:
        return []
    try:
        variables = template_variables(template)
    except OctavoError:
        return []
    found = []
    if formats.tool_parser(template, variables) is not None:
        found.append("tools")
    if formats.reasoning_parser(template) is not None or variables & set(THINKING_VARIABLES):
        found.append("thinking")
    return found
