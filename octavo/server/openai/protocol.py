"""Request and response bodies of completions and chats: OpenAI's fields, and those that other engines add."""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import Struct
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Tag,
    create_model,
    model_validator,
)

from octavo.core.sampling_params import BeamSearchParams, SamplingParams, parameters
from octavo.server.fields import (
    SEEN,
    Int,
    Name,
    OpenAIFields,
    Phrase,
    RequestModel,
    ResponseModel,
    Salt,
    Seed,
    TextKind,
    ThinkingFields,
    TokenLimit,
    type_of,
)

#: Marks up to which the prompt is held in the prefix cache.
CacheControl = Annotated[Any, Field(description='{"type": "ephemeral", "ttl": "1h"}: hold the prompt up to here.')]
CacheBreakpoint = Annotated[Any, Field(description='{"mode": "explicit"}: hold the prompt up to here.')]

# The format of the answer, in the names of several APIs.


class JsonSchemaFormat(RequestModel):
    name: Name | None = Field(None, description="Accepted, without effect.")
    description: str | None = Field(None, description="Accepted, without effect.")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The JSON schema.")
    strict: bool | None = Field(
        None,
        description="Refuse keywords that cannot be enforced (else listed in the header X-Octavo-Relaxed-Schema), and "
        "forbid properties that the schema does not name.",
    )


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description="Free text, any JSON object, JSON of a schema, or tagged text."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="With json_schema.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="With json_object: a JSON schema.")
    structures: list[dict[str, Any]] | None = Field(
        None, description="With structural_tag: begin, schema and end of each tag."
    )
    triggers: list[str] | None = Field(None, description="With structural_tag: texts that begin tags.")


class FormFields(RequestModel):
    response_format: ResponseFormat | None = Field(None, description="The format of the answer, as in OpenAI's API.")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="json, json_object, regex, choice, grammar or structural_tag; and options."
    )
    guided_json: str | dict[str, Any] | bool | None = Field(None, description="As structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Another name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="Another name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = Field(None, description="With guided_json: a regex for JSON whitespace.")
    json_schema: str | dict[str, Any] | None = Field(None, description="Another name of structured_outputs.json.")
    regex: str | None = Field(None, description="Another name of structured_outputs.regex.")
    grammar: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    ebnf: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    structural_tag: str | dict[str, Any] | None = Field(None, description="As structured_outputs.structural_tag.")


# Tools and tool calls.


class FunctionDefinition(RequestModel):
    """A function that the model may call. Templates may read further fields."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments (default: it has none).")
    strict: bool | None = Field(None, description="Constrain the arguments to the schema.")


class FunctionTool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl = None
    _sent: Any = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(value)
        tool._sent = value
        return tool

    @property
    def sent(self) -> dict[str, Any]:
        """The tool as the client sent it (key order, no defaults), for templates that dump it as JSON."""
        return {name: value for name, value in self._sent.items() if name != "cache_control"}


class CustomDefinition(RequestModel):
    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    format: dict[str, Any] | None = Field(None, description="The format of the text, which the model reads.")


class CustomTool(RequestModel):
    """A tool whose input is a text; the model sees a function with one argument, ``input``."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: CacheControl = None


class OtherTool(RequestModel):
    """A tool that another service runs, such as web search."""

    model_config = ConfigDict(extra="allow")

    type: str


def _tool_tag(tool: Any) -> str:  # not the name of a field
    return f"{type_of(tool)}_tool" if type_of(tool) in ("function", "custom") else "other_tool"


Tool = Annotated[
    Annotated[FunctionTool, Tag("function_tool")]
    | Annotated[CustomTool, Tag("custom_tool")]
    | Annotated[OtherTool, Tag("other_tool")],
    Discriminator(_tool_tag),
]


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    """Names a function or a custom tool."""

    type: str
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @property
    def name(self) -> str | None:
        named = {"function": self.function, "custom": self.custom}.get(self.type)
        return None if named is None else named.name


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(NamedTool):
    allowed_tools: AllowedTools | None = None


class FunctionCall(ResponseModel):
    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomCall(ResponseModel):
    """A call of a custom tool, or an increment of its input."""

    name: str | None = None
    input: str


class CustomToolCall(ResponseModel):
    id: str
    type: Literal["custom"]
    custom: CustomCall


class FunctionCallDelta(ResponseModel):
    """An increment of a call: first its name, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """An increment of a call; the first one has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCallDelta | None = None
    custom: CustomCall | None = None


# Requests.


#: Parameters that only completions and chats have.
_OF_COMPLETIONS = frozenset(
    {
        *("n", "best_of", "stop", "max_tokens", "prompt_logprobs", "logprob_token_ids", "bad_words"),
        *("allowed_token_ids", "include_stop_str_in_output"),
    }
)
#: Parameters whose fields have another name or type in each route.
_ELSEWHERE = frozenset({"logprobs", "detokenize", "extra_args", "structured_outputs", "truncate_prompt_tokens"})


def parameter_fields(kind: type[Struct], names: Collection[str]) -> dict[str, Any]:
    """Fields of a request body for declared parameters. The engine checks ranges; a body bounds sizes."""
    types: dict[Any, Any] = {
        str: Phrase,
        list[str]: list[Phrase],
        list[int]: list[Int],
        dict[int, float]: dict[str, float],
    }
    fields: dict[str, Any] = {}
    for name in names:
        declared = parameters(kind)[name]
        is_long = declared.high is not None and declared.high >= 2**31
        body_types = [(Seed if is_long else Int) if each is int else types.get(each, each) for each in declared.types]
        has_default = isinstance(declared.default, (bool, int, float)) and name != "max_tokens"
        extra = {"x-default": declared.default} if has_default else None  # "default" is null, which the route takes too
        field = Field(None, description=declared.description, json_schema_extra=extra)
        fields[name] = (reduce(or_, body_types, None), field)
    return fields


if TYPE_CHECKING:

    class _SharedParameters(RequestModel):
        """Fields made of ``SamplingParams``; here those that code reads by name."""

        repetition_penalty: float | None
        thinking_token_budget: int | None
        stop_token_ids: list[int] | None
        ignore_eos: bool | None
        skip_special_tokens: bool | None

    class _CompletionParameters(RequestModel):
        n: int | None
        best_of: int | None
        stop: str | list[str] | None
        max_tokens: int | None
        prompt_logprobs: int | None
        logprob_token_ids: list[int] | None
        length_penalty: float | None
        early_stopping: bool | Literal["never"] | None

else:
    _SharedParameters = create_model(
        "_SharedParameters",
        __base__=RequestModel,
        **parameter_fields(
            SamplingParams, [n for n in parameters(SamplingParams) if n not in _OF_COMPLETIONS | _ELSEWHERE]
        ),
    )
    _CompletionParameters = create_model(
        "_CompletionParameters",
        __base__=RequestModel,
        **parameter_fields(SamplingParams, [n for n in parameters(SamplingParams) if n in _OF_COMPLETIONS]),
        **parameter_fields(BeamSearchParams, ("length_penalty", "early_stopping")),
    )


class SamplingFields(_SharedParameters):
    """The fields of all routes that generate: every parameter that is not of completions and chats alone."""

    priority: Int | float | None = Field(None, description="Lower runs first; 0 if the scheduling policy has none.")
    cache_salt: Salt | None = Field(None, description="Requests with different salts share no cached prefix.")


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the number of tokens used.")
    continuous_usage_stats: bool | None = Field(None, description="Send the tokens used so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class GenerationRequest(SamplingFields, _CompletionParameters, FormFields, OpenAIFields):
    """The fields that completions and chat completions share."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    user: Name | None = Field(None, description="The user's name, for scheduling policies that share by user.")
    # Beyond OpenAI:
    vllm_xargs: dict[str, Any] | None = Field(None, description="Arguments of the server's logits processors, by name.")
    return_token_ids: bool | None = Field(None, description="Send the token ids of the prompt and of each choice.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Logprobs name tokens as "token_id:ID".')
    use_beam_search: bool | None = Field(None, description="Beam search of width best_of (or n).")
    ttft_target: float | None = Field(None, description="Target seconds to the first token (deadline policy only).")
    tpot_target: float | None = Field(None, description="Target seconds between tokens (deadline policy only).")
    truncate_prompt_tokens: TokenLimit | None = Field(None, description="Maximum prompt tokens; -1: as many as fit.")
    truncation_side: Literal["left", "right"] | None = Field(None, description="The side to cut (default left).")


# fail_fast: the first entry of a wrong type is enough.
TokenIds = Annotated[list[Int], Field(fail_fast=True)]


class EncoderDecoderParts(RequestModel):
    """A prompt of an encoder-decoder model, with a text for each of the two."""

    encoder_prompt: str | TokenIds = Field(description="Encoder input: a text or token ids.")
    decoder_prompt: str | TokenIds | None = Field(None, description="Beginning of the output; default: the model's.")


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[list[Int]], Field(fail_fast=True)]
        | EncoderDecoderParts
        | Annotated[list[EncoderDecoderParts], Field(fail_fast=True)]
    ) = Field(
        description="A text, token ids, or a list of either; for encoder-decoder models the encoder input, or objects."
    )
    logprobs: Int | None = Field(None, description="Logprobs of this many most likely tokens per position.")
    echo: bool | None = Field(None, description="Put the prompt before the completion.")
    suffix: str | None = Field(None, description="The text after the completion; for fill-in-the-middle models.")
    add_special_tokens: bool | None = Field(None, description="Add special tokens to a text (default true).")


class TextPart(RequestModel):
    type: TextKind
    text: str
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheBreakpoint = None


class ImageUrl(RequestModel):
    url: str = Field(description="data:image/png;base64,..., or http(s)://... where the server fetches images.")


class ImagePart(RequestModel):
    type: Annotated[Literal["image_url"], SEEN]
    image_url: str | ImageUrl
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheBreakpoint = None

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


ChatPart = Annotated[
    Annotated[TextPart, Tag("text_part")] | Annotated[ImagePart, Tag("image_part")],
    Discriminator(lambda part: "image_part" if type_of(part) == "image_url" else "text_part"),
]


class ChatMessage(RequestModel):
    """One message of a conversation. Templates may read further fields."""

    model_config = ConfigDict(extra="allow")

    role: Name = Field(description="system, developer, user, assistant, tool, or a role of the model's template.")
    content: str | list[ChatPart] | None = Field(
        None,
        description='Text, or parts: {"type": "text", "text": ..}, {"type": "image_url", "image_url": {"url": ..}}.',
    )
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Calls that the assistant made.")
    tool_call_id: str | None = Field(None, description="In a tool's message: the id of its call.")
    reasoning_content: str | None = Field(None, description="The reasoning of the assistant; also named reasoning.")
    reasoning: Any = Field(None, description="Another name of reasoning_content.")
    reasoning_details: Any = Field(None, description="The same as a list of parts.")
    cache_control: CacheControl = None


class TemplateOptions(ThinkingFields):
    """Options of the chat template."""

    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's answer (default true).")
    continue_final_message: bool | None = Field(None, description="Continue the last message (default false).")
    chat_template: str | None = Field(
        None, description="Name of one of the model's templates; or, if trusted, a template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")
    documents: list[dict[str, Any]] | None = Field(None, description="Documents, for templates that know them.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")


class Prediction(RequestModel):
    type: Literal["content"]
    content: str | list[TextPart] = Field(description="A text, or its parts.")


class ChatCompletionRequest(GenerationRequest, TemplateOptions):
    token_limits = ("max_completion_tokens", "max_tokens")

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(description="The conversation.")
    max_completion_tokens: Int | None = Field(None, description="Maximum tokens to generate; overrides max_tokens.")
    add_special_tokens: bool | None = Field(None, description="Add special tokens to the chat (default false).")
    logprobs: bool | None = Field(None, description="Send logprobs.")
    prediction: Prediction | None = Field(None, description="A predicted output: speeds up the tokens that match it.")
    top_logprobs: Int | None = Field(None, description="This many most likely tokens per position.")
    tool_choice: str | ToolChoice | None = Field(None, description="none, auto (default), required, or functions.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call (default true).")
    parse_tool_calls: bool | None = Field(None, description="False: calls stay in the content (default true).")
    include_reasoning: bool | None = Field(None, description="False: reasoning is left out (default true).")
    separate_reasoning: bool | None = Field(None, description="False: reasoning stays in the content (default true).")
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        None, description="none: reasoning stays in the content."
    )
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")


# Responses, and chunks of their streams.

#: For each prompt token: None, or token id -> {"logprob", "rank", "decoded_token"}.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]
StopReason = str | int | None


class PromptDetails(ResponseModel):
    cached_tokens: int = Field(description="Prefix cache hits of the prompt.")
    cache_write_tokens: int = Field(0, description="Tokens that were not found and are held now, if it was asked for.")


class CompletionDetails(ResponseModel):
    """Details of the generated tokens, if draft tokens or reasoning are counted."""

    accepted_prediction_tokens: int | None = Field(None, description="Draft tokens that were accepted.")
    rejected_prediction_tokens: int | None = Field(None, description="Draft tokens that were rejected.")
    reasoning_tokens: int | None = Field(None, description="Reasoning tokens, if the model marks its reasoning.")


class Usage(ResponseModel):
    """Tokens of a request: each prompt once, and all tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class CompletionLogprobs(ResponseModel):
    """Parallel lists with one entry per token. The first token of an echoed prompt has null."""

    text_offset: list[int] = Field(description="Offsets of the tokens in the text of the choice, in characters.")
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    """One completion, or an increment of it."""

    finish_reason: Literal["stop", "length"] | None
    index: int
    logprobs: CompletionLogprobs | None
    text: str
    stop_reason: StopReason = Field(None, description="The stop text or the stop token id.")
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ResponseModel):
    """A response of ``/v1/completions``, or a chunk of its stream."""

    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    object: Literal["text_completion"]
    system_fingerprint: str
    usage: Usage | None = None


class TopLogprob(ResponseModel):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    """The generated token and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    content: list[TokenLogprob]
    refusal: None


class Message(ResponseModel):
    content: str | None
    refusal: None
    role: Literal["assistant"]
    tool_calls: list[ToolCall | CustomToolCall] | None = None
    reasoning_content: str | None = Field(None, description="The reasoning before the answer.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")


class ChatChoice(ResponseModel):
    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int
    logprobs: ChoiceLogprobs | None
    message: Message
    stop_reason: StopReason = Field(None, description="The stop text or the stop token id.")
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: Literal["chat.completion"]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Delta(ResponseModel):
    content: str | None = None
    role: Literal["assistant"] | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(ResponseModel):
    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    index: int
    logprobs: ChoiceLogprobs | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
