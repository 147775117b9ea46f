"""Beam search: which continuations live on, which hypotheses are complete, and when the search is over.

The choices and scores are those of ``transformers``' ``generate(num_beams=W, do_sample=False)``:

- Every step ranks all continuations of the running beams by their summed logprob. One that ends, by a stop token or at
  the length limit, becomes a hypothesis if it is among the best W of them, and is dropped if not. The best W of
  those that do not end are the next running beams.
- A hypothesis scores its summed logprob divided by its length ** ``length_penalty``, the length counting its generated
  tokens with the stop token. The best W are kept.
- The search is over at the length limit, or when W hypotheses are complete and ``early_stopping`` is content with them.

Equal sums are ranked by beam, then by token id, the lower first; of equal scores, the hypothesis completed first, then
the one of the greater sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.progress import BeamProgress, Hypothesis


class Candidates(NamedTuple):
    """The most likely next tokens of one running beam, best first, and their logprobs (natural logarithm)."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class BeamStep(NamedTuple):
    """What a step of the search decided."""

    #: The next running beams, best first: (index of the beam that it continues, its new token). Empty if ``done``.
    survivors: list[tuple[int, int]]
    done: bool
    #: Of the next running beams: their summed logprobs.
    cumulative_logprobs: list[float]
    #: Whether the complete sequences are others than before.
    completed: bool


class _Continuation(NamedTuple):
    """A running beam with one more token; sorts as it ranks."""

    negated_logprob: float
    beam: int
    token_id: int


class BeamSearch:
    """One search. Owns the running beams' summed logprobs and the best hypotheses so far, at most ``beam_width`` each.

    The caller owns the running beams' tokens: it starts with one beam that has generated nothing, and after each step
    replaces its beams by the survivors, in their order.
    """

    def __init__(
        self, params: BeamSearchParams, stop_token_ids: Collection[int], max_new_tokens: int, num_forced: int = 0
    ) -> None:
        """``num_forced``: tokens before the generated ones that count where lengths do."""
        self._width = params.beam_width
        self._length_penalty = float(params.length_penalty)
        # One beam is greedy search to transformers: it ends with the first hypothesis.
        self._early_stopping = params.early_stopping if self._width > 1 else True
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_new_tokens = max_new_tokens
        self._num_generated, self._num_forced = 0, num_forced
        self._cumulative_logprobs = [0.0]
        self._hypotheses: list[Hypothesis] = []

    def resume(self, progress: BeamProgress) -> None:
        """Goes on after the steps that another engine core has done of this search."""
        self._num_generated = len(progress.token_ids[0])
        self._cumulative_logprobs = progress.cumulative_logprobs
        self._hypotheses = [*progress.hypotheses]

    def progress(self, token_ids: list[list[int]]) -> BeamProgress | None:
        """What ``resume`` goes on from, with the running beams' generated tokens; None before the first step."""
        if not self._num_generated:
            return None
        return BeamProgress(token_ids, list(self._cumulative_logprobs), self.hypotheses())

    def step(
        self, candidates: Sequence[Candidates], tokens: Sequence[Sequence[int]], num_prompt_tokens: int = 0
    ) -> BeamStep:
        """Takes every running beam one token further.

        Args:
            candidates: For each running beam, its most likely next tokens, as many as ``Beam.num_candidates``.
            tokens: For each running beam, its tokens so far; copied where a hypothesis completes.
            num_prompt_tokens: Of them, those of the prompt.

        There are fewer than ``beam_width`` survivors only if the candidates that do not end were fewer. A step without
        any candidate (a model that yields NaN) ends the search with the hypotheses that it has.
        """
        self._num_generated += 1
        ranked = self._rank(candidates)
        before = self.hypotheses()
        for continuation in ranked[: self._width]:
            if self._ends(continuation.token_id):
                self._complete(continuation, tokens[continuation.beam], num_prompt_tokens)
        running = [c for c in ranked if not self._ends(c.token_id)][: self._width]
        if not running or not self._worth_continuing(-running[0].negated_logprob):
            running = []
        self._cumulative_logprobs = [-c.negated_logprob for c in running]
        survivors = [(c.beam, c.token_id) for c in running]
        return BeamStep(survivors, not running, self._cumulative_logprobs, completed=before != self._hypotheses)

    def hypotheses(self) -> list[Hypothesis]:
        """The complete sequences so far, best first.

        Exactly ``beam_width`` of them when the search is done, unless the candidates were too few to form as many.
        """
        return list(self._hypotheses)

    def _rank(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        return sorted(
            _Continuation(-(cumulative + logprob), beam, token_id)
            for beam, (cumulative, (token_ids, logprobs)) in enumerate(
                zip(self._cumulative_logprobs, candidates, strict=True)
            )
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )

    def _ends(self, token_id: int) -> bool:
        return self._num_generated >= self._max_new_tokens or token_id in self._stop_token_ids

    def _complete(self, continuation: _Continuation, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Adds a hypothesis if it is one of the best."""
        cumulative = -continuation.negated_logprob
        score = self._score(cumulative, self._num_generated)
        if self._full:
            if score <= self._hypotheses[-1].score:
                return
            self._hypotheses.pop()
        reason: Literal["stop", "length"] = "stop" if continuation.token_id in self._stop_token_ids else "length"
        generated = [*tokens[num_prompt_tokens:], continuation.token_id]
        self._hypotheses.append(Hypothesis(generated, cumulative, score, reason))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)

    @property
    def _full(self) -> bool:
        return len(self._hypotheses) == self._width

    def _worth_continuing(self, best_running: float) -> bool:
        """Whether the hypotheses are too few, or the best running beam could still displace one.

        Its score is guessed: as if the logprob that it has now were its logprob at the end, and the end were here; or,
        for "never" where length is rewarded, at the length limit.
        """
        if not self._full:
            return True
        if self._early_stopping is True:
            return False
        at_limit = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_new_tokens if at_limit else self._num_generated
        return self._score(best_running, length) > self._hypotheses[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        """The score of a sequence; infinitely bad or 0 where the penalty leaves no number between."""
        try:
            divisor = (length + self._num_forced) ** self._length_penalty
        except OverflowError:
            return 0.0
        return cumulative_logprob / divisor if divisor else -math.inf
