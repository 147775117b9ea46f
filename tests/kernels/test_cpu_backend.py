"""What the CPU backend does in one pass, against the kernels that it consists of, run at once and from a recording."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from octavo.config.kv_spec import KVSpec
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput
from octavo.kernels.interface import Activation
from octavo.kernels.weight_rows import GGUFRows
from tests.kernels.backends import cpu_settings

_cpu: Any = pytest.importorskip("octavo._cpu")
torch_facade: Any = importlib.import_module("tests.kernels.torch_facade")

#: How weights are held: in their type, quantised, or in the blocks of a file.
KINDS = [None, "int8", "int4", "Q4_0"]


@pytest.fixture
def kernels() -> Iterator[Any]:
    with cpu_settings():
        yield torch_facade.make_kernels(2)


def one_sequence(tokens: int, slots: Tensor | None = None) -> ForwardBatch:
    batch: ForwardBatch = torch_facade.make_batch([tokens], [tokens], torch.arange(-(-tokens // 16)).view(1, -1), 16)
    if slots is not None:
        batch.slot_mapping = slots[None]
    return batch


@pytest.fixture(params=_cpu.available_isas().floats)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with cpu_settings(isa=request.param):
        yield str(request.param)


def packed_weight(kernels: Any, kind: str | None, outputs: int, dtype: torch.dtype, *, gated: bool = False) -> Any:
    weight, bias = torch.randn(outputs, 64).to(dtype), torch.randn(outputs)
    parts: Any = weight.chunk(2) if gated else [weight]
    if kind == "Q4_0":
        parts = [GGUFRows(kind, quantize(part.float().numpy(), GGMLQuantizationType.Q4_0), 64, 32) for part in parts]
        kind = "gguf"
    packed: Any = kernels.pack(parts, bias, kind, gated=gated)
    return packed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [16, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_added_to_the_residual(
    kernels: Any, isa: str, kind: str | None, outputs: int, dtype: torch.dtype
) -> None:
    packed = packed_weight(kernels, kind, outputs, dtype)
    for rows in (1, 70):
        x, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, outputs)
        expected = residual + packed(x, torch.float32)
        assert torch.equal(packed(x, torch.bfloat16, add=residual), expected.bfloat16())
        total = packed(x, torch.float32, add=residual)
        assert torch.equal(total, expected)
        assert total.data_ptr() == residual.data_ptr()


def flushed(x: Tensor) -> Tensor:
    """With zeros for denormals, which torch computes with and the kernels do not."""
    return x.masked_fill(x.abs() < torch.finfo(x.dtype).tiny, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [16, 80, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_see_float32_and_rows_without_an_addend_keep_their_bits(
    kernels: Any, isa: str, kind: str | None, inner: int, dtype: torch.dtype
) -> None:
    """Gated and not, the rounding comes last; a row to which 0 is added has the bits of the product alone."""
    torch.manual_seed(inner)
    gated = packed_weight(kernels, kind, 2 * inner, dtype, gated=True)
    torch.manual_seed(inner)
    plain = packed_weight(kernels, kind, 2 * inner, dtype)
    for rows, name in itertools.product((1, 70), get_args(Activation)):
        x, add = torch.randn(rows, 64).to(dtype), torch.randn(rows, 2 * inner)
        add[::2] = 0
        for added in (None, add):
            again = None if added is None else added.clone
            product = plain(x, torch.float32, again and again())
            activated = torch.empty_like(product)
            arguments = activated.data_ptr(), 2 * inner, _cpu.Dtype.f32, getattr(_cpu.Activation, name)
            _cpu.activate(product.data_ptr(), 2 * inner, *arguments).run(_cpu.Step(rows))
            assert torch.equal(plain(x, None, again and again(), name), activated.to(dtype))
            gate, up = activated[:, :inner], product[:, inner:]
            if name == "swiglu_oai":
                up = up.clamp(-7, 7) + 1
            assert torch.equal(gated(x, None, added, name), flushed(gate * up).to(dtype))
        assert torch.equal(gated(x, None, add, name)[::2], gated(x, activation=name)[::2])
        assert torch.equal(plain(x, None, add, name)[::2], plain(x, activation=name)[::2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_product_is_the_product(kernels: Any, kind: str | None) -> None:
    dtype = torch.bfloat16
    gated, down = packed_weight(kernels, kind, 96, dtype, gated=True), packed_weight(kernels, kind, 48, dtype)
    x, add = torch.randn(9, 64).to(dtype), torch.randn(9, 96)

    def forward(x: Tensor, add: Tensor) -> Tensor:
        return down(x, torch.float32, add=gated(x, torch.float32, add, "gelu"))

    expected = forward(x, add.clone())
    static_x, static_add = torch.zeros(20, 64).to(dtype), torch.zeros(20, 96)
    largest = BatchSize(20, 1, 1, 20, 16)
    replay = kernels.capture(lambda batch: ForwardOutput(forward(static_x, static_add)), largest)
    static_x[:9], static_add[:9] = x, add
    assert torch.equal(replay(one_sequence(9)).hidden, expected)


def test_packed_weights_count_their_bytes(kernels: Any) -> None:
    weight, bias = torch.randn(64, 256).bfloat16(), torch.randn(64)
    assert kernels.pack([weight], bias).packed.nbytes == 64 * 256 * 2 + 64 * 4
    gated = kernels.pack(weight.chunk(2), bias, "int8", gated=True)
    assert sum(part.nbytes for part in gated.parts) == 64 * 256 + 64 * 4
    assert kernels.pack([weight], None, "int4").parts[0].nbytes == 64 * 256 // 2 + 64 * 256 // 32 * 2


def test_a_gate_without_an_activation_is_refused(kernels: Any) -> None:
    for kind in (None, "int8"):
        with pytest.raises(ValueError, match="an activation"):
            packed_weight(kernels, kind, 32, torch.float32, gated=True)(torch.zeros(1, 64))


def test_embedding_begins_the_residual_stream_in_float32(kernels: Any) -> None:
    table = torch.randn(11, 24).bfloat16()
    assert torch.equal(kernels.embedding(torch.tensor([3, 10]), table), table[[3, 10]].float())


@pytest.mark.parametrize("sections", [(), (8, 12, 12), (1,) * 30 + (2,)])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_rotary_and_cache_at_once_and_recorded(kernels: Any, tokens: int, sections: tuple[int, ...]) -> None:
    """One loop over the tokens: on its own, and recorded with a norm of heads before it, as some networks have."""
    heads, kv_heads, head_dim = 6, 2, 64
    table, weight = torch.rand(512, head_dim), torch.rand(head_dim).bfloat16()
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).bfloat16()
    batch = one_sequence(tokens)
    [expected], [cache], [recorded] = (
        kernels.make_group_cache(KVSpec("full", kv_heads, head_dim, "bfloat16"), 1, 32, 16) for _ in range(3)
    )

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([heads, kv_heads, kv_heads], dim=1)

    q, k, v = split(qkv.clone())
    q, k = kernels.rms_norm(q, weight, 1e-6), kernels.rms_norm(k, weight, 1e-6)
    positions = batch.positions
    if sections:
        positions = batch.rotary_positions = torch.randint(512, (3, tokens))
    q, k = kernels.rotary(q, k, positions, table, sections)
    kernels.reshape_and_cache(k, v, expected, batch.slot_mapping[0])

    def forward(rows: Tensor, step: ForwardBatch, cache: Any) -> Tensor:
        q, k, v = split(rows)
        q, k = kernels.rms_norm(q, weight, 1e-6), kernels.rms_norm(k, weight, 1e-6)
        rotated: Tensor = kernels.rotary_and_cache(q, k, v, step, table, cache, sections)
        return rotated

    assert torch.equal(forward(qkv.clone(), batch, cache), q)
    static = torch.zeros(400, heads + 2 * kv_heads, head_dim).bfloat16()
    largest = BatchSize(400, 1, 1, 400, 16, rotary_axes=3 if sections else 0)
    replay = kernels.capture(lambda step: ForwardOutput(forward(static[: len(static)], step, recorded)), largest)
    static[:tokens] = qkv
    assert torch.equal(replay(batch).hidden, q)
    for written in (cache, recorded):
        assert torch.equal(written.key, expected.key) and torch.equal(written.value, expected.value)
    assert expected.key.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_negative_slots_are_written_nowhere(kernels: Any, dtype: torch.dtype) -> None:
    [cache] = kernels.make_group_cache(KVSpec("full", 1, 8, str(dtype).removeprefix("torch.")), 1, 2, 16)
    k, v = torch.randn(2, 3, 1, 8).bfloat16()
    kernels.reshape_and_cache(k, v, cache, torch.full((3,), -1))
    assert not cache.key.any() and not cache.value.any()
    kernels.reshape_and_cache(k, v, cache, torch.tensor([-1, 17, -5]))
    assert cache.key[1].any() and not cache.key[0].any()
