"""Routes by which an operator holds prefixes in the prefix cache for a time, releases them, and sees them."""

from __future__ import annotations

import logging
import time
from typing import Annotated, Literal
from uuid import uuid4

from pydantic import Field
from starlette.requests import Request

from octavo.core.cache_hints import ANTHROPIC_SECONDS, RETENTION_SECONDS
from octavo.core.errors import ConfigError
from octavo.core.request import TokensPrompt
from octavo.core.stats import RetentionStats
from octavo.engine.front_end import SharedPrefix
from octavo.server.fields import Name, RequestModel, ResponseModel
from octavo.server.http.errors import ApiError, unsupported
from octavo.server.http.streaming import with_cancellation
from octavo.server.openai.protocol import ChatMessage, TemplateOptions, TokenIds
from octavo.server.prompt_inputs import encode, write_conversation
from octavo.server.state import ServerState, operator_state, state_of

logger = logging.getLogger("octavo.server")

#: The longest time to hold a prefix: a week, in seconds.
MAX_SECONDS = 7 * 86400
_SECONDS = {**ANTHROPIC_SECONDS, "24h": RETENTION_SECONDS["24h"]}


class PinRequest(TemplateOptions):
    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: str | TokenIds | None = Field(None, description="The beginning of later prompts: a text or token ids.")
    messages: list[ChatMessage] | None = Field(
        None, description="The beginning of later conversations, which the chat template renders."
    )
    ttl: Literal["5m", "1h", "24h"] | Annotated[int, Field(ge=1, le=MAX_SECONDS)] = Field(
        description="How long it is held: 5m, 1h, 24h, or seconds."
    )
    add_special_tokens: bool | None = Field(None, description="Add special tokens to a text (default true).")


class ReleaseRequest(RequestModel):
    id: Name = Field(description="The id that /v1/cache/pin gave.")


class Pin(ResponseModel):
    """A prefix that the prefix cache holds."""

    id: str
    object: Literal["cache.pin"]
    tokens: int = Field(description="Its length.")
    held_tokens: int = Field(description="Tokens of its full blocks, which are held.")
    expires_at: int | None = Field(description="Seconds since 1970; null: pinned by the option shared_prefix.")


class Released(ResponseModel):
    id: str
    released: Literal[True]


class CacheState(ResponseModel):
    """The prefixes of operators, and what all callers together hold now."""

    object: Literal["list"]
    data: list[Pin]
    held_blocks: int = Field(description="Blocks, over all replicas, that are evicted after all others.")
    holdings: int = Field(description="Prefixes that are held, those of clients included.")
    expired: int = Field(description="Prefixes whose time has come, since the start.")
    released: int
    displaced: int = Field(description="Prefixes that gave way, as the share of the client or of all was used up.")


async def pin(request: Request, body: PinRequest) -> Pin:
    """Computes a prefix, if it is not cached, and holds it in the prefix cache of each replica until its time comes."""
    service = operator_state(request)
    model = await service.model(body.model)
    if model.adapter is not None:
        raise unsupported("model", "is an adapter: prefixes are held for the base model")
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        if body.add_generation_prompt is None:
            body.add_generation_prompt = False  # later conversations go on instead
        text = await write_conversation(service, request, body.messages, body)
        [ids] = await encode(service, [text], body.add_special_tokens is True, param="messages")
    elif isinstance(body.prompt, str):
        [ids] = await encode(service, [body.prompt], body.add_special_tokens is not False)
    else:
        ids = body.prompt or []
    seconds = float(_SECONDS[body.ttl] if isinstance(body.ttl, str) else body.ttl)
    adding = service.llm.add_shared_prefix(TokensPrompt(prompt_token_ids=ids), f"pin-{uuid4().hex}", seconds)
    try:
        name = await with_cancellation(request.receive, adding, service.deadline())
    except ConfigError as e:  # there is no prefix cache, or no room
        raise ApiError(409, str(e), code="cannot_pin") from None
    [added] = [prefix for prefix in service.llm.shared_prefixes() if prefix.name == name]
    logger.info("prefix %s of %d tokens is held for %g s", name, len(ids), seconds)
    return _pin(service, added)


async def release(request: Request, body: ReleaseRequest) -> Released:
    """Ends the holding of a prefix: its blocks are evicted before all others."""
    service = operator_state(request)
    if all(prefix.name != body.id or prefix.expires is None for prefix in service.llm.shared_prefixes()):
        raise ApiError(404, f"there is no held prefix {body.id!r}: it was released, or its time has come", param="id")
    await service.llm.remove_shared_prefix(body.id)
    logger.info("prefix %s is released", body.id)
    return Released(id=body.id, released=True)


async def list_cache(request: Request) -> CacheState:
    """The prefixes that operators hold, and numbers of those that clients hold."""
    service = state_of(request)
    stats = (await service.llm.stats()).retention or RetentionStats()
    return CacheState(
        object="list",
        data=[_pin(service, prefix) for prefix in service.llm.shared_prefixes()],
        held_blocks=stats.held_blocks,
        holdings=stats.holdings,
        expired=stats.expired,
        released=stats.released,
        displaced=stats.displaced,
    )


def _pin(service: ServerState, prefix: SharedPrefix) -> Pin:
    count, size = len(prefix.token_ids), service.llm.config.block_size
    expires = None if prefix.expires is None else round(time.time() + prefix.expires - time.monotonic())
    held = count if expires is None else count // size * size
    return Pin(id=prefix.name, object="cache.pin", tokens=count, held_tokens=held, expires_at=expires)
