"""What clients send is compiled within limits of time and memory, and kept by content."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.config.options import StructuredOutputsConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.sampling_params import StructuredOutputsParams
from octavo.grammar import compiler as module
from octavo.grammar.compiler import GrammarCompiler, digest
from octavo.grammar.sources import make_grammar
from octavo.process import sandbox_process as process
from octavo.process.sandbox import Sandbox
from tests.busy_machine import PATIENCE
from tests.grammar.byte_matcher import accepts

#: Llguidance works on these for minutes, and does not survive the last.
MULTIPLES: dict[str, Any] = {"prefixItems": [{"type": "integer", "multipleOf": 100003 + i} for i in range(20)]}
PATTERNS: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(20)]}
NAMES: dict[str, Any] = {"patternProperties": {f"^{i}_": {} for i in range(3000)}}
DEEP: dict[str, Any] = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(600)} | {"a600": {}},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    yield GrammarCompiler(Sandbox(), ["<|end|>"], vocab_size=1000, seconds=0.5)


def json_form(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)


@pytest.mark.parametrize(
    "schema",
    [PATTERNS, *(pytest.param(schema, marks=pytest.mark.slow) for schema in (MULTIPLES, NAMES))],
    ids=["patterns", "multiples", "names"],
)
def test_a_grammar_that_takes_too_long_is_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"json takes more than 0\.5 seconds .*structured_outputs_compile_sec"
    ):
        compiler.compile(json_form(schema))
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match="takes more than"):  # the answer is kept
        compiler.compile(json_form(schema))
    assert time.monotonic() - start < 0.2


def test_a_grammar_that_ends_the_process_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="json is nested too deeply"):
        compiler.compile(json_form(DEEP))
    assert compiler.compile(StructuredOutputsParams(regex="after[a-z]+")).source


def test_a_slow_grammar_holds_up_no_other(compiler: GrammarCompiler) -> None:
    slow = json_form({**PATTERNS, "title": "another"})
    with ThreadPoolExecutor(1) as threads:
        refused = threads.submit(compiler.compile, slow)
        for i in range(5):
            compiler.compile(StructuredOutputsParams(regex=f"beside{i}"))
        assert not refused.done()
        with pytest.raises(InvalidRequestError):
            refused.result()


def test_a_form_is_compiled_once(compiler: GrammarCompiler) -> None:
    form = StructuredOutputsParams(regex="once")
    with ThreadPoolExecutor(8) as threads:
        grammars = list(threads.map(compiler.compile, [form] * 16))
    assert len({id(grammar) for grammar in grammars}) == 1
    assert compiler.compile(StructuredOutputsParams(regex="once")) is grammars[0]
    other = compiler.compile(StructuredOutputsParams(regex="once", begin_after=[7]))
    assert other.key != grammars[0].key and other.begin_after == [7]


def test_the_order_of_properties_is_part_of_a_form(compiler: GrammarCompiler) -> None:
    names: list[dict[str, Any]] = [{"a": {}, "b": {}}, {"b": {}, "a": {}}]
    first, second = (compiler.compile(json_form({"properties": properties})) for properties in names)
    assert first.key != second.key


def test_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 5000)
    forms = [StructuredOutputsParams(regex=f"{i}" * 300) for i in range(10)]
    for form in forms:
        compiler.compile(form)
    assert [digest(compiler.resolved(form)) in compiler._cache for form in forms] == [False] * 5 + [True] * 5


def test_special_tokens_are_those_of_the_tokenizer(compiler: GrammarCompiler) -> None:
    assert compiler.compile(StructuredOutputsParams(grammar='start: <|end|> "a"')).source
    assert compiler.compile(StructuredOutputsParams(grammar='start: <[900-999]> "a"')).source
    with pytest.raises(InvalidRequestError, match="Token range end too large: 1000"):
        compiler.compile(StructuredOutputsParams(grammar='start: <[1000]> "a"'))
    with pytest.raises(InvalidRequestError, match="unknown special token"):
        compiler.compile(StructuredOutputsParams(grammar='start: <|begin|> "a"'))
    tag = {"structures": [{"begin": "<|end|>a", "schema": {}, "end": ""}], "triggers": ["<|end|>"]}
    assert "TEXT <|end|>" in compiler.compile(StructuredOutputsParams(structural_tag=tag)).source


def test_a_grammar_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> subprocess.Popen[bytes]:
        little = "import llguidance, octavo.process.sandbox_process as p; p.MAX_MEMORY = 60 << 20; p.main()"
        return subprocess.Popen(
            [sys.executable, "-c", little], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    monkeypatch.setattr(process, "_start", start)
    compiler = GrammarCompiler(Sandbox(), seconds=20)
    both = " & ".join(f"/(.|\\n)*a.{{{i}}}b(.|\\n)*/" for i in range(20))
    with pytest.raises(InvalidRequestError, match="grammar takes too much memory"):
        compiler.compile(StructuredOutputsParams(grammar=f"start: T\nT: {both}"))
    assert compiler.compile(StructuredOutputsParams(regex="a")).source


LARGE = 10**30


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": LARGE}, f"at /const: must be made of numbers of less than 2\\^63, not {LARGE}"),
        (f'{{"const": {LARGE}}}', f"at /const: .*, not {LARGE}"),
        ({"items": {"enum": [1, {"a": [-(2**63)]}]}}, "at /items/enum: must be made of numbers of less than"),
        ({"type": "integer", "const": 1e19}, "at /const: .* not 1e"),
        ({"minItems": 2**64}, "at /minItems: must be made of"),
        ({"type": "string", "minLength": 2**63}, "at /minLength: must be made of"),
    ],
)
def test_numbers_that_the_compiler_takes_for_others_are_refused(
    compiler: GrammarCompiler, schema: str | dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        compiler.compile(StructuredOutputsParams(json=schema))
    with pytest.raises(InvalidRequestError, match=r"structural_tag.structures\[0\].schema" if schema else ""):
        tag = {"structures": [{"begin": "<a>", "schema": schema, "end": ""}], "triggers": ["<a"]}
        compiler.compile(StructuredOutputsParams(structural_tag=tag))


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"maximum": LARGE}, [2**63 - 1, -5], []),
        ({"minimum": -LARGE, "maximum": 5}, [-(2**63) + 1024, 5], [6]),
        ({"exclusiveMaximum": 2.0**70, "minimum": 0}, [0, 2**63 - 1], [-1]),
        ({"minimum": 0, "format": "uint64"}, [0, 2**63 - 1], [-1]),
        ({"format": "int64"}, [2**63 - 1, -(2**63) + 1024], [2**64, -(2**64)]),
        ({"format": "int32"}, [2**31 - 1, -(2**31)], [2**31, -(2**31) - 1]),
    ],
    ids=str,
)
def test_bounds_beyond_64_bits_are_obeyed(bounds: dict[str, Any], inside: list[int], outside: list[int]) -> None:
    relaxed: list[str] = []
    grammar = make_grammar(StructuredOutputsParams(json={"type": "integer", **bounds}), relaxed=relaxed)
    assert not relaxed
    assert all(accepts(grammar, str(value)) for value in inside)
    assert not any(accepts(grammar, str(value)) for value in outside)


def test_a_bound_that_only_numbers_beyond_64_bits_obey_is_left_out() -> None:
    relaxed: list[str] = []
    make_grammar(StructuredOutputsParams(json={"items": {"type": "integer", "minimum": LARGE}}), relaxed=relaxed)
    assert relaxed == ["/items/minimum"]


def test_numbers_where_they_restrict_nothing_have_any_size(compiler: GrammarCompiler) -> None:
    form = json_form({"type": "integer", "default": LARGE, "examples": [LARGE], "maximum": 2**63 - 1})
    assert compiler.compile(form).source


def test_a_form_of_one_client_is_not_held_up_by_many_slow_ones_of_another(compiler: GrammarCompiler) -> None:
    async def test() -> None:
        slow = [compiler.compile_for("a", json_form({**PATTERNS, "title": f"{i} of a"})) for i in range(50)]
        waiting = [asyncio.ensure_future(form) for form in slow]
        await asyncio.sleep(0)
        for i in range(3):
            await compiler.compile_for("b", StructuredOutputsParams(regex=f"of b{i}"))
        assert sum(task.done() for task in waiting) < 25
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(error, asyncio.CancelledError) for error in ended) > 25
        again = await compiler.compile_for("a", StructuredOutputsParams(regex="of a again"))
        assert again.source, "what it has left holds up nothing"

    asyncio.run(asyncio.wait_for(test(), PATIENCE))


def test_the_engine_says_what_forms_leave_open() -> None:
    config = StructuredOutputsConfig(disable_any_whitespace=True, disable_additional_properties=False)
    compiler = GrammarCompiler(Sandbox(), defaults=config)
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    grammar = compiler.compile(StructuredOutputsParams(json=point))
    assert accepts(grammar, '{"x":1,"y":2}') and not accepts(grammar, '{"x": 1}')
    own = StructuredOutputsParams(json=point, disable_any_whitespace=False, disable_additional_properties=True)
    assert accepts(compiler.compile(own), '{"x": 1}') and not accepts(compiler.compile(own), '{"x": 1, "y": 2}')
    spaces = compiler.compile(StructuredOutputsParams(json=point, whitespace_pattern=" {2}"))
    assert accepts(spaces, '{  "x":  1}') and not accepts(spaces, '{ "x": 1}')


@pytest.mark.parametrize(
    ("form", "path"),
    [
        (StructuredOutputsParams(regex="("), "structured_outputs.regex"),
        (StructuredOutputsParams(json={"type": 5}), "structured_outputs.json"),
        (StructuredOutputsParams(grammar="start = 'a'"), "structured_outputs.grammar"),
        (StructuredOutputsParams(structural_tag={"triggers": ["<"]}), "structured_outputs.structural_tag.structures"),
    ],
    ids=str,
)
def test_an_error_of_the_sandbox_has_the_path_of_the_field(
    compiler: GrammarCompiler, form: StructuredOutputsParams, path: str
) -> None:
    for _ in range(2):  # compiled, and kept
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(form)
        assert caught.value.path == path and path not in caught.value.problem
