"""Items of the Responses API to messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from octavo.server.api_errors import unsupported, wrong
from octavo.server.responses.response_parts import (
    CallOutputParam,
    Content,
    CustomCallParam,
    FunctionCallParam,
    ImageInputPart,
    InputItem,
    InputPart,
    MessageItem,
    ReasoningParam,
)
from octavo.server.responses.response_tools import chat_name

Message = dict[str, Any]

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def input_items(value: str | list[InputItem]) -> list[InputItem]:
    """The field ``input`` as a list of items."""
    return [MessageItem(role="user", content=value)] if isinstance(value, str) else value


def messages_of(items: Sequence[InputItem], earlier: Sequence[InputItem]) -> list[Message]:
    """The messages of a chat that say what the items say.

    Reasoning, a text and calls of tools that follow each other are one message of the assistant.

    Args:
        items: of the field ``input``.
        earlier: those of the responses that these continue.

    Raises:
        ApiError: 400, an item is not supported or answers no call; with its place.
    """
    reader = _Reader()
    for place, part in (("previous_response_id", earlier), ("input", items)):
        for i, item in enumerate(part):
            reader.read(item, f"{place}[{i}]")
    return reader.messages


class _Reader:
    """Reads items one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        #: The assistant's message that further items may join.
        self._open: Message | None = None
        self._calls: set[str] = set()

    def read(self, item: InputItem, where: str) -> None:
        if isinstance(item, MessageItem):
            self._message(item, where)
        elif isinstance(item, FunctionCallParam):
            self._call(item, item.arguments)
        elif isinstance(item, CustomCallParam):
            self._call(item, json.dumps({"input": item.input}, ensure_ascii=False))
        elif isinstance(item, CallOutputParam):
            self._output(item, where)
        elif isinstance(item, ReasoningParam):
            self._reasoning(item)
        else:
            raise unsupported("input", f"{where} is not supported: {_reason(item.type)}")

    def _message(self, item: MessageItem, where: str) -> None:
        content = _content(item.content, f"{where}.content")
        if item.role != "assistant":
            self._open = None
            self.messages.append({"role": item.role, "content": content})
            return
        message = self._open
        if message is None or message["content"] is not None or "tool_calls" in message:
            message = self._new_open()
        message["content"] = content

    def _call(self, item: FunctionCallParam | CustomCallParam, arguments: str) -> None:
        message = self._open or self._new_open()
        function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        self._calls.add(item.call_id)

    def _output(self, item: CallOutputParam, where: str) -> None:
        if item.call_id not in self._calls:
            raise wrong(f"{where}.call_id", f"there is no function call {item.call_id[:100]!r} before it")
        self._open = None
        self.messages.append(
            {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output, f"{where}.output")}
        )

    def _reasoning(self, item: ReasoningParam) -> None:
        texts = [part.text for part in item.content or item.summary or []]
        if texts:  # without a text it was thought elsewhere, and is encrypted
            self._new_open()["reasoning_content"] = "\n".join(texts)

    def _new_open(self) -> Message:
        self._open = {"role": "assistant", "content": None}
        self.messages.append(self._open)
        return self._open


def _content(value: Content, where: str) -> str | list[Message]:
    """A text, or parts as a chat has them where there are images: templates write nothing between parts."""
    if isinstance(value, str):
        return value
    texts = [part.text for part in value if isinstance(part, InputPart)]
    if len(texts) == len(value):
        return "\n".join(texts)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(value)]


def _part(part: InputPart | ImageInputPart, where: str) -> Message:
    if isinstance(part, InputPart):
        return {"type": "text", "text": part.text}
    if part.image_url is None:
        raise wrong(f"{where}.image_url", "it is missing")
    return {"type": "image_url", "image_url": {"url": part.image_url}}


def _reason(kind: str) -> str:
    if kind == "item_reference":
        return "previous_response_id continues a response that is kept"
    return (
        f"its type is {kind[:100]!r}; only messages, calls of the client's tools with their outputs, and reasoning "
        "are; no tools are built in here"
    )
