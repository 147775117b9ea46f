"""``octavo bench chaos``: its checker finds every corruption, its monkey hits what it should, and a server passes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import random
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.cli.main import main
from octavo.core.errors import ConfigError
from octavo.lab.bench import chaos_run
from octavo.lab.bench.chaos_answers import Answer, AnswerReader, difference, digest
from octavo.lab.bench.chaos_client import ChaosClient, Checker, Exchange
from octavo.lab.bench.chaos_faults import Fault, Monkey
from octavo.lab.bench.chaos_leftovers import Holdings
from octavo.lab.bench.chaos_pauses import Times, gaps_of, measure, seconds_to_first_token
from octavo.lab.bench.chaos_processes import MARK, marked_processes, shared_memory, unused_shared_memory
from octavo.lab.bench.chaos_workload import KINDS, ChaosRequest, make_requests
from octavo.lab.bench.serve_client import ResponseError
from tests.busy_machine import PATIENCE, eventually

REQUEST = ChaosRequest("chat/0", "completions", {"prompt": "x"})
#: Two choices of three tokens, with the logprobs of each token.
TEXTS, IDS = {0: "abc", 1: "xyz"}, {0: [1, 2, 3], 1: [4, 5, 6]}
USAGE = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}


def events(pieces: dict[int, list[int]] | None = None) -> list[dict[str, Any]]:
    """The chunks of an answer; ``pieces``: for each choice how many tokens each of its chunks has."""
    same = {"id": "cmpl-1", "created": 1, "model": "m", "object": "text_completion"}
    made = []
    for index, sizes in (pieces or {0: [1, 2], 1: [3]}).items():
        at = 0
        for size in sizes:
            tokens = slice(at, at + size)
            at += size
            logprobs = {"tokens": list(TEXTS[index][tokens]), "token_logprobs": [-0.1 * i for i in IDS[index][tokens]]}
            choice = {
                "index": index,
                "text": TEXTS[index][tokens],
                "token_ids": IDS[index][tokens],
                "logprobs": logprobs,
                "finish_reason": "length" if at == 3 else None,
            }
            made.append({**same, "choices": [choice], "usage": None})
    return [*made, {**same, "choices": [], "usage": dict(USAGE)}]


def read(chunks: list[dict[str, Any]], done: bool = True) -> Answer:
    """The answer that a stream adds up to."""
    reader = AnswerReader()
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n" * done
    reader.feed(200, body.encode(), 1.0)
    reader.end(200)
    return reader.answer()


def checked(chunks: list[dict[str, Any]]) -> Exchange:
    """What a checker says of a stream whose truth is ``events()``."""
    exchange = Exchange(REQUEST, 0.0, answer=read(chunks))
    Checker({REQUEST.name: read(events())}).check(exchange)
    return exchange


# --- the checker ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [{0: [3], 1: [1, 1, 1]}, {1: [2, 1], 0: [1, 2]}, {0: [0, 3], 1: [1, 2]}])
def test_an_answer_is_the_same_however_it_was_cut(pieces: dict[int, list[int]]) -> None:
    exchange = checked(events(pieces))
    assert not exchange.failed
    assert exchange.answer is None


def test_counts_of_how_an_answer_was_computed_are_no_part_of_it() -> None:
    chunks = events()
    chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] = 3
    assert not checked(chunks).failed


def _choice(number: int) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    return lambda chunks: chunks[number]["choices"][0]


def _another_token(chunks: list[dict[str, Any]]) -> None:
    _choice(1)(chunks)["token_ids"][1] = 9


def _another_bit(chunks: list[dict[str, Any]]) -> None:
    logprobs = _choice(1)(chunks)["logprobs"]["token_logprobs"]
    logprobs[0] = math.nextafter(logprobs[0], 0)


def _another_text(chunks: list[dict[str, Any]]) -> None:
    _choice(2)(chunks)["text"] = "xyZ"


def _another_reason(chunks: list[dict[str, Any]]) -> None:
    _choice(2)(chunks)["finish_reason"] = "stop"


def _another_usage(chunks: list[dict[str, Any]]) -> None:
    chunks[-1]["usage"]["completion_tokens"] = 7


def _a_chunk_twice(chunks: list[dict[str, Any]]) -> None:
    chunks.insert(0, copy.deepcopy(chunks[0]))


def _a_chunk_left_out(chunks: list[dict[str, Any]]) -> None:
    del chunks[0]


def _a_reason_twice(chunks: list[dict[str, Any]]) -> None:
    _choice(0)(chunks)["finish_reason"] = "length"


def _a_choice_left_out(chunks: list[dict[str, Any]]) -> None:
    del chunks[2]


def _a_choice_too_many(chunks: list[dict[str, Any]]) -> None:
    chunks.insert(0, copy.deepcopy(chunks[2]))
    _choice(0)(chunks)["index"] = 2


def _chunks_in_another_order(chunks: list[dict[str, Any]]) -> None:
    chunks[0], chunks[1] = chunks[1], chunks[0]


CORRUPTIONS = [
    (_another_token, "answer.choices.0.token_ids[2]: 9, not 3"),
    (_another_bit, "answer.choices.0.logprobs.token_logprobs[1]"),
    (_another_text, "answer.choices.1.text from character 2: 'Z', not 'z'"),
    (_another_reason, "answer.choices.1.finish_reason"),
    (_another_usage, "answer.usage.completion_tokens: 7, not 6"),
    (_a_chunk_twice, "answer.choices.0.logprobs"),
    (_a_chunk_left_out, "answer.choices.0.logprobs"),
    (_a_reason_twice, "answer.choices.0.finish_reason"),
    (_a_choice_left_out, "answer.choices.1: missing"),
    (_a_choice_too_many, "answer.choices.2: not in the truth"),
    (_chunks_in_another_order, "answer.choices.0.logprobs"),
]


@pytest.mark.parametrize(("corrupt", "where"), CORRUPTIONS)
def test_a_corrupted_answer_is_found_and_kept(corrupt: Callable[[list[dict[str, Any]]], None], where: str) -> None:
    chunks = events()
    corrupt(chunks)
    exchange = checked(chunks)
    assert exchange.failed
    assert where in (exchange.difference or "")
    assert exchange.answer == read(chunks)


def test_zeros_of_two_signs_are_different_bits() -> None:
    truth, answer = {"x": [0.0]}, {"x": [-0.0]}
    assert digest(truth) != digest(answer)
    assert difference(truth, answer) == "answer.x[0]: -0.0, not 0.0"


@pytest.mark.parametrize("seed", range(20))
def test_a_random_change_is_found(seed: int) -> None:
    """Any one value anywhere in the stream, changed."""
    chosen = random.Random(seed)
    chunks = events()
    leaves: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, dict | list):
                collect(item)
            elif item is not None and key not in ("index", "cached_tokens"):
                leaves.append((value, key))

    for chunk in chunks[:-1]:
        collect(chunk["choices"])
    collect(chunks[-1]["usage"])
    container, key = chosen.choice(leaves)
    container[key] = f"{container[key]}!" if isinstance(container[key], str) else container[key] + 1
    assert checked(chunks).failed


def _without_reason(chunks: list[dict[str, Any]]) -> None:
    _choice(2)(chunks)["finish_reason"] = None


def _without_usage(chunks: list[dict[str, Any]]) -> None:
    chunks[-1]["usage"] = None


def _two_usages(chunks: list[dict[str, Any]]) -> None:
    chunks.append(chunks[-1])


def _of_another_answer(chunks: list[dict[str, Any]]) -> None:
    chunks[1]["id"] = "cmpl-2"


def _with_an_error(chunks: list[dict[str, Any]]) -> None:
    chunks[1] = {"error": {"message": "the engine has died", "code": "engine_dead"}}


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (_without_reason, "choice 1 ended without a finish reason"),
        (_without_usage, "without usage"),
        (_two_usages, "a second usage"),
        (_of_another_answer, "a chunk of another answer"),
        (_with_an_error, "engine_dead"),
    ],
)
def test_a_broken_stream_is_an_error(break_it: Callable[[list[dict[str, Any]]], None], words: str) -> None:
    chunks = events()
    break_it(chunks)
    with pytest.raises(ResponseError, match=words):
        read(chunks)


def test_a_stream_without_an_end_or_with_more_after_it_is_an_error() -> None:
    with pytest.raises(ResponseError, match=r"without \[DONE\]"):
        read(events(), done=False)
    reader = AnswerReader()
    with pytest.raises(ResponseError, match="after the end"):
        reader.feed(200, b'data: [DONE]\n\ndata: {"choices": []}\n\n', 1.0)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"HTTP/1.1 500 x\r\nContent-Length: 4\r\n\r\noops", "http 500: oops"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ndata: {", "CutOffError"),
        (b"", "CutOffError"),
        (None, "nothing came for 0.2 s"),
    ],
)
def test_a_client_notes_what_went_wrong(response: bytes | None, error: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if response is None:
            await asyncio.sleep(1)
        else:
            writer.write(response)
        writer.close()

    async def ask() -> Exchange:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await ChaosClient(f"http://127.0.0.1:{port}", 0.2).ask(REQUEST)

    exchange = asyncio.run(ask())
    assert exchange.failed
    assert error in (exchange.error or "")


# --- the workload ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [256, 8192])
def test_every_request_has_one_answer_and_fits(length: int) -> None:
    requests = make_requests(KINDS, length, (2, 99))
    assert {request.kind for request in requests} == set(KINDS)
    assert len({request.body["seed"] for request in requests}) == len(requests)
    assert requests == make_requests(KINDS, length, (2, 99))
    long = [request.body for request in requests if request.kind == "long"]
    assert all(len(body["prompt"]) + body["max_tokens"] < length for body in long)
    assert len(long[0]["prompt"]) == min(3000, length - length // 5 - 1)
    assert requests[0].salted("a") == {**requests[0].body, "cache_salt": "a"}


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match="no kind of request 'poems'"):
        make_requests(["chat", "poems"], 256, (2, 99))
    with pytest.raises(ConfigError, match="at least 200 tokens, not 128"):
        make_requests(KINDS, 128, (2, 99))


# --- pauses ---------------------------------------------------------------------------------------------------------


def fault(at: float, kind: str = "kill", until: float | None = None) -> Fault:
    return Fault(kind, "core", 1, at, at if until is None else until)


def test_a_gap_belongs_to_the_first_fault_in_it_or_to_the_last_before_it() -> None:
    chunks = [0.0, 1.0, 1.5, 4.5, 5.0, 7.0]
    assert gaps_of([fault(0.5)], chunks) == {0: (3.0, True)}
    assert gaps_of([fault(0.5), fault(2.0)], chunks) == {0: (1.0, True), 1: (3.0, True)}
    assert gaps_of([fault(2.0), fault(3.0)], chunks) == {0: (3.0, False), 1: (2.0, True)}
    assert gaps_of([fault(8.0)], chunks) == {}
    assert gaps_of([fault(2.0)], [1.0]) == {}
    assert gaps_of([fault(0.0)], [100.0, 101.0]) == {}
    assert gaps_of([fault(0.0, until=99.0)], [100.0, 101.0]) == {0: (1.0, True)}


def test_the_first_token_is_that_of_a_stream_that_stood() -> None:
    stood, later, other, begun = [0.0, 1.0, 3.0], [0.9, 5.0], [0.0, 0.9, 1.2, 1.5], [2.0, 3.0]
    assert seconds_to_first_token([stood, later, begun], 1.0, 1) == 2.0
    assert seconds_to_first_token([stood, later, other], 1.0, 2) == 4.0
    assert seconds_to_first_token([begun], 1.0, 1) is None


def test_pauses_are_told_by_fault_where_it_came_alone() -> None:
    exchange = Exchange(REQUEST, 0.0, 29.0, array("d", [1.0, 2.0, 5.0, 6.0, 8.0, 20.0]))
    seen = measure([fault(2.5), fault(6.5, "starve", 7.0), fault(9.0), fault(10.0)], [exchange], 1)
    assert seen["kill core"].pauses == Times(1, 3.0, 3.0, 3.0)
    assert seen["kill core"].first_tokens == Times(2, 6.25, 9.925, 10.0)
    assert seen["starve core"].pauses == Times(1, 2.0, 2.0, 2.0)
    assert seen["starve core"].first_tokens is None
    assert seen["all"].pauses is not None and (seen["all"].pauses.count, seen["all"].pauses.worst) == (3, 12.0)
    assert measure([], [exchange], 1) == {}


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A process with children whose command lines are those of a core, a worker and a sandbox."""
    roles = ["octavo.engine.core_process", "octavo.executor.worker_loop", "octavo.process.sandbox_process"]
    children = "\n".join(f"subprocess.Popen(sleep + ['{role}'])" for role in roles)
    sleep = "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']"
    monkeypatch.setenv(MARK, "this test")
    front = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys, time\n{sleep}\n{children}\ntime.sleep(600)"]
    )
    made = psutil.Process(front.pid)
    eventually(lambda: len(made.children()) == len(roles))
    children_made = made.children()
    yield made
    for process in children_made:
        process.kill()
    front.kill()
    front.wait()


def role(process: psutil.Process) -> str:
    return "sandbox" if "sandbox" in process.cmdline()[-1] else process.cmdline()[-1].split(".")[1]


async def _hit(pid: int, kind: str) -> list[Fault]:
    faults: list[Fault] = []
    monkey = Monkey(pid, interval=1, seed=1, hang=0.2, kinds=(kind,), goes_on=lambda since: True, told=faults.append)
    try:
        await asyncio.wait_for(monkey.hit(), 30)
        return faults
    finally:
        monkey.close()


def _has_ended(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE


def test_a_killed_process_is_a_core_or_a_worker(family: psutil.Process) -> None:
    for _ in range(2):
        (fault,) = asyncio.run(_hit(family.pid, "kill"))
        assert fault.role in ("core", "worker")
        victim = psutil.Process(fault.pid)
        eventually(partial(_has_ended, victim))
    assert [role(p) for p in family.children() if not _has_ended(p)] == ["sandbox"]


@pytest.mark.parametrize("kind", ["stop", "pause", pytest.param("starve", marks=pytest.mark.slow)])
def test_what_is_stopped_or_starved_goes_on_in_the_end(kind: str, family: psutil.Process) -> None:
    (fault,) = asyncio.run(_hit(family.pid, kind))
    assert (fault.until > fault.at) == (kind != "stop")
    victim = psutil.Process(fault.pid)
    eventually(lambda: victim.status() == psutil.STATUS_SLEEPING)
    assert victim.nice() == psutil.Process().nice()
    assert not [p for p in psutil.Process().children() if "while True: pass" in p.cmdline()]


def test_most_faults_wait_until_streams_go_on(family: psutil.Process) -> None:
    async def faults(goes_on: bool, seconds: float) -> int:
        told: list[Fault] = []
        many = asyncio.Event()

        def tell(fault: Fault) -> None:
            told.append(fault)
            if len(told) == 5:
                many.set()

        monkey = Monkey(
            family.pid, interval=0.01, seed=1, hang=0, kinds=("pause",), goes_on=lambda since: goes_on, told=tell
        )
        running = asyncio.ensure_future(monkey.run())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(many.wait(), seconds)
        running.cancel()
        monkey.close()
        return len(told)

    assert asyncio.run(faults(False, 0.5)) < 5 <= asyncio.run(faults(True, PATIENCE))


def test_processes_that_are_left_are_found_by_their_mark(family: psutil.Process) -> None:
    expected = {family.pid, *(process.pid for process in family.children())}
    children = family.children()
    assert {process.pid for process in marked_processes("this test")} == expected
    family.kill()
    family.wait()
    assert {process.pid for process in marked_processes("this test")} == {process.pid for process in children}


def test_shared_memory_is_left_when_nobody_uses_it() -> None:
    path = Path("/dev/shm") / f"octavo-test-{time.time_ns()}"
    before = shared_memory()
    with path.open("wb") as stream:
        stream.write(b"x")
        stream.flush()
        assert path.name in shared_memory() - before
        assert unused_shared_memory({path.name}) == set()
    assert unused_shared_memory({path.name}) == {path.name}
    path.unlink()
    assert unused_shared_memory({path.name}) == set()


def test_what_is_more_than_before_is_told() -> None:
    before = Holdings(Counter(core=1), Counter(socket=3, pipe=2), frozenset({"octavo-a"}))
    same = Holdings(Counter(core=1, sandbox=1), Counter(socket=2, pipe=4), frozenset({"octavo-b"}))
    assert same.beyond(before) == []
    more = Holdings(Counter(core=2), Counter(socket=4, pipe=2), frozenset({"octavo-a", "octavo-b"}))
    assert more.beyond(before) == [
        "processes (core): 2, before 1",
        "descriptors of the front end (socket): 4, before 3",
        "files in the temporary folder: 2, before 1; new: octavo-b",
    ]


# --- a server -------------------------------------------------------------------------------------------------------

SMALL = ("--num-gpu-blocks-override", "200", "--num-threads", "1", "--max-num-seqs", "32")


def chaos(capsys: pytest.CaptureFixture[str], model: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report as JSON, and what was printed."""
    record = model.parent / f"chaos-{time.time_ns()}.json"
    code = main(["bench", "chaos", str(model), *SMALL, *flags, "--json", str(record)])
    return code, json.loads(record.read_text()), capsys.readouterr().out


def test_answers_of_an_undisturbed_server_are_the_truth(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The first requests of so many clients, which each asks in any case, are of all kinds.
    code, report, printed = chaos(capsys, tiny_model, "--clients", "12", "--duration", "0.5", "--interval", "0")
    assert code == 0, printed
    assert set(report["requests"]) == set(KINDS)
    assert report["leftovers"] == report["failures"] == report["timeline"] == []
    assert "passed" in printed


@pytest.mark.slow
def test_answers_are_the_truth_while_cores_are_killed(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, printed = chaos(
        capsys, tiny_model, "--clients", "8", "--duration", "10", "--interval", "1.5", "--faults", "kill", "--seed", "1"
    )
    assert code == 0, printed
    assert report["faults"]["kill core"]["faults"] == len(report["timeline"]) >= 2
    assert report["faults"]["kill core"]["first_tokens"]["median"] > 0


LONG = ("--clients", "64", "--duration", "120", "--interval", "8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="one core"),
        pytest.param(("--standby-engines", "1"), id="standby"),
        pytest.param(("--tensor-parallel-size", "2"), id="tp"),
        pytest.param(("--pipeline-parallel-size", "2"), id="pp"),
        pytest.param(("--data-parallel-size", "2"), id="dp"),
        pytest.param(("--swap-space", "0.1", "--preemption-mode", "swap"), id="swap"),
    ],
)
def test_answers_are_the_truth_under_every_fault(
    flags: tuple[str, ...], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, printed = chaos(capsys, tiny_model, *LONG, *flags)
    assert code == 0, printed
    assert len(report["timeline"]) >= 4


@pytest.mark.slow
def test_answers_are_the_truth_on_two_machines_of_ray(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        flags = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--faults", "kill,stop,pause")
        code, report, printed = chaos(capsys, tiny_model, *LONG, *flags)
    finally:
        cluster.shutdown()
    assert code == 0, printed
    assert any(fault["name"].endswith("worker") for fault in report["timeline"])


def test_a_corrupted_answer_fails_the_run_and_is_printed_with_its_truth(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt(exchanges: list[Exchange]) -> Checker:
        truths = {e.request.name: copy.deepcopy(e.answer or {}) for e in exchanges}
        truths["chat/0"]["choices"]["0"]["token_ids"][5] += 1
        return Checker(truths)

    monkeypatch.setattr(chaos_run, "_truths", corrupt)
    code, report, printed = chaos(
        capsys, tiny_model, "--clients", "4", "--duration", "0.3", "--interval", "0", "--kinds", "chat"
    )
    assert code == 1
    assert report["requests"]["chat"]["different"] > 0
    assert report["requests"]["chat"]["errors"] == 0
    failure = report["failures"][0]
    assert failure["request"] == "chat/0"
    assert failure["truth"] != failure["answer"]
    for words in ("FAILED", "chat/0, sent after", "token_ids[5]", "request: {", "truth:   {", "answer:  {"):
        assert words in printed
