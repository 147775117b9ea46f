"""What share of prompt tokens agents find again: with LRU alone, with cache hints, and with a KV store on disk.

    .venv/bin/python scripts/research/compare_cache_tiers.py
    .venv/bin/python scripts/research/compare_cache_tiers.py --engine smollm2-135m --turns 12

Each agent sends its next turn ``--pause`` seconds after its answer, as agents do. Simulated alone, it takes a second;
with ``--engine`` the same trace runs on an engine in this process too, by the clock, and its answers are what the next
turns contain. The KV cache holds half of the conversations.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo import LLM, SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.core.request import RequestOptions
from octavo.lab.simulate.core_requests import cache_hints
from octavo.lab.simulate.engine import SimulatedEngine
from octavo.lab.simulate.step_profile import StepProfile, load_profile
from octavo.lab.workloads.agent import AgentTrace
from octavo.lab.workloads.tokens import token_ids
from octavo.lab.workloads.work_items import WorkItem

BLOCK_SIZE = 16
HOUR = 3600.0
#: By name: seconds for which agents ask to keep their prefixes, and whether there is a disk.
CASES = {"LRU": (0.0, False), "hints": (HOUR, False), "disk": (0.0, True), "hints, disk": (HOUR, True)}


def conversations(trace: AgentTrace) -> list[list[WorkItem]]:
    """The turns of each agent."""
    turns: dict[str | None, list[WorkItem]] = defaultdict(list)
    for item in trace:
        turns[item.session].append(item)
    return list(turns.values())


def simulated(profile: StepProfile, options: EngineConfig, trace: AgentTrace, pause: float) -> tuple[float, float]:
    """The share that is found, and the median seconds to the first token."""
    engine = SimulatedEngine(profile, options)
    agents = conversations(trace)
    upcoming = [(pause * number / len(agents), number, 0) for number in range(len(agents))]
    heapq.heapify(upcoming)
    sent: dict[int, tuple[int, int]] = {}
    firsts, numbers = [], itertools.count()
    while upcoming or engine.has_work:
        while upcoming and (not engine.has_work or upcoming[0][0] <= engine.now):
            at, agent, turn = heapq.heappop(upcoming)
            engine.wait_until(at)
            number = next(numbers)
            sent[number] = agent, turn
            engine.add(number, msgspec.structs.replace(agents[agent][turn], at=at))
        for request in engine.step():
            firsts.append(request.first - request.sent)
            agent, turn = sent.pop(request.number)
            if turn + 1 < len(agents[agent]):
                heapq.heappush(upcoming, (request.last + pause, agent, turn + 1))
    return found(engine.scheduler.counts()), median(firsts)


def measured(model: str, options: dict[str, Any], trace: AgentTrace, pause: float) -> tuple[float, float]:
    """As ``simulated``, on an engine in this process."""
    llm = LLM(model, **options)
    engine = llm.llm_engine
    agents = conversations(trace)
    ids = (0, engine.core.model_config.vocab_size - 1)
    answers: list[list[int]] = [[] for _ in agents]
    start = time.monotonic()
    upcoming = [(pause * number / len(agents), number, 0) for number in range(len(agents))]
    sent: dict[str, tuple[int, int]] = {}
    prompts: dict[int, list[int]] = {}
    firsts = []
    try:
        while upcoming or sent:
            now = time.monotonic() - start
            for entry in [entry for entry in upcoming if entry[0] <= now]:
                upcoming.remove(entry)
                _, agent, turn = entry
                item = agents[agent][turn]
                new = token_ids(item, ids)
                if turn:  # what was said, the true answer, and what is new
                    before = agents[agent][turn - 1]
                    new = [*prompts[agent], *answers[agent], *new[before.input_len + before.output_len :]]
                prompts[agent] = new
                sent[f"{agent}/{turn}"] = agent, turn
                params = SamplingParams(
                    temperature=0, max_tokens=item.output_len, min_tokens=item.output_len, ignore_eos=True
                )
                add(engine, f"{agent}/{turn}", new, params, item)
            if not sent:
                time.sleep(max(0.0, min(upcoming)[0] - (time.monotonic() - start)))
                continue
            for output in engine.step():
                if not output.finished:
                    continue
                agent, turn = sent.pop(output.request_id)
                answers[agent] = list(output.outputs[0].token_ids)
                times = output.metrics
                assert times.first_token_time is not None
                firsts.append(times.first_token_time - times.arrival_time)
                if turn + 1 < len(agents[agent]):
                    upcoming.append((time.monotonic() - start + pause, agent, turn + 1))
        return found(engine.stats()), median(firsts)
    finally:
        engine.core.shutdown()


def add(engine: Any, request_id: str, prompt: list[int], params: SamplingParams, item: WorkItem) -> None:
    """Adds a request with the item's cache hints."""
    options = RequestOptions(cache_hints=cache_hints(item) if item.cache_ttl else None)
    engine.add_request(request_id, prompt, params, options)


def found(stats: Any) -> float:
    """The share of prompt tokens that were found."""
    return float(stats.prefix_hit_tokens / max(1, stats.prefix_queried_tokens))


def median(values: Iterable[float]) -> float:
    """The middle one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def rows(args: argparse.Namespace) -> Iterator[tuple[str, float, float, float | None, float | None]]:
    """(case, simulated share and median first token, measured ones)."""
    profile = load_profile(args.profile)
    for name, (ttl, disk) in CASES.items():
        trace = AgentTrace(agents=args.agents, turns=args.turns, cache_ttl=ttl, seed=args.seed)
        with tempfile.TemporaryDirectory(prefix="tiers-") as folder:
            options: dict[str, Any] = {
                "block_size": BLOCK_SIZE,
                "num_gpu_blocks_override": int(trace.num_blocks(BLOCK_SIZE) * args.memory),
                "max_model_len": min(trace.max_model_len() + 64, profile.max_model_len),
                "cache_hold_share": args.hold_share,
            }
            if disk:
                options |= {"kv_disk": str(Path(folder, "store")), "kv_disk_bytes": args.disk_bytes}
            share, first = simulated(profile, EngineConfig(model="none", **options), trace, args.pause)
            if args.engine is None:
                yield name, share, first, None, None
            else:
                yield name, share, first, *measured(args.engine, options, trace, args.pause)


def main() -> None:
    """Prints a table."""
    defaults = {field.name: field.default for field in dataclasses.fields(AgentTrace)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", metavar="MODEL", help="run the trace on an engine with this model, too")
    parser.add_argument("--profile", default="smollm2-135m-2-cores", help="of the simulated engine")
    parser.add_argument("--agents", type=int, default=defaults["agents"])
    parser.add_argument("--turns", type=int, default=defaults["turns"])
    parser.add_argument("--pause", type=float, default=2.0, help="seconds from an answer to the next turn (2)")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the conversations that the KV cache holds")
    parser.add_argument("--hold-share", type=float, default=0.5, help="cache_hold_share (0.5)")
    parser.add_argument("--disk-bytes", type=int, default=8 << 30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| | found, simulated | first token, median s | found, measured | first token, median s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, share, first, real, real_first in rows(args):
        cells = [f"{share:.1%}", f"{first:.2f}"]
        cells += ["", ""] if real is None or real_first is None else [f"{real:.1%}", f"{real_first:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
