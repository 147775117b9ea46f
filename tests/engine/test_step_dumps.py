"""Dumps of failed steps: what they tell and what not, how large and how many they become; and their replays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.cli.view import make_server
from octavo.core.errors import ConfigError
from octavo.core.stats import read_recording, write_recording
from octavo.engine import step_dumps
from octavo.engine.step_dumps import Added, StepFailure, read_dump
from octavo.lab.simulate.replay import replay
from octavo.runner.model_runner import ModelRunner

PROMPTS = ["the quick brown fox " * 3, "the quick brown dog", "a", "b" * 50, "the quick brown fox jumps", "cc"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dumps go here."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(step_dumps, "INTERVAL", 0.0)
    return tmp_path / "dumps"


def make_llm(model: Path, **options: Any) -> LLM:
    return LLM(
        str(model), **{"device": "cpu", "num_threads": 1, "num_gpu_blocks_override": 64, "block_size": 4, **options}
    )


def params(number: int, **values: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": number, "max_tokens": 12 + 3 * number, "n": 1 + number % 2, **values}
    )


def fail_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int, asked: list[Any] | None = None) -> StepFailure:
    """Generates with a step that fails; the last dump."""
    compute, left = ModelRunner._compute, [at]

    def failing(self: ModelRunner, *args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError("once")
        compute(self, *args)

    asked = asked or [params(i) for i in range(len(PROMPTS))]
    right = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS, asked, use_tqdm=False)]
    llm.llm_engine.core.scheduler.reset_prefix_cache()  # it has the answers
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_compute", failing)
        outputs = llm.generate(PROMPTS, asked, use_tqdm=False)
    assert [[c.token_ids for c in output.outputs] for output in outputs] == right
    return read_dump(last_dump())


def last_dump() -> Path:
    return max(Path(os.environ["OCTAVO_CACHE"], "dumps").iterdir(), key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"num_gpu_blocks_override": 34}, {"scheduling_policy": "srpt", "max_num_seqs": 4}],
    ids=["", "ahead", "preempted", "srpt"],
)
def test_the_scheduler_comes_to_the_failed_step_again(
    options: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny_model, max_model_len=100, **options)
    failure = fail_once(llm, monkeypatch, 20)
    assert failure.from_idle and failure.options["block_size"] == 4
    played = replay(last_dump())
    assert played.steps[-1].step == failure.step and len(played.steps) >= 19
    assert played.first_difference is None
    if "num_gpu_blocks_override" in options:
        stats = llm.llm_engine.core.scheduler.stats()
        assert stats.preemptions_by_recompute + stats.preemptions_by_swap > 0


def test_from_a_checkpoint_it_comes_to_the_failed_step_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_dumps, "_MOST_SCHEDULED", 300)
    failure = fail_once(make_llm(tiny_model), monkeypatch, 22)
    assert not failure.from_idle and any(isinstance(e, Added) and e.status == "running" for e in failure.journal)
    played = replay(last_dump())
    assert 3 < len(played.steps) < 22 and played.steps[-1].is_equal


def test_tokens_are_in_a_dump_only_if_asked_for(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = fail_once(make_llm(tiny_model), monkeypatch, 3)
    assert all(sequence.token_ids is None for sequence in failure.sequences)
    assert sum(failure.inputs["query_lens"]) == failure.inputs["tokens"]
    assert max(max(counts) for sequence in failure.sequences for counts in sequence.references) > 1  # shared blocks
    failure = fail_once(make_llm(tiny_model, step_dumps="tokens"), monkeypatch, 3)
    assert all(len(sequence.token_ids or ()) == sequence.num_tokens for sequence in failure.sequences)


def test_no_dump_is_made_with_the_option_none(folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        fail_once(make_llm(tiny_model, step_dumps="none"), monkeypatch, 3)
    assert not folder.exists()


def test_dumps_are_few_and_small(folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_dumps, "NUM_DUMPS", 2)
    llm = make_llm(tiny_model)
    for _ in range(4):
        fail_once(llm, monkeypatch, 2)
    assert len(list(folder.iterdir())) == 2
    whole = read_dump(last_dump())
    assert whole.sequences and whole.journal
    limit = int(0.95 * last_dump().stat().st_size)
    monkeypatch.setattr(step_dumps, "MAX_DUMP_BYTES", limit)
    cut = fail_once(llm, monkeypatch, 2)
    assert not cut.sequences and cut.error == "ZeroDivisionError: once"
    assert last_dump().stat().st_size <= limit
    make_server(read_recording(last_dump())).server_close()


def test_a_dump_that_cannot_be_written_changes_nothing(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file in the place of the folder")
    with pytest.raises(NotADirectoryError):
        fail_once(make_llm(tiny_model), monkeypatch, 3)
    assert any("could not be dumped" in record.message for record in caplog.records)


def test_what_cannot_be_replayed_is_refused(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "recording.jsonl"
    write_recording(other, "no failure", [])
    with pytest.raises(ConfigError, match="is no dump of a failed step"):
        replay(other)
    asked = [BeamSearchParams(beam_width=2, max_tokens=8), *(params(i) for i in range(1, len(PROMPTS)))]
    fail_once(make_llm(tiny_model), monkeypatch, 4, asked)
    with pytest.raises(ConfigError, match="has beam searches"):
        replay(last_dump())


def test_the_failure_is_told_in_words(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = fail_once(make_llm(tiny_model), monkeypatch, 3)
    text = "\n".join(failure.lines())
    assert f"step {failure.step} failed: ZeroDivisionError: once" in text and "in failing" in text
    assert "octavo " in text and "python " in text
    first = json.loads(last_dump().read_text().splitlines()[0])
    assert first["title"] == f"step {failure.step} failed: ZeroDivisionError: once"
