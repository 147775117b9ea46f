"""Bodies of requests for text: fields of the OpenAI API, and those that other engines add to it.

Fields without a mark (``field_marks``) are obeyed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator

from octavo.server.fields import (
    SEEN,
    Int,
    Name,
    OpenAIFields,
    Phrase,
    RequestModel,
    ResponseModel,
    Seed,
    TextKind,
    ThinkingFields,
    hint,
    refused,
)

# Fields of requests that say the form of the answer, in the spellings of several APIs; at most one form is given.


class JsonSchemaFormat(RequestModel):
    """``response_format.json_schema``."""

    name: Name | None = Field(None, description="Accepted, without effect.")
    description: str | None = Field(None, description="Accepted, without effect.")
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema", description="The JSON schema.")
    strict: bool | None = Field(
        None,
        description="Objects have no properties but those that the schema names, where it is silent about others; "
        "without, as --structured-outputs-config says. Keywords that an answer cannot be held to are refused; without, "
        "they are left out, and the header X-Octavo-Relaxed-Schema names them. An answer has the form either way.",
    )


class ResponseFormat(RequestModel):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description="Free text, any JSON object, JSON of a schema, or text with tags."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="Of json_schema.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Of json_object: a JSON schema.")
    structures: list[dict[str, Any]] | None = Field(None, description="Of structural_tag: begin, schema, end of each.")
    triggers: list[str] | None = Field(None, description="Of structural_tag: texts by which tags begin.")


class FormFields(RequestModel):
    """The form of the answer."""

    response_format: ResponseFormat | None = Field(None, description="The form of the answer, as of the OpenAI API.")
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="The form of the answer: json, json_object, regex, choice, grammar or structural_tag, and options.",
    )
    guided_json: str | dict[str, Any] | bool | None = Field(
        None, description="Another name of structured_outputs.json."
    )
    guided_regex: str | None = Field(None, description="Another name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="Another name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    guided_whitespace_pattern: str | None = Field(
        None, description="With guided_json: what may stand between the tokens of JSON."
    )
    json_schema: str | dict[str, Any] | None = Field(None, description="Another name of structured_outputs.json.")
    regex: str | None = Field(None, description="Another name of structured_outputs.regex.")
    grammar: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    ebnf: str | None = Field(None, description="Another name of structured_outputs.grammar.")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="Another name of structured_outputs.structural_tag."
    )


# Tools in bodies of requests, and calls of them in responses.


class FunctionDefinition(RequestModel):
    """A function that the model may call. Further fields are for templates that read them."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments (default: it has none).")
    strict: bool | None = Field(None, description="Arguments fit the schema whatever the model writes.")


class FunctionTool(RequestModel):
    """A function."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = hint("prefixes are cached without marks")
    _sent: Any = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        tool = handler(value)
        tool._sent = value
        return tool

    @property
    def sent(self) -> dict[str, Any]:
        """As the request has it, for templates that write it as it is: in its order, nothing added."""
        return {name: value for name, value in self._sent.items() if name != "cache_control"}


class CustomDefinition(RequestModel):
    """A tool that takes a text."""

    name: str = Field(description="1 to 64 letters, digits, _ and -.")
    description: str | None = Field(None, description="What it does, for the model.")
    format: dict[str, Any] | None = Field(None, description="The form of the text, which the model is told.")


class CustomTool(RequestModel):
    """A tool that takes a text; the model sees a function with one argument, ``input``."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: Any = hint("prefixes are cached without marks")


class OtherTool(RequestModel):
    """A tool that another service runs, such as a search of the web."""

    model_config = ConfigDict(extra="allow")

    type: str


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return f"{kind}_tool" if kind in ("function", "custom") else "other_tool"  # which are names of no fields


Tool = Annotated[
    Annotated[FunctionTool, Tag("function_tool")]
    | Annotated[CustomTool, Tag("custom_tool")]
    | Annotated[OtherTool, Tag("other_tool")],
    Discriminator(_tool_tag),
]


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """A tool by the name of its function."""

    type: str
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @property
    def name(self) -> str | None:
        """The tool's name; None: it has none, or another type."""
        named = {"function": self.function, "custom": self.custom}.get(self.type)
        return None if named is None else named.name


class AllowedTools(RequestModel):
    """Some of the tools, of which the model may or must call."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(NamedTool):
    """One function that must be called, or those that may be."""

    allowed_tools: AllowedTools | None = None


class FunctionCall(ResponseModel):
    """A call of a function."""

    name: str
    arguments: str = Field(description="JSON text, as the model wrote it.")


class ToolCall(ResponseModel):
    """A tool that the model calls."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomCall(ResponseModel):
    """A call of a tool that takes a text, or an increment of it."""

    name: str | None = None
    input: str


class CustomToolCall(ResponseModel):
    """A tool that takes a text and that the model calls."""

    id: str
    type: Literal["custom"]
    custom: CustomCall


class FunctionCallDelta(ResponseModel):
    """An increment of a call: its name at first, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """An increment of one of the calls; the first of each has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionCallDelta | None = None
    custom: CustomCall | None = None


# Fields of sampling that every route that generates takes.


class SamplingFields(RequestModel):
    """How the answer is sampled."""

    temperature: float | None = Field(
        None, description="0 always takes the most likely token (default: the model's, else 1)."
    )
    top_p: float | None = Field(None, description="Keep the smallest set of tokens that reaches this probability.")
    top_k: Int | None = Field(None, description="Keep this many of the most likely tokens; 0 or -1 is off.")
    min_p: float | None = Field(None, description="Drop tokens below this share of the likeliest one's probability.")
    seed: Seed | None = Field(None, description="Fixes the random numbers.")
    presence_penalty: float | None = Field(None, description="Subtracted once from logits of generated tokens.")
    frequency_penalty: float | None = Field(None, description="Subtracted for each time a token was generated.")
    repetition_penalty: float | None = Field(None, description="Divides logits of tokens in prompt or output.")
    logit_bias: dict[str, float] | None = Field(None, description="Token id to what is added to its logit.")
    stop_token_ids: list[Int] | None = Field(None, description="Token ids that end the answer.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    min_tokens: Int | None = Field(None, description="No end, not even an ignored one, before this many tokens.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    priority: Int | float | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts share no cached prefix."
    )
    thinking_token_budget: Int | None = Field(
        None, description="Most tokens of reasoning, which is closed then; -1 (default): no limit."
    )


_PROCESSED = "the model's own files say how images are processed"


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the number of tokens used.")
    continuous_usage_stats: bool | None = Field(None, description="Send the tokens used so far with every chunk.")
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class GenerationRequest(SamplingFields, FormFields, OpenAIFields):
    """Fields common to completions and chat completions."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    max_tokens: Int | None = Field(
        None, description="Most tokens to generate; refused if the context has no room for them after the prompt."
    )
    n: Int | None = Field(None, description="Completions of each prompt (default 1).")
    best_of: Int | None = Field(None, description="Sample so many, return the n likeliest; with beam search its width.")
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer; they are not part of it.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    user: Name | None = Field(
        None, description="Whose request it is, for scheduling policies that look at it; the answer is the same."
    )
    # Beyond OpenAI:
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop text in the answer.")
    bad_words: list[Phrase] | None = Field(None, description="Words that are never generated.")
    allowed_token_ids: list[Int] | None = Field(None, description="Only these tokens are generated.")
    vllm_xargs: dict[str, Any] | None = Field(
        None, description="Arguments of the logits processors that the server was started with, by name."
    )
    prompt_logprobs: Int | None = Field(None, description="Logprobs of the prompt's tokens, with so many likeliest.")
    logprob_token_ids: list[Int] | None = Field(
        None, description="Token ids whose logprobs are sent in place of the most likely ones'."
    )
    return_token_ids: bool | None = Field(None, description="Send the token ids of the prompt and of each choice.")
    return_tokens_as_token_ids: bool | None = Field(None, description='Logprobs name tokens as "token_id:ID".')
    use_beam_search: bool | None = Field(None, description="Beam search of width best_of (or n).")
    length_penalty: float | None = Field(None, description="Beam search: above 0 favours long answers (default 1).")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Beam search: when to end.")
    ttft_target: float | None = Field(
        None, description="Seconds to the first token that the deadline policy aims at; refused under others."
    )
    tpot_target: float | None = Field(None, description="Seconds between the tokens after it, likewise.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Keep this many tokens of a longer prompt; -1: as many as fit with max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where truncate_prompt_tokens cuts: the beginning is lost (left, default), or the end."
    )


class EncoderDecoderParts(RequestModel):
    """A prompt of an encoder-decoder model in two parts."""

    encoder_prompt: str | Annotated[list[Int], Field(fail_fast=True)] = Field(
        description="What the encoder reads: a text or token ids."
    )
    decoder_prompt: str | Annotated[list[Int], Field(fail_fast=True)] | None = Field(
        None, description="What the decoder begins with; left out: as the model's do."
    )


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    # Of each kind that it is not, the first entry is enough to say so.
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Int], Field(fail_fast=True)]
        | Annotated[list[list[Int]], Field(fail_fast=True)]
        | EncoderDecoderParts
        | Annotated[list[EncoderDecoderParts], Field(fail_fast=True)]
    ) = Field(
        description="A text, token ids, or a list of either; each is completed. Of an encoder-decoder model its "
        "encoder reads them, and there may be objects with encoder_prompt and decoder_prompt."
    )
    logprobs: Int | None = Field(None, description="Logprobs of so many likeliest tokens at each position.")
    echo: bool | None = Field(None, description="Put the prompt before its completion.")
    suffix: str | None = Field(
        None, description="The text after a gap that the completion fills; for models with tokens for this."
    )
    add_special_tokens: bool | None = Field(None, description="Put the model's own tokens around a text (true).")
    max_completion_tokens: Any = refused("on this route its name is max_tokens")
    top_logprobs: Any = refused("on this route logprobs is their number")


class TextPart(RequestModel):
    """A part of a text."""

    type: TextKind
    text: str
    annotations: Any = hint("sources of what an earlier answer says")
    cache_control: Any = hint("prefixes are cached without marks")
    prompt_cache_breakpoint: Any = hint("prefixes are cached without marks")


class ImageUrl(RequestModel):
    """Where an image is."""

    url: str = Field(description="data:image/png;base64,..., or http(s)://... where the server fetches images.")
    detail: Any = hint("the model's own files say how images are processed")
    format: Any = hint("files say themselves what they are")


class ImagePart(RequestModel):
    """An image, for models that see them."""

    type: Annotated[Literal["image_url"], SEEN]
    image_url: str | ImageUrl
    uuid: Any = hint("images are named by their content")
    cache_control: Any = hint("prefixes are cached without marks")
    prompt_cache_breakpoint: Any = hint("prefixes are cached without marks")

    @property
    def url(self) -> str:
        """Where the image is."""
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


def _part_tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "image_part" if kind == "image_url" else "text_part"  # which are names of no fields


ChatPart = Annotated[
    Annotated[TextPart, Tag("text_part")] | Annotated[ImagePart, Tag("image_part")], Discriminator(_part_tag)
]


class ChatMessage(RequestModel):
    """One message of a conversation. Further fields, and hints, are for templates that read them."""

    model_config = ConfigDict(extra="allow")

    role: Name = Field(
        description="system, developer, user, assistant or tool, or another that the model's template names or writes."
    )
    content: str | list[ChatPart] | None = Field(
        None,
        description='Text, or parts {"type": "text", "text": ..}; where the model sees images also '
        '{"type": "image_url", "image_url": {"url": ..}}.',
    )
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Calls that the assistant made.")
    tool_call_id: str | None = Field(None, description="Of a tool's message: the call whose result it is.")
    reasoning_content: str | None = Field(None, description="What the assistant thought; also named reasoning.")
    reasoning: Any = Field(None, description="The same under its other name.")
    reasoning_details: Any = Field(None, description="The same as a list of parts, whose texts are read.")
    provider_specific_fields: Any = hint("what another service says of an answer")
    thinking_blocks: Any = hint("reasoning_content says the same")
    name: Any = hint("only some templates have a place for it")
    annotations: Any = hint("sources of what an earlier answer says")
    cache_control: Any = hint("prefixes are cached without marks")
    audio: Any = refused("the model reads text only", {})
    function_call: Any = refused("tool_calls has taken its place", {})
    prefix: Any = refused("continue_final_message continues the last message", False)
    partial: Any = refused("continue_final_message continues the last message", False)
    refusal: Any = refused("write it as the content", "")


class TemplateOptions(ThinkingFields):
    """How the chat template writes a conversation."""

    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's answer (default true).")
    continue_final_message: bool | None = Field(
        None, description="End within the last message, which the answer then continues (default false)."
    )
    chat_template: str | None = Field(
        None, description="Name of one of the model's templates; a template, with --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the template.")
    documents: list[dict[str, Any]] | None = Field(None, description="Documents, for templates that know them.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")


class Prediction(RequestModel):
    """What an answer is likely to be."""

    type: Literal["content"]
    content: str | list[TextPart] = Field(description="A text, or its parts.")


class ChatCompletionRequest(GenerationRequest, TemplateOptions):
    """Body of ``/v1/chat/completions``."""

    token_limits = ("max_completion_tokens", "max_tokens")

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(description="The conversation.")
    max_completion_tokens: Int | None = Field(None, description="Most tokens to generate; wins over max_tokens.")
    add_special_tokens: bool | None = Field(
        None, description="Put the model's own tokens around what the template writes (default false)."
    )
    logprobs: bool | None = Field(None, description="Send logprobs.")
    prediction: Prediction | None = Field(
        None, description="What the answer is likely to be: it comes sooner where it is, and does not change."
    )
    top_logprobs: Int | None = Field(None, description="With so many likeliest tokens at each position.")
    tool_choice: str | ToolChoice | None = Field(
        None, description="none, auto (default), required, or an object that names a function or the allowed ones."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most (default true).")
    parse_tool_calls: bool | None = Field(None, description="False: calls stay in the content (default true).")
    include_reasoning: bool | None = Field(None, description="False: reasoning is left out (default true).")
    separate_reasoning: bool | None = Field(None, description="False: reasoning stays in the content (default true).")
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        None, description="none: reasoning stays in the content."
    )
    suffix: Any = refused("gaps are filled by /v1/completions", "")
    echo: bool | None = Field(None, description="Put the last message before the answer, if it is the assistant's.")


# Bodies of responses to requests for text, and chunks of their streams: fields of the OpenAI API and a few others.

#: For each prompt token: None, or token id -> {"logprob", "rank", "decoded_token"}.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]
StopReason = str | int | None


class PromptDetails(ResponseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class CompletionDetails(ResponseModel):
    """Details of the generated tokens, where tokens are drafted or reasoning is told apart."""

    accepted_prediction_tokens: int | None = Field(None, description="Draft tokens that were accepted.")
    rejected_prediction_tokens: int | None = Field(None, description="Draft tokens that were computed in vain.")
    reasoning_tokens: int | None = Field(None, description="Tokens of the reasoning, of models that mark it.")


class Usage(ResponseModel):
    """Tokens used by a request: each prompt counts once, and every token of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class CompletionLogprobs(ResponseModel):
    """Parallel lists with an entry for each token. The first token of an echoed prompt has null."""

    text_offset: list[int] = Field(description="Where in the choice's text the token's text begins, in characters.")
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    """One completion, or an increment of it."""

    finish_reason: Literal["stop", "length"] | None
    index: int
    logprobs: CompletionLogprobs | None
    text: str
    stop_reason: StopReason = Field(None, description="The stop text or stop token id that ended it.")
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
    """A token and its logprob."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    """The generated token, and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    """Logprobs of the tokens of a message."""

    content: list[TokenLogprob]
    refusal: None


class Message(ResponseModel):
    """The assistant's message."""

    content: str | None
    refusal: None
    role: Literal["assistant"]
    tool_calls: list[ToolCall | CustomToolCall] | None = None
    reasoning_content: str | None = Field(None, description="What the model thought before it answered.")
    reasoning: str | None = Field(None, description="The same under its other name.")


class ChatChoice(ResponseModel):
    """One choice of a chat completion."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int
    logprobs: ChoiceLogprobs | None
    message: Message
    stop_reason: StopReason = Field(None, description="The stop text or stop token id that ended it.")
    token_ids: list[int] | None = None


class ChatCompletion(ResponseModel):
    """A response of ``/v1/chat/completions``."""

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
    """An increment of a message."""

    content: str | None = None
    role: Literal["assistant"] | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(ResponseModel):
    """An increment of a choice."""

    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    index: int
    logprobs: ChoiceLogprobs | None
    stop_reason: StopReason = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseModel):
    """A chunk of a stream of ``/v1/chat/completions``."""

    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
