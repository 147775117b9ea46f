"""Forms of structured output for tests, and engines in which requests have one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from octavo import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 6},
        "favourite_number": {"type": "integer", "minimum": 0, "maximum": 999},
        "is_member": {"type": "boolean"},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["first_name", "favourite_number", "is_member", "colours"],
    "additionalProperties": False,
}


def json_form(schema: dict[str, Any], begin_after: Sequence[int] = ()) -> StructuredOutputsParams:
    """JSON of a schema, without spaces."""
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, begin_after=list(begin_after))


def regex_form(regex: str) -> StructuredOutputsParams:
    """Texts that match."""
    return StructuredOutputsParams(regex=regex)


def load(model: Path | str, **options: Any) -> LLM:
    """An engine with small blocks."""
    defaults: dict[str, Any] = {
        "kernels": "cpu",
        "block_size": 4,
        "num_gpu_blocks_override": 400,
        "max_num_seqs": 16,
        "watermark": 0.0,
        "max_model_len": 200,
        "num_threads": 1,
    }
    return LLM(str(model), **{**defaults, **options})


def generate(
    llm: LLM,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    forms: Sequence[StructuredOutputsParams | None],
) -> list[RequestOutput]:
    """The outputs, each of its form."""
    work = [structs.replace(p, structured_outputs=form) for p, form in zip(params, forms, strict=True)]
    return llm.generate(list(prompts), work, use_tqdm=False)
