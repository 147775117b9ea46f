"""What a worker computes with: its kernels, how layers are built, and the network with its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.core.config import EngineConfig
from octavo.core.dtypes import DType
from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.core.parallel import ParallelLayout
from octavo.kernels import load_kernels
from octavo.kernels.interface import Kernels
from octavo.layers.context import LayerContext
from octavo.loader.model import load_model, make_dummy_model
from octavo.loader.resolve import gguf_source, weight_quantization
from octavo.models.network import Network

if TYPE_CHECKING:
    from octavo.runner.network_drafter import DraftSource


def make_kernels(options: EngineConfig, device: str, kv_specs: Iterable[KVSpec], layout: ParallelLayout) -> Kernels:
    """The backend of the options; ``kv_specs`` are those of all layers of all stages, so that it serves each."""
    return load_kernels(
        options.kernels,
        device,
        head_dim=math.gcd(*(spec.head_dim for spec in kv_specs)),
        deterministic=options.deterministic,
        # An exchange between stages is a call on the host, which a graph cannot hold.
        enforce_eager=options.enforce_eager or layout.pipeline_parallel_size > 1,
        graph_capture="start" if options.graph_capture == "start" else "lazy",
        cudagraph_capture_sizes=options.graph_sizes,
    )


def make_context(
    options: EngineConfig,
    config: ModelConfig,
    kernels: Kernels,
    dtype: str,
    layout: ParallelLayout,
) -> LayerContext:
    """How the layers of this rank's stage are built."""
    return LayerContext(
        kernels=kernels,
        dtype=DType(dtype),
        quantization=weight_quantization(options, kernels.name, config.quantization),
        kv_cache_dtype=options.kv_cache_dtype,
        tp_rank=layout.tp_rank,
        tp_size=layout.tensor_parallel_size,
        layers=layout.layers(config.num_layers),
        # More are made with the KV cache, as many as it can use; the largest step has these.
        positions=options.token_budget,
        max_loras=options.max_loras if options.enable_lora else 0,
        max_lora_rank=options.max_lora_rank,
        # Those of a step's images are written behind the adapters'.
        virtual_tokens=options.num_virtual_tokens + (0 if config.image_facts is None else options.token_budget),
    )


def load_network(options: EngineConfig, config: ModelConfig, context: LayerContext, folder: Path) -> Network:
    """The network with the weights of the checkpoint, or with random ones.

    Raises:
        WeightError: a weight file is missing or wrong.
    """
    if options.load_format == "dummy":
        return make_dummy_model(config, context, options.seed)
    return load_model(folder, config, context, gguf_source(options.model))


def find_drafter(options: EngineConfig, config: ModelConfig) -> DraftSource | None:
    """The drafter of the options for a model of this configuration, if it has a network of its own.

    Raises:
        OctavoError: there is none of that name, or it does not fit the model.
    """
    speculation = options.speculative_config
    if speculation is None or not speculation.drafts_on_workers:
        return None
    if speculation.method == "draft_model":
        from octavo.runner.draft_model import DraftModelSource

        return DraftModelSource.of(options)
    from octavo.runner.eagle_drafter import EagleSource

    return EagleSource.of(options, config)
