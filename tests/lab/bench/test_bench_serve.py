"""``octavo bench serve`` against a server of known timings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.main import main
from octavo.lab.bench.serve_client import RequestOutcome
from octavo.lab.bench.serve_http import ProtocolError, ResponseParser
from octavo.lab.bench.serve_report import Goodput, RunSettings, Spread, make_report
from octavo.lab.bench.steady import Machine, Usage
from tests.busy_machine import PATIENCE
from tests.lab.plots.test_report import Page

#: Timeout of requests that get a response; only a hang reaches it.
PATIENT = ("--timeout", "60")


@dataclass
class Behaviour:
    """What the server does with a request: its number in order of arrival, and its body, are given."""

    first: float = 0.02
    gap: float = 0.005
    status: Callable[[int], int] = lambda number: 200
    #: After this many chunks the connection is cut.
    cut_after: int | None = None
    #: Sent in place of the second chunk.
    second: bytes | None = None
    usage: bool = True
    #: The connection is closed after each answer, without a word of it before.
    close_after_answer: bool = False
    #: Nothing is answered until as many requests have been open at once.
    gather: int = 0


@dataclass
class FakeServer:
    """Speaks just enough HTTP to be an OpenAI-compatible server, with a thread and an event loop of its own."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    arrivals: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    #: By request, when its chunks were sent.
    sent: dict[int, list[float]] = field(default_factory=dict)
    connections: int = 0
    open_now: int = 0
    most_open: int = 0
    gathered: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """What was noted of the requests so far; none may be open."""
        for notes in (self.arrivals, self.bodies, self.headers, self.sent):
            notes.clear()
        self.most_open = 0
        self.gathered.clear()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.arrivals.append(time.perf_counter())
                number = len(self.arrivals) - 1
                self.headers.append(head.decode())
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.bodies.append(body)
                self.open_now += 1
                self.most_open = max(self.most_open, self.open_now)
                await self.complete(number, body, b"/chat/" in head, writer)
                self.open_now -= 1
                if self.behaviour.close_after_answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def complete(self, number: int, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        how = self.behaviour
        status = how.status(number)
        if status != 200:
            text = json.dumps({"error": {"message": f"no {status}", "type": "x"}}).encode()
            writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if self.open_now >= how.gather:
            self.gathered.set()
        with contextlib.suppress(TimeoutError):  # those that do not come in so long wait for answers
            await asyncio.wait_for(self.gathered.wait(), 30)
        self.gathered.set()
        start = time.perf_counter()
        count = body["max_tokens"]
        for i in range(count):
            await asyncio.sleep(max(start + how.first + i * how.gap - time.perf_counter(), 0))
            if i == how.cut_after:
                writer.close()
                raise ConnectionError
            choice: dict[str, Any] = {"delta": {"content": " é"}} if chat else {"text": " é"}
            choice["finish_reason"] = "length" if i == count - 1 else None
            event = json.dumps({"choices": [choice]}, ensure_ascii=False).encode()
            self.sent.setdefault(number, []).append(time.perf_counter())
            self.send(writer, how.second if how.second is not None and i == 1 else event, split=i % 2 == 1)
        if how.usage:
            usage = {"prompt_tokens": len(body.get("prompt", "xy")), "completion_tokens": count}
            self.send(writer, json.dumps({"choices": [], "usage": usage}).encode())
        self.send(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def send(writer: asyncio.StreamWriter, event: bytes, split: bool = False) -> None:
        """An event, as one chunk of the body or as two that cut it, perhaps within a character."""
        data = b"data: " + event + b"\n\n"
        for part in (data[:21], data[21:]) if split else (data,):
            if part:
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    listening = threading.Event()
    listener: asyncio.Server

    async def listen() -> None:
        nonlocal listener
        listener = await asyncio.start_server(fake.answer, "127.0.0.1", 0, backlog=512)
        fake.port = listener.sockets[0].getsockname()[1]
        listening.set()

    async def stop() -> None:
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(listen(), loop).result(PATIENCE)
    yield fake
    asyncio.run_coroutine_threadsafe(stop(), loop).result(PATIENCE)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    loop.close()


def bench(server: FakeServer, tmp_path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Runs the command and returns its JSON report."""
    target = tmp_path / "report.json"
    call = ["bench", "serve", "--base-url", server.url, "--model", "m", *words, "--json", str(target)]
    assert main(call) == code
    report: dict[str, Any] = json.loads(target.read_text())
    return report


def test_latencies_are_those_of_the_server(server: FakeServer, tmp_path: Path, tries: Callable[..., None]) -> None:
    tries(lambda: compare_latencies(server, tmp_path))


def compare_latencies(server: FakeServer, tmp_path: Path) -> dict[str, bool]:
    """Measures twelve requests; whether the latencies are those that the server noted itself."""
    server.forget()
    server.behaviour = Behaviour(first=0.1, gap=0.02, gather=4)
    words = ["--concurrency", "4", "--num-requests", "12", "--input-len", "7", "--output-len", "11"]
    report = bench(server, tmp_path, *words, *PATIENT)
    assert (report["completed"], report["rejected"], report["errors"]) == (12, 0, {})
    assert (report["prompt_tokens"], report["output_tokens"]) == (84, 132)
    assert report["ttft_ms"]["p50"] >= 100 and report["e2e_ms"]["p50"] >= 300
    assert report["requests_per_s"] == pytest.approx(12 / report["seconds"], rel=0.01)
    assert report["output_tokens_per_s"] == pytest.approx(132 / report["seconds"], rel=0.01)
    assert server.most_open == 4
    # A machine that is busy delays both sides alike, but for a request now and then.
    sent = 1000 * np.array([server.sent[number] for number in range(12)])
    arrived = 1000 * np.array(server.arrivals)
    # Three rounds of four clients.
    seconds = (sent.max() - arrived.min()) / 1000
    same = {
        "seconds": report["seconds"] == pytest.approx(seconds, rel=0.1),
        "mean tpot": report["tpot_ms"]["mean"] == pytest.approx(20, rel=0.1),
        "mean itl": report["itl_ms"]["mean"] == pytest.approx(20, rel=0.1),
    }
    for name, values in (
        ("ttft", sent[:, 0] - arrived),
        ("tpot", (sent[:, -1] - sent[:, 0]) / 10),
        ("itl", np.diff(sent).ravel()),
        ("e2e", sent[:, -1] - arrived),
    ):
        for share in (50, 90):
            expected = pytest.approx(np.percentile(values, share), rel=0.05, abs=10)
            same[f"{name} p{share}"] = report[f"{name}_ms"][f"p{share}"] == expected
    return same


def test_the_requests_that_are_sent(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_KEY", "secret")
    words = ["--num-requests", "3", "--input-len", "uniform:3,9", "--output-len", "2", "--token-range", "5,9"]
    extra = '{"ignore_eos": null, "top_k": 3}'
    bench(server, tmp_path, *words, "--api-key-env", "BENCH_KEY", "--extra-body", extra)
    for body in server.bodies:
        assert 3 <= len(body["prompt"]) <= 9 and set(body["prompt"]) <= set(range(5, 10))
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("m", 2, 0, 3)
        assert "ignore_eos" not in body
    assert all("authorization: bearer secret" in head.lower() for head in server.headers)


def test_same_seed_same_requests(server: FakeServer, tmp_path: Path) -> None:
    words = ["--num-requests", "4", "--concurrency", "1", "--input-len", "lognormal:20,0.7,50", "--output-len", "1"]
    for seed in ("1", "1", "2"):
        bench(server, tmp_path, *words, "--seed", seed)
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:4] == prompts[4:8] != prompts[8:]
    # The warm-up is not counted and does not change the requests.
    report = bench(server, tmp_path, *words, "--seed", "1", "--warmup", "3")
    assert report["num_requests"] == 4
    assert [body["prompt"] for body in server.bodies[15:]] == prompts[:4]


def test_a_disturbed_run_is_marked_and_repeated_with_other_prompts_if_asked(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = iter([1.0, 1.0, 1.2, 1.0, 1.0, 1.0])  # of the reference: before and after the first run, and so on
    monkeypatch.setattr(Machine, "reference", lambda self: next(paces))
    monkeypatch.setattr(Machine, "usage", lambda self: Usage(0.0, 0, 0.0, 0.0, 0.0))
    words = ["--num-requests", "2", "--concurrency", "1", "--input-len", "uniform:3,30", "--output-len", "1"]
    report = bench(server, tmp_path, *words, "--repeats", "2", "--again", "1")
    assert [of["attempts"] for of in report["conditions"]] == [1, 2] and report["repeats"] == 2
    assert not any(of["disturbed"] for of in report["conditions"])
    low, high = report["ranges"]["e2e_ms.mean"]
    assert low <= report["e2e_ms"]["mean"] <= high
    first, second, again = (server.bodies[i : i + 2] for i in (0, 2, 4))
    assert [len(body["prompt"]) for body in second] == [len(body["prompt"]) for body in again]
    assert len({tuple(body["prompt"]) for body in first + second + again}) == 6
    paces = iter([1.0, 1.2])
    assert main(["bench", "serve", "--base-url", server.url, "--model", "m", *words]) == 0
    assert len(server.bodies) == 8 and "* seed 0: reference +20.0%" in capsys.readouterr().out


def test_a_scenario_is_sent_at_its_times(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "{name: few, traffic: {arrivals: 'fixed:50', num-requests: 3, input-len: 4, output-len: 2, users: a=1}}"
    )
    report = bench(server, tmp_path, "--scenario", str(file), "--warmup", "2")
    assert (report["completed"], report["arrivals"]) == (3, "scenario few")
    assert all(body["user"] == "a" and len(body["prompt"]) == 4 for body in server.bodies[2:])
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 5
    report = bench(server, tmp_path, "--scenario", str(file), "--concurrency", "1")
    assert report["arrivals"] == "closed loop, 1 clients"


def test_chat_speaks_text(server: FakeServer, tmp_path: Path) -> None:
    words = ["--endpoint", "chat", "--num-requests", "2", "--input-len", "6", "--output-len", "3"]
    report = bench(server, tmp_path, *words)
    assert report["completed"] == 2 and report["output_tokens"] == 6
    for body in server.bodies:
        assert len(body["messages"][0]["content"].split()) == 6


def test_open_loop_does_not_wait_for_answers(server: FakeServer, tmp_path: Path, tries: Callable[..., None]) -> None:
    tries(lambda: send_in_open_loop(server, tmp_path))


def send_in_open_loop(server: FakeServer, tmp_path: Path) -> dict[str, bool]:
    """Sends twenty requests to a server that answers none before it has them all; whether their times were kept."""
    server.forget()
    server.behaviour = Behaviour(gather=20)
    words = ["--request-rate", "50", "--arrivals", "fixed", "--num-requests", "20", "--output-len", "2"]
    report = bench(server, tmp_path, *words, *PATIENT)
    assert report["arrivals"] == "fixed, 50/s"
    assert (report["completed"], report["errors"]) == (20, {})
    assert server.most_open == 20
    mean, delay = np.diff(server.arrivals).mean(), report["send_delay_max_ms"]
    return {
        f"arrivals are 0.02 s apart, not {mean}": mean == pytest.approx(0.02, rel=0.1),
        f"no request is sent 200 ms late, not {delay}": delay < 200,
    }


def test_a_trace_is_replayed_at_its_times(server: FakeServer, tmp_path: Path, tries: Callable[..., None]) -> None:
    times = [100.0, 100.3, 100.35, 100.8]
    lines = [{"timestamp": t, "prompt": f"number {t}", "output_len": 2} for t in times]
    lines[2] = {"timestamp": times[2], "input_len": 5, "output_len": 3}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in reversed(lines)) + "\n\n")

    def replay() -> dict[str, bool]:
        server.forget()
        report = bench(server, tmp_path, "--trace", str(trace))
        assert report["completed"] == 4 and report["output_tokens"] == 9
        assert server.bodies[0]["prompt"] == "number 100.0" and len(server.bodies[2]["prompt"]) == 5
        sent = np.subtract(server.arrivals, server.arrivals[0])
        return {f"sent at {sent}": bool(sent == pytest.approx(np.subtract(times, 100), abs=0.05))}

    tries(replay)


def test_errors_are_counted_by_kind_and_429_apart(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour = Behaviour(status=lambda number: {0: 429, 1: 429, 2: 500}.get(number, 200))
    words = ["--concurrency", "1", "--num-requests", "6", "--output-len", "2"]
    report = bench(server, tmp_path, *words)
    assert (report["completed"], report["rejected"], report["errors"]) == (3, 2, {"http 500": 1})
    assert "no 500" in report["error_texts"]["http 500"]


@pytest.mark.parametrize(
    ("behaviour", "kind", "timeout"),
    [
        (Behaviour(cut_after=2), "cut off", PATIENT),
        (Behaviour(second=b'{"error": {"message": "it broke"}}'), "error in stream", PATIENT),
        (Behaviour(second=b'{"choices": 3}'), "bad event", PATIENT),
        (Behaviour(second=b"\xff\xfe"), "bad event", PATIENT),
        (Behaviour(first=1000.0), "timeout", ("--timeout", "0.3")),
    ],
    ids=["cut", "error", "not a chunk", "not text", "silent"],
)
def test_a_broken_answer_is_an_error(
    server: FakeServer, tmp_path: Path, behaviour: Behaviour, kind: str, timeout: tuple[str, str]
) -> None:
    server.behaviour = behaviour
    report = bench(server, tmp_path, "--num-requests", "2", "--output-len", "4", *timeout, code=1)
    assert (report["completed"], report["errors"]) == (0, {kind: 2})
    assert report["ttft_ms"] is None


def test_connections_are_used_again_and_replaced_when_the_server_closed_them(
    server: FakeServer, tmp_path: Path
) -> None:
    words = ["--concurrency", "1", "--num-requests", "6", "--output-len", "2"]
    assert bench(server, tmp_path, *words)["completed"] == 6
    assert server.connections == 1
    server.behaviour = Behaviour(close_after_answer=True)
    assert bench(server, tmp_path, *words)["completed"] == 6
    assert server.connections == 7


def test_without_a_server_the_run_ends_before_it_begins_and_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # An open loop of hours: each request would fail at its time.
    words = ["bench", "serve", "--base-url", "http://127.0.0.1:9", "--model", "m", "--request-rate", "0.01"]
    assert main(words) == 2
    said = capsys.readouterr()
    assert "there is no server at http://127.0.0.1:9 (" in said.err and "octavo serve MODEL" in said.err
    assert said.out == ""


def test_chunks_are_counted_where_usage_is_missing(server: FakeServer, tmp_path: Path) -> None:
    server.behaviour = Behaviour(usage=False)
    report = bench(server, tmp_path, "--num-requests", "2", "--output-len", "5")
    assert (report["completed"], report["without_usage"], report["output_tokens"]) == (2, 2, 10)


@pytest.mark.parametrize(("words", "count"), [([], 40), (["--thorough"], 100), (["--num-requests", "3"], 3)])
def test_a_first_look_is_short(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], count: int
) -> None:
    assert bench(server, tmp_path, *words, "--output-len", "1")["completed"] == count
    assert f"{count} requests of 8 clients" in capsys.readouterr().err


def test_a_table_and_a_plot(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    words = ["--num-requests", "4", "--output-len", "3", "--goodput", "ttft:5000", "--plot", str(picture)]
    assert main(["bench", "serve", "--base-url", server.url, "--model", "m", *words]) == 0
    shown = capsys.readouterr().out
    assert "completed 4" in shown and "TTFT" in shown and "100.0%" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_report_has_the_figures_of_the_json(server: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["--num-requests", "4", "--output-len", "3", "--goodput", "ttft:5000", "--report", str(tmp_path / "r.html")]
    found, shown = bench(server, tmp_path, *words), Page((tmp_path / "r.html").read_text("utf-8"))
    assert shown.external() == [] and [tag for tag, _ in shown.tags].count("svg") == 1
    latencies, figures, options = shown.tables
    for name, *values in latencies[1:]:
        assert [float(value) for value in values] == [found[f"{name}_ms"][part] for part in latencies[0][1:]]
    shown_figures = {name: float(value) for name, value in figures[1:]}
    for name in ("completed", "seconds", "output_tokens_per_s", "goodput_share"):
        assert shown_figures[name] == found[name]
    assert shown_figures["goodput limit of ttft, ms"] == 5000 and ["num_requests", "4"] in options
    assert "octavo bench serve" in shown.text


def outcome(sent: float, first: float, gap: float, count: int, **others: Any) -> RequestOutcome:
    found = RequestOutcome(due=sent, sent=sent, prompt_tokens=10, output_tokens=count, has_usage=True, **others)
    found.chunks.extend(sent + first + gap * i for i in range(count))
    found.ended = found.chunks[-1] if count else sent
    return found


def test_figures_of_known_outcomes() -> None:
    outcomes = [outcome(i, first=0.1 * (i + 1), gap=0.01 * (i + 1), count=5) for i in range(10)]
    outcomes.append(outcome(3.0, 0, 0, 0, error="http 429"))
    report = make_report(RunSettings("u", "m", "chat", "x", 0), outcomes, 1.0, Goodput.parse("ttft:450,tpot:35"))
    first = np.arange(1, 11) * 100.0
    assert report.ttft_ms is not None and report.e2e_ms is not None and report.itl_ms is not None
    assert report.ttft_ms.p90 == pytest.approx(np.percentile(first, 90))
    assert report.ttft_ms.p99 == pytest.approx(np.percentile(first, 99))
    assert report.e2e_ms.mean == pytest.approx((first + 4 * first / 10).mean())
    assert report.itl_ms.max == pytest.approx(100)
    # The last was sent at 9 s and took 1.4 s.
    assert report.seconds == pytest.approx(10.4)
    assert report.output_tokens_per_s == pytest.approx(50 / 10.4, rel=1e-3)
    # ttft keeps 4 of them within the limit, tpot 3.
    assert report.goodput_requests_per_s == pytest.approx(3 / 10.4, rel=1e-3)
    assert report.goodput_share == pytest.approx(3 / 11, rel=1e-3)
    assert report.client_cpu_share == pytest.approx(1 / 10.4, rel=1e-3)
    assert (report.completed, report.rejected, report.errors) == (10, 1, {})


def test_one_value_is_every_percentile() -> None:
    assert Spread.of([0.25]) == Spread(250, 250, 250, 250, 250)
    assert Spread.of([]) is None


def test_a_request_has_limits_of_its_own() -> None:
    outcomes = [outcome(0, 0.1, 0.01, 3, limits={"ttft": limit}) for limit in (0.05, 0.2)]
    report = make_report(RunSettings("u", "m", "chat", "x", 0), outcomes, 1.0, None)
    assert report.goodput_share == 0.5 and report.goodput_limits_ms == {}


def test_users_classes_and_turns_are_sent(server: FakeServer, tmp_path: Path) -> None:
    words = ["--concurrency", "1", "--num-requests", "6", "--input-len", "5", "--output-len", "2", "--turns", "3"]
    shared = ["--users", "greedy=1", "--request-class", "1,ttft:60000,priority:4", "--system-prompts", "1,9"]
    report = bench(server, tmp_path, *words, *shared)
    assert report["goodput_share"] == 1
    assert all((body["user"], body["priority"]) == ("greedy", 4) for body in server.bodies)
    assert not any("ttft_target" in body for body in server.bodies)
    prompts = sorted((body["prompt"] for body in server.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [14, 14, 21, 21, 28, 28]
    assert len({tuple(prompt[:9]) for prompt in prompts}) == 1
    assert {tuple(prompt[:21]) for prompt in prompts[4:]} == {tuple(prompt) for prompt in prompts[2:4]}


def test_targets_are_sent_where_asked_for(server: FakeServer, tmp_path: Path) -> None:
    words = ["--num-requests", "2", "--output-len", "1", "--request-class", "1,ttft:60000", "--send-targets"]
    bench(server, tmp_path, *words)
    assert [(body["ttft_target"], "tpot_target" in body) for body in server.bodies] == [(60.0, False)] * 2


def test_each_request_takes_one_of_the_adapters(server: FakeServer, tmp_path: Path) -> None:
    words = ["--num-requests", "30", "--concurrency", "1", "--input-len", "3", "--output-len", "1", "--warmup", "2"]
    taken = []
    for skew in ("1.5", "1.5", "0"):
        server.bodies.clear()
        bench(server, tmp_path, *words, "--lora-names", "a,b, c", "--lora-skew", skew)
        taken.append([body["model"] for body in server.bodies])
    assert taken[0] == taken[1] != taken[2]
    counts = [[models.count(name) for name in "abc"] for models in taken]
    assert sum(counts[0]) == 32 and counts[0][0] > 2 * counts[0][2] > 0
    assert min(counts[2]) > 5


def test_arrivals_with_a_rate_of_their_own(server: FakeServer, tmp_path: Path) -> None:
    words = ["--num-requests", "3", "--output-len", "1", "--arrivals", "steps:1,200,300"]
    assert bench(server, tmp_path, *words)["arrivals"] == "200, 300/s, 1 s each"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --model"),
        (["--model", "m", "--request-rate", "1", "--concurrency", "2"], "not both"),
        (["--model", "m", "--request-rate", "0"], "--request-rate must be above 0"),
        (["--model", "m", "--request-rate", "nan"], "--request-rate must be above 0"),
        (["--model", "m", "--arrivals", "day:1,2", "--concurrency", "2"], "not both"),
        (["--model", "m", "--burstiness", "2"], "--burstiness needs --request-rate"),
        (["--model", "m", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["--model", "m", "--input-len", "0"], "a length is"),
        (["--model", "m", "--input-len", "uniform:9,3"], "a length is"),
        (["--model", "m", "--output-len", "normal:9,3"], "a length is"),
        (["--model", "m", "--output-len", "1.5"], "a length is"),
        (["--model", "m", "--goodput", "itl:3"], "--goodput is"),
        (["--model", "m", "--goodput", "ttft:-3"], "--goodput is"),
        (["--model", "m", "--extra-body", "[1]"], "must be a JSON object"),
        (["--model", "m", "--base-url", "localhost:8000"], "must begin with http"),
        (["--model", "m", "--endpoint", "chat", "--prompt-form", "ids"], "takes text"),
        (["--model", "m", "--api-key-env", "NO_SUCH_NAME"], "no environment variable"),
        (["--model", "m", "--token-range", "9,3"], "a range is"),
        (["--model", "m", "--trace", "/no/such/file"], "cannot read the trace"),
        (["--model", "m", "--plot", "/no/such/folder/x.png"], "--plot"),
        (["--model", "m", "--plot", "x.pdf"], ".png or .svg"),
        (["--model", "m", "--report", "/no/such/folder/x.html"], "--report"),
        (["--model", "m", "--lora-names", "a", "--lora-skew", "-1"], "--lora-skew must be from 0"),
        (["--model", "m", "word"], "unexpected argument"),
    ],
)
def test_wrong_calls_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == 2
    assert message in capsys.readouterr().err


@given(st.lists(st.binary(max_size=40), max_size=6), st.data(), st.sampled_from(["chunked", "length", "close"]))
def test_a_response_is_parsed_however_it_is_split(parts: list[bytes], data: st.DataObject, kind: str) -> None:
    body = b"".join(parts)
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX: y\r\n"
    if kind == "chunked":
        chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts if part)
        sent = head + b"Transfer-Encoding: Chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    elif kind == "length":
        sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        sent = head + b"Connection: close\r\n\r\n" + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    response = ResponseParser()
    read = b""
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        if not response.complete:
            read += response.feed(sent[start:end])
    assert (response.status, read) == (200, body)
    assert response.end()
    assert kind != "close" or not response.keep_alive


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"x" * 100_000,
    ],
)
def test_a_response_that_is_not_http_is_refused(sent: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(sent)


@pytest.mark.parametrize(
    "sent",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nxx", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"],
)
def test_a_truncated_response_is_incomplete(sent: bytes) -> None:
    response = ResponseParser()
    response.feed(sent)
    assert not response.end()
