"""``octavo info --fields`` and ``--metrics``: reference pages in Markdown, made from the server's code."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

import octavo.server
from octavo.server.anthropic import MessagesRequest
from octavo.server.audio import TranscriptionRequest, TranslationRequest
from octavo.server.cohere import CohereChatRequest, CohereEmbedRequest
from octavo.server.fields import RequestModel, marks_of
from octavo.server.llamacpp import InfillRequest, LlamaCompletionRequest
from octavo.server.metrics import Metrics
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

FIELDS_HEAD = """\
# Request fields

Every field that OpenAI's, Anthropic's and other engines' requests can have is one of three things here:

- **obeyed**: it does what its API says;
- a **hint**: accepted with any value, and by its nature without effect here;
- **refused**, with status 400 and its name, as it would change the answer and cannot be obeyed. Values that ask for
  what happens anyway are accepted.

Null means the default everywhere. A field that is in none of the lists is refused as unknown; with `--unknown-fields
ignore` it is left out, as is one that is refused here, and its name is logged once. Further fields of messages and of
functions are given to the model's chat template, and refused where it does not read them.
"""
_ROUTES: dict[str, type[RequestModel]] = {
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
#: Kind of metric -> suffix of its series' names.
SUFFIXES = {"counter": "_total"}


def request_fields() -> str:
    """Every field of every HTTP request: obeyed, a hint or refused."""
    lines = [FIELDS_HEAD]
    for route, model in _ROUTES.items():
        lines.append(f"\n## {route}\n\n| field | | |\n| --- | --- | --- |\n")
        lines += dict.fromkeys(_rows(model))
    return "".join(lines)


def metric_families() -> dict[str, tuple[str, str, list[str]]]:
    """(kind, text, labels) by name without "octavo_", in the order of ``/metrics``."""
    registry = Metrics("").registry
    labels = {
        getattr(collector, "_name", ""): [
            name for name in getattr(collector, "_labelnames", ()) if name != "model_name"
        ]
        for collector in registry._collector_to_names
    }
    return {
        family.name.removeprefix("octavo_"): (family.type, family.documentation, labels[family.name])
        for family in registry.collect()
        if family.name.startswith("octavo_")
    }


def metric_advice() -> dict[str, str]:
    path = Path(octavo.server.__file__).with_name("metric_advice.yml")
    advice: dict[str, str] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return advice


def metrics() -> str:
    """Every series of ``/metrics`` with its labels and advice."""
    advice = metric_advice()
    rows = ["# Metrics\n\n", _row("series", "kind", "labels", "meaning", "advice"), "| --- | --- | --- | --- | --- |\n"]
    for name, (kind, text, labels) in metric_families().items():
        series = f"`octavo_{name}{SUFFIXES.get(kind, '')}`"
        rows.append(_row(series, kind, ", ".join(f"`{label}`" for label in labels), text, advice[name]))
    return "".join(rows)


def _rows(model: type[BaseModel], place: str = "") -> list[str]:
    """A row for each field, followed by the rows of its nested models."""
    rows = []
    for name, mark in marks_of(model).items():
        field = model.model_fields[name]
        label = place + (field.alias or name)
        if mark is not None:
            rows.append(_row(f"`{label}`", "hint" if mark.is_hint else "refused" + mark.besides, mark.meaning.reason))
        else:
            rows.append(_row(f"`{label}`", "obeyed", field.description or ""))
            for nested in _models(field.annotation):
                is_list = "list" in str(field.annotation)
                rows += _rows(nested, f"{label}{'[]' * is_list}.")
    return rows


def _models(annotation: Any) -> list[type[RequestModel]]:
    """The request models in a field's type, each once."""
    if isinstance(annotation, type) and issubclass(annotation, RequestModel):
        return [annotation]
    inner = [model for argument in typing.get_args(annotation) for model in _models(argument)]
    return list(dict.fromkeys(inner)) if isinstance(annotation, types.UnionType) or inner else []


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
