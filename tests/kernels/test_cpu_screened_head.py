"""The head with a copy in 8 bits: the very tokens of the whole product, and errors within their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.errors import ConfigError

_cpu: Any = pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
from octavo.kernels.cpu.backend import CpuKernels  # noqa: E402
from octavo.kernels.cpu.linear import DenseWeight  # noqa: E402
from octavo.kernels.cpu.quantize import quantize_weight  # noqa: E402
from octavo.kernels.cpu.screened_head import CpuScreenedHead  # noqa: E402
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch  # noqa: E402
from octavo.kernels.reference import ReferenceKernels  # noqa: E402

KERNELS = CpuKernels()
#: The most rows of a step that is screened.
MOST_ROWS = 4


@pytest.fixture(params=_cpu.available_isas(), autouse=True, scope="module")
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before, threads = _cpu.isa(), _cpu.num_threads()
    _cpu.choose_isa(request.param)
    _cpu.set_threads(2)
    yield
    _cpu.choose_isa(before)
    _cpu.set_threads(threads)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens_of_all_logits(weight: Tensor, x: Tensor) -> Tensor:
    logits = DenseWeight(KERNELS, weight)(x, torch.float32)
    return KERNELS.make_sampling_backend(len(weight)).choose_most_likely(logits)


def screened_tokens(weight: Tensor, x: Tensor) -> tuple[Tensor, int]:
    """The tokens, and how many of all logits were computed exactly."""
    head = KERNELS.pack_screened(weight)
    assert isinstance(head, CpuScreenedHead)
    logits, tokens = head.most_likely(x)
    return tokens, int((logits == head(x, torch.float32)).sum())


def check(weight: Tensor, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> float:
    """Returns the share of the logits that were computed exactly."""
    weight, x = weight.to(dtype), x.to(dtype)
    tokens, exact = screened_tokens(weight, x)
    assert tokens.tolist() == tokens_of_all_logits(weight, x).tolist()
    return exact / (len(weight) * len(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(4096, 64), (4099, 70), (6001, 193)])
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
def test_few_logits_are_computed_for_the_tokens_of_all(n: int, k: int, rows: int, dtype: torch.dtype) -> None:
    assert check(random(n, k), random(rows, k, seed=1), dtype) < 0.2


@pytest.mark.parametrize(
    ("n", "k", "rows"), [(1, 1, 1), (5, 8, 2), (17, 33, 4), (60, 32, 2), (4096, 64, MOST_ROWS + 1), (300, 32, 40)]
)
def test_small_heads_and_many_rows_are_multiplied_in_full(n: int, k: int, rows: int) -> None:
    assert check(random(n, k), random(rows, k, seed=1)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_copy_would_choose_other_tokens(dtype: torch.dtype) -> None:
    """Each input is near a row and has much of what its copy lacks; a later row is greater than that copy."""
    weight = random(4096, 64).to(dtype)
    rows = weight[:80].float()
    copies = quantize_weight(weight, "int8", None).dequantize()[:80]
    weight[300:380] = (copies * 1.002).to(dtype)
    x = (rows + 100 * (rows - copies)).to(dtype)
    copy = quantize_weight(weight, "int8", None).dequantize()
    misled = 0
    for row in range(0, len(x), MOST_ROWS):
        some = x[row : row + MOST_ROWS]
        assert check(weight, some, dtype) < 0.2
        misled += int((tokens_of_all_logits(weight, some) != (some.float() @ copy.T).argmax(dim=1)).sum())
    assert misled > 10


def test_the_lowest_of_equal_logits_wins() -> None:
    weight = random(4096, 64)
    x = random(4, 64, seed=1)
    best = (x.bfloat16().float() @ weight.bfloat16().float().T).argmax(dim=1)
    for places in ([7, 4000], [0, 4095], [18, 19]):
        tied = weight.clone()
        tied[places] = weight[best[0]] * 1.5
        check(tied, x)
    assert check(torch.ones(4096, 64), x) == 1  # all tie: too many to be computed one by one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_of_all_sizes(dtype: torch.dtype) -> None:
    weight, x = random(4096, 96), random(6, 96, seed=1)
    weight[::97] *= 1e4
    weight[:, 5] *= 300
    weight[11] = 0
    x[:, 17] *= 1e3
    x[1] = 0
    x[2, 40:] = 0
    x[3] *= 1e-20
    for one in x.split(1):
        check(weight, one, dtype)
        check(weight * 1e-30, one, dtype)
        check(weight * 1e-38, one * 1e30, dtype)  # weights below the least normal number
        check(weight * 1e-20, one * 1e-25, dtype)  # sums as well


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_rows_without_finite_logits_have_no_token(bad: float) -> None:
    weight, x = random(4096, 64), random(3, 64, seed=1)
    x[1, 5] = bad
    check(weight * 10, x)
    assert tokens_of_all_logits((weight * 10).bfloat16(), x.bfloat16())[1] < 0


def test_weights_that_are_not_finite_have_no_copy() -> None:
    weight = random(64, 32).bfloat16()
    weight[3, 4] = float("nan")
    assert type(KERNELS.pack_screened(weight)) is DenseWeight


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 3000),
    k=st.integers(1, 130),
    rows=st.integers(1, MOST_ROWS),
    magnitudes=st.sampled_from([0.0, 1.0, 4.0, 12.0]),
    coarse=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_head(seed: int, n: int, k: int, rows: int, magnitudes: float, coarse: bool, dtype: torch.dtype) -> None:
    weight, x = random(n, k, seed=seed), random(rows, k, seed=seed + 1)
    if coarse:  # so that many logits are equal
        weight, x = weight.round(), x.round()
    weight *= torch.exp(magnitudes * random(n, k, seed=seed + 2))
    check(weight, x * torch.exp(magnitudes / 4 * random(rows, k, seed=seed + 3)), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitudes", [0.0, 2.0])
def test_errors_are_within_their_bounds(dtype: torch.dtype, magnitudes: float) -> None:
    weight = (random(512, 160) * torch.exp(magnitudes * random(512, 160, seed=1))).to(dtype)
    x = (random(32, 160, seed=2) * torch.exp(magnitudes * random(32, 160, seed=3))).to(dtype)
    head = CpuScreenedHead(KERNELS, weight)
    approximate = head._screen(x, torch.float32).double()
    # What quantising leaves of x, at most: half a step of a group's 127, in each of its values.
    steps = x.double().view(32, 5, 32).abs().amax(dim=2) / 127
    rest = (steps / 2 * (1 + 1e-6)).square().sum(dim=1).mul(32).sqrt()
    bounds = head._of_inputs.double() * x.double().norm(dim=1)[:, None] + head._of_rest.double() * rest[:, None]
    errors = (head(x, torch.float32).double() - approximate).abs()
    assert (errors <= bounds).all()
    assert (errors > 0.05 * bounds).any()  # they are no wider than they must be


def test_a_step_that_wants_more_gets_all_logits() -> None:
    kernels = CpuKernels()
    weight, table = random(4096, 64).bfloat16(), random(11, 64, seed=1).bfloat16()
    head, gain = CpuScreenedHead(kernels, weight), torch.ones(64, dtype=torch.bfloat16)

    def forward(batch: ForwardBatch) -> ForwardOutput:
        hidden = kernels.rms_norm(kernels.embedding(batch.token_ids, table), gain, 1e-6)
        return ForwardOutput(hidden, *head.most_likely(kernels.take_sampled(hidden, batch)))

    replay = kernels.capture(forward, BatchSize(tokens=16, sequences=8, sampled=12, max_seq_len=32, block_size=16))
    for ids, sampled in (([3, 5, 7], [2, 0]), ([1], [0]), ([9, 2, 4, 1], [3])):
        batch = make_batch([len(ids)], [len(ids)], torch.tensor([[4, 2]]), 16, token_ids=torch.tensor(ids))
        batch.sampled_rows, batch.all_sampled = torch.tensor(sampled), False
        whole = replay(batch)
        assert whole.most_likely is None and whole.logits is not None
        logits = head(whole.hidden[sampled].contiguous(), torch.float32)
        assert torch.equal(whole.logits, logits)
        batch.only_most_likely = True
        tokens = replay(batch).most_likely
        assert tokens is not None and tokens.tolist() == logits.argmax(dim=1).tolist()


def test_other_backends_have_no_such_heads() -> None:
    with pytest.raises(ConfigError, match="screen_lm_head is for the CPU kernels, not for 'reference'"):
        ReferenceKernels("cpu").pack_screened(random(4, 4))
