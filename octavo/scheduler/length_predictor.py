"""Predicts how many tokens a request will generate, from what is known when it arrives; learns while serving.

The logarithm of the length is a sum of weights, one for each feature of the request, such as its user or the beginning
of its prompt. Each weight has a variance, and a finished request corrects the weights in proportion to theirs: a Kalman
filter with a diagonal covariance (cf. Crammer et al. 2009, "Adaptive regularization of weight vectors"). What the sum
does not explain is kept as a histogram of residuals, so that a request that outlives its prediction is estimated again:
the expected length, given that it is longer than what was generated already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

from octavo.core.request import EngineCoreRequest, Generate

#: What a request is known by; the first is the same for all.
Features = tuple[Hashable, ...]

#: Tokens at the beginning of a prompt that stand for its prefix.
_PREFIX = 16
#: Variance of a weight before it is observed, and what each observation of it adds (lengths drift).
_PRIOR_VARIANCE, _DRIFT = 0.5, 1e-4
#: Weights kept; of more the least recently used are dropped.
_MAX_WEIGHTS = 8192
#: Residuals are counted in bins of this width of the logarithm, from minus to plus the limit.
_BIN, _LIMIT = 0.125, 5.0
_NUM_BINS = int(2 * _LIMIT / _BIN)
#: Residuals after which older ones count half, and after which the tails are computed again.
_HALVE_AFTER, _REFRESH_AFTER = 4096.0, 32
#: Finished requests that are remembered with what was predicted.
_WINDOW = 1024


def features_of(request: EngineCoreRequest) -> Features:
    """What is cheap to know of a request: user, task, lengths, beginning of the prompt, and when it stops."""
    task, prompt = request.task, request.prompt_token_ids
    prefix = hash(tuple(prompt[:_PREFIX]))
    limit = task.max_tokens
    stops = None
    if isinstance(task, Generate):
        stop = task.params.stop
        stops = (len(task.stop_token_ids), task.params.min_tokens, tuple(stop) if isinstance(stop, list) else stop)
    return (
        None,
        ("user", request.options.user),
        ("prefix", prefix),
        ("user and prefix", request.options.user, prefix),
        ("prompt", int(3 * math.log2(len(prompt)))),
        ("max_tokens", limit and int(3 * math.log2(limit))),
        ("stops", type(task).__name__, stops),
    )


class LengthPredictor:
    """Lengths in tokens. Its memory is bounded; predicting and learning take a few microseconds."""

    def __init__(self) -> None:
        #: Mean and variance of each weight, the least recently used first.
        self._weights: dict[Hashable, tuple[float, float]] = {None: (4.0, 4.0)}
        self._noise = 1.0
        # Until something is learned: normally distributed, as of eight requests.
        centres = [-_LIMIT + (i + 0.5) * _BIN for i in range(_NUM_BINS)]
        bell = [math.exp(-0.5 * c * c) for c in centres]
        self._counts = [8 * b / sum(bell) for b in bell]
        self._total, self._unseen = 8.0, 0
        self._factors = [math.exp(c) for c in centres]
        #: For each bin: the mean of exp(residual) of those in it or above.
        self._tails = [1.0] * _NUM_BINS
        self._refresh()
        #: Of the latest requests: the logarithm that was predicted at their arrival, and their length.
        self.recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def log_length(self, features: Features) -> float:
        """The logarithm of the typical (about the median) length."""
        weights = self._weights
        return sum([weights[f][0] for f in features if f in weights])

    def expected(self, log_length: float, generated: int = 0) -> tuple[float, float]:
        """The expected length of a request that has generated so many tokens, and at how many to ask again."""
        index = 0
        if generated > 0:
            index = int((math.log(generated) - log_length + _LIMIT) / _BIN) + 1
            if index >= _NUM_BINS:  # longer than anything before: as long again, as of a heavy tail
                return 2.0 * generated, 2.0 * generated
        index = max(index, 0)
        total = math.exp(log_length) * self._tails[index]
        return max(total, generated + 1.0), math.exp(log_length - _LIMIT + index * _BIN)

    def learn(self, features: Features, length: int) -> None:
        """A request with these features has generated ``length`` tokens, at least one."""
        weights = self._weights
        estimates = [weights.pop(f, (0.0, _PRIOR_VARIANCE)) for f in features]
        predicted = sum([w for w, _ in estimates])
        variance = sum([v for _, v in estimates])
        residual = math.log(length) - predicted
        step = 1.0 / (variance + self._noise)
        for f, (w, v) in zip(features, estimates, strict=True):
            gain = v * step
            weights[f] = (w + gain * residual, v * (1.0 - gain) + _DRIFT)
        while len(weights) > _MAX_WEIGHTS:
            del weights[next(iter(weights))]
        self._noise += 0.02 * (min(max(residual * residual - variance, 0.02), 4.0) - self._noise)
        self.recent.append((predicted, length))
        self._count(residual)

    def _count(self, residual: float) -> None:
        index = int((residual + _LIMIT) / _BIN)
        self._counts[min(max(index, 0), _NUM_BINS - 1)] += 1
        self._total += 1
        self._unseen += 1
        if self._unseen >= _REFRESH_AFTER:
            if self._total > _HALVE_AFTER:
                self._counts = [c / 2 for c in self._counts]
                self._total /= 2
            self._refresh()

    def _refresh(self) -> None:
        self._unseen = 0
        above = weighted = 1e-9
        for i in range(_NUM_BINS - 1, -1, -1):
            above += self._counts[i]
            weighted += self._counts[i] * self._factors[i]
            self._tails[i] = max(weighted / above, self._factors[i])
