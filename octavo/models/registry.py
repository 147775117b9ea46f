"""Which network serves which architecture; a network is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from octavo.core.model_config import ModelConfig
    from octavo.layers.context import LayerContext
    from octavo.models.llama import LlamaForCausalLM

#: Architecture, as config.json names it, to (module, class).
_NETWORKS = {
    "LlamaForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
}


def supported_architectures() -> list[str]:
    """The architectures that can be served, sorted."""
    return sorted(_NETWORKS)


def make_network(config: ModelConfig, context: LayerContext) -> LlamaForCausalLM:
    """The network of ``config.architecture``, still without weights.

    Raises:
        UnsupportedModelError: no network serves the architecture.
    """
    if config.architecture not in _NETWORKS:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported; supported: {', '.join(supported_architectures())}"
        )
    module, name = _NETWORKS[config.architecture]
    network: LlamaForCausalLM = getattr(import_module(module), name)(config, context)
    return network
