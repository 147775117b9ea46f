"""Anthropic's Messages API (``/v1/messages``): its blocks are converted to chat messages, and the answer back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.cache_hints import ANTHROPIC_SECONDS
from octavo.core.sampling_params import DefaultMaxTokens, StructuredOutputsParams
from octavo.server.answer_format import AnswerFormat
from octavo.server.chat import Chat, ChoiceEvents, num_chat_tokens, prepare_chat
from octavo.server.chat_call import ChatCall, Function, RequestTools, generation_fields
from octavo.server.fields import (
    REFUSED,
    SEEN,
    EngineFields,
    Name,
    Phrase,
    PositiveInt,
    RequestModel,
    ResponseModel,
)
from octavo.server.http.bodies import run_in_thread_if_large
from octavo.server.http.errors import ApiError, anthropic_error, invalid_at
from octavo.server.http.streaming import Event, PendingChat
from octavo.server.openai.protocol import SamplingFields
from octavo.server.prompt_cache import CacheControl, MarkedConversation, Marks, check_marks
from octavo.server.prompt_inputs import THINKING_VARIABLES
from octavo.server.state import ServerState, state_of
from octavo.server.tool_parsers.tool_parser import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart

# The routes.

#: Names of fields of the call on this route, for errors.
_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
}


async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    call = await run_in_thread_if_large(request, chat_call, service, body)
    pending = _PendingMessage(await prepare_chat(service, request, call, prefix="msg"), body.max_tokens)
    return await pending.respond(request, body.stream, deadline)


async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """Counts the tokens of a conversation as the chat template writes it."""
    service = state_of(request)
    await service.model(body.model)
    call = await run_in_thread_if_large(request, chat_call, service, body)
    return TokenCount(input_tokens=await num_chat_tokens(service, request, call))


class _PendingMessage(PendingChat):
    def __init__(self, chat: Chat, max_tokens: int) -> None:
        super().__init__(chat)
        self._max_tokens = max_tokens
        self._growing: GrowingMessage | None = None

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        events = []
        if self._growing is None:
            message = MessageObject(
                id=f"msg_{uuid.uuid4().hex}",
                type="message",
                role="assistant",
                model=self.chat.generation.model.name,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=self._usage(),
            )
            self._growing = GrowingMessage(message)
            events += self._growing.begin()
        events += self._growing.add(choice.events)
        if choice.finish_reason is not None:
            reason, stop = self._stop_reason(choice, self._growing.message.content)
            events += self._growing.end(reason, stop, self._usage())
        return events

    def encode(self) -> bytes:
        assert self._growing is not None
        return self._growing.message.encode()

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"

    def _usage(self) -> MessageUsage:
        generation = self.chat.generation
        usage = generation.usage()
        cached, created = generation.cached_tokens, generation.created_tokens
        hints = generation.options.cache_hints
        hour = [mark.num_tokens for mark in hints.breakpoints if mark.ttl == ANTHROPIC_SECONDS["1h"]] if hints else []
        in_hour = min(created, max(0, max(hour, default=0) - cached))
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached - created,
            cache_read_input_tokens=cached,
            cache_creation_input_tokens=created,
            cache_creation=CacheCreation(
                ephemeral_1h_input_tokens=in_hour, ephemeral_5m_input_tokens=created - in_hour
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=MessageTokensDetails(thinking_tokens=self.chat.generation.reasoning_tokens or 0),
        )

    def _stop_reason(self, choice: ChoiceEvents, content: list[Block]) -> tuple[StopReason, str | None]:
        """The stop reason, and the stop text if there was one."""
        if choice.finish_reason == "length":
            reached = self.chat.generation.usage().completion_tokens >= self._max_tokens
            return ("max_tokens" if reached else "model_context_window_exceeded"), None
        if any(isinstance(block, ToolUseBlock) for block in content):
            return "tool_use", None
        stop = choice.completion.stop_reason
        return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)


# From a Messages request to a call.


def chat_call(service: ServerState, body: CountTokensRequest) -> ChatCall:
    messages = _chat_messages(body)
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise invalid_at("messages", "the last message uses a tool; its tool_result must follow")
    variables, thinking, config = body.chat_template_kwargs or {}, body.thinking, body.output_config
    tools = _read_tools(service, body)
    answer_format = None
    if config is not None and config.format is not None:
        answer_format = AnswerFormat("output_config.format.schema", StructuredOutputsParams(json=config.format.schema_))
    fields: dict[str, Any] = {}
    if thinking is not None and thinking.budget_tokens is not None and body.thinking_token_budget is None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    max_tokens, marked = None, list[MarkedConversation]()
    if isinstance(body, MessagesRequest):
        # As in Anthropic's API, the context may end the message: agents ask for the maximum.
        max_tokens = DefaultMaxTokens(body.max_tokens)
        marked = _marked(body, tools)
        fields |= {"stop": body.stop_sequences, "user": body.metadata and body.metadata.user_id}
    # Variables that the request sets itself count more than ``thinking``.
    switches = thinking is not None and thinking.type != "adaptive" and not variables.keys() & set(THINKING_VARIABLES)
    return ChatCall(
        messages=messages,
        tools=tools,
        variables=variables,
        thinks=thinking.type == "enabled" if thinking is not None and switches else None,
        reasoning_effort=None if config is None else config.effort,
        continues=continues,
        fields=generation_fields(body, **fields),
        answer_format=answer_format,
        max_tokens=max_tokens,
        includes_reasoning=thinking is None or thinking.display != "omitted",
        marked=marked,
        names=_NAMES,
    )


def _marked(body: MessagesRequest, tools: RequestTools) -> list[MarkedConversation]:
    """The conversation with marks behind the blocks that have a ``cache_control``."""
    controls = [(f"tools[{i}]", getattr(tool, "cache_control", None)) for i, tool in enumerate(body.tools or [])]
    if isinstance(body.system, list):
        controls += [(f"system[{i}]", block.cache_control) for i, block in enumerate(body.system)]
    num_before = len(controls)
    for i, message in enumerate(body.messages):
        blocks = [] if isinstance(message.content, str) else message.content
        for k, block in enumerate(blocks):
            inner = block.content if isinstance(block, ToolResultParam) and isinstance(block.content, list) else []
            path = f"messages[{i}].content[{k}]"
            controls += [(f"{path}.content[{j}]", each.cache_control) for j, each in enumerate(inner)]
            controls.append((path, _control_of(block)))
    if (automatic := body.cache_control) is not None:
        explicit = controls[-1][1] if len(controls) > num_before else None
        if explicit is not None and explicit.seconds != automatic.seconds:
            raise invalid_at("cache_control", f"has another ttl than that of the last block, {controls[-1][0]}")
        if explicit is None:
            controls.append(("", automatic))
    named = [(f"{path}.cache_control".lstrip("."), control) for path, control in controls]
    check_marks([(path, control.seconds) for path, control in named if control is not None])
    marked = []
    if tools.shown is not None and any(control for path, control in controls if path.startswith("tools")):
        marks, by_name = Marks(), {tool.name: tool for tool in body.tools or [] if isinstance(tool, ClientTool)}
        shown = [marks.add_to_function(one, _seconds_of(by_name[one["function"]["name"]])) for one in tools.shown]
        marked.append(MarkedConversation(marks, _chat_messages(body), replace(tools, shown=shown)))
    if any(control for path, control in controls if not path.startswith("tools")):
        marks = Marks()
        marked.append(MarkedConversation(marks, _chat_messages(body, marks), tools))
    return marked


def _control_of(block: Any) -> CacheControl | None:
    control: CacheControl | None = getattr(block, "cache_control", None)  # thinking has none
    return control


def _seconds_of(block: Any) -> float | None:
    control = _control_of(block)
    return None if control is None else control.seconds


def _chat_messages(body: CountTokensRequest, marks: Marks | None = None) -> list[dict[str, Any]]:
    """The messages of a chat; ``marks``: puts one behind each block with a ``cache_control``, and at the end if the
    request has one.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        parts = _text_parts(body.system)
        if marks is not None and isinstance(body.system, list):
            marked = zip(parts, body.system, strict=True)
            parts = [part for text, block in marked for part in marks.add_to_parts([text], _seconds_of(block))]
        messages.append({"role": "system", "content": parts})
    tool_use_ids: set[str] = set()
    for i, message in enumerate(body.messages):
        content = message.content
        blocks = [TextBlockParam(type="text", text=content)] if isinstance(content, str) else content
        if not blocks:
            messages.append({"role": message.role, "content": ""})
        for k, block in enumerate(blocks):
            path = f"messages[{i}].content[{k}]"
            seconds = None if marks is None else _seconds_of(block)
            if marks is not None and seconds is None and i == len(body.messages) - 1 and k == len(blocks) - 1:
                seconds = _seconds_of(body)
            if isinstance(block, ToolResultParam | WebSearchResultParam):
                messages.append(tool_message := _tool_message(block, tool_use_ids, path, marks))
                if marks is not None:
                    tool_message["content"] = marks.add_to_parts(tool_message["content"], seconds)
                continue
            # Consecutive messages of a role are one turn.
            if not messages or messages[-1]["role"] != message.role or isinstance(messages[-1]["content"], str):
                messages.append({"role": message.role, "content": []})
            turn = messages[-1]
            if isinstance(block, ContentBlock):
                parts = _parts(block, path)
                turn["content"] += parts if marks is None else marks.add_to_parts(parts, seconds)
            elif isinstance(block, ToolUseParam | ServerToolUseParam):
                tool_use_ids.add(block.id)
                given = block.input if marks is None else marks.add_to_json(block.input, seconds)
                function = {"name": block.name, "arguments": json.dumps(given, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            else:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
    for chat_message in messages:
        parts = chat_message["content"]
        # A text, unless there are images: templates write nothing between parts.
        if not isinstance(parts, str) and all(part["type"] == "text" for part in parts):
            chat_message["content"] = "\n".join(part["text"] for part in parts)
    return messages


def _tool_message(
    block: ToolResultParam | WebSearchResultParam, tool_use_ids: set[str], path: str, marks: Marks | None = None
) -> dict[str, Any]:
    if block.tool_use_id not in tool_use_ids:
        raise invalid_at(f"{path}.tool_use_id", f"there is no tool_use {block.tool_use_id[:100]!r} before it")
    content: list[dict[str, Any]] = []
    if isinstance(block, WebSearchResultParam):
        if isinstance(block.content, WebSearchError):
            text = f"Error: {block.content.error_code}"
        else:
            ages = [f" ({page.page_age})" if page.page_age else "" for page in block.content]
            text = "\n".join(f"{page.title}: {page.url}{age}" for page, age in zip(block.content, ages, strict=True))
        content = _text_parts(text)
    elif isinstance(block.content, str):
        content = _text_parts(block.content)
    else:
        for k, inner in enumerate(block.content or []):
            parts = _parts(inner, f"{path}.content[{k}]")
            content += parts if marks is None else marks.add_to_parts(parts, _seconds_of(inner))
    if isinstance(block, ToolResultParam) and block.is_error:
        # A chat message has no field for it.
        has_text = bool(content) and "text" in content[0]
        error = f"Error: {content[0]['text'] if has_text else ''}"
        content = [{"type": "text", "text": error}, *content[1 if has_text else 0 :]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _parts(block: ContentBlock, path: str) -> list[dict[str, Any]]:
    """The content parts of a block; documents are texts between tags, as Anthropic's guide writes them."""
    if isinstance(block, TextBlockParam | ImageBlockParam):
        return [_part(block, path)]
    header: dict[str, str | None]
    if isinstance(block, SearchResultParam):
        header, parts = {"source": block.source, "title": block.title}, _text_parts(block.content)
    else:
        header = {"title": block.title, "context": block.context}
        field = "data" if block.source.type == "text" else "content"
        if (content := getattr(block.source, field)) is None:
            raise invalid_at(f"{path}.source.{field}", f"it is missing, for a source of type {block.source.type!r}")
        if isinstance(content, str):
            parts = _text_parts(content)
        else:
            parts = [_part(inner, f"{path}.source.content[{k}]") for k, inner in enumerate(content)]
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in header.items() if text)
    if len(parts) == 1 and parts[0]["type"] == "text":  # one part, as no template writes line breaks between parts
        return _text_parts(f"<document>\n{head}{parts[0]['text']}\n</document>")
    return [*_text_parts(f"<document>\n{head}"), *parts, *_text_parts("\n</document>")]


def _part(block: TextBlockParam | ImageBlockParam, path: str) -> dict[str, Any]:
    if isinstance(block, TextBlockParam):
        return {"type": "text", "text": block.text}
    source = block.source
    field = "data" if source.type == "base64" else "url"
    if (value := getattr(source, field)) is None:
        raise invalid_at(f"{path}.source.{field}", f"it is missing, for a source of type {source.type!r}")
    url = f"data:{source.media_type or ''};base64,{value}" if field == "data" else value
    return {"type": "image_url", "image_url": {"url": url}}


def _text_parts(value: str | Sequence[TextBlockParam]) -> list[dict[str, Any]]:
    texts = [value] if isinstance(value, str) else [block.text for block in value]
    return [{"type": "text", "text": text} for text in texts]


def _read_tools(service: ServerState, body: CountTokensRequest) -> RequestTools:
    functions: list[Function] = []
    for i, tool in enumerate(body.tools or []):
        if not isinstance(tool, ClientTool):
            service.leave_out_tool(f"tools[{i}]", tool.type)
            continue
        description = tool.description
        if tool.input_examples:
            examples = json.dumps(tool.input_examples, ensure_ascii=False)
            description = f"{description or ''}\nExamples of its input: {examples}".strip()
        named = {"parameters": tool.input_schema, "description": description, "strict": tool.strict}
        functions.append(Function.of(f"tools[{i}]", tool.name, named, field="input_schema"))
    choice = body.tool_choice
    if choice is None:
        return RequestTools.of(functions)
    if choice.type == "tool":
        return RequestTools.of(functions, "named", [choice.name or ""])
    kind: Literal["auto", "required", "none"] = "required" if choice.type == "any" else choice.type
    return RequestTools.of(functions, kind, parallel=not choice.disable_parallel_tool_use)


# From the events of a choice to a message.


class GrowingMessage:
    """A message, built block by block. Every method returns the stream events of its change."""

    def __init__(self, message: MessageObject) -> None:
        """Takes over ``message``, which has no content yet."""
        self.message = message
        self._is_open = False
        #: The text of the open block, or the JSON text of its input, in pieces.
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        return [{"type": "message_start", "message": self.message.model_dump()}]

    def add(self, chat_events: Iterable[ChatEvent]) -> list[Event]:
        events = []
        for event in chat_events:
            open_block = self.message.content[-1] if self._is_open else None
            if isinstance(event, ContentDelta):
                if not isinstance(open_block, TextBlock):
                    events += self._open_block(TextBlock(type="text", text=""))
                events.append(self._delta("text", text=event.text))
            elif isinstance(event, ReasoningDelta):
                if not isinstance(open_block, ThinkingBlock):
                    events += self._open_block(ThinkingBlock(type="thinking", thinking="", signature=""))
                events.append(self._delta("thinking", thinking=event.text))
            elif isinstance(event, ToolCallStart):
                events += self._open_block(ToolUseBlock(type="tool_use", id=event.id, name=event.name, input={}))
            else:
                events.append(self._delta("input_json", partial_json=event.text))
        return events

    def end(self, reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> list[Event]:
        events = self._close_block()
        message = self.message
        message.stop_reason, message.stop_sequence, message.usage = reason, stop_sequence, usage
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        events.append({"type": "message_delta", "delta": delta, "usage": usage.model_dump()})
        return [*events, {"type": "message_stop"}]

    def _delta(self, kind: str, **piece: str) -> Event:
        self._pieces += piece.values()
        return self._block_event("content_block_delta", delta={"type": f"{kind}_delta", **piece})

    def _open_block(self, block: Block) -> list[Event]:
        events = self._close_block()
        self.message.content.append(block)
        self._is_open = True
        events.append(self._block_event("content_block_start", content_block=block.model_dump()))
        if len(self.message.content) == 1:
            events.append({"type": "ping"})
        return events

    def _close_block(self) -> list[Event]:
        if not self._is_open:
            return []
        block = self.message.content[-1]
        text, self._pieces, self._is_open = "".join(self._pieces), [], False
        if isinstance(block, ToolUseBlock):
            try:
                value = from_json(text or "{}", allow_partial="trailing-strings")  # the text may be truncated
            except ValueError:
                value = text
            block.input = value if isinstance(value, dict) else {"arguments": text}
        else:
            setattr(block, block.type, text)  # the type is the name of the field
        return [self._block_event("content_block_stop")]

    def _block_event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message.content) - 1, **fields}


# Request bodies.


class TextBlockParam(RequestModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ImageSource(RequestModel):
    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None


class ImageBlockParam(RequestModel):
    type: Annotated[Literal["image"], SEEN]
    source: ImageSource
    cache_control: CacheControl | None = None


def _is_readable(kind: str | None) -> str | None:
    if kind not in ("text", "content"):
        message = ": documents of type text and content are supported, not {kind}"
        raise PydanticCustomError(REFUSED, message, {"kind": repr(kind)})
    return kind


def _is_named(name: str | None) -> str | None:
    if name is None:
        raise PydanticCustomError("missing_name", "a server_tool_use has a name")
    return name


class DocumentSource(RequestModel):
    """A plain text, or blocks. There is no PDF reader, and nothing is fetched."""

    type: Annotated[str | None, AfterValidator(_is_readable), Field(validate_default=True)] = None
    media_type: Literal["text/plain"] | None = None
    data: str | None = Field(None, description="With text: the text.")
    content: str | list[Annotated[TextBlockParam | ImageBlockParam, Field(discriminator="type")]] | None = Field(
        None, description="With content: a text, or blocks."
    )


class DocumentBlockParam(RequestModel):
    """A document of plain text, which the model reads as text."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl | None = None


class SearchResultParam(RequestModel):
    """A result of the client's search, which the model reads as text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlockParam]
    cache_control: CacheControl | None = None


class ToolUseParam(RequestModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


ContentBlock = TextBlockParam | ImageBlockParam | DocumentBlockParam | SearchResultParam


class ToolResultParam(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[ContentBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ServerToolUseParam(RequestModel):
    type: Literal["server_tool_use"]
    id: str
    name: Annotated[str | None, AfterValidator(_is_named), Field(validate_default=True)] = None
    input: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    cache_control: CacheControl | None = None


class WebSearchResult(RequestModel):
    type: Literal["web_search_result"]
    title: str
    url: str
    page_age: str | None = None


class WebSearchError(RequestModel):
    type: Literal["web_search_tool_result_error"]
    error_code: str


class WebSearchResultParam(RequestModel):
    """The result of a web search in an earlier answer; the model reads titles and addresses."""

    type: Literal["web_search_tool_result"]
    tool_use_id: str
    content: list[WebSearchResult] | WebSearchError
    cache_control: CacheControl | None = None


class ThinkingParam(RequestModel):
    type: Literal["thinking"]
    thinking: str


class UserMessage(RequestModel):
    role: Literal["user"]
    content: str | list[Annotated[ContentBlock | ToolResultParam, Field(discriminator="type")]]


AssistantBlock = TextBlockParam | ToolUseParam | ThinkingParam | ServerToolUseParam | WebSearchResultParam


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: str | list[Annotated[AssistantBlock, Field(discriminator="type")]]


class SystemMessage(RequestModel):
    role: Literal["system"]
    content: str | list[TextBlockParam]


MessageParam = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ClientTool(RequestModel):
    type: Literal["custom"] | None = None
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class OtherTool(RequestModel):
    """A tool that Anthropic's service runs, or that its models know."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "other" if isinstance(kind, str) and kind != "custom" else "client"


ToolParam = Annotated[
    Annotated[ClientTool, Tag("client")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_tag)
]


class ToolChoiceParam(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveInt | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Name | None = None
    format: OutputFormat | None = None


class Metadata(RequestModel):
    user_id: Name | None = None


class ContextEdit(RequestModel):
    """A change of the messages before the model sees them; the one that changes nothing is accepted."""

    model_config = ConfigDict(extra="allow")

    type: str
    keep: Any = None


def _keeps_all(edit: ContextEdit) -> ContextEdit:
    if edit.keep != "all":
        message = ", except keep 'all': send the messages that the model shall see"
        raise PydanticCustomError(REFUSED, message, {"is_field": True})
    return edit


class ContextManagement(RequestModel):
    edits: list[Annotated[ContextEdit, AfterValidator(_keeps_all)]] | None = None


class CountTokensRequest(SamplingFields, EngineFields):
    model: Name = Field(description="Name of the served model.")
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] = Field(
        description="Texts or blocks. The answer continues a last message of the assistant."
    )
    system: str | list[TextBlockParam] | None = Field(None, description="A system message before everything else.")
    tools: list[ToolParam] | None = Field(None, description="Tools that the model may use.")
    tool_choice: ToolChoiceParam | None = Field(None, description="auto, any, tool or none.")
    thinking: ThinkingConfig | None = Field(None, description="Reasoning, for templates that can switch it.")
    output_config: OutputConfig | None = Field(None, description="effort, and the format of the text as a JSON schema.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")
    context_management: ContextManagement | None = Field(None, description="Only edits that keep everything.")
    cache_control: CacheControl | None = Field(None, description="Hold the prompt up to the last block for its ttl.")


class MessagesRequest(CountTokensRequest):
    max_tokens: PositiveInt = Field(description="Maximum tokens to generate, with thinking.")
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer, not part of it.")
    metadata: Metadata | None = Field(None, description="user_id: the user's name.")
    stream: bool | None = Field(None, description="Send the message as server-sent events while it grows.")


# Responses.


class TextBlock(ResponseModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: thinking is not signed.")


class ToolUseBlock(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageTokensDetails(ResponseModel):
    thinking_tokens: int


class CacheCreation(ResponseModel):
    ephemeral_1h_input_tokens: int
    ephemeral_5m_input_tokens: int


class MessageUsage(ResponseModel):
    input_tokens: int = Field(description="Prompt tokens that were neither found nor are held now.")
    cache_read_input_tokens: int = Field(description="Prefix cache hits of the prompt, in tokens.")
    cache_creation_input_tokens: int = Field(description="Tokens up to the last mark that were not found, held now.")
    cache_creation: CacheCreation = Field(description="The same by time to live.")
    output_tokens: int
    output_tokens_details: MessageTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageObject(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    input_tokens: int


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str


class AnthropicError(ResponseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None
