"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

#: In place of a draft token: the workers propose one.
BY_WORKER = -1


class DraftedSequence(Protocol):
    """What a drafter sees of a sequence; it changes nothing of it."""

    @property
    def seq_id(self) -> int:
        """Never used again for another sequence."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt and what was generated: always longer than at the last call, and the same up to there."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""

    @property
    def prediction(self) -> list[int]:
        """What its output is likely to be, as the request says; empty if it says nothing."""

    @property
    def context(self) -> str:
        """What the tokens depend on besides those before them: the adapter, and a salt that keeps users apart."""


class Drafter(ABC):
    """Proposes tokens of running sequences. What it proposes changes the number of steps, never an answer."""

    @abstractmethod
    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """At most ``num_tokens`` (1 or more) ids of the vocabulary that may follow ``sequence.token_ids``.

        Or ``BY_WORKER`` as often as the workers are to propose a token. Which ones of the last call were accepted,
        ``token_ids`` shows. Preemption changes nothing for a drafter.
        """

    def backlog(self, sequence: DraftedSequence) -> int:
        """Tokens that would have to be computed before it can propose any, besides those of the last steps."""
        return 0

    def on_end(self, sequence: DraftedSequence) -> None:  # noqa: B027  not every drafter keeps something
        """The sequence has ended, in whatever way; it may never have been proposed for."""
