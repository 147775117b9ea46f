"""Scenarios in which policies differ: memory binds, lengths vary, loads vary, and requests are not alike.

In the classical ones memory never binds and lengths hardly vary, so every order gives about the same latency.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.lab.bench.policies.scenarios import Scenario
from octavo.lab.workloads.arrivals import Gamma, Steps
from octavo.lab.workloads.draws import Weighted
from octavo.lab.workloads.lengths import (
    Constant,
    Lengths,
    Lognormal,
    Uniform,
    chat_inputs,
    chat_outputs,
    instruct_inputs,
    instruct_outputs,
)
from octavo.lab.workloads.sharing import RequestClass, SystemPrompts, User
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload, merge

#: What requests state as ``max_tokens`` where policies shall not know lengths: the limit of the fitted lengths.
_LIMIT = 2048
#: Where a queue is wanted: with more slots requests share a rate that grows little on a CPU, and hardly wait.
_SLOTS = {"max_num_seqs": 4}


@dataclass(frozen=True)
class Mixture(Lengths):
    """One of several distributions for each length, in proportion to shares."""

    parts: tuple[tuple[float, Lengths], ...]

    def draw(self, rng: random.Random) -> int:
        """See ``Lengths``."""
        return self.parts[Weighted(share for share, _ in self.parts).draw(rng)][1].draw(rng)

    @property
    def mean(self) -> float:
        """See ``Lengths``."""
        return sum(share * lengths.mean for share, lengths in self.parts) / sum(share for share, _ in self.parts)

    @property
    def most(self) -> int:
        """See ``Lengths``."""
        return max(lengths.most for _, lengths in self.parts)


# --- few blocks -----------------------------------------------------------------------------------------------------


def _all_at_once(count: int, inputs: Lengths, outputs: Lengths, capacity: float, seed: int) -> Iterable[WorkItem]:
    return Workload(requests=count, inputs=inputs, outputs=outputs, seed=seed)


def _few_blocks(mode: str, host_blocks: int) -> Scenario:
    """Both modes have the same memory: on a CPU host blocks are taken from those of the device."""
    options = {
        "num_gpu_blocks_override": 192 - host_blocks,
        "num_host_blocks_override": host_blocks,
        "max_num_seqs": 32,
        "preemption_mode": mode,
        "max_model_len": 2048,
    }
    make = partial(_all_at_once, 150, Uniform(16, 128), Uniform(64, 384))
    about = (
        f"150 requests at once, 16 to 128 tokens in and 64 to 384 out, in 192 blocks, which hold about twelve of them; "
        f"preemption by {mode}, {host_blocks} of the blocks on the host"
    )
    return Scenario(f"few-blocks-{mode}", about, options, make)


# --- heavy tails ----------------------------------------------------------------------------------------------------


def _poisson(count: int, load: float, capacity: float, seed: int) -> Iterable[WorkItem]:
    return Workload(
        requests=count, arrivals=Gamma(load * capacity), inputs=chat_inputs(), outputs=chat_outputs(), seed=seed
    )


def _heavy_tailed(load: float) -> Scenario:
    about = (
        f"200 requests of the fitted chat lengths, Poisson arrivals at {load:.0%} of capacity; lengths are unknown and "
        "depend on nothing that is known"
    )
    return Scenario(
        f"heavy-tailed-{load:.0%}".rstrip("%"),
        about,
        _SLOTS,
        partial(_poisson, 200, load),
        chat_inputs(),
        chat_outputs(),
        load,
        family="heavy-tailed",
        max_tokens=_LIMIT,
    )


@dataclass(frozen=True)
class _Application:
    """An application behind the same server: its own user, system prompt and lengths."""

    share: float
    inputs: Lengths
    outputs: Lengths


#: That traffic is made of clients, each with lengths of its own, is what production traces show (Xiang et al. 2025,
#: "ServeGen", on the decomposition by client). Medians of outputs: 13 tokens of code completion (Patel et al. 2024,
#: "Splitwise", section III); the fits of Alpaca and of ShareGPT (``lengths.py``). The shares, the reports and the
#: widths are assumed; prompts of completion are shortened to what a small model on a CPU is given.
SERVICES: Mapping[str, _Application] = {
    "completion": _Application(0.5, Lognormal(150, 0.7, 1000), Lognormal(13, 0.8, 500)),
    "instructions": _Application(0.3, Lognormal(150, 0.7, 1000), instruct_outputs()),
    "chat": _Application(0.15, chat_inputs(), chat_outputs()),
    "reports": _Application(0.05, chat_inputs(), Lognormal(1000, 0.5, 2048)),
}
#: Rates of arrivals, as shares of the capacity, in turns: 90 % on average.
_TURNS, _SECONDS = (1.5, 0.3), 60.0


def _services(count: int, turns: tuple[float, ...], capacity: float, seed: int) -> Iterable[WorkItem]:
    return merge(
        *(
            Workload(
                requests=round(count * service.share),
                arrivals=Steps(_SECONDS, tuple(turn * capacity * service.share for turn in turns)),
                inputs=service.inputs,
                outputs=service.outputs,
                system_prompts=SystemPrompts(1, 100),
                users=(User(name),),
                # Of one seed they would have the system prompt in common.
                seed=seed * len(SERVICES) + number,
                name=name,
            )
            for number, (name, service) in enumerate(SERVICES.items())
        )
    )


def _of_services(name: str, count: int, turns: tuple[float, ...]) -> Scenario:
    swings = "a minute at 150 %, a minute at 30 %, and so on; " if len(turns) > 1 else ""
    about = (
        f"{count} requests of four services (completion, instructions, chat, reports) at 90 % of capacity: "
        f"{swings}lengths are unknown, but each service has its own"
    )
    parts = SERVICES.values()
    return Scenario(
        name,
        about,
        _SLOTS,
        partial(_services, count, turns),
        Mixture(tuple((s.share, s.inputs) for s in parts)),
        Mixture(tuple((s.share, s.outputs) for s in parts)),
        0.9,
        max_tokens=_LIMIT,
    )


# --- requests that are not alike ------------------------------------------------------------------------------------


def _priorities(capacity: float, seed: int) -> Iterable[WorkItem]:
    """Batch work that would fill the engine alone, and short interactive requests beside it."""
    rate = 0.5 * capacity
    batch = Workload(
        requests=40, inputs=Constant(128), outputs=Uniform(100, 300), users=(User("batch"),), name="batch",
        classes=(RequestClass(priority=1),), seed=seed,
    )  # fmt: skip
    interactive = Workload(
        requests=60, arrivals=Gamma(rate), inputs=instruct_inputs(), outputs=instruct_outputs(), name="interactive",
        users=(User("interactive"),), seed=seed,
    )  # fmt: skip
    return merge(batch, interactive)


def _greedy(capacity: float, seed: int) -> Iterable[WorkItem]:
    """The greedy user alone sends twice what can be served, the modest one a fifth of it."""
    lengths: dict[str, Any] = {"inputs": instruct_inputs(), "outputs": instruct_outputs()}
    greedy = Workload(
        requests=400, arrivals=Gamma(2.0 * capacity), users=(User("greedy"),), name="greedy", seed=seed, **lengths
    )
    modest = Workload(
        requests=40, arrivals=Gamma(0.2 * capacity), users=(User("modest"),), name="modest", seed=seed, **lengths
    )
    return merge(greedy, modest)


def _deadlines(count: int, load: float, capacity: float, seed: int) -> Iterable[WorkItem]:
    return Workload(
        requests=count,
        arrivals=Gamma(load * capacity),
        inputs=instruct_inputs(),
        outputs=instruct_outputs(),
        classes=(RequestClass(0.5, ttft_target=0.5), RequestClass(0.5, ttft_target=2.0)),
        seed=seed,
    )


def _with_deadlines(load: float) -> Scenario:
    about = (
        f"600 requests of the fitted Alpaca lengths at {load:.0%} of capacity; first token due within 0.5 s of half of "
        "them, 2 s of the others"
    )
    return Scenario(
        f"deadlines-{load:.0%}".rstrip("%"),
        about,
        {"max_num_seqs": 8},
        partial(_deadlines, 600, load),
        instruct_inputs(),
        instruct_outputs(),
        load,
        family="deadlines",
    )


SEPARATING: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _few_blocks("recompute", 0),
        _few_blocks("swap", 32),
        *map(_heavy_tailed, (0.7, 0.9, 1.1)),
        _of_services("services-90", 300, _TURNS),
        _of_services("services-90-long", 2400, _TURNS),
        _of_services("services-90-steady", 2400, (0.9,)),
        Scenario(
            "priorities",
            "40 long batch requests at once, and 60 short interactive ones at half of the capacity with priority",
            {**_SLOTS, "priority_preemption": True},
            _priorities,
            instruct_inputs(),
            instruct_outputs(),
        ),
        Scenario(
            "greedy-and-modest",
            "a greedy user sends 400 short requests at twice the capacity, a modest one 40 at a fifth of it",
            {"max_num_seqs": 8},
            _greedy,
            instruct_inputs(),
            instruct_outputs(),
            2.2,
        ),
        *map(_with_deadlines, (0.9, 1.1)),
    )
}
