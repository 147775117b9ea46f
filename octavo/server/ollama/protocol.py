"""Bodies of Ollama's API, and what its ``options`` mean here.

Learned from https://docs.ollama.com/api and the types of the package ``ollama``. As there, fields that are unknown are
ignored, and bodies need no Content-Type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from octavo.server.fields import Int, RequestModel, ResponseModel
from octavo.server.http.errors import invalid_at

#: The version of Ollama whose API is served: clients ask for at least some version.
API_VERSION = "0.12.11"


# Durations.

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")


def read_duration(value: float | str | None) -> float | None:
    """Seconds of ``keep_alive``: a number of seconds, or a text such as ``5m`` or ``1h30m``; negative: for ever.

    None: not given.
    """
    if value is None or isinstance(value, int | float):
        return value
    text = value.strip()
    try:
        return float(text)
    except ValueError:
        pass
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _DURATION.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        raise invalid_at("keep_alive", "must be seconds, or a duration such as 5m or 1h30m", got=value)
    return sign * sum(float(number) * _UNITS[unit] for number, unit in parts)


# Options.


class Option(NamedTuple):
    """An option of Ollama's: a field of ours, or why it has no effect."""

    #: None: it has no effect.
    field: str | None
    #: An integer, for which clients may send 5.0.
    is_integer: bool = False
    reason: str = ""
    #: Of an option that asks for what is not done here: the value that asks for nothing. Others are logged.
    neutral: float | None = None


_START = "it is decided when the server starts"
_ABSENT = "there is no such sampler here"
OPTIONS: Mapping[str, Option] = {
    "num_predict": Option("max_tokens", True),
    "temperature": Option("temperature"),
    "top_k": Option("top_k", True),
    "top_p": Option("top_p"),
    "min_p": Option("min_p"),
    "seed": Option("seed", True),
    "stop": Option("stop"),
    "repeat_penalty": Option("repetition_penalty"),
    "presence_penalty": Option("presence_penalty"),
    "frequency_penalty": Option("frequency_penalty"),
    "repeat_last_n": Option(None, True, "repeat_penalty counts the whole context; 0 turns it off"),
    "num_ctx": Option(None, True, f"{_START} (--max-model-len)"),
    "num_keep": Option(None, True, "nothing of a prompt is cut"),
    "num_batch": Option(None, True, f"{_START} (--max-num-batched-tokens)"),
    "num_thread": Option(None, True, f"{_START} (--num-threads)"),
    **{name: Option(None, reason=_START) for name in ("num_gpu", "main_gpu", "numa", "low_vram", "f16_kv")},
    **{name: Option(None, reason=_START) for name in ("use_mmap", "use_mlock", "vocab_only", "logits_all")},
    "embedding_only": Option(None, reason=_START),
    "mirostat": Option(None, True, _ABSENT, neutral=0),
    **{name: Option(None, reason="it goes with mirostat") for name in ("mirostat_tau", "mirostat_eta")},
    **{name: Option(None, False, _ABSENT, neutral=1) for name in ("tfs_z", "typical_p")},
    "penalize_newline": Option(None, reason="repeat_penalty counts all tokens"),
}
#: Defaults of Ollama where the model has none of its own; 1.1 for repeat_penalty is not among them, as here it would
#: count the whole context.
DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
#: Fields of the call -> names in the request, for errors.
NAMES = {option.field: f"options.{name}" for name, option in OPTIONS.items() if option.field is not None}


def read_options(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """The fields that options set, and the options that are unknown or ask for what is not done here, with the reason.

    Options that only say how a model is loaded are accepted silently.
    """
    fields: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in (options or {}).items():
        option = OPTIONS.get(name)
        if value is None:
            continue
        if option is None:
            ignored.append(f"options.{name}")
            continue
        if option.neutral is not None and value != option.neutral:
            ignored.append(f"options.{name} ({option.reason})")
        if option.is_integer and isinstance(value, float) and value.is_integer():
            value = int(value)
        if option.field is not None:
            fields[option.field] = value

    if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] <= 0:  # -1, -2: as many as fit
        del fields["max_tokens"]
    if isinstance(fields.get("seed"), int) and fields["seed"] < 0:
        del fields["seed"]
    if isinstance(options, Mapping) and options.get("repeat_last_n") == 0:
        fields["repetition_penalty"] = 1.0
    return fields, ignored


# Requests.


class OllamaRequest(RequestModel):
    """A body, or an object in it. Unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")
    needs_content_type: ClassVar[bool] = False


Model = Annotated[str, Field(min_length=1, max_length=512, description="Name of a model, with or without a tag.")]
Options = Annotated[
    dict[str, Any] | None,
    Field(description="temperature, num_predict, stop and others by Ollama's names."),
]
KeepAlive = Annotated[
    float | str | None,
    Field(description="How long the model stays loaded: seconds, or 5m; 0: not at all; negative: for ever."),
]


class AnswerFields(OllamaRequest):
    model: Model
    stream: bool | None = Field(None, description="Send the answer as JSON lines while it grows (default true).")
    format: str | dict[str, Any] | None = Field(None, description='"json", or a JSON schema.')
    options: Options = None
    keep_alive: KeepAlive = None
    think: bool | str | None = Field(None, description="Reasoning on or off; or low, medium, high.")
    logprobs: bool | None = Field(None, description="Send the logprobs of the generated tokens.")
    top_logprobs: Int | None = Field(None, description="With logprobs: the most likely tokens at each position.")


class GenerateRequest(AnswerFields):
    prompt: str | None = Field(None, description="The text; none: the model is loaded, or unloaded by keep_alive 0.")
    suffix: str | None = Field(None, description="The text after the answer, for models that fill gaps.")
    system: str | None = Field(None, description="The system prompt.")
    template: str | None = Field(None, description="Accepted, without effect: the model has a template of its own.")
    context: list[Int] | None = Field(None, description="The context of an earlier answer, which this one continues.")
    raw: bool | None = Field(None, description="The prompt is not put into the chat template.")
    images: list[str] | None = Field(None, description="Images in base64.")


class CalledFunction(OllamaRequest):
    name: str
    arguments: dict[str, Any] | None = None


class MessageCall(OllamaRequest):
    id: str | None = None
    function: CalledFunction


class OllamaMessage(OllamaRequest):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = Field(None, description="Its text.")
    thinking: str | None = Field(None, description="The reasoning of an earlier answer.")
    images: list[str] | None = Field(None, description="Images in base64.")
    tool_calls: list[MessageCall] | None = Field(None, description="Calls that the assistant made.")
    tool_name: str | None = Field(None, description="In a tool's message: its name.")
    tool_call_id: str | None = Field(None, description="In a tool's message: the id of its call.")


class ToolFunction(OllamaRequest):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(OllamaRequest):
    type: str | None = None
    function: ToolFunction


class ChatRequest(AnswerFields):
    messages: list[OllamaMessage] | None = Field(
        None, description="The conversation; none: the model is loaded, or unloaded by keep_alive 0."
    )
    tools: list[OllamaTool] | None = Field(None, description="Functions that the model may call.")


class EmbedRequest(OllamaRequest):
    model: Model
    input: str | Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description="A text, or several.")
    truncate: bool | None = Field(None, description="Cut texts that are too long (default), or refuse them.")
    dimensions: Int | None = Field(None, description="Dimensions of the vectors, for Matryoshka models.")
    options: Options = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(OllamaRequest):
    model: Model
    prompt: str | None = Field(None, description="A text.")
    options: Options = None
    keep_alive: KeepAlive = None


class ModelRequest(OllamaRequest):
    """Names a model, by one of two fields."""

    model: str | None = Field(None, max_length=512, description="Name of a model, with or without a tag.")
    name: str | None = Field(None, max_length=512, description="Another name of model.")

    @property
    def named(self) -> str:
        if not (name := self.model or self.name):
            raise invalid_at("model", "it is missing")
        return name


class ShowRequest(ModelRequest):
    verbose: bool | None = Field(None, description="Accepted, without effect: vocabularies are not sent.")


class PullRequest(ModelRequest):
    stream: bool | None = Field(None, description="Send the progress as JSON lines (default true).")
    insecure: bool | None = Field(None, description="Accepted, without effect.")


class CopyRequest(OllamaRequest):
    source: Model
    destination: Model


# Responses.


class ModelDetails(ResponseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(ResponseModel):
    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of the weights.")
    digest: str
    details: ModelDetails


class ModelList(ResponseModel):
    models: list[ListedModel]


class RunningModel(ResponseModel):
    name: str
    model: str
    size: int = Field(description="Bytes of the weights in memory.")
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int = Field(description="Longest prompt and answer together, in tokens.")


class RunningList(ResponseModel):
    models: list[RunningModel]


class ShownModel(ResponseModel):
    license: str
    modelfile: str
    parameters: str
    template: str
    system: str
    details: ModelDetails
    model_info: dict[str, Any] = Field(description="Metadata under GGUF's keys.")
    capabilities: list[str] = Field(description="completion, tools, insert, vision, embedding, thinking.")
    modified_at: str


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class Logprob(TokenLogprob):
    top_logprobs: list[TokenLogprob] | None = None


class AnsweredFunction(ResponseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class AnsweredCall(ResponseModel):
    id: str
    function: AnsweredFunction


class AnsweredMessage(ResponseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class Answer(ResponseModel):
    """A response, or a line of its stream; the last line has the counts and, in nanoseconds, the durations."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[Logprob] | None = None


class GenerateAnswer(Answer):
    response: str
    thinking: str | None = None
    context: list[int] | None = Field(None, description="Token ids of the prompt and the answer.")


class ChatAnswer(Answer):
    message: AnsweredMessage


class Embeddings(ResponseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(ResponseModel):
    embedding: list[float]


class Progress(ResponseModel):
    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


class OllamaVersion(ResponseModel):
    version: str = Field(description="The version of Ollama's API.")
    octavo: str = Field(description="The server's own version.")


class OllamaError(ResponseModel):
    error: str
