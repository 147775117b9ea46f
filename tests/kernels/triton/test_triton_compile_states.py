"""The kernels of recurrent states compiled for a Hopper GPU, without one; see ``compiling``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from tests.kernels.triton.compiling import Compiled, compiled, tell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Named calls of the public functions with the shapes of Qwen3.5 0.8B, LFM2, Granite 4 and Falcon-Mamba 7B."""
    from octavo.config.kv_spec import KVSpec
    from octavo.kernels.forward_batch import make_batch
    from octavo.kernels.interface import DeltaHeads, ScanChannels, ScanHeads
    from octavo.kernels.triton.backend import TritonKernels

    kernels = TritonKernels("cpu")
    (cache,) = kernels.make_group_cache(KVSpec.state(3 * 6144 + 16 * 128 * 128), 1, 2, 1)
    cache.state_tokens = 512
    for dtype in (torch.bfloat16, torch.float32):
        qkvz = torch.empty(64, 4 * 2048, dtype=dtype)
        qkv, z = qkvz[:, :6144], qkvz[:, 6144:]
        gates = torch.empty(64, 32, dtype=dtype)
        heads = DeltaHeads(16, 16, 128, 128, 1e-6, torch.empty(16), torch.empty(16), torch.empty(128))
        for counts in ([1], [64]):
            batch = make_batch(counts, counts, np.zeros((1, 4), np.int32), 16, kernels)
            rows, name = slice(sum(counts)), f"{counts[0]} {dtype}"
            yield (
                f"convolution {name}",
                partial(kernels.causal_conv, qkv[rows], torch.empty(4, 6144), None, cache, batch, activation="silu"),
            )
            yield (
                f"short convolution {name}",
                partial(
                    kernels.causal_conv, z[rows], torch.empty(3, 2048), torch.empty(2048), cache, batch,
                    in_gate=z[rows], out_gate=z[rows],
                ),
            )  # fmt: skip
            yield (
                f"delta rule {name}",
                partial(
                    kernels.gated_delta_rule, qkv[rows], z[rows], gates[rows, :16], gates[rows, 16:], heads, cache,
                    batch, offset=3 * 6144,
                ),
            )  # fmt: skip
            kimi = replace(heads, dt_bias=torch.empty(2048), per_channel=True, gate="sigmoid")
            yield (
                f"Kimi {name}",
                partial(kernels.gated_delta_rule, qkv[rows], z[rows], gates[rows, :16], z[rows], kimi, cache, batch),
            )
            mamba2 = ScanHeads(48, 1, 64, 128, torch.empty(48), torch.empty(48), torch.empty(48))
            xbc, dt = qkv[rows, : 48 * 64 + 256], gates[rows].repeat(1, 2)[:, :48]
            yield f"mamba 2 {name}", partial(kernels.ssd_scan, xbc, dt, mamba2, cache, batch, z=z[rows, : 48 * 64])
            mamba = ScanChannels(torch.empty(16, 2048), torch.empty(2048), torch.empty(2048))
            dt, bc = torch.empty(len(z[rows]), 2048), torch.empty(len(z[rows]), 32)
            yield (
                f"mamba {name}",
                partial(kernels.selective_scan, z[rows], dt, bc[:, :16], bc[:, 16:], z[rows], mamba, cache, batch),
            )
        yield f"gate {dtype}", partial(kernels.sigmoid_gate, z, z)
        yield f"gate of a scan {dtype}", partial(kernels.silu_gate, z.float(), z)


@pytest.fixture(scope="module")
def launches() -> list[Compiled]:
    return compiled(__file__)


def test_no_register_is_spilled(launches: list[Compiled]) -> None:
    assert {(c.case, c.kernel): c.stack for c in launches if c.stack} == {}


def test_the_state_is_read_once_and_in_words_of_four_numbers(launches: list[Compiled]) -> None:
    for kernel in (c for c in launches if c.kernel in ("_delta_kernel", "_heads_kernel")):
        assert kernel.count("LDG.E.128") >= 128 * 8 // (4 * 32), kernel
        assert kernel.programs_at_once >= 12, kernel


if __name__ == "__main__":
    tell(calls())
