"""Bodies of llama.cpp's native routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.field_marks import refused
from octavo.server.foreign_fields import EngineFields
from octavo.server.protocol import ChatMessage, TemplateOptions
from octavo.server.protocol_base import Int, Name, Phrase, ResponseModel
from octavo.server.sampling_fields import SamplingFields


class LlamaFields(SamplingFields, EngineFields):
    """What ``/completion`` and ``/infill`` have in common."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    token_limits = ("n_predict",)

    n_predict: Int | None = Field(None, description="Most tokens to generate; -1 (default): as many as fit.")
    stop: Phrase | list[Phrase] | None = Field(None, description="Texts that end the answer; they are not part of it.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    grammar: str | None = Field(None, description="The grammar that the answer follows.")
    json_schema: dict[str, Any] | None = Field(None, description="The JSON schema that the answer follows.")
    n_probs: Int | None = Field(None, description="Send the logprobs of so many likeliest tokens at each position.")
    return_tokens: bool | None = Field(None, description="Send token ids too.")


class LlamaCompletionRequest(LlamaFields):
    """Body of ``/completion``."""

    prompt: str | list[Int] | list[str | Int] | list[list[Int]] = Field(
        description="A text, token ids, or both in turn, which are one prompt; or a list of texts or of token ids."
    )


class InfillRequest(LlamaFields):
    """Body of ``/infill``."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after it.")
    input_extra: Any = refused("the model sees the text around the gap only", [])
    prompt: Any = refused("write it at the end of input_prefix", "")


class ApplyTemplateRequest(TemplateOptions):
    """Body of ``/apply-template``."""

    messages: list[ChatMessage] = Field(description="The conversation.")


class LlamaTimings(ResponseModel):
    """How long a completion took, in milliseconds."""

    prompt_n: int = Field(description="Tokens of the prompt that were computed.")
    prompt_ms: float = Field(description="Until the first token.")
    predicted_n: int
    predicted_ms: float = Field(description="From the first token to the last.")
    predicted_per_second: float | None


class LlamaTopToken(ResponseModel):
    """A token and its logprob."""

    id: int
    token: str
    bytes: list[int] | None
    logprob: float


class LlamaToken(LlamaTopToken):
    """A generated token, and the likeliest ones at its position."""

    top_logprobs: list[LlamaTopToken]


class LlamaCompletion(ResponseModel):
    """A response of ``/completion``, or an event of its stream; the last one has all fields."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    prompt: str | None = None
    truncated: bool | None = None
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    completion_probabilities: list[LlamaToken] | None = None
    generation_settings: dict[str, Any] | None = None
    timings: LlamaTimings | None = None


class Props(ResponseModel):
    """A response of ``/props``."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    modalities: dict[str, bool]
    build_info: str


class Slot(ResponseModel):
    """A sequence that can run."""

    id: int
    n_ctx: int
    is_processing: bool


class AppliedTemplate(ResponseModel):
    """A response of ``/apply-template``."""

    prompt: str
