"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel store it, and AWQ (Lin et al. 2023), as AutoAWQ does.

Integers of 4 or 8 bits are packed in int32 words, the first in the lowest bits, along K (GPTQ) or N (AWQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import WeightError
from octavo.core.model_config import QuantizationScheme
from octavo.kernels.group_rows import GroupQuantizedRows
from octavo.loader.quantized.packed import FLOATS, bits_of, expect, grouped, two_dimensions, unpack_words
from octavo.loader.stored import Stored


@dataclass(frozen=True)
class Gptq:
    """qweight [K / 8, N], qzeros [groups, N / 8], scales [groups, N] and perhaps g_idx [K]; K / 4 with 8 bits."""

    scheme: QuantizationScheme
    zeros_minus_one: bool
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional: ClassVar[tuple[str, ...]] = ("g_idx",)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K)."""
        words, n = two_dimensions(stored, "qweight")
        k = words * 32 // bits_of(self.scheme)
        expect(stored, "qweight", ("I32",), (words, n))
        _expect_groups(stored, self.scheme, n, k)
        if "g_idx" in stored:
            expect(stored, "g_idx", ("I32", "I64"), (k,))
        return n, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """The zeros are those that were stored, or with ``zeros_minus_one`` one more."""
        bits = bits_of(self.scheme)
        words = tensors["qweight"]
        codes = unpack_words(words, bits).transpose(1, 0, 2).reshape(words.shape[1], -1)
        zeros = tensors["qzeros"]
        if self.zeros_minus_one:
            # As GPTQModel does: whole words, so that a zero of 0, whose subtraction borrowed, is restored by the carry.
            zeros = zeros + np.int32(0x11111111 if bits == 4 else 0x01010101)
        zeros = unpack_words(zeros, bits).reshape(len(zeros), -1).T
        return grouped(self.scheme, codes, tensors["scales"].T, zeros, tensors.get("g_idx"), dtype)


@dataclass(frozen=True)
class Awq:
    """qweight [K, N / 8], qzeros [groups, N / 8], scales [groups, N]; words hold columns 0, 2, 4, 6, 1, 3, 5, 7."""

    scheme: QuantizationScheme
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional: ClassVar[tuple[str, ...]] = ()

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, int]:
        """(N, K)."""
        k, words = two_dimensions(stored, "qweight")
        expect(stored, "qweight", ("I32",), (k, words))
        _expect_groups(stored, self.scheme, words * 8, k)
        return words * 8, k

    def unpack(self, tensors: Mapping[str, np.ndarray], dtype: DType) -> GroupQuantizedRows | np.ndarray:
        """The codes and zeros in the order of the columns."""
        codes, zeros = (_columns_of_words(tensors[name]) for name in ("qweight", "qzeros"))
        return grouped(self.scheme, codes, tensors["scales"].T, zeros, None, dtype)


def _columns_of_words(words: np.ndarray) -> np.ndarray:
    """int32 [K, N / 8] to uint8 [N, K]; not the codes are transposed but the words, of which there are fewer."""
    words = np.ascontiguousarray(words.T).view(np.uint32)
    codes = np.empty((len(words), 8, words.shape[1]), np.uint8)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        codes[:, column] = (words >> np.uint32(4 * place)) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])


def _expect_groups(stored: Mapping[str, Stored], scheme: QuantizationScheme, n: int, k: int) -> None:
    groups = 1 if scheme.group is None else -(-k // scheme.group)
    in_a_word = 32 // bits_of(scheme)
    if n % in_a_word:
        raise WeightError(f"qweight has {n} outputs; qzeros hold a multiple of {in_a_word}")
    what = f"{scheme.number} in groups of {scheme.group or k}"
    try:
        expect(stored, "qzeros", ("I32",), (groups, n // in_a_word))
        expect(stored, "scales", FLOATS, (groups, n))
    except WeightError as e:
        raise WeightError(f"{e}, for {what} as config.json says and qweight of {n} outputs, {k} inputs") from None
