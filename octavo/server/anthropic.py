"""``/v1/messages``: Anthropic's Messages API, as a chat whose blocks are converted to messages and back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.sampling_params import DefaultMaxTokens
from octavo.engine.chat_messages import template_variables
from octavo.engine.chat_template import choose_template
from octavo.server.answer_format import read_tools
from octavo.server.chat import Chat, ChoiceEvents, make_chat_prompt, prepare_chat
from octavo.server.fields import REFUSED, SEEN, EngineFields, Name, Phrase, RequestModel, ResponseModel, hint, refused
from octavo.server.http.bodies import read_model, run_in_thread_if_large
from octavo.server.http.errors import ApiError, anthropic_error, renamed_errors, wrong
from octavo.server.http.streaming import Event, PendingChat
from octavo.server.openai.protocol import ChatCompletionRequest, SamplingFields
from octavo.server.prompt_inputs import THINKING_VARIABLES, chat_tokens
from octavo.server.state import ServerState, state_of
from octavo.server.tool_parsers.tool_parser import ChatEvent, ContentDelta, ReasoningDelta, ToolCallStart

# Parts of bodies of ``/v1/messages``: messages and their blocks, tools, and options.

_CACHE = "prefixes are cached without marks"
_BY_THE_MODEL = "tools are used by the model"


class TextBlockParam(RequestModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: Any = hint(_CACHE)
    citations: Any = hint("sources of what an earlier answer says")


class ImageSource(RequestModel):
    """Where an image is: in the request, or at a URL that the server fetches from."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None


class ImageBlockParam(RequestModel):
    """An image, for models that see them."""

    type: Annotated[Literal["image"], SEEN]
    source: ImageSource
    cache_control: Any = hint(_CACHE)


def _is_readable(kind: str | None) -> str | None:
    if kind not in ("text", "content"):
        message = ": of documents, text and content are read, not {kind}"
        raise PydanticCustomError(REFUSED, message, {"kind": repr(kind)})
    return kind


def _is_named(name: str | None) -> str | None:
    if name is None:
        raise PydanticCustomError("missing_name", "a server_tool_use has a name")
    return name


class DocumentSource(RequestModel):
    """A document: a plain text, or blocks. The model reads no PDF, and nothing is fetched."""

    type: Annotated[str | None, AfterValidator(_is_readable), Field(validate_default=True)] = None
    media_type: Literal["text/plain"] | None = None
    data: str | None = Field(None, description="Of text: the text.")
    content: str | list[Annotated[TextBlockParam | ImageBlockParam, Field(discriminator="type")]] | None = Field(
        None, description="Of content: a text, or blocks."
    )


class DocumentBlockParam(RequestModel):
    """A document of plain text, which the model reads as text."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None
    citations: Any = refused("the model does not cite", {"enabled": False})
    cache_control: Any = hint(_CACHE)


class SearchResultParam(RequestModel):
    """A result of the client's search, which the model reads as text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlockParam]
    citations: Any = refused("the model does not cite", {"enabled": False})
    cache_control: Any = hint(_CACHE)


class ToolUseParam(RequestModel):
    """A use of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = hint(_CACHE)
    caller: Any = refused(_BY_THE_MODEL, {"type": "direct"})


ContentBlock = TextBlockParam | ImageBlockParam | DocumentBlockParam | SearchResultParam


class ToolResultParam(RequestModel):
    """The result of a use of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[ContentBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: Any = hint(_CACHE)


class ServerToolUseParam(RequestModel):
    """A use of a tool that another service ran, in an earlier answer."""

    type: Literal["server_tool_use"]
    id: str
    name: Annotated[str | None, AfterValidator(_is_named), Field(validate_default=True)] = None
    input: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    cache_control: Any = hint(_CACHE)
    caller: Any = hint("the model has its result")


class WebSearchResult(RequestModel):
    """A page that a search found; what stands there is encrypted."""

    type: Literal["web_search_result"]
    title: str
    url: str
    page_age: str | None = None
    encrypted_content: Any = hint("only the service that wrote it can read it")


class WebSearchError(RequestModel):
    """A search that failed."""

    type: Literal["web_search_tool_result_error"]
    error_code: str


class WebSearchResultParam(RequestModel):
    """What a search of another service gave, in an earlier answer; the model reads titles and addresses."""

    type: Literal["web_search_tool_result"]
    tool_use_id: str
    content: list[WebSearchResult] | WebSearchError
    cache_control: Any = hint(_CACHE)
    caller: Any = hint("the model has its result")


class ThinkingParam(RequestModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Any = hint("thinking is not signed here")


class UserMessage(RequestModel):
    """A message of the user."""

    role: Literal["user"]
    content: str | list[Annotated[ContentBlock | ToolResultParam, Field(discriminator="type")]]


AssistantBlock = TextBlockParam | ToolUseParam | ThinkingParam | ServerToolUseParam | WebSearchResultParam


class AssistantMessage(RequestModel):
    """A message of the assistant."""

    role: Literal["assistant"]
    content: str | list[Annotated[AssistantBlock, Field(discriminator="type")]]


class SystemMessage(RequestModel):
    """A message of the operator."""

    role: Literal["system"]
    content: str | list[TextBlockParam]


MessageParam = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ClientTool(RequestModel):
    """A tool of the client."""

    type: Literal["custom"] | None = None
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    input_examples: list[dict[str, Any]] | None = None
    strict: bool | None = None
    cache_control: Any = hint(_CACHE)
    eager_input_streaming: Any = hint("what the pieces of an answer add up to is the same")
    defer_loading: Any = hint("all tools are loaded")
    allowed_callers: Any = refused(_BY_THE_MODEL, ["direct"])


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
    """Which tools may or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(RequestModel):
    """Whether the model shall think."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """The effort and the form of an answer."""

    effort: Name | None = None
    format: OutputFormat | None = None


class Metadata(RequestModel):
    """Labels of a request."""

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
    """Changes of the messages before the model sees them."""

    edits: list[Annotated[ContextEdit, AfterValidator(_keeps_all)]] | None = None


# Bodies of ``/v1/messages``, in the format of Anthropic's Messages API.


class CountTokensRequest(SamplingFields, EngineFields):
    """Body of ``/v1/messages/count_tokens``."""

    model: Name = Field(description="Name of the served model.")
    messages: Annotated[list[MessageParam], Field(fail_fast=True)] = Field(
        description="The conversation: texts, or blocks of text, tool_use, tool_result and thinking. If the last "
        "message is the assistant's, the answer continues it."
    )
    system: str | list[TextBlockParam] | None = Field(None, description="A system message before everything else.")
    tools: list[ToolParam] | None = Field(None, description="Tools of the client that the model may use.")
    tool_choice: ToolChoiceParam | None = Field(None, description="auto, any, tool or none.")
    thinking: ThinkingConfig | None = Field(
        None, description="enabled, disabled or adaptive, for templates that know it; others think as they do."
    )
    output_config: OutputConfig | None = Field(None, description="The format of the text, as a JSON schema; effort.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")
    context_management: ContextManagement | None = Field(None, description="Edits that keep everything.")
    cache_control: Any = hint("prefixes are cached without marks")
    user_profile_id: Any = hint("a label of the client's")
    workspace_id: Any = hint("a label of the client's")
    anthropic_version: Any = hint("there is one version of this API")
    anthropic_beta: Any = hint("each field says itself what it asks for")
    betas: Any = hint("each field says itself what it asks for")
    billing_policy: Any = hint("there is no bill")
    fallback_credit_token: Any = hint("there is no bill")
    fallbacks: Any = hint("no answer is withheld, after which another model would be asked")
    speed: Any = hint("there is one speed")
    container: Any = refused("code is not run")
    mcp_servers: Any = refused("MCP servers are not called; a client can offer their tools as its own", [])
    inference_geo: Any = refused("the model runs where this server does")
    diagnostics: Any = refused("/metrics counts what the prefix cache finds")
    compaction: Any = refused("send the messages that the model shall see")
    thread: Any = refused("send the messages that the model shall see")
    n: Any = refused("there is one message for each request", 1)


class MessagesRequest(CountTokensRequest):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(
        description="Most tokens to generate, those of thinking included."
    )
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer; not part of it.")
    metadata: Metadata | None = Field(None, description="user_id: whose request it is.")
    stream: bool | None = Field(None, description="Send the message as server-sent events while it grows.")


# Responses ----------------------------------------------------------------------------------------------------------


class TextBlock(ResponseModel):
    """A text that the model wrote."""

    type: Literal["text"]
    text: str


class ThinkingBlock(ResponseModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field(description="Empty: thinking is not signed.")


class ToolUseBlock(ResponseModel):
    """A tool that the model uses."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageTokensDetails(ResponseModel):
    """Details of the generated tokens."""

    thinking_tokens: int


class MessageUsage(ResponseModel):
    """Tokens used by a message."""

    input_tokens: int = Field(description="Tokens of the prompt that were not found in the prefix cache.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were.")
    cache_creation_input_tokens: int = Field(description="Always 0: what is put into the prefix cache is not counted.")
    output_tokens: int
    output_tokens_details: MessageTokensDetails


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageObject(ResponseModel):
    """A response of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    """A response of ``/v1/messages/count_tokens``."""

    input_tokens: int


class AnthropicModel(ResponseModel):
    """A served model, as Anthropic's API describes one."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModelList(ResponseModel):
    """All names of the model."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicErrorDetail(ResponseModel):
    """Description of an error."""

    type: str
    message: str


class AnthropicError(ResponseModel):
    """A response with an error status."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


# A request of the Messages API as the internal chat request.

#: Fields of a chat by their names here; errors about a chat are told under these.
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice",
}


def chat_body(service: ServerState, body: CountTokensRequest) -> dict[str, Any]:
    """Fields of the chat that a request asks for.

    Raises:
        ApiError: 400, naming what contradicts itself or is not supported.
    """
    messages = _messages(body)
    chat = {name: value for name in SamplingFields.model_fields if (value := getattr(body, name)) is not None}
    chat |= {"model": body.model, "messages": messages} | _tools(service, body) | _output_config(body)
    if messages and messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise wrong("messages", "the last message uses a tool; its tool_result must follow")
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.thinking is not None and body.thinking.budget_tokens is not None and body.thinking_token_budget is None:
        chat["thinking_token_budget"] = body.thinking.budget_tokens
    if variables := {**_thinking(service, body), **(body.chat_template_kwargs or {})}:
        chat["chat_template_kwargs"] = variables
    if body.thinking is not None and body.thinking.display == "omitted":
        chat["include_reasoning"] = False
    if isinstance(body, MessagesRequest):
        chat |= {"stop": body.stop_sequences, "stream": body.stream}
        chat["user"] = body.metadata and body.metadata.user_id
    return chat


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _texts(body.system)})
    used: set[str] = set()
    for i, message in enumerate(body.messages):
        content = message.content
        blocks = [TextBlockParam(type="text", text=content)] if isinstance(content, str) else content
        if not blocks:
            messages.append({"role": message.role, "content": ""})
        for k, block in enumerate(blocks):
            if isinstance(block, ToolResultParam | WebSearchResultParam):
                messages.append(_tool_result(block, used, f"messages[{i}].content[{k}]"))
                continue
            turn = _turn(messages, message.role)
            if isinstance(block, ContentBlock):
                turn["content"] += _parts(block, f"messages[{i}].content[{k}]")
            elif isinstance(block, ToolUseParam | ServerToolUseParam):
                used.add(block.id)
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
            else:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
    for said in messages:
        said["content"] = _joined(said["content"])
    return messages


def _joined(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A content without images as one text, blocks as lines: templates write nothing between parts."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def _turn(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it is of this role, else a new one: consecutive messages of a role are one turn."""
    if not messages or messages[-1]["role"] != role or isinstance(messages[-1]["content"], str):
        messages.append({"role": role, "content": []})
    return messages[-1]


def _tool_result(block: ToolResultParam | WebSearchResultParam, used: set[str], where: str) -> dict[str, Any]:
    if block.tool_use_id not in used:
        raise wrong(f"{where}.tool_use_id", f"there is no tool_use {block.tool_use_id[:100]!r} before it")
    if isinstance(block, WebSearchResultParam):
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": _texts(_found(block))}
    blocks = [] if block.content is None else block.content
    content = (
        _texts(blocks)
        if isinstance(blocks, str)
        else [piece for k, part in enumerate(blocks) for piece in _parts(part, f"{where}.content[{k}]")]
    )
    if block.is_error:
        # A chat has no other place for it.
        has_text = bool(content) and "text" in content[0]
        error = f"Error: {content[0]['text'] if has_text else ''}"
        content = [{"type": "text", "text": error}, *content[1 if has_text else 0 :]]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _found(block: WebSearchResultParam) -> str:
    """What a search found, as far as it can be read."""
    if isinstance(block.content, WebSearchError):
        return f"Error: {block.content.error_code}"
    ages = [f" ({page.page_age})" if page.page_age else "" for page in block.content]
    return "\n".join(f"{page.title}: {page.url}{age}" for page, age in zip(block.content, ages, strict=True))


def _parts(block: ContentBlock, where: str) -> list[dict[str, Any]]:
    """A block as parts of a chat's message: documents as texts between marks, as Anthropic's guide writes them."""
    if isinstance(block, TextBlockParam | ImageBlockParam):
        return [_part(block, where)]
    header: dict[str, str | None]
    if isinstance(block, SearchResultParam):
        header = {"source": block.source, "title": block.title}
        inner = [{"type": "text", "text": part.text} for part in block.content]
    else:
        header, inner = {"title": block.title, "context": block.context}, _document(block, f"{where}.source")
    head = "".join(f"<{name}>{text}</{name}>\n" for name, text in header.items() if text)
    if len(inner) == 1 and inner[0]["type"] == "text":  # one part: no template writes anything between the lines
        inner = [{"type": "text", "text": f"<document>\n{head}{inner[0]['text']}\n</document>"}]
    else:
        inner = [{"type": "text", "text": f"<document>\n{head}"}, *inner, {"type": "text", "text": "\n</document>"}]
    return inner


def _document(block: DocumentBlockParam, where: str) -> list[dict[str, Any]]:
    """What a document holds."""
    source = block.source
    name = "data" if source.type == "text" else "content"
    if (value := getattr(source, name)) is None:
        raise wrong(f"{where}.{name}", f"it is missing, for a source of type {source.type!r}")
    if isinstance(value, str):
        return _texts(value)
    return [_part(part, f"{where}.content[{k}]") for k, part in enumerate(value)]


def _part(block: TextBlockParam | ImageBlockParam, where: str) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    if isinstance(block, TextBlockParam):
        return {"type": "text", "text": block.text}
    source = block.source
    name = "data" if source.type == "base64" else "url"
    if (value := getattr(source, name)) is None:
        raise wrong(f"{where}.source.{name}", f"it is missing, for a source of type {source.type!r}")
    url = f"data:{source.media_type or ''};base64,{value}" if name == "data" else value
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(value: str | Sequence[TextBlockParam]) -> list[dict[str, Any]]:
    """A text, or blocks of text, as parts of a chat's message."""
    texts = [value] if isinstance(value, str) else [block.text for block in value]
    return [{"type": "text", "text": text} for text in texts]


def _tools(service: ServerState, body: CountTokensRequest) -> dict[str, Any]:
    """Tools and the choice among them, in the notation of chats."""
    tools = []
    for i, tool in enumerate(body.tools or []):
        if isinstance(tool, ClientTool):
            tools.append({"type": "function", "function": _function(tool)})
        else:
            service.leave_out_tool(f"tools[{i}]", tool.type)
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = named if choice.type == "tool" else {"any": "required"}.get(choice.type, choice.type)
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _function(tool: ClientTool) -> dict[str, Any]:
    description = tool.description
    if tool.input_examples:
        examples = json.dumps(tool.input_examples, ensure_ascii=False)
        description = f"{description or ''}\nExamples of its input: {examples}".strip()
    function = {"name": tool.name, "parameters": tool.input_schema, "description": description, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}


def _output_config(body: CountTokensRequest) -> dict[str, Any]:
    config, fields = body.output_config, dict[str, Any]()
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if config is not None and config.format is not None:
        schema = {"name": "output", "schema": config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _thinking(service: ServerState, body: CountTokensRequest) -> dict[str, Any]:
    """The variable that tells the chat template whether the model shall think; a hint where there is none."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return {}
    template = choose_template(service.llm.tokenizer.chat_templates, None, has_tools=bool(body.tools))
    names = template_variables(template)
    return {name: body.thinking.type == "enabled" for name in THINKING_VARIABLES if name in names}


# A message as it grows: events of a chat's choice to content blocks and events of the Messages API.


class GrowingMessage:
    """A message and the block that is written now. Every method returns the events that tell of it."""

    def __init__(self, message: MessageObject) -> None:
        """Takes over ``message``, which has no content yet."""
        self.message = message
        self._is_open = False
        #: What the open block's text, or its JSON text of a tool's input, is made of.
        self._pieces: list[str] = []

    def begin(self) -> list[Event]:
        """The message has begun."""
        return [{"type": "message_start", "message": self.message.model_dump()}]

    def add(self, chat_events: Iterable[ChatEvent]) -> list[Event]:
        """An increment of the choice."""
        events = []
        for event in chat_events:
            if isinstance(event, ContentDelta):
                if not (self._is_open and isinstance(self.message.content[-1], TextBlock)):
                    events += self._start(TextBlock(type="text", text=""))
                events.append(self._delta("text", event.text))
            elif isinstance(event, ReasoningDelta):
                if not (self._is_open and isinstance(self.message.content[-1], ThinkingBlock)):
                    events += self._start(ThinkingBlock(type="thinking", thinking="", signature=""))
                events.append(self._delta("thinking", event.text))
            elif isinstance(event, ToolCallStart):
                events += self._start(ToolUseBlock(type="tool_use", id=event.id, name=event.name, input={}))
            else:
                self._pieces.append(event.text)
                delta = _delta("input_json", "partial_json", event.text)
                events.append(self._of_block("content_block_delta", delta=delta))
        return events

    def end(self, reason: StopReason, stop_sequence: str | None, usage: MessageUsage) -> list[Event]:
        """The message has ended."""
        events = self._stop()
        message = self.message
        message.stop_reason, message.stop_sequence, message.usage = reason, stop_sequence, usage
        delta = {"stop_reason": reason, "stop_sequence": stop_sequence}
        events.append({"type": "message_delta", "delta": delta, "usage": usage.model_dump()})
        return [*events, {"type": "message_stop"}]

    def _delta(self, kind: str, text: str) -> Event:
        """More of a text or of thinking; the type of the block is the name of the field that holds it."""
        self._pieces.append(text)
        return self._of_block("content_block_delta", delta=_delta(kind, kind, text))

    def _start(self, block: Block) -> list[Event]:
        events = self._stop()
        self.message.content.append(block)
        self._is_open = True
        events.append(self._of_block("content_block_start", content_block=block.model_dump()))
        if len(self.message.content) == 1:
            events.append({"type": "ping"})
        return events

    def _stop(self) -> list[Event]:
        if not self._is_open:
            return []
        block = self.message.content[-1]
        text, self._pieces, self._is_open = "".join(self._pieces), [], False
        if isinstance(block, ToolUseBlock):
            block.input = _parsed(text)
        else:
            setattr(block, block.type, text)
        return [self._of_block("content_block_stop")]

    def _of_block(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message.content) - 1, **fields}


def _delta(kind: str, field: str, text: str) -> dict[str, str]:
    return {"type": f"{kind}_delta", field: text}


def _parsed(text: str) -> dict[str, Any]:
    """The object that a JSON text says, or begins to say, as the text may end early.

    What is no object is told under the name ``arguments``, as it was written.
    """
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": text}


# The routes under ``/v1/messages``.


async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answers a conversation, as one message or as a stream of events."""
    service = state_of(request)
    deadline = service.deadline()
    with renamed_errors(RENAMED):
        chat = await run_in_thread_if_large(request, _chat, service, body)
        pending = _PendingMessage(await prepare_chat(service, request, chat, prefix="msg"), body.max_tokens)
    return await pending.respond(request, body.stream, deadline)


async def count_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """Tokens of a conversation, as the model's template writes it."""
    service = state_of(request)
    await service.model(body.model)
    with renamed_errors(RENAMED):
        chat = await run_in_thread_if_large(request, _chat, service, body)
        prompt = await make_chat_prompt(service, request, chat, read_tools(chat.tools, chat.tool_choice))
        tokens = await chat_tokens(service, request, chat, prompt.text)
    return TokenCount(input_tokens=len(tokens["prompt_token_ids"]))


def _chat(service: ServerState, body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that a request asks for; to be called within ``renamed_errors``."""
    chat = read_model(ChatCompletionRequest, chat_body(service, body), service)
    if isinstance(body, MessagesRequest):
        # As Anthropic's API: a message that would exceed the context ends with it. Agents ask for as much as they may.
        chat.max_completion_tokens = DefaultMaxTokens(body.max_tokens)
    return chat


class _PendingMessage(PendingChat):
    names = RENAMED

    def __init__(self, chat: Chat, max_tokens: int) -> None:
        super().__init__(chat)
        self._max_tokens = max_tokens
        self._growing: GrowingMessage | None = None

    def grow(self, choice: ChoiceEvents) -> list[Event]:
        events = []
        if self._growing is None:
            self._growing = GrowingMessage(self._begun())
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

    def _begun(self) -> MessageObject:
        """The message before its content."""
        return MessageObject(
            id=f"msg_{uuid.uuid4().hex}",
            type="message",
            role="assistant",
            model=self.chat.generation.model.name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self.chat.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            cache_creation_input_tokens=0,
            output_tokens=usage.completion_tokens,
            output_tokens_details=MessageTokensDetails(thinking_tokens=self.chat.generation.reasoning_tokens or 0),
        )

    def _stop_reason(self, choice: ChoiceEvents, content: list[Block]) -> tuple[StopReason, str | None]:
        """Why the choice ended, and the stop text that ended it."""
        if choice.finish_reason == "length":
            is_whole = self.chat.generation.usage().completion_tokens >= self._max_tokens
            return ("max_tokens" if is_whole else "model_context_window_exceeded"), None
        if any(isinstance(block, ToolUseBlock) for block in content):
            return "tool_use", None
        stop = choice.stop_reason
        return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)
