"""Bodies of requests for vectors and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from octavo.core.pooling_params import PoolingTask
from octavo.server.field_marks import hint, refused
from octavo.server.foreign_fields import Labels
from octavo.server.protocol import ChatMessage, TemplateOptions
from octavo.server.protocol_base import Int, Name, RequestModel

_ONE_TYPE = "vectors are computed in the model's precision and sent as float32"


def _of_one_kind(value: Any) -> Any:
    """Refuses a list of texts and token ids, whose errors as one or the other would not say what is wrong."""
    if isinstance(value, list) and value:
        kinds = [_KINDS.get(type(entry)) for entry in value]
        other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None and None not in kinds:
            text = "texts and token ids cannot be in one list: entry 0 is {first}, entry {other} {second}"
            raise PydanticCustomError("mixed", text, {"first": kinds[0], "other": other, "second": kinds[other]})
    return value


_KINDS = {str: "a text", int: "a token id", list: "a list of token ids"}

#: What is pooled: a text, token ids, or a list of either.
Input = Annotated[
    str
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[Int], Field(fail_fast=True)]
    | Annotated[list[list[Int]], Field(fail_fast=True)],
    BeforeValidator(_of_one_kind),
]


#: Types of the numbers of a vector, in vLLM's words.
VectorType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


class PooledFields(Labels):
    """Fields of every request for vectors or scores."""

    model: Name | None = Field(None, description="Name of the served model; default: that one.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None,
        description="Cut longer inputs to so many tokens, special tokens included; -1: to as many as the model takes. "
        "Without it they are refused.",
    )
    use_activation: bool | None = Field(
        None, description="Vectors get length 1, class scores become probabilities (default: as the model has it)."
    )
    user: Name | None = Field(
        None, description="Whose request it is, for scheduling policies that look at it; the result is the same."
    )
    priority: Int | float | None = Field(
        None, description="Lower goes first; only 0 under a scheduling policy that does not look at it."
    )
    ttft_target: float | None = Field(
        None, description="Seconds to the result that the deadline policy aims at; refused under others."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Requests with different salts share no cached prefix."
    )
    truncation_side: Any = refused("the model's tokenizer_config.json says where texts are cut", "right")
    activation: Any = refused("its name is use_activation")
    softmax: Any = refused("its name is use_activation")
    normalize: Any = refused("its name is use_activation")
    normalized: Any = refused("its name is use_activation")
    embed_dtype: Any = refused(_ONE_TYPE, "float32")
    output_dtype: Any = refused(_ONE_TYPE, "float", "float32")
    embedding_type: Any = refused("its name is encoding_format", "float")
    embedding_types: Any = refused("its name is encoding_format", ["float"])
    endianness: Any = refused("base64 is of little-endian numbers", "little", "native")
    late_chunking: Any = refused("each input is computed by itself", False)
    additional_data: Any = hint("a label of the client's")
    mm_processor_kwargs: Any = refused("images are not read for vectors and scores", {})
    lora_request: Any = refused("an adapter is named as the model (/v1/models lists them)")


class PooledTexts(PooledFields, TemplateOptions):
    """Fields of requests with inputs that do not depend on each other: ``input``, or a conversation."""

    input: Input | None = Field(None, description="A text, token ids, or a list of either.")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = Field(
        None, description="In place of input: a conversation, put into words by the model's chat template."
    )
    add_special_tokens: bool | None = Field(
        None, description="Put the model's own tokens around texts (true), and around a conversation (false)."
    )


class VectorFields(RequestModel):
    """How vectors are sent."""

    embed_dtype: VectorType | None = Field(
        None, description="Type of the numbers of a vector (default float32), to which they are rounded."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Order of the bytes of a number in base64 (default little)."
    )

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="float: lists of numbers (default); base64: of their bytes, of embed_dtype."
    )
    dimensions: Int | None = Field(
        None, description="Numbers of a vector, of models that were trained for fewer than all (Matryoshka)."
    )


class EmbeddingRequest(VectorFields, PooledTexts):
    """Body of ``/v1/embeddings``."""

    prompt_name: Name | None = Field(
        None, description="Which of the texts that the model's files name is put before each input, such as query."
    )
    input_type: Name | None = Field(
        None,
        description="query, document, or in other words: the model's prompt of such a name, if it has one, is put "
        "before each input.",
    )
    task: Any = refused("its name is input_type, or prompt_name")
    output_dimension: Any = refused("its name is dimensions")


class PoolingRequest(VectorFields, PooledTexts):
    """Body of ``/pooling``."""

    task: PoolingTask | None = Field(
        None, description="What is computed; default: of each token, or what the model does where it cannot."
    )


class ClassificationRequest(PooledTexts):
    """Body of ``/classify``."""


class TeiEmbedRequest(PooledFields):
    """Body of ``/embed``, of Text Embeddings Inference."""

    inputs: Input = Field(description="A text, token ids, or a list of either.")
    normalize: bool | None = Field(None, description="Vectors get length 1 (default true).")
    truncate: bool | None = Field(None, description="Cut longer inputs to as many tokens as the model takes.")
    truncation_direction: Any = refused("the model's tokenizer_config.json says where texts are cut", "right", "Right")
    prompt_name: Name | None = Field(
        None, description="Which of the texts that the model's files name is put before each input, such as query."
    )
    dimensions: Int | None = Field(
        None, description="Numbers of a vector, of models that were trained for fewer than all (Matryoshka)."
    )


class TextDocument(RequestModel):
    """A document as an object."""

    text: str


Texts = str | Annotated[list[str], Field(fail_fast=True)]


class RerankRequest(PooledFields):
    """Body of ``/v1/rerank``, ``/v2/rerank`` and ``/rerank``."""

    query: str | TextDocument = Field(description="What documents are ranked for.")
    documents: Annotated[list[str | TextDocument], Field(fail_fast=True)] = Field(
        description='Texts, or objects {"text": ..}.'
    )
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Send the best so many (default: all)."
    )
    return_documents: bool | None = Field(
        None, description="Send the documents' texts too (default true; false on /v2/rerank, as Cohere's has none)."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="Cut documents to so many tokens, before they are put together with the query."
    )
    max_chunks_per_doc: Any = refused("documents are not split: max_tokens_per_doc cuts them")
    rank_fields: Any = refused("a document is one text", ["text"])
    relevant_spans: Any = refused("documents are scored as a whole")
    return_embeddings: Any = refused("vectors are given by /v1/embeddings", False)
    encoding_format: Any = refused("scores are numbers", "float")


class TeiRerankRequest(RerankRequest):
    """Body of ``/rerank``: with ``texts`` in place of ``documents`` that of Text Embeddings Inference."""

    documents: Annotated[list[str | TextDocument], Field(fail_fast=True)] | None = Field(  # type: ignore[assignment]
        None, description='Texts, or objects {"text": ..}.'
    )
    texts: Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Another name of documents: the answer is then a list of index and score."
    )
    raw_scores: bool | None = Field(None, description="With texts: scores as the model gives them, no probabilities.")
    return_text: bool | None = Field(None, description="With texts: send them too (default false).")
    truncate: bool | None = Field(None, description="With texts: cut them to as many tokens as the model takes.")
    truncation_direction: Any = refused("the model's tokenizer_config.json says where texts are cut", "right", "Right")


class ScoreRequest(PooledFields):
    """Body of ``/v1/score`` and ``/score``: one text with one or many, or pairs; under any of the names."""

    text_1: Texts | None = Field(None, description="The first texts; one alone goes with each of the others.")
    text_2: Texts | None = Field(None, description="The second texts.")
    queries: Texts | None = Field(None, description="Another name of text_1.")
    documents: Texts | None = Field(None, description="Another name of text_2.")
    data_1: Texts | None = Field(None, description="Another name of text_1.")
    data_2: Texts | None = Field(None, description="Another name of text_2.")
    encoding_format: Any = refused("scores are numbers", "float")
