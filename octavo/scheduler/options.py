"""What the scheduler is told: limits, the way a step is filled, policies."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config import EngineConfig


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The options of ``EngineConfig`` that concern scheduling, under the same names."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batching: str = "mixed"
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "auto"
    preemption_victim: str = "last"
    priority_preemption: bool = False
    aging_limit: float | None = 60.0
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int | None = None
    long_prefill_token_threshold: int = 0
    max_long_partial_prefills: int = 1
    scheduler_delay_factor: float = 0.0

    @classmethod
    def from_config(cls, config: EngineConfig, max_model_len: int) -> SchedulerOptions:
        """Takes them from the engine's; ``max_model_len`` as the blocks allow."""
        own = {name: getattr(config, name) for name in cls.__slots__ if name != "max_model_len"}
        return cls(max_model_len=max_model_len, **own)
