"""The routes under ``/v1/responses`` about what the model reads: its tokens, and the items of a kept response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.requests import Request

from octavo.server.api_errors import wrong
from octavo.server.chat_prompt import make_chat_prompt
from octavo.server.chat_tokens import chat_tokens
from octavo.server.large_bodies import beside_loop
from octavo.server.middleware import owner_of
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.renamed_chat import renamed_errors
from octavo.server.request_models import read_model
from octavo.server.responses import response_request as chats
from octavo.server.responses.response_input import read_input
from octavo.server.responses.response_parts import (
    CallOutputParam,
    Content,
    CustomCallParam,
    FunctionCallParam,
    ImageInputPart,
    InputItem,
    InputPart,
    MessageItem,
    ReasoningParam,
)
from octavo.server.responses.response_protocol import InputTokens, InputTokensRequest, ItemList
from octavo.server.service import service_of
from octavo.server.tools import read_tools


async def count_input_tokens(request: Request, body: InputTokensRequest) -> InputTokens:
    """Tokens of an input, as the model's template writes it; with ``truncation`` of what the model would read."""
    service = service_of(request)
    await service.model(body.model)
    given = await read_input(service, request, body)
    if body.truncation == "auto":
        chat = await chats.start(service, request, body, given.messages, given.tools)
        token_ids = chat.generation.prompts[0]["prompt_token_ids"]
    else:
        fields = chats.chat_body(body, given.messages, given.tools)
        with renamed_errors(chats.RENAMED):
            said = await beside_loop(request, read_model, ChatCompletionRequest, fields, service)
            prompt = await make_chat_prompt(service, request, said, read_tools(said.tools, said.tool_choice))
            tokens = await chat_tokens(service, request, said, prompt.text)
            token_ids = tokens["prompt_token_ids"]
    return InputTokens(object="response.input_tokens", input_tokens=len(token_ids))


async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> ItemList:
    """What a response that is kept was made of: items of its input, and of the responses that it continues."""
    items = service_of(request).responses.get(response_id, owner_of(request)).input_items
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        places = [i for i, item in enumerate(items) if getattr(item, "id", None) == after]
        if not places:
            raise wrong("after", f"the response has no input item {after[:100]!r}")
        start = places[0] + 1
    page = [_listed(item) for item in items[start : start + limit]]
    ids = [item["id"] for item in page]
    return ItemList(
        object="list",
        data=page,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=start + limit < len(items),
    )


def _listed(item: InputItem) -> dict[str, Any]:
    """An item as the API lists it, with all its fields and its texts in parts."""
    status = getattr(item, "status", None)
    status = status if status in ("in_progress", "incomplete") else "completed"
    shown: dict[str, Any] = {"id": getattr(item, "id", None), "type": item.type, "status": status}
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        shown |= {"type": "message", "role": item.role, "content": _parts(item.content, kind)}
    elif isinstance(item, FunctionCallParam | CustomCallParam):
        shown |= item.model_dump(include={"call_id", "name", "namespace", "arguments", "input"}, exclude_none=True)
    elif isinstance(item, CallOutputParam):
        output = item.output if isinstance(item.output, str) else _parts(item.output, "input_text")
        shown |= {"call_id": item.call_id, "output": output}
    elif isinstance(item, ReasoningParam):
        shown["summary"] = [{"type": "summary_text", "text": part.text} for part in item.summary or []]
        shown["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content or []]
    return shown


def _parts(content: Content, kind: str) -> list[dict[str, Any]]:
    """A content as parts, those of text of one kind."""
    parts = [InputPart(type="text", text=content)] if isinstance(content, str) else content
    return [_part(part, kind) for part in parts]


def _part(part: InputPart | ImageInputPart, kind: str) -> dict[str, Any]:
    if isinstance(part, ImageInputPart):
        return {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto", "file_id": None}
    return {"type": kind, "text": part.text, **({"annotations": []} if kind == "output_text" else {})}
