"""What a workload gives to a simulation: items in the order of their arrival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

#: Token id of sampled tokens, and of a prompt's tokens but the first.
TOKEN = 7


class WorkItem(Protocol):
    """One request of a workload."""

    @property
    def at(self) -> float:
        """Seconds from the start of the run to its arrival."""

    @property
    def input_len(self) -> int:
        """Tokens of the prompt."""

    @property
    def output_len(self) -> int:
        """Tokens after which it ends."""

    @property
    def priority(self) -> float:
        """Lower goes first, under the policies that look at it."""


#: The prompt of the item with this number in the workload. Equal beginnings share blocks of the prefix cache.
Prompts = Callable[[int, WorkItem], list[int]]


def unshared_prompt(number: int, item: WorkItem) -> list[int]:
    """A prompt that shares no block with any other."""
    return [number + TOKEN + 1] + [TOKEN] * (item.input_len - 1)
