"""Bodies of the routes beside those for text: models, adapters, tokens, the state of the server, errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octavo.server.field_marks import hint
from octavo.server.protocol import ChatMessage, TemplateOptions
from octavo.server.protocol_base import Int, Name, RequestModel, ResponseModel


class TokenizeRequest(TemplateOptions):
    """Body of ``/tokenize``: a prompt or messages; or in llama.cpp's form a content."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[ChatMessage] | None = Field(None, description="A conversation, put into words by the template.")
    add_special_tokens: bool | None = Field(None, description="The model's own tokens around a text (default true).")
    content: str | None = Field(None, description="llama.cpp's form: a text; the answer has its tokens only.")
    add_special: bool | None = Field(None, description="With content: the model's own tokens around it.")
    parse_special: Any = hint("special tokens in a text are always read as such")
    with_pieces: bool | None = Field(None, description="With content: each token with its text.")
    return_token_strs: bool | None = Field(None, description="Send the tokens as the vocabulary writes them, too.")


class DetokenizeRequest(RequestModel):
    """Body of ``/detokenize``."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    tokens: list[Int] = Field(description="Token ids.")


class Index(ResponseModel):
    """A response of ``/``."""

    name: Literal["Octavo"]
    version: str
    models: list[str]
    docs: str


class Model(ResponseModel):
    """A served model."""

    id: str
    created: int
    object: Literal["model"]
    owned_by: str
    max_model_len: int = Field(description="Longest prompt and output together, in tokens.")
    root: str = Field(description="The model's first name; of an adapter its path in lora_folder, or its last part.")
    parent: str | None = Field(description="Of an adapter: the model that it belongs to.")
    tasks: list[str] = Field(
        description="What it can do: generate, embed (vectors), token_embed (of each token), classify, token_classify, "
        "score (pairs of texts), transcribe (recordings)."
    )
    input_modalities: list[str] = Field(description="What it reads: text, and image where it sees them; or audio.")
    dimensions: int | None = Field(None, description="Numbers of a vector, of models that embed.")
    default_sampling_params: dict[str, int | float] | None = Field(
        None,
        description="What a request that leaves sampling parameters out is sampled with, of models that generate: the "
        "model's own defaults, else those of the API.",
    )


class ModelList(ResponseModel):
    """All names of the model."""

    object: Literal["list"]
    data: list[Model]


class TokenPiece(ResponseModel):
    """A token and its text; its bytes, if they are no text alone."""

    id: int
    piece: str | list[int]


class TokenizedContent(ResponseModel):
    """A response of ``/tokenize`` in llama.cpp's form."""

    tokens: list[int] | list[TokenPiece]


class Tokenized(ResponseModel):
    """A response of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int
    prompt: str | None = Field(None, description="The text that was tokenized, if it came of messages.")
    token_strs: list[str] | None = Field(None, description="The tokens as the vocabulary writes them, if asked for.")


class TokenizerInfo(ResponseModel):
    """A response of ``/tokenizer_info``."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    special_tokens: dict[str, str] = Field(description="Under the names that templates use.")
    chat_template: str | dict[str, str] | None = Field(description="By name, where there are several.")


class Detokenized(ResponseModel):
    """A response of ``/detokenize``, in vLLM's and in llama.cpp's words."""

    prompt: str
    content: str


class Version(ResponseModel):
    """A response of ``/version``."""

    version: str


class Sleeping(ResponseModel):
    """A response of ``/sleep``, ``/wake_up`` and ``/is_sleeping``."""

    is_sleeping: bool


class ReplicaStatus(ResponseModel):
    """A replica of the engine, in a response of the routes below ``/admin``."""

    replica: int
    #: drained: its engine core lives and gets no requests; dead: it is not started again.
    status: Literal["starting", "ready", "drained", "dead"]
    open_requests: int
    #: Times that its engine core was started in the place of one that had ended.
    restarts: int


class Replicas(ResponseModel):
    """A response of ``/admin/replicas``, ``/admin/drain``, ``/admin/undrain`` and ``/admin/restart``."""

    replicas: list[ReplicaStatus]


class LoadAdapterRequest(RequestModel):
    """Body of ``/v1/load_lora_adapter``."""

    lora_name: Name = Field(description="What requests will call it, as their model.")
    lora_path: Annotated[str, Field(max_length=4096)] = Field(
        description="Its folder or GGUF file, within the server's lora_folder; relative to that, or absolute."
    )
    load_inplace: bool | None = Field(None, description="Replace an adapter of this name; running requests keep it.")
    base_model_name: Name | None = Field(None, description="If given, it must be a name of the served model.")


class UnloadAdapterRequest(RequestModel):
    """Body of ``/v1/unload_lora_adapter``."""

    lora_name: Name = Field(description="Its name.")
    lora_int_id: Int | None = Field(None, description="Accepted, without effect.")
    wait: bool | None = Field(
        None, description="Refuse new requests and wait until its running ones have ended; else they are refused for."
    )


class AdapterStatus(ResponseModel):
    """A response of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

    lora_name: str
    status: Literal["loaded", "loaded already", "unloaded"]


class Health(ResponseModel):
    """A response of ``/health``."""

    status: Literal["ok"]


class ErrorDetail(ResponseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(ResponseModel):
    """A response with an error status."""

    error: ErrorDetail
