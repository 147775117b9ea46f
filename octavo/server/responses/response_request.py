"""A request of the Responses API as the internal chat request."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from typing import Any

from starlette.requests import Request

from octavo.server.api_errors import ApiError, unsupported, wrong
from octavo.server.chat_request import Chat, start_chat
from octavo.server.large_bodies import beside_loop
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.renamed_chat import renamed_errors
from octavo.server.request_models import read_model
from octavo.server.responses.items import Message, messages_of
from octavo.server.responses.response_parts import InputItem, TextFormat
from octavo.server.responses.response_protocol import InputTokensRequest
from octavo.server.responses.response_tools import ResponseTools
from octavo.server.sampling_fields import SamplingFields
from octavo.server.service import Service

#: Fields that a chat has too, with the same meaning.
_SHARED = (
    "model", "parallel_tool_calls", "user", "stop", "chat_template_kwargs", *SamplingFields.model_fields
)  # fmt: skip
#: Fields of a chat by their names here; errors about a chat are told under these.
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
LOGPROBS = "message.output_text.logprobs"
#: Values of ``include``; the others are of tools that do not exist here, and of reasoning, which is sent in plain text.
INCLUDABLE = frozenset(
    {
        LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)  # fmt: skip
#: What a template usually writes around a message, in tokens.
_MESSAGE_TOKENS = 6


def chat_body(body: InputTokensRequest, messages: list[Message], tools: ResponseTools) -> dict[str, Any]:
    """Fields of the chat that a request asks for.

    Args:
        body: the request.
        messages: the conversation, the instructions included.
        tools: those of the request.

    Raises:
        ApiError: 400, naming what is malformed or not supported.
    """
    chat: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    chat |= {"messages": messages, "max_completion_tokens": body.max_output_tokens, "n": 1}
    # One in the background grows too, as it can be asked how far it is.
    chat["stream"] = body.stream is True or body.background is True
    for name in body.include or []:
        if name not in INCLUDABLE:
            raise unsupported("include", f"include is not supported: {name[:100]!r} is unknown here")
    if LOGPROBS in (body.include or []):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "it is allowed only with stream=true")
    return {**chat, **tools.fields}


def conversation(body: InputTokensRequest, items: list[InputItem], earlier: list[InputItem]) -> list[Message]:
    """The messages of a request: its instructions, what it continues, and its input.

    Instructions and system messages at the beginning are one message, as many templates know only one.

    Raises:
        ApiError: 400, naming the item that is malformed or not supported.
    """
    messages = messages_of(items, earlier)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    texts = []
    while messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0]["content"], str):
        texts.append(messages.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages] if texts else messages


async def start(
    service: Service, request: Request, body: InputTokensRequest, messages: list[Message], tools: ResponseTools
) -> Chat:
    """The chat in the engine; with ``truncation`` without the oldest messages that the context has no room for.

    Raises:
        ApiError: it cannot be served; the message and ``param`` name fields of this route.
    """
    head = 1 if messages and messages[0]["role"] == "system" else 0
    # Where what remains may begin: not with the output of a call that is left out.
    cuts = [i for i in range(head, len(messages)) if i == head or messages[i]["role"] != "tool"] or [head]

    async def without(cut: int) -> Chat:
        kept = messages[:head] + messages[cut:]
        fields = chat_body(body, kept, tools)
        with renamed_errors(RENAMED):
            chat = await beside_loop(request, read_model, ChatCompletionRequest, fields, service)
            return await start_chat(service, request, chat, prefix="resp")

    try:
        return await without(head)
    except ApiError as e:
        if e.code != "context_length_exceeded" or body.truncation != "auto" or len(cuts) == 1:
            raise
    # The first that fits is near the first that should: from there in steps that double, then between the last two.
    low, high, step, chat = 1, len(cuts) - 1, 1, None
    probe = min(max(await _likely_cut(service, body, messages, head, cuts), low), high)
    while chat is None or low < high:
        try:
            chat, high = await without(cuts[probe]), probe
            probe -= step
        except ApiError as e:
            if e.code != "context_length_exceeded" or probe == len(cuts) - 1:
                raise
            low = probe + 1
            probe += step
        step *= 2
        if chat is None:
            probe = min(probe, high)
        elif not low <= probe < high:
            probe = (low + high) // 2
    return chat


async def _likely_cut(
    service: Service, body: InputTokensRequest, messages: list[Message], head: int, cuts: list[int]
) -> int:
    """Number of the first cut that should leave no more tokens than there is room for; each text is tokenized once."""
    texts, length = [_written(message) for message in messages[:head]], 0
    for message in reversed(messages[head:]):
        texts.append(_written(message))
        length += len(texts[-1])
        if length > service.max_prompt_chars:  # what is older is left out in any case
            break
    with renamed_errors(RENAMED):
        ids = await asyncio.to_thread(service.llm.tokenizer.encode_batch, texts, False)
    room = service.llm.max_model_len - (body.max_output_tokens or 1)
    used = list(itertools.accumulate(len(tokens) + _MESSAGE_TOKENS for tokens in ids))
    kept = sum(tokens <= room for tokens in used[head:])
    return bisect.bisect_left(cuts, len(messages) - kept)


def _written(message: Message) -> str:
    """About what a template writes of a message."""
    content = message.get("content")
    if isinstance(content, list):  # images are not texts
        content = [part for part in content if part["type"] == "text"]
    return "".join(str(part) for part in (content, message.get("tool_calls")) if part)


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    for name in ("name", "schema_"):
        if getattr(form, name) is None:
            raise wrong(f"text.format.{name.rstrip('_')}", "it is missing")
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict, "description": form.description}
    return {"type": form.type, "json_schema": {name: value for name, value in schema.items() if value is not None}}
