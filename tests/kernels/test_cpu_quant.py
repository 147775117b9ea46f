"""Quantised products against float64, with the quantisation of the activations modelled exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

from octavo.core.errors import ConfigError, WeightError  # noqa: E402
from octavo.kernels.cpu.linear import KEPT_TYPES, Codes, CpuQuantizedWeight, gguf_weight, quantize_weight  # noqa: E402
from octavo.kernels.interface import Activation  # noqa: E402
from octavo.kernels.torch_backend import from_torch  # noqa: E402
from octavo.kernels.weight_rows import GGUFRows  # noqa: E402
from tests.kernels import torch_facade  # noqa: E402
from tests.kernels.quantized_codes import E2M1_DOUBLED, dequantize_codes  # noqa: E402

#: Values of K that share a scale; of q8_channel any K will do.
GROUPS = {
    **{"q8_channel": 1, "q8_32": 32, "q8_128": 128, "q4_32": 32, "q4_128": 128, "q4_1": 32, "q4_k": 256},
    "mxfp4": 32,
}
FORMATS = tuple(GROUPS)

KERNELS: Any = torch_facade.make_kernels()


def pack_quantized(parts: list[Codes], bias: Tensor | None = None) -> Any:
    offset = None if bias is None else bias.numpy()
    return torch_facade.Facade(CpuQuantizedWeight(KERNELS.runner, parts, offset))


def codes_of(weight: Tensor, kind: str, group: int | None) -> Codes:
    return quantize_weight(from_torch(weight), kind, group)


@pytest.fixture(autouse=True)
def _same_each_time() -> Iterator[None]:
    torch.manual_seed(0)
    with cpu_settings():
        yield


@pytest.fixture(params=_cpu.available_isas().integers)
def isa(request: pytest.FixtureRequest) -> str:
    _cpu.choose_isa(request.param)
    return str(request.param)


def random_weight(kind: str, n: int, blocks: int, seed: int = 0) -> Codes:
    """All codes and 6-bit scales occur, the most extreme ones too; K is `blocks` times the format's group."""
    random = np.random.default_rng(seed)
    group = GROUPS[kind]
    k = blocks * group
    eight = kind.startswith("q8")
    numbers = random.integers(-128 if eight else 0, 128 if eight else 16, (n, k))
    codes = numbers.astype(np.int8 if eight else np.uint8)
    if kind == "q8_channel":
        return Codes(kind, codes, random.standard_normal(n).astype(np.float32))
    if kind == "mxfp4":
        return Codes(kind, codes, random.integers(112, 136, (n, blocks)).astype(np.uint8))
    scales, minima = (random.standard_normal((n, blocks)).astype(np.float16) for _ in range(2))
    six_bits = [random.integers(0, 64, (n, k // 32)).astype(np.uint8) for _ in range(2)]
    return Codes(
        kind, codes, scales, minima if kind in ("q4_1", "q4_k") else None, *(six_bits if kind == "q4_k" else ())
    )


def quantized_rows(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, groups, 32] and float32 scales [rows, groups] of activations."""
    rows, k = x.shape
    groups = np.zeros((rows, -(-k // 32), 32), dtype=np.float32)
    groups.reshape(rows, groups.shape[1] * 32)[:, :k] = x.float().numpy()
    magnitudes = np.abs(groups).max(-1)
    present = magnitudes >= np.float32(1e-35)
    inverse = np.where(present, np.float32(127) / np.where(present, magnitudes, np.float32(1)), np.float32(0))
    return np.rint(groups * inverse[..., None]), np.where(present, magnitudes / np.float32(127), np.float32(0))


def expected(weight: Codes, x: Tensor) -> np.ndarray:
    codes, scales = quantized_rows(x)
    used = (codes * scales[..., None].astype(np.float64)).reshape(len(codes), codes.shape[1] * 32)[:, : x.shape[1]]
    return used @ exact_weights(weight).T


def exact_weights(weight: Codes) -> np.ndarray:
    """The weights in float64."""
    n, k = weight.codes.shape
    if weight.format == "mxfp4":
        return dequantize_codes(weight).astype(np.float64)
    codes = weight.codes.astype(np.float64)
    scales = weight.scales.astype(np.float64).reshape(n, -1)
    scales = np.repeat(scales, k // scales.shape[1], axis=1)
    if weight.format.startswith("q8"):
        return codes * scales
    if weight.minima is None:
        return (codes - 8) * scales
    minima = np.repeat(weight.minima.astype(np.float64), k // weight.minima.shape[1], axis=1)
    if weight.group_scales is None or weight.group_minima is None:
        return codes * scales + minima
    inner = [np.repeat(tensor.astype(np.float64), 32, axis=1) for tensor in (weight.group_scales, weight.group_minima)]
    return codes * scales * inner[0] - minima * inner[1]


def run(layer: Any, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return layer(x, dtype)


def assert_close(out: Tensor, want: np.ndarray, weight: Codes, x: Tensor) -> None:
    """Within the error of float32 sums over the groups: a few units in the last place of the sum of magnitudes."""
    codes, scales = quantized_rows(x)
    used = np.abs(codes * scales[..., None]).reshape(len(codes), codes.shape[1] * 32)[:, : x.shape[1]]
    magnitude = used @ np.abs(exact_weights(weight)).T + 1e-30
    # Minima and codes may cancel: what each contributes is bounded by codes up to 15 and the minimum itself.
    slack = 40 if weight.minima is not None else 4
    assert np.all(np.abs(out.double().numpy() - want) <= slack * 2.0**-23 * magnitude * (2 + codes.shape[1]) ** 0.5)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_product_is_that_of_the_quantised_rows_and_weights(kind: str, data: st.DataObject) -> None:
    n, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 9))
    blocks = data.draw(st.integers(1, 90 if kind == "q8_channel" else 3))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    weight = random_weight(kind, n, blocks, data.draw(st.integers(0, 5)))
    k = weight.codes.shape[1]
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = pack_quantized([weight])
    results = []
    for isa in _cpu.available_isas().integers:
        _cpu.choose_isa(isa)
        results.append(run(layer, x))
        assert_close(results[-1], expected(weight, x), weight, x)
    # No sum is fused with a product, so all instruction sets agree to the bit.
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.startswith("q8")])
def test_integer_sums_are_exact_at_the_extremes(isa: str, kind: str) -> None:
    """Codes of greatest magnitude, which overflow 16 bits wherever pair sums are saturated."""
    k = GROUPS["q4_k"]
    for code, sign in ((-128, 1.0), (127, 1.0), (-128, -1.0), (127, -1.0)):
        codes = np.full((17, k), code, np.int8)
        shape = (17,) if kind == "q8_channel" else (17, k // GROUPS[kind])
        weight = Codes(kind, codes, np.ones(shape, np.float32 if len(shape) == 1 else np.float16))
        x = torch.full((5, k), 127.0 * sign)  # an activation scale of 1
        assert torch.equal(run(pack_quantized([weight]), x), torch.full((5, 17), k * code * 127.0 * sign))


@pytest.mark.parametrize("kind", ["q4_32", "q4_128", "q4_1"])
@pytest.mark.parametrize("code", [0, 15])
def test_integer_sums_of_4_bits_are_exact_at_the_extremes(isa: str, kind: str, code: int) -> None:
    k = 256
    ones = np.ones((17, k // GROUPS[kind]), np.float16)
    minima = -8 * ones if kind == "q4_1" else None
    weight = Codes(kind, np.full((17, k), code, np.uint8), ones, minima)
    for sign in (1.0, -1.0):
        x = torch.full((5, k), 127.0 * sign)
        assert torch.equal(run(pack_quantized([weight]), x), torch.full((5, 17), k * (code - 8) * 127.0 * sign))


@pytest.mark.parametrize("code", [7, 8, 15])
def test_integer_sums_of_mxfp4_are_exact_at_the_extremes(isa: str, code: int) -> None:
    k = 256
    weight = Codes("mxfp4", np.full((17, k), code, np.uint8), np.full((17, k // 32), 128, np.uint8))
    for sign in (1.0, -1.0):
        x = torch.full((5, k), 127.0 * sign)
        want = k * float(E2M1_DOUBLED[code]) * 127.0 * sign
        assert torch.equal(run(pack_quantized([weight]), x), torch.full((5, 17), want))


def test_scales_of_mxfp4_below_the_least_normal_number_count_as_zero(isa: str) -> None:
    scales = np.array([[0, 1, 2, 3, 4, 127, 240]], np.uint8).repeat(3, 0)
    weight = Codes("mxfp4", np.full((3, 7 * 32), 2, np.uint8), scales)  # each code is 1, doubled 2
    for block, scale in enumerate(scales[0].tolist()):
        x = torch.zeros(1, 7 * 32)
        x[0, 32 * block] = 127.0
        want = 0.0 if scale < 2 else 127.0 * 2.0 ** (scale - 127)
        assert run(pack_quantized([weight]), x).tolist() == [[want] * 3]


def test_integer_sums_are_exact(isa: str) -> None:
    """Activations that are their own codes, and scales of one: the result is an integer product."""
    random = np.random.default_rng(3)
    codes = random.integers(-128, 128, (50, 320))
    x = random.integers(-127, 128, (7, 320))
    x.reshape(7, 10, 32)[..., 5] = 127  # gives every group the scale 1
    weight = Codes("q8_32", codes.astype(np.int8), np.ones((50, 10), np.float16))
    out = run(pack_quantized([weight]), torch.from_numpy(x.astype(np.float32)))
    assert np.array_equal(out.numpy(), (x @ codes.T).astype(np.float32))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_the_same_in_any_batch(isa: str, kind: str) -> None:
    blocks = 300 if kind == "q8_channel" else 3
    weight = random_weight(kind, 77, blocks)
    x = torch.randn(150, weight.codes.shape[1]).bfloat16()
    layer = pack_quantized([weight])
    _cpu.set_threads(1)
    everything = run(layer, x)
    for count in (1, 2, 3, 4, 5, 7, 63, 64, 65, 128):
        assert torch.equal(run(layer, x[:count]), everything[:count])
        assert torch.equal(run(layer, x[-count:]), everything[-count:])
    for threads in (2, 3):
        _cpu.set_threads(threads)
        assert torch.equal(run(layer, x), everything)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("columns", [1, 49, 981])
def test_a_few_rows_are_those_of_a_batch_however_many_panels_a_thread_has(isa: str, columns: int, threads: int) -> None:
    """Their weights are read in streams, and a thread's share may be no multiple of them."""
    parts = [random_weight("q8_channel", columns, 64), random_weight("q4_32", 300, 2)]
    x, add = torch.randn(5, 64).bfloat16(), torch.randn(5, columns + 300)
    plain = pack_quantized(parts, torch.randn(columns + 300))
    alike = [random_weight("q4_1", columns, 2), random_weight("q8_32", columns, 2)]
    gated = torch_facade.Facade(CpuQuantizedWeight(KERNELS.runner, alike, None, True))
    _cpu.set_threads(threads)
    whole = plain(x, torch.float32, add.clone(), "silu"), gated(x, torch.bfloat16, None, "silu")
    for rows in (slice(0, 1), slice(4, 5), slice(1, 3), slice(2, 5)):
        assert torch.equal(plain(x[rows], torch.float32, add[rows].clone(), "silu"), whole[0][rows])
        assert torch.equal(gated(x[rows], torch.bfloat16, None, "silu"), whole[1][rows])


@pytest.mark.parametrize("activation", [None, *get_args(Activation)])
@pytest.mark.parametrize("floats", _cpu.available_isas().floats)
def test_which_instruction_set_of_integers_computes_does_not_show(floats: str, activation: str | None) -> None:
    """Nor in what becomes of the sums: bias, residual, activation, and the product of gate and up."""
    weights = [random_weight("q8_channel", 70, 256), random_weight("q4_32", 70, 8)]
    bias, x, add = torch.randn(140), torch.randn(37, 256), torch.randn(37, 140)
    plain = pack_quantized(weights, bias)
    gated = torch_facade.Facade(CpuQuantizedWeight(KERNELS.runner, weights, None, True))
    results: list[list[Tensor]] = []
    for integers in _cpu.available_isas().integers:
        _cpu.choose_isa(f"{floats}+{integers}")
        assert (_cpu.float_isa(), _cpu.integer_isa()) == (floats, integers)
        results.append([plain(x, dtype, add.clone(), activation) for dtype in (torch.float32, torch.bfloat16)])
        if activation is not None:
            results[-1] += [gated(x, dtype, None, activation) for dtype in (torch.float32, torch.bfloat16)]
    assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0], strict=True))


@pytest.mark.parametrize("kind", FORMATS)
def test_many_long_rows_are_the_same_on_every_instruction_set_of_integers(kind: str) -> None:
    """Tiles of 12 and 16 rows, the last one not full, more rows than pass at once, and K in several parts."""
    k = 2300 if kind == "q8_channel" else 2304
    layer, x = pack_quantized([random_weight(kind, 35, k // GROUPS[kind])]), torch.randn(150, k)
    x[3, 7] = float("inf")
    x[5] = 0
    for rows in (31, 32, 33, 48, 150):
        results = []
        for integers in _cpu.available_isas().integers:
            _cpu.choose_isa(integers)
            results.append(run(layer, x[:rows]))
        assert all(torch.allclose(result, results[-1], rtol=0, atol=0, equal_nan=True) for result in results)


def test_strides_parts_bias_and_rounding(isa: str) -> None:
    """Three matrices of different formats in one layer, as a file may hold query, key and value."""
    weights = [random_weight("q4_k", 20, 1), random_weight("q8_32", 7, 8), random_weight("q4_1", 33, 8)]
    bias = torch.randn(60)
    layer = pack_quantized(weights, bias)
    buffer = torch.randn(6, 300)
    x = buffer[:, 10:266]
    out = torch.full((6, 100), 777.0)
    layer.operation(x, out[:, 20:80]).run(_cpu.Step(5))
    separate = torch.cat([run(pack_quantized([weight]), x) for weight in weights], dim=1) + bias
    assert torch.equal(out[:5, 20:80], separate[:5])
    assert (out[:, :20] == 777).all() and (out[:, 80:] == 777).all() and (out[5] == 777).all()
    assert torch.equal(run(layer, x, torch.bfloat16), separate.bfloat16())
    assert layer.width == 60


def test_what_is_no_number_stays_so_in_its_row_alone(isa: str) -> None:
    layer = pack_quantized([random_weight("q8_32", 20, 3)])
    x = torch.randn(4, 96)
    good = run(layer, x)
    for bad in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.clone()
        spoiled[2, 50] = bad
        out = run(layer, spoiled)
        assert out[2].isnan().all()
        assert torch.equal(out[[0, 1, 3]], good[[0, 1, 3]])


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-36, 3e38, -3e38])
def test_activations_of_any_magnitude_are_taken(isa: str, value: float) -> None:
    scales = np.full((3, 1), 2.0**-14, np.float16)
    layer = pack_quantized([Codes("q8_32", np.ones((3, 32), np.int8), scales)])
    out = run(layer, torch.full((1, 32), value))
    want = 32 * 2.0**-14 * (value if abs(value) >= 1e-35 else 0)
    assert np.allclose(out.numpy(), want, rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(KEPT_TYPES))
def test_gguf_blocks_keep_their_values(kind: str) -> None:
    """Codes and scales stand for exactly the values that the file's own library makes of the blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (9, 3 * size), dtype=np.uint8)
    for start in range(0, rows.shape[1], size):  # scales that are numbers
        if kind == "MXFP4":
            rows[:, start] = random.integers(110, 140, 9)
            continue
        halves = 2 if kind in ("Q4_1", "Q4_K") else 1
        at = start + {"TQ1_0": 52, "TQ2_0": 64}.get(kind, 0)
        rows[:, at : at + 2 * halves] = random.standard_normal((9, halves)).astype(np.float16).view(np.uint8)
    if kind == "Q1_0":  # the library has no decoder for it: a bit is the sign of a block's scale
        blocks = rows.reshape(9, 3, size)
        bits = np.unpackbits(blocks[..., 2:], axis=2, bitorder="little")
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
        values = np.where(bits == 1, scales, -scales).astype(np.float32).reshape(9, -1)
    else:
        values = dequantize(rows, GGMLQuantizationType[kind])
    weight = gguf_weight(kind, rows, 3 * block)
    assert np.array_equal(dequantize_codes(weight), values)
    assert np.allclose(exact_weights(weight), values, rtol=1e-6, atol=1e-6)
    x = torch.randn(5, 3 * block)
    layer: Any = KERNELS.pack([GGUFRows(kind, rows, 3 * block, block)])
    assert_close(run(layer, x), expected(weight, x), weight, x)


def test_other_gguf_types_become_8_bits() -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    values = np.random.default_rng(1).standard_normal((6, 512)).astype(np.float32)
    rows = quantize(values, GGMLQuantizationType.Q5_1)
    layer: Any = KERNELS.pack([GGUFRows("Q5_1", rows, 512, 32)])
    assert [part.format for part in layer.parts] == ["q8_32"]
    x = torch.randn(4, 512)
    want = x.numpy() @ dequantize(rows, GGMLQuantizationType.Q5_1).T
    assert np.linalg.norm(run(layer, x).numpy() - want) < 0.01 * np.linalg.norm(want)


def test_a_share_of_gguf_rows_ends_where_a_block_does() -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    values = np.random.default_rng(1).standard_normal((6, 128)).astype(np.float32)
    whole = GGUFRows("Q4_0", quantize(values, GGMLQuantizationType.Q4_0), 128, 32)
    share = whole.take(slice(2, 5), slice(64, 128))
    assert share.shape == (3, 64)
    assert np.array_equal(share.dequantize(), whole.dequantize()[2:5, 64:])
    with pytest.raises(ConfigError, match="blocks hold 32"):
        whole.take(slice(0, 6), slice(0, 48))


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_quantised_to_the_nearest_codes(kind: str, group: int | None, dtype: torch.dtype) -> None:
    weight = torch.randn(19, 256).to(dtype)
    weight[3] = 0
    quantized = []
    for isa in _cpu.available_isas().integers:
        _cpu.choose_isa(isa)
        quantized.append(codes_of(weight, kind, group))
    result = quantized[0]
    assert all(np.array_equal(q.codes, result.codes) and np.array_equal(q.scales, result.scales) for q in quantized)
    errors = (torch.from_numpy(dequantize_codes(result)) - weight.float()).view(19, -1, group or 256)
    scales = torch.from_numpy(result.scales).float().view(19, -1, 1)
    codes = torch.from_numpy(result.codes).view_as(errors)
    inside = (codes > 0) & (codes < 15) if kind == "int4" else codes.abs() < 127
    assert (errors.abs()[inside] <= (0.501 * scales.abs()).expand_as(errors)[inside]).all()
    assert (errors[3] == 0).all()
    # As good as rounding to the range of the greatest magnitude, which is the plain way.
    plain = weight.float().view_as(errors)
    step = plain.abs().amax(-1, keepdim=True) / (8 if kind == "int4" else 127)
    plain_errors = torch.where(step > 0, (plain / step).round() * step - plain, 0)
    assert errors.norm() <= 1.01 * plain_errors.norm()


@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("int4", 128), ("int8", 32), ("int8", 128)])
def test_a_row_that_is_one_group(kind: str, group: int) -> None:
    """Its scale is a group's, not that of a whole row, which takes more memory."""
    rows = 5000
    weight = torch.randn(rows, group)
    alone = codes_of(weight, kind, group)
    assert alone.scales.dtype == np.float16 and alone.scales.shape == (rows, 1)
    beside_another = codes_of(torch.cat([weight, weight.flip(0)], dim=1), kind, group)
    assert np.array_equal(alone.codes, beside_another.codes[:, :group])
    assert np.array_equal(alone.scales, beside_another.scales[:, :1])


def test_4_bits_find_weights_that_lie_on_a_grid() -> None:
    codes = torch.randint(-8, 8, (10, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, 0], codes[:, 32] = -8, -8
    weight = codes * 0.125
    assert np.array_equal(dequantize_codes(codes_of(weight, "int4", 32)), weight.numpy())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_weights_that_cannot_be_quantised_are_refused(bad: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = bad
    with pytest.raises(WeightError, match="infinite"):
        codes_of(weight, "int4", 32)


def test_sizes_and_kinds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 32, not 48"):
        codes_of(torch.zeros(4, 48), "int4", 32)
    with pytest.raises(ConfigError, match="expected int8"):
        codes_of(torch.zeros(4, 64), "int4", None)
    with pytest.raises(ConfigError, match="not kept in its bits"):
        gguf_weight("Q6_K", np.zeros((2, 210), dtype=np.uint8), 256)
    with pytest.raises(ConfigError, match="18 bytes, not 20"):
        gguf_weight("Q4_0", np.zeros((2, 20), dtype=np.uint8), 32)
    with pytest.raises(ConfigError, match="same inputs"):
        pack_quantized([random_weight("q8_32", 2, 1), random_weight("q8_32", 2, 2)])
    with pytest.raises(ConfigError, match="multiples of 128, not 64"):
        pack_quantized([Codes("q8_128", np.zeros((2, 64), np.int8), np.zeros((2, 1), np.float16))])
    with pytest.raises(ConfigError, match="bias"):
        pack_quantized([random_weight("q8_32", 2, 1)], torch.zeros(3))


def test_inputs_that_no_group_divides_get_8_bits() -> None:
    weight, x = torch.randn(20, 77), torch.randn(3, 77)
    layer: Any = KERNELS.pack([weight], quantization="int4")
    assert [part.format for part in layer.parts] == ["q8_channel"]
    want = x @ weight.T
    assert (run(layer, x) - want).norm() < 0.02 * want.norm()


def test_the_layer_takes_the_memory_of_its_bits() -> None:
    weight = torch.randn(1024, 1024)
    for kind, group, bits in (("int8", None, 8.04), ("int8", 32, 8.51), ("int4", 32, 4.51), ("int4", 128, 4.13)):
        assert pack_quantized([codes_of(weight, kind, group)]).parts[0].nbytes * 8 <= bits * weight.numel()
