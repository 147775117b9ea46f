"""How much memory there is, and how many KV cache blocks it gives on the device and on the host."""

from __future__ import annotations

from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import InsufficientMemoryError
from octavo.core.model_config import ModelConfig
from octavo.layers.context import LayerContext
from octavo.models.sizes import outline_network, weight_bytes

GIB = 1 << 30
_DEFAULT_SWAP_SPACE = 4 * GIB
#: Defaults of ``gpu_memory_utilization``: of what is free on a CPU, where other programs live; of all a GPU has.
_CPU_SHARE, _GPU_SHARE = 0.5, 0.9


def available_memory() -> int:
    """Bytes that this process may still take: free memory of the machine, or of the container if that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = _read_bytes("/sys/fs/cgroup/memory.max"), _read_bytes("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _read_bytes(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such container, or "max": no limit
        return None


def activation_bytes(config: ModelConfig, options: EngineConfig) -> int:
    """A bound on the bytes that the largest step needs beside weights and cache: activations of one layer, and logits.

    Nothing is kept from one layer to the next but the residual stream, so one layer's tensors bound them all.
    """
    heads = (config.num_heads * 2 + config.num_kv_heads * 2) * config.head_dim
    row = 4 * config.hidden_size + heads + 3 * config.intermediate_size
    logits = 3 * min(options.max_num_seqs, options.max_num_batched_tokens) * config.vocab_size
    return 4 * (options.max_num_batched_tokens * row + logits)


def check_weights_fit(config: ModelConfig, context: LayerContext, free: int | None = None) -> None:
    """Refuses a model whose share of ``context`` does not fit into ``free`` bytes, before anything is read.

    Without ``free`` it is the host's free memory.

    Raises:
        InsufficientMemoryError: with what is needed and what is there.
        UnsupportedModelError, ConfigError: there is no such network.
    """
    needed = weight_bytes(outline_network(config, context))
    free = available_memory() if free is None else free
    if needed > free:
        raise InsufficientMemoryError(
            f"the weights need {needed / GIB:.2f} GiB in {context.quantization or context.dtype_name}, but only "
            f"{free / GIB:.2f} GiB of memory are free"
        )


def free_for_caches(config: ModelConfig, options: EngineConfig) -> int:
    """Bytes free now beside what the largest step needs; to be asked once the weights are in memory."""
    return max(0, available_memory() - activation_bytes(config, options))


def num_host_blocks(config: ModelConfig, options: EngineConfig, block_bytes: int, free: int) -> int:
    """Host blocks of ``block_bytes`` each for what preempted requests hold, of ``free`` bytes of host memory.

    ``num_host_blocks_override`` if given. Else as many as ``swap_space`` holds, by default 4 GiB or a tenth of what is
    free if that is less, or none if the other options never move a block there; and never more than ``max_num_seqs``
    sequences of full length could use.

    Raises:
        InsufficientMemoryError: the ``swap_space`` that was asked for is more than what is free.
    """
    if options.num_host_blocks_override is not None:
        return options.num_host_blocks_override
    space = _default_swap_space(options, free) if options.swap_space is None else int(options.swap_space * GIB)
    if space > free:
        raise InsufficientMemoryError(
            f"swap_space={options.swap_space:g} GiB is more than the {free / GIB:.3f} GiB that are free beside the "
            "weights and the largest step's activations; lower it (0: preempted requests are recomputed)"
        )
    full_length = -(-config.max_position // options.block_size)
    return min(space // block_bytes, full_length * options.max_num_seqs)


def _default_swap_space(options: EngineConfig, free: int) -> int:
    if options.preemption_mode == "recompute" and not options.host_prefix_cache:
        return 0
    return min(_DEFAULT_SWAP_SPACE, free // 10)


def num_blocks(options: EngineConfig, block_bytes: int, free: int, max_model_len: int) -> int:
    """KV cache blocks of ``block_bytes`` each on a CPU, of ``free`` bytes of its memory.

    ``num_gpu_blocks_override`` if given. Else the share ``gpu_memory_utilization`` of what is free, and never more than
    ``max_num_seqs`` sequences of full length could use.

    Raises:
        InsufficientMemoryError: not one sequence of ``max_model_len`` tokens fits though that length was asked for, or
            not a single block.
    """
    share = options.gpu_memory_utilization or _CPU_SHARE
    return _blocks_within(
        options,
        block_bytes,
        int(share * free),
        max_model_len,
        f"gpu_memory_utilization={share} of the {max(0, free) / GIB:.3f} GiB left free gives",
    )


def num_gpu_blocks(options: EngineConfig, block_bytes: int, total: int, peak: int, max_model_len: int) -> int:
    """KV cache blocks of ``block_bytes`` each on a GPU with ``total`` bytes of memory.

    ``num_gpu_blocks_override`` if given. Else what the share ``gpu_memory_utilization`` of all memory leaves beside
    ``peak``, the bytes in use at the peak of the largest step; and never more than ``max_num_seqs`` sequences of full
    length could use.

    Raises:
        InsufficientMemoryError: as ``num_blocks``.
    """
    share = options.gpu_memory_utilization or _GPU_SHARE
    return _blocks_within(
        options,
        block_bytes,
        int(share * total) - peak,
        max_model_len,
        f"gpu_memory_utilization={share} of the GPU's {total / GIB:.3f} GiB, less {peak / GIB:.3f} GiB for weights and "
        "the largest step, leaves",
    )


def _blocks_within(options: EngineConfig, block_bytes: int, budget: int, max_model_len: int, source: str) -> int:
    """Blocks of ``budget`` bytes, which ``source`` explains."""
    if options.num_gpu_blocks_override is not None:
        return options.num_gpu_blocks_override
    per_sequence = -(-max_model_len // options.block_size)
    least = per_sequence if options.max_model_len is not None else 1
    if budget < least * block_bytes:
        what = f"one sequence of {max_model_len} tokens" if least > 1 else "one block"
        raise InsufficientMemoryError(
            f"the KV cache of {what} needs {least * block_bytes / GIB:.3f} GiB, but {source} "
            f"{max(0, budget) / GIB:.3f} GiB; lower max_model_len, max_num_batched_tokens or swap_space, or raise "
            "gpu_memory_utilization"
        )
    return min(budget // block_bytes, per_sequence * options.max_num_seqs)
