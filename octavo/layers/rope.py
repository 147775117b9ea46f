"""Tables of rotary position embeddings (Su et al. 2021) for the scalings that Hugging Face checkpoints name.

A table does not depend on the batch, nor a row of it on the number of rows: a worker computes those that its KV cache
can use. Two scalings are defined by the length of the processed text: ``dynamic`` raises the base with it and
``longrope`` changes its factors at the length of pretraining. Following them would change the rotation of keys that are
already cached, and make a request's answer depend on the lengths of others. Here both depend on ``max_position``:
within the model's original length the table is the unscaled (``dynamic``) or short (``longrope``) one, beyond it the
one for a text of ``max_position`` tokens. For shorter texts, ``dataclasses.replace(config, max_position=...)`` gives a
more accurate and smaller table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ROPE_TYPES, ModelConfig, RopeConfig

#: Rows that are computed at once: what is set aside for their angles stays small beside the table.
_PIECE = 1 << 16


def rotary_table(config: ModelConfig, device: torch.device | str, positions: int | None = None) -> Tensor:
    """Cosines, then sines, of the first ``positions`` positions: float32 [positions, R].

    R is the number of rotated dimensions of a head; by default there are ``config.max_position`` positions, and none on
    torch's meta device. All values are multiplied by the attention factor of the scaling.

    Raises:
        UnsupportedModelError: the rope type is unknown.
        ConfigError: a parameter of the scaling is missing or out of range.
    """
    rope = config.rope
    if rope.rope_type not in _FREQUENCIES:
        raise UnsupportedModelError(
            f"rope type {rope.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    try:
        frequencies, attention_factor = _FREQUENCIES[rope.rope_type](config, rope)
    except KeyError as e:
        raise ConfigError(f"rope type {rope.rope_type!r} needs the parameter {e.args[0]!r} in config.json") from None
    except (ArithmeticError, TypeError, ValueError, RuntimeError) as e:
        raise ConfigError(f"rope type {rope.rope_type!r} with parameters {rope.scaling}: {e}") from None
    half = len(frequencies)
    if torch.device(device).type == "meta":
        return torch.empty(0, 2 * half, device=device)
    count = config.max_position if positions is None else min(positions, config.max_position)
    table = torch.empty(count, 2 * half)
    for start in range(0, count, _PIECE):
        rows = table[start : start + _PIECE]
        angles = torch.outer(torch.arange(start, start + len(rows)).float(), frequencies)
        torch.cos(angles, out=rows[:, :half])
        torch.sin(angles, out=rows[:, half:])
        rows *= attention_factor
    return table.to(device)


def extend_rotary_table(table: Tensor, config: ModelConfig, positions: int) -> None:
    """Computes the table anew, in the same tensor, if it has less than ``positions`` rows."""
    if positions > len(table):
        longer = rotary_table(config, table.device, positions)
        table.set_(longer.untyped_storage(), 0, longer.shape, longer.stride())


def _rotated(config: ModelConfig, rope: RopeConfig) -> int:
    return int(config.head_dim * rope.partial_rotary_factor)


def _wave(base: float, dim: int, of: int | None = None) -> Tensor:
    """base ** (2 i / of) for the first dim / 2 pairs: the wavelength of each over 2 pi, in tokens."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float32) / (of or dim))


def _original_length(config: ModelConfig, rope: RopeConfig) -> int:
    """Tokens of the texts that the model was trained on before its context was extended."""
    return int(rope.scaling.get("original_max_position_embeddings") or _configured_length(config, rope))


def _configured_length(config: ModelConfig, rope: RopeConfig) -> int:
    """max_position_embeddings of config.json."""
    return int(rope.scaling.get("max_position_embeddings") or config.max_position)


def _default(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    return 1.0 / _wave(rope.theta, _rotated(config, rope)), 1.0


def _linear(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """Positions divided by a factor (Chen et al. 2023, "Extending context window ... via position interpolation")."""
    return 1.0 / _wave(rope.theta, _rotated(config, rope)) / _factor(rope), 1.0


def _proportional(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """Rotates the first share of the pairs, at the frequencies of the whole head; the others are not rotated."""
    dim = 2 * int(rope.partial_rotary_factor * config.head_dim // 2)
    moving = 1.0 / _wave(rope.theta, dim, config.head_dim) / float(rope.scaling.get("factor", 1.0))
    return torch.cat((moving, torch.zeros(config.head_dim // 2 - dim // 2))), 1.0


def _dynamic(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with the length, which is ``max_position`` here (see the module)."""
    dim, factor, known = _rotated(config, rope), _factor(rope), _configured_length(config, rope)
    length = max(config.max_position, known)
    base = rope.theta * ((factor * length / known) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _wave(base, dim), 1.0


def _yarn(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): fast pairs keep their frequency, slow ones are interpolated, a ramp between (3.2)."""
    scaling, dim, original = rope.scaling, _rotated(config, rope), _original_length(config, rope)
    factor = float(scaling.get("factor") or _configured_length(config, rope) / original)

    def dimension_of(turns: float) -> float:
        """The dimension that makes this many turns over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - interpolated
    wave = _wave(rope.theta, dim)
    frequencies = 1.0 / (factor * wave) * (1 - kept) + 1.0 / wave * kept
    return frequencies, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    """The temperature of section 3.3, as a factor on both the query's and the key's table."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


def _longrope(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a searched factor for each pair, one set within the original length, one beyond."""
    scaling, original = rope.scaling, _original_length(config, rope)
    factors = torch.tensor(scaling["long_factor" if config.max_position > original else "short_factor"])
    factor = float(scaling.get("factor") or _configured_length(config, rope) / original)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors.float() * _wave(rope.theta, _rotated(config, rope))), float(attention_factor)


def _llama3(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """Llama 3.1: low frequencies are divided by a factor, high ones are kept, those between are interpolated."""
    scaling, original = rope.scaling, _original_length(config, rope)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    factor, frequencies = _factor(rope), 1.0 / _wave(rope.theta, _rotated(config, rope))
    wavelength = 2 * math.pi / frequencies
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slowed = torch.where(wavelength > original / low, frequencies / factor, blended)
    return torch.where(wavelength < original / high, frequencies, slowed), 1.0


def _factor(rope: RopeConfig) -> float:
    factor = float(rope.scaling["factor"])
    if not factor > 0 or math.isinf(factor):
        raise ValueError(f"factor must be a positive number, not {factor}")
    return factor


_FREQUENCIES: dict[str, Callable[[ModelConfig, RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
