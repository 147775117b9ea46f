"""A request of the Responses API as the internal chat request."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import TypeAdapter
from starlette.requests import Request

from octavo.server.answer_format import custom_function, read_tools
from octavo.server.chat import Chat, make_chat_prompt, prepare_chat
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
    TextFormat,
    ToolChoiceParam,
    ToolParam,
)
from octavo.server.prompt_inputs import chat_tokens
from octavo.server.state import ServerState, StoredResponse, state_of

# Tools of the Responses API in the notation of chats: functions, tools that take a text, and namespaces of both.


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """What a function of a chat is in the request."""

    name: str
    namespace: str | None = None
    #: It takes a text instead of arguments.
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request."""

    #: Fields of the chat.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: By the name of the chat's function.
    origins: Mapping[str, ToolOrigin] = field(default_factory=dict)


def chat_name(name: str, namespace: str | None) -> str:
    """The name of a chat's function."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def read_response_tools(
    service: ServerState, tools: Sequence[ToolParam], choice: str | ToolChoiceParam | None
) -> ResponseTools:
    """Tools and the choice among them, in the notation of chats.

    Raises:
        ApiError: 400, naming what is not supported.
    """
    functions, origins = list[dict[str, Any]](), dict[str, ToolOrigin]()
    for where, tool, namespace in _flat(tools):
        if not isinstance(tool, FunctionTool | CustomTool):
            service.leave_out_tool(where, tool.type)
            continue
        name = chat_name(tool.name, namespace)
        origins[name] = ToolOrigin(tool.name, namespace, isinstance(tool, CustomTool))
        function = {"name": name, **_function(tool)}
        functions.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    chosen: Any = choice
    if isinstance(choice, ToolChoiceParam):
        if choice.type == "allowed_tools":
            names = [_allowed(tool, origins) for tool in choice.tools or []]
            functions = [tool for tool in functions if tool["function"]["name"] in names]
            chosen = choice.mode or "auto"
        else:
            chosen = {"type": "function", "function": {"name": _named(choice, origins)}}
    fields = {"tools": functions, "tool_choice": chosen}
    return ResponseTools({name: value for name, value in fields.items() if value}, origins)


def _flat(tools: Sequence[ToolParam]) -> Iterator[tuple[str, Any, str | None]]:
    """Place, tool and namespace of each tool, those in namespaces included."""
    for i, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            for k, inner in enumerate(tool.tools):
                yield f"tools[{i}].tools[{k}]", inner, tool.name
        else:
            yield f"tools[{i}]", tool, None


def _function(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return custom_function(tool.description, tool.format)


def _named(choice: NamedTool, origins: Mapping[str, ToolOrigin]) -> str:
    """The chat's name of a function that a choice names; unknown ones are refused with the chat."""
    if choice.type not in ("function", "custom") or choice.name is None:
        message = f"tool_choice is not supported: its type is {choice.type[:100]!r}; no tools are built in here"
        raise unsupported("tool_choice", message)
    return next((name for name, origin in origins.items() if origin.name == choice.name), choice.name)


def _allowed(choice: NamedTool, origins: Mapping[str, ToolOrigin]) -> str:
    name = _named(choice, origins)
    if name not in origins:
        raise wrong("tool_choice.tools", f"there is no tool {name[:100]!r} among tools")
    return name


# Items of the Responses API to messages of a chat.

Message = dict[str, Any]

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def input_items(value: str | list[InputItem]) -> list[InputItem]:
    """The field ``input`` as a list of items."""
    return [MessageItem(role="user", content=value)] if isinstance(value, str) else value


def messages_of(items: Sequence[InputItem], earlier: Sequence[InputItem]) -> list[Message]:
    """The messages of a chat that say what the items say.

    Reasoning, a text and calls of tools that follow each other are one message of the assistant.

    Args:
        items: of the field ``input``.
        earlier: those of the responses that these continue.

    Raises:
        ApiError: 400, an item is not supported or answers no call; with its place.
    """
    reader = _Reader()
    for place, part in (("previous_response_id", earlier), ("input", items)):
        for i, item in enumerate(part):
            reader.read(item, f"{place}[{i}]")
    return reader.messages


class _Reader:
    """Reads items one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        #: The assistant's message that further items may join.
        self._open: Message | None = None
        self._calls: set[str] = set()

    def read(self, item: InputItem, where: str) -> None:
        if isinstance(item, MessageItem):
            self._message(item, where)
        elif isinstance(item, FunctionCallParam):
            self._call(item, item.arguments)
        elif isinstance(item, CustomCallParam):
            self._call(item, json.dumps({"input": item.input}, ensure_ascii=False))
        elif isinstance(item, CallOutputParam):
            self._output(item, where)
        elif isinstance(item, ReasoningParam):
            self._reasoning(item)
        else:
            raise unsupported("input", f"{where} is not supported: {_reason(item.type)}")

    def _message(self, item: MessageItem, where: str) -> None:
        content = _content(item.content, f"{where}.content")
        if item.role != "assistant":
            self._open = None
            self.messages.append({"role": item.role, "content": content})
            return
        message = self._open
        if message is None or message["content"] is not None or "tool_calls" in message:
            message = self._new_open()
        message["content"] = content

    def _call(self, item: FunctionCallParam | CustomCallParam, arguments: str) -> None:
        message = self._open or self._new_open()
        function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        self._calls.add(item.call_id)

    def _output(self, item: CallOutputParam, where: str) -> None:
        if item.call_id not in self._calls:
            raise wrong(f"{where}.call_id", f"there is no function call {item.call_id[:100]!r} before it")
        self._open = None
        self.messages.append(
            {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output, f"{where}.output")}
        )

    def _reasoning(self, item: ReasoningParam) -> None:
        texts = [part.text for part in item.content or item.summary or []]
        if texts:  # without a text it was thought elsewhere, and is encrypted
            self._new_open()["reasoning_content"] = "\n".join(texts)

    def _new_open(self) -> Message:
        self._open = {"role": "assistant", "content": None}
        self.messages.append(self._open)
        return self._open


def _content(value: Content, where: str) -> str | list[Message]:
    """A text, or parts as a chat has them where there are images: templates write nothing between parts."""
    if isinstance(value, str):
        return value
    texts = [part.text for part in value if isinstance(part, InputPart)]
    if len(texts) == len(value):
        return "\n".join(texts)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]


def _part(part: InputPart | ImageInputPart, where: str) -> Message:
    if isinstance(part, InputPart):
        return {"type": "text", "text": part.text}
    if part.image_url is None:
        raise wrong(f"{where}.image_url", "it is missing")
    return {"type": "image_url", "image_url": {"url": part.image_url}}


def _reason(kind: str) -> str:
    if kind == "item_reference":
        return "previous_response_id continues a response that is kept"
    return (
        f"its type is {kind[:100]!r}; only messages, calls of the client's tools with their outputs, and reasoning "
        "are; no tools are built in here"
    )


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
    service: ServerState, request: Request, body: InputTokensRequest, messages: list[Message], tools: ResponseTools
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
            chat = await run_in_thread_if_large(request, read_model, ChatCompletionRequest, fields, service)
            return await prepare_chat(service, request, chat, prefix="resp")

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
    service: ServerState, body: InputTokensRequest, messages: list[Message], head: int, cuts: list[int]
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


# The input of a response: its items with their ids, what it continues, and the messages that they say.

#: Type of an item -> what its id begins with.
_PREFIXES = {
    "function_call": "fc", "custom_tool_call": "ctc", "function_call_output": "fco", "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """What a response answers."""

    #: The response that it continues.
    earlier: StoredResponse | None
    #: Of the field ``input``, each with an id.
    items: list[InputItem]
    #: Bytes of the items, as JSON.
    items_size: int
    #: Of the whole conversation, the instructions included.
    messages: list[Message]
    tools: ResponseTools

    def all_items(self, output: Iterable[InputItem] = ()) -> list[InputItem]:
        """The items of the whole conversation, with those of an output."""
        return [*(self.earlier.items if self.earlier else ()), *self.items, *output]

    @property
    def size(self) -> int:
        """Bytes of all items, without an output."""
        return self.items_size + (self.earlier.items_size if self.earlier else 0)


async def read_input(service: ServerState, request: Request, body: InputTokensRequest) -> ResponseInput:
    """What a request gives the model to read.

    Raises:
        ApiError: 400, naming what is malformed or not supported; 404, it continues a response that is not known.
    """
    earlier = None
    if body.previous_response_id is not None:
        earlier = service.responses.get(body.previous_response_id, owner_of(request))
        if earlier.run is not None and not earlier.run.has_ended:
            raise wrong("previous_response_id", "this response is still being made")
    before = [] if earlier is None else earlier.items
    items = [] if body.input is None else input_items(body.input)
    messages = await run_in_thread_if_large(request, conversation, body, items, before)
    size = await run_in_thread_if_large(request, _with_id, items, before)
    tools = read_response_tools(service, body.tools or [], body.tool_choice)
    return ResponseInput(earlier, items, size, messages, tools)


def size_of(items: list[InputItem]) -> int:
    """Bytes of items as JSON."""
    return len(ITEMS.dump_json(items, exclude_unset=True))


def _with_id(items: list[InputItem], before: list[InputItem]) -> int:
    """Gives the items ids where the client gave none, or one that another item has; their size."""
    taken = {item.id for item in before if isinstance(item, Item)}
    base = uuid.uuid4().hex
    for i, item in enumerate(items):
        assert isinstance(item, Item)  # others are refused
        if not isinstance(item.id, str) or not item.id or item.id in taken:
            item.id = f"{_PREFIXES.get(getattr(item, 'type', None) or '', 'msg')}_{base}{i:05x}"
        taken.add(item.id)
    return size_of(items)


# The routes under ``/v1/responses`` about what the model reads: its tokens, and the items of a kept response.


async def count_input_tokens(request: Request, body: InputTokensRequest) -> InputTokens:
    """Tokens of an input, as the model's template writes it; with ``truncation`` of what the model would read."""
    service = state_of(request)
    await service.model(body.model)
    given = await read_input(service, request, body)
    if body.truncation == "auto":
        chat = await start(service, request, body, given.messages, given.tools)
        token_ids = chat.generation.prompts[0]["prompt_token_ids"]
    else:
        fields = chat_body(body, given.messages, given.tools)
        with renamed_errors(RENAMED):
            said = await run_in_thread_if_large(request, read_model, ChatCompletionRequest, fields, service)
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
    items = state_of(request).responses.get(response_id, owner_of(request)).input_items
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
    return [_input_part(part, kind) for part in parts]


def _input_part(part: InputPart | ImageInputPart, kind: str) -> dict[str, Any]:
    if isinstance(part, ImageInputPart):
        return {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto", "file_id": None}
    return {"type": kind, "text": part.text, **({"annotations": []} if kind == "output_text" else {})}
