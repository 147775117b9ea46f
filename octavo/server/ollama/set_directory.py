"""The models of a server that has several, for Ollama's routes: there ``keep_alive``, loads and unloads are real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from octavo.core.errors import OctavoError
from octavo.engine import model_catalog
from octavo.engine.model_catalog import CatalogModel, PullProgress
from octavo.server.answer_format import ChatFormats
from octavo.server.http.errors import ApiError
from octavo.server.model_set import ModelSet, Slot
from octavo.server.ollama.directory import (
    MAX_ALIASES,
    Description,
    ListedEntry,
    LoadedEntry,
    ModelDirectory,
    OpenModel,
    Pulls,
    bare,
    check_may_change,
    describe_files,
    describe_served,
    facts_of,
    missing_model,
    remove_files,
    tagged,
)


@dataclass(slots=True)
class SetDirectory(ModelDirectory):
    """The models of a ``ModelSet``; with ``allow_pull`` also the others on this machine, which a request adds."""

    models: ModelSet
    _pulls: Pulls = field(default_factory=Pulls)

    def _slot(self, name: str) -> Slot:
        slot = self.models.known(name)
        if slot is None:
            raise self.models.not_found(name)
        return slot

    async def _entry(self, slot: Slot, name: str | None = None) -> ListedEntry:
        config = slot.model.config

        def read() -> ListedEntry:
            model: CatalogModel | None = None
            try:
                if model_catalog.is_here(config.model):
                    model = model_catalog.find_model(config.model, config.revision)
            except OctavoError:
                pass
            model = model or missing_model(config.model, slot.created)
            return ListedEntry(tagged(name or slot.name), model, facts_of(model))

        return await asyncio.to_thread(read)

    async def list_models(self) -> list[ListedEntry]:
        models = self.models
        entries = [await self._entry(slot, name) for slot in models.slots for name in models.names_of(slot)]
        if models.options.allow_pull:
            there = {entry.model.digest for entry in entries} | {entry.name for entry in entries}

            def others() -> list[ListedEntry]:
                found = model_catalog.list_models()
                new = [model for model in found if not {model.digest, tagged(model.name)} & there]
                return [ListedEntry(tagged(model.name), model, facts_of(model)) for model in new]

            entries += await asyncio.to_thread(others)
        return entries

    async def list_loaded(self) -> list[LoadedEntry]:
        found = []
        for slot in self.models.slots:
            if (service := slot.service) is not None:
                left, on_gpu = self.models.expires(slot), service.llm.config.device == "cuda"
                found.append(
                    LoadedEntry(
                        entry=await self._entry(slot),
                        size=slot.need,
                        size_vram=slot.need if on_gpu else 0,
                        context_length=service.max_model_len,
                        expires=None if left is None else time.time() + left,
                    )
                )
        return found

    async def describe(self, name: str) -> Description:
        slot = self._slot(name)
        entry = await self._entry(slot, bare(name))
        if slot.service is not None:
            return describe_served(slot.service, entry)
        options = self.models.options
        return describe_files(entry, ChatFormats(options.tool_call_parser, options.reasoning_parser))

    async def open(self, name: str, keep_alive: float | None) -> OpenModel:
        """The request that calls it has loaded the model and keeps it (``ModelSet.answer``)."""
        slot = self._slot(name)
        assert slot.service is not None
        if keep_alive is not None:
            slot.keep_alive = None if keep_alive < 0 else keep_alive
        model = (await self._entry(slot)).model
        served = name if slot.service.llm.adapters.get(name) is not None else bare(name)
        return OpenModel(slot.service, served, system=model.system, stop=model.stop)

    async def unload(self, name: str) -> bool:
        """The last of its requests, of which this is one, unloads it."""
        slot = self._slot(name)
        slot.keep_alive = 0.0
        return not slot.model.pinned

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        check_may_change(self.models.options)
        source = bare(name)
        if (slot := self.models.known(name)) is not None:
            source = slot.model.config.model
            if await asyncio.to_thread(model_catalog.is_here, source):
                yield PullProgress("success")
                return
        async with aclosing(self._pulls.run(source)) as steps:
            async for progress in steps:
                yield progress

    async def delete(self, name: str) -> None:
        check_may_change(self.models.options)
        slot = self.models.known(name)
        if bare(name) in self.models.aliases:
            self.models.remove_alias(bare(name))
        elif slot is None:
            await remove_files(bare(name))
        elif slot.holds_memory or slot.users:
            raise ApiError(400, f"model {name!r} is in use and stays", code="model_in_use")
        else:
            await remove_files(slot.model.config.model)
            self.models.remove(slot)

    async def copy(self, source: str, destination: str) -> None:
        check_may_change(self.models.options)
        slot, name = self._slot(source), bare(destination)
        if self.models.known(name) is not None:
            raise ApiError(400, f"model {destination!r} already exists", param="destination", code="name_taken")
        if len(self.models.aliases) >= MAX_ALIASES:
            raise ApiError(400, f"there are {MAX_ALIASES} aliases already; delete one", code="too_many_aliases")
        self.models.add_alias(name, slot)
