"""What of a model fits: against what the kernels pack and what engines take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.config.engine_config import make_config
from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.engine import machine_rates
from octavo.engine.fit import Choice, Fit, Load, MemoryBounds, Sizes, StepTimes
from octavo.engine.llm import LLM
from octavo.engine.machine_rates import AttentionRate, MachineRates, ProductRate, StepRate, interpolate
from octavo.engine.memory_needs import packed_bytes
from octavo.kernels import load_kernels
from octavo.kernels.cpu.backend import CpuKernels
from octavo.kernels.weight_rows import GGUFRows
from octavo.loader.resolve import resolve_model
from octavo.loader.weights import read_config
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights, weight_bytes
from tests.models.mtp_models import save_mtp

MIB = 1 << 20
STEP = StepRate(1e-4, 1e-5, 1e-5, 1e-9, 80 * MIB, 400 * MIB, 60 * MIB)


class FixedRates:
    """A machine whose rates are round numbers."""

    def product(self, form: str, rows: float, working_set: float) -> float:
        return {"float32": 4e-10, "bfloat16": 2e-10, "int8": 1e-10, "int4": 0.5e-10}[form] * max(1.0, rows / 8)

    def attention(self, dtype: str, kv_dtype: str, head_dim: int, queries: int) -> AttentionRate:
        return AttentionRate(1e-10, 1e-11)

    def step(self) -> StepRate:
        return STEP


def fit(
    model: Path | str,
    available: int = 4096 * MIB,
    addresses: int | None = None,
    folder: Path | None = None,
    **options: Any,
) -> Fit:
    config = make_config(model=str(model), **options)
    rates: Any = FixedRates()
    return Fit(
        config,
        read_config(Path(model), config),
        load_kernels("cpu", "cpu"),
        MemoryBounds(available, addresses),
        None,
        rates,
        folder,
    )


@pytest.mark.parametrize("shape", [(64, 256), (96, 80), (256, 64)])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_packed_bytes_are_those_of_the_kernels(form: str, shape: tuple[int, int]) -> None:
    dtype = DType.FLOAT32 if form == "float32" else DType.BFLOAT16
    values = np.ones(shape, np.float32).astype(dtype.numpy)
    packed: Any = load_kernels("cpu", "cpu").pack([values], None, form if "int" in form else None, dtype=dtype)
    assert packed._matrix.nbytes == pytest.approx(packed_bytes(form, shape), rel=0.01)


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4"])
def test_packed_bytes_of_gguf_types_are_those_of_the_kernels(form: str) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[form]]
    rows = GGUFRows(form, np.zeros((64, 512 // block * size), np.uint8), 512, block)
    packed: Any = load_kernels("cpu", "cpu").pack([rows], None, "gguf", dtype=DType.BFLOAT16)
    assert packed._matrix.nbytes == pytest.approx(packed_bytes(form, (64, 512)), rel=0.01)


def first(fit: Fit, load: Load) -> Choice:
    return fit.choices(load)[0]


def test_the_widest_types_that_fit_come_first(tiny_model: Path) -> None:
    load = Load(users=2, context=64)
    choices = fit(tiny_model).choices(load)
    assert all(choice.fits for choice in choices)
    forms = [(choice.dtype, choice.quantization, choice.kv_cache_dtype) for choice in choices]
    assert forms[:2] == [("float32", "none", "auto"), ("float32", "none", "int8")]
    assert [form for form in forms if form[2] == "auto"][-2:] == [
        ("bfloat16", "int8", "auto"),
        ("bfloat16", "int4", "auto"),
    ]
    # A little less than the widest takes: the next is recommended, and the first says why it is not.
    less = fit(tiny_model, available=int((choices[0].needed_bytes - 4096) / 0.98)).choices(load)
    assert (less[0].dtype, less[0].quantization, less[0].kv_cache_dtype) != forms[0] and less[0].fits
    refused = next(choice for choice in less if (choice.dtype, choice.quantization, choice.kv_cache_dtype) == forms[0])
    assert "can be had" in refused.misses[0]


def test_an_engine_takes_what_is_promised(tiny_model: Path) -> None:
    load = Load(users=3, context=80)
    for each in fit(tiny_model).choices(load)[::3]:
        options = fit(tiny_model).engine_options(each)
        core = LLM(str(tiny_model), **options).llm_engine.core
        assert (core.max_model_len, core.options.max_num_seqs) == (80, 3)
        assert core.startup.groups[0].num_blocks >= 3 * math.ceil(80 / 16)
        assert core.dtype == each.dtype


def test_without_users_and_context_all_that_fits_is_taken(tiny_model: Path) -> None:
    longest = read_config(tiny_model, make_config(model=str(tiny_model))).default_length
    ample = first(fit(tiny_model), Load())
    assert (ample.max_model_len, ample.max_num_seqs) == (longest, 256)
    # Memory for one more sequence than two of full length.
    one = first(fit(tiny_model), Load(users=1))
    two = first(fit(tiny_model), Load(users=2))
    room = two.needed_bytes + (two.needed_bytes - one.needed_bytes) // 2
    tight = first(fit(tiny_model, available=int(room / 0.98) + MIB), Load())
    assert tight.max_num_seqs <= ample.max_num_seqs and tight.fits


def test_the_nearest_has_a_shorter_context_or_fewer_users(tiny_model: Path) -> None:
    small = make_config(model=str(tiny_model))
    longest = read_config(tiny_model, small).default_length
    load = Load(users=64, context=longest)
    whole = fit(tiny_model)
    least = min(whole.choices(load), key=lambda choice: choice.needed_bytes)
    fewer = fit(tiny_model, available=int((least.needed_bytes - least.kv_cache_bytes // 4) / 0.98))
    assert not any(choice.fits for choice in fewer.choices(load))
    nearest = fewer.nearest(load)
    assert nearest is not None and nearest.fits
    assert nearest.max_num_seqs == 64 and longest // 4 <= nearest.max_model_len < longest
    assert fit(tiny_model, available=MIB).nearest(load) is None
    assert fit(tiny_model).least_bytes() < least.needed_bytes


def test_targets_of_time_are_kept_or_named(tiny_model: Path) -> None:
    times = {choice.quantization: choice.speed for choice in fit(tiny_model).choices(Load(users=2, context=64))}
    assert times["none"] and times["int4"] and times["none"].tpot > times["int4"].tpot
    bound = (times["none"].tpot + times["int4"].tpot) / 2
    choices = fit(tiny_model).choices(Load(users=2, context=64, tpot=bound))
    assert choices[0].fits and choices[0].speed and choices[0].speed.tpot <= bound
    assert any("s for a token, more than" in miss for choice in choices for miss in choice.misses)
    hopeless = Load(users=2, context=64, ttft=1e-9)
    assert not any(choice.fits for choice in fit(tiny_model).choices(hopeless))
    assert fit(tiny_model).nearest(hopeless) is None


def test_addresses_count_under_a_limit_of_them(tiny_model: Path) -> None:
    load = Load(users=1, context=64)
    assert fit(tiny_model, addresses=2048 * MIB).choices(load)[0].fits
    refused = fit(tiny_model, addresses=300 * MIB).choices(load)[0]
    assert "ulimit -v allows 300 MiB" in refused.misses[0]


class GPUKernels(CpuKernels):
    """Sizes of a GPU's blocks, without one."""

    name = "triton"

    def block_bytes(self, spec: KVSpec, block_size: int) -> int:
        return block_size * spec.bytes_per_token


def test_on_a_gpu_its_memory_counts_and_no_speed_is_told(tiny_model: Path) -> None:
    options = make_config(model=str(tiny_model), dtype="bfloat16")
    config, kernels = read_config(tiny_model, options), GPUKernels()
    total = 64 * MIB
    whole = Fit(options, config, kernels, MemoryBounds(total, None, total))
    choices = whole.choices(Load(users=2, context=64))
    assert {choice.quantization for choice in choices} == {"none", "fp8", "int8", "int4"}
    assert {choice.kv_cache_dtype for choice in choices} == {"auto", "fp8", "int8"}
    assert all(choice.fits and choice.speed is None and choice.process_bytes == 0 for choice in choices)
    assert whole.engine_options(choices[0]) == {"max_model_len": 64, "max_num_seqs": 2}
    # Other programs use all but 1 MiB of what gpu_memory_utilization allows.
    used = Fit(options, config, kernels, MemoryBounds(int(0.1 * total) + MIB, None, total))
    assert not used.choices(Load(users=2, context=64))[0].fits


@pytest.mark.parametrize("name", ["glm", "qwen3_5"])
def test_layers_that_draft_are_counted(name: str, tmp_path: Path) -> None:
    """Their weights, and their share of each block of the KV cache."""
    save_mtp(name, tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "kernels": "cpu"}
    options["quantization"] = "none"
    counting, without = (fit(tmp_path, folder=folder, **options) for folder in (tmp_path, None))
    load = Load(users=2, context=64)
    best, plain = first(counting, load), first(without, load)
    chosen = counting.engine_options(best)
    assert "speculative_config" not in chosen and without.engine_options(plain)["speculative_config"] == "none"
    llm = LLM(str(tmp_path), **options, **chosen)
    executor: Any = llm.llm_engine.core.executor
    engine = executor._alive().runner.loaded
    assert engine.drafter is not None
    assert 0 < best.draft_bytes == best.weight_bytes - plain.weight_bytes
    assert best.draft_bytes == pytest.approx(weight_bytes(engine.drafter.network), rel=0.05)
    assert plain.draft_bytes == 0 and "draft" in best.describe() and "draft" not in plain.describe()
    sizes = counting.sizes(best.dtype, best.quantization, best.kv_cache_dtype)
    assert counting._groups(sizes, engine.options) == engine.layers.shapes()
    assert best.kv_cache_bytes > plain.kv_cache_bytes and best.step_bytes > plain.step_bytes


def test_several_workers_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"leave out tensor_parallel_size \(2\)"):
        fit(tiny_model, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="adapters and draft models"):
        fit(tiny_model, enable_lora=True)


def test_a_step_is_the_sum_of_its_parts(tiny_model: Path) -> None:
    options = make_config(model=str(tiny_model))
    network = build_without_weights(read_config(tiny_model, options), "bfloat16")
    config = network.config
    rates: Any = FixedRates()
    times = StepTimes(Sizes(network, "bfloat16"), rates)
    elements = {
        kind: sum(math.prod(weight.shape) for weight in network.weights() if weight.kind == kind)
        for kind in ("linear", "head")
    }
    overhead = STEP.step + config.num_layers * STEP.layer
    read = 2 * 50 * sum(spec.bytes_per_token for spec in network.kv_specs)
    expected = overhead + 2 * (STEP.row + config.vocab_size * STEP.logit)
    expected += sum(elements.values()) * 2e-10 + read * 1e-10
    assert times.decode(2, 50) == pytest.approx(expected)
    pairs = 16 * 17 / 2 + 16 * 32  # a second chunk of 16 tokens after 32
    operations = 4 * config.num_heads * pairs * sum(spec.head_dim for spec in network.kv_specs)
    expected = overhead + STEP.row + config.vocab_size * STEP.logit
    expected += elements["linear"] * 2e-10 * 2 + elements["head"] * 2e-10 + operations * 1e-11
    assert times.prefill(32, 16) == pytest.approx(expected)


def test_prompts_pass_only_through_layers_that_write_a_cache() -> None:
    network = build_without_weights(read_model_config(resolve_model("gemma-4-e2b-shape")), "bfloat16")
    parts = Sizes(network, "bfloat16").parts
    elements = {kind: sum(numbers for each, *_, numbers in parts if each == kind) for kind in ("linear", "head")}
    late = elements["head"] - 262144 * 1536
    # 20 of 35 layers, whose MLPs are twice as wide.
    assert 1.9 < late / (elements["linear"] - 1536 * 35 * 256) < 2.6


def test_while_loading_random_weights_are_wider(tiny_model: Path) -> None:
    config = read_config(tiny_model, make_config(model=str(tiny_model)))
    network = build_without_weights(config, "bfloat16", "int8")
    stored, random = (Sizes(network, "bfloat16", is_random=is_random) for is_random in (False, True))
    largest = max(math.prod(layer.expected[shard]) for _, layer, shard in network.tensors())
    assert stored.loading_bytes >= stored.weight_bytes == random.weight_bytes
    assert stored.loading_bytes < random.loading_bytes and random.loading_bytes >= (2 + 4) * largest
    network = build_without_weights(config, "float32", "int8")
    stored, random = (Sizes(network, "float32", is_random=is_random) for is_random in (False, True))
    assert stored.loading_bytes == random.loading_bytes, "they are made in their own type"


# ---- rates


def test_interpolation_is_between_points_and_flat_outside() -> None:
    points = [(1.0, 10.0), (3.0, 20.0)]
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]


def test_rates_are_measured_once_for_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(self: MachineRates, form: str) -> list[ProductRate]:
        calls.append(form)
        return [ProductRate(1, 1 << 20, 1e-10), ProductRate(1, 1 << 30, 3e-10), ProductRate(9, 1 << 20, 9e-10)]

    monkeypatch.setattr(MachineRates, "_measure_products", measure)
    monkeypatch.setattr(machine_rates, "_is_busy", lambda: False)
    kernels = load_kernels("cpu", "cpu")
    rates = MachineRates("a processor", kernels, tmp_path)
    assert rates.product("int8", 1, 1 << 20) == pytest.approx(1e-10)
    assert rates.product("int8", 1, 1 << 25) == pytest.approx(2e-10)  # half way between the logarithms
    assert rates.product("int8", 5, 1 << 20) == pytest.approx(5e-10)
    assert rates.product("int8", 13, 1 << 20) == pytest.approx(13e-10)  # beyond the last rows as before it
    assert MachineRates("a processor", kernels, tmp_path).product("int8", 1, 1) == pytest.approx(1e-10)
    assert calls == ["int8"]
    MachineRates("another", kernels, tmp_path).product("int8", 1, 1)
    assert calls == ["int8", "int8"]
    for file in tmp_path.iterdir():
        file.write_text("damaged")
    MachineRates("another", kernels, tmp_path).product("int8", 1, 1)
    assert calls == ["int8"] * 3


def test_what_a_busy_machine_measured_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter([9e-10, 1e-10, 5e-10])

    def measure(self: MachineRates, form: str) -> list[ProductRate]:
        rate = next(seconds)
        return [ProductRate(1, 1, rate), ProductRate(2, 1, rate)]

    def rate() -> float:
        return MachineRates("here", load_kernels("cpu", "cpu"), tmp_path).product("int8", 1, 1)

    monkeypatch.setattr(MachineRates, "_measure_products", measure)
    monkeypatch.setattr(machine_rates, "_is_busy", lambda: True)
    assert [rate(), rate()] == [9e-10, 9e-10] and caplog.text.count("other processes are busy") == 1
    monkeypatch.setattr(machine_rates, "_is_busy", lambda: False)
    assert [rate(), rate()] == [1e-10, 1e-10]


def test_attention_is_measured(tmp_path: Path) -> None:
    rate = MachineRates("here", load_kernels("cpu", "cpu"), tmp_path).attention("bfloat16", "bfloat16", 32, 2)
    # Bounds of any processor: 0.01 to 1000 GB/s, 1 to 10^6 MFLOP/s.
    assert 1e-12 < rate.byte < 1e-7 and 1e-15 < rate.operation < 1e-6


@pytest.mark.slow
def test_products_and_steps_are_measured(tmp_path: Path) -> None:
    rates = MachineRates("here", load_kernels("cpu", "cpu"), tmp_path)
    for form in ("float32", "bfloat16", "int8", "int4", "Q4_K"):
        assert 1e-13 < rates.product(form, 1, 1 << 28) < rates.product(form, 512, 1 << 28) < 1e-5
    step = rates.step()
    assert 1e-6 < step.step < 0.1 and 0 <= step.layer < 0.01
    assert 20 * MIB < step.engine_bytes < step.engine_addresses and step.server_bytes > 20 * MIB
    with pytest.raises(ConfigError, match="no product of weights in 'Q9_9'"):
        rates.product("Q9_9", 1, 1)
    assert machine_rates._read(next(tmp_path.iterdir()), rates.machine).step == step
