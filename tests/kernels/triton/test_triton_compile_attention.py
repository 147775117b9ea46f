"""The attention and cache kernels compile for Hopper, without a GPU, to what they are written for.

Triton brings the assembler. Each case runs in a process of its own, without the interpreter, as a program: this file.
What a launch would be given is recorded, compiled, and told as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton here", allow_module_level=True)

ROOT = Path(__file__).parents[3]

#: kernel: of what a launch may be; the rest are arguments of ``step``.
CASES: dict[str, dict[str, Any]] = {
    "decode": {"call": "decode"},
    "decode whole": {"call": "decode", "max_seq_len": 64},
    "decode 64": {"call": "decode", "head_dim": 64, "dtype": "float16"},
    "decode int8": {"call": "decode", "cache_dtype": "int8"},
    "decode fp8": {"call": "decode", "cache_dtype": "float8_e4m3fn"},
    "decode odd": {"call": "decode", "head_dim": 80, "block_size": 5, "group": 7, "window": 100, "cap": 30.0},
    "decode float32": {"call": "decode", "dtype": "float32", "head_dim": 64},
    "prefill": {"call": "prefill"},
    "prefill 64": {"call": "prefill", "head_dim": 64, "group": 3},
    "prefill 256": {"call": "prefill", "head_dim": 256, "window": 512, "cap": 50.0},
    "prefill int8": {"call": "prefill", "cache_dtype": "int8"},
    "prefill fp8": {"call": "prefill", "cache_dtype": "float8_e4m3fn"},
    "prefill large blocks": {"call": "prefill", "block_size": 128},
    "prefill float32": {"call": "prefill", "dtype": "float32", "head_dim": 64},
    "fixed": {"call": "fixed"},
    "fixed whole": {"call": "fixed", "max_seq_len": 64},
    "fixed 256": {"call": "fixed", "head_dim": 256},
    "fixed int8": {"call": "fixed", "cache_dtype": "int8"},
    "rotary": {"call": "rotary"},
    "rotary fp8": {"call": "rotary", "cache_dtype": "float8_e4m3fn"},
    "cache int8": {"call": "reshape", "cache_dtype": "int8"},
    "copy": {"call": "copy"},
}


def compiled(case: str) -> dict[str, dict[str, Any]]:
    """Facts of each kernel that the case launches, by the kernel's name."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__, case], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    facts: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert facts
    return facts


def test_decode_loads_16_bytes_at_a_time_and_fits_three_times() -> None:
    facts = compiled("decode")
    kernel = facts["_decode_kernel"]
    assert kernel["copies of 16 bytes"] and not kernel["smaller copies"]
    assert kernel["matrix products"]
    assert kernel["stack"] == 0
    assert 3 * (kernel["shared"] + 1024) <= 228 * 1024
    assert 3 * 128 * kernel["registers"] <= 65536
    assert facts["_combine_kernel"]["stack"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "decode"])
def test_kernels_compile_without_spills(case: str) -> None:
    # In a fixed order what lies over several pieces may wait in memory while one is attended to; Triton 3.6 keeps more
    # of an int8 tile in registers than there are.
    spilt = {"_pieces_kernel": 128, "_prefill_kernel": 64 if "int8" in case else 0}
    for name, kernel in compiled(case).items():
        assert kernel["stack"] <= spilt.get(name, 0), name
        assert kernel["shared"] <= 227 * 1024
        if "float32" not in case and name in ("_prefill_kernel", "_pieces_kernel"):
            assert kernel["products of warp groups"]
        if name in ("_prefill_kernel", "_pieces_kernel", "_decode_kernel") and "float32" not in case:
            assert kernel["copies of 16 bytes"] or "odd" in case
        if name in ("_rotary_and_cache_kernel", "_copy_kernel"):
            assert kernel["vector loads"] and kernel["vector stores"]


# --- the program -----------------------------------------------------------------------------------------------------


def record(module: Any, name: str, facts: dict[str, dict[str, Any]]) -> None:
    """Puts something in a kernel's place that compiles it for what it is launched with."""
    kernel = getattr(module, name)

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert all(size > 0 for size in grid) and all(size < 65536 for size in grid[1:])
            return lambda *args, **kwargs: facts.update({name: build(kernel, args, kwargs)})

    setattr(module, name, Launch())


def build(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in kwargs if name in names}
    options = {name: kwargs[name] for name in kwargs if name not in names}
    types = {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.int8: "i8",
        torch.float8_e4m3fn: "fp8e4nv",
        torch.int32: "i32",
        torch.int64: "i64",
    }
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name], aligned = "*" + types[value.dtype], value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, int) and special and value % 16 == 0
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return facts_of(result)


def facts_of(result: Any) -> dict[str, Any]:
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
    ptx = result.asm["ptx"]
    return {
        "registers": registers,
        "stack": stack,
        "shared": result.metadata.shared,
        "matrix products": ptx.count("mma.sync") + ptx.count("wgmma.mma_async"),
        "products of warp groups": ptx.count("wgmma.mma_async"),
        "copies of 16 bytes": len(re.findall(r"cp\.async\.cg\.shared\.global.*, 0x10", ptx)),
        "smaller copies": ptx.count("cp.async.ca"),
        "vector loads": len(re.findall(r"ld\.global\.v[24]", ptx)),
        "vector stores": len(re.findall(r"st\.global\.v[24]", ptx)),
    }


def launch(
    facts: dict[str, dict[str, Any]],
    call: str,
    *,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    head_dim: int = 128,
    block_size: int = 16,
    group: int = 4,
    window: int | None = None,
    cap: float = 0.0,
    max_seq_len: int = 8192,
) -> None:
    """A step of a network with 8 KV heads: 3 sequences of one token, or of many."""
    import torch

    from octavo.kernels.interface import AttentionBatch
    from octavo.kernels.triton import (
        attention,
        attention_decode,
        attention_fixed,
        attention_prefill,
        cache,
        rotary_cache,
    )

    for module in (attention_decode, attention_fixed, attention_prefill, cache, rotary_cache):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            record(module, name, facts)
    numbers, held = getattr(torch, dtype), getattr(torch, cache_dtype or dtype)
    caches = cache.make_cache(2, 4, block_size, 8, head_dim, held, "cpu")
    each = 40 if call == "prefill" else 1
    qkv = torch.zeros(3 * each, 8 * group + 16, head_dim, dtype=numbers)
    q, k, v = qkv.split([8 * group, 8, 8], dim=1)
    slots, positions = torch.zeros(2, 3 * each, dtype=torch.int64)
    if call == "rotary":
        rotary_cache.rotary_and_cache(q, k, v, positions, torch.zeros(max_seq_len, head_dim), caches[1], slots)
    elif call == "reshape":
        rotary_cache.reshape_and_cache(k, v, caches[1], slots)
    elif call == "copy":
        cache.copy_blocks(caches, [(0, 1)])
    else:
        batch = AttentionBatch(
            query_start=torch.arange(4, dtype=torch.int32) * each,
            seq_lens=torch.full((3,), 40, dtype=torch.int32),
            block_tables=torch.zeros(3, 40, dtype=torch.int32),
            slots=slots,
            positions=positions,
            num_decodes=3 if call == "decode" else 0,
            max_query_len=each,
            max_seq_len=max_seq_len,
            block_size=block_size,
        )
        if max_seq_len > 64:  # else a GPU of one multiprocessor, as it seems to be without one, is full
            attention_decode.count_parts = attention_fixed.count_parts = lambda *_: 4
        attention.paged_attention(q, caches[1], batch, 0.1, window, soft_cap=cap, deterministic=call == "fixed")


if __name__ == "__main__":
    told: dict[str, dict[str, Any]] = {}
    launch(told, **CASES[sys.argv[1]])
    sys.stdout.write(json.dumps(told) + "\n")
