"""The form in which chat templates get messages, and tools where a template has no place for them."""

# ruff: noqa: E501 (templates)

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.core.errors import InvalidRequestError
from octavo.engine.chat_messages import HERMES, CallFormat
from octavo.engine.chat_template import render_and_read, render_chat

#: Templates with the constructs of published ones.
TEMPLATES = {
    "text joined": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}""",
    "text written": """{% for message in messages %}
<|{{ message.role }}|>
{{ message.content | trim }}
{% endfor %}""",
    "parts walked": """{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}
{%- if part['type'] == 'text' %}{{ part['text'] | trim }}{% elif part['type'] == 'image' %}<image>{% endif %}
{%- endfor %}</{{ m['role'] }}>
{% endfor %}""",
    "parts selected": """{% for m in messages %}{{ m.role | upper }}:
{%- for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}
{%- for part in m.content | selectattr('type', 'equalto', 'text') %}{% generation %} {{ part['text'] }}{% endgeneration %}
{%- endfor %}
{% endfor %}""",
    "first part": """{% for m in messages %}[{{ m.role }}] {{ m.content[0]['text'] }}
{% endfor %}""",
    "attributes joined": """{% for m in messages %}({{ m.role }}) {{ m.content | map(attribute='text') | join(' ') }}
{% endfor %}""",
    "both, by a macro": """{%- macro text_of(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if 'text' in item -%}{{ item.text }}
            {%- elif item.type in ['image', 'image_url'] -%}<image>
            {%- else -%}{{ raise_exception('Unexpected item type in content.') }}{%- endif -%}
        {%- endfor -%}
    {%- elif content is none or content is undefined -%}{{ '' }}
    {%- else -%}{{ raise_exception('Unexpected content type.') }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=messages | length - 1, many=true) -%}
{%- for message in messages[::-1] -%}
    {%- set index = (messages | length - 1) - loop.index0 -%}
    {%- if ns.many and message.role == 'user' and not (text_of(message.content).startswith('<tool_response>')) -%}
        {%- set ns.many = false -%}{%- set ns.last = index -%}{%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '</tools>\n' }}{% endif -%}
{%- for message in messages -%}
    {%- set content = text_of(message.content) | trim -%}
    {%- if message.role in ['system', 'developer'] -%}{{ '<system>' + content + '\n' }}
    {%- elif message.role == 'user' -%}{{ '<user>' + content + '\n' }}
    {%- elif message.role == 'assistant' -%}
        {%- set reasoning = '' -%}
        {%- if message.reasoning_content is string -%}{%- set reasoning = message.reasoning_content -%}
        {%- elif '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
            {%- set content = content.split('</think>')[-1] -%}
        {%- endif -%}
        {{- '<assistant>' }}
        {%- if loop.index0 > ns.last and reasoning %}{{- '<think>' + reasoning.strip('\n') + '</think>' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>' + call.name + ': ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {%- endfor %}
        {{- '\n' }}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<user>' }}{%- endif %}
        {{- '<tool_response>' + content + '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '\n' }}{%- endif %}
    {%- else -%}{{ raise_exception('Unexpected message role: ' + message.role) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<assistant>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif -%}""",
    "system as text, others as both": """{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] | trim + '\n\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is sequence -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
    {{ '</turn>\n' }}
{%- endfor -%}""",
    "asks for none": """{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}{{ 'U:' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none -%}
        {%- for tool in message['tool_calls'] -%}
            {{ 'C:' + tool['type'] + ' ' + tool['function']['name'] + '\n' + tool['function']['arguments'] + '\n' }}
        {%- endfor -%}
    {%- elif message['role'] == 'assistant' and message['content'] is not none -%}{{ 'A:' + message['content'] }}
    {%- elif message['role'] == 'tool' -%}{{ 'R:' + message['content'] }}
    {%- elif message['role'] == 'system' -%}{{ 'S:' + message['content'] }}
    {%- endif -%}
{%- endfor -%}""",
    "alternating": """{%- if messages[0]["role"] == "system" -%}
    {%- set system_message = messages[0]["content"] -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list -%}
{%- set ns = namespace(index=0) -%}
{%- for message in loop_messages -%}
    {%- if message.role in ["user", "assistant"] and not message.tool_calls -%}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) -%}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif -%}
        {%- set ns.index = ns.index + 1 -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token }}
{%- for message in loop_messages -%}
    {%- if message["role"] == "user" -%}
        {%- if tools is not none and tools and (message == user_messages[-1]) -%}
            {{- "[TOOLS][" }}
            {%- for tool in tools -%}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.function.items() if key != "return" -%}
                    {{- '"' + key + '": ' }}{{- '"' + value + '"' if value is string else value | tojson }}
                    {%- if not loop.last -%}{{- ", " }}{%- endif -%}
                {%- endfor -%}
                {{- "}}" }}{%- if not loop.last -%}{{- ", " }}{%- endif -%}
            {%- endfor -%}
            {{- "][/TOOLS]" }}
        {%- endif -%}
        {{- "[INST]" + (system_message + "\n\n" if loop.last and system_message is defined else "") + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none -%}
        {{- "[CALLS][" }}
        {%- for call in message.tool_calls -%}
            {%- set out = call.function | tojson -%}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length < 9 -%}{{- raise_exception("ids are long") }}{%- endif -%}
            {{- ', "id": "' + call.id[-9:] + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor -%}
    {%- elif message["role"] == "assistant" -%}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] in ["tool", "tool_results"] -%}
        {{- '[RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id[-9:] + '"}' }}
    {%- else -%}{{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif -%}
{%- endfor -%}""",
    "keys asked for": """{%- set today = strftime_now('%Y') if strftime_now is defined else '2024' -%}
{{- today | length }}{{- '\n' }}
{%- if documents %}{% for d in documents %}{{ '[' ~ loop.index ~ '] ' ~ d['title'] ~ ': ' ~ d.text ~ '\n' }}{% endfor %}{% endif %}
{%- for t in tools or [] %}{{- t | tojson(indent=4, sort_keys=true) }}{{- "\n\n" }}{%- endfor %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<' + message['role'] + '>\n' + message['content'] | trim + '<eot>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("single tool-calls at once!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson(separators=(',', ':')) }}{{- "}" }}
    {%- else %}
        {{- "<ipython>\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}""",
    "arguments walked": """{%- for message in messages -%}
    {{- '<' ~ message.role ~ '>' }}
    {%- if message.content %}{{ message.content }}{% endif -%}
    {%- if message.name is defined and message.name is not none %}{{ ' by ' ~ message.name }}{% endif -%}
    {%- if message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 -%}
        {%- for call in message.tool_calls -%}
            {{- '<function=' + call.function.name + '>' }}
            {%- for key, value in call.function.arguments | items -%}
                {%- set value = value if value is string else value | tojson | safe -%}
                {{- '<parameter=' + key + '>' + value + '</parameter>' }}
            {%- endfor -%}
            {{- '</function>' }}
        {%- endfor -%}
    {%- endif -%}
    {{- '\n' }}
{%- endfor -%}""",
    "with defaults": """{%- for message in messages -%}
    {%- set content = message.content | default('', true) -%}
    {%- if message.role == 'system' -%}{{- '[S]' ~ content.replace('/think', '').strip() }}
    {%- else -%}{{- '[' ~ message.role | capitalize ~ ']' ~ content }}
    {%- endif -%}
    {%- if message.get('tool_calls') -%}
        {{- message['tool_calls'] | tojson(ensure_ascii=False) }}
    {%- endif -%}
{%- endfor -%}""",
    "drops system messages": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
<{{ m.role }}>{{ m.content }}
{% endfor %}""",
    "a message as JSON": """{% for m in messages %}{{ m | tojson }}
{% endfor %}""",
    "parts of several types": """{%- for message in messages -%}
    {{- '<' + message.role + '>' }}
    {%- if message.content is string %}{{ message.content }}{% elif message.content is not none -%}
    {%- for chunk in message.content -%}
        {%- if chunk['type'] == 'text' %}{{ chunk['text'] }}
        {%- elif chunk['type'] in ['image', 'image_url'] %}[IMG]
        {%- else %}{{ raise_exception('Unrecognized content type!') }}{% endif -%}
    {%- endfor -%}
    {%- endif -%}
{%- endfor -%}""",
    "only users and assistants, else an error": """{% for m in messages %}{% if m.role == 'user' %}H: {{ m.content }}
{% elif m.role == 'assistant' %}A: {{ m.content }}
{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}""",
    "only users and assistants, others lost": """{% for m in messages %}{% if m.role == 'user' %}H: {{ m.content }}
{% elif m.role == 'assistant' %}A: {{ m.content }}
{% endif %}{% endfor %}""",
    "a role of its own": """{% for m in messages %}{% if m.role == 'critic' %}C: {{ m.content }}
{% elif m.role in ('user', 'developer', 'system') %}U: {{ m.content }}
{% else %}A: {{ m.content }}
{% endif %}{% endfor %}""",
}


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def call(arguments: Any = None, name: str = "weather") -> dict[str, Any]:
    return {
        "id": "call_0123456789",
        "type": "function",
        "function": {"name": name, "arguments": {"city": "Köln", "n": 1.5} if arguments is None else arguments},
    }


USER = {"role": "user", "content": "Whatis <b>it</b>?"}
AGAIN = {"role": "user", "content": "Andmore?"}
ANSWER = {"role": "assistant", "content": "Itis."}
SYSTEM = {"role": "system", "content": "Bebrief."}
RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": "twelve °C"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, AGAIN],
    "spaces": [{"role": "user", "content": "  Whatis \n"}, ANSWER, AGAIN],
    "one part": [{"role": "user", "content": [part("Whatis?")]}],
    "parts": [{"role": "user", "content": [part("Whatis"), part("thisthing?")]}],
    "all in parts": [{**m, "content": [part(str(m["content"]))]} for m in (SYSTEM, USER, ANSWER, AGAIN)],
    "some in parts": [SYSTEM, {"role": "user", "content": [part("One"), part("Two")]}, ANSWER, AGAIN],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "Letme think"}, AGAIN],
    "reasoning by another name": [USER, {**ANSWER, "reasoning": "Letme think"}, AGAIN],
    "reasoning in the text": [USER, {"role": "assistant", "content": "<think>Letme</think>Itis."}, AGAIN],
    "calls": [USER, {"role": "assistant", "content": "", "tool_calls": [call()]}, RESULT],
    "calls and null": [USER, {"role": "assistant", "content": None, "tool_calls": [call()]}, RESULT],
    "calls alone": [USER, {"role": "assistant", "tool_calls": [call()]}, RESULT],
    "calls as text": [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"city":"Köln"}')]}, RESULT],
    "calls without arguments": [USER, {"role": "assistant", "content": None, "tool_calls": [call("{}")]}, RESULT],
    "two calls": [USER, {"role": "assistant", "content": "Ilook.", "tool_calls": [call(), call(name="time")]}, RESULT],
    "nulls": [{**USER, "name": None}, {**ANSWER, "tool_calls": None, "refusal": None, "name": None}, AGAIN],
    "names": [{**USER, "name": "Ann"}, ANSWER, AGAIN],
    "developer": [{"role": "developer", "content": "Bebrief."}, USER],
    "role of one's own": [USER, {"role": "critic", "content": "Thatis bad."}, AGAIN],
    "result in parts": [USER, {**ANSWER, "tool_calls": [call()]}, {**RESULT, "content": [part("twelve")]}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "description": "Gets <now> & “then” weather",
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln"]}}},
        },
    }
]
OPTIONS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "tools": TOOLS,
    "documents": [{"title": "T", "text": "D"}],
    "enable_thinking": False,
}


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """transformers' rendering; None: it fails."""
    try:
        texts = render_jinja_template([messages], chat_template=template, **options)[0]
    except Exception:
        return None
    return str(texts[0])


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def loses(text: str, messages: list[dict[str, Any]]) -> bool:
    """Whether a rendering lacks a message that is not the system's, or writes parts as Python does or JSON text twice."""
    spoken = [t.split("</think>")[-1].strip() for m in messages if m["role"] != "system" for t in texts_of(m)]
    roles = [m["role"] for m in messages if m["role"] == "critic"]
    garbled = "{'type'" in text or '\\"city' in text or '"{}"' in text
    return garbled or any(word.lower() not in text.lower() for word in spoken + roles)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_template_writes_what_transformers_writes_or_what_that_loses(
    name: str, conversation: str, prompt: bool
) -> None:
    template, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    options = {**OPTIONS, "add_generation_prompt": prompt}
    expected = reference(template, messages, **options)
    before = json.dumps(messages)
    try:
        text = render_chat(template, messages, **options)
    except InvalidRequestError:
        assert expected is None or loses(expected, messages)
        return
    assert json.dumps(messages) == before
    if expected is not None and text != expected:
        assert loses(expected, messages), expected
    for message in messages:
        if message["role"] == "user":
            assert all(written.strip() in text for written in texts_of(message))


def rendered(template: str, *messages: Any, **options: Any) -> str:
    return render_chat(TEMPLATES.get(template, template), messages, **options)


@pytest.mark.parametrize("text", ["a", "user", "<", "'"])
def test_a_text_that_the_prompt_holds_anyway_is_not_lost(text: str) -> None:
    for content in (text, [part(text)]):
        message = {"role": "user", "content": content}
        assert rendered("parts walked", message) == f"<user>{text}</user>\n"
        assert rendered("text joined", message) == f"<|user|>\n{text}<|end|>\n<|assistant|>\n"


def test_the_form_is_found_anew_for_another_conversation() -> None:
    """One of the same template whose shape differs."""
    template = "{% for m in messages %}{{ m.content if loop.first else m.content[0].text }}/{% endfor %}"
    texts = ["one", "two", "three"]
    for count in (1, 2, 3, 2):
        messages = [{"role": f"user{i}" if i else "user", "content": text} for i, text in enumerate(texts[:count])]
        template_of = "{% if false %}'user1' 'user2'{% endif %}" + template
        assert rendered(template_of, *messages) == "".join(f"{text}/" for text in texts[:count])


def test_a_users_message_that_is_written_in_no_form_is_refused_with_its_place() -> None:
    last = "{{ messages[-1].content }}"
    assert rendered(last, USER) == USER["content"]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content"):
        rendered(last, USER, ANSWER, AGAIN)
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content"):
        rendered("{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}", USER)
    # What a template leaves out on purpose, or because of what a text says.
    assert rendered(last, SYSTEM, ANSWER, USER) == USER["content"]
    quiet = "{% for m in messages if not m.content.startswith('#') %}{{ m.content }}{% endfor %}"
    assert rendered(quiet, {"role": "user", "content": "# note"}, AGAIN) == AGAIN["content"]
    assert rendered("{{ messages | length }}", USER, AGAIN) == "2"


@pytest.mark.parametrize("name", ["only users and assistants, others lost", "asks for none"])
@pytest.mark.parametrize(("role", "field"), [("developer", "content"), ("critic", "role")])
def test_a_role_that_a_template_does_not_know_is_refused(name: str, role: str, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.{field}.*{role}"):
        rendered(name, {"role": role, "content": "x"}, USER)
    text = "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}{{ m.content }}{% endfor %}"
    if role == "developer":
        assert rendered(text, {"role": role, "content": "x"}, USER).startswith("Ux")
    else:
        with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.role.*{role}"):
            rendered(text, {"role": role, "content": "x"}, USER)


def test_null_reaches_a_template_that_asks_for_it() -> None:
    template = "{% for m in messages %}{{ 'null' if m.name is none else 'none' if m.name is undefined else m.name }}{% endfor %}"
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert rendered(template + texts, USER, {**USER, "name": None}, {**USER, "name": "Ann"}).startswith("nonenullAnn")


def test_where_tools_are_adapted_null_is_no_word_and_arguments_are_no_repr() -> None:
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": None, "tool_calls": [call()]}, RESULT]
    template = (
        "{{ tools }}{% for m in messages %}[{{ m.content }}]"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    text = rendered(template, *messages, tools=[], call_format=HERMES)
    assert text == '[][Whatis <b>it</b>?][]weather{"city": "Köln", "n": 1.5}[twelve °C]'
    plain = reference(template, messages, tools=[])
    assert rendered(template, *messages, tools=[]) == plain
    assert plain is not None and "[None]" in plain and "'Köln'" in plain


def test_arguments_that_a_template_takes_as_text_are_left_as_they_were_sent() -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"city":"Köln"}')]}, RESULT]
    assert '<call>weather: {"city":"Köln"}' in rendered("both, by a macro", *messages, tools=TOOLS)


@pytest.mark.parametrize("name", ["parts walked", "both, by a macro", "text joined"])
@pytest.mark.parametrize("content", ["Itis", "  Itis ", "", [part("One"), part("Two ")]])
def test_a_message_is_continued_as_in_transformers(name: str, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    sent = messages
    if name == "parts walked":
        sent = [
            {**m, "content": m["content"] if isinstance(m["content"], list) else [part(m["content"])]} for m in messages
        ]
    elif name == "text joined":
        sent = [{**m, "content": "\n".join(texts_of(m))} for m in messages]
    expected = reference(TEMPLATES[name], sent, continue_final_message=True, bos_token="")
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(name, *messages, **options) == expected


def test_another_field_of_the_last_message_is_continued_as_in_transformers() -> None:
    template = "{% for m in messages %}{{ m.content }}<think>{{ m.reasoning_content }}</think>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "", "reasoning": "Letme think"}]
    options = {"continue_final_message": "reasoning", "add_generation_prompt": False}
    assert rendered(template, *messages, **options) == reference(template, messages, continue_final_message="reasoning")
    with pytest.raises(InvalidRequestError, match="has no content"):
        rendered(template, USER, {"role": "assistant", "content": None}, **{**options, "continue_final_message": True})


def test_fields_whose_names_are_those_of_methods_are_fields() -> None:
    """Such as ``read``; that the template reads it is noted."""
    template = "{% for m in messages %}{{ m.content }}{{ m.read }}{% endfor %}"
    text, read = render_and_read(template, [{**USER, "read": "yes", "tone": "low"}], [(0, "read"), (0, "tone")], {})
    assert text == "Whatis <b>it</b>?yes" and read == [True, False]
    assert render_and_read("{{ messages[0] }}", [{**USER, "tone": "low"}], [(0, "tone")], {})[1] == [True]


# --- tools ------------------------------------------------------------------------------------------------------------


WEATHER_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
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
    text = render(PLAIN, [{"role": "system", "content": "Be brief."}, *conversation()], tools=WEATHER_TOOLS)
    system, user, assistant, result = text.removeprefix("[system]").replace("]", "[").split("[")[::2]
    assert (
        system.startswith("Be brief.\n\n# Tools") and json.dumps(WEATHER_TOOLS[0]) in system and "<tool_call>" in system
    )
    assert user == ASK["content"]
    assert assistant == '<tool_call>\n{"name": "add", "arguments": {"a": 1, "t": "é"}}\n</tool_call>'
    assert result == "<tool_response>\n2\n</tool_response>"
    assert "[user]<tool_response>" in text and "[tool]" not in text
    # Without a call format, nothing is changed: as other libraries render it.
    assert "Tools" not in render_chat(PLAIN, conversation(), tools=WEATHER_TOOLS)


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
    text = render(template, [ASK], tools=WEATHER_TOOLS)
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
    text = render(READS + rest + "{% endfor %}", conversation(), tools=WEATHER_TOOLS)
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
