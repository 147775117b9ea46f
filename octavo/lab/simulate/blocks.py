"""The KV cache of a simulated engine: as many blocks as an engine with these options would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.simulate.step_profile import StepProfile
from octavo.memory.block_manager import BlockManager
from octavo.memory.stored import StoreLimits

_GIB = 1 << 30
_DEFAULT_SWAP_SPACE = 4 * _GIB


def make_simulated_blocks(
    profile: StepProfile, options: EngineConfig, make: Callable[..., BlockManager]
) -> tuple[int, BlockManager, EngineConfig, int]:
    """The longest sequence, the blocks, the options with their token budget resolved, and steps in flight."""
    context = options.max_model_len or profile.max_model_len
    if context > profile.max_model_len:
        raise ConfigError(
            f"max_model_len ({context}) is longer than the context length of the profile ({profile.max_model_len})"
        )
    on_gpu = profile.device_type == "gpu"
    options = options.with_token_budget("cuda" if on_gpu else "cpu", context)
    ahead = options.async_scheduling
    in_flight = 2 if ahead or (ahead is None and on_gpu) else 1
    size, tokens = options.block_size, profile.kv_cache_tokens
    block_bytes = size * profile.kv_bytes_per_token
    if options.kv_cache_memory_bytes is not None:
        tokens = int(options.kv_cache_memory_bytes) // profile.kv_bytes_per_token
    num_blocks = options.num_gpu_blocks_override or tokens // size
    if not num_blocks:
        raise ConfigError(f"the KV cache of {tokens} tokens holds no block of {size} tokens")
    most = options.max_num_seqs * -(-context // size)
    num_blocks, longest = min(num_blocks, most), min(context, num_blocks * size)
    blocks = make(
        num_blocks,
        size,
        num_host_blocks=min(_num_host_blocks(options, block_bytes), most),
        max_num_batched_tokens=options.token_budget * in_flight,
        cuts_prompts=options.cuts_prompts,
        watermark=options.watermark,
        prefix_caching=options.enable_prefix_caching,
        host_cache=options.host_prefix_cache,
        hold_share=options.cache_hold_share,
        **_store_limits(options, block_bytes),
    )
    return longest, blocks, options, in_flight


def _store_limits(options: EngineConfig, block_bytes: int) -> dict[str, StoreLimits]:
    """Those of an engine, in blocks: the unit of a block manager that is given a number of blocks."""
    if options.kv_disk is None and options.kv_store is None:
        return {}
    limits = StoreLimits()
    step, fetch = max(1, limits.step_bytes // block_bytes), max(1, limits.fetch_bytes // block_bytes)
    return {"stores": replace(limits, step_bytes=step, fetch_bytes=fetch)}


def _num_host_blocks(options: EngineConfig, block_bytes: int) -> int:
    """As the engine counts them, on a machine with host memory to spare."""
    if not options.moves_blocks_to_host:
        return 0
    if options.num_host_blocks_override is not None:
        return options.num_host_blocks_override
    space = _DEFAULT_SWAP_SPACE if options.swap_space is None else int(options.swap_space * _GIB)
    return space // block_bytes
