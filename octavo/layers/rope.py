"""Tables of rotary position embeddings (Su et al. 2021) for the scalings that Hugging Face checkpoints name.

A table depends neither on the batch nor a row of it on the number of rows: a worker computes the rows that its KV cache
can use. Two scalings are defined by the length of the processed text: ``dynamic`` raises the base with it and
``longrope`` changes its factors at the length of pretraining. This would change the rotation of keys that are already
cached, and make a request's answer depend on the lengths of others. Here both depend on ``max_position``: up to the
model's original length the table is the unscaled (``dynamic``) or short (``longrope``) one, beyond it the one for a
text of ``max_position`` tokens. For shorter texts, ``dataclasses.replace(config, max_position=...)`` gives a more
accurate and smaller table.

Frequencies and angles are float32, as in the code that trained the models; powers, cosines and sines are computed in
float64 and rounded, so that they are the same on every machine whatever its library of float32 functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import ROPE_TYPES, ModelConfig, RopeConfig
from octavo.kernels.interface import Array, ArrayMaker
from octavo.layers.layer import LayerContext
from octavo.layers.vocabulary import PositionEmbedding

#: Rows that are computed at once, so that the memory of their angles is small beside the table.
_PIECE = 1 << 16


class RotaryRows:
    """Cosines and sines of angles on a backend, as ``Kernels.rotary`` takes them."""

    #: float32 [rows, R]: R / 2 cosines, then R / 2 sines.
    array: Array
    #: Numbers of pairs that are rotated by a token's rotary positions in turn (M-RoPE); empty: all by its position.
    sections: tuple[int, ...] = ()


class RotaryTable(RotaryRows):
    """The table of one configuration on a backend; layers hold it, and it may grow between steps."""

    def __init__(
        self, config: ModelConfig, kernels: ArrayMaker, positions: int | None = None, *, first: int = 0
    ) -> None:
        """Has ``positions`` rows to begin with, by default ``config.max_position``; row 0 is of the position ``first``.

        Raises:
            UnsupportedModelError: the rope type is unknown.
            ConfigError: a parameter of the scaling is missing or out of range.
        """
        self._config, self._kernels, self._first = config, kernels, first
        frequencies, self._factor = _frequencies(config)
        self._frequencies = frequencies
        self.sections = config.rope.sections
        self._length = -1
        self.extend(config.max_position if positions is None else positions)

    @property
    def position_bytes(self) -> int:
        return 2 * self._frequencies.nbytes

    def extend(self, positions: int) -> None:
        """Computes ``array`` anew, if it has less than ``positions`` rows; its values include the attention factor."""
        positions = min(positions, self._config.max_position)
        if positions <= self._length:
            return
        self._length = positions
        self.array = self._kernels.array(rotary_values(self._frequencies, positions, self._factor, self._first))


def rotary_values(
    frequencies: NDArray[np.float32], positions: int, factor: float, first: int = 0
) -> NDArray[np.float32]:
    """Cosines, then sines, of the angles of ``positions`` positions from ``first`` on, times the factor.

    [positions, 2 * frequencies].
    """
    half = len(frequencies)
    table = np.empty((positions, 2 * half), np.float32)
    for start in range(0, positions, _PIECE):
        rows = table[start : start + _PIECE]
        places = np.arange(first + start, first + start + len(rows), dtype=np.float32)
        angles = np.outer(places, frequencies).astype(np.float64)
        rows[:, :half] = np.cos(angles)
        rows[:, half:] = np.sin(angles)
        rows *= np.float32(factor)
    return table


def _frequencies(config: ModelConfig) -> tuple[NDArray[np.float32], float]:
    """The angle from position to position of each pair of dimensions, and the attention factor of the scaling."""
    rope = config.rope
    if rope.rope_type not in _SCALINGS:
        raise UnsupportedModelError(
            f"rope type {rope.rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    try:
        return _SCALINGS[rope.rope_type](config, rope)
    except KeyError as e:
        raise ConfigError(f"rope type {rope.rope_type!r} needs the parameter {e.args[0]!r} in config.json") from None
    except (ArithmeticError, TypeError, ValueError) as e:
        raise ConfigError(f"rope type {rope.rope_type!r} with parameters {rope.scaling}: {e}") from None


def _rotated(config: ModelConfig, rope: RopeConfig) -> int:
    return int(config.head_dim * rope.partial_rotary_factor)


def _wave(base: float, dim: int, of: int | None = None) -> NDArray[np.float32]:
    """base ** (2 i / of) for the first dim / 2 pairs: the wavelength of each over 2 pi, in tokens."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(of or dim)
    return np.power(base, exponents.astype(np.float64)).astype(np.float32)


def _original_length(config: ModelConfig, rope: RopeConfig) -> int:
    """Tokens of the texts that the model was trained on before its context was extended."""
    return int(rope.scaling.get("original_max_position_embeddings") or _configured_length(config, rope))


def _configured_length(config: ModelConfig, rope: RopeConfig) -> int:
    return int(rope.scaling.get("max_position_embeddings") or config.max_position)


def _default(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    return 1.0 / _wave(rope.theta, _rotated(config, rope)), 1.0


def _linear(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    """Positions divided by a factor (Chen et al. 2023, "Extending context window ... via position interpolation")."""
    return 1.0 / _wave(rope.theta, _rotated(config, rope)) / _factor(rope), 1.0


def _proportional(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    """Rotates the first share of the pairs, at the frequencies of the whole head; the others are not rotated."""
    dim = 2 * int(rope.partial_rotary_factor * config.head_dim // 2)
    moving = 1.0 / _wave(rope.theta, dim, config.head_dim) / float(rope.scaling.get("factor", 1.0))
    return np.concatenate((moving, np.zeros(config.head_dim // 2 - dim // 2, np.float32))), 1.0


def _dynamic(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    """NTK-aware scaling: the base grows with the length, which is ``max_position`` here (see the module)."""
    dim, factor, trained = _rotated(config, rope), _factor(rope), _configured_length(config, rope)
    length = max(config.max_position, trained)
    base = rope.theta * ((factor * length / trained) - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _wave(base, dim), 1.0


def _yarn(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
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
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
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


def _longrope(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    """LongRoPE (Ding et al. 2024): a searched factor for each pair, one set within the original length, one beyond."""
    scaling, original = rope.scaling, _original_length(config, rope)
    factors = np.array(scaling["long_factor" if config.max_position > original else "short_factor"], np.float32)
    factor = float(scaling.get("factor") or _configured_length(config, rope) / original)
    # Phi-3.5-MoE has a factor for each set.
    own = scaling.get("long_mscale" if config.max_position > original else "short_mscale")
    attention_factor = scaling.get("attention_factor") if own is None else own
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors * _wave(rope.theta, _rotated(config, rope))), float(attention_factor)


def _llama3(config: ModelConfig, rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    """Llama 3.1: low frequencies are divided by a factor, high ones are kept, those between are interpolated."""
    scaling, original = rope.scaling, _original_length(config, rope)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    factor, frequencies = _factor(rope), 1.0 / _wave(rope.theta, _rotated(config, rope))
    wavelength = 2 * math.pi / frequencies
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    slowed = np.where(wavelength > original / low, frequencies / factor, blended)
    return np.where(wavelength < original / high, frequencies, slowed), 1.0


def _factor(rope: RopeConfig) -> float:
    factor = float(rope.scaling["factor"])
    if not factor > 0 or math.isinf(factor):
        raise ValueError(f"factor must be a positive number, not {factor}")
    return factor


_SCALINGS: dict[str, Callable[[ModelConfig, RopeConfig], tuple[NDArray[np.float32], float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


class SinusoidalPositions(PositionEmbedding):
    """Computed positions (Vaswani et al. 2017, section 3.5); the first half of a row are sines, the second cosines."""

    def __init__(self, context: LayerContext, rows: int, hidden_size: int) -> None:
        super().__init__(context, rows, hidden_size)
        self.load("weight", sinusoids(rows, hidden_size))


def sinusoids(rows: int, width: int) -> np.ndarray:
    """float32 [rows, width]: position / 10000 ** (2 i / width) is the angle of sine i and of cosine i.

    Angles are computed in float64; an odd width has one sine more than cosines.
    """
    angles = np.outer(np.arange(rows), 10000.0 ** (-2.0 * np.arange((width + 1) // 2) / width))
    return np.concatenate((np.sin(angles), np.cos(angles[:, : width // 2])), axis=1).astype(np.float32)
