"""The input of a response: its items with their ids, what it continues, and the messages that they say."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import Request

from octavo.server.api_errors import wrong
from octavo.server.large_bodies import beside_loop
from octavo.server.middleware import owner_of
from octavo.server.responses.items import ITEMS, Message, input_items
from octavo.server.responses.response_parts import InputItem, Item
from octavo.server.responses.response_protocol import InputTokensRequest
from octavo.server.responses.response_request import conversation
from octavo.server.responses.response_tools import ResponseTools, read_response_tools
from octavo.server.responses.store import StoredResponse
from octavo.server.service import Service

#: Type of an item -> what its id begins with.
_PREFIXES = {
    "function_call": "fc", "custom_tool_call": "ctc", "function_call_output": "fco", "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """What a response answers."""

    #: The response that it continues.
    earlier: StoredResponse | None
    #: Of the field ``input``, each with an id.
    items: list[InputItem]
    #: Bytes of the items, as JSON.
    items_size: int
    #: Of the whole conversation, the instructions included.
    messages: list[Message]
    tools: ResponseTools

    def all_items(self, output: Iterable[InputItem] = ()) -> list[InputItem]:
        """The items of the whole conversation, with those of an output."""
        return [*(self.earlier.items if self.earlier else ()), *self.items, *output]

    @property
    def size(self) -> int:
        """Bytes of all items, without an output."""
        return self.items_size + (self.earlier.items_size if self.earlier else 0)


async def read_input(service: Service, request: Request, body: InputTokensRequest) -> ResponseInput:
    """What a request gives the model to read.

    Raises:
        ApiError: 400, naming what is malformed or not supported; 404, it continues a response that is not known.
    """
    earlier = None
    if body.previous_response_id is not None:
        earlier = service.responses.get(body.previous_response_id, owner_of(request))
        if earlier.run is not None and not earlier.run.has_ended:
            raise wrong("previous_response_id", "this response is still being made")
    before = [] if earlier is None else earlier.items
    items = [] if body.input is None else input_items(body.input)
    messages = await beside_loop(request, conversation, body, items, before)
    size = await beside_loop(request, _named, items, before)
    tools = read_response_tools(service, body.tools or [], body.tool_choice)
    return ResponseInput(earlier, items, size, messages, tools)


def size_of(items: list[InputItem]) -> int:
    """Bytes of items as JSON."""
    return len(ITEMS.dump_json(items, exclude_unset=True))


def _named(items: list[InputItem], before: list[InputItem]) -> int:
    """Gives the items ids where the client gave none, or one that another item has; their size."""
    taken = {item.id for item in before if isinstance(item, Item)}
    base = uuid.uuid4().hex
    for i, item in enumerate(items):
        assert isinstance(item, Item)  # others are refused
        if not isinstance(item.id, str) or not item.id or item.id in taken:
            item.id = f"{_PREFIXES.get(getattr(item, 'type', None) or '', 'msg')}_{base}{i:05x}"
        taken.add(item.id)
    return size_of(items)
