"""The time that images may add to a step in which other requests decode (``image_step_ms``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.request import Feature

if TYPE_CHECKING:
    from octavo.core.plan import StepResult
    from octavo.scheduler.groups import SequenceGroup
    from octavo.scheduler.step import Step

#: Tokens that stand for image features in a step, until a step has shown what they cost.
_AT_FIRST = 16
#: Tokens that a step may have whatever they cost, and fewest whose cost is observed: that of fewer is lost in noise.
_FEWEST = 8
#: Share of the time that features get in any case.
_LEAST_SHARE = 0.25
#: Weight of the latest step in means.
_LATEST = 0.2


class ImageTime:
    """Divides that time between features, which workers compute in parts, and the tokens that stand for features.

    It is to prompts with images what the token budget is to prompts (stall-free batching: Agrawal et al. 2024,
    "Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve"), in seconds: the tokens of an image of
    512 x 512 may take longer than a step. Texts beside images are chunked by the token budget alone.
    """

    def __init__(self, seconds: float = 0.05, *, learns: bool = True) -> None:
        """``learns``: whether tokens are limited, by measured costs; without a shared clock they are not."""
        self._seconds, self._learns = seconds, learns
        #: Seconds of a step of decodes alone, and their number; None until observed.
        self._step: tuple[float, int] | None = None
        #: Prompt tokens, and what they added to their steps, in decaying sums.
        self._tokens = self._added = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """What a prompt token adds to a step; None until observed."""
        return self._added / self._tokens if self._tokens else None

    def most_tokens(self, group: SequenceGroup, step: Step, *, computes: bool) -> int | None:
        """The most tokens of a prompt with images in a step with decodes, at least 1; None: any number.

        Args:
            step: ``prompts`` has the prompts before this one.
            computes: Whether workers compute features, which then get half of the time.
        """
        if not self._learns:
            return None
        cost = self.seconds_per_token
        left = _AT_FIRST if cost is None else max(_FEWEST, int(self._seconds / (2 if computes else 1) / cost))
        left -= _image_tokens(step)
        chunk = _chunk(group.request.features, group.seqs[0].num_computed, max(0, left))
        return None if chunk is None else max(1, chunk)

    def for_features(self, step: Step) -> float:
        """Seconds in which the workers of a scheduled step compute features."""
        tokens = _image_tokens(step) * (self.seconds_per_token or 0.0)
        return max(self._seconds - tokens, self._seconds * _LEAST_SHARE)

    def observe(self, step: Step, result: StepResult) -> None:
        """Learns from a step what its prompt tokens add to it."""
        decodes, tokens = len(step.decodes) + len(step.drafted), step.num_prompt_tokens
        seconds = result.seconds - result.swap_seconds - result.draft_seconds - result.compute_seconds
        if seconds <= 0 or step.drafted or step.extended:
            return
        if not tokens:
            before = seconds if self._step is None else self._step[0]
            self._step = before + _LATEST * (seconds - before), decodes
        elif tokens >= _FEWEST and decodes and self._step is not None:
            # Further decodes since then cost about as much as prompt tokens.
            seconds -= self._step[0] + (self.seconds_per_token or 0.0) * (decodes - self._step[1])
            self._tokens += tokens - _LATEST * self._tokens
            self._added += max(seconds, 1e-7) - _LATEST * self._added


def _image_tokens(step: Step) -> int:
    """Tokens of a step's prompts that stand for features."""
    count = 0
    for group, tokens in step.prompts:
        start = group.seqs[0].num_computed
        for feature in group.request.features:
            count += max(0, min(start + tokens, feature.offset + feature.length) - max(start, feature.offset))
    return count


def _chunk(features: Sequence[Feature], start: int, most: int) -> int | None:
    """Tokens from ``start`` on of which at most ``most`` stand for features; None: all."""
    for feature in features:
        first, end = max(start, feature.offset), feature.offset + feature.length
        if end - first > most:
            return first + most - start
        most -= max(0, end - first)
    return None
