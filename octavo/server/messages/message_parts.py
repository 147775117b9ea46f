"""Parts of bodies of ``/v1/messages``: messages and their blocks, tools, and options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from octavo.server.field_marks import REFUSED, hint, refused
from octavo.server.protocol_base import SEEN, Name, RequestModel

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
