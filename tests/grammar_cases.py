"""Grammars of tests, and engines in which requests have one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.structured_outputs import Grammar

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


def schema_grammar(schema: dict[str, Any], begin_after: Sequence[int] = ()) -> Grammar:
    """JSON of a schema, without spaces."""
    return _grammar(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}), begin_after)


def regex_grammar(regex: str, begin_after: Sequence[int] = ()) -> Grammar:
    """Texts that match."""
    return _grammar(LLMatcher.grammar_from_regex(regex), begin_after)


def lark_grammar(lark: str) -> Grammar:
    """Texts of a grammar in Lark's notation."""
    return _grammar(LLMatcher.grammar_from_lark(lark), ())


def _grammar(source: str, begin_after: Sequence[int]) -> Grammar:
    key = hashlib.sha256(json.dumps([source, *begin_after]).encode()).hexdigest()
    return Grammar(key, source, list(begin_after))


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
    grammars: Sequence[Grammar | None],
) -> list[RequestOutput]:
    """The outputs, each held to its grammar."""
    engine = llm.llm_engine
    for i, (prompt, wanted, grammar) in enumerate(zip(prompts, params, grammars, strict=True)):
        make = engine.inputs._generate

        def bound(params: SamplingParams, make: Any = make, grammar: Grammar | None = grammar) -> Any:
            return msgspec.structs.replace(make(params), grammar=grammar)

        engine.inputs._generate = bound  # type: ignore[method-assign]
        try:
            engine.add_request(str(i), prompt, wanted, streaming=False)
        finally:
            del engine.inputs._generate
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return [done[str(i)] for i in range(len(prompts))]
