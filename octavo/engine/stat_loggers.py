"""Where the statistics of an engine's steps go: a status line in the log, or loggers of a user's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from octavo.core.config import EngineConfig
from octavo.core.stats import SpeculationStats, StepStats

logger = logging.getLogger("octavo")


class StatLogger(Protocol):
    """What follows an engine's work: ``LLM(model, stat_loggers=[...])`` calls ``log`` after every step.

    >>> class Progress:
    ...     def log(self, stats: StepStats) -> None:
    ...         print(stats.num_running, stats.decode_tokens / stats.seconds)
    """

    def log(self, stats: StepStats) -> None:
        """Takes the statistics of a step. The next step waits for it; an exception is logged and nothing else."""


def make_stat_loggers(options: EngineConfig, loggers: Iterable[StatLogger] = ()) -> list[StatLogger]:
    """These loggers, and the status line that the options ask for."""
    status = [StatusLine(options.log_stats_interval)] if options.log_stats_interval else []
    return [*loggers, *status]


def log_stats(loggers: Iterable[StatLogger], stats: StepStats) -> None:
    """Gives the statistics to each of the loggers."""
    for stat_logger in loggers:
        try:
            stat_logger.log(stats)
        except Exception:
            logger.exception("stat logger %s failed", type(stat_logger).__name__)


class StatusLine:
    """A ``StatLogger`` that sums over steps and logs a line at the first step after each interval, while busy.

    Rates are over the time since the last line, or since the engine became busy.
    """

    def __init__(self, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``interval`` in seconds; 0 logs nothing."""
        self._interval = interval
        self._clock = clock
        self._idle = True
        self._since = 0.0
        self._prefill = self._decode = 0
        #: At the last line, as ``_totals`` gives them.
        self._last = (0, 0, 0, 0, 0)

    def log(self, stats: StepStats) -> None:
        """Adds a step; microseconds unless a line is due."""
        if not self._interval:
            return
        now = self._clock()
        if self._idle:
            # The step itself began before now.
            self._since = now - stats.seconds
            self._prefill = self._decode = 0
        self._prefill += stats.prefill_tokens
        self._decode += stats.decode_tokens
        self._idle = not (stats.num_running or stats.num_waiting or stats.num_swapped)
        if now - self._since >= self._interval:
            logger.info("%s", self._line(stats, now - self._since))
            self._since = now
            self._prefill = self._decode = 0
            self._last = _totals(stats)

    def _line(self, stats: StepStats, seconds: float) -> str:
        since = [now - last for now, last in zip(_totals(stats), self._last, strict=True)]
        queried, hits, drafts, draft_tokens, accepted = since
        share = f"{accepted / draft_tokens:.1%}, {1 + accepted / drafts:.2f} tokens a draft" if drafts else "-"
        swapped = f", {stats.num_swapped} swapped" if stats.num_swapped else ""
        return (
            f"{stats.num_running} running, {stats.num_waiting} waiting{swapped}; "
            f"prompts {self._prefill / seconds:.1f} tokens/s, output {self._decode / seconds:.1f} tokens/s; "
            f"KV cache {stats.kv_cache_usage:.1%} used; "
            f"prefix hits {f'{hits / queried:.1%}' if queried else '-'}"
            f"{'' if stats.speculation is None else f'; drafts accepted {share}'}"
        )


def _totals(stats: StepStats) -> tuple[int, int, int, int, int]:
    """Prompt tokens looked up in the prefix cache and found; drafts, their tokens, and those that were accepted."""
    drafts = stats.speculation or SpeculationStats()
    cache = stats.prefix_queried_tokens, stats.prefix_hit_tokens
    return *cache, drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens
