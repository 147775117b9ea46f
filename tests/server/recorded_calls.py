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
    "olmo3": [
        ("Let me see.\n<function_calls>\nget_weather(city='Ro\"me {x}', days=2)\nadd(a=1.5, b=[\"x\", {\"c\": null}])\n"
         "</function_calls>", "Let me see.", [("get_weather", ROME), ("add", SUM)]),
        ("<function_calls>add(a=1e3, b=true)</function_calls> Done.", "Done.", [("add", {"a": 1000.0, "b": True})]),
        ("<function_calls>\n[add(a=1), add()]\n</function_calls>", None, [("add", {"a": 1}), ("add", {})]),
    ],
    "lfm2": [
        ("<|tool_call_start|>[get_weather(city='Ro\"me {x}', days=2), add(a=1.5, b=['x', {'c': None}])]<|tool_call_end|>"
         "Checking.", "Checking.", [("get_weather", ROME), ("add", SUM)]),
    ],
    "deepseek_v32": [
        ('I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
         'Ro"me {x}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1.5</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="b" string="false">["x", {"c": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         '</｜DSML｜function_calls>', "I look.", [("get_weather", ROME), ("add", SUM)]),
        ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">\n5\n'
         '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', None, [("get_weather", {"city": "\n5\n"})]),
    ],
    "seed_oss": [
        ('So.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Ro"me {x}</parameter>\n<parameter=days>2</parameter>\n'
         "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n<parameter=a>1.5</parameter>\n"
         "<parameter=b>['x', {'c': None}]</parameter>\n</function>\n</seed:tool_call>", "So.",
         [("get_weather", ROME), ("add", SUM)]),
    ],
    "glm45": [
        ('\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ro"me {x}</arg_value>\n<arg_key>days</arg_key>\n'
         '<arg_value>2</arg_value>\n</tool_call>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1.5</arg_value>\n'
         '<arg_key>b</arg_key>\n<arg_value>["x", {"c": null}]</arg_value>\n</tool_call>', "\nI look.",
         [("get_weather", ROME), ("add", SUM)]),
        ('<tool_call>get_weather<arg_key>zip</arg_key><arg_value>007</arg_value></tool_call><tool_call>add</tool_call>', None,
         [("get_weather", {"zip": "007"}), ("add", {})]),
    ],
    "minimax_m2": [
        ('Well.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Ro"me {x}</parameter>\n'
         '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="add">\n<parameter name="a">1.5</parameter>\n'
         '<parameter name="b">["x", {"c": null}]</parameter>\n</invoke>\n</minimax:tool_call>', "Well.",
         [("get_weather", ROME), ("add", SUM)]),
        ("<minimax:tool_call><invoke name=add></invoke></minimax:tool_call> ok", "ok", [("add", {})]),
    ],
    "step3": [
        ('Now.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
         '<steptml:parameter name="city">Ro"me {x}</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
         '</steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">'
         '<steptml:parameter name="a">1.5</steptml:parameter><steptml:parameter name="b">["x", {"c": null}]'
         '</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', "Now.",
         [("get_weather", ROME), ("add", SUM)]),
    ],
    "kimi_k2": [
        ('Yes.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>'
         '{"city": "Ro\\"me {x}", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>'
         '{"a": 1.5, "b": ["x", {"c": null}]}<|tool_call_end|><|tool_calls_section_end|>', "Yes.",
         [("get_weather", ROME), ("add", SUM)]),
        ('<|tool_call_begin|>add<|tool_call_argument_begin|> {"a": 1}<|tool_call_end|>', None, [("add", {"a": 1})]),
    ],
    "hunyuan_a13b": [
        ('<tool_calls>[{"name": "get_weather", "arguments": {"city": "Ro\\"me {x}", "days": 2}}, '
         '{"name": "add", "arguments": {"a": 1.5, "b": ["x", {"c": null}]}}]</tool_calls>', None,
         [("get_weather", ROME), ("add", SUM)]),
        ('Yes. <tool_calls>\n[\n    {"name": "add", "arguments": {"a": 1}}\n]\n</tool_calls>', "Yes.", [("add", {"a": 1})]),
    ],
    "nemotron_nano_v2": [
        ('<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]</TOOLCALL>', None,
         [("add", {"a": 1}), ("add", {"a": 2})]),
    ],
    "harmony": [
        ('<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>'
         '{"city": "Ro\\"me {x}", "days": 2}<|call|>', None, [("get_weather", ROME)]),
        ('Well.<|start|>assistant to=functions.add<|channel|>commentary json<|message|>'
         '{"a": 1.5, "b": ["x", {"c": null}]}<|call|>', "Well.", [("add", SUM)]),
        ('<|channel|>commentary to=add<|constrain|>json<|message|> {"a": 1}', None, [("add", {"a": 1})]),
        (' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', None, [("add", {"a": 1})]),
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
    "olmo3": ["<function_calls>\nunknown(a=1)\n</function_calls>", "<function_calls> none", "<function_calls>\nadd(a=x)"],
    "lfm2": ["<|tool_call_start|>add()<|tool_call_end|>", "[add(a=1)]"],
    "deepseek_v32": ["<｜DSML｜function_calls>\nno", '<｜DSML｜invoke name="unknown">\n</｜DSML｜invoke>'],
    "seed_oss": ["<seed:tool_call>add", "<function=unknown>"],
    "glm45": ["<tool_call>unknown\n</tool_call>", '<tool_call>{"name": "add"}\n</tool_call>',
              "<tool_call>add\n<arg_key>a</arg_key>\n1</tool_call>"],
    "minimax_m2": ["<minimax:tool_call>\nno", '<invoke name="unknown"></invoke>'],
    "step3": ["<｜tool_calls_begin｜>no", "<｜tool_call_begin｜>other<｜tool_sep｜>"],
    "kimi_k2": ["<|tool_calls_section_begin|>no", "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}",
                "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>1"],
    "hunyuan_a13b": ["<tool_calls>no</tool_calls>", '<tool_calls>[{"name": "unknown", "arguments": {}}]</tool_calls>'],
    "nemotron_nano_v2": ["<TOOLCALL>no"],
    "harmony": ["<|channel|>final<|message|>Hi", "<|channel|>commentary to=functions.unknown<|message|>{}",
                "<|channel|>analysis to=python code<|message|>1", "<|channel|>commentary to=functions.add<|message|>none", " to=",
                " to do"],
}  # fmt: skip
