"""Tools, calls and their results in conversations, fitted to what a chat template reads."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from octavo.engine.message_forms import arguments_text, flat_text

Messages = list[dict[str, Any]]

_DESCRIPTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return the function name and a json object with its arguments, in this form:
{example}"""
#: Templates that know messages of tools.
_READS_RESULTS = re.compile(r"['\"]tool['\"]")
#: Templates that read the tools from the system message: of Phi-4-mini.
_READS_TOOLS_OF_MESSAGES = re.compile(r"message\[['\"]tools['\"]\]|message\.tools\b")
_NO_SYSTEM = re.compile(r"[Ss]ystem role (is )?not supported")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: ``begin``, calls with ``separator`` between them, ``end``."""

    #: One call, in which ``{name}`` and ``{arguments}`` stand for its own.
    call: str
    #: None: there is only one call.
    separator: str | None = None
    begin: str = ""
    end: str = ""
    #: Beginning of ``begin`` and ``call`` that tells calls from content; None: they are told by where they stand.
    trigger: str | None = None

    def pieces(self, name: str) -> tuple[str, str]:
        """The text of a call before and after its arguments."""
        before, _, after = self.call.partition("{arguments}")
        return before.replace("{name}", name), after

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, given as names and the JSON text of the arguments."""
        texts = [arguments.join(self.pieces(name)) for name, arguments in calls]
        return self.begin + (self.separator or "").join(texts) + self.end


#: The most usual one: of Hermes, Qwen and many more.
HERMES = CallFormat(
    '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', separator="\n", trigger="<tool_call>"
)


def fit_tools(
    messages: Messages,
    tools: list[Any] | None,
    calls: CallFormat,
    template: str,
    variables: Set[str],
) -> list[Any] | None:
    """Fits messages to a template, in place: what it has no place for becomes text. The tools that remain for it.

    Args:
        messages: those of the conversation, each with plain data.
        tools: the tools that are offered.
        calls: how calls are written in text.
        template: the template's text.
        variables: names that it reads.
    """
    reads_tools = bool({"tools", "custom_tools"} & variables)
    if tools and _READS_TOOLS_OF_MESSAGES.search(template):
        _attach(messages, tools)
    elif tools and not reads_tools:
        _describe(messages, tools, calls, template)
    if not reads_tools and not _READS_RESULTS.search(template):
        _write_results(messages)
    if "tool_calls" not in template:
        _write_calls(messages, calls)
    if "length != 9" in template:
        _shorten_ids(messages)
    return tools if reads_tools else None


def _attach(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> None:
    """Gives the system message the functions, as JSON text, in a field of its own."""
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    functions = [tool.get("function", tool) for tool in tools]
    messages[0]["tools"] = json.dumps(functions, ensure_ascii=False)


def _describe(messages: Messages, tools: Sequence[Mapping[str, Any]], calls: CallFormat, template: str) -> None:
    """Says in the system message which tools there are."""
    example = calls.written([("<function-name>", "<args-json-object>")])
    text = _DESCRIPTION.replace("{example}", example)
    text = text.replace("{tools}", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    role = "user" if _NO_SYSTEM.search(template) else "system"
    if messages[0]["role"] == role:
        content = flat_text(messages[0].get("content"))
        parts = [content, text] if role == "system" else [text, content]
        messages[0]["content"] = "\n\n".join(filter(None, parts))
    else:
        messages.insert(0, {"role": role, "content": text})


def _write_calls(messages: Messages, calls: CallFormat) -> None:
    """Puts calls into the content of their messages."""
    for message in messages:
        if entries := message.pop("tool_calls", None):
            pairs = [(call["function"]["name"], arguments_text(call["function"].get("arguments"))) for call in entries]
            message["content"] = "\n".join(filter(None, [flat_text(message.get("content")), calls.written(pairs)]))


def _write_results(messages: Messages) -> None:
    """Makes results a user's messages; consecutive ones are one message."""
    joined: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = flat_text(message.get("content"))
            message = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        if is_result and after_result:
            joined[-1]["content"] += f"\n{message['content']}"
        else:
            joined.append(message)
        after_result = is_result
    messages[:] = joined


def _shorten_ids(messages: Messages) -> None:
    for message in messages:
        for holder, key in [(message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls") or ())]:
            if isinstance(holder.get(key), str) and not _SHORT_ID.fullmatch(holder[key]):
                holder[key] = _short_id(holder[key])


def _short_id(text: str) -> str:
    """Nine letters and digits, the same for the same id."""
    number = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    characters = ""
    for _ in range(9):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        characters += _ID_CHARACTERS[digit]
    return characters
