"""The sampler with its backend on the device gives the results of the host backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.core.sampling_params import SamplingParams
from octavo.kernels.sampling import NO_TOKEN
from octavo.kernels.torch_backend import TorchLogits
from octavo.kernels.triton.sampling import TritonSampling
from octavo.sampling.logits_processors import SamplerOutput
from tests.sampling.sampler_rows import VOCAB, Rows, failing, gaussian, greedy, shy

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), *([pytest.mark.gpu] if ON_GPU else [])]


def rows_on(on_device: bool) -> Rows:
    if on_device:
        return Rows(16, backend=TritonSampling(VOCAB, torch.device(DEVICE)), device=DEVICE)
    return Rows(16, backend=TorchLogits(VOCAB))


REQUESTS: list[tuple[SamplingParams, dict[str, Any]]] = [
    (greedy(), {}),
    (greedy(logprobs=5), {}),
    (SamplingParams(logprobs=3), {}),
    (SamplingParams(temperature=0.7, top_k=50, top_p=0.9, logprobs=0), {}),
    (SamplingParams(top_p=0.6), {}),
    (SamplingParams(min_p=0.05, temperature=1.4, logprobs=2), {}),
    (SamplingParams(repetition_penalty=1.3, logprobs=1), {"outputs": [7, 7, 9]}),
    (SamplingParams(logit_bias={3: 4.0}, min_tokens=8), {"stop": [3, 10]}),
    (SamplingParams(bad_words=["x"], top_p=0.99, logprobs=4), {"bad_words": [[1], [5, 6], [3, 4, 5]]}),
    (greedy(logits_processors=[shy], logprobs=2), {}),
    (SamplingParams(allowed_token_ids=list(range(0, 200, 3)), temperature=5.0), {}),
]


def assert_alike(found: SamplerOutput, right: SamplerOutput) -> None:
    assert found.token_ids.tolist() == right.token_ids.tolist()
    assert found.token_ids.dtype == np.int64
    assert found.errors == right.errors
    assert sorted(found.logprobs) == sorted(right.logprobs)
    for i, expected in right.logprobs.items():
        position = found.logprobs[i]
        assert (position.token_id, position.rank) == (expected.token_id, expected.rank)
        assert position.top_ids == expected.top_ids
        logprobs = [position.logprob, *position.top_logprobs]
        assert logprobs == pytest.approx([expected.logprob, *expected.top_logprobs], abs=1e-6)


def test_every_request_gets_what_the_host_gives_it() -> None:
    device, host = rows_on(on_device=True), rows_on(on_device=False)
    every = list(range(len(REQUESTS)))
    for row, (params, options) in enumerate(REQUESTS):
        device.add(row, params, seed=7 * row, **options)
        host.add(row, params, seed=7 * row, **options)
    for step in range(3):
        logits = gaussian(len(every), VOCAB, seed=step)
        assert_alike(device.step(logits, every), host.step(logits, every))


def test_a_row_is_the_same_bit_for_bit_alone_and_in_a_batch() -> None:
    device = rows_on(on_device=True)
    every = list(range(len(REQUESTS)))
    for row, (params, options) in enumerate(REQUESTS):
        device.add(row, params, seed=7 * row, **options)
    logits = gaussian(len(every), VOCAB, seed=9)
    whole = device.start(logits, every).wait()
    for i in every:
        alone = device.start(logits[i : i + 1], [i]).wait()
        assert alone.token_ids[0] == whole.token_ids[i]
        assert alone.logprobs.get(0) == whole.logprobs.get(i)


def test_a_row_keeps_its_arithmetic_when_its_adjustments_end() -> None:
    """Back from preemption with enough tokens, it has none; its logprobs must not change in the last bit."""
    logits = gaussian(1, VOCAB, seed=4)
    adjusted, plain = rows_on(on_device=True), rows_on(on_device=True)
    adjusted.add(0, SamplingParams(min_tokens=5, logprobs=3, top_p=0.9), outputs=[5, 6, 7, 8])
    plain.add(0, SamplingParams(logprobs=3, top_p=0.9), outputs=[5, 6, 7, 8])
    assert adjusted.start(logits, [0]).wait().logprobs == plain.start(logits, [0]).wait().logprobs


def test_tokens_are_on_the_device_before_wait() -> None:
    device = rows_on(on_device=True)
    device.add(0, greedy())
    device.add(1, SamplingParams())
    logits = gaussian(2, VOCAB)
    logits[1, 3] = np.nan
    pending = device.start(logits, [0, 1])
    assert (pending.tokens.dtype, pending.tokens.device.type) == (torch.int64, DEVICE)
    assert pending.tokens.tolist() == [int(logits[0].argmax()), -1]
    output = pending.wait()
    assert output.token_ids.tolist() == [int(logits[0].argmax()), 0]
    assert output.errors == {1: NO_TOKEN[-1]}
    assert pending.tokens.tolist()[1] == -1
    assert pending.wait().errors == output.errors


def test_on_the_host_tokens_are_an_array_too() -> None:
    host = rows_on(on_device=False)
    host.add(0, greedy())
    host.add(1, SamplingParams(temperature=0.5))
    pending = host.start(gaussian(2, VOCAB), [0, 1])
    assert pending.tokens.tolist() == pending.wait().token_ids.tolist()
    assert pending.tokens.dtype == np.int64


@pytest.mark.parametrize("on_device", [True, False])
def test_the_result_is_that_of_the_moment_of_the_start(on_device: bool) -> None:
    params = SamplingParams(top_k=40, logprobs=2)
    logits = gaussian(2, VOCAB, seed=3)
    rows, undisturbed = rows_on(on_device), rows_on(on_device)
    for each in (rows, undisturbed):
        each.add(0, params, seed=5)
        each.add(1, greedy(logits_processors=[failing]))
    pending = rows.start(logits, [0, 1])
    rows.sampler.remove(0)
    rows.add(0, greedy(logit_bias={3: 100.0}))
    rows.add(1, greedy(logprobs=0))
    rows.append(0, 9)
    output, right = pending.wait(), undisturbed.start(logits, [0, 1]).wait()
    assert output.token_ids.tolist() == right.token_ids.tolist()
    assert (output.logprobs, output.errors) == (right.logprobs, right.errors)
    assert list(output.errors) == [1]
    assert "out of ideas" in output.errors[1].text


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(
    "params", [greedy(logprobs=1), SamplingParams(), SamplingParams(top_k=9, logprobs=0), SamplingParams(top_p=0.5)]
)
def test_a_plain_row_needs_the_number_of_its_tokens_but_not_the_last_of_them(
    on_device: bool, params: SamplingParams
) -> None:
    logits = gaussian(1, VOCAB, seed=2)
    found = []
    for last in (4, 150):
        rows = rows_on(on_device)
        rows.add(0, params, seed=1)
        rows.append(0, last)
        found.append(rows.start(logits, [0]).wait())
    assert found[0].token_ids[0] == found[1].token_ids[0]
    assert found[0].logprobs == found[1].logprobs


def test_a_fork_draws_by_its_own_seed() -> None:
    device, host = rows_on(on_device=True), rows_on(on_device=False)
    logits = gaussian(1, VOCAB, scale=0.1).repeat(3, 1)
    for rows in (device, host):
        rows.add(0, SamplingParams(top_k=150))
        for child in (1, 2):
            rows.tokens.num_tokens[child], rows.tokens.num_prompt[child] = rows.tokens.num_tokens[0], 3
            rows.sampler.fork(0, child, seed=100 + child)
    found = device.start(logits, [0, 1, 2]).wait()
    assert_alike(found, host.start(logits, [0, 1, 2]).wait())
    assert len(set(found.token_ids.tolist())) > 1


def test_half_precision_and_strided_logits_are_accepted() -> None:
    device = rows_on(on_device=True)
    device.add(0, greedy())
    device.add(1, greedy())
    logits = gaussian(2, 2 * VOCAB)
    for given in (logits[:, :VOCAB].bfloat16(), logits[:, ::2], logits[:, :VOCAB]):
        found = device.sampler.start(given.to(DEVICE), np.array([0, 1])).wait()
        assert found.token_ids.tolist() == given.float().argmax(-1).tolist()


def test_no_rows() -> None:
    device = rows_on(on_device=True)
    assert device.start(torch.zeros(0, VOCAB), []).wait().token_ids.tolist() == []


def test_prompt_logprobs() -> None:
    logits = gaussian(4, VOCAB)
    logits[2, 0] = np.nan
    targets = np.array([3, 1, 4, 1], np.int32)
    device, host = rows_on(on_device=True).sampler, rows_on(on_device=False).sampler
    for k in (0, 2):
        pending = device.start_prompt_logprobs(logits.to(DEVICE), targets, k)
        right = host.start_prompt_logprobs(logits, targets, k).wait()
        for found, expected in zip(pending.wait(), right, strict=True):
            assert (found.token_id, found.rank, found.top_ids) == (expected.token_id, expected.rank, expected.top_ids)
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-6)
            assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-6)


@pytest.mark.gpu
def test_plain_rows_are_started_without_waiting_for_the_device() -> None:
    device = rows_on(on_device=True)
    plain = REQUESTS[:6]
    every = np.arange(len(plain))
    for row, (params, options) in enumerate(plain):
        device.add(row, params, seed=7 * row, **options)
    logits = gaussian(len(plain), VOCAB).to(DEVICE)
    device.sampler.start(logits, every).wait()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = device.sampler.start(logits, every)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.tokens.tolist() == pending.wait().token_ids.tolist()
