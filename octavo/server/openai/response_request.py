"""From a request of the Responses API to a chat request: input items, earlier responses, tools, truncation."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from starlette.requests import Request

from octavo.core.cache_hints import MAX_BREAKPOINTS
from octavo.core.errors import CONTEXT_LENGTH, InvalidRequestError
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.server.answer_format import AnswerFormat
from octavo.server.chat import Chat, ChatPrompt, begin_chat, make_chat_prompt, num_chat_tokens, prepare_chat
from octavo.server.chat_call import ChatCall, Function, Message, RequestTools, generation_fields, read_tool_choice
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import invalid_at, renamed_errors, unsupported
from octavo.server.http.middleware import owner_of
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
)
from octavo.server.prompt_cache import MarkedConversation, Marks, seconds_of
from octavo.server.state import ServerState, StoredResponse, responses_of, state_of

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """The tool of the request for which a function of the chat stands."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """The conversation that a response answers."""

    #: The response that it continues.
    earlier: StoredResponse | None
    #: The field ``input``; each item has an id.
    items: list[InputItem]
    #: Bytes of the items as JSON.
    items_size: int
    #: The whole conversation, with the instructions; and where each message begins in the request.
    messages: list[Message]
    paths: list[str]
    tools: RequestTools
    #: By function name of the chat.
    origins: Mapping[str, ToolOrigin]

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
            raise invalid_at("previous_response_id", "this response is still in progress")
    before = [] if earlier is None else earlier.items
    items: list[InputItem] = []
    if body.input is not None:
        items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages, paths = await run_in_thread_if_large(request, conversation, body, items, before)
    size = await run_in_thread_if_large(request, _assign_ids, items, before)
    return ResponseInput(earlier, items, size, messages, paths, *read_response_tools(service, body))


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

#: Names of fields of the call on this route, for errors.
_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
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


def response_call(body: InputTokensRequest, inputs: ResponseInput) -> ChatCall:
    for name in body.include or []:
        if name not in INCLUDABLE:
            raise unsupported("include", f"is not supported: {name[:100]!r} is unknown here")
    if body.stream_options is not None and not body.stream:
        raise invalid_at("stream_options", "is allowed only with stream=true")
    # A response in the background streams too: clients may retrieve it half done.
    streams = body.stream is True or body.background is True
    return ChatCall(
        messages=inputs.messages,
        tools=inputs.tools,
        marked=_marked(body, inputs),
        variables=body.chat_template_kwargs or {},
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        fields=generation_fields(body, stream=streams, stream_options=None),
        answer_format=_answer_format(body),
        max_tokens=body.max_output_tokens,
        has_no_token_limit=body.has_no_token_limit,
        top_logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or []) else None,
        names={**_NAMES, **{f"messages[{i}]": path for i, path in enumerate(inputs.paths)}},
    )


def _marked(body: InputTokensRequest, inputs: ResponseInput) -> list[MarkedConversation]:
    """The conversation with its last marks, at most ``MAX_BREAKPOINTS``."""
    earlier = [] if inputs.earlier is None else inputs.earlier.items
    places = [(place, seconds) for place in _places(inputs.all_items()) if (seconds := _seconds_of(place)) is not None]
    places = places[-MAX_BREAKPOINTS:]
    by_name: dict[str, float | None] = {}
    for tool in body.tools or ():
        namespace, tools = (tool.name, tool.tools) if isinstance(tool, Namespace) else (None, [tool])
        by_name |= {
            _function_name(one.name, namespace): _seconds_of(one)
            for one in tools
            if isinstance(one, FunctionTool | CustomTool)
        }
    offered = [by_name.get(shown["function"]["name"]) for shown in inputs.tools.shown or ()]
    marked = MarkedConversation.with_tools(inputs.messages, inputs.tools, offered, MAX_BREAKPOINTS - len(places))
    if places:
        behind = _MarksBehind(Marks(), {id(place): seconds for place, seconds in places})
        messages, _ = conversation(body, inputs.items, earlier, behind)
        marked.append(MarkedConversation(behind.marks, messages, inputs.tools))
    return marked


def _places(items: Iterable[InputItem]) -> Iterator[MessageItem | InputPart | ImageInputPart]:
    """Where marks may stand, in the order of the prompt: behind the parts of an item, and behind a whole message."""
    for item in items:
        content = item.content if isinstance(item, MessageItem) else getattr(item, "output", None)
        yield from content if isinstance(content, list) else ()
        if isinstance(item, MessageItem):
            yield item


def _seconds_of(marked: Any) -> float | None:
    return seconds_of(marked.cache_control, getattr(marked, "prompt_cache_breakpoint", None))


@dataclass(frozen=True, slots=True)
class _MarksBehind:
    """Adds marks behind messages and parts."""

    marks: Marks
    #: By the id of the object.
    seconds: Mapping[int, float]

    def add_to_message(self, content: str | list[Message], item: MessageItem) -> str | list[Message]:
        seconds = self.seconds.get(id(item))
        return (
            self.marks.add(content, seconds) if isinstance(content, str) else self.marks.add_to_parts(content, seconds)
        )

    def add_to_part(self, shown: Message, part: InputPart | ImageInputPart) -> list[Message]:
        return self.marks.add_to_parts([shown], self.seconds.get(id(part)))


def _answer_format(body: InputTokensRequest) -> AnswerFormat | None:
    answer = None if body.text is None else body.text.format
    if answer is None or answer.type == "text":
        return None
    if answer.type == "json_object":
        return AnswerFormat("text.format", StructuredOutputsParams(json_object=True))
    for name in ("name", "schema_"):
        if getattr(answer, name) is None:
            raise invalid_at(f"text.format.{name.rstrip('_')}", "it is missing")
    strict = answer.strict or None
    params = StructuredOutputsParams(json=answer.schema_, disable_additional_properties=strict, strict=strict)
    return AnswerFormat("text.format.schema", params)


async def prepare_response_chat(
    service: ServerState, request: Request, body: InputTokensRequest, inputs: ResponseInput
) -> Chat:
    """Prepares the chat of a response. With ``truncation: auto``, drops the oldest messages that exceed the context."""
    call = response_call(body, inputs)
    if body.truncation != "auto":
        return await prepare_chat(service, request, call, prefix="resp")
    with renamed_errors(call.names):
        model = await service.model(body.model)
        call, prompt = await _truncate(service, request, call)
    with renamed_errors(call.names):
        return await begin_chat(service, request, call, model, prompt, prefix="resp")


#: Tokens that a chat template typically adds per message, and by which texts beside each other may be fewer.
_MESSAGE_TOKENS, _MERGED = 6, 2
#: Prompts that are rendered by estimates, before the rest of the cuts is halved each time.
_MOST_ESTIMATES = 4


async def _truncate(service: ServerState, request: Request, call: ChatCall) -> tuple[ChatCall, ChatPrompt]:
    """The call without the oldest messages, as few as must go for the context, and its prompt.

    Each message is tokenized once. What the template adds to them is estimated by the prompts that have been rendered,
    so that the third one is usually the last. If no prompt fits, the shortest is returned.
    """
    messages = call.messages
    head = 1 if messages and messages[0]["role"] == "system" else 0
    # Where the kept messages may begin: not with the output of a call that was dropped.
    cuts = [i for i in range(head, len(messages)) if i == head or messages[i]["role"] != "tool"] or [head]
    max_tokens = service.default_max_tokens(None) if call.max_tokens is None else call.max_tokens
    room = service.llm.max_model_len - (max_tokens or 1)

    async def prompt_of(cut: int) -> tuple[ChatCall, ChatPrompt]:
        kept = [*range(head), *range(cut, len(messages))]
        names = dict(call.names)
        names |= {f"messages[{i}]": call.names.get(f"messages[{k}]", "input") for i, k in enumerate(kept)}
        marked = [replace(one, messages=[one.messages[k] for k in kept]) for one in call.marked]
        shorter = replace(call, messages=[messages[k] for k in kept], marked=marked, names=names)
        return shorter, await make_chat_prompt(service, request, shorter)

    texts: list[int] = []  # tokens of the messages that each cut keeps
    added: float = _MESSAGE_TOKENS
    low, high, fitting = 0, len(cuts) - 1, None
    probe = best = best_length = num_rendered = 0
    while low <= high:
        length = None  # it has more characters than are tokenized
        try:
            rendered = await prompt_of(cuts[probe])
            length = len(rendered[1].tokens["prompt_token_ids"])
        except InvalidRequestError as e:
            if e.kind != CONTEXT_LENGTH or probe == len(cuts) - 1:
                raise
        num_rendered += 1
        if length is not None and (length <= room or probe == len(cuts) - 1):
            fitting, best, best_length, high = rendered, probe, length, probe - 1
        else:
            low = probe + 1
        if low > high:
            break
        texts = texts or await _count_tokens(service, messages, head, cuts)
        if length is not None:
            added = max((length - texts[probe]) / (head + len(messages) - cuts[probe]), 0)
        if fitting is not None and best_length + texts[best - 1] - texts[best] - _MERGED > room:
            break  # the texts alone of the message before do not fit
        if num_rendered > _MOST_ESTIMATES:
            probe = (low + high) // 2
        else:
            lengths = [-(texts[k] + added * (head + len(messages) - cuts[k])) for k in range(low, high + 1)]
            probe = min(low + bisect.bisect_left(lengths, -room), high)
    assert fitting is not None
    return fitting


async def _count_tokens(service: ServerState, messages: list[Message], head: int, cuts: list[int]) -> list[int]:
    """For each cut, the tokens of the texts of the messages that it keeps."""

    def text_of(message: Message) -> str:
        content = message.get("content")
        if isinstance(content, list):  # without images
            content = [part for part in content if part["type"] == "text"]
        return "".join(str(part) for part in (content, message.get("tool_calls")) if part)

    texts, length = list[str](), 0
    for message in [*messages[:head], *reversed(messages[head:])]:
        texts.append(text_of(message))
        length += len(texts[-1])
        if length > service.max_prompt_chars:  # older messages are dropped in any case
            break
    ids = await asyncio.to_thread(service.llm.tokenizer.encode_batch, texts, False)
    used = list(itertools.accumulate(map(len, ids)))
    # used[n]: tokens of the head and the last n - head + 1 messages.
    return [
        used[kept] if (kept := head + len(messages) - cut - 1) < len(used) else service.max_prompt_chars for cut in cuts
    ]


def conversation(
    body: InputTokensRequest, items: list[InputItem], earlier: list[InputItem], marks: _MarksBehind | None = None
) -> tuple[list[Message], list[str]]:
    """The chat messages of a request: its instructions, the items that it continues, and its input; and their paths.

    Instructions and leading system messages become one message: many templates accept only one.
    """
    paths: list[str] = []
    messages = messages_of(items, earlier, paths, marks)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        paths.insert(0, "instructions")
    texts = []
    while messages and messages[0]["role"] in ("system", "developer") and isinstance(messages[0]["content"], str):
        texts.append(messages.pop(0)["content"])
    if texts:
        messages.insert(0, {"role": "system", "content": "\n\n".join(texts)})
        paths[: len(texts)] = paths[:1]
    return messages, paths


def messages_of(
    items: Sequence[InputItem],
    earlier: Sequence[InputItem],
    paths: list[str] | None = None,
    marks: _MarksBehind | None = None,
) -> list[Message]:
    """The chat messages of items; consecutive reasoning, text and tool calls are one message of the assistant.

    ``paths`` receives the path of the item at which each message begins.
    """
    paths = [] if paths is None else paths
    messages: list[Message] = []
    # The assistant's message that the next item may join.
    current: Message | None = None
    call_ids: set[str] = set()

    def begin_message() -> Message:
        messages.append({"role": "assistant", "content": None})
        paths.append(path)
        return messages[-1]

    for name, part in (("previous_response_id", earlier), ("input", items)):
        for i, item in enumerate(part):
            path = f"{name}[{i}]"
            if isinstance(item, MessageItem):
                content = _content(item.content, f"{path}.content", marks)
                if marks is not None:
                    content = marks.add_to_message(content, item)
                if item.role != "assistant":
                    current = None
                    messages.append({"role": item.role, "content": content})
                    paths.append(path)
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
                    raise invalid_at(f"{path}.call_id", f"there is no function call {item.call_id[:100]!r} before it")
                current = None
                output = _content(item.output, f"{path}.output", marks)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
                paths.append(path)
            elif isinstance(item, ReasoningParam):
                if texts := [part.text for part in item.content or item.summary or []]:  # none: it is encrypted
                    current = begin_message()
                    current["reasoning_content"] = "\n".join(texts)
            elif item.type == "item_reference":
                raise unsupported(path, "is not supported: previous_response_id continues a stored response")
            else:
                raise unsupported(
                    path,
                    f"is not supported: its type is {item.type[:100]!r}; there are messages, calls of the client's "
                    "tools and their outputs, and reasoning, but no built-in tools",
                )
    return messages


def _content(value: Content, path: str, marks: _MarksBehind | None) -> str | list[Message]:
    """A text, or parts if there are images: templates write nothing between parts."""
    if isinstance(value, str):
        return value
    parts: list[Message] = []
    for i, part in enumerate(value):
        if isinstance(part, InputPart):
            shown: Message = {"type": "text", "text": part.text}
        elif part.image_url is None:
            raise invalid_at(f"{path}[{i}].image_url", "it is missing")
        else:
            shown = {"type": "image_url", "image_url": {"url": part.image_url}}
        parts += [shown] if marks is None else marks.add_to_part(shown, part)
    if all(isinstance(part, InputPart) for part in value):
        return "\n".join(part["text"] for part in parts)
    return parts


# Tools: functions of the chat stand for functions, custom tools, and those in namespaces.


def read_response_tools(
    service: ServerState, body: InputTokensRequest
) -> tuple[RequestTools, Mapping[str, ToolOrigin]]:
    """The functions of the chat, and by their names the tools for which they stand."""
    functions, origins = list[Function](), dict[str, ToolOrigin]()
    for i, entry in enumerate(body.tools or ()):
        entries: list[tuple[str, Any, str | None]] = [(f"tools[{i}]", entry, None)]
        if isinstance(entry, Namespace):
            entries = [(f"tools[{i}].tools[{k}]", tool, entry.name) for k, tool in enumerate(entry.tools)]
        for path, tool, namespace in entries:
            if not isinstance(tool, FunctionTool | CustomTool):
                service.leave_out_tool(path, tool.type)
                continue
            name = _function_name(tool.name, namespace)
            origins[name] = ToolOrigin(tool.name, namespace, isinstance(tool, CustomTool))
            if isinstance(tool, CustomTool):
                functions.append(Function.of_custom(path, name, tool.description, tool.format))
                continue
            fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
            functions.append(Function.of(path, name, fields))
    choice, parallel = body.tool_choice, body.parallel_tool_calls
    if isinstance(choice, ToolChoiceParam) and choice.type == "allowed_tools":
        allowed = [_chosen_function(tool, origins) for tool in choice.tools or []]
        for name in allowed:
            if name not in origins:
                raise invalid_at("tool_choice.tools", f"there is no tool {name[:100]!r} among tools")
        functions = [function for function in functions if function.name in allowed]
        return RequestTools.of(functions, choice.mode or "auto", parallel=parallel), origins
    if isinstance(choice, ToolChoiceParam):
        return RequestTools.of(functions, "named", [_chosen_function(choice, origins)], parallel=parallel), origins
    return RequestTools.of(functions, *read_tool_choice(choice), parallel=parallel), origins


def _function_name(name: str, namespace: str | None) -> str:
    """The name of the chat's function that stands for a tool."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _chosen_function(choice: NamedTool, origins: Mapping[str, ToolOrigin]) -> str:
    """The name of the chat's function for a chosen tool; a tool that does not exist is refused with the chat."""
    if choice.type not in ("function", "custom") or choice.name is None:
        problem = f"is not supported: its type is {choice.type[:100]!r}; there are no built-in tools"
        raise unsupported("tool_choice", problem)
    return next((name for name, origin in origins.items() if origin.name == choice.name), choice.name)


# The routes that count the tokens of an input, and list the items of a stored response.


async def count_input_tokens(request: Request, body: InputTokensRequest) -> InputTokens:
    """Counts the tokens of an input as the chat template writes it; with ``truncation``, of the truncated input."""
    service = state_of(request)
    await service.model(body.model)
    inputs = await read_input(service, request, body)
    if body.truncation == "auto":
        prepared = await prepare_response_chat(service, request, body, inputs)
        count = len(prepared.generation.prompts[0]["prompt_token_ids"])
    else:
        count = await num_chat_tokens(service, request, response_call(body, inputs))
    return InputTokens(object="response.input_tokens", input_tokens=count)


async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Field(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> ItemList:
    """The input items of a stored response and of the responses that it continues, in pages."""
    items = responses_of(request).get(response_id, owner_of(request)).input_items
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        indexes = [i for i, item in enumerate(items) if getattr(item, "id", None) == after]
        if not indexes:
            raise invalid_at("after", f"the response has no input item {after[:100]!r}")
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
