# ruff: noqa: RUF001 (tokens of DeepSeek)
"""Calls in texts of models: in each format, cut anywhere, broken off, malformed, and what only looks like one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.server.reasoning_parsers import OTHER_NAMES as REASONING_NAMES
from octavo.server.reasoning_parsers import REASONING_PARSERS, find_reasoning_parser
from octavo.server.tool_parsers import OTHER_NAMES as TOOL_NAMES
from octavo.server.tool_parsers import TOOL_PARSERS, ToolParser, find_tool_parser, load_tool_parser
from octavo.server.tool_parsers.tool_parser import ChatEvent, ToolCallStart, collect
from tests.server.recorded_calls import CONTENT, RECORDED, TOOLS

Message = tuple[str | None, list[tuple[str, str]]]


def message(events: list[ChatEvent]) -> Message:
    parts = collect(events)
    return parts.content, [(call.name, call.arguments) for call in parts.tool_calls]


def whole(name: str, text: str, *, cut: bool = False, **options: Any) -> Message:
    return message(TOOL_PARSERS[name](TOOLS, **options).feed(text, True, cut=cut))


def in_pieces(name: str, pieces: list[str], *, cut: bool = False) -> Message:
    parser = TOOL_PARSERS[name](TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece, False)]
    return message(events + parser.feed("", True, cut=cut))


CASES = [(name, *case) for name, cases in RECORDED.items() for case in cases]


def test_every_format_has_recorded_texts() -> None:
    assert set(RECORDED) == set(CONTENT) == set(TOOL_PARSERS)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_is_read_as_its_model_means_it(
    name: str, text: str, content: str | None, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    found = whole(name, text)
    assert found[0] == content
    assert [(function, json.loads(arguments)) for function, arguments in found[1]] == calls


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in CONTENT.items() for text in texts])
def test_what_only_looks_like_a_call_is_content_as_it_stands(name: str, text: str) -> None:
    assert whole(name, text) == (text, [])


ALL = [(name, case[0]) for name, cases in RECORDED.items() for case in cases]
ALL += [(name, text) for name, texts in CONTENT.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), ALL)
def test_where_a_text_is_cut_changes_nothing(name: str, text: str) -> None:
    expected = whole(name, text)
    for i in range(len(text) + 1):
        assert in_pieces(name, [text[:i], text[i:]]) == expected, i
    assert in_pieces(name, list(text)) == expected


@pytest.mark.parametrize(("name", "text"), ALL)
def test_a_text_that_breaks_off_is_read_the_same_streamed(name: str, text: str) -> None:
    for i in range(len(text)):
        assert in_pieces(name, list(text[:i])) == whole(name, text[:i])
        assert in_pieces(name, list(text[:i]), cut=True) == whole(name, text[:i], cut=True)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_call_that_is_cut_leaves_nothing_of_its_notation_in_the_content(
    name: str, text: str, content: str | None, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    whole_arguments = [json.dumps(arguments, separators=(",", ":")) for _, arguments in whole(name, text)[1]]
    names = [function for function, _ in calls]
    for i in range(len(text)):
        found, cut_calls = whole(name, text[:i], cut=True)
        assert (content or "").startswith((found or "").rstrip()), i
        assert [function for function, _ in cut_calls] == names[: len(cut_calls)], i
        for (_, arguments), expected in zip(cut_calls[:-1], whole_arguments, strict=False):
            assert json.dumps(arguments, separators=(",", ":")) == expected, i
        if cut_calls:  # one that has begun is given whatever ended the text
            assert (content or "").startswith((whole(name, text[:i])[0] or "").rstrip()) or len(calls) > len(
                cut_calls
            ), i


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", "<tool_call><function=add>\n<parameter=a>1</parameter>\n<parameter=b>\n[1, 2", '{"a": 1'),
        ("qwen3_coder", "<function=get_weather>\n<para", "{"),
        ("gemma", '<|tool_call>call:get_weather{days:2,city:<|"|>Ro', '{"days": 2'),
        ("functiongemma", "<start_function_call>call:get_weather{days:2,city:<escape>Ro<esc", '{"days": 2'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x', '{"a": 1}'),
        ("hermes", '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "ad', '{"a": 1}'),
    ],
)
def test_a_call_that_has_begun_is_given_without_the_argument_that_is_cut(name: str, text: str, arguments: str) -> None:
    [function] = [function for function in TOOLS if function in text]
    for cut in (False, True):
        assert whole(name, text, cut=cut) == (None, [(function, arguments)])


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", 'Yes. <tool_call>{"name": "ad', "Yes."),
        ("hermes", "Yes. <tool", "Yes."),
        ("hermes", "Yes. ", "Yes. "),
        ("hermes", '<tool_call>{"name": "other", "arguments": {"a": 1}', None),
        ("llama3_json", '{"name": "ad', None),
        ("llama3_json", 'As {"title": ["a", "b', 'As {"title": ["a", "b'),
        ("pythonic", "[add(a=1", None),
        ("pythonic", "[1, 2", "[1, 2"),
    ],
)
def test_what_may_begin_a_call_is_left_out_where_the_text_is_cut(name: str, text: str, content: str | None) -> None:
    found = whole(name, text, cut=True)
    if "other" in text:  # turned out to be no call before it was cut
        assert found == (text, [])
    else:
        assert found == (content, [])
    assert whole(name, text) == (text, [])


def test_a_strict_function_is_called_in_text_only_where_a_grammar_sees_it() -> None:
    parser = TOOL_PARSERS["llama3_json"](TOOLS)
    parser.strict = frozenset({"add"})
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert message(parser.feed(f"So: {call}", True)) == (f"So: {call}", [])
    parser = TOOL_PARSERS["llama3_json"](TOOLS)
    parser.strict = frozenset({"add"})
    assert message(parser.feed(call, True)) == (None, [("add", '{"a": 1}')])


FRAGMENTS = [
    *sorted({marker for parser in TOOL_PARSERS.values() for marker in parser.markers}),
    *"\n {}[](),;:\"'\\=1>é",
    *("add", '"name"', '"add"', '"arguments"', '"parameters"', "function", "```json", "```", "call:", "a=1", "[add("),
    *("<function=", "<parameter=", "</parameter>", "</function>", "<function=add>", "call:add{", '"a": 1}}'),
    '{"name": "add", "arguments": {',
]


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_text_cut_anywhere_gives_the_same_message(name: str, data: st.DataObject) -> None:
    own = [*FRAGMENTS, *TOOL_PARSERS[name].markers * 5]
    text = "".join(data.draw(st.lists(st.sampled_from(own), max_size=25)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = in_pieces(name, pieces)
    assert found == whole(name, text)
    assert in_pieces(name, pieces, cut=True) == whole(name, text, cut=True)
    if not found[1]:  # without a call nothing is lost
        assert (found[0] or "") == text


def test_arguments_come_as_they_grow() -> None:
    parser = TOOL_PARSERS["hermes"](TOOLS)
    text = '<tool_call>{"name": "add", "arguments": {"a": [1, 2, 3], "b": "xyz"}}</tool_call>'
    begin = text.index('{"a"')
    assert [event for piece in text[:begin] for event in parser.feed(piece, False)] == []
    first, *more = [event for piece in text[begin : text.index("</")] for event in parser.feed(piece, False)]
    assert isinstance(first, ToolCallStart) and (first.index, first.name) == (0, "add")
    assert len(more) > 20


def test_arguments_that_go_wrong_stay_as_they_were_written() -> None:
    assert whole("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b"') == (None, [("add", '{"a": 1, "b"')])
    text = '<tool_call>{"name": "add", "arguments": {"a": 1]}</tool_call> so'
    assert whole("hermes", text) == ("]}</tool_call> so", [("add", '{"a": 1')])


def test_ids_are_unique_and_indices_count() -> None:
    starts = [
        event
        for _ in range(2)
        for event in TOOL_PARSERS["mistral"](TOOLS).feed(RECORDED["mistral"][0][0], True)
        if isinstance(event, ToolCallStart)
    ]
    assert [start.index for start in starts] == [0, 1, 0, 1]
    assert len({start.id for start in starts}) == 4


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "deepseek", "gemma", "qwen3_coder", "granite"])
def test_without_parallel_calls_there_is_one(name: str) -> None:
    text = next(case[0] for case in RECORDED[name] if len(case[2]) > 1)
    content, calls = whole(name, text)
    assert whole(name, text, parallel=False) == (content, calls[:1])


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_long_texts_of_no_calls_take_linear_time(name: str) -> None:
    begins = TOOL_PARSERS[name].begins
    for part in (*begins, *(f"{begin}[{{" for begin in begins), "{", '{"name": "', '[{"a": ', "[f(a=", "<function="):
        text = part * 5_000
        assert whole(name, text) == (text, [])
        parser = TOOL_PARSERS[name](TOOLS)
        events = [event for i in range(0, len(text), 40) for event in parser.feed(text[i : i + 40], False)]
        assert message([*events, *parser.feed("", True)]) == (text, [])


def test_long_texts_take_linear_time() -> None:
    """Each of these took minutes with a parser that looks at the same text again."""
    for text in (
        "<tool_call>" * 20_000,
        " " * 200_000 + "x",
        '<tool_call>{"arguments": {' * 8_000,
        "<tool_call>" + "[" * 200_000,
    ):
        assert whole("hermes", text) == (text, [])


SIGNS = {
    'Return {"name": <n>, "arguments": <a>} within <tool_call></tool_call>': "hermes",
    "<tool_call>\\n<function=example>": "qwen3_coder",
    "{{ '[TOOL_CALLS]' }}": "mistral",
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value></tool_call>": "glm45",
    "{{ '<' + '｜DSML｜' + 'function_calls>' }}": "deepseek_v32",
    "<seed:tool_call>\\n<function=example_function_name>": "seed_oss",
    "{% set begin = '<minimax:tool_call>' %}": "minimax_m2",
    "<｜tool_calls_begin｜><steptml:invoke name=": "step3",
    "<|tool_calls_section_begin|>{% for call in calls %}": "kimi_k2",
    'format it as <tool_calls>[{"name": ...}]</tool_calls>': "hunyuan_a13b",
    "<TOOLCALL>[{...}]</TOOLCALL>": "nemotron_nano_v2",
    "wrapped in <function_calls></function_calls> XML tags": "olmo3",
    "'List of tools: <|tool_list_start|>['": "lfm2",
    "{{ '<｜tool▁call▁begin｜>' }}": "deepseek",
    "{{ '<|tool_call>call:' + name }}": "gemma",
    "{{ '<start_function_call>' }}": "functiongemma",
    "respond only with <|tool_call|> followed by": "granite",
    "formatted as functools[{...}, ...]": "phi4_mini_json",
    "{{ '<|tool_call|>' + calls + '<|/tool_call|>' }}": "phi4_mini_json",
    "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}": "phi4_mini_json",
    "[func_name1(params_name1=params_value1)]": "pythonic",
    '{"name": function name, "parameters": dictionary of argument name and its value}': "llama3_json",
}


@pytest.mark.parametrize("template", SIGNS)
def test_the_format_is_found_by_the_template(template: str) -> None:
    assert find_tool_parser(template) is TOOL_PARSERS[SIGNS[template]]


#: Where the chat templates of many models lie, one a file, such as ``models/templates`` of llama.cpp.
TEMPLATES = "OCTAVO_CHAT_TEMPLATES"
#: Chat templates of models, by file name, and the parsers of their calls and reasoning.
MODELS = {
    "Bielik-11B-v3.0-Instruct": ("hermes", "qwen3"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "GLM-4.6": ("glm45", "qwen3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "HuggingFaceTB-SmolLM3-3B": (None, "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-Instruct": ("lfm2", "deepseek_r1"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_nano_v2", "qwen3"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
    "StepFun3.5-Flash": ("qwen3_coder", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek", "qwen3"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek", "qwen3"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v32", "qwen3"),
    "google-gemma-2-2b-it": (None, None),
    "google-gemma-4-31B-it": ("gemma", "gemma"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "qwen3"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "tencent-Hy3": (None, None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
}


@pytest.mark.slow
@pytest.mark.skipif(TEMPLATES not in os.environ, reason=f"{TEMPLATES} names no folder of chat templates")
@pytest.mark.parametrize("model", MODELS)
def test_the_formats_of_a_models_own_template_are_found(model: str) -> None:
    template = (Path(os.environ[TEMPLATES]) / f"{model}.jinja").read_text(encoding="utf-8")
    calls, reasoning = MODELS[model]
    assert find_tool_parser(template) is (calls and TOOL_PARSERS[calls])
    assert find_reasoning_parser(template) is (reasoning and REASONING_PARSERS[reasoning])


def test_a_template_without_a_known_sign_has_no_format() -> None:
    assert find_tool_parser("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}") is None
    assert find_tool_parser("'<tool_calls{}>'.format(suffix)") is None


@pytest.mark.parametrize(
    ("heading", "parsers", "others"),
    [
        ("## Parsers of tool calls", TOOL_PARSERS, TOOL_NAMES),
        ("## Reasoning", REASONING_PARSERS, REASONING_NAMES),
    ],
)
def test_the_page_names_all_parsers(heading: str, parsers: dict[str, Any], others: dict[str, str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", page.partition(heading)[2].partition("\n## ")[0], re.MULTILINE)
    assert [name for name, _ in rows] and {name for name, _ in rows} == set(parsers)
    assert {other: name for name, cell in rows for other in re.findall(r"`(\w+)`", cell)} == others


class Shouting(ToolParser):
    """A format of a user's own: ``CALL name {...}``."""

    def parse(self) -> Any:
        while True:
            yield from self.content("CALL ")
            name = yield from self.name()
            yield from self.space()
            self.start_call(name)
            yield from self.arguments()


def test_a_parser_of_ones_own_is_named_by_its_module() -> None:
    parser = load_tool_parser(f"{__name__}:Shouting")
    assert message(parser(TOOLS).feed('ok CALL add {"a": 1} done', True)) == ("ok done", [("add", '{"a": 1}')])
    assert load_tool_parser("deepseek_v3") is TOOL_PARSERS["deepseek"]
    for wrong in ("hermess", f"{__name__}:TOOLS", "nowhere:Parser"):
        with pytest.raises(ConfigError):
            load_tool_parser(wrong)
