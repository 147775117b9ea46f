"""A drafter at work: how many tokens it is asked for, what becomes of them, and what happens if it fails."""

from __future__ import annotations

import itertools
import logging

from octavo.core.errors import WorkerError
from octavo.core.speculative_options import SpeculativeConfig
from octavo.core.stats import SpeculationStats
from octavo.speculation.draft_lengths import AdaptiveLength, FixedLength
from octavo.speculation.drafter import DraftedSequence, Drafter
from octavo.speculation.ngram import NgramDrafter
from octavo.speculation.prediction import PredictionDrafter
from octavo.speculation.suffix import SuffixDrafter
from octavo.speculation.worker_drafter import DraftsOnWorkers, HeadDrafter

logger = logging.getLogger("octavo")


class Speculator:
    """Owns the drafters and the lengths of their drafts. Sequences for which one fails have no further drafts.

    The prediction of a request goes before the drafter of the engine, which has the sequence where it says nothing.
    """

    def __init__(self, drafter: Drafter | None, most: int, *, adaptive: bool) -> None:
        """``most``: draft tokens of a sequence in a step. Without a ``drafter``, predictions alone are drafted from."""
        self._drafter = drafter
        self._predictions = PredictionDrafter()
        #: Whether the number of draft tokens follows what they bring.
        self.adaptive = adaptive
        self._lengths = AdaptiveLength(most) if adaptive else FixedLength(most)
        self._failed: set[int] = set()
        self._logged = False
        self._draft_tokens = self._failures = 0
        #: Drafts by the number of their tokens that were accepted.
        self._drafts = [0] * (most + 1)

    def drafts(self, sequence: DraftedSequence) -> bool:
        """Whether drafts of it may ever be proposed."""
        return self._drafter is not None or bool(sequence.prediction)

    def begin_step(self, num_seqs: int, num_prompt_tokens: int) -> int:
        """A step of so many decoding sequences and tokens of prompts: most draft tokens of it."""
        return self._lengths.begin_step(num_seqs, num_prompt_tokens)

    def propose(self, sequence: DraftedSequence, most: int) -> list[int]:
        """Draft tokens of a sequence, at most ``most``."""
        seq_id, predicted, drafter = sequence.seq_id, bool(sequence.prediction), self._drafter
        backlog = drafter.backlog(sequence) if drafter is not None and not predicted else 0
        wanted = self._lengths.length(seq_id, predicted, backlog)
        if wanted > most:
            wanted = most
        if wanted <= 0 or seq_id in self._failed:
            return []
        try:
            found = self._predictions.propose(sequence, wanted) if predicted else []
            if not found and drafter is not None and not (predicted and drafter.backlog(sequence)):
                found = drafter.propose(sequence, wanted)
                if len(found) > wanted:
                    found = found[:wanted]
        except Exception as e:
            self._fail(sequence, e)
            return []
        if not found:
            self._lengths.found_none(seq_id)
        return found

    def observe(self, drafts: list[tuple[int, int, int]]) -> None:
        """Drafts of a step were verified; each is (sequence id, tokens drafted, tokens accepted)."""
        self._lengths.observe(drafts)
        for _, drafted, accepted in drafts:
            self._draft_tokens += drafted
            self._drafts[accepted] += 1

    def fail(self, sequence: DraftedSequence, message: str) -> None:
        """The workers could not propose tokens for the sequence."""
        self._fail(sequence, WorkerError(message))

    def observe_step(self, num_seqs: int, num_drafting: int, num_drafts: int, seconds: float) -> None:
        """A step without prompts took so long; of ``num_seqs`` sequences, ``num_drafting`` had ``num_drafts``."""
        self._lengths.observe_step(num_seqs, num_drafting, num_drafts, seconds)

    def observe_prompts(self, rows: int, seconds: float) -> None:
        """A step with prompts took so long for so many rows."""
        self._lengths.observe_prompts(rows, seconds)

    @property
    def expected(self) -> int:
        """Draft tokens for which steps with prompts leave room."""
        return self._lengths.expected

    def observe_drafting(
        self, num_drafting: int, passes: int, seconds: float, catch_up_tokens: int, catch_up_seconds: float
    ) -> None:
        """See ``FixedLength``."""
        self._lengths.observe_drafting(num_drafting, passes, seconds, catch_up_tokens, catch_up_seconds)

    def on_end(self, sequence: DraftedSequence) -> None:
        """The sequence has ended."""
        self._lengths.forget(sequence.seq_id)
        self._failed.discard(sequence.seq_id)
        if sequence.prediction:
            self._predictions.on_end(sequence)
        if self._drafter is not None:
            try:
                self._drafter.on_end(sequence)
            except Exception as e:
                self._log(e)

    def stats(self) -> SpeculationStats | None:
        """Totals so far; None before the first draft where the engine has no drafter."""
        if self._drafter is None and not any(self._drafts) and not self._failures:
            return None
        # A draft of which so many tokens were accepted had the first, the second, ... accepted.
        per_position = list(itertools.accumulate(reversed(self._drafts[1:])))[::-1]
        return SpeculationStats(sum(self._drafts), self._draft_tokens, sum(per_position), per_position, self._failures)

    def _fail(self, sequence: DraftedSequence, error: Exception) -> None:
        self._failed.add(sequence.seq_id)
        self._failures += 1
        self._log(error)

    def _log(self, error: Exception) -> None:
        if not self._logged:
            name = type(self._drafter or self._predictions).__name__
            logger.error("drafter %s failed; such requests go on without drafts", name, exc_info=error)
        self._logged = True


def make_speculator(config: SpeculativeConfig | None) -> Speculator:
    """What an engine with this option drafts with; without one, from predictions of requests alone."""
    config = config or SpeculativeConfig(method="prediction")
    return Speculator(_make_drafter(config), config.num_speculative_tokens, adaptive=config.adaptive)


def _make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """None if nothing but predictions of requests is drafted from."""
    if config.drafts_on_workers:
        return DraftsOnWorkers() if config.method == "draft_model" else HeadDrafter()
    if config.method == "ngram":
        return NgramDrafter(config)
    return SuffixDrafter(config) if config.method == "suffix" else None
