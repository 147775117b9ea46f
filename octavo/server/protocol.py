"""Bodies of requests for text: fields of the OpenAI API, and those that other engines add to it.

Fields without a mark (``field_marks``) are obeyed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from octavo.server.field_marks import hint, refused
from octavo.server.foreign_fields import OpenAIFields
from octavo.server.other_names import ThinkingFields
from octavo.server.protocol_base import SEEN, Int, Name, Phrase, RequestModel, TextKind
from octavo.server.protocol_formats import FormFields
from octavo.server.protocol_tools import Tool, ToolChoice
from octavo.server.sampling_fields import SamplingFields

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
