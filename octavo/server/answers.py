"""What clients get: answers and chunks, under the names of the OpenAI API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: One entry a prompt token: None, or token id -> {"logprob", "rank", "decoded_token"}.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]
StopReason = str | int | None


class Answer(BaseModel):
    """Part of an answer. Fields that were not given are not sent."""

    model_config = ConfigDict(protected_namespaces=())

    def encode(self) -> bytes:
        """As JSON."""
        return self.model_dump_json(exclude_unset=True).encode()


class PromptDetails(Answer):
    """Where the prompt's tokens came from."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class Usage(Answer):
    """Tokens of a request: each prompt once, every token of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(Answer):
    """Parallel lists with one entry a token. The first token of an echoed prompt has none (null)."""

    text_offset: list[int] = Field(description="Where in the choice's text the token's text begins, in characters.")
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer):
    """One completion, or what a chunk adds to it."""

    finish_reason: Literal["stop", "length"] | None
    index: int
    logprobs: CompletionLogprobs | None
    text: str
    stop_reason: StopReason = Field(None, description="The stop text or stop token id that ended it.")
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """An answer of ``/v1/completions``, and a chunk of its stream."""

    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    object: Literal["text_completion"]
    system_fingerprint: str
    usage: Usage | None = None


class TopLogprob(Answer):
    """A token and its logprob."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    """The token that was generated, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Answer):
    """Logprobs of the tokens of a message."""

    content: list[TokenLogprob]
    refusal: None


class Message(Answer):
    """The assistant's message."""

    content: str
    refusal: None
    role: Literal["assistant"]


class ChatChoice(Answer):
    """One answer of the assistant."""

    finish_reason: Literal["stop", "length"]
    index: int
    logprobs: ChoiceLogprobs | None
    message: Message
    stop_reason: StopReason = Field(None, description="The stop text or stop token id that ended it.")


class ChatCompletion(Answer):
    """An answer of ``/v1/chat/completions``."""

    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: Literal["chat.completion"]
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Answer):
    """What a chunk adds to a message."""

    content: str | None = None
    role: Literal["assistant"] | None = None


class ChunkChoice(Answer):
    """What a chunk adds to a choice."""

    delta: Delta
    finish_reason: Literal["stop", "length"] | None
    index: int
    logprobs: ChoiceLogprobs | None
    stop_reason: StopReason = None


class ChatChunk(Answer):
    """A chunk of a stream of ``/v1/chat/completions``."""

    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    object: Literal["chat.completion.chunk"]
    system_fingerprint: str
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Model(Answer):
    """A model that is served."""

    id: str
    created: int
    object: Literal["model"]
    owned_by: str
    max_model_len: int = Field(description="Longest prompt and output together, in tokens.")


class ModelList(Answer):
    """All names of the model."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(Answer):
    """An answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int
    prompt: str | None = Field(None, description="The text that was tokenized, if it came of messages.")


class Detokenized(Answer):
    """An answer of ``/detokenize``."""

    prompt: str


class Version(Answer):
    """An answer of ``/version``."""

    version: str


class Health(Answer):
    """An answer of ``/health``."""

    status: Literal["ok"]


class ErrorDetail(Answer):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """Every answer that is not a success."""

    error: ErrorDetail
