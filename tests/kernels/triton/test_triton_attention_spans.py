"""The GPU backend's attention to later tokens, against float64 arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from octavo.kernels.triton import attention
from tests.kernels.triton.test_triton_attention import Case, attend, build, cases, compute

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@st.composite
def sighted_cases(draw: st.DrawFn) -> Case:
    """In which tokens see later ones."""
    case = draw(cases())
    if draw(st.booleans()):
        return replace(case, spans=True)
    return replace(case, causal=False, window=None)


@pytest.mark.parametrize("deterministic", [False, True])
@settings(max_examples=3, deadline=None, derandomize=True)  # those that vary are slow
@given(sighted_cases())
def test_attention_to_later_tokens(deterministic: bool, case: Case) -> None:
    check_attention(deterministic, case)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@settings(max_examples=50, deadline=None)
@given(sighted_cases())
def test_attention_to_later_tokens_in_many_cases(deterministic: bool, case: Case) -> None:
    check_attention(deterministic, case)


def check_attention(deterministic: bool, case: Case) -> None:
    step = build(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PIECE", 64)
        out = compute(case, step, 0.3, deterministic)
    np.testing.assert_allclose(out.cpu().numpy(), attend(case, step, 0.3), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_outside_of_spans_have_the_bits_of_a_causal_step(deterministic: bool) -> None:
    case = Case([(7, 1), (20, 40), (0, 70)], spans=True, seed=4)
    step = build(case)
    if not deterministic:  # decodes of a causal step have a kernel of their own
        step.batch.num_decodes = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PIECE", 64)
        out = compute(case, step, 0.3, deterministic)
        step.batch.has_spans = False
        causal = compute(case, step, 0.3, deterministic)
    outside = step.batch.sees_until <= step.batch.positions
    assert 0 < outside.sum() < len(outside)
    assert torch.equal(out[outside], causal[outside])
