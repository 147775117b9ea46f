from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.engine import chat_messages as template_program
from octavo.engine.chat_messages import HERMES
from octavo.engine.chat_template import choose_template, load_chat_templates, render_chat

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' -%}
        <|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

LLAMA_LIKE = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, not " + message["role"]) }}
    {%- endif %}
{%- endfor %}"""

NAMESPACE = """{%- set ns = namespace(last=-1, seen=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and ns.last < 0 %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 > ns.last %}{%- generation %}[late]{{ message.content }}{%- endgeneration %}
    {%- elif message.content.startswith("skip") %}{%- continue %}
    {%- else %}{{ loop.index0 }}:{{ message.content.split(" ")[-1] | upper }}
    {% endif %}
{%- endfor %}
{{- "<think>" if enable_thinking is defined and enable_thinking else "" }}"""

USER: dict[str, Any] = {"role": "user", "content": " What is <b>2 & 2</b>? 'é' \n"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "It is 4."}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, ASSISTANT, {"role": "user", "content": "skip why"}, ASSISTANT],
    [{"role": "system", "content": "S"}, USER, ASSISTANT, USER],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Gets <now> & “then” weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln"]}}},
        },
    }
]
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    texts = render_jinja_template([messages], chat_template=template, **options)[0]
    return str(texts[0])


def test_a_template_that_reads_the_tools_of_the_system_message_gets_them_there() -> None:
    """As Phi-4-mini's."""
    template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
        "{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}"
        "<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}<|end|>{% endfor %}"
    )
    functions = json.dumps([tool["function"] for tool in TOOLS], ensure_ascii=False)
    asked = {"role": "user", "content": "Why?"}
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        content = "Be brief." if system else ""
        shown = f"<|system|>{content}<|tool|>{functions}<|/tool|><|end|><|user|>Why?<|end|>"
        assert render_chat(template, [*system, asked], tools=TOOLS, call_format=HERMES, **TOKENS) == shown
    assert render_chat(template, [asked], call_format=HERMES, **TOKENS) == "<|user|>Why?<|end|>"


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE, MISTRAL_LIKE, NAMESPACE])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(template: str, messages: Any, prompt: bool, tools: Any) -> None:
    options = {"add_generation_prompt": prompt, "tools": tools, "enable_thinking": prompt, **TOKENS}
    assert render_chat(template, messages, **options) == reference(template, messages, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE, MISTRAL_LIKE])
@pytest.mark.parametrize("content", ["It is ", "e", "  spaces around  ", "", [{"type": "text", "text": "part "}]])
def test_a_message_is_continued_as_in_transformers(template: str, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    texts = render_jinja_template(
        [messages_as_text(messages)], chat_template=template, continue_final_message=True, **TOKENS
    )
    assert (
        render_chat(template, messages, **TOKENS, add_generation_prompt=False, continue_final_message=True)
        == texts[0][0]
    )


def messages_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    join = "".join
    return [
        {**m, "content": m["content"] if isinstance(m["content"], str) else join(p["text"] for p in m["content"])}
        for m in messages
    ]


def test_a_message_that_the_template_drops_or_changes_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequestError, match="does not write the last message"):
        render_chat(
            "{{ messages[0].content }}", [USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(InvalidRequestError, match="add_generation_prompt=False"):
        render_chat(CHATML, [USER, ASSISTANT], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        render_chat(CHATML, [], add_generation_prompt=False, continue_final_message=True)


def test_tool_calls_and_results_render_as_in_transformers() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <1>", "n": 1.5}}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "12 °C"}]
    assert render_chat(LLAMA_LIKE, messages, tools=TOOLS, **TOKENS) == reference(
        LLAMA_LIKE, messages, tools=TOOLS, add_generation_prompt=True, **TOKENS
    )


def test_arguments_given_as_json_text_mean_the_same() -> None:
    def messages(arguments: Any) -> list[dict[str, Any]]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    rendered = render_chat(LLAMA_LIKE, messages({"city": "x"}), **TOKENS)
    assert render_chat(LLAMA_LIKE, messages('{"city": "x"}'), **TOKENS) == rendered
    # A model may have written what is none; the answer to such a call says so.
    assert '"parameters": "{city"' in render_chat(LLAMA_LIKE, messages("{city"), **TOKENS)
    with pytest.raises(
        InvalidRequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments must be JSON text"
    ):
        render_chat(LLAMA_LIKE, messages(3), **TOKENS)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([ASSISTANT], "Conversation roles must alternate"),
        ([USER, USER], "Conversation roles must alternate"),
        ([USER, {"role": "critic", "content": "x"}], "Only user and assistant roles are supported, not critic"),
    ],
)
def test_a_templates_own_words_reach_the_user(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        render_chat(MISTRAL_LIKE, messages, **TOKENS)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must not be empty"),
        ("hi", "must be a list, not str"),
        ({"role": "user"}, "must be a list, not dict"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": 3, "content": "x"}], "its role is 3"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 5}], "must be a text or a list of parts, not 5"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "not 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "type 'text'"),
        ([{"role": "user", "content": ["x"]}], "not 'x'"),
        ([{"role": "user", "content": "x", "extra": object()}], "only JSON values, not object"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        render_chat(CHATML, messages)


def test_a_message_that_contains_itself_is_refused() -> None:
    message: dict[str, Any] = {"role": "user", "content": "x"}
    message["self"] = message
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        render_chat(CHATML, [message])


def test_text_parts_are_joined_with_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}])
    assert text == "one\ntwo"


def test_messages_are_left_as_they_were() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}], "name": None}]
    before = json.dumps(messages)
    render_chat("{{ messages[0].content }}", messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 +", "{% if x %}", "{% nonsense %}", "{{ x | nofilter }}"])
def test_a_template_that_is_not_valid_is_an_error_of_the_tokenizer(template: str) -> None:
    with pytest.raises(TokenizerError, match="not valid jinja: line 1"):
        render_chat(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set x = messages.append(1) %}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_the_sandbox_stops_a_hostile_template(template: str) -> None:
    with pytest.raises((TokenizerError, InvalidRequestError)):
        render_chat(template, [USER])


@pytest.mark.parametrize("template", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}{{ os }}"])
def test_a_template_reads_no_files(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        render_chat(template, [USER])


def test_ordinary_arithmetic_works() -> None:
    assert render_chat("{{ 3 * 4 }}{{ 'ab' * 3 }}{{ 2 ** 10 }}", [USER]) == "12ababab1024"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_program, "MAX_RENDERED", 1000)
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        render_chat(endless, [USER])


def test_the_date_is_available() -> None:
    text = render_chat("{{ strftime_now('%Y') }}", [USER])
    assert text.isdigit()
    assert int(text) >= 2024


def test_the_jinja_file_comes_before_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "old"}
    assert load_chat_templates(tmp_path, config) == {"default": "old"}
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_chat_templates(tmp_path, config) == {"default": "new", "tool_use": "tools"}


def test_named_templates_are_chosen_as_in_transformers(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    templates = load_chat_templates(tmp_path, {"chat_template": named})
    assert choose_template(templates, None, has_tools=False) == "D"
    assert choose_template(templates, None, has_tools=True) == "T"
    assert choose_template(templates, "tool_use", has_tools=False) == "T"
    assert choose_template(templates, "{{ 1 }}", has_tools=True) == "{{ 1 }}"
    with pytest.raises(InvalidRequestError, match="rag, tool_use"):
        choose_template({"rag": "", "tool_use": ""}, None, has_tools=False)


@pytest.mark.parametrize("entry", [[1], [{"name": "x"}], 5])
def test_a_malformed_list_of_templates_is_named(tmp_path: Path, entry: object) -> None:
    with pytest.raises(TokenizerError, match="list of named templates"):
        load_chat_templates(tmp_path, {"chat_template": entry})


def test_without_any_template_the_message_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        choose_template({}, None, has_tools=False)
