"""Which network serves which architecture; a network is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from octavo.core.model_config import ModelConfig
    from octavo.layers.context import LayerContext
    from octavo.models.network import Network

#: Architecture, as config.json names it, to (model_type of config.json, module, class).
NETWORKS = {
    "LlamaForCausalLM": ("llama", "octavo.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "octavo.models.llama", "LlamaForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "octavo.models.llama", "LlamaForCausalLM"),
}


def supported_architectures() -> list[str]:
    """The architectures that can be served, sorted."""
    return sorted(NETWORKS)


def architecture_of_type(model_type: str) -> str | None:
    """The architecture that a config.json of this model_type means if it names none."""
    return next((name for name, (known, _, _) in NETWORKS.items() if known == model_type), None)


def network_class(architecture: str) -> type[Network]:
    """The network that serves an architecture.

    Raises:
        UnsupportedModelError: no network does.
    """
    if architecture not in NETWORKS:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(supported_architectures())}"
        )
    _, module, name = NETWORKS[architecture]
    network: type[Network] = getattr(import_module(module), name)
    return network


def make_network(config: ModelConfig, context: LayerContext) -> Network:
    """The network of ``config.architecture``, still without weights.

    Raises:
        UnsupportedModelError: no network serves the architecture.
        ConfigError: the configuration contradicts itself, or the ranks or stages cannot share the network.
    """
    return network_class(config.architecture)(config, context)
