"""Multi-token prediction (MTP): layers that checkpoints bring for drafting (DeepSeek-V3, arXiv 2412.19437).

Module k of a checkpoint predicts one token further than the module before it. It joins the norm of an embedding with
the norm of a hidden state by a projection, and runs a layer like the model's own and a final norm; the model's
embedding and head are shared. The hidden states are those after a final norm, the model's or the module's.

``FORMATS`` says what families call these parts. The layers themselves are the family's: a pipeline stage behind the
model's last layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.dtypes import DType
from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.layer import Layer, LayerContext
from octavo.layers.linear import ReplicatedConcatLinear
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename
from octavo.models.config_files import ConfigReader
from octavo.models.decoder import Decoder
from octavo.models.draft_head import DraftHead
from octavo.models.network import ResidualReader
from octavo.models.registry import make_network

ARCHITECTURE = "MTPModel"


@dataclass(frozen=True)
class MTPFormat:
    """How the checkpoints of a family hold the modules.

    In regular expressions, ``{layer}`` is the number of a module's layer behind the model's, ``{module}`` that of the
    module.
    """

    #: What the names of all tensors of a module begin with, before those of its layer; and of its other parts.
    layer: str
    parts: str
    #: The projection, the norms of embedding and hidden state, and the final norm.
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    #: Whether the modules share these parts.
    is_shared: bool = False
    #: Whether the hidden state comes before the embedding in the projection's input.
    hidden_first: bool = False

    def tensors(self, layer: int, module: int) -> str:
        """A pattern of the names of a module's tensors."""
        return "|".join(f"(?:{form.format(layer=layer, module=module)})" for form in {self.layer, self.parts})

    def entries(self, first_layer: int, depth: int) -> Iterator[CheckpointEntry]:
        """Keeps the tensors of the modules alone, under DeepSeek's names."""
        modules = [(first_layer + module, module) for module in range(depth)]
        yield Drop(rf"^(?!{'|'.join(self.tensors(*numbers) for numbers in modules)})")
        for layer, module in modules:
            parts, block = (form.format(layer=layer, module=module) for form in (self.parts, self.layer))
            for name, own in zip(_PARTS, (self.fc, self.embedding_norm, self.hidden_norm, self.norm), strict=True):
                yield Rename(rf"^{parts}{re.escape(own)}\.", f"model.layers.{layer}.{name}.")
            yield Drop(rf"^{parts}(embed_tokens|shared_head\.head|lm_head)\.")  # copies of the model's
            yield Rename(rf"^{block}", f"model.layers.{layer}.")


#: DeepSeek's names of the projection, the norms of embedding and hidden state, and the final norm, which GGUF files
#: have too.
_PARTS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
#: DeepSeek-V3 and GLM-4.5: one more layer with further parts (vLLM's deepseek_mtp and glm4_moe_mtp).
_BEHIND = MTPFormat(r"model\.layers\.{layer}\.", r"model\.layers\.{layer}\.", *_PARTS)
#: Qwen3-Next and Qwen3.5: a network of its own (qwen3_next_mtp).
_BESIDE = MTPFormat(
    layer=r"(?:model\.)?mtp\.layers\.{module}\.",
    parts=r"(?:model\.)?mtp\.",
    fc="fc",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    norm="norm",
    is_shared=True,
)
#: MiMo (arXiv 2505.07608; mimo_mtp).
_MIMO = MTPFormat(
    layer=r"model\.mtp_layers\.{module}\.",
    parts=r"model\.mtp_layers\.{module}\.",
    fc="input_proj",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    norm="final_layernorm",
    hidden_first=True,
)

FORMATS: dict[str, MTPFormat] = {
    **dict.fromkeys(("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM"), _BEHIND),
    **dict.fromkeys(("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"), _BEHIND),
    "MiMoForCausalLM": _MIMO,
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _BESIDE),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _BESIDE),
}


@dataclass(frozen=True, kw_only=True)
class MTPConfig(ModelConfig):
    """The modules of the model ``target``, whose values the other fields have; ``num_layers`` counts modules."""

    target: ModelConfig

    @property
    def attention_width(self) -> int:
        return self.target.attention_width

    @property
    def feed_forward_width(self) -> int:
        return self.target.feed_forward_width


def mtp_config(target: ModelConfig, depth: int) -> MTPConfig:
    """The configuration of ``depth`` modules of a model of one of ``FORMATS``."""
    values: dict[str, Any] = {name: getattr(target, name) for name in ModelConfig.__dataclass_fields__}
    # Untied: the loader looks for no head beside the modules, which have none.
    changes = {"architecture": ARCHITECTURE, "num_layers": depth, "tie_word_embeddings": False}
    return MTPConfig(target=target, **(values | changes))


def count_modules(target: ModelConfig, names: Iterable[str]) -> int:
    """The number of modules whose tensors are among the ``names`` of a checkpoint of ``target``."""
    form = FORMATS.get(target.architecture)
    if form is None or target.head != "lm" or target.model_impl != "octavo":
        return 0
    names, depth = list(names), 0
    while any(re.match(form.layer.format(layer=target.num_layers + depth, module=depth), name) for name in names):
        depth += 1
    return depth


class _Module(Layer):
    """The parts of a module that its layer does not have."""

    def __init__(self, config: MTPConfig, context: LayerContext, layers: Decoder) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = self.attach(_PARTS[0], ReplicatedConcatLinear(context, [width] * 2, width, False))
        norms: list[Any] = [layers.make_final_norm(config.target, context) for _ in _PARTS[1:]]
        self.embedding_norm, self.hidden_norm, self.norm = map(self.attach, _PARTS[1:], norms)


class MTPModel(DraftHead):
    """Module k drafts token k, and the last one all further tokens from its own results."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        form, first, self.depth = FORMATS[config.target.architecture], config.target.num_layers, config.num_layers
        self._hidden_first = form.hidden_first
        # One more layer than there are, so that this stage is not the last, with the head.
        longer = _with_layers(config.target, self.depth + 1)
        layers = make_network(longer, replace(context, layers=range(first, first + self.depth)))
        assert isinstance(layers, Decoder)
        self._layers = self.attach("", layers)
        self.kv_specs = layers.kv_specs
        count = 1 if form.is_shared else self.depth
        self._modules = [
            self.attach(f"model.layers.{first + i}", _Module(config, context, layers)) for i in range(count)
        ]
        self.checkpoint_map = (*form.entries(first, self.depth), *layers.entries())

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        raise UnsupportedModelError(
            f"{reader.file}: {architecture} is no model of its own: layers for multi-token prediction are loaded with "
            "the model whose checkpoint has them"
        )

    def position_bytes(self) -> int:
        return self._layers.position_bytes()

    def extend_positions(self, positions: int) -> None:
        self._layers.extend_positions(positions)

    def embed(self, token_ids: Array) -> Array:
        return self._target.embed(token_ids)

    def forward_layers(
        self, residual: Array, batch: ForwardBatch, kv_caches: list[LayerCache], reader: ResidualReader | None = None
    ) -> Array:
        return self.forward_step(0, residual, batch, kv_caches)

    def forward_step(self, step: int, features: Array, batch: ForwardBatch, kv_caches: list[LayerCache]) -> Array:
        module = self._modules[min(step, len(self._modules) - 1)]
        inputs = [module.embedding_norm(self.embed(batch.token_ids)), module.hidden_norm(features)]
        if self._hidden_first:
            inputs.reverse()
        residual = module.fc.product(0, inputs[0], DType.FLOAT32)
        residual = module.fc.product(1, inputs[1], DType.FLOAT32, residual)
        residual = self._layers.layers[step].forward(residual, iter(kv_caches[step : step + 1]), batch)
        return module.norm.float32(residual)

    def logits(self, hidden: Array) -> Array:
        return self._target.logits(hidden)


#: Fields of configurations with a value for each layer.
_BY_LAYER = ("ropes", "sliding_windows", "temperatures")


def _with_layers(config: Any, more: int) -> ModelConfig:
    """A model with ``more`` layers like its last, but with attention, and experts where any layer has them."""
    values = {name: getattr(config, name, ()) for name in _BY_LAYER}
    changes: dict[str, Any] = {name: value + value[-1:] * more for name, value in values.items() if value}
    if hasattr(config, "attends"):
        changes["attends"] = (*config.attends, *(True,) * more)
    if (mixture := getattr(config, "mixture", None)) is not None:
        sparse = mixture.sparse_layers
        changes["mixture"] = replace(mixture, sparse_layers=sparse + (any(sparse),) * more)
    longer: ModelConfig = replace(config, num_layers=config.num_layers + more, **changes)
    return longer
