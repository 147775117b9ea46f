"""Mamba, Falcon-Mamba and Mamba 2: selective state spaces in all layers, and no attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.layers.layer import LayerContext, PlainRMSNorm, RMSNorm
from octavo.layers.mamba import Mamba1Mixer, Mamba1Shape, Mamba2Mixer, Mamba2Shape
from octavo.layers.states import StateLayer
from octavo.models.checkpoint import CheckpointEntry, Drop, Rename, Split
from octavo.models.config_files import ConfigReader, common_fields
from octavo.models.decoder import Decoder, SingleMixerLayer

#: The parts of ``Mamba1Mixer`` and ``Mamba2Mixer`` that checkpoints hold as one matrix.
MAMBA1_NAMES: tuple[CheckpointEntry, ...] = (Split("in_proj", ("in_proj_x", "in_proj_z")),)
MAMBA2_NAMES: tuple[CheckpointEntry, ...] = (
    Split("in_proj", tuple(f"in_proj_{name}" for name in ("z", "x", "b", "c", "dt"))),
)

#: No position limits a state: llama.cpp's files have this number, too.
_MAX_POSITION = 1 << 20
#: Tokens of a sequence unless ``max_model_len`` says otherwise, where config.json has no context length.
_DEFAULT_LENGTH = 8192


@dataclass(frozen=True, kw_only=True)
class MambaConfig(ModelConfig):
    #: One of them.
    mamba1: Mamba1Shape | None = None
    mamba2: Mamba2Shape | None = None
    #: RMS norms without weights of dt, B and C (Falcon-Mamba), and their eps; None: there are none.
    selection_eps: float | None = None
    #: Default of ``max_model_len``.
    usual_length: int = _DEFAULT_LENGTH

    @property
    def has_only_states(self) -> bool:
        return True

    @property
    def attention_width(self) -> int:
        shape = self.mamba1 or self.mamba2
        assert shape is not None
        return shape.width

    @property
    def default_length(self) -> int:
        return self.usual_length


class MambaForCausalLM(Decoder):
    """Mamba 1, Falcon-Mamba and Mamba 2."""

    def __init__(self, config: MambaConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.checkpoint_map: tuple[CheckpointEntry, ...] = (
            Drop(r"^lm_head\.weight$"),
            Rename(r"^(backbone\.)?embeddings\.", "model.embed_tokens."),
            Rename(r"^(backbone\.)?norm_f\.", "model.norm."),
            Rename(r"^backbone\.", "model."),
            *(MAMBA1_NAMES if config.mamba2 is None else MAMBA2_NAMES),
        )

    def make_layer(self, index: int, config: MambaConfig, context: LayerContext) -> SingleMixerLayer:
        mixer: StateLayer
        if config.mamba2 is not None:
            mixer = Mamba2Mixer(context, config.hidden_size, config.mamba2, config.rms_norm_eps)
        else:
            assert config.mamba1 is not None
            norms = () if config.selection_eps is None else (PlainRMSNorm, config.selection_eps)
            mixer = Mamba1Mixer(context, config.hidden_size, config.mamba1, *norms)
        return SingleMixerLayer(mixer, self.make_final_norm(config, context))

    def make_final_norm(self, config: MambaConfig, context: LayerContext) -> RMSNorm:
        return RMSNorm(context, config.hidden_size, config.rms_norm_eps)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        is_mamba2 = architecture == "Mamba2ForCausalLM"
        reader = reader.with_defaults(**(_MAMBA2_DEFAULTS if is_mamba2 else _MAMBA1_DEFAULTS))
        if architecture == "FalconMambaForCausalLM":
            reader = reader.with_defaults(mixer_rms_eps=1e-6)
        reader.only("hidden_act", "silu", "swish")
        hidden = reader.positive("hidden_size")
        mixer: Mamba1Shape | Mamba2Shape
        mixer = read_mamba2(reader, hidden) if is_mamba2 else read_mamba1(reader, hidden)
        heads = mixer.heads if isinstance(mixer, Mamba2Shape) else 1
        length = reader.positive("max_position_embeddings", _DEFAULT_LENGTH)
        return MambaConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=mixer.inner,
            num_layers=reader.positive("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=mixer.groups if isinstance(mixer, Mamba2Shape) else 1,
            head_dim=mixer.inner // heads,
            max_position=max(length, _MAX_POSITION),
            usual_length=length,
            rms_norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            mamba1=mixer if isinstance(mixer, Mamba1Shape) else None,
            mamba2=mixer if isinstance(mixer, Mamba2Shape) else None,
            selection_eps=reader.number("mixer_rms_eps", 1e-6) if "mixer_rms_eps" in reader.raw else None,
            **common_fields(reader),
        )


#: Defaults of transformers, which config.json may leave out.
_MAMBA1_DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "expand": 2},
    **{"conv_kernel": 4, "use_conv_bias": True, "tie_word_embeddings": True},
}
_MAMBA2_DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 32768, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64, "expand": 2},
    **{"conv_kernel": 4, "use_conv_bias": True, "num_heads": 128, "head_dim": 64, "n_groups": 8},
}
#: How config.json calls the facts of a mixer; hybrid networks have other names.
NAMES = {
    **{"heads": "num_heads", "head_dim": "head_dim", "groups": "n_groups", "states": "state_size"},
    **{"taps": "conv_kernel", "expand": "expand", "conv_bias": "use_conv_bias", "bias": "use_bias"},
    # Of Mamba 1, before the factor of hidden_size: Falcon-Mamba's factor is another one.
    **{"dt_rank": "time_step_rank", "inner": "intermediate_size"},
}
HYBRID_NAMES = {
    **{"heads": "mamba_n_heads", "head_dim": "mamba_d_head", "groups": "mamba_n_groups", "states": "mamba_d_state"},
    **{"taps": "mamba_d_conv", "expand": "mamba_expand", "conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias"},
    "dt_rank": "mamba_dt_rank",
}


def read_mamba1(reader: ConfigReader, hidden: int, names: Mapping[str, str] = NAMES) -> Mamba1Shape:
    """The shape of the mixers in a network of this width, by the names of config.json."""
    rank = names["dt_rank"]
    return Mamba1Shape(
        inner=reader.positive(names.get("inner", ""), _inner(reader, hidden, names)),
        state_size=reader.positive(names["states"], most=256),
        dt_rank=-(-hidden // 16) if reader.get(rank, "auto") == "auto" else reader.positive(rank),
        taps=_taps(reader, names),
        conv_bias=reader.flag(names["conv_bias"]),
        bias=reader.flag(names["bias"]),
    )


def read_mamba2(reader: ConfigReader, hidden: int, names: Mapping[str, str] = NAMES) -> Mamba2Shape:
    """The shape of the mixers in a network of this width, by the names of config.json."""
    heads, groups = reader.positive(names["heads"]), reader.positive(names["groups"])
    if reader.get(names["head_dim"], "auto") != "auto":
        head_dim = reader.positive(names["head_dim"])
    elif (inner := _inner(reader, hidden, names)) % heads:
        raise ConfigError(f"{reader.file}: {names['heads']} ({heads}) must divide the {inner} channels of a layer")
    else:
        head_dim = inner // heads
    if heads % groups:
        raise ConfigError(
            f"{reader.file}: {names['heads']} ({heads}) must be a multiple of {names['groups']} ({groups})"
        )
    return Mamba2Shape(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=reader.positive(names["states"], most=512),
        taps=_taps(reader, names),
        conv_bias=reader.flag(names["conv_bias"]),
        bias=reader.flag(names["bias"]),
        dt_limits=read_dt_limits(reader),
    )


def _inner(reader: ConfigReader, hidden: int, names: Mapping[str, str]) -> int:
    return max(1, int(reader.number(names["expand"], 2.0) * hidden))


def _taps(reader: ConfigReader, names: Mapping[str, str]) -> int:
    if not 2 <= (taps := reader.positive(names["taps"])) <= 16:
        raise ConfigError(f"{reader.file}: {names['taps']} must be 2 to 16, not {taps}")
    return taps


def read_dt_limits(reader: ConfigReader) -> tuple[float, float]:
    """time_step_limit: two numbers, or as transformers 5 writes infinity."""
    limits = reader.get("time_step_limit", [0.0, float("inf")])
    try:
        least, most = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{reader.file}: time_step_limit must be two numbers, not {limits!r}") from None
    return least, most
