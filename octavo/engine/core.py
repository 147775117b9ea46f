"""The engine core: a scheduler and an executor, joined by the step loop. It knows token ids only."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.request import GroupRequest
from octavo.core.updates import StepOutputs
from octavo.executor.executor import UniprocExecutor
from octavo.memory.block_manager import BlockManager
from octavo.models.config import read_model_config
from octavo.scheduler.options import SchedulerOptions
from octavo.scheduler.policies import load_policy
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger("octavo")


@dataclass(slots=True)
class StepTimes:
    """Seconds summed over steps, by where they went."""

    steps: int = 0
    #: Whole steps: schedule, execute, update.
    total: float = 0.0
    #: Inside the worker, and there inside kernels (measured only with ``time_kernels``).
    worker: float = 0.0
    kernels: float = 0.0

    @property
    def share_outside_kernels(self) -> float:
        """Share of step time that no kernel used."""
        return 1.0 - self.kernels / self.total if self.total else 0.0


class EngineCore:
    """Owns the scheduler, the blocks and the executor of one model."""

    def __init__(self, options: EngineConfig, folder: Path) -> None:
        """Loads the model in ``folder`` and makes its KV cache.

        Raises:
            OctavoError: the checkpoint is unusable, or memory or options do not allow to run it.
        """
        load_policy(options.scheduling_policy)  # a name that is wrong is better known before the model is loaded
        self.options = options
        self.model_config = read_model_config(folder)
        self.dtype = _resolve_dtype(options, self.model_config)
        wanted = _context_length(options, self.model_config)
        # The rotary table need not be longer, and for two kinds of scaling it is better if it is not.
        fitted = replace(self.model_config, max_position=wanted)
        self.executor = UniprocExecutor(options, fitted, folder, self.dtype)
        blocks = self.executor.collective_rpc("num_blocks", wanted)[0]
        #: Longest sequence in tokens: as configured, or what the blocks can hold if that is less.
        self.max_model_len = min(wanted, blocks * options.block_size)
        if self.max_model_len < wanted:
            logger.warning(
                "the KV cache holds %d tokens, less than the context length of %d: longer requests are refused",
                self.max_model_len,
                wanted,
            )
        host_blocks = self.executor.collective_rpc("num_host_blocks")[0]
        self.blocks = BlockManager(
            blocks,
            options.block_size,
            num_host_blocks=host_blocks,
            watermark=options.watermark,
            prefix_caching=options.enable_prefix_caching,
            host_cache=options.host_prefix_cache,
        )
        self.scheduler = Scheduler(self.blocks, SchedulerOptions.from_config(options, self.max_model_len))
        self.executor.collective_rpc("make_cache", blocks, host_blocks, self.max_model_len)
        if options.preemption_mode == "auto":  # who else would ask what moving a block costs
            seconds = self.executor.collective_rpc("measure_swap")[0]
            if seconds:
                self.scheduler.move_cost.observe_move(1, seconds)
        self.times = StepTimes()

    def add(self, request: GroupRequest) -> None:
        """Queues a request."""
        self.scheduler.add(request)

    def abort(self, group_id: int) -> None:
        """Ends a request in any state; nothing happens if it has ended."""
        self.scheduler.finish_group(group_id)

    def stop(self, group_id: int, index: int) -> None:
        """Ends one sequence of a request, as a stop text does; nothing happens if it has ended."""
        self.scheduler.finish_sequence(group_id, index)

    def reset_prefix_cache(self) -> None:
        """Forgets the contents of all blocks that requests to come could share."""
        self.blocks.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return self.scheduler.has_work

    def step(self) -> StepOutputs:
        """One step. If the worker fails, the step's requests end with an error and the engine goes on."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        try:
            result = self.executor.execute(plan)
        except Exception as e:
            logger.exception("step %d failed", plan.step)
            return self.scheduler.fail(plan, f"the step failed: {type(e).__name__}: {e}")
        updates = self.scheduler.update(plan, result)
        self.times.steps += 1
        self.times.total += time.perf_counter() - start
        self.times.worker += result.seconds
        self.times.kernels += result.kernel_seconds
        return updates


def _resolve_dtype(options: EngineConfig, config: ModelConfig) -> str:
    if options.dtype != "auto":
        return options.dtype
    return "float32" if config.checkpoint_dtype == "float32" else "bfloat16"


def _context_length(options: EngineConfig, config: ModelConfig) -> int:
    """``max_model_len``, checked against the model and the token budget."""
    wanted = options.max_model_len or config.max_position
    if wanted > config.max_position:
        raise ConfigError(
            f"max_model_len ({wanted}) is longer than the model's context length ({config.max_position} tokens)"
        )
    if not options.enable_chunked_prefill and options.max_num_batched_tokens < wanted:
        raise ConfigError(
            f"with enable_chunked_prefill off, max_num_batched_tokens ({options.max_num_batched_tokens}) must be at "
            f"least the context length ({wanted}); lower max_model_len or raise the budget"
        )
    return wanted
