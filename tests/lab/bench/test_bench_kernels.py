"""``octavo bench kernels`` on a tiny model: counted bytes and operations, and the types that options select."""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.core.dtypes import DType
from octavo.kernels import load_kernels
from octavo.kernels.interface import Kernels
from octavo.lab.bench import kernel_cases
from octavo.lab.bench import kernels as measuring
from octavo.lab.bench.kernel_cases import (
    Shapes,
    Types,
    attention_cases,
    expert_cases,
    linear_cases,
    low_rank_cases,
    state_cases,
)
from octavo.lab.commands import bench_kernels
from octavo.loader.builtin import SHAPES as MODELS
from octavo.models.config_files import read_model_config

#: One row, one sequence and one short prompt.
SHAPES = Shapes([1, 3], [(2, 40)], [20])
LINEARS = [
    "linear qkv_proj",
    "linear o_proj",
    "linear o_proj, added",
    "linear gate_up_proj",
    "linear gate_up_proj, gated",
    "linear down_proj",
    "linear down_proj, added",
    "linear lm_head",
]

LOW_RANKS = [f"low-rank 16 {name}" for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")]


@pytest.fixture
def kernels() -> Kernels:
    pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
    return load_kernels("cpu", "cpu")


def test_figures_of_all_kernels(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "cpu_read_gb_s", functools.cache(measuring.cpu_read_gb_s))
    target = tmp_path / "figures.json"
    assert main(["bench", "kernels", str(tiny_model), "--rows", "2", "--json", str(target)]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in target.read_text().splitlines()]
    assert list(dict.fromkeys(row["kernel"] for row in rows)) == [*LINEARS, *LOW_RANKS, "attention"]
    assert [row["rows"] for row in rows if row["kernel"] == "linear lm_head"] == [2]
    for row in rows:
        assert row["microseconds"] > 0 and row["gb_per_s"] > 0 and row["gflop_per_s"] > 0 and row["share_of_limit"] > 0
        shares = row["gb_per_s"] / row["limit_gb_per_s"], row["gflop_per_s"] / row["limit_gflop_per_s"]
        assert row["share_of_limit"] == pytest.approx(max(shares), rel=0.05, abs=0.01)
        assert row["share_at_best"] >= row["share_of_limit"]


def test_the_fastest_run_counts_apart(kernels: Kernels, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = next(linear_cases(kernels, read_model_config(tiny_model), Types(DType.FLOAT32), SHAPES))
    case = replace(some, bytes=8e9, flops=2e9, calls=2)
    monkeypatch.setattr(measuring, "_seconds", lambda *_: (4.0, 2.0))
    figures = measuring.measure_case(kernels, case, "cpu", lambda _: (8.0, 10.0))
    assert (figures.microseconds, figures.gb_per_s, figures.gflop_per_s) == (2e6, 4.0, 1.0)
    assert (figures.share_of_limit, figures.share_at_best) == (0.5, 1.0)


@pytest.mark.parametrize(("quantization", "kind"), [(None, "float"), ("int8", "integer")])
def test_a_faster_instruction_set_than_the_chosen_one_is_told(
    quantization: str | None,
    kind: str,
    kernels: Kernels,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu: Any = importlib.import_module("octavo._cpu")
    in_use: Any = getattr(cpu, f"{kind}_isa")
    chosen, both, config = in_use(), cpu.isa(), read_model_config(tiny_model)
    others = [name for name in getattr(cpu.available_isas(), f"{kind}s") if name not in (chosen, "generic")]
    for name in (chosen, *others[:1]):
        # As if this set took half the time of all others.
        monkeypatch.setattr(measuring, "_seconds", lambda *_, fast=name: (1.0 + (in_use() != fast),) * 2)
        bench_kernels._compare_instruction_sets(kernels, config, Types(DType.FLOAT32, quantization))
        assert cpu.isa() == both
        told = capsys.readouterr().err
        assert ("WARNING" in told) == (name != chosen)
        assert all(other in told for other in others)


@pytest.mark.parametrize(("kind", "bytes_of_weight", "of_head"), [(None, 2, 2), ("int8", 1, 1), ("int4", 0.5, 1)])
def test_bytes_and_operations_of_products(
    kernels: Kernels, tiny_model: Path, kind: str | None, bytes_of_weight: float, of_head: float
) -> None:
    c = read_model_config(tiny_model)
    for case in linear_cases(kernels, c, Types(DType.BFLOAT16, kind), SHAPES):
        outputs, inputs = map(int, case.shape.split(" x "))
        size = of_head if case.kernel == "linear lm_head" else bytes_of_weight
        assert case.bytes == outputs * inputs * size
        assert case.flops == 2 * outputs * inputs * case.rows


def test_bytes_and_operations_of_adapters(kernels: Kernels, tiny_model: Path) -> None:
    c = read_model_config(tiny_model)
    shapes = Shapes([1, 20], [], [])
    cases = [*low_rank_cases(kernels, c, Types(DType.BFLOAT16), shapes)]
    assert [case.kernel for case in cases] == [name for name in LOW_RANKS for _ in shapes.rows]
    for case in cases:
        outputs, inputs = map(int, case.shape.split(" x "))
        assert case.bytes == min(case.rows, 8) * 16 * (outputs + inputs) * 2
        assert case.flops == 2 * 16 * (outputs + inputs) * case.rows
        assert case.calls == c.num_layers
        sums = case.forward(case.batch).hidden
        assert sums.shape == (case.rows, outputs) and (kernels.to_numpy(sums) != 0).all()


def test_bytes_and_operations_of_experts(kernels: Kernels, tmp_path: Path) -> None:
    small = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
    config = MODELS["qwen3-moe-1b-a0.3b-shape"] | small | {"num_hidden_layers": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    c = read_model_config(tmp_path)
    one, three = expert_cases(kernels, c, Types(DType.BFLOAT16), SHAPES)
    expert = 3 * 64 * 32
    assert one.calls == 2 and one.shape == "2 of 6, 64 x 32"
    assert one.bytes == 2 * 2 * expert and one.flops == 2 * 2 * expert
    assert three.flops == 3 * one.flops and one.bytes <= three.bytes <= 3 * one.bytes
    for case in (one, three):
        assert case.forward(case.batch).hidden.shape == (case.rows, 64)
    names = [case.kernel for case in linear_cases(kernels, c, Types(DType.BFLOAT16), SHAPES)]
    assert "linear gate" in names and not any("gate_up" in name for name in names)


@pytest.mark.parametrize(("cache_dtype", "bytes_of_head"), [("auto", 2 * 2), ("int8", 2 * 1)])
def test_bytes_and_operations_of_attention(
    kernels: Kernels, tiny_model: Path, cache_dtype: str, bytes_of_head: int
) -> None:
    c = read_model_config(tiny_model)
    types = Types(DType.BFLOAT16, kv_cache_dtype=cache_dtype)
    decode, prefill = attention_cases(kernels, c, types, SHAPES)
    scales = 2 * c.num_kv_heads * 4 if cache_dtype == "int8" else 0
    of_token = bytes_of_head * c.num_kv_heads * c.head_dim + scales
    assert decode.bytes == 2 * 40 * of_token and prefill.bytes == 20 * of_token
    assert decode.flops == 2 * 40 * 4 * c.num_heads * c.head_dim
    assert prefill.flops == pytest.approx(20 * 21 / 2 * 4 * c.num_heads * c.head_dim)


def test_bytes_and_operations_of_states(
    kernels: Kernels, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "linear_key_head_dim": 8}
    small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3.5-0.8b-shape"] | small))
    monkeypatch.setattr(kernel_cases, "_STATE_BYTES", 10000)
    c, types, state = read_model_config(tmp_path), Types(DType.BFLOAT16), 4 * 8 * 16
    one, three, prefill = state_cases(kernels, c, types, SHAPES)
    token = 2 * (2 * 2 * 8 + 3 * 4 * 16 + 2 * 4)
    assert [case.bytes for case in (one, three)] == [rows * (2 * 4 * state + token) for rows in (1, 3)]
    assert prefill.bytes == 2 * 4 * state + 20 * token and prefill.flops == 20 * one.flops == 20 * 7 * state
    for case in (one, three, prefill):
        assert case.calls * 4 * state * (3 if case is three else 1) >= 10000
        out = case.forward(case.batch).hidden
        assert out.shape == (case.rows, 4 * 16) and (kernels.to_numpy(out) != 0).any()
    decode, _ = attention_cases(kernels, c, types, SHAPES)
    assert decode.bytes == 2 * 40 * 2 * 2 * c.num_kv_heads * c.head_dim and decode.calls == 1
    assert not [*state_cases(kernels, read_model_config(tiny_model), types, SHAPES)]


@pytest.mark.parametrize("kind", ["gguf", "fp8"])
def test_weights_that_it_cannot_make_are_refused(
    tiny_model: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kernels", str(tiny_model), "--quantization", kind]) == 2
    assert kind in capsys.readouterr().err
