"""How models mark what they think before they answer."""

from __future__ import annotations

import msgspec


class ReasoningMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The texts between which an output has its reasoning."""

    start: str
    end: str
    #: Whether the model begins with reasoning although neither it nor its template writes the start.
    begins_inside: bool = False
    #: Whether the output begins within reasoning; None: as the end of the prompt says.
    inside: bool | None = None
    #: Texts that end reasoning which was not closed before them, and are the beginning of what follows it.
    interrupts: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins within reasoning."""
        if self.inside is not None:
            return self.inside
        prompt = prompt.rstrip()
        return prompt.endswith(self.start) or (self.begins_inside and not prompt.endswith(self.end))


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """``SamplingParams.thinking_token_budget`` in tokens of one model."""

    #: Most tokens of reasoning.
    most: int
    #: The tokens that begin it, and the one that ends it.
    start: list[int]
    end: int
    #: Whether the output begins within it.
    inside: bool
    #: Tokens that end it too, though they do not belong to it.
    interrupts: list[int] = []
