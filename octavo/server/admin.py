"""Routes that free the engine's memory for a while, or start its replicas again; only with ``enable_admin_routes``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.requests import Request

from octavo.core.errors import ConfigError, EngineDeadError, EngineStateError, OctavoError
from octavo.server.api_errors import ApiError, invalid, server_error
from octavo.server.protocol_admin import Replicas, ReplicaStatus, Sleeping
from octavo.server.service import Service, operator_service, service_of


async def sleep(request: Request, level: int = 1) -> Sleeping:
    """Frees memory until ``/wake_up``; requests are answered 503 meanwhile.

    Level 1 keeps the weights at hand and frees the KV cache, level 2 drops the weights too, to be read again.
    """
    service = operator_service(request)
    if level not in (1, 2):
        raise invalid("level", f"level must be 1 or 2, not {level}")
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
        raise invalid("tags", str(e)) from None
    return Sleeping(is_sleeping=service.llm.is_sleeping)


async def is_sleeping(request: Request) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=service_of(request).llm.is_sleeping)


async def replicas(request: Request) -> Replicas:
    """The engine's replicas: which of them take requests, and how many each has."""
    return _replicas(service_of(request))


async def drain(request: Request, replica: int) -> Replicas:
    """Has a replica take no more requests; the others go on with those that it has, and no stream breaks."""
    service = operator_service(request)
    try:
        await service.llm.drain_replica(replica)
    except ConfigError as e:
        raise invalid("replica", str(e)) from None
    except EngineStateError as e:
        raise ApiError(409, str(e), code="cannot_drain") from None
    return _replicas(service)


async def undrain(request: Request, replica: int) -> Replicas:
    """Has a drained replica take requests again. Nothing happens if it does."""
    service = operator_service(request)
    try:
        await service.llm.undrain_replica(replica)
    except ConfigError as e:
        raise invalid("replica", str(e)) from None
    return _replicas(service)


async def restart(request: Request) -> Replicas:
    """Starts the engine core of each replica again, one after the other, with the model's files as they are now.

    No stream breaks: requests go on at the other replicas, or wait for a new core if there is no other. The answer
    comes when it is done.
    """
    service = operator_service(request)
    try:
        await service.llm.restart_replicas()
    except (ConfigError, EngineStateError) as e:
        raise ApiError(409, str(e), code="cannot_restart") from None
    except OctavoError as e:
        service.llm.check_alive()
        raise server_error(503, str(e), "restart_failed") from None
    return _replicas(service)


def _replicas(service: Service) -> Replicas:
    return Replicas(
        replicas=[
            ReplicaStatus(replica=s.number, status=s.status, open_requests=s.num_open, restarts=s.num_restarts)
            for s in service.llm.replica_states()
        ]
    )
