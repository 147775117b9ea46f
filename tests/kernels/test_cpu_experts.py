"""Mixtures of experts: routing beside transformers' routers, experts against float64, and their bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from octavo.core.errors import ConfigError  # noqa: E402
from octavo.kernels.interface import PackedExperts, PackedWeight, RoutingSpec  # noqa: E402
from octavo.kernels.reference import ReferenceKernels  # noqa: E402
from octavo.kernels.torch_backend import PlainExperts, sum_as_tree  # noqa: E402
from octavo.kernels.weight_rows import GGUFRows  # noqa: E402
from tests.kernels import torch_facade  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def isa_and_threads_as_before() -> Iterator[None]:
    isa, threads = _cpu.isa(), _cpu.num_threads()
    yield
    _cpu.choose_isa(isa)
    _cpu.set_threads(threads)


@pytest.fixture(params=[*_cpu.available_isas().floats, "reference"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return torch_facade.of_torch(ReferenceKernels())
    made = torch_facade.make_kernels()
    _cpu.choose_isa(request.param)
    return made


@pytest.fixture(params=_cpu.available_isas().floats)
def cpu(request: pytest.FixtureRequest) -> Any:
    made = torch_facade.make_kernels()
    _cpu.choose_isa(request.param)
    return made


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- routing --------------------------------------------------------------------------------------------------------


def routers() -> dict[str, tuple[Any, RoutingSpec]]:
    """transformers' routers of 24 experts, whose weight is the identity: their input is the logits."""
    from transformers import (
        DeepseekV2Config,
        DeepseekV3Config,
        Ernie4_5_MoeConfig,
        MixtralConfig,
        PhimoeConfig,
        Qwen3MoeConfig,
    )
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    size: dict[str, Any] = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 4,
    }
    groups = {"n_group": 6, "topk_group": 2, "routed_scaling_factor": 2.5}
    v2 = DeepseekV2Config(**size, **groups, n_routed_experts=24, topk_method="group_limited_greedy")
    v3 = DeepseekV3Config(**size, **groups, n_routed_experts=24, norm_topk_prob=True)
    limited = RoutingSpec(4, scale=2.5, num_groups=6, top_groups=2)
    ernie = Ernie4_5_MoeConfig(hidden_size=24, moe_num_experts=24, moe_k=4, moe_norm_min=0.3)
    # Some experts are near the best two.
    phi = PhimoeConfig(**{**size, "num_experts_per_tok": 2}, num_local_experts=24, router_jitter_noise=0.2)
    return {
        "mixtral": (
            MixtralTopKRouter(MixtralConfig(**size, num_local_experts=24)),
            RoutingSpec(4, renormalize=True),
        ),
        "qwen3": (Qwen3MoeTopKRouter(Qwen3MoeConfig(**size, num_experts=24)), RoutingSpec(4)),
        "deepseek-v2": (DeepseekV2TopkRouter(v2), limited),
        "deepseek-v3": (
            DeepseekV3TopkRouter(v3),
            replace(limited, scoring="sigmoid", renormalize=True, best_of_group=2),
        ),
        "ernie": (Ernie4_5_MoeTopKRouter(ernie), RoutingSpec(4, renormalize=True, least_sum=0.3)),
        "phimoe": (PhimoeTopKRouter(phi).eval(), RoutingSpec(2, "sparsemixer", jitter=0.2)),
    }


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "deepseek-v2", "deepseek-v3", "ernie", "phimoe"])
def test_routing_is_that_of_transformers(kernels: Any, name: str) -> None:
    router, spec = routers()[name]
    router.weight.data.copy_(torch.eye(24))
    bias = None
    if name in ("deepseek-v3", "ernie"):  # large enough to change the choice
        holder = router.moe_statics if name == "ernie" else router
        bias = holder.e_score_correction_bias.data.copy_(random(24, seed=3)).flatten()
    logits = random(50, 24, seed=1) * 2
    _, weights, experts = router(logits)
    ours, our_weights = kernels.route(logits, spec, bias)
    assert ours.dtype == torch.int32 and our_weights.dtype == torch.float32
    order, our_order = experts.argsort(1), ours.long().argsort(1)  # transformers may leave the chosen unsorted
    assert torch.equal(ours.long().gather(1, our_order), experts.gather(1, order))
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, order), atol=1e-6, rtol=1e-5)


def test_of_equal_scores_the_lowest_expert_is_chosen(kernels: Any) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 3.0], [0.0] * 6])
    experts, _ = kernels.route(logits, RoutingSpec(4))
    assert experts.tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]
    experts, _ = kernels.route(logits, RoutingSpec(2, num_groups=3, top_groups=1))
    assert experts.tolist() == [[1, 0], [0, 1]]


def test_weights_have_factors_of_their_experts_last(kernels: Any) -> None:
    logits, factors = random(9, 24, seed=1), random(24, seed=2)
    spec = RoutingSpec(4, renormalize=True, scale=2.0)
    experts, weights = kernels.route(logits, spec)
    scaled_experts, scaled = kernels.route(logits, spec, factors=factors)
    assert torch.equal(scaled_experts, experts)
    torch.testing.assert_close(scaled, weights * factors[experts.long()])


def test_sigmoids_are_compared_by_their_logits(kernels: Any) -> None:
    """Those of the first two are both 1."""
    logits = torch.tensor([[20.0, 30.0, 1.0, float("-inf")], [float("-inf")] * 4])
    experts, weights = kernels.route(logits, RoutingSpec(2, "sigmoid"))
    assert experts[0].tolist() == [1, 0] and len(set(experts[1].tolist())) == 2
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_a_shared_expert_comes_last_with_the_sigmoid_of_its_logit(kernels: Any) -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 4.0]])
    experts, weights = kernels.route(logits, RoutingSpec(2, renormalize=True, scale=3.0, shared=1))
    assert experts.tolist() == [[1, 0, 3]]
    scores = logits[0, [1, 0]].double().exp()
    expected = torch.cat((3 * scores / scores.sum(), logits[0, 3:].double().sigmoid()))
    torch.testing.assert_close(weights[0].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "spec", [RoutingSpec(3, renormalize=True), RoutingSpec(3, "sigmoid"), RoutingSpec(3, "sparsemixer", jitter=0.1)]
)
def test_logits_that_are_not_numbers_stay_in_their_row(kernels: Any, spec: RoutingSpec) -> None:
    logits = random(3, 8, seed=1)
    clean = kernels.route(logits, spec)
    broken = logits.clone()
    broken[1, 5] = float("nan")
    experts, weights = kernels.route(broken, spec)
    assert weights[1].isnan().all() and len(set(experts[1].tolist())) == 3 and 0 <= experts[1].min() <= 7
    for row in (0, 2):
        assert torch.equal(experts[row], clean[0][row]) and torch.equal(weights[row], clean[1][row])


@pytest.mark.parametrize(
    "spec", [RoutingSpec(9), RoutingSpec(2, num_groups=3), RoutingSpec(5, num_groups=2, top_groups=1)]
)
def test_experts_that_cannot_be_chosen_are_refused(spec: RoutingSpec) -> None:
    with pytest.raises(ConfigError, match="experts"):
        spec.check(8)


# ---- experts --------------------------------------------------------------------------------------------------------


def matrices(
    hidden: int, inners: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Gate and up, and down, of an expert for each inner size."""
    gate_up = [random(2 * n, hidden, seed=seed + 2 * i, dtype=dtype) / hidden**0.5 for i, n in enumerate(inners)]
    down = [random(hidden, n, seed=seed + 2 * i + 1, dtype=dtype) / n**0.5 for i, n in enumerate(inners)]
    return gate_up, down


def _packed(kernels: Any, parts: list[Tensor], quantization: str | None, **options: Any) -> Any:
    """Quantised by the kernels, or, to MXFP4, before that."""
    if quantization != "mxfp4":
        return kernels.pack(parts, quantization=quantization, **options)
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    rows = [GGUFRows("MXFP4", gguf.quants.quantize(part.float().numpy(), mxfp4), part.shape[1], 32) for part in parts]
    return kernels.pack(rows, **options)


def pack(
    kernels: Any, gate_up: list[Tensor], down: list[Tensor], quantization: str | None = None, pieces: int = 1
) -> tuple[list[PackedWeight], list[PackedWeight]]:
    return (
        [_packed(kernels, [*matrix.chunk(2)], quantization, gated=True) for matrix in gate_up],
        [_packed(kernels, [matrix], quantization, pieces=pieces) for matrix in down],
    )


def in_float64(
    x: Tensor, experts: Tensor, weights: Tensor, add: Tensor, gate_up: list[Tensor], down: list[Tensor]
) -> Tensor:
    """The inner values rounded to the type of x."""
    out = add.double()
    for row in range(len(x)):
        for expert, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            inner = (F.silu(gate) * up).to(x.dtype).double()
            out[row] += weight * (down[expert].double() @ inner)
    return out


def rows(count: int, hidden: int, experts: int, slots: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, experts, weights and add; the experts of a row in no order."""
    generator = torch.Generator().manual_seed(count)
    chosen = torch.rand(count, experts, generator=generator).argsort(1)[:, :slots].int().contiguous()
    return [
        random(count, hidden, seed=1, dtype=dtype),
        chosen,
        torch.rand(count, slots, generator=generator),
        random(count, hidden, seed=2),
    ]


def run(experts: PackedExperts, arguments: list[Tensor], part: slice = slice(None)) -> Tensor:
    """The memory of ``add`` is kept as it is."""
    x, chosen, weights, add = (tensor[part] for tensor in arguments)
    return experts(x, chosen, weights, add.clone())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "inner", "count", "slots", "pieces"), [(40, 24, 7, 2, 1), (200, 56, 5, 3, 4)])
def test_experts_against_float64(
    kernels: Any, dtype: torch.dtype, hidden: int, inner: int, count: int, slots: int, pieces: int
) -> None:
    # The last expert is of another size, as shared ones are.
    gate_up, down = matrices(hidden, [inner] * (count - 1) + [2 * inner + 8], dtype)
    packed = kernels.pack_experts(*pack(kernels, gate_up, down, pieces=pieces))
    arguments = rows(33, hidden, count, slots, dtype)
    x, chosen, weights, add = arguments
    expected = in_float64(x, chosen, weights, add, gate_up, down)
    # Inner values that another order of sums rounds to a neighbour.
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(run(packed, arguments).double(), expected, atol=near, rtol=0)
    without = packed(x, chosen, weights)
    torch.testing.assert_close(without.double(), expected - add.double(), atol=near, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_may_be_factors_of_the_inputs(kernels: Any, dtype: torch.dtype) -> None:
    gate_up, down = matrices(40, [24] * 5, dtype)
    arguments = rows(33, 40, 5, 2, dtype)
    x, chosen, weights, add = arguments
    found = run(kernels.pack_experts(*pack(kernels, gate_up, down), weighs_input=True), arguments)
    expected = add.double()
    for slot in range(2):
        scaled = (x.float() * weights[:, slot, None]).to(dtype)
        one = in_float64(scaled, chosen[:, slot, None], torch.ones(33, 1), torch.zeros(33, 40), gate_up, down)
        expected += one
    torch.testing.assert_close(found.double(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_with_biases_and_a_clamped_activation(cpu: Any, quantization: str | None) -> None:
    """And in the company of fewer rows, to the same bits."""
    gate_up, down = matrices(96, [72] * 5)
    biases = [10 * random(144, seed=50 + i) for i in range(5)]  # beyond the clamps
    packed = [
        cpu.pack(matrix.chunk(2), bias, quantization=quantization, gated=True)
        for matrix, bias in zip(gate_up, biases, strict=True)
    ]
    packed_down = [cpu.pack([matrix], quantization=quantization) for matrix in down]
    experts = cpu.pack_experts(packed, packed_down, activation="swiglu_oai")
    arguments = x, chosen, weights, add = rows(33, 96, 5, 2)
    expected = add.double()
    for row, slot in product(range(33), range(2)):
        expert = chosen[row, slot]
        gate, up = (gate_up[expert].double() @ x[row].double() + biases[expert]).chunk(2)
        inner = gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
        expected[row] += weights[row, slot].double() * (down[expert].double() @ inner)
    found = run(experts, arguments)
    near = 1e-4 if quantization is None else 0.02 * float(expected.std())
    assert float((found - expected).square().mean().sqrt()) < near
    assert torch.equal(run(experts, arguments, slice(7, 9)), found[7:9])
    plain = PlainExperts(packed, packed_down, "swiglu_oai")
    torch.testing.assert_close(found, run(plain, arguments), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, "int8"), (torch.float32, "int4")],
)
def test_experts_without_gates(cpu: Any, dtype: torch.dtype, quantization: str | None) -> None:
    """On every instruction set; the squares of relu, as in Nemotron 3."""
    ups = [random(72, 96, seed=80 + i).to(dtype) for i in range(5)]
    downs = [random(40, 72, seed=90 + i).to(dtype) for i in range(5)]
    first = [cpu.pack([matrix], quantization=quantization) for matrix in ups]
    second = [cpu.pack([matrix], quantization=quantization, pieces=4) for matrix in downs]
    experts = cpu.pack_experts(first, second, activation="relu2")
    x, chosen, weights, _ = rows(33, 96, 5, 2, dtype)
    add = random(33, 40, seed=7)
    arguments = [x, chosen, weights, add]
    expected = add.double()
    for row, slot in product(range(33), range(2)):
        expert = chosen[row, slot]
        inner = (ups[expert].double() @ x[row].double()).relu() ** 2
        expected[row] += weights[row, slot].double() * (downs[expert].double() @ inner)
    found = run(experts, arguments)
    near = 1e-5 if dtype == torch.float32 else 0.01
    near = 0.1 if quantization == "int4" else 0.02 if quantization else near
    assert float((found - expected).square().mean().sqrt()) < near * float(expected.std())
    assert torch.equal(run(experts, arguments, slice(7, 9)), found[7:9])
    plain = run(PlainExperts(first, second, "relu2"), arguments)
    torch.testing.assert_close(found, plain, atol=1e-4 * float(expected.std()), rtol=0)


def test_biases_of_experts_are_weighted(kernels: Any) -> None:
    _, chosen, weights, add = rows(9, 37, 6, 3)
    bias = random(6, 37, seed=5)
    expected = add.double() + torch.einsum("ts,tsn->tn", weights.double(), bias[chosen.long()].double())
    found = kernels.add_expert_bias(add.clone(), chosen, weights, bias)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(kernels.add_expert_bias(add[4:5].clone(), chosen[4:5], weights[4:5], bias)[0], found[4])


def test_a_bias_in_down_is_refused(cpu: Any) -> None:
    gate_up, down = pack(cpu, *matrices(16, [8] * 2))
    down[0] = cpu.pack([random(16, 8, seed=1)], random(16, seed=2))
    with pytest.raises(ValueError, match="add no bias"):
        cpu.pack_experts(gate_up, down)


@pytest.mark.parametrize("quantization", ["int8", "int4", "mxfp4"])
def test_quantised_experts_are_the_same_on_every_instruction_set_of_integers(cpu: Any, quantization: str) -> None:
    packed = cpu.pack_experts(*pack(cpu, *matrices(96, [64] * 5), quantization=quantization))
    arguments, floats, results = rows(70, 96, 5, 2), _cpu.float_isa(), []
    for integers in _cpu.available_isas().integers:
        _cpu.choose_isa(f"{floats}+{integers}")
        results.append(run(packed, arguments))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("quantization", ["int8", "int4", "mxfp4"])
def test_quantised_experts_are_the_products_of_quantised_weights(cpu: Any, quantization: str) -> None:
    gate_up, down = pack(cpu, *matrices(96, [64] * 5), quantization=quantization)
    arguments = rows(21, 96, 5, 2)
    found = run(cpu.pack_experts(gate_up, down), arguments)
    torch.testing.assert_close(found, run(PlainExperts(gate_up, down), arguments), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, "int4"), (torch.bfloat16, "mxfp4")],
)
def test_neither_company_nor_threads_nor_blocks_change_a_row(
    cpu: Any, dtype: torch.dtype, quantization: str | None
) -> None:
    matrices_of = pack(cpu, *matrices(96, [64] * 6, dtype), quantization=quantization, pieces=4)
    packed = cpu.pack_experts(*matrices_of)
    arguments = rows(700, 96, 6, 2, dtype)  # more than are computed at once
    cpu.set_threads(1)
    together = run(packed, arguments)
    for first in (0, 350, 699):
        assert torch.equal(run(packed, arguments, slice(first, first + 1))[0], together[first])
    assert torch.equal(run(packed, arguments, slice(37, 46)), together[37:46])
    cpu.set_threads(2)
    assert torch.equal(run(packed, arguments), together)


def test_experts_that_no_row_chose_are_not_touched(kernels: Any) -> None:
    gate_up, down = matrices(48, [32] * 6)
    arguments = rows(9, 48, 6, 2)
    arguments[1] %= 3  # the first three experts alone; one may come twice
    expected = run(kernels.pack_experts(*pack(kernels, gate_up, down)), arguments)
    for unused in (*gate_up[3:], *down[3:]):
        unused.fill_(float("nan"))
    assert torch.equal(run(kernels.pack_experts(*pack(kernels, gate_up, down)), arguments), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_with_a_share_of_every_expert_give_the_same_bits(cpu: Any, dtype: torch.dtype) -> None:
    gate_up, down = matrices(256, [96] * 4, dtype)
    arguments = rows(13, 256, 4, 2, dtype)
    whole = cpu.pack_experts(*pack(cpu, gate_up, down, pieces=4))(*arguments[:3])
    for ranks in (2, 4):
        parts = []
        for rank in range(ranks):
            share = slice(96 * rank // ranks, 96 * (rank + 1) // ranks)
            own = [torch.cat([half[share] for half in matrix.chunk(2)]) for matrix in gate_up]
            packed = pack(cpu, own, [matrix[:, share].contiguous() for matrix in down], pieces=4 // ranks)
            parts.append(cpu.pack_experts(*packed)(*arguments[:3]))
        assert torch.equal(sum_as_tree(parts), whole)


def test_an_expert_that_does_not_exist_is_refused(cpu: Any) -> None:
    packed = cpu.pack_experts(*pack(cpu, *matrices(16, [8] * 3)))
    x, chosen, weights, add = rows(2, 16, 3, 2)
    chosen[1, 0] = 3
    with pytest.raises(ValueError, match="no expert 3"):
        packed(x, chosen, weights, add)
