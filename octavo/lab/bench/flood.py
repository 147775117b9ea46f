"""What a flood of one user costs another: the victim's first token against its own alone, and how even shares are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.lab.bench.capacity import capacity_of, full_load
from octavo.lab.simulate.figures import RunFigures, ServiceByUser
from octavo.lab.simulate.run import record
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.workloads.arrivals import Gamma
from octavo.lab.workloads.lengths import Constant, Lengths
from octavo.lab.workloads.sharing import User
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload, merge

#: The victim's load, as a share of the capacity.
VICTIM_LOAD = 0.1
#: Users that flood together: requests as a share of the flood's, and how many times as long theirs are as the first's.
_RIVALS = {"first": (0.4, 1.0), "second": (0.2, 2.0), "third": (0.1, 4.0), "fourth": (0.1, 4.0)}


class FloodFigures(msgspec.Struct, frozen=True):
    """One policy and seed; times in seconds."""

    policy: str
    seed: int
    alone_p50_ttft: float
    alone_p99_ttft: float
    p50_ttft: float
    p99_ttft: float
    #: When the flood's last request ends.
    flood_seconds: float
    preemptions: int
    output_tokens_per_s: float
    #: Jain's index of the service by weight of several floods, while all of them have requests waiting.
    jain: float

    @property
    def ratio(self) -> float:
        """The victim's p99 of the first token beside the flood, over that alone."""
        return self.p99_ttft / self.alone_p99_ttft


@dataclass(frozen=True)
class FloodSetting:
    """What all runs have in common; lengths are those of the victim and of the flood."""

    profile: StepProfile
    inputs: Lengths
    outputs: Lengths
    flood: int = 1000
    victims: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)

    def measure(self, policies: Sequence[str], seed: int, ended: Callable[[], object]) -> list[FloodFigures]:
        """Each policy once; ``ended`` is called after each of its three runs.

        Raises:
            ConfigError: a policy or a request is not possible, or the users never wait together.
        """
        capacity = capacity_of(self._run("fcfs", full_load(self.inputs, self.outputs, seed))[1])
        victim = Workload(
            requests=self.victims, arrivals=Gamma(VICTIM_LOAD * capacity), inputs=self.inputs, outputs=self.outputs,
            users=(User("victim"),), name="victim", seed=seed,
        )  # fmt: skip
        flood = replace(victim, requests=self.flood, arrivals=None, users=(User("flood"),), name="flood")
        found = []
        for policy in policies:
            alone = self._run(policy, victim)[1].ttft
            ended()
            items = list(merge(victim, flood))
            figures, done = self._run(policy, items)
            ended()
            of_victim = np.array([items[number].user == "victim" for number in done.number])
            rivals = self._run(policy, self._rivals(seed))[0]
            ended()
            found.append(
                FloodFigures(
                    policy=policy,
                    seed=seed,
                    alone_p50_ttft=float(np.percentile(alone, 50)),
                    alone_p99_ttft=float(np.percentile(alone, 99)),
                    p50_ttft=float(np.percentile(done.ttft[of_victim], 50)),
                    p99_ttft=float(np.percentile(done.ttft[of_victim], 99)),
                    flood_seconds=float(np.asarray(done.last)[~of_victim].max()),
                    preemptions=figures.preemptions_by_recompute + figures.preemptions_by_swap,
                    output_tokens_per_s=figures.output_tokens_per_s,
                    jain=jain_while_all_wait(rivals.service),
                )
            )
        return found

    def _rivals(self, seed: int) -> Iterable[WorkItem]:
        return merge(
            *(
                Workload(
                    requests=max(1, round(share * self.flood)),
                    inputs=Constant(max(1, round(times * self.inputs.mean / 2))),
                    outputs=Constant(max(1, round(times * self.outputs.mean / 2))),
                    users=(User(name),),
                    name=name,
                    seed=seed,
                )
                for name, (share, times) in _RIVALS.items()
            )
        )

    def _run(self, policy: str, items: Iterable[WorkItem]) -> tuple[RunFigures, Any]:
        options = make_config(**{"model": "none", "scheduling_policy": policy, **self.options})
        return record(self.profile, options, items)


def jain_index(shares: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 if all are equal, 1 / n if one has all (Jain, Chiu and Hawe 1984)."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def jain_while_all_wait(service: ServiceByUser | None) -> float:
    """Of the service that users had received when the first of them had no request waiting any more."""
    if service is None or not service.all_wait_until:
        raise ConfigError("the users never have requests waiting at the same time")
    moment = service.seconds.index(service.all_wait_until)
    return jain_index([served[moment] for served in service.users.values()])
