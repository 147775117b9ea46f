"""Typed access to a GGUF file's metadata, and its rotary settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.loader.gguf_file import GGUFFile

#: Settings that change what a network computes, and the values that leave it as it is, the first where they are absent.
#: One that an architecture's config.json does not express must have such a value.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("expert_count", "leading_dense_block_count", "nextn_predict_layers"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_weights_scale", "expert_gating_func"), (0, 1)),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "attention.scale", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.shared_kv_layers", "attention.kv_lora_rank"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    **dict.fromkeys(("attention.causal", "rope.scaling.attn_factor"), (1,)),
}
ROPE_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
#: Tensors that become part of the configuration.
ROPE_TABLES = frozenset((ROPE_FACTORS, _LONG, _SHORT))


class Metadata:
    """The metadata under the architecture's prefix; keys that were read are noted, so that others can be refused."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.arch = str(file.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def holds(self, tensor: str) -> bool:
        """Whether the file has this tensor."""
        return tensor in self.file.tensors

    def has(self, key: str) -> bool:
        """Whether a setting is there and not 0."""
        return bool(np.any(self.file.metadata.get(f"{self.arch}.{key}", 0)))

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, or a number for each layer that is the same in all of them."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # some files have a number for each layer
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(f"{self.file.path}: {self.arch}.{key} differs between layers: not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise WeightError(f"{self.file.path}: {self.arch}.{key} must be a positive integer, not {value!r}")
        return value

    def optional(self, key: str) -> int | None:
        """A positive integer; None if it is absent or 0."""
        return self.integer(key) if self.has(key) else None

    def real(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise WeightError(f"{self.file.path}: {self.arch}.{key} must be a positive number, not {value!r}")
        return float(str(np.float32(value)))  # the shortest decimal: 1e-05, not 9.999999747378752e-06

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise WeightError(f"{self.file.path}: {self.arch}.{key} must be true or false, not {value!r}")
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        return self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")

    def vocab_size(self) -> int:
        """Rows of the embedding."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightError(f"{self.file.path} has no tensor 'token_embd.weight'")
        return embedding.shape[0]

    def rows(self, tensor: str) -> int | None:
        """Rows of a tensor, if the file has it."""
        found = self.file.tensors.get(tensor)
        return None if found is None else found.shape[0]

    def layers(self) -> int:
        """Number of layers."""
        layers = self.integer("block_count")
        if layers > len(self.file.tensors):
            raise WeightError(f"{self.file.path} has {len(self.file.tensors)} tensors, too few for {layers} layers")
        return layers

    def head_dim(self) -> int:
        """Size of a query's and a key's head."""
        return self.integer(
            "attention.key_length", self.integer("embedding_length") // self.integer("attention.head_count") or 1
        )

    def sliding_layers(self, default: int) -> list[bool]:
        """For each layer whether it has a window: all but every ``default``-th, unless the file says otherwise."""
        layers = self.layers()
        pattern = self._get("attention.sliding_window_pattern", default)
        if isinstance(pattern, np.ndarray) and len(pattern) >= layers:
            return [bool(value) for value in pattern[:layers]]
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise WeightError(f"{self.file.path}: {self.arch}.attention.sliding_window_pattern is {pattern!r}")
        return [(i + 1) % pattern != 0 for i in range(layers)]

    def refuse_unread(self) -> None:
        """Raises UnsupportedModelError if a setting was not read and is not neutral."""
        for key, neutral in _NEUTRAL.items():
            value = self.file.metadata.get(f"{self.arch}.{key}", neutral[0])
            if key not in self._read and (isinstance(value, np.ndarray) or value not in neutral):
                raise UnsupportedModelError(f"{self.file.path}: {self.arch}.{key} = {value} is not supported")

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise WeightError(f"{self.file.path} has no {self.arch}.{key}")
        return value

    def rotated(self) -> int:
        """Leading dimensions of a head that are rotated."""
        head_dim = self.head_dim()
        rotated = self.integer("rope.dimension_count", default=head_dim)
        if rotated % 2 or rotated > head_dim:
            raise UnsupportedModelError(
                f"{self.file.path}: {rotated} rotated dimensions in heads of {head_dim} are not supported"
            )
        return rotated

    def rope(self, *, partial: bool = False) -> dict[str, Any]:
        """rope_parameters of config.json.

        Args:
            partial: whether the architecture can rotate a part of each head.
        """
        head_dim, rotated = self.head_dim(), self.rotated()
        if rotated != head_dim and not partial:
            raise UnsupportedModelError(
                f"{self.file.path}: {self.arch} is supported only with heads that are rotated whole and of even size"
            )
        share = {"partial_rotary_factor": rotated / head_dim} if partial else {}
        return {"rope_theta": self.real("rope.freq_base", default=10000.0), **share, **self._scaling(rotated)}

    def _scaling(self, rotated: int) -> dict[str, Any]:
        metadata, path = self.file.metadata, self.file.path
        kind = metadata.get(f"{self.arch}.rope.scaling.type", "none")
        factor = f"{self.arch}.rope.scaling.factor"
        if self.holds(_LONG):
            return self._longrope(rotated)
        if self.holds(ROPE_FACTORS):
            if kind != "none":
                raise UnsupportedModelError(f"{path}: rope factors together with {kind} scaling are not supported")
            factors, theta = self._vector(ROPE_FACTORS).astype(np.float64), self.real("rope.freq_base", 10000.0)
            return llama3_parameters(factors, theta, rotated, str(path))
        if kind == "none" or factor not in metadata:
            if kind not in ("none", "linear"):
                raise WeightError(f"{path}: {kind} rope scaling without {factor}")
            return {"rope_type": "default"}
        rope = {"rope_type": kind, "factor": self.real("rope.scaling.factor")}
        if kind == "linear":
            return rope
        if kind != "yarn":
            raise UnsupportedModelError(f"{path}: rope scaling {kind!r} is not supported")
        rope["original_max_position_embeddings"] = self.integer("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if f"{self.arch}.rope.scaling.yarn_{name}" in metadata:
                rope[name] = self.real(f"rope.scaling.yarn_{name}")
        return rope

    def _longrope(self, rotated: int) -> dict[str, Any]:
        """Phi-3's factors for long contexts, a divisor for each pair of dimensions (arXiv 2402.13753)."""
        rope: dict[str, Any] = {"rope_type": "longrope"}
        for name, tensor in (("long_factor", _LONG), ("short_factor", _SHORT)):
            factors = self._vector(tensor)
            if factors.shape != (rotated // 2,) or not np.isfinite(factors).all() or (factors <= 0).any():
                raise WeightError(f"{self.file.path}: tensor {tensor!r} must hold {rotated // 2} positive numbers")
            rope[name] = [float(str(value)) for value in factors]
        original = self.integer("rope.scaling.original_context_length")
        scale = self.integer("context_length") / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        rope["original_max_position_embeddings"] = original
        attention_factor = self.real("rope.scaling.attn_factor", default=usual)
        if not math.isclose(attention_factor, usual, rel_tol=1e-5):
            rope["attention_factor"] = attention_factor
        return rope

    def _vector(self, name: str) -> np.ndarray:
        """The values of a small tensor, float32."""
        from gguf.quants import dequantize

        if name not in self.file.tensors:
            raise WeightError(f"{self.file.path} has no tensor {name!r}")
        tensor = self.file.tensors[name]
        return dequantize(self.file.read_rows(tensor), tensor.type).ravel()


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
