"""The engine core: the step loop over the scheduler and the executor of one model. It knows token ids only."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.adapters import AdapterRef
from octavo.core.config import MAX_LOGPROBS_ON_GPU, EngineConfig
from octavo.core.errors import ConfigError, EngineStateError
from octavo.core.idle_options import idle_options
from octavo.core.kv_groups import GroupBlocks, KVLayout
from octavo.core.model_config import ModelConfig
from octavo.core.preparation import adapter_preparation, limits_of
from octavo.core.startup import StartupFacts
from octavo.engine.draft_vocabulary import check_draft_model
from octavo.engine.step_loop import StepLoop
from octavo.executor.executor import Executor
from octavo.executor.external import without_clock
from octavo.executor.factory import make_executor
from octavo.kernels import resolve_device
from octavo.loader.stored_head import read_config
from octavo.memory.block_manager import BlockManager
from octavo.models.sizes import build_without_weights, num_parameters
from octavo.scheduler.policies import load_policy
from octavo.scheduler.preparations import Preparations
from octavo.scheduler.scheduler import Scheduler
from octavo.speculation.speculator import make_speculator

logger = logging.getLogger("octavo")
#: What ``wake_up`` brings back.
SLEEPING_PARTS = ("weights", "kv_cache")
#: Of its own, so that a command can leave these lines out.
startup_logger = logging.getLogger("octavo.startup")


class EngineCore(StepLoop):
    """A step loop that makes its scheduler, its blocks and its executor, and owns them."""

    def __init__(self, options: EngineConfig, folder: Path, replica: int = 0) -> None:
        """Loads the model in ``folder`` and makes its KV cache; ``replica``: see ``make_executor``.

        Raises:
            OctavoError: the checkpoint is unusable, or memory or options do not allow to run it.
        """
        start = time.perf_counter()
        self.replica = replica
        policy = load_policy(options.scheduling_policy)  # refuses an unknown name before the model is loaded
        device = resolve_device(options.device)
        if replica == 0:
            for line in idle_options(options, device):
                logger.warning("%s", line)
        if options.distributed_executor_backend == "external_launcher":
            options = without_clock(options, policy_uses_clock=policy.uses_clock)
        self.model_config = read_config(folder, options)
        self.dtype = _resolve_dtype(options, self.model_config)
        _check_threads(options)
        context_length = _context_length(options, self.model_config)
        _check_max_logprobs(options)
        check_draft_model(options, self.model_config, folder)
        #: With ``max_num_batched_tokens`` resolved.
        if self.model_config.is_encoder:
            options = options.for_encoder(device)
        elif self.model_config.encoder_facts is not None:
            options = options.for_encoder_decoder(device, context_length)
        else:
            options = options.with_token_budget(device, context_length)
        self.options = options
        # The rotary table need not be longer, and for two kinds of scaling it is better if it is not.
        fitted = replace(self.model_config, max_position=context_length)
        executor = make_executor(options, fitted, folder, self.dtype, replica)
        #: Called once: by ``shutdown``, or when the core is dropped or the process ends.
        self._end_workers = weakref.finalize(self, executor.shutdown)
        in_flight = options.token_budget * _steps_in_flight(options)
        #: Longest sequence in tokens: as configured, or what the blocks can hold if that is less.
        self.max_model_len, counts = executor.cache_size(context_length, in_flight)
        if self.max_model_len < context_length:
            logger.warning(
                "the KV cache holds %d tokens, less than the context length of %d: longer requests are refused",
                self.max_model_len,
                context_length,
            )
        self._warn_of_long_inputs(counts)
        host_counts = executor.num_host_blocks(self.max_model_len, in_flight)
        groups = executor.kv_groups()
        sizes = [
            GroupBlocks(count, host_count, window, block_bytes)
            for count, host_count, (block_bytes, window) in zip(counts, host_counts, groups, strict=True)
        ]
        executor.collective_rpc("make_cache", [counts, host_counts, self.max_model_len])
        self.blocks = BlockManager(sizes, options.block_size, **block_settings(options))
        scheduler = self._new_scheduler(executor, sizes, Preparations(limits_of(options)))
        super().__init__(scheduler, executor, max_in_flight=_steps_in_flight(options))
        checkpoint = self.model_config.quantization
        #: What the engine got, also logged.
        self.startup = StartupFacts(
            model=options.model,
            architecture=self.model_config.architecture,
            parameters=num_parameters(build_without_weights(self.model_config, self.dtype)),
            dtype=self.dtype,
            checkpoint_quantization=checkpoint.name if checkpoint else None,
            kv_cache_dtype=self.dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
            groups=sizes,
            block_size=options.block_size,
            max_model_len=self.max_model_len,
            full_length_requests=KVLayout.of(groups, options, in_flight).full_length_seqs(counts, self.max_model_len),
            max_num_seqs=options.max_num_seqs,
            token_budget=options.token_budget,
            seconds=time.perf_counter() - start,
            workers=executor.startup_facts(),
        )
        for line in self.startup.lines():
            startup_logger.info("%s", line)
        #: While it sleeps nothing can be computed.
        self.is_sleeping = False

    def _warn_of_long_inputs(self, counts: Sequence[int]) -> None:
        """Says so if the longest input and output together do not fit the blocks: such requests end with an error."""
        longest, size = self.model_config.longest_input(self.max_model_len), self.options.block_size
        needed = 0 if longest is None else -(-longest // size) + -(-self.max_model_len // size)
        if needed > min(counts, default=needed):
            logger.warning(
                "the KV cache has %d blocks, but a request of %d tokens with an encoder's input of %s needs %d: one "
                "that outgrows the cache ends with an error",
                min(counts),
                self.max_model_len,
                longest,
                needed,
            )

    def _new_scheduler(self, executor: Executor, sizes: list[GroupBlocks], preparations: Preparations) -> Scheduler:
        """A scheduler over the blocks, which have these sizes, with the cost of moving one."""
        options = self.options
        scheduler = Scheduler(
            self.blocks,
            options,
            self.max_model_len,
            speculator=make_speculator(options.speculative_config),
            runs_ahead=_steps_in_flight(options) > 1,
            num_stages=executor.num_stages,
            preparations=preparations,
        )
        if options.preemption_mode == "auto":  # the only mode that needs the cost of moving a block
            seconds = executor.measure_swap()
            if seconds:
                scheduler.move_cost.observe_move(sum(size.block_bytes for size in sizes), seconds)
        return scheduler

    def pin_adapter(self, adapter: AdapterRef) -> None:
        """Keeps an adapter in host memory, and in a slot if it needs one; it is loaded with the next steps.

        Raises:
            AdapterError: so many are pinned that no other could run, or its kind is not enabled.
        """
        self.scheduler.preparations.pin(adapter_preparation(adapter), adapter.name)

    def sleep(self, level: int = 1) -> None:
        """Frees memory until ``wake_up``; the prefix cache is reset. See ``LLM.sleep`` for the levels.

        While it sleeps at level 1, level 2 may follow; other calls change nothing then.

        Pinned prefixes are released with it; what gave them has them computed again. Adapters stay in host memory.

        Raises:
            ConfigError: there is no such level.
            EngineStateError: requests are unfinished.
        """
        if level not in (1, 2):
            raise ConfigError(
                f"the level of sleep must be 1 (the KV cache is freed) or 2 (the weights too), not {level!r}"
            )
        if self.has_work:
            raise EngineStateError("requests are unfinished: let them end or abort them before sleep()")
        logger.info("sleeping at level %d: %.2f GiB of memory freed", level, self.executor.sleep(level) / (1 << 30))
        self.blocks.pinned.clear()
        self.blocks.reset_prefix_cache()
        self.is_sleeping = True

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restores weights and KV cache, or those of them in ``tags``; whether both are there.

        Raises:
            ConfigError: there is no such tag.
        """
        if unknown := set(tags or ()) - set(SLEEPING_PARTS):
            raise ConfigError(f"tags of wake_up must be of {', '.join(SLEEPING_PARTS)}, not {', '.join(unknown)}")
        parts = [*SLEEPING_PARTS] if tags is None else [*tags]
        self.is_sleeping = not all(self.executor.collective_rpc("wake_up", [parts]))
        return not self.is_sleeping

    @property
    def was_shut_down(self) -> bool:
        """Whether ``shutdown`` was called."""
        return not self._end_workers.alive

    def shutdown(self) -> None:
        """Ends the workers: nothing can be computed any more. Also done when the core is dropped."""
        self._end_workers()


def block_settings(options: EngineConfig) -> dict[str, Any]:
    """The keywords of a ``BlockManager`` under these options, whose token budget is resolved."""
    return {
        "max_num_batched_tokens": options.token_budget * _steps_in_flight(options),
        "cuts_prompts": options.cuts_prompts,
        "watermark": options.watermark,
        "prefix_caching": options.enable_prefix_caching,
        "host_cache": options.host_prefix_cache,
    }


def _check_threads(options: EngineConfig) -> None:
    """Warns of more threads than processors: they wait for one another by spinning, and take turns while they do."""
    processors = len(os.sched_getaffinity(0))
    if options.num_threads is not None and options.num_threads > processors:
        logger.warning(
            "num_threads is %d, but this process may use %d processors: more threads than these make steps slower",
            options.num_threads,
            processors,
        )


def _steps_in_flight(options: EngineConfig) -> int:
    """One for each pipeline stage; at least two with ``async_scheduling``, by default on a GPU.

    There the processor is idle while the device computes.
    """
    if options.pipeline_parallel_size > 1:
        return options.pipeline_parallel_size
    return 2 if options.plans_ahead(resolve_device(options.device)) else 1


def _resolve_dtype(options: EngineConfig, config: ModelConfig) -> str:
    if options.dtype != "auto":
        return options.dtype
    stored = config.checkpoint_dtype
    if stored == "float16" and resolve_device(options.device) == "cpu":
        return "bfloat16"
    return stored if stored in ("float32", "float16") else "bfloat16"


def _check_max_logprobs(options: EngineConfig) -> None:
    limit = options.max_logprobs or 0
    if (limit == -1 or limit > MAX_LOGPROBS_ON_GPU) and resolve_device(options.device) != "cpu":
        raise ConfigError(f"max_logprobs must be in [0, {MAX_LOGPROBS_ON_GPU}] on a GPU, not {limit}")


def _context_length(options: EngineConfig, config: ModelConfig) -> int:
    """``max_model_len``, checked against the model and the token budget."""
    length = options.max_model_len or config.default_length
    if length > config.max_position:
        raise ConfigError(
            f"max_model_len ({length}) is longer than the model's context length ({config.max_position} tokens)"
        )
    budget = options.max_num_batched_tokens
    if config.is_encoder:
        return length
    if not options.enable_chunked_prefill and budget is not None and budget < length:
        raise ConfigError(
            f"with enable_chunked_prefill off, max_num_batched_tokens ({budget}) must be at least the context length "
            f"({length}); lower max_model_len or raise the budget"
        )
    return length
