# ruff: noqa: E501, RUF001 (texts as models write them)
"""Answers of models that call tools, in each format, and what they say; and texts that only look like calls."""

from __future__ import annotations

from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}},
        "required": ["city"],
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "array"}}},
}
ROME = {"city": 'Ro"me {x}', "days": 2}
SUM = {"a": 1.5, "b": ["x", {"c": None}]}

#: Format -> answers of its models, and what they say: content, and calls.
RECORDED: dict[str, list[tuple[str, str | None, list[tuple[str, dict[str, Any]]]]]] = {
    "hermes": [
        (
            'I look it up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro\\"me {x}", "days": 2}}\n'
            '</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1.5, "b": ["x", {"c": null}]}}\n</tool_call>',
            "I look it up.",
            [("get_weather", ROME), ("add", SUM)],
        ),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', None, [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("add", {"a": 1})]),
        ('<tool_call>{"name": "add"}</tool_call>\n', None, [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} and', "and", [("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> and', "and", [("add", {"a": 1})]),
        ('<tool_call>\n[{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"a": 2}}]\n</tool_call>', None,
         [("add", {}), ("add", {"a": 2})]),
    ],
    "llama3_json": [
        ('{"name": "get_weather", "parameters": {"city": "Ro\\"me {x}", "days": 2}}', None, [("get_weather", ROME)]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}', None,
         [("add", {"a": 1}), ("add", {"a": 2})]),
        ('Sure: {"name": "add", "parameters": {"a": 1}}\nand that is it.', "Sure:\nand that is it.", [("add", {"a": 1})]),
        ('It is {"x": 1}. [\n {"name": "add", "parameters": {"a": 1}},\n {"name": "add", "parameters": {"a": 2}}]',
         'It is {"x": 1}.', [("add", {"a": 1}), ("add", {"a": 2})]),
        ('\n{"type": "function", "name": "add", "parameters": {}}\n{"name": "add", "parameters": {"a": 2}}', None,
         [("add", {}), ("add", {"a": 2})]),
    ],
    "mistral": [
        ('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Ro\\"me {x}", "days": 2}}, '
         '{"name": "add", "arguments": {"a": 1.5, "b": ["x", {"c": null}]}, "id": "abcdefghi"}]', None,
         [("get_weather", ROME), ("add", SUM)]),
        ('Yes. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 2}', "Yes.",
         [("add", {"a": 1}), ("add", {"a": 2})]),
        ('[TOOL_CALLS]add{"a": 1}', None, [("add", {"a": 1})]),
    ],
    "pythonic": [
        ("[get_weather(city='Ro\"me {x}', days=2), add(a=1.5, b=[\"x\", {\"c\": None}])]", None,
         [("get_weather", ROME), ("add", SUM)]),
        ("<|python_start|>[add()]<|python_end|>", None, [("add", {})]),
        ("[add(a=1e3, b=[-1, (2,)]), add(b=true)]", None, [("add", {"a": 1000.0, "b": [-1, [2]]}), ("add", {"b": True})]),
    ],
    "deepseek": [
        ('Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
         '{"city": "Ro\\"me {x}", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
         '{"a": 1.5, "b": ["x", {"c": null}]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "Well.",
         [("get_weather", ROME), ("add", SUM)]),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add'
         '<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', None, [("add", {"a": 1}), ("add", {"a": 2})]),
    ],
    "gemma": [
        ('<|tool_call>call:get_weather{city:<|"|>Ro"me {x}<|"|>,days:2}<tool_call|><|tool_call>call:add{a:1.5,'
         'b:[<|"|>x<|"|>,{c:null}]}<tool_call|>', None, [("get_weather", ROME), ("add", SUM)]),
    ],
    "functiongemma": [
        ('<start_function_call>call:get_weather{city:<escape>Ro"me {x}<escape>,days:2}<end_function_call>', None,
         [("get_weather", ROME)]),
    ],
    "qwen3_coder": [
        ('So:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRo"me {x}\n</parameter>\n<parameter=days>\n2\n'
         '</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1.5\n</parameter>\n'
         '<parameter=b>\n["x", {"c": null}]\n</parameter>\n</function>\n</tool_call>', "So:",
         [("get_weather", ROME), ("add", SUM)]),
        ("<function=get_weather>\n<parameter=city>\nA\n\nB\n</parameter>\n<parameter=zip>\n007\n</parameter>\n</function>",
         None, [("get_weather", {"city": "A\n\nB", "zip": "007"})]),
        ("<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>\n<tool_call>\n"
         "<function=add>\n<parameter=a>1</parameter>\n</tool_call> Done.", "Done.",
         [("get_weather", {"city": "Rome", "days": 2}), ("add", {"a": 1})]),
        ("<tool_call><function=add><parameter=a>1</parameter>\n", None, [("add", {"a": 1})]),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]', None,
         [("add", {"a": 1}), ("add", {"a": 2})]),
        ('I look.\n<tool_call>[{"name": "add", "arguments": {"a": 1}}] Done.', "I look. Done.", [("add", {"a": 1})]),
        ('<tool_call>[{"name": "get_weather", "arguments": {"city": "Ro\\"me {x}", "days": 2}}]</tool_call>', None,
         [("get_weather", ROME)]),
    ],
    "phi4_mini_json": [
        ('functools[{"name": "get_weather", "arguments": {"city": "Ro\\"me {x}", "days": 2}},\n  '
         '{"name": "add", "arguments": {"a": 1.5, "b": ["x", {"c": null}]}}\n]', None, [("get_weather", ROME), ("add", SUM)]),
        ('So: <|tool_call|>[{"name": "add", "parameters": {"a": 1}}]<|/tool_call|>', "So:", [("add", {"a": 1})]),
        ('functools [{"name": "add", "arguments": {"a": 1}}]', 'functools [{"name": "add", "arguments": {"a": 1}}]', []),
    ],
}  # fmt: skip
#: Texts that only look like calls: all of it is content.
CONTENT: dict[str, list[str]] = {
    "hermes": [
        "<tool_call> is how a call begins, </tool_call> how it ends, and <tool_",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": add}</tool_call>',
        '<tool_call>\n{"name": "ad',
        "a < b  \n\n  c\n",
    ],
    "llama3_json": ['{"name": "Bob", "age": 3}', '{"name": "add"}', '{"a": [1, 2}', 'Say {"name": "add"}.',
                    "f() { return [1]; }", '{"calls": [{"name": "add", "parameters": {}}]}', '[{"a": {"name": "add", "parameters": {}}}]',
                    '{"name": "Bob", "is": {"name": "add", "parameters": {}}} {', "[ ] {}"],
    "mistral": ["[TOOL_CALLS] none", "[TOOL_CALLS]add[ARGS]1", "[TOOL_CALLS][{}]"],
    "pythonic": ["[1, 2]", "[add]", "[add(a=x)] no", "[add(a=1", "[add(b=[true, None])]", "[unknown(a=1)]", "[add(1)]", "See [add](b)"],
    "deepseek": ["<｜tool▁calls▁begin｜>no", "<｜tool▁call▁begin｜>x<｜tool▁sep｜>{}", "<｜tool▁call▁begin｜>" + "x" * 300],
    "gemma": ["<|tool_call>add", "<|tool_call>call:unknown{a:1}<tool_call|>", "<|tool_call>call:add",
              "<|tool_call>call:add{a:1,b}<tool_call|>",
              "<|tool_call>call:add{b:[}<tool_call|>", "<|tool_call>call:add{b:[1,:", "<|tool_call>call:add{b:{c:[<tool_call|>"],
    "functiongemma": ["<start_function_call>add"],
    "qwen3_coder": ["<tool_call>add", "<function=unknown>", "<tool_call>\n<function=add",
                    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\nso\n</function>\n</tool_call>"],
    "granite": ["<|tool_call|>no", "<|tool_call|>[{]", "<tool_call> 1"],
    "phi4_mini_json": ["functools[0](f)", "<|tool_call|>no", 'functools[{"name": "unknown", "arguments": {}}]'],
}  # fmt: skip
