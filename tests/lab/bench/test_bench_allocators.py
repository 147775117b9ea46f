"""Paged and contiguous memory behind the engine's own scheduler and kernels: the same answers, other batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError
from octavo.engine.llm_engine import LLMEngine
from octavo.lab.bench.allocators import (
    CASES,
    PAGED_AUTO,
    AllocatorCase,
    baselines,
    make_options,
    measure,
    use_allocator,
)
from octavo.lab.bench.restartable import RestartableCore, start
from octavo.lab.bench.steady import Guard
from octavo.lab.simulate.allocators.comparison import ALLOCATORS
from octavo.lab.simulate.allocators.contiguous import ContiguousBlocks
from octavo.lab.workloads.lengths import Uniform
from octavo.lab.workloads.tokens import token_ids
from tests.lab.simulate.test_profile import profile

SHORT = Uniform(4, 20), Uniform(6, 24)
SMALL = {
    case.name: case
    for case in (
        AllocatorCase("one", 8, *SHORT, context=64),
        AllocatorCase("samples", 4, *SHORT, context=64, width=3),
        AllocatorCase("beams", 4, *SHORT, context=64, width=3, beams=True),
    )
}


Started = tuple[RestartableCore, LLMEngine]


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Started:
    options = make_options(make_config(model=str(tiny_model)), list(SMALL.values()))
    return start(options)


def answers(started: Started, case: AllocatorCase, allocator: str) -> tuple[dict[str, list[list[int]]], int]:
    """Token ids by request, and the most sequences that ran at once."""
    engine = use_allocator(*started, case, allocator)
    ids = (0, engine.core.model_config.vocab_size - 1)
    for number, item in enumerate(case.items(0)):
        engine.add_request(str(number), token_ids(item, ids), case.params(item, number), streaming=False)
    found, most = {}, 0
    blocks, queues = engine.core.blocks, engine.core.scheduler.queues
    assert isinstance(blocks, ContiguousBlocks) == (allocator not in ("paged", PAGED_AUTO))
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = [completion.token_ids for completion in output.outputs]
        most = max(most, queues.num_running_seqs)
        assert blocks.state.used + blocks.state.free + blocks.state.cached == blocks.num_blocks == case.num_blocks
    assert blocks.state.used == 0
    if isinstance(blocks, ContiguousBlocks):
        assert blocks.buddy.num_free == case.num_blocks, "every extent is free again"
    return found, most


@pytest.mark.parametrize("name", SMALL)
def test_every_allocator_gives_the_same_tokens(started: Started, name: str) -> None:
    case = SMALL[name]
    found = {allocator: answers(started, case, allocator) for allocator in ALLOCATORS}
    tokens, most = found["paged"]
    assert len(tokens) == case.requests and all(len(each) == case.width for each in tokens.values())
    if case.width > 1:
        assert any(len(set(map(tuple, each))) > 1 for each in tokens.values()), "sequences of a request differ"
    assert all(other == tokens for other, _ in found.values())
    assert answers(started, case, PAGED_AUTO)[0] == tokens
    assert most > found["max"][1] == max(2, case.width)


def test_runs_are_measured_with_each_allocator_beside_the_simulator(tiny_model: Path) -> None:
    options = make_options(make_config(model=str(tiny_model)), [SMALL["one"]])
    guard = Guard(again=0)
    runs = [run.result for run in measure(options, [SMALL["one"]], repeats=2, guard=guard, profile=profile())]
    assert [(f.allocator, f.seed) for f in runs] == [(a, seed) for seed in (0, 1) for a in baselines(SMALL["one"])]
    for f in runs:
        assert f.requests_per_s == pytest.approx(8 / f.seconds) and f.simulated is not None and 0 < f.filled <= 1
    paged, _, _, _, largest, static, static_max = runs[:7]
    assert paged.simulated is not None and largest.simulated is not None
    assert paged.simulated > largest.simulated and paged.sequences > largest.sequences
    assert largest.sequences == pytest.approx(2) and static_max.sequences == pytest.approx(2)
    assert static.simulated is not None and static_max.simulated is not None
    assert paged.simulated > static.simulated >= static_max.simulated and largest.simulated > static_max.simulated
    assert static_max.filled < largest.filled


def test_every_case_fits_its_context_and_max_runs_a_request_of_it() -> None:
    for case in CASES.values():
        for item in case.items(0):
            assert item.input_len + item.output_len <= case.context
        assert case.num_blocks * 16 >= case.width * case.context
        assert len(case.items(0, 0.5)) == round(case.requests / 2)


def test_prompts_of_a_shared_prefix_begin_alike() -> None:
    first, second, *_ = CASES["one-shot"].items(0)
    assert token_ids(first)[:80] == token_ids(second)[:80] and token_ids(first)[80:] != token_ids(second)[80:]


def test_what_the_comparison_sets_is_refused() -> None:
    with pytest.raises(ConfigError, match="sets block_size: leave them out"):
        make_options(make_config(model="none", block_size=32), [SMALL["one"]])


def test_the_command_prints_a_table_and_writes_every_run(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "one", SMALL["one"])
    file = tmp_path / "out.json"
    words = ["bench", "allocators", str(tiny_model), "--cases", "one", "--repeats", "2", "--profile", "none"]
    words += ["--again", "0"]
    assert main([*words, "--json", str(file)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| one |", "| one* |"))]
    assert [line.split(" | ")[1] for line in lines] == list(
        baselines(SMALL["one"])
    ) and " | 1.00 [1.00, 1.00] | - | " in lines[0]
    runs = json.loads(file.read_text())["runs"]
    assert len(runs) == 14 and all(run["conditions"]["attempts"] == 1 for run in runs)


@pytest.mark.parametrize(
    "words",
    [["--cases", "tall"], ["--repeats", "0"], ["--requests-share", "0"], ["--block-size", "8"], ["--profile", "no"]],
)
def test_a_wrong_call_is_refused_before_the_model_is_loaded(words: list[str]) -> None:
    assert main(["bench", "allocators", "no-such-model", *words]) == 2
