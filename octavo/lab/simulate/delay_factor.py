"""What ``scheduler_delay_factor`` trades: requests a second under a limit of TPOT, against the time to the first token.

Steps of whole prompts (``batching=prefill_first``) interrupt running answers. Delaying admission gathers prompts, so
that fewer steps interrupt: answers run faster, or more of them at the same pace, and first tokens come later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.lab.simulate.figures import RunFigures
from octavo.lab.simulate.run import simulate
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.arrivals import Gamma
from octavo.lab.workloads.lengths import Lengths
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload

FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
#: Halvings of the interval in which the rate lies.
_BISECTIONS = 6
#: Runs of each factor: also at the ends of the interval.
RUNS = _BISECTIONS + 2


class DelayPoint(msgspec.Struct, frozen=True):
    """The highest rate that one factor keeps under the limit; times in seconds."""

    factor: float
    #: Requests and output tokens a second that arrive.
    rate: float
    output_tokens_per_s: float
    mean_ttft: float
    p99_ttft: float
    mean_tpot: float
    p99_itl: float
    mean_running: float


@dataclass(frozen=True)
class DelaySetting:
    """What all runs have in common: lengths, and the mean TPOT in seconds that none may exceed."""

    profile: StepProfile
    inputs: Lengths
    outputs: Lengths
    requests: int
    tpot_limit: float
    seed: int = 0

    def run(self, factor: float, rate: float | None) -> RunFigures:
        """At a rate in requests/s, or with all requests there at the start."""
        load = Workload(
            requests=self.requests,
            arrivals=None if rate is None else Gamma(rate),
            inputs=self.inputs,
            outputs=self.outputs,
            seed=self.seed,
        )
        options = make_config(model="none", batching="prefill_first", scheduler_delay_factor=factor)
        return simulate(self.profile, options, self._fitting(load))

    def _fitting(self, load: Workload) -> Sequence[WorkItem]:
        return [item for item in load if item.input_len + item.output_len <= self.profile.max_model_len]


def find_point(setting: DelaySetting, factor: float, ended: Callable[[], object] = lambda: None) -> DelayPoint:
    """Bisects the rate; ``ended`` is called after each run.

    Raises:
        ConfigError: no rate keeps the limit, or all of them do.
    """

    def tpot(rate: float | None) -> tuple[float, RunFigures]:
        figures = setting.run(factor, rate)
        ended()
        assert figures.tpot is not None
        return figures.tpot.mean, figures

    full = tpot(None)[1].requests_per_s
    low, high = 0.01 * full, 2 * full
    best, found = tpot(low)
    if best > setting.tpot_limit:
        raise ConfigError(f"the TPOT is {best * 1e3:.3g} ms even at {low:.3g} requests/s: give a larger --tpot-limit")
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        mean, figures = tpot(middle)
        if mean <= setting.tpot_limit:
            low, found = middle, figures
        else:
            high = middle
    if high == 2 * full:
        raise ConfigError(f"every rate keeps a TPOT of {setting.tpot_limit * 1e3:g} ms: give a smaller --tpot-limit")
    assert found.ttft is not None and found.tpot is not None and found.itl is not None
    return DelayPoint(
        factor,
        low,
        low * found.output_tokens / found.requests,
        found.ttft.mean,
        found.ttft.p99,
        found.tpot.mean,
        found.itl.p99,
        found.mean_running,
    )
