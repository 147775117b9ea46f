"""Items of the Responses API to messages of a chat."""

from __future__ import annotations

from typing import Any

from octavo.server.body_parts import BodyPart, entries, not_supported, wrong

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
#: Labels of items that the API sends and gets back.
_LABELS = ("id", "status", "phase")
_BUILT_IN = "only messages, function calls with their outputs, and reasoning are; no tools are built in here"


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The field ``input`` as a list of items."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def messages_of(items: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[Message]:
    """The messages of a chat that say what the items say.

    Reasoning, a text and calls of functions that follow each other are one message of the assistant.

    Args:
        items: of the field ``input``.
        earlier: those of the responses that these continue.

    Raises:
        ApiError: 400, an item is malformed or not supported; with its place.
    """
    reader = _Reader()
    for item in [*entries("previous_response_id", earlier), *entries("input", items)]:
        reader.read(item)
    return reader.messages


class _Reader:
    """Reads items one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        #: The assistant's message that further items may join.
        self._open: Message | None = None
        self._calls: set[str] = set()

    def read(self, item: BodyPart) -> None:
        kind = item.take("type", str, "message")
        if kind == "message":
            self._message(item)
        elif kind == "function_call":
            self._call(item)
        elif kind == "function_call_output":
            self._output(item)
        elif kind == "reasoning":
            self._reasoning(item)
        elif kind == "item_reference":
            raise not_supported(item.where, "previous_response_id continues a response that is kept")
        else:
            raise not_supported(item.where, f"its type is {kind[:100]!r}; {_BUILT_IN}")

    def _message(self, item: BodyPart) -> None:
        role = item.choice("role", _ROLES)
        content = _content(item)
        item.refuse_rest(*_LABELS)
        if role != "assistant":
            self._open = None
            self.messages.append({"role": role, "content": content})
            return
        message = self._open
        if message is None or message["content"] is not None or "tool_calls" in message:
            message = self._new_open()
        message["content"] = content

    def _call(self, item: BodyPart) -> None:
        call_id, name, arguments = (item.take(field, str) for field in ("call_id", "name", "arguments"))
        item.refuse_rest(*_LABELS)
        message = self._open or self._new_open()
        function = {"name": name, "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._calls.add(call_id)

    def _output(self, item: BodyPart) -> None:
        call_id = item.take("call_id", str)
        if call_id not in self._calls:
            raise wrong(item.at("call_id"), f"there is no function call {call_id[:100]!r} before it")
        content = _content(item, "output")
        item.refuse_rest(*_LABELS, "name")
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _reasoning(self, item: BodyPart) -> None:
        content, summary = (item.take(name, list, []) for name in ("content", "summary"))
        name = "content" if content else "summary"
        texts = [part.take("text", str) for part in entries(item.at(name), content or summary)]
        if not texts and item.take_any("encrypted_content") is not None:
            raise not_supported(item.at("encrypted_content"), "reasoning is read in plain text")
        item.refuse_rest(*_LABELS, "encrypted_content")
        self._new_open()["reasoning_content"] = "\n".join(texts)

    def _new_open(self) -> Message:
        self._open = {"role": "assistant", "content": None}
        self.messages.append(self._open)
        return self._open


def _content(item: BodyPart, name: str = "content") -> str | list[Message]:
    """A text, or parts of text as a chat has them."""
    value = item.take_any(name)
    if isinstance(value, str):
        return value
    texts = []
    for part in entries(item.at(name), value):
        kind = part.take("type", str)
        if kind not in ("input_text", "output_text", "text"):
            raise not_supported(part.where, f"its type is {kind[:100]!r}; the model reads text only")
        texts.append(part.take("text", str))
        part.refuse_rest("annotations", "logprobs", "prompt_cache_breakpoint")
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
