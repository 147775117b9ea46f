"""Traces of the engine's own process by torch's profiler, between ``start_profile`` and ``stop_profile``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError
from octavo.kernels import require_torch


@dataclass
class ProfilerConfig:
    """Where traces go. A CPU's kernels are not torch's: ``octavo bench kernels`` and ``time_kernels`` see these."""

    profiler: str | None = "torch"
    #: Folder of the traces, which Chrome's tracing page and Perfetto show.
    torch_profiler_dir: str = ""
    #: Accepted, as the trace is all between start and stop.
    delay_iterations: int = 0
    max_iterations: int = 0


class Profiler:
    """One trace at a time."""

    def __init__(self, config: ProfilerConfig | dict[str, Any] | None) -> None:
        """``config``: by default the folder is what the variable VLLM_TORCH_PROFILER_DIR names."""
        if config is None:
            config = ProfilerConfig(torch_profiler_dir=os.environ.get("VLLM_TORCH_PROFILER_DIR", ""))
        self._config = ProfilerConfig(**config) if isinstance(config, dict) else config
        if self._config.profiler not in (None, "torch"):
            raise ConfigError(f"profiler_config: profiler must be 'torch', not {self._config.profiler!r}")
        self._trace: Any = None
        self._number = 0

    def start(self) -> None:
        """Begins a trace.

        Raises:
            ConfigError: no folder is named for it, or torch is not installed.
        """
        if not self._config.torch_profiler_dir:
            raise ConfigError("start_profile needs a folder: LLM(profiler_config={'torch_profiler_dir': FOLDER})")
        require_torch("traces of vLLM's profiler")
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()

    def stop(self) -> Path | None:
        """Ends the trace and writes it: its file, or None if there was none."""
        if self._trace is None:
            return None
        self._trace.stop()
        folder = Path(self._config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"octavo-{os.getpid()}-{self._number}.pt.trace.json"
        self._number += 1
        self._trace.export_chrome_trace(str(path))
        self._trace = None
        return path
