"""Agents' traces: equal at each iteration, turns that begin with all that was said, and hints that are passed on."""

from __future__ import annotations

from itertools import pairwise

from octavo.lab.bench.policies import catalogue
from octavo.lab.bench.serve_workload import requests
from octavo.lab.simulate.core_requests import cache_hints, core_request
from octavo.lab.workloads.agent import AgentTrace
from octavo.lab.workloads.tokens import output_ids, token_ids

TRACE = AgentTrace(agents=2, turns=4, system_len=40, task_len=30, cache_ttl=60.0)


def test_each_turn_begins_with_all_that_was_said() -> None:
    items = list(TRACE)
    assert items == list(TRACE) and len(items) == len(TRACE) == 8
    assert [item.at for item in items] == sorted(item.at for item in items)
    first = {token_ids(item)[:40].__repr__() for item in items}
    assert len(first) == 1, "all have the system prompt"
    for session in {item.session for item in items}:
        turns = [item for item in items if item.session == session]
        assert len(turns) == 4
        for before, after in pairwise(turns):
            said = [*token_ids(before), *output_ids(before)]
            assert token_ids(after)[: len(said)] == said and after.input_len > len(said)


def test_hints_end_with_the_shared_prefix_the_task_and_the_prompt() -> None:
    item = list(TRACE)[-1]
    hints = cache_hints(item)
    assert [(mark.num_tokens, mark.ttl) for mark in hints.breakpoints] == [(40, 60.0), (70, 60.0)]
    assert (hints.ttl, hints.key) == (60.0, item.session)
    assert core_request(0, item, token_ids(item), 1).options.cache_hints == hints
    [sent] = requests([item], token_ids)
    assert sent.body == {"prompt_cache_retention": "in_memory", "prompt_cache_key": item.session}
    [plain] = AgentTrace(agents=1, turns=1)
    assert core_request(0, plain, [1], 1).options.cache_hints is None and requests([plain], token_ids)[0].body == {}


def test_the_blocks_of_a_trace_hold_its_conversations() -> None:
    trace = AgentTrace(agents=3, turns=5)
    longest: dict[str | None, int] = {}
    for item in trace:
        longest[item.session] = max(longest.get(item.session, 0), item.input_len + item.output_len)
    own = sum(-(-length // 16) for length in longest.values())
    assert trace.num_blocks(16) == own - 2 * (trace.system_len // 16)
    assert trace.max_model_len() == max(longest.values())


def test_scenarios_differ_in_their_hints_alone() -> None:
    plain, hinted = catalogue.find(["agents"])
    a, b = list(plain.make(float("inf"), 3)), list(hinted.make(float("inf"), 3))
    assert [token_ids(item) for item in a[:20]] == [token_ids(item) for item in b[:20]]
    assert {item.cache_ttl for item in a} == {0.0} and min(item.cache_ttl for item in b) > 0
    assert plain.options == hinted.options
