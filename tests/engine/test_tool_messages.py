"""Tools, calls and results in conversations, as templates of several habits take them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.chat_template import render_chat

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ARGUMENTS = {"a": 1, "t": "é"}
ASK = {"role": "user", "content": "1 + 1?"}


def conversation(**message: Any) -> list[dict[str, Any]]:
    call = {
        "id": "call_0123456789",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)},
    }
    result = {"role": "tool", "tool_call_id": "call_0123456789", "content": "2"}
    return [ASK, {"role": "assistant", "tool_calls": [call], **message}, result]


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(template, messages, call_format=HERMES, **options)


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_a_template_that_knows_no_tools_gets_all_as_text() -> None:
    text = render(PLAIN, [{"role": "system", "content": "Be brief."}, *conversation()], tools=TOOLS)
    system, user, assistant, result = text.removeprefix("[system]").replace("]", "[").split("[")[::2]
    assert system.startswith("Be brief.\n\n# Tools") and json.dumps(TOOLS[0]) in system and "<tool_call>" in system
    assert user == ASK["content"]
    assert assistant == '<tool_call>\n{"name": "add", "arguments": {"a": 1, "t": "é"}}\n</tool_call>'
    assert result == "<tool_response>\n2\n</tool_response>"
    assert "[user]<tool_response>" in text and "[tool]" not in text
    # Without a call format, nothing is changed: as other libraries render it.
    assert "Tools" not in render_chat(PLAIN, conversation(), tools=TOOLS)


def test_results_in_a_row_are_one_message_and_words_beside_calls_stay() -> None:
    messages = conversation(content="I add.")
    text = render(PLAIN, [*messages, messages[-1], {"role": "user", "content": "<tool_response>?"}])
    assert "[assistant]I add.\n<tool_call>" in text
    assert text.endswith(
        "[user]<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response>[user]<tool_response>?"
    )


def test_a_template_that_takes_no_system_message_has_the_tools_in_the_users() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
    )
    text = render(template, [ASK], tools=TOOLS)
    assert text.startswith("[user]# Tools") and text.endswith("1 + 1?")


READS = "{{ tools }}{% for m in messages %}{{ m.role }}:"
#: Writes arguments: as JSON, joined with text as if they were text, one of them.
AS_JSON = "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
JOINED = "{% for c in m.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}"
ONE = "{% for c in m.tool_calls %}{{ c.function.arguments.t }}{% endfor %}"
WITHOUT = "{% if m['content'] is none %}"
#: Asks for reasoning, which is no question for content.
REASONING = "{% if m.reasoning_content is not none and 'x' in m.content %}{% endif %}"


@pytest.mark.parametrize(
    ("rest", "written"),
    [
        ("{{ m.content + '' }}" + AS_JSON, '{"a": 1, "t": "é"}'),
        (JOINED, '{"a": 1, "t": "é"}'),
        (WITHOUT + JOINED + "{% endif %}", '{"a": 1, "t": "é"}'),
        (WITHOUT + ONE + "{% endif %}", "é"),
        (WITHOUT + "{% endif %}{{ m.content + '' if m.tool_calls }}" + ONE, "é"),
        (REASONING + ONE, "é"),
    ],
)
def test_calls_are_given_as_the_template_takes_them(rest: str, written: str) -> None:
    text = render(READS + rest + "{% endfor %}", conversation(), tools=TOOLS)
    assert f"assistant:{written}tool:" in text


def test_ids_have_the_length_that_the_template_asks_for() -> None:
    template = (
        READS + "{% for i in [m.tool_call_id] + (m.tool_calls or []) | map(attribute='id') | list %}"
        "{% if i and i|length != 9 %}{{ raise_exception('9!') }}{% endif %}({{ i }}){% endfor %}{% endfor %}"
    )
    text = render(template, conversation())
    found = [part.split(")")[0] for part in text.split("(")[1:] if part[0] != ")"]
    assert len(set(found)) == 1 and len(found[0]) == 9 and found[0].isalnum()
    kept = conversation()
    kept[1]["tool_calls"][0]["id"] = kept[2]["tool_call_id"] = "abcDEF123"
    assert render(template, kept).count("(abcDEF123)") == 2


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them() -> None:
    messages = conversation()
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": '
    assert '"arguments": {"a": }' in render(PLAIN, messages)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([{}], r"messages\[1\]\.tool_calls\[0\] must have a function"),
        ([{"function": {"arguments": "{}"}}], "must have a function with a name"),
        ([{"function": {"name": "f", "arguments": [1]}}], "arguments must be JSON text, not list"),
        ({"function": {}}, r"messages\[1\]\.tool_calls must be a list"),
    ],
)
def test_malformed_calls_are_refused(calls: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        render(PLAIN, [ASK, {"role": "assistant", "tool_calls": calls}])


def test_a_format_writes_calls() -> None:
    form = CallFormat('{"n": "{name}", "a": {arguments}}', separator=", ", begin="[", end="]")
    assert (
        form.written([("f", "{}"), ("g", '{"x": "{name}"}')])
        == '[{"n": "f", "a": {}}, {"n": "g", "a": {"x": "{name}"}}]'
    )
