"""A request of the Responses API as the internal chat request."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from typing import Any

from starlette.requests import Request

from octavo.server.api_errors import ApiError
from octavo.server.body_parts import BodyPart, entries, not_supported, wrong
from octavo.server.chat_request import Chat, start_chat
from octavo.server.fields import Unsupported
from octavo.server.large_bodies import beside_loop
from octavo.server.protocol import ChatCompletionRequest
from octavo.server.renamed_chat import renamed_errors
from octavo.server.responses.items import Message, messages_of
from octavo.server.responses.response_protocol import ResponsesRequest
from octavo.server.sampling_fields import SamplingFields
from octavo.server.service import Service

#: Fields that a chat has too, with the same meaning.
_SHARED = ("model", "parallel_tool_calls", "stream", "user", "stop", *SamplingFields.model_fields)
#: Fields of a chat by their names here; errors about a chat are told under these.
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
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
#: Fields of this route that are refused.
UNSUPPORTED = {
    "background": Unsupported("a response is generated while its request is open", (False,)),
    "conversation": Unsupported("previous_response_id continues a response that is kept"),
    "context_management": Unsupported("truncation leaves out the oldest messages", ([],)),
    "prompt": Unsupported("there are no stored prompts; write it as instructions and input"),
}
#: Accepted with any value: it bounds calls of built-in tools, of which there are none.
HARMLESS = frozenset({"max_tool_calls"})


def chat_body(body: ResponsesRequest, messages: list[Message]) -> dict[str, Any]:
    """Fields of the chat that a request asks for.

    Args:
        body: the request; its unknown fields have been refused.
        messages: the conversation, the instructions included.

    Raises:
        ApiError: 400, naming what is malformed or not supported.
    """
    chat: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    chat |= {"messages": messages, "max_completion_tokens": body.max_output_tokens, "n": 1}
    if body.include is not None:
        for name in body.include:
            if name not in INCLUDABLE:
                raise not_supported("include", f"{name[:100]!r} is unknown here")
    if body.include is not None and LOGPROBS in body.include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        raise wrong("top_logprobs", f"it needs include with {LOGPROBS!r}")
    chat |= _text(body) | _reasoning(body) | _tools(body)
    _check_stream_options(body)
    return chat


def conversation(body: ResponsesRequest, items: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[Message]:
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


async def start(service: Service, request: Request, body: ResponsesRequest, messages: list[Message]) -> Chat:
    """The chat in the engine; with ``truncation`` without the oldest messages that the context has no room for.

    Raises:
        ApiError: it cannot be served; the message and ``param`` name fields of this route.
    """
    head = 1 if messages and messages[0]["role"] == "system" else 0
    # Where what remains may begin: not with the output of a call that is left out.
    cuts = [i for i in range(head, len(messages)) if i == head or messages[i]["role"] != "tool"] or [head]

    async def without(cut: int) -> Chat:
        kept = messages[:head] + messages[cut:]
        fields = chat_body(body, kept)
        with renamed_errors(RENAMED):
            chat = await beside_loop(request, ChatCompletionRequest.model_validate, fields)
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
    service: Service, body: ResponsesRequest, messages: list[Message], head: int, cuts: list[int]
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
    return "".join(str(message[name]) for name in ("content", "tool_calls") if message.get(name))


def _text(body: ResponsesRequest) -> dict[str, Any]:
    if body.text is None:
        return {}
    text = BodyPart("text", body.text)
    found: dict[str, Any] = {}
    if (verbosity := text.take("verbosity", str, None)) is not None:
        found["verbosity"] = verbosity
    if (given := text.take("format", dict, None)) is not None:
        form = BodyPart("text.format", given)
        kind = form.choice("type", ("text", "json_object", "json_schema"))
        found["response_format"] = {"type": kind}
        if kind == "json_schema":
            schema: dict[str, Any] = {"name": form.take("name", str), "schema": form.take("schema", dict)}
            schema |= {"strict": form.take("strict", bool, None), "description": form.take("description", str, None)}
            found["response_format"]["json_schema"] = {k: v for k, v in schema.items() if v is not None}
        form.refuse_rest()
    text.refuse_rest()
    return found


def _reasoning(body: ResponsesRequest) -> dict[str, Any]:
    if body.reasoning is None:
        return {}
    reasoning = BodyPart("reasoning", body.reasoning)
    effort = reasoning.take("effort", str, None)
    for name in ("summary", "generate_summary"):
        if (wanted := reasoning.take(name, str, "auto")) != "auto":
            raise not_supported(reasoning.at(name), f"reasoning comes whole; a summary {wanted[:20]!r} is not made")
    reasoning.refuse_rest()
    return {} if effort is None else {"reasoning_effort": effort}


def _tools(body: ResponsesRequest) -> dict[str, Any]:
    """Tools and the choice among them, in the notation of chats."""
    tools: list[dict[str, Any]] = []
    for tool in entries("tools", body.tools or []):
        kind = tool.take("type", str)
        if kind != "function":
            raise not_supported(tool.where, f"its type is {kind[:100]!r}; only functions of the client can be called")
        function: dict[str, Any] = {"name": tool.take("name", str), "parameters": tool.take("parameters", dict, None)}
        function |= {"description": tool.take("description", str, None), "strict": tool.take("strict", bool, None)}
        if (callers := tool.take("allowed_callers", list, ["direct"])) != ["direct"]:
            raise not_supported(tool.at("allowed_callers"), f"tools are called by the model, not by {callers!r:.100}")
        tool.refuse_rest()
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    choice: Any = body.tool_choice
    if isinstance(choice, dict):
        wanted = BodyPart("tool_choice", choice)
        kind = wanted.take("type", str)
        if kind == "function":
            choice = {"type": "function", "function": {"name": wanted.take("name", str)}}
        elif kind == "allowed_tools":
            choice = wanted.choice("mode", ("auto", "required"))
            names = [_allowed(tool) for tool in entries("tool_choice.tools", wanted.take("tools", list))]
            known = [tool["function"]["name"] for tool in tools]
            if missing := [name for name in names if name not in known]:
                raise wrong("tool_choice.tools", f"there is no tool {missing[0][:100]!r} among tools")
            tools = [tool for tool in tools if tool["function"]["name"] in names]
        else:
            raise not_supported("tool_choice", f"its type is {kind[:100]!r}; no tools are built in here")
        wanted.refuse_rest()
    found: dict[str, Any] = {"tools": tools} if tools else {}
    return found if choice is None else {**found, "tool_choice": choice}


def _allowed(tool: BodyPart) -> str:
    kind = tool.take("type", str)
    if kind != "function":
        raise not_supported(tool.where, f"its type is {kind[:100]!r}; only functions of the client can be called")
    name = tool.take("name", str)
    tool.refuse_rest()
    return name


def _check_stream_options(body: ResponsesRequest) -> None:
    if body.stream_options is not None:
        if not body.stream:
            raise wrong("stream_options", "it is allowed only with stream=true")
        BodyPart("stream_options", body.stream_options).refuse_rest("include_obfuscation")
