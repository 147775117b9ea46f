"""Routes that load and unload adapters while the server runs; only with ``enable_lora_routes``."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request

from octavo.engine.adapter_folder import allowed_path
from octavo.server.api_errors import ApiError
from octavo.server.cancellation import with_cancellation
from octavo.server.protocol_admin import AdapterStatus, LoadAdapterRequest, UnloadAdapterRequest
from octavo.server.service import operator_service

logger = logging.getLogger("octavo.server")


async def load_adapter(request: Request, body: LoadAdapterRequest) -> AdapterStatus:
    """Loads an adapter from the server's folder, so that requests may name it as their model."""
    service = operator_service(request)
    base = body.base_model_name
    if base is not None and base not in service.model_names:
        names = ", ".join(service.model_names)
        raise ApiError(404, f"the model {base!r} is not served here; served: {names}", param="base_model_name")
    folder = service.options.lora_folder
    assert folder is not None  # checked with the options
    path = await asyncio.to_thread(allowed_path, folder, body.lora_path)
    added = await service.load_adapter(body.lora_name, path, in_place=bool(body.load_inplace))
    return AdapterStatus(lora_name=body.lora_name, status="loaded" if added else "loaded already")


async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> AdapterStatus:
    """Forgets an adapter; while requests use it that is refused, or with ``wait`` done when the last has ended."""
    service = operator_service(request)
    adapter = service.llm.adapters.named(body.lora_name)
    deadline = service.deadline()
    await with_cancellation(request.receive, service.llm.remove_lora(adapter.number, wait=bool(body.wait)), deadline)
    logger.info("adapter %s unloaded", body.lora_name)
    return AdapterStatus(lora_name=body.lora_name, status="unloaded")
