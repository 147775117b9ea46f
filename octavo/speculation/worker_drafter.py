"""Drafts that the workers propose, with a network of their own beside the model's."""

from __future__ import annotations

from octavo.speculation.drafter import BY_WORKER, DraftedSequence, Drafter


class DraftsOnWorkers(Drafter):
    """Asks the workers for drafts, and estimates which tokens of a sequence their drafter has computed."""

    def __init__(self) -> None:
        #: Tokens of each sequence when it last asked, with those that it asked for.
        self._known: dict[int, int] = {}

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        self._known[sequence.seq_id] = len(sequence.token_ids) + num_tokens
        return [BY_WORKER] * num_tokens

    def backlog(self, sequence: DraftedSequence) -> int:
        """See ``Drafter``: an estimate. What is in the prefix cache was most likely drafted for, too."""
        known = self._known.get(sequence.seq_id)
        return max(0, len(sequence.token_ids) - (sequence.num_cached_tokens if known is None else known))

    def on_end(self, sequence: DraftedSequence) -> None:
        """See ``Drafter``."""
        self._known.pop(sequence.seq_id, None)


class HeadDrafter(Drafter):
    """Asks the workers for drafts of a head, which computes every token beside the model: it is never behind."""

    def propose(self, sequence: DraftedSequence, num_tokens: int) -> list[int]:
        """See ``Drafter``."""
        return [BY_WORKER] * num_tokens
