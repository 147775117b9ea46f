"""Prompts in Harmony: what OpenAI's package writes, recorded and at hand, and what gpt-oss's template refuses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_template import find_reasoning_marks, load_chat_templates, render_chat
from octavo.engine.harmony import HARMONY_TEMPLATE, _function_type, is_harmony, render_harmony

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.\nNot of the past.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "title": "City", "description": "Its name"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "days": {"type": "integer", "default": 3, "description": "How many"},
            "zones": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            "at": {
                "type": "object",
                "properties": {
                    "note": {"type": "string", "default": "x", "description": "Free"},
                    "on": {"type": "boolean"},
                },
                "required": ["on"],
            },
            "both": {"type": ["integer", "string"]},
            "free": {"type": "object"},
            "list": {"type": "array"},
            "maybe": {"type": "string", "nullable": True, "examples": ["a", "b"]},
            "any": {},
        },
        "required": ["city", "at"],
    },
}  # fmt: skip
WHERE = {"name": "where", "description": "The place of the user."}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": WHERE}]


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


#: Two turns, the second within its calls.
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in riddles."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "The weather?"},
    {
        "role": "assistant",
        "reasoning_content": "The place, then the weather.",
        "content": "I look it up.",
        "tool_calls": [call("where", "{}", "a")],
    },
    {"role": "tool", "tool_call_id": "a", "content": 'Rome, "the" city'},
    {"role": "assistant", "reasoning_content": "Rome.", "tool_calls": [call("get_weather", '{"city": "Rome"}', "b")]},
    {"role": "tool", "tool_call_id": "b", "content": '{"sunny": true}'},
]
#: openai-harmony 0.0.8 of ``MESSAGES``, without the date; it writes the recipient of a call before the channel.
RECORDED = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: DATE

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Instructions

Answer in riddles.

# Tools

## functions

namespace functions {

@TYPES@

} // namespace functions<|end|><|start|>user<|message|>Hello<|end|>\
<|start|>assistant<|channel|>final<|message|>Good day.<|end|><|start|>user<|message|>The weather?<|end|>\
<|start|>assistant<|channel|>analysis<|message|>The place, then the weather.<|end|>\
<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>\
<|start|>assistant to=functions.where<|channel|>commentary <|constrain|>json<|message|>{}<|call|>\
<|start|>functions.where to=assistant<|channel|>commentary<|message|>Rome, "the" city<|end|>\
<|start|>assistant<|channel|>analysis<|message|>Rome.<|end|>\
<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Rome"}<|call|>\
<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"sunny": true}<|end|><|start|>assistant"""
#: The same version of ``TOOLS``.
RECORDED_TYPES = """\
// The weather in a city.
// Not of the past.
type get_weather = (_: {
// City
//
// Its name
city: string,
unit?: "C" | "F", // default: C
// How many
days?: number, // default: 3
zones?: number[][],
at: {
    // Free
    note?: string, // default: "x"
    on: boolean,
    },
both?: number | string,
free?: {
    },
list?: Array<any>,
// Examples:
// - "a"
// - "b"
maybe?: string | null,
any?: any,
}) => any;

// The place of the user.
type where = () => any;"""


def written(**options: Any) -> str:
    text = render_harmony(MESSAGES, TOOLS, True, reasoning_effort="high", **options)
    return re.sub(r"Current date: [\d-]{10}", "Current date: DATE", text)


def as_recorded(text: str) -> str:
    """A text with the recipients of calls before the channel; the format allows both places."""
    return re.sub(
        r"assistant<\|channel\|>commentary to=(\S+) <\|constrain",
        r"assistant to=\1<|channel|>commentary <|constrain",
        text,
    )


def test_a_conversation_is_written_as_the_package_writes_it() -> None:
    assert as_recorded(written()) == RECORDED.replace("@TYPES@", RECORDED_TYPES)


VOCABULARY = "TIKTOKEN_ENCODINGS_BASE"


@pytest.mark.slow
@pytest.mark.skipif(
    VOCABULARY not in os.environ or importlib.util.find_spec("openai_harmony") is None,
    reason=f"openai-harmony is not installed, or {VOCABULARY} names no folder with o200k_base.tiktoken",
)
def test_the_package_at_hand_writes_the_same() -> None:
    package: Any = importlib.import_module("openai_harmony")

    def said(text: str, channel: str | None = None, recipient: str | None = None) -> Any:
        message = package.Message.from_role_and_content(package.Role.ASSISTANT, text)
        message.channel, message.recipient = channel, recipient
        message.content_type = "<|constrain|>json" if recipient else None
        return message

    def result(name: str, text: str) -> Any:
        author = package.Author.new(package.Role.TOOL, f"functions.{name}")
        return (
            package.Message.from_author_and_content(author, text).with_channel("commentary").with_recipient("assistant")
        )

    effort = package.ReasoningEffort.HIGH
    system = package.SystemContent.new().with_reasoning_effort(effort).with_conversation_start_date("DATE")
    tools = [package.ToolDescription.new(f["name"], f["description"], f.get("parameters")) for f in (WEATHER, WHERE)]
    developer = package.DeveloperContent.new().with_instructions("Answer in riddles.").with_function_tools(tools)
    messages = [
        package.Message.from_role_and_content(package.Role.SYSTEM, system),
        package.Message.from_role_and_content(package.Role.DEVELOPER, developer),
        package.Message.from_role_and_content(package.Role.USER, "Hello"),
        said("Good day.", "final"),
        package.Message.from_role_and_content(package.Role.USER, "The weather?"),
        said("The place, then the weather.", "analysis"),
        said("I look it up.", "commentary"),
        said("{}", "commentary", "functions.where"),
        result("where", 'Rome, "the" city'),
        said("Rome.", "analysis"),
        said('{"city": "Rome"}', "commentary", "functions.get_weather"),
        result("get_weather", '{"sunny": true}'),
    ]
    encoding = package.load_harmony_encoding("HarmonyGptOss")
    conversation = package.Conversation.from_messages(messages)
    tokens = encoding.render_conversation_for_completion(conversation, package.Role.ASSISTANT)
    assert encoding.decode(tokens) == as_recorded(written())


def test_several_calls_each_have_their_result_behind_them() -> None:
    calls = [call("where", "{}", "a"), call("get_weather", '{"city": "Rome"}', "b")]
    results = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in (("b", "sun"), ("a", "here"))]
    user = {"role": "user", "content": "?"}
    text = render_harmony([user, {"role": "assistant", "content": None, "tool_calls": calls}, *results], None, False)
    assert re.findall(r"to=functions\.\w+|<\|message\|>(?:sun|here)", text) == [
        "to=functions.where", "<|message|>here", "to=functions.get_weather", "<|message|>sun",
    ]  # fmt: skip
    # Results without ids answer the last call.
    unnamed = [{"role": "tool", "content": "sun"}]
    text = render_harmony([user, {"role": "assistant", "content": "", "tool_calls": calls[1:]}, *unnamed], None, False)
    assert text.endswith("<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|>")


def test_alternatives_and_references_have_types() -> None:
    schema = {
        "type": "object",
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
        "properties": {
            "a": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "b": {"$ref": "#/$defs/Node"},
            "c": {"type": "array", "items": {"enum": ["x", 1]}},
            "d": {"const": "k"},
        },
    }
    text = _function_type({"name": "f", "parameters": schema})
    for line in ("a?: string | null,", "b?: {", 'c?: ("x" | 1)[],', 'd?: "k",'):
        assert f"\n{line}" in text


def messages(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"({role} {i})"} for i, role in enumerate(roles)]


def test_the_template_is_a_template_as_any_other() -> None:
    said = messages("system", "developer", "user", "assistant", "developer", "user")
    text = render_chat(HARMONY_TEMPLATE, said)
    assert "# Instructions\n\n(system 0)\n\n(developer 1)<|end|>" in text
    assert "<|start|>developer<|message|># Instructions\n\n(developer 4)<|end|>" in text
    assert text.endswith("(user 5)<|end|><|start|>assistant") and "Reasoning: medium" in text
    continued = render_chat(HARMONY_TEMPLATE, said[:4], add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|start|>assistant<|channel|>final<|message|>(assistant 3)")
    unthinking = render_chat(HARMONY_TEMPLATE, said[:3], enable_thinking=False)
    assert unthinking.endswith("<|start|>assistant<|channel|>analysis<|message|><|end|>")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user<|message|>a\nb<|end|>" in render_chat(HARMONY_TEMPLATE, parts)
    assert find_reasoning_marks(HARMONY_TEMPLATE) == "harmony"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"reasoning_effort": "extreme"}, "reasoning_effort must be one of none, minimal, low"),
        (
            {"builtin_tools": ["browser", "python"]},
            "builtin_tools: browser, python: the model's built-in tools are not",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(problem)):
        render_chat(HARMONY_TEMPLATE, messages("user"), **options)
    with pytest.raises(InvalidRequestError, match="answers no call"):
        render_harmony(messages("user", "tool"), None, True)


def test_the_template_of_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    own = "{%- macro render_typescript_type(spec) -%}{%- endmacro -%}<|channel|>analysis<|message|>{{ messages }}"
    (tmp_path / "chat_template.jinja").write_text(own)
    assert is_harmony(own) and load_chat_templates(tmp_path, {}) == {"default": HARMONY_TEMPLATE}
    (tmp_path / "chat_template.jinja").write_text("<|channel|>analysis<|message|>{{ messages }}")
    assert load_chat_templates(tmp_path, {"chat_template": own})["default"] != HARMONY_TEMPLATE


def test_arguments_may_be_sent_parsed() -> None:
    said = [*messages("user"), {"role": "assistant", "tool_calls": [call("where", "", "a")]}]
    said[1]["tool_calls"][0]["function"]["arguments"] = {"é": 1}
    assert f"<|message|>{json.dumps({'é': 1}, ensure_ascii=False)}<|call|>" in render_harmony(said, None, True)
