"""The memory that a model will take, from its headers, before anything is loaded.

The terms are those with which a worker sizes its KV cache (``octavo.runner.memory``). Calls read files and are made in
threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from octavo.config.engine_config import EngineConfig
from octavo.core.model_config import ModelConfig

#: Bytes of an engine's process beside weights, steps and caches: Python, its modules, the kernels.
PROCESS_BYTES = 96 << 20
#: Share of the memory for all models that is the KV cache of one, if its options say nothing.
CACHE_SHARE = 1 / 8
#: Default of the memory for all models: share of what is free at the start.
_FREE_SHARE = 0.9
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a model takes on a device, of all its workers."""

    weights: int
    #: Activations of the largest step.
    step: int
    #: KV cache, and swap space where the cache is in the host's memory.
    cache: int
    processes: int

    @property
    def total(self) -> int:
        return self.weights + self.step + self.cache + self.processes


@dataclass(frozen=True, slots=True)
class SizedModel:
    """What is known of a model before it is loaded."""

    #: With a size of the KV cache.
    options: EngineConfig
    need: MemoryNeed
    #: "generate" and the tasks of ``PoolingParams``.
    tasks: tuple[str, ...]
    #: Longest prompt and output together that the network allows, in tokens.
    max_model_len: int


def memory_of_models(options: EngineConfig) -> int:
    """Bytes for all models of a server that was given no bound."""
    from octavo.kernels import resolve_device

    if resolve_device(options.device) == "cuda":
        from octavo.kernels.torch_backend import describe_gpus

        return int(_FREE_SHARE * sum(gpu["memory_bytes"]["available"] for gpu in describe_gpus()))
    from octavo.runner.memory import available_memory

    return int(_FREE_SHARE * available_memory())


def size_model(options: EngineConfig, memory: int) -> SizedModel:
    """The memory that a model takes, beside others in ``memory`` bytes.

    A cache without a size gets what ``max_num_seqs`` sequences of full length use, at most ``CACHE_SHARE`` of
    ``memory``; but one sequence of ``max_model_len``, if that is set. There is no swap space unless an option asks for
    it. Models that are not here are downloaded.

    Raises:
        OctavoError: the model is unknown, or its files cannot be read.
    """
    from octavo.config.kv_spec import GroupShape, KVLayout, group_layers
    from octavo.core.model_config import model_tasks
    from octavo.kernels import resolve_device
    from octavo.loader.resolve import gguf_source, resolve_model, weight_quantization
    from octavo.loader.weights import read_config
    from octavo.models.network import build_without_weights, size_bytes, weight_bytes
    from octavo.runner.memory import activation_bytes

    dummy = options.load_format == "dummy"
    folder = resolve_model(options.model, revision=options.revision, weights=not dummy, mmproj=options.mmproj)
    config, gguf = read_config(folder, options), gguf_source(options.model, options.revision)
    device = resolve_device(options.device)
    backend = options.kernels if options.kernels != "auto" else "cpu" if device == "cpu" else "triton"
    quantization = weight_quantization(options, backend, config.quantization, is_gguf=gguf is not None)
    dtype = config.checkpoint_dtype if options.dtype == "auto" else options.dtype
    network = build_without_weights(config, dtype, quantization, options.kv_cache_dtype)
    if gguf is not None and quantization == "gguf":
        weights = gguf_bytes(gguf)
        if network.tower is not None:
            weights += size_bytes(*network.tower.weights())
    else:
        weights = weight_bytes(network, maps_tables=backend == "cpu")
    weights += _draft_bytes(options, config, folder, backend, dtype)
    groups = [
        GroupShape(
            len(group.layers) * (group.spec.bytes_per_token * options.block_size + group.spec.bytes_per_state),
            group.spec.window,
            options.state_checkpoint_tokens if group.spec.kind == "state" else None,
        )
        for group in group_layers(network.kv_specs)
    ]
    context = min(options.max_model_len or config.max_position, config.max_position)
    sized = options.with_token_budget(device, context)
    layout = KVLayout.of(groups, sized, sized.token_budget)
    updates: dict[str, float] = {}
    if not groups:
        cache = 0
    elif options.num_gpu_blocks_override is not None:
        cache = options.num_gpu_blocks_override * sum(layout.block_bytes)
    elif options.kv_cache_memory_bytes is not None:
        cache = int(options.kv_cache_memory_bytes)
    else:
        most = int(CACHE_SHARE * memory)
        if options.max_model_len is not None:
            most = max(most, layout.size(layout.held(context)))
        cache = max(layout.size([1] * len(groups)), layout.size(layout.split(most, layout.longest(most, context))))
        updates["kv_cache_memory_bytes"] = cache
    swaps = options.moves_blocks_to_host and options.num_host_blocks_override is None
    if swaps and options.swap_space is None and not options.host_prefix_cache:
        updates["swap_space"] = 0
    swap = int((options.swap_space or 0) * _GIB) if device == "cpu" else 0
    options = EngineConfig.model_validate({**options.model_dump(exclude_unset=True), **updates})
    copies, workers = options.data_parallel_size, options.world_size
    step = activation_bytes(config, sized)
    parts = (weights, workers * step, workers * cache + swap, (workers + (workers > 1)) * PROCESS_BYTES)
    need = MemoryNeed(*(copies * part for part in parts))
    return SizedModel(options, need, model_tasks(config, options.task), context)


def _draft_bytes(options: EngineConfig, config: ModelConfig, folder: Path, backend: str, dtype: str) -> int:
    """Of the weights of a drafter beside the model: a draft model, a head, or layers of the model's own checkpoint."""
    from octavo.loader.mtp import with_own_drafts
    from octavo.loader.resolve import gguf_source
    from octavo.models.network import build_without_weights, weight_bytes

    options = with_own_drafts(options, config, folder, on_cpu=backend == "cpu")
    if options.speculative_config is None or not options.speculative_config.drafts_on_workers:
        return 0
    from octavo.runner.drafters import find_draft_source

    source = find_draft_source(options, config, folder)
    assert source is not None
    gguf = gguf_source(source.options.model, source.options.revision)
    form = source.quantization(backend, is_gguf=gguf is not None)
    if form == "gguf" and gguf is not None:
        return gguf_bytes(gguf) if source.options.model != options.model else 0  # else counted with the model
    return weight_bytes(build_without_weights(source.config, dtype, form))


def gguf_bytes(gguf: Path) -> int:
    """Bytes in memory of a GGUF file's weights: in the file's own bits, or in 8 bits with a scale per 32 values.

    Tables that stay in the mapped file do not count.
    """
    from octavo.kernels.cpu.linear import KEPT_TYPES
    from octavo.loader.gguf_file import GGUFFile, is_mapped

    size = 0.0
    for tensor in GGUFFile(gguf).tensors.values():
        numbers, kind = math.prod(tensor.shape), tensor.type.name
        if is_mapped(tensor):
            continue
        if len(tensor.shape) == 1:
            size += 4 * numbers
        elif kind in ("F32", "F16", "BF16"):
            size += 2 * numbers
        else:
            size += tensor.rows * tensor.row_bytes if kind in KEPT_TYPES else numbers * 34 / 32
    return int(size)
