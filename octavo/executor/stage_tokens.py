"""Tokens that the last pipeline stage has sampled, for the stages that do not sample."""

from __future__ import annotations

from octavo.core.plan import StepResult


class StageTokens:
    """Collects the tokens of results until the next plan is sent, with which they go to the other stages."""

    def __init__(self, stages: int) -> None:
        """Nothing is collected for one stage."""
        self._collects = stages > 1
        self._tokens: dict[int, list[int]] = {}

    def add(self, result: StepResult) -> None:
        """Takes the tokens of a result."""
        if not self._collects:
            return
        counts = result.num_tokens or [1] * len(result.seq_ids)
        start = 0
        for seq_id, count in zip(result.seq_ids, counts, strict=True):
            self._tokens.setdefault(seq_id, []).extend(result.token_ids[start : start + count])
            start += count

    def take(self) -> dict[int, list[int]]:
        """What was collected since the last call, by sequence id."""
        tokens, self._tokens = self._tokens, {}
        return tokens
