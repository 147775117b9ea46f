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


#: Of many kinds, all with a longest text.
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "boolean"},
    {"enum": ["one", 2, None, {"a": [True]}]},
    {"const": {"kind": "fixed", "values": [1, 2, 3]}},
    {"type": "integer", "minimum": -17, "maximum": 1234},
    {"type": "number", "minimum": 0.5, "maximum": 9.25},
    {"type": "string", "minLength": 2, "maxLength": 9},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,6}(-[0-9]{1,3})?$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 5},
    {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}, {"type": "integer", "minimum": 5, "maximum": 8}]},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 5}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["left", "right"]},
                    "leaves": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
                },
                "required": ["name", "leaves"],
                "additionalProperties": False,
            }
        },
    },
    {
        "allOf": [
            {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]},
            {"type": "object", "properties": {"y": {"enum": ["a", "b"]}}, "required": ["y"]},
        ],
        "additionalProperties": False,
        "properties": {"x": True, "y": True},
    },
    {
        "type": "object",
        "properties": {
            "street": {"type": "string", "maxLength": 12},
            "geo": {
                "type": "array",
                "items": {"type": "number", "minimum": -1.0, "maximum": 1.0},
                "minItems": 2,
                "maxItems": 2,
            },
            "unit": {"type": ["string", "null"], "maxLength": 3},
        },
        "required": ["street", "geo", "unit"],
        "additionalProperties": False,
    },
]
