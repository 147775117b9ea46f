"""config.json and generation_config.json from a GGUF file's metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.loader.gguf_file import GGUFFile

#: GGUF architecture -> (model_type, class) of transformers. Mistral models are written as llama.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
#: Keys for features that config.json of these architectures cannot express, and the values that disable them.
_NEUTRAL = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}
ROPE_FACTORS = "rope_freqs.weight"


def model_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """The content of config.json, for weights written as ``dtype``.

    Raises:
        UnsupportedModelError: the architecture or one of its settings is not supported.
        WeightError: the metadata is incomplete or contradicts itself.
    """
    keys = _Keys(file)
    for key, neutral in _NEUTRAL.items():
        value = file.metadata.get(f"{keys.arch}.{key}", neutral)
        if isinstance(value, np.ndarray) or value not in (0, neutral):
            raise UnsupportedModelError(f"{file.path}: {keys.arch}.{key} = {value} is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightError(f"{file.path} has no tensor 'token_embd.weight'")
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", default=hidden // heads)
    if keys.integer("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: heads of keys and of values differ in size, which is not supported")
    if head_dim % 2 or keys.integer("rope.dimension_count", default=head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: only heads that are rotated whole and of even size are supported")
    model_type, architecture = ARCHITECTURES[keys.arch]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon", default=1e-5),
        "rope_parameters": _rope(file, keys, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type != "qwen2":  # which always has a bias on q, k and v
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if heads % config["num_key_value_heads"]:
        raise WeightError(f"{file.path}: {heads} heads cannot share {config['num_key_value_heads']} key-value heads")
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of generation_config.json: the BOS token and all EOS tokens."""
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for ours, theirs in (("bos", "bos"), ("pad", "padding")):
        if (token := file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token_id"] = token
    return config


class _Keys:
    """The metadata under the architecture's prefix, with types checked."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.arch = str(file.metadata.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.path} has the architecture {self.arch!r}; supported: {', '.join(ARCHITECTURES)}"
            )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some files have a number for each layer
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(f"{self._file.path}: {self.arch}.{key} differs between layers: not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise WeightError(f"{self._file.path}: {self.arch}.{key} must be a positive integer, not {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise WeightError(f"{self._file.path}: {self.arch}.{key} must be a positive number, not {value!r}")
        return float(str(np.float32(value)))  # the shortest decimal: 1e-05, not 9.999999747378752e-06

    def _get(self, key: str, default: Any) -> Any:
        value = self._file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise WeightError(f"{self._file.path} has no {self.arch}.{key}")
        return value


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> dict[str, Any]:
    theta = keys.real("rope.freq_base", default=10000.0)
    scaling = file.metadata.get(f"{keys.arch}.rope.scaling.type", "none")
    factor = f"{keys.arch}.rope.scaling.factor"
    if "rope_factors_long.weight" in file.tensors:
        raise UnsupportedModelError(f"{file.path}: rope factors for long contexts (longrope) are not supported")
    if ROPE_FACTORS in file.tensors:
        if scaling != "none":
            raise UnsupportedModelError(f"{file.path}: rope factors together with {scaling} scaling are not supported")
        factors = np.concatenate([piece.ravel() for piece in file.read_pieces(file.tensors[ROPE_FACTORS])])
        return {"rope_theta": theta} | llama3_parameters(factors.astype(np.float64), theta, head_dim, str(file.path))
    if scaling == "none" or factor not in file.metadata:
        if scaling not in ("none", "linear"):
            raise WeightError(f"{file.path}: {scaling} rope scaling without {factor}")
        return {"rope_theta": theta, "rope_type": "default"}
    rope = {"rope_theta": theta, "rope_type": scaling, "factor": keys.real("rope.scaling.factor")}
    if scaling == "linear":
        return rope
    if scaling != "yarn":
        raise UnsupportedModelError(f"{file.path}: rope scaling {scaling!r} is not supported")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if file.metadata.get(f"{keys.arch}.rope.scaling.{key}", 1.0) != 1.0:
            raise UnsupportedModelError(f"{file.path}: yarn rope scaling with its own {key} is not supported")
    rope["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if f"{keys.arch}.rope.scaling.yarn_{name}" in file.metadata:
            rope[name] = keys.real(f"rope.scaling.yarn_{name}")
    return rope


def llama3_parameters(factors: np.ndarray, theta: float, head_dim: int, source: str) -> dict[str, Any]:
    """The rope parameters of Llama 3.1, from the table of divisors [head_dim / 2] that a GGUF file has instead.

    With f rotations a token, a dimension's divisor is 1 where f * original > high, ``factor`` where f * original < low,
    and between them 1 / ((1 - s) / factor + s) with s = (f * original - low) / (high - low). Only two of original, low
    and high can be told from the table (scaling all three changes nothing), so low is 1, as in every published model.

    Raises:
        UnsupportedModelError: the table is not of this form.
    """
    wrong = UnsupportedModelError(f"{source}: the table {ROPE_FACTORS!r} does not follow Llama 3's rope scaling")
    if factors.shape != (head_dim // 2,) or not np.isfinite(factors).all() or (factors <= 0).any():
        raise wrong
    if (factors == 1).all():
        return {"rope_type": "default"}
    factor = float(factors.max())
    if factor <= 1:
        raise wrong
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() < 2:
        raise wrong
    slope, intercept = np.polyfit(frequency[between], smooth[between], 1)
    if slope <= 0 or intercept >= 0:
        raise wrong
    high = 1 - 1 / intercept  # intercept = -low / (high - low), slope = original / (high - low)
    original = round(slope * (high - 1))
    high = round(high, 2)
    s = np.clip((frequency * original - 1) / (high - 1), 0, 1)
    if not np.allclose(1 / ((1 - s) / factor + s), factors, rtol=1e-3):
        raise wrong
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
