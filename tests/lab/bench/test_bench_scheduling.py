"""``octavo bench scheduler`` and ``memory``: the figures agree with the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.config.kv_spec import KVSpec
from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM
from octavo.lab.bench import scheduler_cost
from octavo.lab.bench.memory_use import measure_sharing, measure_use, trace
from octavo.lab.bench.scheduler_cost import sampled
from octavo.lab.bench.windows import measure_windows
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler


def test_the_cost_of_a_step_is_reported_for_each_number_of_sequences(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    words = ["bench", "scheduler", "--running", "4,16", "--waiting", "50", "--context", "40"]
    assert main([*words, "--json", str(target)]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["running"], row["waiting"], row["context"]) for row in rows] == [(4, 50, 40), (16, 50, 40)]
    for row in rows:
        total = row["schedule_us"] + row["update_us"]
        assert row["us_per_sequence"] == pytest.approx(total / row["running"], rel=0.01)
        assert 0 < row["p999_us"] <= row["slowest_us"]
        assert row["slowest_wall_us"] > 0 and len(row["collections"]) == 3
        assert row["longest_collection_us"] <= row["collector_us"]


def scheduler_rows(target: Path, *flags: str) -> list[dict[str, float]]:
    words = ["bench", "scheduler", "--running", "8", "--waiting", "20", "--context", "40", *flags]
    assert main([*words, "--json", str(target)]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize(
    "flags",
    [
        *(("--scheduling-policy", name) for name in POLICIES),
        ("--batching", "prefill_first", "--scheduler-delay-factor", "0.5", "--max-num-batched-tokens", "64"),
        ("--max-num-batched-tokens", "20", "--block-size", "4", "--no-enable-prefix-caching", "--watermark", "0.3"),
        ("--long-prefill-token-threshold", "8", "--max-num-partial-prefills", "2", "--aging-limit", "none"),
        ("--scheduling-policy", "static", "--priority-preemption", "--preemption-mode", "recompute"),
        ("--num-gpu-blocks-override", "600", "--num-host-blocks-override", "20", "--host-prefix-cache"),
    ],
    ids=" ".join,
)
def test_engine_flags_count_in_the_cost_of_a_step(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (row,) = scheduler_rows(tmp_path / "figures.json", *flags)
    assert row["running"] == 8
    assert row["schedule_us"] > 0


def test_engine_flags_reach_the_scheduler_that_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Scheduler] = []

    def watched(*arguments: Any, **options: Any) -> Scheduler:
        seen.append(Scheduler(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(scheduler_cost, "Scheduler", watched)
    scheduler_rows(
        tmp_path / "f", "--scheduling-policy", "ldf", "--block-size", "4", "--preemption-victim", "most_blocks"
    )
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "8")
    scheduler_rows(tmp_path / "f")
    assert [s.blocks.block_size for s in seen] == [4, 8]
    assert [s.options.scheduling_policy for s in seen] == ["ldf", "fcfs"]
    assert seen[0].options.preemption_victim == "most_blocks"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--scheduling-policy", "nonsense"), "unknown scheduling_policy 'nonsense'"),
        (("--model", "smollm2-135m"), "--model"),
        (("--dtype", "float32"), "--dtype"),
        (("--swap-space", "1"), "--swap-space"),
        (("--max-num-seqs", "4"), "--max-num-seqs"),
        (("--async-scheduling", "true"), "--async-scheduling"),
        (("--num-gpu-blocks-override", "3"), "num_gpu_blocks_override"),
        (("--batching", "prefill_first", "--max-num-batched-tokens", "20"), "max_num_batched_tokens=20"),
        (("--max-num-batched-tokens", "7"), "max_num_batched_tokens"),
    ],
)
def test_flags_that_cannot_count_are_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert main(["bench", "scheduler", "--running", "8", "--context", "40", *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.err


def test_the_stand_in_worker_samples_for_children_that_a_prompt_was_forked_into() -> None:
    blocks = BlockManager(16, 4)
    scheduler = Scheduler(blocks, SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64), 32)
    params = SamplingParams(n=3, temperature=0.0, max_tokens=2, ignore_eos=True)
    scheduler.add(EngineCoreRequest(group_id=0, prompt_token_ids=[1] * 6, task=Generate(params, 0)))
    tokens = [0, 0, 0]
    for _ in range(2):
        plan = scheduler.schedule()
        for update in scheduler.update(plan, sampled(plan, scheduler)).each_sequence():
            tokens[update.index] += 1
    assert tokens == [2, 2, 2]
    assert not scheduler.has_work


def test_paging_holds_more_tokens_than_contiguous_pieces() -> None:
    figures = measure_use(16, slots=4096, max_model_len=512, requests=60)
    assert figures.share_of_used_blocks > 0.9
    assert figures.share_of_cache <= figures.share_of_used_blocks <= 1
    assert figures.share_if_contiguous < figures.share_of_cache
    assert figures.running > figures.running_if_contiguous == 8
    smaller = measure_use(4, slots=4096, max_model_len=512, requests=60)
    assert smaller.share_of_used_blocks > figures.share_of_used_blocks


def test_the_trace_fits_the_context_and_is_always_the_same() -> None:
    lengths = trace(500, 256, seed=3)
    assert lengths == trace(500, 256, seed=3)
    assert all(prompt > 0 and output > 0 and prompt + output <= 256 for prompt, output in lengths)


def test_sharing_saves_more_the_more_is_shared(demo_model: Path) -> None:
    one_layer: dict[str, Any] = {"hf_overrides": {"num_hidden_layers": 1}, "load_format": "dummy"}
    llm = LLM(str(demo_model), num_gpu_blocks_override=300, max_model_len=512, **one_layer)
    figures = list(measure_sharing(llm, output_len=12))
    for kind in ("parallel sampling", "beam search", "shared examples"):
        saved = [f.saved for f in figures if f.kind == kind]
        assert saved == sorted(saved)
        assert 0 < saved[0] < saved[-1] < 1


def test_states_count_beside_blocks_of_tokens() -> None:
    state, full = KVSpec.state(1024), KVSpec("full", 1, 8, "bfloat16")
    (figures,) = measure_windows("m", [state] * 3 + [full], {"long": ([(1500, 20)] * 12, 4096)})
    assert figures.groups
    at_the_end = 95 * 16 * 32 + 3 * 4096
    assert at_the_end <= figures.sequence_bytes <= at_the_end + 4 * 3 * 4096, "95 blocks, and one to five states"
    assert figures.running > 1 and 0 < figures.share_of_cache <= 1


def test_windows_save_memory_and_let_more_requests_run() -> None:
    near, far = KVSpec("sliding", 1, 8, "bfloat16", 64), KVSpec("full", 1, 8, "bfloat16")
    given = {"long": ([(500, 20)] * 16, 2048)}
    without, windowed = measure_windows("m", [near] * 5 + [far], given)
    assert (without.groups, windowed.groups) == (False, True)
    assert without.sequence_bytes == 6 * 32 * 33 * 16, "33 blocks of 16 tokens in six layers"
    assert 32 * 16 * (33 + 5 * 4) <= windowed.sequence_bytes <= 32 * 16 * (33 + 5 * 6)
    assert without.running <= 3 < windowed.running
    assert without.share_of_cache < windowed.share_of_cache <= 1
    assert windowed.preemptions == 0
