"""Workloads: the same each time, made lazily, one property independent of another, shared prompts really shared."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from octavo.cli.flags import add_engine_flags
from octavo.cli.parsing import Arguments, Parser
from octavo.core.errors import ConfigError
from octavo.lab.workloads.arrivals import Day, Gamma
from octavo.lab.workloads.flags import add_seed_flag, add_workload_flags, make_workload
from octavo.lab.workloads.lengths import Constant, Geometric, Poisson, Uniform, chat_inputs, chat_outputs
from octavo.lab.workloads.sharing import (
    Conversations,
    RequestClass,
    SystemPrompts,
    User,
    parse_class,
    parse_system_prompts,
    parse_users,
)
from octavo.lab.workloads.tokens import WORDS, output_ids, text, token_ids
from octavo.lab.workloads.traces import read_trace
from octavo.lab.workloads.work_items import WorkItem
from octavo.lab.workloads.workload import Workload, merge

FULL = Workload(
    requests=2000,
    arrivals=Gamma(20, 0.5),
    inputs=chat_inputs(),
    outputs=chat_outputs(),
    shared_prefix_len=8,
    system_prompts=SystemPrompts(5, 100),
    conversations=Conversations(Geometric(4), think=5.0, max_context=6000),
    users=parse_users("zipf:10,1"),
    classes=(RequestClass(3, 0.5, 0.05), RequestClass(1, priority=2)),
    seed=7,
)


def digest(items: list[WorkItem]) -> str:
    return hashlib.sha256(msgspec.json.encode(items)).hexdigest()


def test_the_same_to_the_last_digit_each_time_and_in_another_process() -> None:
    code = f"import runpy; m = runpy.run_path({__file__!r}); print(m['digest'](list(m['FULL'])))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert digest(list(FULL)) == digest(list(FULL)) == other.stdout.strip()
    assert digest(list(FULL)) != digest(list(dataclasses.replace(FULL, seed=8)))


def test_one_distribution_changes_nothing_else() -> None:
    plain = dataclasses.replace(FULL, conversations=None)
    at, inputs, outputs, users, kinds = columns(plain)
    assert columns(dataclasses.replace(plain, arrivals=Day(1, 9)))[1:] == [inputs, outputs, users, kinds]
    other = columns(dataclasses.replace(plain, inputs=Uniform(500, 600)))
    assert [other[0], *other[2:]] == [at, outputs, users, kinds] and other[1] != inputs
    assert columns(dataclasses.replace(plain, users=(), outputs=Poisson(9)))[:2] == [at, inputs]
    assert columns(dataclasses.replace(plain, requests=50)) == [column[:50] for column in columns(plain)]


def columns(load: Workload) -> list[list[object]]:
    found = [(i.at, i.input_len, i.output_len, i.user, (i.ttft_target, i.tpot_target, i.priority)) for i in load]
    return [list(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("talk", [None, Conversations(Geometric(4), think=2.0)], ids=["single", "conversations"])
def test_requests_are_made_as_they_are_asked_for(talk: Conversations | None) -> None:
    load = dataclasses.replace(FULL, requests=10**9, conversations=talk)
    items = iter(load)
    assert len(list(itertools.islice(items, 2000))) == 2000  # conversations in progress have become as many as they do
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in itertools.islice(items, 6000):
        pass
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < 300_000, f"{held} bytes after 6000 requests"


def test_each_iteration_gives_so_many_in_order_of_arrival() -> None:
    items = list(FULL)
    assert len(items) == len(FULL) == 2000
    assert all(a.at <= b.at for a, b in itertools.pairwise(items))
    assert len(list(dataclasses.replace(FULL, requests=3))) == 3
    assert {item.at for item in Workload(requests=4)} == {0.0}


def test_turns_begin_with_all_that_was_said() -> None:
    sessions = defaultdict(list)
    for item in FULL:
        sessions[item.session].append(item)
    assert np.mean([len(turns) for turns in sessions.values()]) == pytest.approx(4, rel=0.15)
    for turns in itertools.islice((turns for turns in sessions.values() if len(turns) > 2), 12):
        for one, two in itertools.pairwise(turns):
            said = token_ids(one) + output_ids(one)
            assert len(said) == one.input_len + one.output_len
            assert token_ids(two)[: len(said)] == said
            assert two.input_len > len(said) and two.input_len == len(token_ids(two))
            assert text(two).startswith(text(one) + " ") and len(text(two).split()) == two.input_len
            # Who, how soon and after which system prompt belongs to the conversation.
            of = [(i.user, i.weight, i.ttft_target, i.priority, i.prefix[:2]) for i in (one, two)]
            assert of[0] == of[1]
    assert all(turn.input_len + turn.output_len <= 6000 for turns in sessions.values() for turn in turns[1:])
    gaps = [b.at - a.at for turns in sessions.values() for a, b in itertools.pairwise(turns)]
    assert np.mean(gaps) == pytest.approx(5, rel=0.1)


def test_prompts_share_their_prefixes_and_nothing_else() -> None:
    load = Workload(requests=300, inputs=Uniform(5, 40), shared_prefix_len=4, system_prompts=SystemPrompts(3, 20, 1.0))
    items = list(load)
    ids = [token_ids(item) for item in items]
    assert [len(prompt) for prompt in ids] == [item.input_len for item in items]
    assert len({tuple(prompt[:4]) for prompt in ids}) == 1
    groups = Counter(tuple(prompt[4:24]) for prompt in ids)
    assert sorted(groups.values()) == pytest.approx([55, 82, 164], abs=25)
    assert len({tuple(prompt[24:34]) for prompt in ids if len(prompt) >= 34}) == sum(len(p) >= 34 for p in ids)
    lengths = np.array([item.input_len for item in items])
    assert lengths.min() == 25 and lengths.max() == 60
    assert len({text(item) for item in items}) == 300
    # Another seed has other texts.
    assert not {tuple(i[:24]) for i in ids} & {tuple(token_ids(i)[:24]) for i in dataclasses.replace(load, seed=1)}


def test_token_ids_are_evenly_spread_over_their_range() -> None:
    item = WorkItem(at=0, input_len=40_000, output_len=1, stream="x")
    ids = np.array(token_ids(item, (5, 14)))
    assert np.bincount(ids, minlength=15)[5:] / 40_000 == pytest.approx(0.1, abs=0.01)
    assert ids.min() == 5 and ids.max() == 14
    # The beginning does not depend on the length, and the machine does not change it.
    assert token_ids(WorkItem(at=0, input_len=4, output_len=1, stream="x")) == token_ids(item)[:4]
    drawn = hashlib.shake_128(b"0/0").digest(16)
    expected = [1000 + (int.from_bytes(drawn[i : i + 4], "little") * 7001 >> 32) for i in range(0, 16, 4)]
    assert token_ids(WorkItem(at=0, input_len=4, output_len=1, stream="0/0")) == expected == [5980, 3539, 1322, 7272]
    assert set(text(item).split()[1:]) == set(WORDS)


def test_users_and_classes_have_their_shares() -> None:
    load = dataclasses.replace(
        FULL,
        requests=8000,
        conversations=None,
        users=parse_users("greedy=9,modest=1:4"),
        classes=(parse_class("1,ttft:500,tpot:50,priority:-1"), parse_class("3")),
    )
    items = list(load)
    modest = [item for item in items if item.user == "modest"]
    assert len(modest) / 8000 == pytest.approx(0.1, abs=0.015) and {item.weight for item in modest} == {4.0}
    urgent = [item for item in items if item.ttft_target == 0.5]
    assert len(urgent) / 8000 == pytest.approx(0.25, abs=0.02)
    assert {(item.tpot_target, item.priority) for item in urgent} == {(0.05, -1)}
    assert {(i.ttft_target, i.tpot_target, i.priority) for i in items if i.ttft_target is None} == {(None, None, 0)}


def test_a_trace_has_its_times_or_others(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        '{"timestamp": 5, "input_len": 30, "output_len": 2}',
        '{"timestamp": 3, "prompt": [7, 8], "output_len": 1}',
    ]
    path.write_text("\n".join([*lines, '{"timestamp": 6, "prompt": "so it is", "output_len": 4}']))
    load = Workload(requests=9, trace=read_trace(path), users=parse_users("1"), system_prompts=SystemPrompts(1, 10))
    first, second, third = load
    assert len(load) == 3 and [item.at for item in load] == [0, 2, 3]
    assert token_ids(first) == [7, 8] and (first.input_len, first.prefix, first.user) == (2, (), "user-0")
    assert second.input_len == 40 and len(token_ids(second)) == 40
    assert text(third) == "so it is" and third.input_len == 0
    with pytest.raises(ConfigError, match="is a text, and token ids are needed"):
        token_ids(third)
    with pytest.raises(ConfigError, match="holds token ids, and a text is needed"):
        text(first)
    assert [item.at for item in dataclasses.replace(load, arrivals=Gamma(4, float("inf")))] == [0, 0.25, 0.5]
    with pytest.raises(ConfigError, match="leave out conversations"):
        dataclasses.replace(load, conversations=FULL.conversations)


def test_merged_workloads_keep_order_and_share_system_prompts() -> None:
    system = SystemPrompts(1, 16)
    greedy = Workload(requests=90, arrivals=Gamma(9), users=(User("greedy"),), system_prompts=system, name="greedy")
    modest = dataclasses.replace(greedy, requests=10, arrivals=Gamma(1), users=(User("modest"),), name="modest")
    items = list(merge(greedy, modest))
    assert Counter(item.user for item in items) == {"greedy": 90, "modest": 10}
    assert all(a.at <= b.at for a, b in itertools.pairwise(items))
    ids = [token_ids(item) for item in items]
    assert len({tuple(prompt[:16]) for prompt in ids}) == 1 and len({tuple(prompt) for prompt in ids}) == 100


def read(*words: str) -> Workload:
    parser = Parser()
    add_workload_flags(parser)
    add_seed_flag(parser)
    arguments = parser.read(words)
    return make_workload(arguments, arguments.seed)


def test_flags_describe_a_workload() -> None:
    assert read() == Workload(requests=100)
    words = "--rate 20 --burstiness 0.5 --requests 2000 --input-len chat --output-len chat --shared-prefix-len 8"
    shared = "--system-prompts 5,100 --turns geometric:4 --think-time 5 --max-context 6000 --users zipf:10,1"
    classes = "--request-class 3,ttft:500,tpot:50 --request-class 1,priority:2 --seed 7"
    assert digest(list(read(*f"{words} {shared} {classes}".split()))) == digest(list(FULL))


def test_flags_stand_beside_those_of_the_engine() -> None:
    parser = Parser()
    add_engine_flags(parser)
    add_workload_flags(parser)
    arguments: Arguments = parser.read(["--seed", "4", "--requests", "5"])
    assert make_workload(arguments, 4) == Workload(requests=5, seed=4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--requests 0", "--num-requests must be at least 1"),
        ("--rate -1", "--request-rate must be above 0"),
        ("--system-prompts 3", "--system-prompts is COUNT,LENGTH"),
        ("--system-prompts 3,0", "0 is not from 1"),
        ("--system-prompts 1.5,9", "1.5 is not a whole number"),
        ("--users 0", "COUNT must be from 1"),
        ("--users a=1,a=2", "names a user twice"),
        ("--users a=x", "NAME=SHARE"),
        ("--users a=1:0", "a weight must be above 0"),
        ("--users =1", "a user needs a name"),
        ("--request-class 0", "a share must be above 0"),
        ("--request-class 1,e2e:5", "--request-class is SHARE"),
        ("--request-class 1,ttft:-5", "a target must be above 0"),
        ("--request-class x", "--request-class is SHARE"),
        ("--turns chat", "a number of turns is"),
        ("--turns 3 --think-time 0", "a think time must be above 0"),
    ],
)
def test_wrong_flags_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*words.split())


def test_the_types_need_neither_torch_nor_numpy() -> None:
    code = "import sys, octavo.lab.workloads.flags; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_texts_of_shares() -> None:
    assert parse_users("2") == (User("user-0"), User("user-1"))
    assert parse_system_prompts("4,300,0.5") == SystemPrompts(4, 300, 0.5)
    assert Workload(requests=1, inputs=Constant(3)).inputs.mean == 3
