"""Bodies and responses of ``/v2/chat`` and ``/v2/embed``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.field_marks import hint, refused
from octavo.server.pooling.pooled_fields import PooledFields
from octavo.server.protocol import Tool
from octavo.server.protocol_base import Int, Name, Phrase, RequestModel, ResponseModel, Seed

# Chats --------------------------------------------------------------------------------------------------------------


class CohereImage(RequestModel):
    """Where an image is."""

    url: str = Field(description="An address, or the image itself as data: URL.")
    detail: Any = hint("an image is read as the model's files say")


class CohereDocument(RequestModel):
    """A document, of a request or of a tool's result."""

    id: str | None = Field(None, description="Its name, for the model.")
    data: str | dict[str, Any] = Field(description="Its text, or its fields.")


class CoherePart(RequestModel):
    """A part of a message's content: what its type says."""

    type: Literal["text", "image_url", "thinking", "document"]
    text: str | None = Field(None, description="Of a text.")
    thinking: str | None = Field(None, description="What the model thought in an earlier answer.")
    image_url: CohereImage | None = Field(None, description="Of an image.")
    document: CohereDocument | None = Field(None, description="Of a tool's result.")


class CohereMessage(RequestModel):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[CoherePart] | None = Field(None, description="A text, or parts.")
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Calls that the assistant made.")
    tool_plan: str | None = Field(None, description="What the assistant wrote before its calls.")
    tool_call_id: str | None = Field(None, description="The call that a tool's result is of.")
    citations: Any = hint("the model is not told of them")


class CohereFormat(RequestModel):
    """The form of the answer."""

    type: Literal["text", "json_object"]
    json_schema: dict[str, Any] | None = Field(None, description="The schema of the object (default: any).")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Another name of json_schema.")


class CohereThinking(RequestModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled"]
    token_budget: Int | None = Field(None, description="Most tokens of thinking, which is closed then.")


class CohereChatRequest(RequestModel):
    """Body of ``/v2/chat``."""

    model: Name | None = Field(None, description="Name of the served model or of an adapter; default: the model.")
    messages: Annotated[list[CohereMessage], Field(fail_fast=True)] = Field(description="The conversation.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["REQUIRED", "NONE"] | None = Field(
        None, description="REQUIRED: it must call one; NONE: it calls none (default: as it likes)."
    )
    strict_tools: bool | None = Field(None, description="Arguments of calls have the schemas of the functions.")
    documents: list[str | CohereDocument] | None = Field(None, description="Documents, for templates that know them.")
    response_format: CohereFormat | None = Field(None, description="The form of the answer.")
    max_tokens: Int | None = Field(None, description="Most tokens to generate.")
    stop_sequences: list[Phrase] | None = Field(None, description="Texts that end the answer; not part of it.")
    temperature: float | None = Field(None, description="0 always takes the most likely token.")
    seed: Seed | None = Field(None, description="Fixes the random numbers.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    k: Int | None = Field(None, description="Keep this many of the most likely tokens; 0 is off.")
    p: float | None = Field(None, description="Keep the smallest set of tokens that reaches this probability.")
    thinking: CohereThinking | None = Field(None, description="Whether the model thinks before it answers.")
    priority: Int | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    logprobs: Any = refused("/v1/chat/completions sends logprobs", False)
    citation_options: Any = refused("citations are not made", {"mode": "OFF"}, {"mode": "off"})
    safety_mode: Any = refused("nothing is put before the conversation", "OFF", "NONE")
    raw_prompting: Any = refused("/v1/completions takes plain prompts", False)


class CohereText(ResponseModel):
    """A text that the model wrote, or what it thought."""

    type: Literal["text", "thinking"]
    text: str | None = None
    thinking: str | None = None


class CohereFunction(ResponseModel):
    """The function that a call names, and its arguments as JSON text."""

    name: str
    arguments: str


class CohereCall(ResponseModel):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CohereFunction


class CohereAnswer(ResponseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: list[CohereText] | None = None
    tool_calls: list[CohereCall] | None = None


class CohereTokens(ResponseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    output_tokens: int


class CohereUsage(ResponseModel):
    """Tokens used by a chat."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int = Field(description="Tokens of the prompt that were found in the prefix cache.")


CohereFinish = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"]


class CohereChat(ResponseModel):
    """A response of ``/v2/chat``."""

    id: str
    finish_reason: CohereFinish
    message: CohereAnswer
    usage: CohereUsage


# Vectors ------------------------------------------------------------------------------------------------------------


class CohereInput(RequestModel):
    """An input in parts."""

    content: list[CoherePart] = Field(description="Parts of a text.")


class CohereEmbedRequest(PooledFields):
    """Body of ``/v2/embed``."""

    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description="Texts.")
    inputs: Annotated[list[CohereInput], Field(fail_fast=True)] | None = Field(
        None, description="In place of texts: each in parts."
    )
    input_type: Name | None = Field(
        None,
        description="search_query, search_document, classification or clustering: the model's prompt of such a name, "
        "if it has one, is put before each text.",
    )
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = Field(
        None,
        description="How vectors are sent: as numbers (default), as base64 of float32, or a bit for each number that "
        "is above 0, in bytes with sign (binary) or without.",
    )
    output_dimension: Int | None = Field(
        None, description="Numbers of a vector, of models that were trained for fewer than all (Matryoshka)."
    )
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END (default): cut longer texts to as many tokens as the model takes; NONE: refuse them."
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Cut texts to so many tokens."
    )
    images: Any = refused("images are not read for vectors and scores", [])


#: Within the class below ``float`` is a field.
Numbers = list[float]


class CohereVectors(ResponseModel):
    """Vectors by the type in which they are sent, in the order of the texts."""

    float: list[Numbers] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbeddings(ResponseModel):
    """A response of ``/v2/embed``."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: CohereVectors
    texts: list[str]
    meta: dict[str, Any] = Field(description="Version of Cohere's API, and the tokens in its words.")
