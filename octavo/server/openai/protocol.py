"""Request and response bodies of completions and chats: OpenAI's fields, and those that other engines add."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from octavo.server.fields import (
    CACHED,
    PROCESSED,
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
    hint,
    refused,
    type_of,
)

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
    cache_control: Any = hint(CACHED)
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
    cache_control: Any = hint(CACHED)


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


class SamplingFields(RequestModel):
    temperature: float | None = Field(None, description="0: greedy (default: the model's, else 1).")
    top_p: float | None = Field(None, description="Sample from the smallest set of tokens with this probability.")
    top_k: Int | None = Field(None, description="Sample from this many most likely tokens; 0 or -1: from all.")
    min_p: float | None = Field(None, description="Drop tokens below this fraction of the highest probability.")
    seed: Seed | None = Field(None, description="Makes sampling reproducible.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    repetition_penalty: float | None = Field(None, description="Divides logits of tokens in prompt or output.")
    logit_bias: dict[str, float] | None = Field(None, description="Values added to logits, by token id.")
    stop_token_ids: list[Int] | None = Field(None, description="Token ids that end the answer.")
    ignore_eos: bool | None = Field(None, description="Continue after an end-of-sequence token.")
    min_tokens: Int | None = Field(None, description="Minimum tokens before a stop or an end-of-sequence token.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    priority: Int | float | None = Field(None, description="Lower runs first; 0 if the scheduling policy has none.")
    cache_salt: Salt | None = Field(None, description="Requests with different salts share no cached prefix.")
    thinking_token_budget: Int | None = Field(None, description="Maximum reasoning tokens; -1 (default): no limit.")


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(None, description="Send a last chunk with the number of tokens used.")
    continuous_usage_stats: bool | None = Field(None, description="Send the tokens used so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class GenerationRequest(SamplingFields, FormFields, OpenAIFields):
    """The fields that completions and chat completions share."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    max_tokens: Int | None = Field(None, description="Maximum tokens to generate; must fit the context.")
    n: Int | None = Field(None, description="Completions of each prompt (default 1).")
    best_of: Int | None = Field(None, description="Sample this many, return the n most likely; width of beam search.")
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer, without being part of it.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    user: Name | None = Field(None, description="The user's name, for scheduling policies that share by user.")
    # Beyond OpenAI:
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop text in the answer.")
    bad_words: list[Phrase] | None = Field(None, description="Words that are never generated.")
    allowed_token_ids: list[Int] | None = Field(None, description="Only these tokens are generated.")
    vllm_xargs: dict[str, Any] | None = Field(None, description="Arguments of the server's logits processors, by name.")
    prompt_logprobs: Int | None = Field(None, description="Logprobs of this many most likely tokens per prompt token.")
    logprob_token_ids: list[Int] | None = Field(None, description="Logprobs of these tokens, not of the most likely.")
    return_token_ids: bool | None = Field(None, description="Send the token ids of the prompt and of each choice.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Logprobs name tokens as "token_id:ID".')
    use_beam_search: bool | None = Field(None, description="Beam search of width best_of (or n).")
    length_penalty: float | None = Field(None, description="Beam search: above 0 favours long answers (default 1).")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Beam search: when to end.")
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
    max_completion_tokens: Any = refused("on this route its name is max_tokens")
    top_logprobs: Any = refused("on this route logprobs is their number")


class TextPart(RequestModel):
    type: TextKind
    text: str
    annotations: Any = hint("sources of what an earlier answer says")
    cache_control: Any = hint(CACHED)
    prompt_cache_breakpoint: Any = hint(CACHED)


class ImageUrl(RequestModel):
    url: str = Field(description="data:image/png;base64,..., or http(s)://... where the server fetches images.")
    detail: Any = hint(PROCESSED)
    format: Any = hint("files say themselves what they are")


class ImagePart(RequestModel):
    type: Annotated[Literal["image_url"], SEEN]
    image_url: str | ImageUrl
    uuid: Any = hint("images are named by their content")
    cache_control: Any = hint(CACHED)
    prompt_cache_breakpoint: Any = hint(CACHED)

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
    provider_specific_fields: Any = hint("what another service says of an answer")
    thinking_blocks: Any = hint("reasoning_content says the same")
    name: Any = hint("only some templates have a place for it")
    annotations: Any = hint("sources of what an earlier answer says")
    cache_control: Any = hint(CACHED)
    audio: Any = refused("the model reads text only", {})
    function_call: Any = refused("tool_calls has taken its place", {})
    prefix: Any = refused("continue_final_message continues the last message", False)
    partial: Any = refused("continue_final_message continues the last message", False)
    refusal: Any = refused("write it as the content", "")


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
    suffix: Any = refused("gaps are filled by /v1/completions", "")
    echo: bool | None = Field(None, description="Begin the answer with the last message, if it is the assistant's.")


# Responses, and chunks of their streams.

#: For each prompt token: None, or token id -> {"logprob", "rank", "decoded_token"}.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]
StopReason = str | int | None


class PromptDetails(ResponseModel):
    cached_tokens: int = Field(description="Prefix cache hits of the prompt.")


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
