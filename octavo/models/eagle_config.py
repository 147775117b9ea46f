"""The config.json of EAGLE heads, and whether a head fits the model that it drafts for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ModelConfig
from octavo.models.config_reader import (
    ConfigReader,
    longest_context,
    read_rope,
    refuse_activations,
    shape_fields,
)

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EagleMethod = Literal["eagle", "eagle3"]
#: What config.json calls the heads of each method; published ones often name the network that they are made of.
_ARCHITECTURES: dict[EagleMethod, tuple[str, ...]] = {
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLM"),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
}


@dataclass(frozen=True)
class EagleConfig(ModelConfig):
    """A head; ``vocab_size`` is that of the model that it drafts for."""

    method: EagleMethod = "eagle"
    #: Tokens that it can draft.
    draft_vocab_size: int = 0
    #: Width of the model's hidden states.
    target_hidden_size: int = 0
    #: EAGLE-3: layers of the model whose inputs it reads, ascending; the number of layers is the last one's output.
    #: Empty until ``fit_to`` if config.json does not say.
    feature_layers: tuple[int, ...] = ()
    #: EAGLE-3: the residual of its layer is the normalised input.
    norm_before_residual: bool = False
    #: Whether its files hold a bias of ``fc``, and an embedding that it uses instead of the model's.
    fc_bias: bool = False
    own_embedding: bool = False

    @property
    def fc_inputs(self) -> list[int]:
        """Widths of what ``fc`` is multiplied with: embedding and hidden state, or the residual streams."""
        width = self.target_hidden_size
        return [self.hidden_size, width] if self.method == "eagle" else [width] * len(self.feature_layers)


def read_eagle_config(method: EagleMethod, reader: ConfigReader) -> EagleConfig:
    """The facts of a head's config.json.

    Raises:
        ConfigError: a value is missing or impossible.
        UnsupportedModelError: the file describes another kind of head.
    """
    _refuse_other_heads(method, reader)
    rope, fields = read_rope(reader), shape_fields(reader)
    bias = reader.flag("attention_bias")
    config = EagleConfig(
        architecture=_ARCHITECTURES[method][0],
        method=method,
        max_position=longest_context(rope),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        qkv_bias=bias or reader.flag("qkv_bias"),
        o_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        rope=rope,
        draft_vocab_size=fields["vocab_size"],
        target_hidden_size=fields["hidden_size"],
        **fields,
    )
    if method == "eagle":
        return config
    return replace(
        config,
        draft_vocab_size=reader.positive("draft_vocab_size", config.vocab_size),
        target_hidden_size=reader.positive("target_hidden_size", config.hidden_size),
        feature_layers=_feature_layers(reader),
        norm_before_residual=reader.flag("norm_before_residual"),
    )


def fit_to(config: EagleConfig, target: ModelConfig) -> EagleConfig:
    """The configuration of a head for the model ``target``.

    Raises:
        ConfigError: the head was made for another model.
    """
    for what, own, its in (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if own != its:
            raise ConfigError(f"the head is for another model: its {what} is {own}, that of the model {its}")
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size ({config.draft_vocab_size}) must be at most vocab_size ({config.vocab_size})"
        )
    # The lengths that it was trained on do not limit it, as those are of drafts and not of contexts.
    config = replace(config, max_position=target.max_position)
    if config.method == "eagle":
        return config
    layers = target.num_layers
    # An early, a middle and a late layer (EAGLE-3, section 3.1).
    ids = config.feature_layers or (2, layers // 2, layers - 3)
    if list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= layers:
        which = "" if config.feature_layers else ", which is the default"
        raise ConfigError(
            f"{_LAYER_IDS} must be distinct layers from 0 to {layers}, those of the model, not {list(ids)}{which}"
        )
    return replace(config, feature_layers=ids)


def _refuse_other_heads(method: EagleMethod, reader: ConfigReader) -> None:
    names, known = reader.raw.get("architectures"), _ARCHITECTURES[method]
    if not isinstance(names, list) or not set(map(str, names)).intersection(known):
        other: EagleMethod = "eagle" if method == "eagle3" else "eagle3"
        found = {str(name) for name in names} if isinstance(names, list) else set()
        hint = f"; it is one of method {other!r}" if found.intersection(_ARCHITECTURES[other]) else ""
        raise UnsupportedModelError(
            f"{reader.file}: architectures {names!r} are no head of method {method!r} ({', '.join(known)}){hint}"
        )
    refuse_activations(reader, "silu", "swish")
    for name in ("quantization_config", "compression_config"):
        if reader.table(name):
            raise UnsupportedModelError(f"{reader.file}: {name} is not supported: heads are not quantised")
    for name in ("add_para_norm", "norm_before_fc"):
        if reader.flag(name):
            raise UnsupportedModelError(f"{reader.file}: {name}=true is not supported: a variant of the published head")
    if reader.table("eagle_config").get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModelError(f"{reader.file}: use_aux_hidden_state=false is not supported")
    if method == "eagle3" and reader.positive("num_hidden_layers", 1) != 1:
        raise UnsupportedModelError(
            f"{reader.file}: num_hidden_layers must be 1, not {reader.raw['num_hidden_layers']}: a head of EAGLE-3 has "
            "one layer"
        )


def _feature_layers(reader: ConfigReader) -> tuple[int, ...]:
    """eagle_aux_hidden_state_layer_ids, ascending; empty if there are none."""
    given: Any = reader.raw.get(_LAYER_IDS) or reader.table("eagle_config").get(_LAYER_IDS) or []
    if not isinstance(given, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in given):
        raise ConfigError(f"{reader.file}: {_LAYER_IDS} must be a list of layers, not {given!r}")
    return tuple(sorted(given))
