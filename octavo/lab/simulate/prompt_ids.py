"""Token ids of simulated requests: as many and as shared as the real ones, and cheaper to make where nothing is."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem

#: Token id of sampled tokens, and of most tokens of a prompt that shares nothing.
TOKEN = 7


def prompt_of(number: int, item: WorkItem) -> list[int]:
    """The prompt of the item with this number; one that can share blocks with others has its real token ids.

    Raises:
        ConfigError: it is a text, or empty.
    """
    if item.prefix or item.session is not None or item.prompt is not None:
        ids = token_ids(item)
        if ids:
            return ids
    elif item.input_len:
        return [number + TOKEN + 1] + [TOKEN] * (item.input_len - 1)
    raise ConfigError(f"request {number} has an empty prompt")
