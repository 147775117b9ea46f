"""Reasoning told from answers: with and without its beginning, cut anywhere, and answers that end within it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import ConfigError
from octavo.engine.tokenizer import TextStream
from octavo.server.answer_format import ChatFormats
from octavo.server.chat import ChatParser
from octavo.server.reasoning_parsers import (
    OTHER_NAMES,
    REASONING_PARSERS,
    ReasoningParser,
    Thinking,
    find_reasoning_parser,
    load_reasoning_parser,
)
from octavo.server.tool_parsers import TOOL_PARSERS
from octavo.server.tool_parsers.tool_parser import collect
from tests.server.marked_reasoning import IssueReasoning
from tests.server.recorded_calls import RECORDED, TOOLS

Think = REASONING_PARSERS["qwen3"]
BEFORE, INSIDE, AFTER = Thinking.BEFORE, Thinking.INSIDE, Thinking.AFTER
CASES = [
    # state, text, reasoning, answer
    (BEFORE, "<think>\nWhy? 1 < 2.\n</think>\n\nSo.\n", "Why? 1 < 2.", "So.\n"),
    (BEFORE, "\n<think></think>So", "", "So"),
    (BEFORE, " The answer", "", " The answer"),
    (BEFORE, "<thin", "", "<thin"),
    (BEFORE, "So <think>not</think>", "", "So <think>not</think>"),
    (INSIDE, "\nWhy?</think>\n{}", "Why?", "{}"),
    (INSIDE, "Why? </thi", "Why? </thi", ""),
    (INSIDE, "\n\n</think>", "", ""),
    (INSIDE, "a</think>b</think>c", "a", "b</think>c"),
    (INSIDE, "Why?\n<tool_call>{}</tool_call>", "Why?", "<tool_call>{}</tool_call>"),
    (BEFORE, "<think>Why?<tool_call>{}</think>", "Why?", "<tool_call>{}</think>"),
    (INSIDE, "Why?</think><tool_call>", "Why?", "<tool_call>"),
    (INSIDE, "Why? <tool_cal", "Why? <tool_cal", ""),
    (AFTER, "\n<think>a</think>", "", "\n<think>a</think>"),
    (AFTER, "", "", ""),
]


def split(state: Thinking, pieces: list[str], kind: type[ReasoningParser] = Think) -> tuple[str, str]:
    parser = kind(state)
    parts = [parser.feed(piece, False) for piece in pieces] + [parser.feed("", True)]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(("state", "text", "thought", "answer"), CASES)
def test_reasoning_is_told_from_the_answer_wherever_the_text_is_cut(
    state: Thinking, text: str, thought: str, answer: str
) -> None:
    assert Think(state).feed(text, True) == (thought, answer)
    for i in range(len(text) + 1):
        assert split(state, [text[:i], text[i:]]) == (thought, answer), i
    assert split(state, list(text)) == (thought, answer)


#: Names the folder from which openai-harmony reads its vocabulary.
VOCABULARY = "TIKTOKEN_ENCODINGS_BASE"
A, F, C = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary"
S, E = "<|start|>assistant", "<|end|>"
CALL = f"{C} to=functions.add <|constrain|>json<|message|>{{}}"
MARKED = [
    # parser, state, text, reasoning, answer
    ("hunyuan_a13b", BEFORE, "<think>\nWhy?\n</think>\n<answer>\nSo.\n</answer>", "Why?", "So."),
    ("hunyuan_a13b", BEFORE, "<think>\n\n</think>\n<answer>\n1 </ 2\n</ans", "", "1 </ 2\n</ans"),
    ("hunyuan_a13b", AFTER, "<answer>So.", "", "So."),
    ("hunyuan_a13b", BEFORE, "So <answer>.", "", "So <answer>."),
    ("ernie45", INSIDE, "Why?\n</think>\n\n<response>\nSo.\n\nYes.\n</response>\n", "Why?", "So.\n\nYes."),
    ("ernie45", INSIDE, "Why?\n</think>\n\n\n<tool_call>\n{}\n</tool_call>", "Why?", "<tool_call>\n{}\n</tool_call>"),
    ("ernie45", INSIDE, "Why?\n</think>\n\n<response>A</response> B", "Why?", "AB"),
    ("harmony", BEFORE, f"{A}Why? 1 < 2.{E}{S}{F}2 + 2 = 4.\n", "Why? 1 < 2.", "2 + 2 = 4.\n"),
    ("harmony", BEFORE, f"{F}Yes<|return|>", "", "Yes"),
    ("harmony", BEFORE, "Yes", "", "Yes"),
    ("harmony", AFTER, f"{S}{F}Yes", "", "Yes"),
    ("harmony", AFTER, " so on", "", " so on"),
    ("harmony", INSIDE, f"so{E}\n{S}{F}\nYes", "so", "\nYes"),
    ("harmony", INSIDE, f"so{S}{F}Yes", "so", "Yes"),
    ("harmony", INSIDE, "so <|en", "so <|en", ""),
    ("harmony", BEFORE, f"{A}a{E}{S}{A}b{E}{S}{F}c", "a\n\nb", "c"),
    ("harmony", BEFORE, f"{A}a{E}{S}{C}<|message|>I look.{E}{S}{F}Here.", "a", "I look.\n\nHere."),
    ("harmony", BEFORE, f"{A}a{E}{S}{CALL}<|call|>", "a", f"{S}{CALL}<|call|>"),
    ("harmony", BEFORE, f"{A}a{E}{S}{CALL}", "a", f"{S}{CALL}"),
    ("harmony", BEFORE, f" to=f{C} json<|message|>{{}}<|call|>", "", f" to=f{C} json<|message|>{{}}<|call|>"),
    ("harmony", BEFORE, "<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", ""),
    ("harmony", BEFORE, f"{A}a{E}{S}<|channel|>", "a", f"{S}<|channel|>"),
    ("harmony", BEFORE, f"{A}a{E} and <|channel|>", "a", " and <|channel|>"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "state", "text", "thought", "answer"), MARKED)
def test_answers_with_marks_of_their_own_are_told_apart_wherever_the_text_is_cut(
    kind: str, state: Thinking, text: str, thought: str, answer: str
) -> None:
    parser = REASONING_PARSERS[kind]
    assert parser(state).feed(text, True) == (thought, answer)
    for i in range(len(text) + 1):
        assert split(state, [text[:i], text[i:]], parser) == (thought, answer), i
    assert split(state, list(text), parser) == (thought, answer)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (
            f'{A}Need it.{E}{S}{C}<|message|>I look.{E}{S}{CALL[:-2]}{{"a": 1}}<|call|>',
            "I look.",
            "Need it.",
            [("add", '{"a": 1}')],
        ),
        (f"{A}So.{E}{S}{F}It is.", "It is.", "So.", []),
        (f"{CALL.replace('functions.add', 'browser.search')}<|call|>", None, None, []),
    ],
)
def test_an_answer_of_gpt_oss(
    text: str, content: str | None, reasoning: str | None, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        parser = ChatParser(REASONING_PARSERS["harmony"](BEFORE), TOOL_PARSERS["harmony"](TOOLS))
        events = [event for piece in pieces for event in parser.feed(piece, [], False)]
        found = collect(events + parser.feed("", [], True))
        assert (found.reasoning, [(c.name, c.arguments) for c in found.tool_calls]) == (reasoning, calls)
        assert found.content == (content or text)


#: Outputs of gpt-oss, as the documentation of its format has them.
OUTPUTS = [
    f'{A}User asks: "What is 2 + 2?" Simple arithmetic.{E}{S}{F}2 + 2 = 4.',
    f'{A}Need it.{E}{S}{C} to=functions.get_weather <|constrain|>json<|message|>{{"city": "Rome"}}',
    f"{A}A plan.{E}{S}{C}<|message|>**Plan**:\\n1. Look{E}{S} to=functions.add{C} <|constrain|>json<|message|>{{}}",
    f"{F}Hi",
]


@pytest.mark.slow
@pytest.mark.skipif(
    VOCABULARY not in os.environ or importlib.util.find_spec("openai_harmony") is None,
    reason=f"openai-harmony is not installed, or {VOCABULARY} names no folder with o200k_base.tiktoken",
)
@pytest.mark.parametrize("text", OUTPUTS)
def test_the_package_of_openai_reads_the_same(text: str) -> None:
    package: Any = importlib.import_module("openai_harmony")
    encoding = package.load_harmony_encoding("HarmonyGptOss")
    tokens = encoding.encode(text, allowed_special="all")
    said = encoding.parse_messages_from_completion_tokens(tokens, package.Role.ASSISTANT)
    texts = [(m.channel, m.recipient, m.content[0].text) for m in said]
    parser = ChatParser(REASONING_PARSERS["harmony"](BEFORE), TOOL_PARSERS["harmony"](TOOLS))
    found = collect(parser.feed(text, [], True))
    assert found.reasoning == ("\n\n".join(t for channel, _, t in texts if channel == "analysis") or None)
    assert found.content == ("\n\n".join(t for channel, to, t in texts if channel != "analysis" and not to) or None)
    calls = [(f"functions.{call.name}", call.arguments) for call in found.tool_calls]
    assert calls == [(to, t) for _, to, t in texts if to]


class Letters:
    """Decodes tokens that are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "tokens"), [("why</think>so", 11), ("why<tool_call>{}</tool_call>", 3), ("why", 3), ("why<tool", 8)]
)
def test_the_tokens_of_the_reasoning_are_those_before_what_ends_it(text: str, tokens: int, size: int) -> None:
    parser = ChatParser(Think(INSIDE), decode=cast(TextStream, Letters()))
    for i in range(0, len(text), size):
        parser.feed(text[i : i + size], [ord(letter) for letter in text[i : i + size]], False)
    assert parser.reasoning_tokens == tokens


def test_the_tokens_of_every_analysis_count() -> None:
    text = f"{C}<|message|>I look.{E}{S}{A}why{E}{S}{A}so{E}{S}{F}Here."
    parser = ChatParser(REASONING_PARSERS["harmony"](BEFORE), decode=cast(TextStream, Letters()))
    for letter in text:
        parser.feed(letter, [ord(letter)], False)
    ends = len(E) + 1  # with the last letter of what opens the analysis
    assert parser.reasoning_tokens == len("why") + len("so") + 2 * ends


@pytest.mark.parametrize("calls", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("cut", [False, True])
@settings(max_examples=25)
@given(kind=st.sampled_from(sorted(REASONING_PARSERS)), state=st.sampled_from(Thinking), data=st.data())
def test_reasoning_and_calls_are_told_apart_wherever_the_text_is_cut(
    calls: str, cut: bool, kind: str, state: Thinking, data: st.DataObject
) -> None:
    marks, tools = REASONING_PARSERS[kind], TOOL_PARSERS[calls]
    parts = ["why", "\n", "1 < 2", "\u00e9", marks.start, marks.end, *tools.begins]
    parts += [case[0] for case in RECORDED[calls]]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))

    def message(pieces: list[str]) -> tuple[str | None, str | None, list[tuple[str, str]]]:
        reasoning = marks(state)
        reasoning.interrupts = tuple(dict.fromkeys((*marks.interrupts, *tools.begins)))
        parser = ChatParser(reasoning, tools(TOOLS))
        events = [event for piece in pieces for event in parser.feed(piece, [], False)]
        found = collect(events + parser.feed("", [], True, cut=cut))
        return found.content, found.reasoning, [(call.name, call.arguments) for call in found.tool_calls]

    assert message([text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == message([text])


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(REASONING_PARSERS)),
    state=st.sampled_from(Thinking),
    data=st.data(),
)
def test_any_text_cut_anywhere_gives_the_same_parts(kind: str, state: Thinking, data: st.DataObject) -> None:
    parser = REASONING_PARSERS[kind]
    parts = [parser.start, parser.end, parser.start[:3], parser.end[:-1], " ", "\n", "a", "<"]
    parts += [part for text in parser.interrupts for part in (text, text[:-1])]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(state, pieces, parser) == parser(state).feed(text, True)


@pytest.mark.parametrize(
    ("prompt", "continues", "state"),
    [
        ("user: hi\nassistant: ", False, BEFORE),
        ("assistant: <think>\n", False, INSIDE),
        ("assistant: <think>\n\n</think>\n\n", False, AFTER),
        ("user: what is <think>? assistant: ", False, BEFORE),
        ("assistant: <think>It may", True, INSIDE),
        ("assistant: <think>It may</think>Yes, ", True, AFTER),
    ],
)
def test_the_prompt_says_where_the_answer_begins(prompt: str, continues: bool, state: Thinking) -> None:
    assert Think.state_after(prompt, continues=continues) is state
    if state is BEFORE:
        assert REASONING_PARSERS["deepseek_r1"].state_after(prompt) is INSIDE


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\n\n</think>' }}", "qwen3"),
        ("{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("{{ '[THINK]' + m.thinking + '[/THINK]' }}", "mistral"),
        ("{{ '<|channel>thought\n' }}", "gemma"),
        ("{{ text.split('<channel|>') }}", "gemma"),
        ("{{ '<seed:think>' }}", "seed_oss"),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking }}", "harmony"),
        ("{{ '<think></think>' }}{{ content.split('<answer>')[-1] }}", "hunyuan_a13b"),
        ("{{ '<think>\\n' + m.reasoning_content + '</think>\\n\\n<response>\\n' }}", "ernie45"),
        ("Write after 'Here is my thought process:'", "granite"),
    ],
)
def test_the_marks_are_found_by_the_template(template: str, name: str) -> None:
    assert find_reasoning_parser(template) is REASONING_PARSERS[name]
    assert ChatFormats(reasoning_parser="none").reasoning_parser(template) is None
    assert ChatFormats(reasoning_parser="granite").reasoning_parser(template) is REASONING_PARSERS["granite"]
    assert find_reasoning_parser("{{ messages }}") is None


def test_a_parser_of_ones_own_is_named_by_its_module() -> None:
    assert load_reasoning_parser("tests.server.marked_reasoning:IssueReasoning") is IssueReasoning
    assert load_reasoning_parser("openai_gptoss") is load_reasoning_parser("gpt-oss") is REASONING_PARSERS["harmony"]
    assert all(load_reasoning_parser(name) is REASONING_PARSERS[known] for name, known in OTHER_NAMES.items())
    for wrong in ("think", "tests.server.marked_reasoning:Nothing"):
        with pytest.raises(ConfigError, match="reasoning_parser"):
            load_reasoning_parser(wrong)
