"""Routes that free the engine's memory for a while; only with ``enable_admin_routes``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request

from octavo.core.errors import ConfigError, EngineDeadError, OctavoError
from octavo.server.api_errors import ApiError
from octavo.server.protocol_admin import Sleeping
from octavo.server.service import operator_service, service_of


async def sleep(request: Request, level: int = 1) -> Sleeping:
    """Frees memory until ``/wake_up``; requests are answered 503 meanwhile.

    Level 1 keeps the weights at hand and frees the KV cache, level 2 drops the weights too, to be read again.
    """
    service = operator_service(request)
    if level not in (1, 2):
        raise ApiError(400, f"level must be 1 or 2, not {level}", param="level", code="invalid_value")
    try:
        await service.llm.sleep(level)
    except EngineDeadError:
        raise
    except OctavoError as e:  # requests are unfinished, or the weights cannot move
        raise ApiError(409, str(e), code="cannot_sleep") from None
    return Sleeping(is_sleeping=service.llm.is_sleeping)


async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Sleeping:
    """Restores weights and KV cache, or what ``tags`` name of them: it sleeps until both are there.

    Nothing happens if the engine is not sleeping.
    """
    service = operator_service(request)
    try:
        await service.llm.wake_up(tags)
    except ConfigError as e:
        raise ApiError(400, str(e), param="tags", code="invalid_value") from None
    return Sleeping(is_sleeping=service.llm.is_sleeping)


async def is_sleeping(request: Request) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=service_of(request).llm.is_sleeping)
