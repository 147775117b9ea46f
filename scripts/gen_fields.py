"""Writes docs/request-fields.md from the code: every field of every request over HTTP, and what becomes of it."""

from __future__ import annotations

import argparse
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from octavo.server.anthropic import MessagesRequest
from octavo.server.audio import TranscriptionRequest, TranslationRequest
from octavo.server.cohere import CohereChatRequest, CohereEmbedRequest
from octavo.server.fields import Hint, Refused, RequestModel, marks_of
from octavo.server.llamacpp import InfillRequest, LlamaCompletionRequest
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.openai.response_protocol import ResponsesRequest
from octavo.server.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    LlamaEmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    TeiRerankRequest,
)
from octavo.server.status_routes import TokenizeRequest

TARGET = Path(__file__).resolve().parent.parent / "docs" / "request-fields.md"

HEAD = """\
# Fields of requests

This page is made by `make docs` from the code; change it there.

Every field that OpenAI's, Anthropic's and other engines' requests can have is one of three things here:

- **obeyed**: it does what its API says;
- a **hint**: accepted with any value, and by its nature without effect here;
- **refused**, with status 400 and its name, as it would change the answer and cannot be obeyed. Values that ask for
  what happens anyway are accepted.

Null means the default everywhere. A field that is in none of the lists is refused as unknown; with `--unknown-fields
ignore` it is left out, as is one that is refused here, and its name is logged once. Further fields of messages and of
functions are given to the model's chat template, and refused where it does not read them.
"""
ROUTES: dict[str, type[RequestModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/rerank": TeiRerankRequest,
    "/v1/score": ScoreRequest,
    "/embed": TeiEmbedRequest,
    "/v2/chat": CohereChatRequest,
    "/v2/embed": CohereEmbedRequest,
    "/classify": ClassificationRequest,
    "/pooling": PoolingRequest,
    "/v1/audio/transcriptions": TranscriptionRequest,
    "/v1/audio/translations": TranslationRequest,
    "/embedding": LlamaEmbeddingRequest,
    "/completion": LlamaCompletionRequest,
    "/infill": InfillRequest,
    "/tokenize": TokenizeRequest,
}


def render() -> str:
    """The whole page."""
    lines = [HEAD]
    for route, model in ROUTES.items():
        lines.append(f"\n## {route}\n\n| field | | |\n| --- | --- | --- |\n")
        lines += dict.fromkeys(_rows(model))
    return "".join(lines)


def _rows(model: type[BaseModel], place: str = "") -> list[str]:
    """A row for each field, those of its parts after it."""
    rows = []
    for name, mark in marks_of(model).items():
        field = model.model_fields[name]
        label = place + (field.alias or name)
        if isinstance(mark, Hint):
            rows.append(_row(f"`{label}`", "hint", mark.reason))
        elif isinstance(mark, Refused):
            rows.append(_row(f"`{label}`", "refused" + mark.besides, mark.reason))
        else:
            rows.append(_row(f"`{label}`", "obeyed", field.description or ""))
            for part in _parts(field.annotation):
                is_list = "list" in str(field.annotation)
                rows += _rows(part, f"{label}{'[]' * is_list}.")
    return rows


def _parts(annotation: Any) -> list[type[RequestModel]]:
    """The models that a field's type is made of, each once."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        return [annotation]
    inner = [part for argument in typing.get_args(annotation) for part in _parts(argument)]
    return list(dict.fromkeys(inner)) if isinstance(annotation, types.UnionType) or inner else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render(), encoding="utf-8")
    print(f"== wrote {TARGET}")
