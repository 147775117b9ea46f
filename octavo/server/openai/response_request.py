"""From a request of the Responses API to a chat request: input items, earlier responses, tools, truncation."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import TypeAdapter
from starlette.requests import Request

from octavo.server.answer_format import custom_function
from octavo.server.chat import Chat, num_chat_tokens, prepare_chat
from octavo.server.http.bodies import read_model, run_in_thread_if_large
from octavo.server.http.errors import ApiError, renamed_errors, unsupported, wrong
from octavo.server.http.middleware import owner_of
from octavo.server.openai.protocol import ChatCompletionRequest, SamplingFields
from octavo.server.openai.response_protocol import (
    CallOutputParam,
    Content,
    CustomCallParam,
    CustomTool,
    FunctionCallParam,
    FunctionTool,
    ImageInputPart,
    InputItem,
    InputPart,
    InputTokens,
    InputTokensRequest,
    Item,
    ItemList,
    MessageItem,
    NamedTool,
    Namespace,
    ReasoningParam,
    ToolChoiceParam,
    ToolParam,
)
from octavo.server.state import ServerState, StoredResponse, state_of

Message = dict[str, Any]

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """The tool of the request for which a function of the chat stands."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request."""

    #: The fields ``tools`` and ``tool_choice`` of the chat request, if they are not empty.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: By function name of the chat.
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """The conversation that a response answers."""

    #: The response that it continues.
    earlier: StoredResponse | None
    #: The field ``input``; each item has an id.
    items: list[InputItem]
    #: Bytes of the items as JSON.
    items_size: int
    #: The whole conversation, with the instructions.
    messages: list[Message]
    tools: ResponseTools

    def all_items(self, output: Iterable[InputItem] = ()) -> list[InputItem]:
        """The items of the whole conversation, then those of ``output``."""
        return [*(self.earlier.items if self.earlier else ()), *self.items, *output]

    @property
    def size(self) -> int:
        """Bytes of all items, without an output."""
        return self.items_size + (self.earlier.items_size if self.earlier else 0)


async def read_input(service: ServerState, request: Request, body: InputTokensRequest) -> ResponseInput:
    """Reads the input, the tools and the response that the request continues."""
    earlier = None
    if body.previous_response_id is not None:
        earlier = service.responses.get(body.previous_response_id, owner_of(request))
        if earlier.run is not None and not earlier.run.has_ended:
            raise wrong("previous_response_id", "this response is still in progress")
    before = [] if earlier is None else earlier.items
    items: list[InputItem] = []
    if body.input is not None:
        items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = await run_in_thread_if_large(request, conversation, body, items, before)
    size = await run_in_thread_if_large(request, _assign_ids, items, before)
    tools = read_response_tools(service, body.tools or [], body.tool_choice)
    return ResponseInput(earlier, items, size, messages, tools)


def size_of(items: list[InputItem]) -> int:
    return len(ITEMS.dump_json(items, exclude_unset=True))


#: Beginning of the ids by item type; others are messages.
_PREFIXES = {
    "function_call": "fc", "custom_tool_call": "ctc", "function_call_output": "fco", "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}  # fmt: skip


def _assign_ids(items: list[InputItem], before: list[InputItem]) -> int:
    """Assigns an id to items that have none, or one that another item has; returns the size of the items."""
    taken = {item.id for item in before if isinstance(item, Item)}
    base = uuid.uuid4().hex
    for i, item in enumerate(items):
        assert isinstance(item, Item)  # others were refused
        if not isinstance(item.id, str) or not item.id or item.id in taken:
            item.id = f"{_PREFIXES.get(getattr(item, 'type', None) or '', 'msg')}_{base}{i:05x}"
        taken.add(item.id)
    return size_of(items)


# The chat of a response.

#: Fields of the same name and meaning in a chat request.
_SHARED = (
    "model", "parallel_tool_calls", "user", "stop", "chat_template_kwargs", *SamplingFields.model_fields
)  # fmt: skip
#: Names of chat fields on this route, for errors.
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
LOGPROBS = "message.output_text.logprobs"
#: Values of ``include``. All but ``LOGPROBS`` have no effect: there are no such tools, and reasoning is plain text.
INCLUDABLE = frozenset(
    {
        LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)  # fmt: skip
#: Tokens that a chat template typically adds per message.
_MESSAGE_TOKENS = 6


async def prepare_response_chat(
    service: ServerState, request: Request, body: InputTokensRequest, messages: list[Message], tools: ResponseTools
) -> Chat:
    """Prepares the chat of a response. With ``truncation: auto``, drops the oldest messages that exceed the context."""
    head = 1 if messages and messages[0]["role"] == "system" else 0
    # Where the kept messages may begin: not with the output of a call that was dropped.
    cuts = [i for i in range(head, len(messages)) if i == head or messages[i]["role"] != "tool"] or [head]

    async def prepare(cut: int) -> Chat:
        fields = chat_body(body, messages[:head] + messages[cut:], tools)
        with renamed_errors(RENAMED):
            chat = await run_in_thread_if_large(request, read_model, ChatCompletionRequest, fields, service)
            return await prepare_chat(service, request, chat, prefix="resp")

    try:
        return await prepare(head)
    except ApiError as e:
        if e.code != "context_length_exceeded" or body.truncation != "auto" or len(cuts) == 1:
            raise
    # Searches the first cut that fits from the estimated one: in steps that double, then by bisection.
    low, high, step, chat = 1, len(cuts) - 1, 1, None
    probe = min(max(await _estimate_cut(service, body, messages, head, cuts), low), high)
    while chat is None or low < high:
        try:
            chat, high = await prepare(cuts[probe]), probe
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


async def _estimate_cut(
    service: ServerState, body: InputTokensRequest, messages: list[Message], head: int, cuts: list[int]
) -> int:
    """The index of the first cut whose messages should fit the context; each message is tokenized once."""

    def text_of(message: Message) -> str:
        content = message.get("content")
        if isinstance(content, list):  # without images
            content = [part for part in content if part["type"] == "text"]
        return "".join(str(part) for part in (content, message.get("tool_calls")) if part)

    texts, length = [text_of(message) for message in messages[:head]], 0
    for message in reversed(messages[head:]):
        texts.append(text_of(message))
        length += len(texts[-1])
        if length > service.max_prompt_chars:  # older messages are dropped in any case
            break
    with renamed_errors(RENAMED):
        ids = await asyncio.to_thread(service.llm.tokenizer.encode_batch, texts, False)
    room = service.llm.max_model_len - (body.max_output_tokens or 1)
    used = list(itertools.accumulate(len(tokens) + _MESSAGE_TOKENS for tokens in ids))
    kept = sum(tokens <= room for tokens in used[head:])
    return bisect.bisect_left(cuts, len(messages) - kept)


def chat_body(body: InputTokensRequest, messages: list[Message], tools: ResponseTools) -> dict[str, Any]:
    """The fields of the chat request; ``messages`` are the conversation, with the instructions."""
    chat: dict[str, Any] = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    chat |= {"messages": messages, "max_completion_tokens": body.max_output_tokens, "n": 1}
    # A response in the background streams too: clients may retrieve it half done.
    chat["stream"] = body.stream is True or body.background is True
    for name in body.include or []:
        if name not in INCLUDABLE:
            raise unsupported("include", f"include is not supported: {name[:100]!r} is unknown here")
    if LOGPROBS in (body.include or []):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    text_format = None if body.text is None else body.text.format
    if text_format is not None:
        chat["response_format"] = {"type": text_format.type}
        if text_format.type == "json_schema":
            for name in ("name", "schema_"):
                if getattr(text_format, name) is None:
                    raise wrong(f"text.format.{name.rstrip('_')}", "it is missing")
            schema: dict[str, Any] = {"name": text_format.name, "schema": text_format.schema_}
            schema |= {"strict": text_format.strict, "description": text_format.description}
            chat["response_format"]["json_schema"] = {name: v for name, v in schema.items() if v is not None}
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "it is allowed only with stream=true")
    return {**chat, **tools.fields}


def conversation(body: InputTokensRequest, items: list[InputItem], earlier: list[InputItem]) -> list[Message]:
    """The chat messages of a request: its instructions, the items that it continues, and its input.

    Instructions and leading system messages become one message: many templates accept only one.
    """
    messages = messages_of(items, earlier)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    texts = []
    while messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0]["content"], str):
        texts.append(messages.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages] if texts else messages


def messages_of(items: Sequence[InputItem], earlier: Sequence[InputItem]) -> list[Message]:
    """The chat messages of items; consecutive reasoning, text and tool calls are one message of the assistant."""
    messages: list[Message] = []
    # The assistant's message that the next item may join.
    current: Message | None = None
    call_ids: set[str] = set()

    def begin_message() -> Message:
        messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for name, part in (("previous_response_id", earlier), ("input", items)):
        for i, item in enumerate(part):
            path = f"{name}[{i}]"
            if isinstance(item, MessageItem):
                content = _content(item.content, f"{path}.content")
                if item.role != "assistant":
                    current = None
                    messages.append({"role": item.role, "content": content})
                    continue
                if current is None or current["content"] is not None or "tool_calls" in current:
                    current = begin_message()
                current["content"] = content
            elif isinstance(item, FunctionCallParam | CustomCallParam):
                current = current or begin_message()
                arguments = (
                    item.arguments
                    if isinstance(item, FunctionCallParam)
                    else json.dumps({"input": item.input}, ensure_ascii=False)
                )
                function = {"name": _function_name(item.name, item.namespace), "arguments": arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                current.setdefault("tool_calls", []).append(call)
                call_ids.add(item.call_id)
            elif isinstance(item, CallOutputParam):
                if item.call_id not in call_ids:
                    raise wrong(f"{path}.call_id", f"there is no function call {item.call_id[:100]!r} before it")
                current = None
                output = _content(item.output, f"{path}.output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            elif isinstance(item, ReasoningParam):
                if texts := [part.text for part in item.content or item.summary or []]:  # none: it is encrypted
                    current = begin_message()
                    current["reasoning_content"] = "\n".join(texts)
            elif item.type == "item_reference":
                raise unsupported("input", f"{path} is not supported: previous_response_id continues a stored response")
            else:
                raise unsupported(
                    "input",
                    f"{path} is not supported: its type is {item.type[:100]!r}; there are messages, calls of the "
                    "client's tools and their outputs, and reasoning, but no built-in tools",
                )
    return messages


def _content(value: Content, path: str) -> str | list[Message]:
    """A text, or parts if there are images: templates write nothing between parts."""
    if isinstance(value, str):
        return value
    if all(isinstance(part, InputPart) for part in value):
        return "\n".join(part.text for part in value if isinstance(part, InputPart))
    parts: list[Message] = []
    for i, part in enumerate(value):
        if isinstance(part, InputPart):
            parts.append({"type": "text", "text": part.text})
        elif part.image_url is None:
            raise wrong(f"{path}[{i}].image_url", "it is missing")
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.image_url}})
    return parts


# Tools: functions of the chat stand for functions, custom tools, and those in namespaces.


def read_response_tools(
    service: ServerState, tools: Sequence[ToolParam], choice: str | ToolChoiceParam | None
) -> ResponseTools:
    functions, origins = list[dict[str, Any]](), dict[str, ToolOrigin]()
    for i, entry in enumerate(tools):
        entries: list[tuple[str, Any, str | None]] = [(f"tools[{i}]", entry, None)]
        if isinstance(entry, Namespace):
            entries = [(f"tools[{i}].tools[{k}]", tool, entry.name) for k, tool in enumerate(entry.tools)]
        for path, tool, namespace in entries:
            if not isinstance(tool, FunctionTool | CustomTool):
                service.leave_out_tool(path, tool.type)
                continue
            name = _function_name(tool.name, namespace)
            origins[name] = ToolOrigin(tool.name, namespace, isinstance(tool, CustomTool))
            if isinstance(tool, FunctionTool):
                fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
            else:
                fields = custom_function(tool.description, tool.format)
            function = {"name": name, **{k: value for k, value in fields.items() if value is not None}}
            functions.append({"type": "function", "function": function})
    chosen: Any = choice
    if isinstance(choice, ToolChoiceParam) and choice.type == "allowed_tools":
        allowed = [_chosen_function(tool, origins) for tool in choice.tools or []]
        for name in allowed:
            if name not in origins:
                raise wrong("tool_choice.tools", f"there is no tool {name[:100]!r} among tools")
        functions = [tool for tool in functions if tool["function"]["name"] in allowed]
        chosen = choice.mode or "auto"
    elif isinstance(choice, ToolChoiceParam):
        chosen = {"type": "function", "function": {"name": _chosen_function(choice, origins)}}
    chat = {"tools": functions, "tool_choice": chosen}
    return ResponseTools({name: value for name, value in chat.items() if value}, origins)


def _function_name(name: str, namespace: str | None) -> str:
    """The name of the chat's function that stands for a tool."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _chosen_function(choice: NamedTool, origins: Mapping[str, ToolOrigin]) -> str:
    """The name of the chat's function for a chosen tool; a tool that does not exist is refused with the chat."""
    if choice.type not in ("function", "custom") or choice.name is None:
        message = f"tool_choice is not supported: its type is {choice.type[:100]!r}; there are no built-in tools"
        raise unsupported("tool_choice", message)
    return next((name for name, origin in origins.items() if origin.name == choice.name), choice.name)


# The routes that count the tokens of an input, and list the items of a stored response.


async def count_input_tokens(request: Request, body: InputTokensRequest) -> InputTokens:
    """Counts the tokens of an input as the chat template writes it; with ``truncation``, of the truncated input."""
    service = state_of(request)
    await service.model(body.model)
    inputs = await read_input(service, request, body)
    if body.truncation == "auto":
        prepared = await prepare_response_chat(service, request, body, inputs.messages, inputs.tools)
        count = len(prepared.generation.prompts[0]["prompt_token_ids"])
    else:
        fields = chat_body(body, inputs.messages, inputs.tools)
        with renamed_errors(RENAMED):
            chat = await run_in_thread_if_large(request, read_model, ChatCompletionRequest, fields, service)
            count = await num_chat_tokens(service, request, chat)
    return InputTokens(object="response.input_tokens", input_tokens=count)


async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> ItemList:
    """The input items of a stored response and of the responses that it continues, in pages."""
    items = state_of(request).responses.get(response_id, owner_of(request)).input_items
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        indexes = [i for i, item in enumerate(items) if getattr(item, "id", None) == after]
        if not indexes:
            raise wrong("after", f"the response has no input item {after[:100]!r}")
        start = indexes[0] + 1
    page = [_listed_item(item) for item in items[start : start + limit]]
    ids = [item["id"] for item in page]
    return ItemList(
        object="list",
        data=page,
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=start + limit < len(items),
    )


def _listed_item(item: InputItem) -> dict[str, Any]:
    status = getattr(item, "status", None)
    status = status if status in ("in_progress", "incomplete") else "completed"
    listed: dict[str, Any] = {"id": getattr(item, "id", None), "type": item.type, "status": status}
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        listed |= {"type": "message", "role": item.role, "content": _listed_parts(item.content, kind)}
    elif isinstance(item, FunctionCallParam | CustomCallParam):
        listed |= item.model_dump(include={"call_id", "name", "namespace", "arguments", "input"}, exclude_none=True)
    elif isinstance(item, CallOutputParam):
        output = item.output if isinstance(item.output, str) else _listed_parts(item.output, "input_text")
        listed |= {"call_id": item.call_id, "output": output}
    elif isinstance(item, ReasoningParam):
        listed["summary"] = [{"type": "summary_text", "text": part.text} for part in item.summary or []]
        listed["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content or []]
    return listed


def _listed_parts(content: Content, kind: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part in [InputPart(type="text", text=content)] if isinstance(content, str) else content:
        if isinstance(part, ImageInputPart):
            image = {"image_url": part.image_url, "detail": part.detail or "auto", "file_id": None}
            parts.append({"type": "input_image", **image})
        else:
            parts.append({"type": kind, "text": part.text, **({"annotations": []} if kind == "output_text" else {})})
    return parts
