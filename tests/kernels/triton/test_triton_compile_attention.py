"""The attention and cache kernels compiled for a Hopper GPU, without one; see ``compiling``."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

import numpy as np
import torch

from tests.kernels.triton.compiling import SHARED_BYTES, Compiled, compiled, tell

#: kernel: of what a launch may be; the rest are arguments of ``step``.
CASES: dict[str, dict[str, Any]] = {
    "decode": {"call": "decode"},
    "decode whole": {"call": "decode", "max_seq_len": 64},
    "decode 64": {"call": "decode", "head_dim": 64, "dtype": "float16"},
    "decode int8": {"call": "decode", "cache_dtype": "int8"},
    "decode fp8": {"call": "decode", "cache_dtype": "float8_e4m3fn"},
    "decode odd": {"call": "decode", "head_dim": 80, "block_size": 5, "group": 7, "window": 100, "cap": 30.0},
    "decode alibi": {"call": "decode", "group": 1, "alibi": True},
    "decode sinks": {"call": "decode", "head_dim": 64, "group": 8, "window": 128, "sinks": True},
    "decode latent": {"call": "decode", "latent": True, "group": 16},
    "decode latent float32": {"call": "decode", "latent": True, "group": 16, "dtype": "float32"},
    "decode float32": {"call": "decode", "dtype": "float32", "head_dim": 64},
    "prefill": {"call": "prefill"},
    "prefill 64": {"call": "prefill", "head_dim": 64, "group": 3},
    "prefill 256": {"call": "prefill", "head_dim": 256, "window": 512, "cap": 50.0},
    "prefill alibi": {"call": "prefill", "group": 1, "alibi": True},
    "prefill int8": {"call": "prefill", "cache_dtype": "int8"},
    "prefill fp8": {"call": "prefill", "cache_dtype": "float8_e4m3fn"},
    "prefill spans": {"call": "prefill", "window": 512, "spans": True},
    "prefill sinks": {"call": "prefill", "head_dim": 64, "group": 8, "window": 128, "sinks": True},
    "prefill latent": {"call": "prefill", "latent": True, "group": 16},
    "prefill whole 72": {"call": "prefill", "head_dim": 72, "group": 1, "causal": False},
    "prefill large blocks": {"call": "prefill", "block_size": 128},
    "prefill float32": {"call": "prefill", "dtype": "float32", "head_dim": 64},
    "fixed": {"call": "fixed"},
    "fixed whole": {"call": "fixed", "max_seq_len": 64},
    "fixed 256": {"call": "fixed", "head_dim": 256},
    "fixed sinks": {"call": "fixed", "head_dim": 64, "group": 8, "sinks": True},
    "fixed int8": {"call": "fixed", "cache_dtype": "int8"},
    "fixed latent": {"call": "fixed", "latent": True, "group": 128},
    "fixed latent float32": {"call": "fixed", "latent": True, "group": 16, "dtype": "float32"},
    "rotary": {"call": "rotary"},
    "rotary fp8": {"call": "rotary", "cache_dtype": "float8_e4m3fn"},
    "rotary sections": {"call": "rotary", "sections": (16, 24, 24)},
    "rotary sections, interleaved": {"call": "rotary", "sections": (1,) * 60 + (4,)},
    "cache int8": {"call": "reshape", "cache_dtype": "int8"},
    "copy": {"call": "copy"},
}


def compile_case(case: str) -> dict[str, Compiled]:
    """Each kernel that the case launches, by its name."""
    launches = {launch.kernel: launch for launch in compiled(__file__, case)}
    for launch in launches.values():
        assert all(size > 0 for size in launch.programs) and all(size < 65536 for size in launch.programs[1:])
    return launches


@pytest.mark.slow
def test_decode_loads_16_bytes_at_a_time_and_fits_three_times() -> None:
    launches = compile_case("decode")
    kernel = launches["_decode_kernel"]
    assert kernel.count("LDGSTS") == kernel.count("LDGSTS.E.BYPASS.128") > 0
    assert kernel.matrix_instructions
    assert kernel.stack == 0
    assert kernel.programs_at_once >= 3
    assert launches["_combine_kernel"].stack == 0


@pytest.mark.parametrize(
    "case",
    [case if case == "copy" else pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "decode"],
)
def test_kernels_compile_without_spills(case: str) -> None:
    # In a fixed order what lies over several pieces may wait in memory while one is attended to; Triton 3.6 keeps more
    # of an int8 tile in registers than there are.
    spilt = {"_pieces_kernel": 128, "_prefill_kernel": 64 if "int8" in case else 0}
    for name, kernel in compile_case(case).items():
        assert kernel.stack <= spilt.get(name, 0), name
        assert kernel.shared <= SHARED_BYTES
        if "float32" not in case and name in ("_prefill_kernel", "_pieces_kernel"):
            assert kernel.count("HGMMA") or "latent" in case  # whose tiles have 16 rows
        if name in ("_prefill_kernel", "_pieces_kernel", "_decode_kernel") and "float32" not in case:
            assert kernel.count("LDGSTS.E.BYPASS.128") or "odd" in case
        if name in ("_rotary_and_cache_kernel", "_copy_kernel"):
            assert kernel.count("LDG.E.64") + kernel.count("LDG.E.128")
            assert kernel.count("STG.E.64") + kernel.count("STG.E.128")


def launch(
    call: str,
    *,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    head_dim: int = 128,
    block_size: int = 16,
    group: int = 4,
    window: int | None = None,
    cap: float = 0.0,
    alibi: bool = False,
    spans: bool = False,
    causal: bool = True,
    sinks: bool = False,
    latent: bool = False,
    max_seq_len: int = 8192,
    sections: tuple[int, ...] = (),
) -> None:
    """A step of a network with 8 KV heads, or a latent one: 3 sequences of one token, or of many."""
    from octavo.kernels.forward_batch import make_batch
    from octavo.kernels.interface import AttentionSpec
    from octavo.kernels.reference import ReferenceKernels
    from octavo.kernels.triton import attention, cache

    numbers, held = getattr(torch, dtype), getattr(torch, cache_dtype or dtype)
    kv_heads, head_dim = (1, 576) if latent else (8, head_dim)
    caches = cache.make_cache(2, 4, block_size, kv_heads, head_dim, held, "cpu", 1 if latent else 2)
    each = 40 if call == "prefill" else 1
    qkv = torch.zeros(3 * each, kv_heads * (group + 2), head_dim, dtype=numbers)
    q, k, v = qkv.split([kv_heads * group, kv_heads, kv_heads], dim=1)
    slots, positions = torch.zeros(2, 3 * each, dtype=torch.int64)
    if call == "rotary":
        at = torch.zeros(3, 3, dtype=torch.int64) if sections else positions
        cache.rotary_and_cache(q, k, v, at, torch.zeros(max_seq_len, head_dim), caches[1], slots, sections)
    elif call == "reshape":
        cache.reshape_and_cache(k, v, caches[1], slots)
    elif call == "copy":
        cache.copy_blocks(caches, [(0, 1)])
    else:
        tables = np.zeros((3, 40), np.int32)
        batch = make_batch([each] * 3, [40] * 3, tables, block_size, ReferenceKernels())
        batch.max_seq_len, batch.has_spans = max_seq_len, spans
        parts = 4 if max_seq_len > 64 else 1
        with mock.patch.object(attention, "count_parts", lambda *_: parts):
            slopes = (0.5,) * 8 * group if alibi else None
            values = torch.zeros(8 * group) if sinks else None
            value_dim = 512 if latent else None
            spec = AttentionSpec(0.1, window, cap, slopes, causal, sees_spans=spans, sinks=values, value_dim=value_dim)
            attention.paged_attention(q, caches[1], batch, spec, deterministic=call == "fixed")


if __name__ == "__main__":
    tell((case, partial(launch, **CASES[case])) for case in CASES)
