"""The memory that a model will take, from its headers, before anything is loaded.

The terms are those with which a worker sizes its KV cache (``octavo.runner.memory``). Calls read files and are made in
threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.engine_config import EngineConfig
from octavo.core.model_config import ModelConfig

if TYPE_CHECKING:
    from octavo.layers.layer import Weight
    from octavo.models.network import Network
    from octavo.runner.drafters import DraftSource

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
    #: Activations of the largest step, tables of positions, and what is kept of adapters and images.
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

    Encoders and encoder-decoder models leave out options that they would refuse, as all models of a server share them.
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
    from octavo.models.network import build_without_weights
    from octavo.runner.memory import activation_bytes

    dummy = options.load_format == "dummy"
    folder = resolve_model(options.model, revision=options.revision, weights=not dummy, mmproj=options.mmproj)
    config, gguf = read_config(folder, options), gguf_source(options.model, options.revision)
    if config.is_encoder or config.encoder_facts is not None:
        options = options.without_refused(is_encoder=config.is_encoder)
    device = resolve_device(options.device)
    backend = options.kernels if options.kernels != "auto" else "cpu" if device == "cpu" else "triton"
    quantization = weight_quantization(options, backend, config.quantization, is_gguf=gguf is not None)
    dtype = config.checkpoint_dtype if options.dtype == "auto" else options.dtype
    drafting, drafter = find_drafter(options, config, folder, on_cpu=backend == "cpu")
    draft_tokens = drafting.kept_draft_tokens
    network = build_without_weights(config, dtype, quantization, options.kv_cache_dtype, draft_tokens=draft_tokens)
    sizes = GGUFSizes.of(gguf) if gguf is not None and quantization == "gguf" else None
    weights = weights_in_memory(network, dtype, sizes, maps_tables=backend == "cpu" and not dummy)
    groups = [
        GroupShape(
            len(group.layers) * (group.spec.bytes_per_token * options.block_size + group.spec.bytes_per_state),
            group.spec.window,
            options.state_checkpoint_tokens if group.spec.kind == "state" else None,
        )
        for group in group_layers(network.kv_specs)
    ]
    context = min(options.max_model_len or config.max_position, config.max_position)
    sized = drafting.with_token_budget(device, context)
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
    longest = layout.longest(cache, context) if groups else 0
    step = activation_bytes(config, sized, backend) + network.position_bytes() * longest
    step += _resource_bytes(options, network, dtype)
    if drafter is not None:
        weights += _draft_bytes(drafter, options.model, backend, dtype)
        step += activation_bytes(drafter.config, sized, backend)
    parts = (weights, workers * step, workers * cache + swap, (workers + (workers > 1)) * PROCESS_BYTES)
    need = MemoryNeed(*(copies * part for part in parts))
    return SizedModel(options, need, model_tasks(config, options.task), context)


def _resource_bytes(options: EngineConfig, network: Network, dtype: str) -> int:
    """Of what requests bring and engines keep: adapters, the virtual tokens of prompt adapters, features of images."""
    from octavo.core.dtypes import DType
    from octavo.models.network import build_without_weights

    size = 0
    if network.tower is not None:
        from octavo.runner.images import image_bytes

        size += image_bytes(network, options)
    if options.enable_lora or options.num_virtual_tokens:
        from octavo.runner.adapters import adapter_bytes, virtual_token_bytes

        size += virtual_token_bytes(network, options.num_virtual_tokens, DType(dtype))
        if options.enable_lora:
            rank = options.max_lora_rank
            slots = build_without_weights(network.config, dtype, max_loras=1, max_lora_rank=rank)
            size += options.num_host_loras * adapter_bytes(layer for _, layer in slots.lora_layers())
    return size


def find_drafter(
    options: EngineConfig, config: ModelConfig, folder: Path, *, on_cpu: bool
) -> tuple[EngineConfig, DraftSource | None]:
    """The options with the drafts that an engine makes by default; and its drafter, if that has weights of its own."""
    from octavo.loader.mtp import with_own_drafts

    options = with_own_drafts(options, config, folder, on_cpu=on_cpu)
    if options.speculative_config is None or not options.speculative_config.drafts_on_workers:
        return options, None
    from octavo.runner.drafters import find_draft_source

    return options, find_draft_source(options, config, folder)


def _draft_bytes(source: DraftSource, model: str, backend: str, dtype: str) -> int:
    """Of the weights of a drafter beside ``model``: a draft model, a head, or layers of the model's own checkpoint."""
    from octavo.loader.resolve import gguf_source
    from octavo.models.network import build_without_weights

    options = source.options
    gguf = gguf_source(options.model, options.revision)
    form = source.quantization(backend, is_gguf=gguf is not None)
    sizes = None
    if form == "gguf" and gguf is not None:
        if options.model == model:
            return 0  # counted with the model
        sizes = GGUFSizes.of(gguf)
    return weights_in_memory(build_without_weights(source.config, dtype, form), dtype, sizes, maps_tables=False)


# What the weights of a network take once they are packed.


def weights_in_memory(network: Network, dtype: str, gguf: GGUFSizes | None, *, maps_tables: bool) -> int:
    """Bytes of a network's weights, scales included.

    Args:
        dtype: of the weights that are not quantised.
        gguf: of the file, if its own bits are computed with.
        maps_tables: whether tables stay in the mapped file, and take no memory.
    """
    weights = list(network.weights())
    if gguf is None:
        return packed_weights(weights, maps_tables=maps_tables)
    tower = network.tower  # in a file of its own
    size = gguf.num_bytes(dtype, has_head=any(weight.kind == "head" for weight in weights))
    return size + (0 if tower is None else packed_weights(list(tower.weights()), maps_tables=maps_tables))


def packed_weights(weights: Iterable[Weight], *, maps_tables: bool) -> int:
    return sum(
        4 * math.prod(weight.shape) if weight.kind == "vector" else packed_bytes(str(weight.dtype), weight.shape)
        for weight in weights
        if not weight.is_tied and not (weight.is_mapped and maps_tables)
    )


#: Bits of an element of the CPU kernels' formats with their scales; "int8" has one for each row.
_BITS = {
    "float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "int8": 8.0, "fp8": 8.0, "int4": 4.5, "mxfp4": 4.25,
    "gptq-int4": 4.5, "awq-int4": 4.5, "gptq-int8": 8.5, "compressed-tensors-int4": 4.5, "compressed-tensors-int8": 8.5,
}  # fmt: skip


def packed_bytes(form: str, shape: Sequence[int]) -> int:
    """Bytes in memory of a weight [outputs, inputs] in this form, scales included."""
    from octavo.kernels.cpu.linear import form_of

    columns, rows = shape[-1], math.prod(shape[:-1])
    if form == "int8" or (form == "int4" and columns % 32):
        return rows * (-(-columns // 32) * 32 + 4)  # in whole groups of 32, and a scale for each row
    bits = _BITS[form] if form in _BITS else form_of(form).bits
    return int(rows * columns * bits / 8)


#: GGUF types whose matrices are computed in the engine's dtype.
UNQUANTISED = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class GGUFSizes:
    """Elements of a GGUF file's matrices by type: of those that every token reads, of experts, and of the embedding."""

    linear: Counter[str]
    experts: Counter[str]
    #: Of the head, which is the embedding if ``is_tied``.
    head: Counter[str]
    embedding: Counter[str]
    is_tied: bool
    #: Elements of norms and biases.
    vectors: int

    @property
    def is_dense(self) -> bool:
        """Whether no matrix is quantised."""
        return not {*self.linear, *self.experts} - UNQUANTISED

    @classmethod
    def of(cls, path: Path) -> GGUFSizes:
        """The sizes in the header of a file; without tables that stay in the mapped file."""
        from octavo.loader.gguf_file import GGUFFile, is_mapped

        linear: Counter[str] = Counter()
        experts: Counter[str] = Counter()
        ends: dict[str, Counter[str]] = {}
        vectors = 0
        for name, tensor in GGUFFile(path).tensors.items():
            kind, numbers = tensor.type.name, math.prod(tensor.shape)
            if is_mapped(tensor):
                continue
            if len(tensor.shape) == 1:
                vectors += numbers
            elif name in ("output.weight", "token_embd.weight"):
                ends[name] = Counter({kind: numbers})
            else:
                (experts if "_exps" in name else linear)[kind] += numbers
        embedding = ends.get("token_embd.weight", Counter())
        head = ends.get("output.weight", embedding)
        return cls(linear, experts, head, embedding, "output.weight" not in ends, vectors)

    def num_bytes(self, dtype: str, *, has_head: bool) -> int:
        """Bytes in memory with this ``dtype``.

        The embedding is a table in ``dtype``, unless it is the head's matrix in a form that gives its exact rows.
        """
        from octavo.kernels.cpu.linear import KEPT_TYPES

        size, matrices = 4 * self.vectors, self.linear + self.experts
        if has_head:
            matrices += self.head
        if not (has_head and self.is_tied and {*self.embedding} <= UNQUANTISED | KEPT_TYPES):
            size += packed_bytes(dtype, (self.embedding.total(),))
        return size + sum(
            packed_bytes(dtype if kind in UNQUANTISED else kind, (numbers,)) for kind, numbers in matrices.items()
        )
