"""Matrix products of the CPU backend: against float64, and bit for bit against themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.errors import ConfigError
from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from octavo.kernels.cpu.array import measure_cpu  # noqa: E402
from octavo.kernels.cpu.backend import CpuKernels  # noqa: E402
from octavo.kernels.cpu.linear import CpuDenseWeight  # noqa: E402
from octavo.kernels.torch_backend import from_torch  # noqa: E402
from tests.busy_machine import once_in_three  # noqa: E402
from tests.torch_types import engine_dtype  # noqa: E402

DTYPES = {torch.float32: _cpu.Dtype.f32, torch.bfloat16: _cpu.Dtype.bf16}
EPS = 2.0**-24
BF16_EPS = 2.0**-8
KERNELS = CpuKernels()


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    with cpu_settings(threads=2):
        yield


@pytest.fixture(params=_cpu.available_isas().floats)
def isa(request: pytest.FixtureRequest) -> str:
    _cpu.choose_isa(request.param)
    return str(request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(weight: Tensor, bias: Tensor | None, gated: bool = False) -> Any:
    offset = None if bias is None else bias.numpy()
    return CpuDenseWeight(KERNELS.runner, [from_torch(weight)], engine_dtype(weight.dtype), offset, gated).packed


def product(packed: Any, x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((x.shape[0], packed.n), float("nan"), dtype=out_dtype)
    op = _cpu.linear(packed, x.data_ptr(), packed.k, DTYPES[x.dtype], out.data_ptr(), packed.n, DTYPES[out_dtype])
    op.run(_cpu.Step(x.shape[0]))
    return out


def silu_mul(packed: Any, x: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    width = packed.n // 2
    out = torch.full((x.shape[0], width), float("nan"), dtype=out_dtype)
    arguments = x.data_ptr(), packed.k, DTYPES[x.dtype], out.data_ptr(), width, DTYPES[out_dtype]
    op = _cpu.linear(packed, *arguments, activation=_cpu.Activation.silu)
    op.run(_cpu.Step(x.shape[0]))
    return out


def exact(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far float32 sums of float32 products may be from it (Higham, 3.1)."""
    if weight.dtype == torch.bfloat16:
        x = x.bfloat16()
    w64, x64 = weight.double(), x.double()
    offset = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    bound = (x64.abs() @ w64.abs().T + offset.abs()) * (2 * (weight.shape[1] + 2) * EPS) + 1e-30
    return x64 @ w64.T + offset, bound


def assert_close(out: Tensor, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    expected, bound = exact(weight, x, bias)
    if out.dtype == torch.bfloat16:
        bound = bound + (expected.abs() + bound) * BF16_EPS
    assert ((out.double() - expected).abs() <= bound).all()


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_product_of_every_type(
    isa: str, weight_dtype: torch.dtype, x_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    @settings(max_examples=30, deadline=None)
    @given(n=st.integers(1, 150), k=st.integers(1, 90), rows=st.integers(0, 40), bias=st.booleans())
    def check(n: int, k: int, rows: int, bias: bool) -> None:
        weight, x = random(n, k, dtype=weight_dtype, seed=1), random(rows, k, dtype=x_dtype, seed=2)
        offset = random(n, seed=3) if bias else None
        assert_close(product(pack(weight, offset), x, out_dtype), weight, x, offset)

    check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows_gives_each_row_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    weight, x = random(203, 77, dtype=dtype), random(70, 77, dtype=dtype, seed=1)
    packed = pack(weight, random(203, seed=2))
    alone = torch.cat([product(packed, x[r : r + 1]) for r in range(70)])
    assert_close(alone, weight, x, random(203, seed=2))
    for rows in range(71):
        assert torch.equal(product(packed, x[:rows]), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_and_threads_do_not_show(isa: str, dtype: torch.dtype) -> None:
    # Few enough k for a whole block of rows, many enough rows for several blocks and parts of them.
    weight, x = random(100, 41, dtype=dtype), random(617, 41, dtype=dtype, seed=1)
    packed = pack(weight, None)
    _cpu.set_threads(1)
    alone = torch.cat([product(packed, x[r : r + 1]) for r in range(len(x))])
    assert_close(alone, weight, x)
    for threads in (1, 2, 3, 5):
        _cpu.set_threads(threads)
        assert torch.equal(product(packed, x), alone)
        assert torch.equal(product(packed, x[300:]), alone[300:])


def test_a_row_longer_than_a_block_of_the_cache(isa: str) -> None:
    weight, x = random(20, 30001, dtype=torch.bfloat16), random(70, 30001, dtype=torch.bfloat16, seed=1)
    packed = pack(weight, None)
    out = product(packed, x)
    assert_close(out, weight, x)
    assert torch.equal(product(packed, x[69:]), out[69:])


def test_threads_share_a_step_that_has_many_products(isa: str) -> None:
    x = random(9, 64, dtype=torch.bfloat16)
    weights = [random(160, 64, dtype=torch.bfloat16, seed=i) for i in range(50)]
    packed = [pack(w, None) for w in weights]
    outs = [torch.empty(9, 160) for _ in weights]
    tape = _cpu.Tape()
    for p, out in zip(packed, outs, strict=True):
        tape.append(_cpu.linear(p, x.data_ptr(), 64, DTYPES[x.dtype], out.data_ptr(), 160, _cpu.Dtype.f32))
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        tape.run(_cpu.Step(9))
        for p, out in zip(packed, outs, strict=True):
            assert torch.equal(out, product(p, x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_all_three(isa: str, dtype: torch.dtype) -> None:
    weight, x = random(37, 60, dtype=dtype)[:, 5:38], random(11, 50, dtype=dtype, seed=1)[:, 3:36]
    packed = pack(weight, None)
    out = torch.full((11, 64), 7.0, dtype=dtype)
    op = _cpu.linear(packed, x.data_ptr(), 50, DTYPES[dtype], out[:, 9:].data_ptr(), 64, DTYPES[dtype])
    op.run(_cpu.Step(11))
    assert torch.equal(out[:, 9:46], product(pack(weight.contiguous(), None), x.contiguous(), dtype))
    assert (out[:, :9] == 7).all() and (out[:, 46:] == 7).all()


def test_float32_rows_are_rounded_for_bfloat16_weights(isa: str) -> None:
    packed, x = pack(random(48, 100, dtype=torch.bfloat16), None), random(7, 100, seed=1)
    assert torch.equal(product(packed, x), product(packed, x.bfloat16()))


def test_results_are_rounded_to_nearest_even(isa: str) -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3.3895314e38, 0.0])
    out = product(pack(torch.ones(1, 1), None), ties.view(-1, 1), torch.bfloat16)
    assert torch.equal(out.view(-1), ties.bfloat16())


def test_what_is_not_finite_stays_in_its_row_and_column(isa: str) -> None:
    weight, x = random(40, 33, dtype=torch.bfloat16), random(12, 33, dtype=torch.bfloat16, seed=1)
    clean = product(pack(weight, None), x)
    x[5, 32], weight[17, 0] = float("inf"), float("nan")
    out = product(pack(weight, None), x)
    touched = torch.zeros(12, 40, dtype=torch.bool)
    touched[5], touched[:, 17] = True, True
    assert torch.equal(out[~touched], clean[~touched])
    assert not out[touched].isfinite().any()


# ---- what is done with the product ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_add_adds_what_linear_stores(isa: str, dtype: torch.dtype) -> None:
    packed, x = pack(random(35, 50, dtype=dtype), random(35, seed=4)), random(13, 50, dtype=dtype, seed=1)
    total = random(13, 40, seed=2)
    expected = total.clone()
    expected[:, :35] += product(packed, x)
    arguments = x.data_ptr(), 50, DTYPES[dtype], total.data_ptr(), 40, _cpu.Dtype.f32, total.data_ptr(), 40
    _cpu.linear(packed, *arguments).run(_cpu.Step(13))
    assert torch.equal(total, expected)


@pytest.mark.parametrize(("dtype", "width", "rows"), [*itertools.product(DTYPES, (1, 7, 8, 9, 48, 61), (1, 2, 11))])
def test_silu_mul(isa: str, dtype: torch.dtype, width: int, rows: int) -> None:
    weight, bias = random(2 * width, 70, dtype=dtype), random(2 * width, seed=1)
    x = random(rows, 70, dtype=dtype, seed=2)
    packed = pack(weight, bias, gated=True)
    out = silu_mul(packed, x)
    gate, up = product(pack(weight, bias), x).double().chunk(2, dim=1)
    expected = gate * torch.sigmoid(gate) * up
    assert ((out.double() - expected).abs() <= expected.abs() * 16 * EPS + 1e-30).all()
    for r in range(rows):
        assert torch.equal(silu_mul(packed, x[r : r + 1]), out[r : r + 1])
    assert torch.equal(silu_mul(packed, x, torch.bfloat16), out.bfloat16())


def test_silu_of_extreme_gates(isa: str) -> None:
    gates = torch.tensor([-1e4, -88.0, -20.0, -1e-3, -0.0, 0.0, 1e-3, 20.0, 88.0, 1e4, float("inf"), float("nan")])
    packed = pack(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None, gated=True)
    out = silu_mul(packed, torch.stack((gates, torch.ones(12)), dim=1)).view(-1).double()
    expected = torch.nn.functional.silu(gates.double())
    # inf * 0 in the other column's sum: the row of the infinite gate has a NaN in up.
    assert out[-2:].isnan().all()
    assert ((out - expected)[:-2].abs() <= expected[:-2].abs() * 16 * EPS + 1e-35).all()


# ---- packed weights -------------------------------------------------------------------------------------------------


def test_packed_weights_tell_their_shape() -> None:
    packed = pack(random(33, 7, dtype=torch.bfloat16), random(33))
    assert (packed.n, packed.k, packed.dtype, packed.gate_up) == (33, 7, _cpu.Dtype.bf16, False)
    assert packed.nbytes == 48 * 8 * 2 + 48 * 4
    assert pack(random(16, 7), None).nbytes == 16 * 7 * 4


def test_operations_keep_their_weights_alive() -> None:
    x, out = random(1, 300), torch.empty(1, 300)
    weight = random(300, 300)
    op = _cpu.linear(pack(weight, None), x.data_ptr(), 300, _cpu.Dtype.f32, out.data_ptr(), 300, _cpu.Dtype.f32)
    others = [pack(random(300, 300, seed=i), None) for i in range(100)]
    op.run(_cpu.Step(1))
    assert_close(out, weight, x)
    assert len(others) == 100


def test_dropped_weights_give_their_memory_back() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc")
    weight = random(4096, 2048, dtype=torch.bfloat16)
    pack(weight, None)

    def measure() -> dict[str, bool]:  # other threads, and a machine short of memory, change it too
        before = resident()
        held = pack(weight, None)
        taken = resident() - before
        del held
        left = resident() - before
        return {
            f"more than 12 MiB taken, not {taken}": taken > 12 << 20,
            f"less than 4 MiB left: {left}": left < 4 << 20,
        }

    once_in_three(measure)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, g: _cpu.linear(p, 0, 7, _cpu.Dtype.f32, 0, 16, _cpu.Dtype.f32), "x_stride 7 is less than k 8"),
        (lambda p, g: _cpu.linear(p, 0, 8, _cpu.Dtype.f32, 0, 15, _cpu.Dtype.f32), "out_stride 15 .* 16 columns"),
        (lambda p, g: _cpu.linear(p, 0, 8, _cpu.Dtype.i8, 0, 16, _cpu.Dtype.f32), "float32 or bfloat16"),
        (lambda p, g: _cpu.linear(g, 0, 8, _cpu.Dtype.f32, 0, 16, _cpu.Dtype.f32), "need an activation"),
        (
            lambda p, g: _cpu.linear(p, 0, 8, _cpu.Dtype.f32, 0, 16, _cpu.Dtype.f32, 8, 15),
            "add_stride 15 .* 16 columns",
        ),
        (lambda p, g: _cpu.pack_linear([(0, 0, 8)], 8, _cpu.Dtype.f32), "0 x 8"),
        (lambda p, g: _cpu.pack_linear([(0, 2, 7)], 8, _cpu.Dtype.f32), "row stride 7"),
        (lambda p, g: _cpu.pack_linear([(0, 3, 8)], 8, _cpu.Dtype.f32, gate_up=True), "3 is odd"),
    ],
)
def test_wrong_calls_are_refused(call: Any, message: str) -> None:
    plain, gate_up = pack(random(16, 8), None), pack(random(16, 8), None, gated=True)
    with pytest.raises(ValueError, match=message):
        call(plain, gate_up)


def test_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"float32 or bfloat16, not in float16"):
        pack(random(4, 4, dtype=torch.float16), None)


# ---- threads and limits ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_sleep_between_steps() -> None:
    _cpu.set_threads(4)
    packed, x = pack(random(64, 64), None), random(3, 64)

    def measure() -> dict[str, bool]:
        product(packed, x)
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        seconds = time.process_time() - before
        return {f"less than 0.05 s of processor time in half a second, not {seconds} s": seconds < 0.05}

    once_in_three(measure)


def live_threads() -> int:
    """Threads of this process. One that was waited for may still be listed: as exiting (PF_EXITING of proc(5), 4)."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat") as f:
            flags = int(f.read().rsplit(")", 1)[1].split()[6])
            count += not flags & 4
    return count


def test_changing_the_number_of_threads_ends_the_old_ones() -> None:
    if not os.path.exists("/proc/self/task"):
        pytest.skip("needs /proc")
    packed, x = pack(random(640, 64), None), random(3, 64)
    expected = product(packed, x)
    counts = []
    for threads in (1, 6, 2, 3, 1):
        _cpu.set_threads(threads)
        assert torch.equal(product(packed, x), expected)
        counts.append(live_threads() - threads)
    assert len(set(counts)) == 1 and threading.active_count() >= 1


def test_limits_are_plausible() -> None:
    limits = measure_cpu(1)
    assert limits.threads == 1 and limits.instruction_sets == _cpu.isa()
    assert 0.1 < limits.read_gb_s < 2000
    emulated = "EMULATED_CPU_KERNELS" in os.environ
    slowest = 0.001 if emulated else 0.1  # instructions in plain C++ are slow, and tiles are not measured
    assert 0.1 < limits.chunk_gb_s < 2000
    assert slowest < limits.fma_gflops < 2000
    for measured, there_is in (
        (limits.bf16_dot_gflops, _cpu.float_isa() in (("avx512_bf16",) if emulated else ("avx512_bf16", "amx_bf16"))),
        (limits.int8_dot_gops, _cpu.integer_isa() in ("amx_int8", "avx512_vnni", "avx_vnni")),
    ):
        assert slowest < measured < 10_000 if there_is else measured == 0
    with pytest.raises(ValueError, match="not 0"):
        measure_cpu(0)
