"""Facts about the machine: processor, instruction sets, cores, GPU driver."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

#: Instruction sets that matter for kernels, by their names in /proc/cpuinfo (x86, then Arm).
INSTRUCTION_SETS = (
    "sse4_2",
    "avx",
    "f16c",
    "fma",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimdhp",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
)
_MACOS = {
    "asimd": "AdvSIMD",
    "asimdhp": "FEAT_FP16",
    "asimddp": "FEAT_DotProd",
    "i8mm": "FEAT_I8MM",
    "bf16": "FEAT_BF16",
}


def cpu_name() -> str:
    """The processor's model name; the architecture if that is unknown."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """The ``INSTRUCTION_SETS`` of this processor."""
    if sys.platform == "darwin":
        return [ours for ours, theirs in _MACOS.items() if _sysctl(f"hw.optional.arm.{theirs}") == "1"]
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [name for name in INSTRUCTION_SETS if name in flags]


def usable_cores() -> int:
    """Logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    return _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0] or None


def _cpuinfo() -> dict[str, str]:
    """The entries of the first processor in /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(name: str) -> str:
    return _output_of(["sysctl", "-n", name])


def _output_of(command: list[str]) -> str:
    """The output of a program; empty if it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
