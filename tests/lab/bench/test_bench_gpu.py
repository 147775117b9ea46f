"""The GPU benchmark at tiny sizes on the CPU: every part runs, and its figures agree with their formulas."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.torch_backend import graphed, measure_device, seconds_per_call
from octavo.lab.bench import gpu, gpu_engine
from octavo.lab.bench.gpu_scale import FULL, TINY, Scale
from octavo.lab.bench.offline import make_batches, measure, run_batch, step_bytes
from octavo.lab.simulate.step_costs import layer_weights, prefill_operations, weight_bytes_read
from octavo.lab.workloads.lengths import Constant
from octavo.loader.resolve import resolve_model
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, kv_bytes_per_token, state_bytes

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_bench.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shape") / "tiny-shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_part(part: str, shape: Path, tmp_path: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    file = tmp_path / "figures.jsonl"
    code = gpu.main([part, str(shape), str(file), "--smoke", *options])
    figures = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(f["part"], f["shape"]) for f in figures} == {(part, "tiny-shape")}
    return code, {f["name"]: f for f in figures}


@pytest.mark.parametrize("part", ["engine", "deterministic"])
def test_the_engines_figures_follow_from_their_formulas(part: str, tiny: Path, tmp_path: Path) -> None:
    start = time.perf_counter()
    code, figures = run_part(part, tiny, tmp_path, "--bandwidth", "10", "--peak", "2")
    elapsed = time.perf_counter() - start
    assert code == 0, figures
    network = build_without_weights(read_model_config(tiny), "bfloat16")
    weights, per_token = weight_bytes_read(network), kv_bytes_per_token(network)
    for batch in (1, 3):
        name = f"decode {batch} x 24"
        step = figures[f"{name}, step"]["value"] / 1e3
        share = figures[f"{name}, share of bandwidth"]
        context = float(share["formula"].split(f"{batch} x ")[1].split()[0])
        assert 18 <= context <= 30
        assert share["value"] == pytest.approx((weights + batch * context * per_token) / (step * 10e9), rel=0.01)
        assert figures[f"{name}, rate"]["value"] == pytest.approx(batch / step)
        assert figures[f"{name}, GPU idle"]["value"] is None
    seconds = 48 / figures["prefill 48"]["value"]
    share = figures["prefill 48, share of matrix peak"]["value"]
    assert share == pytest.approx(prefill_operations(network, 48) / seconds / 2e12)
    for batch in (1, 2):
        rate = figures[f"{batch} x (8 in, 4 out)"]
        seconds = batch * 4 / rate["value"]
        assert rate["formula"].startswith(f"{batch} x 4 tokens / {seconds:.3f} s")
        elapsed -= seconds
    assert elapsed > 0, "the batches ran one after the other, within the part"


def test_kernels_peak_rates_and_transformers(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.lab.bench.kernels.LEAST_SECONDS", 0.0)
    code, limits = run_part("limits", tiny, tmp_path)
    assert code == 0
    assert limits["bandwidth"]["value"] == max(limits[f"{way} bandwidth"]["value"] for way in ("copy", "read"))
    (tmp_path / "figures.jsonl").unlink()
    code, kernels = run_part("kernels", tiny, tmp_path, "--bandwidth", "10", "--peak", "2")
    assert code == 0
    assert {name.split()[0] for name in kernels} == {"linear", "attention"}
    for name, figure in kernels.items():
        gb_s, tflops, us = map(float, re.findall(r"([\d.e-]+) (?:/|us a call)", figure["formula"]))
        assert figure["value"] == pytest.approx(max(gb_s / 10, tflops / 2), rel=0.01)
        if name.startswith("linear"):  # N x K, rows
            operations = 2 * math.prod(map(int, re.findall(r"\d+", name)))
            assert tflops * us * 1e6 == pytest.approx(operations, rel=0.1), "the time is printed in 0.1 us"
    (tmp_path / "figures.jsonl").unlink()
    code, theirs = run_part("transformers", tiny, tmp_path)
    assert code == 0
    assert set(theirs) == {"1 x (8 in, 4 out)", "2 x (8 in, 4 out)"}


def test_a_profile_lists_the_kernels_by_time(tiny: Path, tmp_path: Path) -> None:
    code, figures = run_part("profile", tiny, tmp_path)
    assert code == 0, figures
    for work in ("decode 1 x 24", "decode 3 x 24", "prefill 48"):
        assert 0 <= figures[f"{work}, idle in the trace"]["value"] < 1
        parts = [
            f["value"]
            for name, f in figures.items()
            if name.startswith(f"{work}, ") and not name.endswith(("all kernels", "idle in the trace"))
        ]
        whole = figures[f"{work}, all kernels"]["value"]
        assert parts == sorted(parts, reverse=True)
        assert 0.3 * whole < sum(parts) <= whole * 1.001


def test_gaps_between_spans() -> None:
    assert gpu_engine.gaps([(10.0, 20.0)], 5) == (10, 0, 0)
    # One span within another, one that touches, a short gap and a long one, in any order.
    spans = [(31.0, 33.0), (0.0, 10.0), (2.0, 4.0), (10.0, 12.0), (15.0, 16.0), (9.0, 11.0)]
    assert gpu_engine.gaps(spans, 5) == (33, 3, 15)


def test_without_peak_rates_only_shares_are_left_out(tiny: Path, tmp_path: Path) -> None:
    code, figures = run_part("engine", tiny, tmp_path)
    assert code == 0
    assert "decode 3 x 24, step" in figures
    assert not any("share" in name for name in figures)


def test_a_measurement_that_fails_leaves_the_others(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(llm: LLM, scale: Scale, peak: object) -> Any:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(gpu_engine, "_prefill", broken)
    code, figures = run_part("engine", tiny, tmp_path)
    assert code == 1
    assert figures["prefill"]["formula"] == "failed: RuntimeError: broken"
    assert figures["decode 3 x 24, step"]["value"] > 0


def test_the_script_keeps_the_figures_of_a_part_that_fails(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that crash, hang, or write half a figure, in processes of their own, and one that works."""
    scripts = {
        "limits": "print(line('bandwidth', 4.0)); print(line('matrix peak', 8.0))",
        "engine": "print(line('a', 2.0), flush=True); os.kill(os.getpid(), 9)",
        "kernels": "print(line('b', 3.0), flush=True); time.sleep(60)",
        "transformers": "assert '--bandwidth=4.0' in sys.argv; print(line('a', 1.0) + '\\n{\"half')",
    }
    fake = tmp_path / "part.py"
    fake.write_text(
        "import json, os, sys, time\n"
        "part, shape = sys.argv[1:3]\nsys.stdout = open(sys.argv[3], 'a')\n"
        "def line(name, value):\n"
        "    what = {'part': part, 'shape': shape, 'name': name}\n"
        "    return json.dumps({**what, 'value': value, 'unit': 'x', 'formula': ''})\n"
        f"exec({scripts!r}[part])\n"
    )
    monkeypatch.setattr(script, "PROGRAM", [str(fake)])
    monkeypatch.setattr(script, "MIN_SECONDS", 0.5)
    monkeypatch.setattr(
        script, "plan", lambda shapes: [script.Part(name, "s", 3.0 if name == "kernels" else 30.0) for name in scripts]
    )
    assert script.main(["--out", str(tmp_path / "out"), "--shapes", "s"]) == 1
    report = json.loads((tmp_path / "out" / "figures.json").read_text())
    found = {(f["part"], f["name"]): f["value"] for f in report["figures"]}
    assert found[("engine", "a")] == 2.0
    assert found[("kernels", "b")] == 3.0
    assert found[("ratio", "a, transformers = 1")] == 2.0
    assert len(report["problems"]) == 3
    assert "exit code -9" in report["problems"][0]
    assert "ended after 3 s" in report["problems"][1]
    assert "cut off" in report["problems"][2]
    assert "3 problems" in capsys.readouterr().out


def test_the_parts_that_matter_most_come_first_and_none_twice(script: ModuleType) -> None:
    parts = script.plan(list(script.SHAPES))
    assert [p.name for p in parts[:3]] == ["limits", "engine", "engine"]
    assert {(p.name, p.shape) for p in parts} > {(n, s) for n in ("engine", "kernels") for s in script.SHAPES}
    alone = script.plan(["one"])
    assert len(alone) == len({p.name for p in alone}) == len(gpu.PARTS)


def test_the_aims_are_figures_that_the_parts_give(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their names are those of the full scale, so a renamed figure is noticed here."""
    batches = {f"decode {n} x {FULL.context}" for n in FULL.decode_batches}
    names = {f"{batch}, {what}" for batch in batches for what in ("share of bandwidth", "GPU idle")}
    sequences, context = FULL.attention
    names |= {f"prefill {FULL.prefill}, share of matrix peak", f"attention {sequences} x {context}, {sequences} rows"}
    assert {name for _, name, _, _ in script.AIMS} == names
    report = script.Report(tmp_path)
    for part, name, _, _ in script.AIMS:
        figure = {"part": part, "shape": "s", "name": name, "value": 0.5, "unit": "of limit", "formula": ""}
        report.add(script.Part(part, "s", 1.0), 1.0, "", [figure])
    assert report.finish() == 0
    assert capsys.readouterr().out.count("MISSED") == len(script.AIMS)


@pytest.mark.slow
def test_the_whole_script_in_smoke_mode(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "figures.json").read_text())
    assert {f["part"] for f in report["figures"]} == {*gpu.PARTS, "ratio"}
    assert report["problems"] == []


def test_steady_steps_are_those_in_which_all_sequences_decode(tiny: Path) -> None:
    llm = LLM(
        str(tiny),
        load_format="dummy",
        device="cpu",
        kernels="reference",
        num_gpu_blocks_override=64,
        max_model_len=128,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    run = run_batch(llm.llm_engine, [[i + 3] * 10 for i in range(4)], [params] * 4)
    # Four prompts of ten tokens take three steps of sixteen; the first to be done decodes meanwhile.
    assert 8 <= len(run.steady) <= 15
    assert all(call.decode_tokens == 4 and call.prefill_tokens == 0 for call in run.steady)
    assert [b.computed - a.computed for a, b in zip(run.steady, run.steady[1:], strict=False)] == [4] * (
        len(run.steady) - 1
    )
    assert 10 < run.context < 30
    assert 0 < run.step_seconds * len(run.steady) < run.seconds
    assert run.idle_share is None
    core = llm.llm_engine.core
    expected = (
        weight_bytes_read(build_without_weights(core.model_config, "bfloat16")) + 4 * run.context * 2 * 2 * 2 * 16 * 2
    )
    assert step_bytes(core, run) == pytest.approx(expected)
    (figures,) = measure(llm, make_batches([2], Constant(8), Constant(12)), bandwidth_gb_s=5.0)
    assert figures.share_outside_kernels is None
    assert figures.share_of_bandwidth is not None
    assert 0 < figures.share_of_bandwidth < 1


def test_bytes_and_operations_of_a_network_that_is_counted_by_hand(tiny: Path) -> None:
    c = read_model_config(tiny)
    q, kv, out, mlp = 64 * 64, 2 * 64 * 32, 64 * 64, 3 * 64 * 96
    network = build_without_weights(c, "bfloat16")
    layers = 2 * (q + kv + out + mlp)
    assert layer_weights(network) == layers
    head = 128 * 64
    assert weight_bytes_read(network) == 2 * (layers + head)
    assert weight_bytes_read(build_without_weights(c, "float32", "int8")) == layers + head
    assert weight_bytes_read(build_without_weights(c, "bfloat16", "int4")) == layers // 2 + head
    assert weight_bytes_read(build_without_weights(c, "bfloat16", "fp8")) == layers + 2 * head
    assert kv_bytes_per_token(build_without_weights(c, "float16")) == 2 * 2 * 2 * 16 * 2
    hybrid = build_without_weights(read_model_config(resolve_model("qwen3.5-0.8b-shape")), "bfloat16")
    assert state_bytes(hybrid) == 18 * 4 * (3 * 6144 + 16 * 128 * 128) and state_bytes(network) == 0
    assert kv_bytes_per_token(hybrid) == 6 * 2 * 2 * 256 * 2
    attention = 4 * 8 * 6 * 256 * 8 * 9 // 2
    assert prefill_operations(hybrid, 8) == 2 * 8 * layer_weights(hybrid) + attention + 2 * 248320 * 1024
    assert kv_bytes_per_token(build_without_weights(c, "float16", kv_cache_dtype="fp8")) == 2 * 2 * 2 * (16 + 4)
    # Two tokens: the second sees both; scores and values take two operations a pair, head and dimension each.
    assert prefill_operations(network, 2) == 2 * layers * 2 + 3 * 2 * 4 * 4 * 16 + 2 * head


def test_device_timing_on_a_cpu(tries: Callable[..., None]) -> None:
    calls: list[int] = []

    def measure() -> dict[str, bool]:
        calls.clear()
        seconds = seconds_per_call(lambda: calls.append(1), "cpu", budget=0.01)
        assert len(calls) >= 6
        return {f"a call takes from 0 to 10 ms, not {seconds} s": 0 <= seconds < 0.01}

    tries(measure)
    work = calls.clear
    assert graphed(work, "cpu") is work
    limits = measure_device("cpu", 1 << 20, 32)
    assert limits.bandwidth_gb_s == max(limits.copy_gb_s, limits.read_gb_s) > 0
    assert limits.bf16_tflops > 0


@pytest.mark.gpu
def test_device_timing_on_a_gpu() -> None:
    limits = measure_device("cuda", 1 << 30, 4096)
    assert 100 < limits.bandwidth_gb_s < 20_000
    assert 10 < limits.bf16_tflops < 10_000
    x = torch.randn(1 << 26, device="cuda")
    out = torch.empty_like(x)
    replay = graphed(lambda: torch.mul(x, 2.0, out=out), "cuda")
    x.fill_(3.0)
    replay()
    assert out.eq(6.0).all()
    seconds = seconds_per_call(replay, "cuda")
    assert seconds > 2 * x.nbytes / (1.5e9 * limits.bandwidth_gb_s)
