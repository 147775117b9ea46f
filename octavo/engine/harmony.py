"""Prompts in Harmony, the format of gpt-oss: https://github.com/openai/harmony, docs/format.md.

``HARMONY_TEMPLATE`` replaces the chat template of a gpt-oss checkpoint, which drops all calls of a message but the
first, refuses reasoning beside a text, writes results as JSON strings, and leaves out later instructions. It is a
template as any other, so that everything that reads templates knows it. The checkpoint's own can be named as a file.

OpenAI's package ``openai-harmony`` is not used: it loads a vocabulary of its own, by default from the network, and
works with no other; its parser raises an error where a model leaves the format. Tests compare with what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from octavo.core.errors import InvalidRequestError

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
#: How a message of the assistant begins; the prompt ends with it.
TURN = f"{START}assistant"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"

HARMONY_TEMPLATE = """\
{#- Harmony: <|start|>, <|channel|>analysis<|message|>, <|end|>, <|call|>. Reads content, reasoning_content and
tool_calls of messages of the roles 'system', 'developer', 'user', 'assistant' and 'tool'. -#}
{{- render_harmony(messages, tools | default(none), add_generation_prompt | default(false),
  reasoning_effort=reasoning_effort | default(none), enable_thinking=enable_thinking | default(none),
  model_identity=model_identity | default(none), builtin_tools=builtin_tools | default(none)) -}}
"""
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_CALLS_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."
#: Values of ``reasoning_effort`` -> the model's levels.
_EFFORTS = {
    "none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
_MAX_DEPTH = 16

Message = Mapping[str, Any]


def is_harmony(template: str) -> bool:
    """Whether a chat template is OpenAI's for gpt-oss, or made of it."""
    return ANALYSIS in template and "render_typescript_type" in template


def call_header(name: str) -> str:
    """The header of a call, as the model writes it."""
    return f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"


def render_harmony(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    *,
    reasoning_effort: str | None = None,
    enable_thinking: bool | None = None,
    model_identity: str | None = None,
    builtin_tools: Sequence[str] | None = None,
) -> str:
    """Writes a conversation.

    Reasoning of earlier turns is left out; that of a turn in which tools are called is kept, as the model was trained.
    A text beside calls is a preamble (channel commentary). With several calls in a message, each is followed by its
    result. With ``enable_thinking`` False, or the effort ``none``, the answer begins after an empty reasoning.

    Raises:
        InvalidRequestError: an unknown effort or role, a result without a call, or a tool that only OpenAI runs.
    """
    if builtin_tools:
        problem = f"{', '.join(map(str, builtin_tools))}: the model's built-in tools are not run here"
        raise InvalidRequestError(problem, path="chat_template_kwargs.builtin_tools")
    effort = _EFFORTS.get(reasoning_effort or "medium")
    if effort is None:
        known = ", ".join(_EFFORTS)
        raise InvalidRequestError(f"must be one of {known}", path="reasoning_effort", got=reasoning_effort)
    pieces = [_system_message(model_identity or _IDENTITY, effort, has_tools=bool(tools))]
    num_instructions = next((i for i, m in enumerate(messages) if not _is_instruction(m)), len(messages))
    instructions = "\n\n".join(filter(None, (_text(m.get("content")) for m in messages[:num_instructions])))
    if instructions or tools:
        pieces.append(_developer_message(instructions, tools or ()))
    pieces += _turns(messages[num_instructions:])
    if add_generation_prompt:
        thinks = enable_thinking is not False and reasoning_effort != "none"
        pieces.append(TURN if thinks else f"{TURN}{ANALYSIS}{END}")
    return "".join(pieces)


def _is_instruction(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _system_message(identity: str, effort: str, *, has_tools: bool) -> str:
    text = "\n".join([
        identity,
        "Knowledge cutoff: 2024-06",
        f"Current date: {datetime.now():%Y-%m-%d}",
        "",
        f"Reasoning: {effort}",
        "",
        _CHANNELS,
        *([_CALLS_CHANNEL] if has_tools else []),
    ])  # fmt: skip
    return f"{START}system{MESSAGE}{text}{END}"


def _developer_message(instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        functions = "\n\n".join(_function_type(tool.get("function", tool)) for tool in tools)
        sections.append(
            f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{functions}\n\n}} // namespace functions"
        )
    return START + "developer" + MESSAGE + "\n\n".join(sections) + END


def _turns(messages: Sequence[Message]) -> Iterator[str]:
    """The messages after the first instructions."""
    finals = [i for i, m in enumerate(messages) if m["role"] == "assistant" and _is_final(m)]
    last_final = finals[-1] if finals else -1
    names: dict[str, str] = {}
    results: list[Message] = []
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            if message not in results:
                yield _result(message, names)
        elif role == "user":
            yield f"{START}user{MESSAGE}{_text(message.get('content'))}{END}"
        elif role == "assistant":
            results = [m for m in _following_results(messages, i) if m.get("tool_call_id")]
            yield from _assistant_turn(message, results, names, thinks=i > last_final)
        elif _is_instruction(message):
            yield _developer_message(_text(message.get("content")), ())
        else:
            raise InvalidRequestError("must be system, developer, user, assistant or tool", path="messages", got=role)


def _is_final(message: Message) -> bool:
    return not message.get("tool_calls") and bool(_text(message.get("content")))


def _following_results(messages: Sequence[Message], index: int) -> Iterator[Message]:
    for message in messages[index + 1 :]:
        if message["role"] != "tool":
            return
        yield message


def _assistant_turn(message: Message, results: list[Message], names: dict[str, str], *, thinks: bool) -> Iterator[str]:
    """A message, with the results of its calls among ``results``, whose others are taken out of the list.

    ``names`` of calls by id gets those of the message.
    """
    reasoning = next(filter(None, (message.get(key) for key in ("reasoning_content", "thinking", "reasoning"))), None)
    if reasoning and thinks:
        yield f"{TURN}{ANALYSIS}{reasoning}{END}"
    calls = message.get("tool_calls") or ()
    if content := _text(message.get("content")):
        yield f"{TURN}{CHANNEL}commentary{MESSAGE}{content}{END}" if calls else f"{TURN}{FINAL}{content}{END}"
    written = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
        names[""] = name  # of the last call
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        yield f"{TURN}{call_header(name)}{text or '{}'}{CALL}"
        if call_id := call.get("id"):
            names[call_id] = name
            for result in results:
                if result["tool_call_id"] == call_id and result not in written:
                    written.append(result)
                    yield _result(result, names)
    results[:] = written


def _result(message: Message, names: Mapping[str, str]) -> str:
    name = names.get(message.get("tool_call_id") or "") or message.get("name") or names.get("")
    if name is None:
        raise InvalidRequestError("answers no call of an assistant's message", path="messages.tool_call_id")
    return f"{START}functions.{name} to=assistant{CHANNEL}commentary{MESSAGE}{_text(message.get('content'))}{END}"


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


# Types of functions, in TypeScript's notation as the models were trained on it.


def _function_type(function: Mapping[str, Any]) -> str:
    lines = _comment(function.get("description") or "", "")
    parameters = function.get("parameters")
    if not parameters:
        return "\n".join([*lines, f"type {function['name']} = () => any;"])
    lines.append(f"type {function['name']} = (_: {{")
    lines += _fields(parameters, parameters, "", 0)
    return "\n".join([*lines, "}) => any;"])


def _fields(schema: Mapping[str, Any], root: Mapping[str, Any], indent: str, depth: int) -> list[str]:
    lines = []
    required = schema.get("required") or ()
    for name, field in (schema.get("properties") or {}).items():
        field = field if isinstance(field, Mapping) else {}
        if title := field.get("title"):
            lines += [f"{indent}// {title}", f"{indent}//"]
        lines += _comment(field.get("description") or "", indent)
        if examples := field.get("examples"):
            lines.append(f"{indent}// Examples:")
            lines += [f"{indent}// - {json.dumps(example, ensure_ascii=False)}" for example in examples]
        kind = _type(field, root, indent, depth)
        default = ""
        if "default" in field:
            value = field["default"]
            is_name = isinstance(value, str) and "enum" in field
            shown = value if is_name else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            default = f" // default: {shown}"
        lines.append(f"{indent}{name}{'' if name in required else '?'}: {kind},{default}")
    return lines


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}// {line}" for line in text.splitlines()]


def _type(schema: Any, root: Mapping[str, Any], indent: str, depth: int) -> str:
    """The type of a schema's values; nested fields stand on lines of their own."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    text = _union(_alternatives(schema, root, indent, depth))
    return f"{text} | null" if schema.get("nullable") is True and "null" not in text else text


def _union(types: Sequence[str]) -> str:
    return " | ".join(dict.fromkeys(types)) or "any"


def _alternatives(schema: Mapping[str, Any], root: Mapping[str, Any], indent: str, depth: int) -> list[str]:
    if "$ref" in schema:
        return [_type(_definition(schema["$ref"], root), root, indent, depth + 1)]
    for keyword in ("anyOf", "oneOf", "allOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options and (keyword != "allOf" or len(options) == 1):
            return [_type(option, root, indent, depth + 1) for option in options]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        return [json.dumps(value, ensure_ascii=False) for value in values]
    kinds = schema.get("type")
    return [_plain_type(kind, schema, root, indent, depth) for kind in (kinds if isinstance(kinds, list) else [kinds])]


def _plain_type(kind: object, schema: Mapping[str, Any], root: Mapping[str, Any], indent: str, depth: int) -> str:
    if kind == "array":
        if "items" not in schema:
            return "Array<any>"
        item = _type(schema["items"], root, indent, depth + 1)
        return f"({item})[]" if " | " in item and not item.endswith("}") else f"{item}[]"
    if kind == "object":
        deeper = indent + "    "
        return "\n".join(["{", *_fields(schema, root, deeper, depth + 1), f"{deeper}}}"])
    names = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
    return names.get(str(kind), "any")


def _definition(reference: object, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in str(reference).removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
