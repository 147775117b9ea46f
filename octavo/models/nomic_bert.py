"""NomicBERT (Nussbaum et al. 2024): BERT with rotary positions and gated networks, as nomic-embed-text."""

from __future__ import annotations

from octavo.core.errors import UnsupportedModelError
from octavo.core.model_config import RopeConfig
from octavo.kernels.interface import AttentionSpec
from octavo.layers.attention import Attention
from octavo.layers.context import LayerContext
from octavo.models.bert import BERT_NAMES
from octavo.models.checkpoint import Rename, Split
from octavo.models.config_reader import ConfigReader
from octavo.models.encoder import Encoder, EncoderConfig, encoder_fields

#: Names in configurations that were written for the model's own code, and those of transformers.
_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
#: Settings of that code, and the values that nomic-embed-text has.
_FIXED = {
    "prenorm": (False,),
    "parallel_block": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "use_rms_norm": (False, None),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "activation_function": ("swiglu",),
    "hidden_act": ("silu", "swiglu"),
    "rotary_scaling_factor": (None, 1, 1.0),
    "moe_every_n_layers": (None, 0),
    "num_experts": (None, 0),
}


class NomicBertModel(Encoder):
    """An encoder with norms after what is added, without biases but in the norms."""

    checkpoint_map = (
        Rename(r"^(nomic_bert\.)?emb_ln\.", "embeddings.LayerNorm."),
        Rename(r"^(nomic_bert\.)?(encoder\.)?layers\.", "model.layers."),
        Rename(r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        Rename(r"\.attn\.Wqkv\.", ".self_attn.Wqkv."),
        Split("Wqkv", ("q_proj", "k_proj", "v_proj")),
        Rename(r"\.(norm1|post_attention_layernorm)\.", ".attention_norm."),
        Rename(r"\.(norm2|post_mlp_layernorm)\.", ".mlp_norm."),
        Rename(r"\.mlp\.fc11\.", ".mlp.up_proj."),
        Rename(r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        Rename(r"\.mlp\.fc2\.", ".mlp.down_proj."),
        *BERT_NAMES,
    )

    def make_attention(self, index: int, context: LayerContext) -> Attention:
        """Over the whole text; positions are rotary."""
        config = self.config
        spec = AttentionSpec(config.head_dim**-0.5, causal=False)
        return Attention(config, context, spec, self.rotary_table(config, context))

    @classmethod
    def read_config(cls, architecture: str, reader: ConfigReader) -> EncoderConfig:
        """The facts of a config.json, of transformers or of the model's own code."""
        for name, allowed in _FIXED.items():
            if (value := reader.raw.get(name, allowed[0])) not in allowed:
                raise UnsupportedModelError(f"{name}={value!r} is not supported; supported: {allowed[0]}")
        reader = reader.with_defaults(
            **{new: reader.raw[old] for old, new in _OLD_NAMES.items() if reader.raw.get(old) is not None}
        )
        longest = reader.positive("max_position_embeddings")
        rope = ConfigReader(reader.table("rope_parameters"), reader.file)
        fields = encoder_fields(reader)
        fields |= {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
        return EncoderConfig(
            architecture=architecture,
            max_position=longest,
            type_rows=reader.positive("type_vocab_size", 2),
            intermediate_size=reader.positive("intermediate_size"),
            layer_norm_eps=reader.number("layer_norm_eps", 1e-12),
            activation="silu",
            gated_mlp=True,
            rope=RopeConfig(
                theta=rope.number("rope_theta", reader.number("rotary_emb_base", 1000.0)),
                scaling={"max_position_embeddings": longest},
            ),
            dense_activation="tanh",
            **fields,
        )
