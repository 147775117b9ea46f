"""Falcon-H1 (arXiv 2507.22448): in each layer attention and a Mamba 2 mixer in parallel, and factors of everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from octavo.config.kv_spec import KVSpec
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.forward_batch import ForwardBatch
from octavo.kernels.interface import Array, LayerCache
from octavo.layers.attention import Attention
from octavo.layers.layer import LayerContext, RMSNorm
from octavo.layers.mamba import Mamba2Mixer, Mamba2Scales, Mamba2Shape
from octavo.layers.mlp import GatedMLP
from octavo.models.checkpoint import Rename
from octavo.models.config_files import ConfigReader
from octavo.models.decoder import ResidualLayer
from octavo.models.dense import DenseConfig, DenseForCausalLM, Family, dense_fields
from octavo.models.llama import make_mlp
from octavo.models.mamba import HYBRID_NAMES, MAMBA2_NAMES, read_mamba2


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DenseConfig):
    """``residual_scale`` is the factor of what attention adds."""

    mamba2: Mamba2Shape
    #: ``out`` is the factor of what the mixer adds.
    mamba_scales: Mamba2Scales
    #: Factors of the gates' inputs, and of what the MLP adds.
    gate_scale: float
    mlp_scale: float

    @property
    def attention_width(self) -> int:
        return super().attention_width + self.mamba2.width


class ScaledNorm(RMSNorm):
    """An RMS norm whose results have a factor, which is in the weight: float32, so that it is not rounded again."""

    def __init__(self, context: LayerContext, size: int, eps: float, factor: float) -> None:
        super().__init__(context, size, eps)
        self._factor, self._stored = np.float32(factor), DType.FLOAT32
        self.holds[0] = self.holds[0]._replace(dtype=DType.FLOAT32)

    def place(self, shard: str, tensor: np.ndarray) -> None:
        super().place(shard, tensor.astype(np.float32) * self._factor)


class FalconH1Layer(ResidualLayer):
    """x + a attention(norm(x)) + m mamba(norm(x)), and then x + f mlp(norm(x)) of the sum, for three factors.

    The residual stream is kept divided by a, and by f while the MLP adds to it: only m / a is left to compute.
    """

    def __init__(
        self,
        config: FalconH1Config,
        context: LayerContext,
        attention: Attention,
        mamba: Mamba2Mixer,
        mlp: GatedMLP,
        norm: RMSNorm,
    ) -> None:
        """``norm``: of the first input."""
        super().__init__()
        # A factor of the MLP's input is one of its gates, and of what they are multiplied by.
        factor = config.mlp_scale / config.gate_scale
        self.kernels, self._change = context.kernels, config.residual_scale / factor
        self.norm = self.attach("input_layernorm", norm)
        self.attention = self.attach("self_attn", attention)
        self.mamba = self.attach("mamba", mamba)
        mlp_norm = ScaledNorm(context, config.hidden_size, config.rms_norm_eps / factor**2, config.gate_scale)
        self.mlp_norm = self.attach("pre_ff_layernorm", mlp_norm)
        self.mlp = self.attach("mlp", mlp)

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [self.attention.kv_spec, self.mamba.kv_spec]

    def forward(self, residual: Array, caches: Iterator[LayerCache], batch: ForwardBatch) -> Array:
        x = self.norm(residual)
        residual = self.attention.add_to(residual, x, next(caches), batch)
        residual = self.mamba.add_to(residual, x, next(caches), batch)
        residual = self._scaled(residual, self._change)
        residual = self.mlp.add_to(residual, self.mlp_norm(residual))
        return self._scaled(residual, 1.0 / self._change)

    def _scaled(self, residual: Array, factor: float) -> Array:
        return residual if factor == 1.0 else self.kernels.scale(residual, factor)


class FalconH1ForCausalLM(DenseForCausalLM):
    families: ClassVar[Mapping[str, Family]] = {
        "FalconH1ForCausalLM": Family(
            names=(
                Rename(r"\.feed_forward\.", ".mlp."),
                Rename(r"^model\.final_layernorm\.", "model.norm."),
                *MAMBA2_NAMES,
            ),
            defaults={
                **{"max_position_embeddings": 8192, "num_key_value_heads": 8, "mamba_n_heads": 128},
                **{"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_conv_bias": True},
            },
            # Biases would need factors of their own.
            only=dict.fromkeys(("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"), False),
            biases=("", "", ""),
        )
    }

    def make_layer(self, index: int, config: DenseConfig, context: LayerContext) -> FalconH1Layer:
        assert isinstance(config, FalconH1Config)
        attention, mlp = self.make_attention(index, config, context), make_mlp(config, context)
        mamba = Mamba2Mixer(context, config.hidden_size, config.mamba2, config.rms_norm_eps, config.mamba_scales)
        norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps / config.residual_scale**2)
        return FalconH1Layer(config, context, attention, mamba, mlp, norm)

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> ModelConfig:
        fields = dense_fields(architecture, reader, cls.families[architecture])
        reader = reader.with_defaults(**cls.families[architecture].defaults)
        hidden, heads = fields["hidden_size"], reader.positive("mamba_n_heads")
        if reader.raw.get("mamba_d_ssm", 1024) is not None:
            inner = reader.positive("mamba_d_ssm", 1024)
            if inner % heads:
                raise ConfigError(f"{reader.file}: mamba_n_heads ({heads}) must divide mamba_d_ssm ({inner})")
            reader = replace(reader, raw={**reader.raw, "mamba_d_head": inner // heads})
        mamba = read_mamba2(reader, hidden, HYBRID_NAMES)
        has_norm, is_first = reader.flag("mamba_rms_norm"), reader.flag("mamba_norm_before_gate", True)
        attention_in = reader.number("attention_in_multiplier", 1.0)
        attention_out = attention_in * reader.number("attention_out_multiplier", 1.0)
        mamba_in, mamba_out = reader.number("ssm_in_multiplier", 1.0), reader.number("ssm_out_multiplier", 1.0)
        gate_scale, mlp_scale = _numbers(reader, "mlp_multipliers", 2)
        parts = [mamba_in * factor for factor in _numbers(reader, "ssm_multipliers", 5)]
        fields |= {
            # Queries and keys each have the factor of their input.
            "attention_scale": fields["attention_scale"] * attention_in**2 * reader.number("key_multiplier", 1.0),
            "embedding_scale": reader.number("embedding_multiplier", 1.0),
            "residual_scale": attention_out,
            "logit_scale": reader.number("lm_head_multiplier", 1.0),
        }
        return FalconH1Config(
            mamba2=replace(mamba, norm=("before gate" if is_first else "gated") if has_norm else ""),
            mamba_scales=Mamba2Scales(*parts)._replace(out=mamba_out / attention_out),
            gate_scale=gate_scale,
            mlp_scale=mlp_scale,
            **fields,
        )


def _numbers(reader: ConfigReader, name: str, count: int) -> list[float]:
    """A list of positive numbers, by default ones."""
    values: Any = reader.raw.get(name) or [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"{reader.file}: {name} must be a list of {count} numbers, not {values!r}")
    inside = ConfigReader({f"{name}[{i}]": value for i, value in enumerate(values)}, reader.file)
    return [inside.number(key, 1.0) for key in inside.raw]
