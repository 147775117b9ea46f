"""Reads GGUF files: metadata, and tensors under the names of a network. All sizes are validated before use.

The reader of the ``gguf`` package makes several numpy views a token (seconds for a vocabulary) and trusts the file's
counts; only its tables of types and names are used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, LlamaFileType
from gguf.tensor_mapping import TensorNameMap, get_tensor_name_map

from octavo.core.dtypes import DType, rounded
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.core.model_config import ModelConfig
from octavo.kernels.interface import StoredForm
from octavo.kernels.weight_rows import GGUFRows, dequantize
from octavo.layers.gated_delta import DeltaShape
from octavo.loader.files import split_paths
from octavo.loader.misfits import Fields
from octavo.models.checkpoint import (
    CheckpointEntry,
    Pairs,
    Permute,
    Shapes,
    Tensor,
    Transform,
    halve_pairs,
    is_transposed,
    transpose,
)
from octavo.models.gemma4 import Gemma4Config
from octavo.models.mtp import MTPConfig
from octavo.models.qwen3_next import Qwen3NextConfig
from octavo.process.startup import GIB

#: Types of metadata by their number.
_SCALARS: dict[int, np.dtype[Any]] = {
    **{kind: np.dtype(name) for kind, name in enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))},
    **{kind: np.dtype(name) for kind, name in enumerate(("<u8", "<i8", "<f8"), 10)},
}
_STRING, _ARRAY = 8, 9
#: Bytes of the longest text: chat templates and whole tokenizers are texts.
_MAX_TEXT = 64 << 20
_MAX_DIMS = 4
#: Bytes that are compared at once.
_PIECE = 8 << 20

#: Tensor types that can be dequantized: all those of weights that the package knows.
SUPPORTED_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
        *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0"),
    )
    if name in GGMLQuantizationType.__members__
)


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    #: Rows first, as in torch and numpy (reversed in the file).
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    #: From the start of its file, in bytes.
    offset: int
    path: Path

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, that is of the last dimension."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def rows(self) -> int:
        """The product of all dimensions but the last."""
        return math.prod(self.shape[:-1])


def is_mapped(tensor: GGUFTensor) -> bool:
    """Whether the CPU kernels leave a table in the mapped file."""
    return tensor.name == "per_layer_token_embd.weight" and tensor.type is not GGMLQuantizationType.F16


class GGUFFile:
    """The header of a GGUF file, in memory; tensors are read from disk on demand.

    A model that is split into files ``NAME-00001-of-00003.gguf`` is opened as one, whichever of them is named.

    Metadata values are int, float, bool, str, list[str] or a numpy array. Every tensor of ``tensors`` lies within its
    file and has a supported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = self._read_header(path)
        count = self.metadata.get("split.count", 1)
        if count in (0, 1):
            return
        paths = split_paths(path)
        if len(paths) != count:
            raise WeightError(
                f"is one of {count} parts of a model: expected a name such as model-00001-of-{count:05}.gguf", file=path
            )
        self.metadata, self.tensors = {}, {}
        for number, part in enumerate(paths):
            if not part.is_file():
                raise WeightError(f"is missing: the model of {path.name} is split into {count} files", file=part)
            metadata, tensors = self._read_header(part)
            own_number, own_count = metadata.get("split.no"), metadata.get("split.count")
            if (own_number, own_count) != (number, count):
                raise WeightError(f"it says that it is part {own_number} of {own_count}, counted from 0", file=part)
            if twice := self.tensors.keys() & tensors.keys():
                raise WeightError(f"the tensor {min(twice)!r} is also in another part", file=part)
            self.metadata = metadata | self.metadata  # the first part has those of the model
            self.tensors |= tensors
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise WeightError(f"its parts hold {len(self.tensors)} tensors; they should hold {total}", file=path)

    @staticmethod
    def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        try:
            with path.open("rb") as f:
                header = GGUFHeader(f, path.stat().st_size, path)
                return header.metadata(), header.tensors()
        except OSError as e:
            raise WeightError(f"cannot be read: {e.strerror or e}", file=path) from e

    @property
    def file_type(self) -> str:
        """The quantisation as llama.cpp names it (``Q4_K_M``); without such metadata the type of most bytes."""
        kind = self.metadata.get("general.file_type")
        for each in LlamaFileType:
            if each.value == kind and each is not LlamaFileType.GUESSED:
                return each.name.removeprefix("MOSTLY_").removeprefix("ALL_")
        bytes_of_type: Counter[str] = Counter()
        for tensor in self.tensors.values():
            bytes_of_type[tensor.type.name] += tensor.rows * tensor.row_bytes
        return max(bytes_of_type, key=lambda name: bytes_of_type[name], default="none")

    def describe(self, form_of: Callable[[str], StoredForm | None], dtype: DType) -> str:
        """The file type, and what becomes of the matrices of each tensor type, with bytes in the file and in memory.

        Args:
            form_of: how the kernels keep a type; None: in ``dtype``.
        """
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.type.name] += tensor.rows * tensor.shape[-1]
        parts = []
        for kind, count in counts.most_common():
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            form = form_of(kind) if block > 1 else None
            held = 8.0 * dtype.itemsize if form is None else form.bits
            sizes = f"{count * size / block / GIB:.2f} GiB"
            if (now := f"{count * held / 8 / GIB:.2f} GiB") != sizes:
                sizes += f" in the file, {now} in memory"
            how = f"as {dtype}" if form is None else "as it is" if form.is_exact else "quantised again to 8 bits"
            parts.append(f"{kind} {how} ({sizes})")
        return f"GGUF file type {self.file_type}: {'; '.join(parts)}"

    def ties_head(self) -> bool:
        """Whether the language-model head is the embedding: the file has none, or has the same bytes twice."""
        head, embedding = self.tensors.get("output.weight"), self.tensors.get("token_embd.weight")
        if head is None or embedding is None:
            return head is None
        if (head.type, head.shape) != (embedding.type, embedding.shape):
            return False
        step = max(1, _PIECE // head.row_bytes)
        pieces = (slice(start, start + step) for start in range(0, head.rows, step))
        return all(np.array_equal(self.read_rows(head, piece), self.read_rows(embedding, piece)) for piece in pieces)

    def map_rows(self, tensor: GGUFTensor, rows: slice) -> np.ndarray:
        """As ``read_rows``, of the mapped file: only rows that are used are read from disk."""
        first, last, _ = rows.indices(tensor.rows)
        shape, offset = (last - first, tensor.row_bytes), tensor.offset + first * tensor.row_bytes
        return np.asarray(np.memmap(tensor.path, np.uint8, "r", offset, shape))

    def read_rows(self, tensor: GGUFTensor, rows: slice | None = None) -> np.ndarray:
        """Rows of a tensor, by default all, in the file's format: uint8 [rows, bytes of a row]."""
        first, last, _ = (rows or slice(None)).indices(tensor.rows)
        count = (last - first) * tensor.row_bytes
        with tensor.path.open("rb") as f:
            f.seek(tensor.offset + first * tensor.row_bytes)
            data = np.fromfile(f, dtype=np.uint8, count=count)
        if data.size != count:
            raise WeightError(f"has become shorter while tensor {tensor.name!r} was read", file=tensor.path)
        return data.reshape(last - first, tensor.row_bytes)


class GGUFHeader:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path
        self.position = 0
        self._tensor_count = 0
        self._alignment = 32

    def metadata(self) -> dict[str, Any]:
        if self.take(4) != b"GGUF":
            raise WeightError("is not a GGUF file: it does not begin with 'GGUF'", file=self._path)
        version = self.number("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"is GGUF version {version}; supported: 2 and 3, little-endian", file=self._path
            )
        self._tensor_count = self.count(at_least=24)
        metadata: dict[str, Any] = {}
        for _ in range(self.count(at_least=13)):
            key = self.text()
            if key in metadata:
                raise self.corrupt(f"the key {key!r} occurs twice")
            metadata[key] = self.value(self.number("<I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self.corrupt(f"the alignment {alignment!r} is not a power of two")
        self._alignment = alignment
        return metadata

    def tensors(self) -> dict[str, GGUFTensor]:
        entries = [self.tensor_entry() for _ in range(self._tensor_count)]
        start = -(-self.position // self._alignment) * self._alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self.corrupt(f"the tensor {name!r} occurs twice")
            try:
                tensor = GGUFTensor(name, shape, GGMLQuantizationType(kind), start + offset, self._path)
            except ValueError:
                raise UnsupportedModelError(
                    f"tensor {name!r} has type {kind}, which the installed package gguf does not know; a newer one "
                    "may: pip install -U gguf",
                    file=self._path,
                ) from None
            if tensor.type not in SUPPORTED_TYPES:
                raise UnsupportedModelError(
                    f"tensor {name!r} has type {tensor.type.name}, which is not supported; supported: "
                    f"{', '.join(sorted(t.name for t in SUPPORTED_TYPES))}",
                    file=self._path,
                )
            block = GGML_QUANT_SIZES[tensor.type][0]
            if shape[-1] % block:
                raise self.corrupt(f"the rows of tensor {name!r} hold {shape[-1]} values, not a multiple of {block}")
            end = tensor.offset + tensor.rows * tensor.row_bytes
            if end > self._size:
                raise WeightError(f"is truncated: tensor {name!r} ends at byte {end} of {self._size}", file=self._path)
            tensors[name] = tensor
        return tensors

    def corrupt(self, what: str) -> WeightError:
        return WeightError(f"is corrupt near byte {self.position}: {what}", file=self._path)

    def take(self, length: int) -> bytes:
        if length > self._size - self.position:
            raise WeightError(
                f"is truncated or corrupt: {length} bytes expected at byte {self.position} of {self._size}",
                file=self._path,
            )
        self.position += length
        return self._file.read(length)

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def count(self, at_least: int) -> int:
        """Reads a number of items; checks it against the remaining bytes and the least size of an item."""
        count = self.number("<Q")
        if count * at_least > self._size - self.position:
            raise self.corrupt(f"it claims {count} items, more than the file can hold")
        return count

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Reads consecutive texts; a vocabulary has hundreds of thousands."""
        texts, read, position = [], self._file.read, self.position
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            position += 8 + length
            if position > self._size:
                raise WeightError(f"is truncated or corrupt: text ends at byte {position}", file=self._path)
            if length > _MAX_TEXT:
                raise self.corrupt(f"it claims a text of {length} bytes")
            try:
                texts.append(read(length).decode())
            except UnicodeDecodeError as e:
                raise self.corrupt(f"a text is not UTF-8 ({e})") from None
        self.position = position
        return texts

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return np.frombuffer(self.take(_SCALARS[kind].itemsize), _SCALARS[kind])[0].item()
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.corrupt(f"unknown value type {kind}")
        kind = self.number("<I")
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype)
        if kind == _STRING:
            return self.texts(self.count(at_least=8))
        raise self.corrupt(f"unknown type {kind} of an array's elements")

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (rows first), type number, offset in the data section."""
        name = self.text()
        dims = self.number("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.corrupt(f"tensor {name!r} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))[::-1]
        if not all(shape):
            raise self.corrupt(f"tensor {name!r} has the shape {shape}")
        return name, shape, self.number("<I"), self.number("<Q")


# Metadata

#: Settings that change the result, with their neutral values, the first by default. A setting that the architecture's
#: config.json cannot express must have a neutral value.
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
#: Tensors that become settings of the configuration.
ROPE_TABLES = frozenset((ROPE_FACTORS, _LONG, _SHORT))
#: A divisor of a pair's frequency at which it does not turn at any length.
_STANDING = 1e20
#: Matrices after the pooling, which become files of a sentence-transformers folder.
DENSE = {"2_Dense": "dense_2.weight", "3_Dense": "dense_3.weight"}


class Metadata:
    """Typed access to the metadata under the architecture's prefix; notes the keys that were read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.arch = str(file.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def holds(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def holds_any(self, tensor: str) -> bool:
        """Whether a layer has a tensor of this name, such as ``attn_output.bias``."""
        return any(name.endswith(f".{tensor}") for name in self.file.tensors)

    def has(self, key: str) -> bool:
        """Whether a setting is present and not 0."""
        return bool(np.any(self.file.metadata.get(f"{self.arch}.{key}", 0)))

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; an array must have the same number for every layer."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise UnsupportedModelError(f"{self.file.path}: {self.arch}.{key} differs between layers: not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise WeightError(f"{self.file.path}: {self.arch}.{key} must be a positive integer, not {value!r}")
        return value

    def optional(self, key: str) -> int | None:
        """A positive integer; None if absent or 0."""
        return self.integer(key) if self.has(key) else None

    def real(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise WeightError(f"{self.file.path}: {self.arch}.{key} must be a positive number, not {value!r}")
        return float(str(np.float32(value)))  # the shortest decimal: 1e-05, not 9.999999747378752e-06

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise WeightError(f"{self.file.path}: {self.arch}.{key} must be true or false, not {value!r}")
        return value

    def vocab_size(self) -> int:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightError(f"{self.file.path} has no tensor 'token_embd.weight'")
        return embedding.shape[0]

    def rows(self, tensor: str) -> int | None:
        entry = self.file.tensors.get(tensor)
        return None if entry is None else entry.shape[0]

    def by_layer(self, key: str) -> list[int]:
        """A positive integer for each layer, from an array or one number for all."""
        values, layers = np.ravel(self._get(key, None)), self.layers()
        values = np.repeat(values, layers) if len(values) == 1 else values
        if values.dtype.kind not in "iu" or len(values) < layers or (values < 1).any():
            raise WeightError(
                f"{self.file.path}: {self.arch}.{key} must be a positive integer, or one for each of {layers} layers, "
                f"not {values.tolist()}"
            )
        return [int(value) for value in values[:layers]]

    def kv_heads(self) -> tuple[int, list[bool]]:
        """The KV heads of a layer with attention, and for each layer whether it has attention: others have 0."""
        counts, layers = np.ravel(self._get("attention.head_count_kv", None)), self.layers()
        counts = np.repeat(counts, layers) if len(counts) == 1 else counts
        heads = {int(count) for count in counts if count} if counts.dtype.kind in "iu" else set()
        if len(counts) < layers or len(heads) != 1 or min(heads) < 1:
            raise UnsupportedModelError(
                f"{self.file.path}: {self.arch}.attention.head_count_kv must have one number of KV heads, or 0, for "
                f"each layer, not {counts.tolist()}"
            )
        return heads.pop(), [bool(count) for count in counts]

    def recurrent_layers(self) -> list[bool]:
        """For each layer whether it has a state: all but every fourth, unless the file says otherwise."""
        layers, key = self.layers(), "attention.recurrent_layers"
        if self.has(key):
            kinds = np.ravel(self._get(key, None))
            if len(kinds) < layers:
                raise WeightError(f"{self.file.path}: {self.arch}.{key} has {len(kinds)} values for {layers} layers")
            return [bool(kind) for kind in kinds[:layers]]
        interval = self.integer("full_attention_interval", default=4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]

    def layers(self) -> int:
        layers = self.integer("block_count")
        if layers > len(self.file.tensors):
            raise WeightError(f"{self.file.path} has {len(self.file.tensors)} tensors, too few for {layers} layers")
        return layers

    def head_dim(self) -> int:
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
        """Refuses settings that were not read and are not neutral."""
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
        """The number of leading dimensions of a head that are rotated."""
        head_dim = self.head_dim()
        rotated = self.integer("rope.dimension_count", default=head_dim)
        if rotated % 2 or rotated > head_dim:
            raise UnsupportedModelError(
                f"{self.file.path}: {rotated} rotated dimensions in heads of {head_dim} are not supported"
            )
        return rotated

    def rope(self, *, partial: bool = False) -> dict[str, Any]:
        """rope_parameters of config.json; ``partial``: the architecture can rotate a part of each head."""
        head_dim, rotated = self.head_dim(), self.rotated()
        if rotated != head_dim and not partial:
            raise UnsupportedModelError(
                f"{self.file.path}: {self.arch} is supported only with heads that are rotated whole and of even size"
            )
        share = {"partial_rotary_factor": rotated / head_dim} if partial else {}
        return {"rope_theta": self.real("rope.freq_base", default=10000.0), **share, **self._scaling(rotated)}

    def rotated_share(self) -> float:
        """The share of a head's pairs that turn; the divisors of the others are so large that they stand still."""
        if not self.holds(ROPE_FACTORS):
            return 1.0
        divisors = self._divisors(ROPE_FACTORS, self.head_dim())
        turning = sum(divisor == 1.0 for divisor in divisors)
        if any(1.0 < divisor < _STANDING for divisor in divisors) or set(divisors[:turning]) - {1.0}:
            raise UnsupportedModelError(
                f"{self.file.path}: {ROPE_FACTORS} must be ones, then numbers of at least {_STANDING:g}, not {divisors}"
            )
        return turning / len(divisors)

    def _scaling(self, rotated: int) -> dict[str, Any]:
        metadata, path = self.file.metadata, self.file.path
        kind = metadata.get(f"{self.arch}.rope.scaling.type", "none")
        factor = f"{self.arch}.rope.scaling.factor"
        if self.holds(_LONG):
            return self._longrope(rotated)
        if self.holds(ROPE_FACTORS):
            if kind != "none":
                raise UnsupportedModelError(f"{path}: rope factors together with {kind} scaling are not supported")
            factors, theta = self._divisors(ROPE_FACTORS, rotated), self.real("rope.freq_base", 10000.0)
            # Any other table is used as it is, at all lengths.
            return llama3_parameters(np.array(factors), theta) or {
                **{"rope_type": "longrope", "long_factor": factors, "short_factor": factors, "attention_factor": 1.0},
                "original_max_position_embeddings": self.integer("context_length"),
            }
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
        settings = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}
        for name, key in settings.items():
            if f"{self.arch}.rope.scaling.yarn_{key}" in metadata:
                rope[name] = self.real(f"rope.scaling.yarn_{key}")
        return rope

    def _longrope(self, rotated: int) -> dict[str, Any]:
        """Phi-3's factors for long contexts, a divisor for each pair of dimensions (arXiv 2402.13753)."""
        rope: dict[str, Any] = {"rope_type": "longrope"}
        for name, tensor in (("long_factor", _LONG), ("short_factor", _SHORT)):
            rope[name] = self._divisors(tensor, rotated)
        original = self.integer("rope.scaling.original_context_length")
        scale = self.integer("context_length") / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        rope["original_max_position_embeddings"] = original
        attention_factor = self.real("rope.scaling.attn_factor", default=usual)
        if not math.isclose(attention_factor, usual, rel_tol=1e-5):
            rope["attention_factor"] = attention_factor
        return rope

    def _divisors(self, name: str, rotated: int) -> list[float]:
        """A table of the divisors of frequencies, one for each pair of rotated dimensions."""
        if name not in self.file.tensors:
            raise WeightError(f"{self.file.path} has no tensor {name!r}")
        tensor = self.file.tensors[name]
        values = dequantize(tensor.type.name, self.file.read_rows(tensor)).ravel()
        if values.shape != (rotated // 2,) or not np.isfinite(values).all() or (values <= 0).any():
            raise WeightError(f"{self.file.path}: tensor {name!r} must hold {rotated // 2} positive numbers")
        return [float(str(value)) for value in values]


def llama3_parameters(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The rope parameters of Llama 3.1, from the table of divisors that a GGUF file has instead; None for other tables.

    With f rotations a token, a dimension's divisor is 1 where f * original > high, ``factor`` where f * original < low,
    and between them 1 / ((1 - s) / factor + s) with s = (f * original - low) / (high - low). The table determines only
    two of original, low and high (scaling all three changes nothing), so low is 1, as in every published model.
    """
    if (factors == 1).all():
        return {"rope_type": "default"}
    factor = float(factors.max())
    if factor <= 1:
        return None
    frequency = theta ** (-np.arange(len(factors)) / len(factors)) / (2 * math.pi)
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() < 2:
        return None
    slope, intercept = np.polyfit(frequency[between], smooth[between], 1)
    if slope <= 0 or intercept >= 0:
        return None
    high = 1 - 1 / intercept  # intercept = -low / (high - low), slope = original / (high - low)
    original = round(slope * (high - 1))
    high = round(high, 2)
    s = np.clip((frequency * original - 1) / (high - 1), 0, 1)
    if not np.allclose(1 / ((1 - s) / factor + s), factors, rtol=1e-5):
        return None
    rope = {"rope_type": "llama3", "factor": round(factor, 4), "low_freq_factor": 1.0, "high_freq_factor": high}
    return rope | {"original_max_position_embeddings": original}


# Tensors

#: Names that the package's map, or that of an older package, lacks; of layers, the names of the first.
_ALIASES = {
    "lm_head.weight": "output.weight",
    **{
        f"model.layers.0.{mixer}.dt_bias": "blk.0.ssm_dt.bias"
        for mixer in ("linear_attn", "mixer", "self_attn", "mamba")
    },
    "model.embed_positions.weight": "position_embd.weight",
    "model.embed_norm.weight": "token_embd_norm.weight",
    "model.embed_norm.bias": "token_embd_norm.bias",
    **{f"model.layers.0.{mlp}.gate.e_score_correction_bias": "blk.0.exp_probs_b.bias" for mlp in ("mlp", "mixer")},
    "model.layers.0.self_attn.sinks": "blk.0.attn_sinks.weight",
    "model.layers.0.gate.weight": "blk.0.ffn_gate_inp.weight",
    "model.layers.0.gate.scale": "blk.0.ffn_gate_inp.scale",
    "model.layers.0.gate.per_expert_scale": "blk.0.ffn_down_exps.scale",
    "model.layers.0.layer_scalar": "blk.0.layer_output_scale.weight",
    "model.embed_types.weight": "token_types.weight",
    **{f"model.layers.0.attention_norm.{kind}": f"blk.0.attn_output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"model.layers.0.mlp_norm.{kind}": f"blk.0.layer_output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"{head}.out.{kind}": f"cls.output.{kind}" for head in ("head", "score") for kind in ("weight", "bias")},
}
#: Names for which the architecture has no name of its own in the package's map.
_OTHER_NORMS = {"model.norm.weight": "token_embd_norm.weight"}
#: Parts of modules for multi-token prediction, of all architectures.
_NEXTN = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\.(norm\.)?weight$")
#: The norms of a Falcon with two norms, which are the other way round.
_FALCON_NORMS = {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"}
#: Tensors of one number that files keep as settings, with a number for each layer.
_SETTINGS = {f"act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}
#: Architectures in whose files the rows of a head's two halves take turns.
_INTERLEAVED = (
    *("arcee", "granite", "granitehybrid", "granitemoe", "llama", "llama-embed", "mistral3", "olmo", "smollm3"),
)
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("conv.in_proj", ("b_proj", "c_proj", "x_proj")),
    ("in_proj", ("in_proj_z", "in_proj_x", "in_proj_b", "in_proj_c", "in_proj_dt")),
    ("in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v")),
)
#: Architectures with gated delta networks, and the matrices of their files whose parts take turns by head as in
#: checkpoints: the network's ``checkpoint_map`` takes these apart.
_GATED_DELTA = ("qwen3next", "qwen35", "qwen35moe")
_WHOLE = {
    "self_attn.q_proj": ("q_proj", "gate_proj"),
    "linear_attn.in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    "linear_attn.in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_WHOLE_OF = {f"{whole.partition('.')[0]}.{part}": whole for whole, parts in _WHOLE.items() for part in parts}
#: Convolutions that files have one by one, as checkpoints do: ``checkpoint_map`` joins them.
_APART = {"self_attn.conv1d": ("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d")}
#: Weights of recurrences and of their convolutions, which are float32 in files and in memory.
_RECURRENT = re.compile(
    r"\.(A_log|D|dt_bias|dt_proj\.bias|((linear_attn|mixer|mamba)\.norm|o_norm)\.weight|\w*conv(1d)?\.(weight|bias))$"
)
#: Fused matrices that the converter writes of any architecture if it is told to.
_FUSED_ON_DEMAND = {"self_attn.qkv_proj": "attn_qkv", "experts.gate_up_proj": "ffn_gate_up_exps"}
#: Keys and values of latent attention: one matrix, or two.
_KEYS_VALUES, _KEYS, _VALUES = "attn_kv_b.weight", "attn_k_b.weight", "attn_v_b.weight"
#: Types of mapped tables.
_MAPPED = {"F32": DType.FLOAT32, "BF16": DType.BFLOAT16}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_BLOCK = re.compile(r"blk\.\d+\.")
_LAYER_PART = re.compile(r"(?P<before>.*\.layers\.(?P<layer>\d+)\.)(?P<part>\w+\.\w+)(?P<after>\.(weight|bias))$")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@functools.cache
def _name_map(arch: str) -> TensorNameMap:
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == arch)
    return get_tensor_name_map(kind, 1)


def tensors_by_source(arch: str, names: Sequence[str], held: Iterable[str]) -> dict[str, list[str]]:
    """A network's tensors by the name of the file's tensor that holds them, as consecutive rows in this order.

    ``arch`` is the value of general.architecture. ``held`` are the names of the file's tensors; they tell whether
    matrices are fused.
    """
    name_map = _name_map(arch)
    held = set(held)
    has_two_norms = arch == "falcon" and any(".post_attention_layernorm." in name for name in names)

    def source_of(stem: str, ending: str) -> str | None:
        stems = [stem, stem.replace("model.layers.", "backbone.layers.")]
        if ".mixer." in stem:  # Nemotron-H
            stems.append(stems[1].replace(".fc1", ".up_proj").replace(".fc2", ".down_proj"))
            stems.append(stem.replace(".mixer.experts.", ".mlp.experts."))
        found = (name_map.get_name(f"{each}.{ending}", (".weight", ".bias")) for each in stems)
        return next(filter(None, found), None)

    def fused_source(stem: str, ending: str) -> str | None:
        on_demand = (f"blk.0.{source}.{ending}" for part, source in _FUSED_ON_DEMAND.items() if stem.endswith(part))
        return source_of(stem, ending) or next(on_demand, None)

    @functools.cache
    def find(name: str, block: str) -> str:
        stem, _, ending = name.rpartition(".")
        before, _, part = stem.rpartition(".")
        if has_two_norms and part in _FALCON_NORMS:
            return f"blk.0.{_FALCON_NORMS[part]}.{ending}"
        for whole, parts in _FUSED:
            module, _, matrix = whole.rpartition(".")
            if part not in parts or not before.endswith(module):
                continue
            fused = fused_source(f"{before}.{matrix}", ending) or ""
            if _BLOCK.sub(block, fused) in held:
                apart = [source_of(f"{before}.{other}", ending) for other in parts]
                if apart[0] is None or fused not in apart:
                    return fused
        source = _ALIASES.get(name) or source_of(stem, ending) or _OTHER_NORMS.get(name)
        if part_of_module := _NEXTN.search(name):
            source = f"blk.0.nextn.{part_of_module[1]}{'_norm' * bool(part_of_module[2])}.{ending}"
        if source is None:
            raise UnsupportedModelError(f"GGUF files of architecture {arch!r} have no tensor for {name!r}")
        bare = source.removesuffix(".weight")  # as some norms are called
        return bare if _BLOCK.sub(block, bare) in held else source

    sources: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.search(name)
        block = f"blk.{layer and layer[1]}."
        source = find(_EXPERT.sub(".experts.", _LAYER.sub(".layers.0.", name)), block)
        sources.setdefault(_BLOCK.sub(block, source), []).append(name)
    return sources


def stored_names(arch: str, name: str, held: Container[str]) -> list[str]:
    """What checkpoints call a network's tensor that the file has in their layout: the matrix of ``_WHOLE`` of which it
    is a part, or the tensors of equal shapes of which it consists; else its own name.

    ``held`` are the names of the file's tensors.
    """
    if (part := _LAYER_PART.match(name)) is None:
        return [name]
    before, after = part["before"], part["after"]
    if arch == "kimi-linear" and part["part"] in _APART:
        return [f"{before}{each}{after}" for each in _APART[part["part"]]]
    if arch not in _GATED_DELTA or (whole := _WHOLE_OF.get(part["part"])) is None:
        return [name]
    source = _name_map(arch).get_name(f"model.layers.0.{whole}.weight", (".weight",)) or ""
    is_held = whole == "self_attn.q_proj" or _BLOCK.sub(f"blk.{part['layer']}.", source) in held
    return [f"{before}{whole}{after}" if is_held else name]


def stored_shapes(names: Mapping[str, Sequence[str]], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of all ``stored_names`` of a network's tensors; ``names`` are these, by the network's."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, parts in names.items():
        for part in parts:
            shape = shapes[name]
            if part in stored or len(parts) > 1:
                shape = (stored.get(part, (0,))[0] + shape[0] // len(parts), *shape[1:])
            stored[part] = shape
    return stored


def layouts(arch: str, config: ModelConfig) -> list[CheckpointEntry]:
    """Entries from the layout of GGUF files to that of transformers' checkpoints, under the network's names."""
    decays = Transform(r"\.A_log$", _logarithm)
    if arch in _INTERLEAVED:
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        return [
            *(Permute(rf"\.{name}\.", halve_pairs(count, config.head_dim)) for name, count in heads.items()),
            decays,
        ]
    if arch in ("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron"):
        return [Transform(r"norm\.weight$", lambda weight: weight - 1)]
    if isinstance(config, Qwen3NextConfig):
        delta = [] if arch == "qwen3next" else _untile(config.delta)
        return [Transform(r"(?<!\.linear_attn\.)norm\.weight$", lambda weight: weight - 1), decays, *delta]
    return [decays]


def _logarithm(decay: np.ndarray) -> np.ndarray:
    """A_log of -exp(A_log), which files have."""
    if not (decay <= 0).all():
        raise WeightError("the decays of a recurrence (ssm_a) must be negative")
    with np.errstate(divide="ignore"):
        return np.log(-decay)


def _untile(shape: DeltaShape) -> list[CheckpointEntry]:
    """The value heads of a gated delta network in groups of one key head, where files have the first of every group,
    then the second, and so on.
    """
    keys, values = shape.key_heads, shape.value_heads

    def order(dim: int, before: int = 0) -> Callable[[int], np.ndarray]:
        heads = np.arange(values).reshape(-1, keys).T.reshape(-1, 1)
        each = np.concatenate([np.arange(before), before + (heads * dim + np.arange(dim)).ravel()])

        def check(size: int) -> np.ndarray:
            if size != len(each):
                raise ValueError
            return each

        return check

    if keys == values:
        return []
    return [
        Permute(r"\.in_proj_[vz]\.weight$", order(shape.value_dim)),
        Permute(r"\.(in_proj_[ba]\.weight|A_log|dt_bias)$", order(1)),
        Permute(r"\.conv1d\.weight$", order(shape.value_dim, 2 * keys * shape.key_dim)),
        Permute(r"\.linear_attn\.out_proj\.weight$", order(shape.value_dim), columns=True),
    ]


class GGUFCheckpoint:
    """The tensors of a network in a GGUF file; all are located before one is read."""

    def __init__(self, path: Path, config: ModelConfig, shapes: Shapes) -> None:
        """``shapes`` are those of the whole network of ``config``.

        Raises:
            WeightError: the file is damaged, or a tensor is missing or of the wrong shape.
            UnsupportedModelError: the file has a tensor that the network does not have, or of an unsupported type.
        """
        self.file = GGUFFile(path)
        self._arch = str(self.file.metadata.get("general.architecture"))
        is_whole = not isinstance(config, MTPConfig)
        if isinstance(config, MTPConfig):
            config = config.target
        self._config = config
        #: The names in the layout of the file, by the network's.
        self._stored = {name: stored_names(self._arch, name, self.file.tensors) for name in shapes}
        shapes = self._shapes = stored_shapes(self._stored, shapes)
        #: Shape, tensor in the file, and its consecutive rows (of one dimension: values).
        self._places: dict[str, tuple[tuple[int, ...], GGUFTensor, slice]] = {}
        #: Keys [H, R, N] and values [H, W, R] of latent attention, where they are two tensors.
        self._split: dict[str, tuple[GGUFTensor, GGUFTensor]] = {}
        self._fields = Fields.of_gguf(config, self._arch)
        blocks = (f"model.layers.{name.removeprefix('blk.')}" for name in self.file.tensors)
        if (layers := self._fields.layers(blocks, shapes)) and self._lacks_blocks(config.num_layers):
            raise WeightError(layers, file=path)
        # Layers for multi-token prediction follow the network's.
        extra = self.file.metadata.get(f"{self._arch}.nextn_predict_layers")
        last = config.num_layers + (extra if isinstance(extra, int) else 0)
        unused = tuple(f"blk.{layer}." for layer in range(config.num_layers, last))
        if isinstance(config, Gemma4Config):
            shared = range(config.num_layers - config.shared_layers, config.num_layers)
            unused += tuple(f"blk.{layer}.attn_{part}" for layer in shared for part in ("k.", "k_norm.", "v."))
        self._unused = {
            name
            for name in self.file.tensors
            if is_whole
            and not name.startswith(unused)
            and name not in ROPE_TABLES
            and name not in DENSE.values()
            and not self._is_scale(name)
        }
        #: Names of the tensors that the network has.
        self._located: set[str] = set()
        if config.tie_word_embeddings:  # the file may have the same bytes twice
            self._unused.discard("output.weight")
        #: Numbers that are settings of the file, by the tensor's name.
        self._settings = {name: value for name in shapes if (value := self._setting(name)) is not None}
        names_in_file = [name for name in shapes if name not in self._settings]
        for source, names in tensors_by_source(self._arch, names_in_file, self.file.tensors).items():
            if source.endswith(_KEYS_VALUES) and source not in self.file.tensors:
                (rows, rank), prefix = shapes[names[0]], source.removesuffix(_KEYS_VALUES)
                keys = self._tensor(prefix + _KEYS, (config.num_heads, rank, None))
                width = rows // config.num_heads - keys.shape[-1]
                self._split[names[0]] = keys, self._tensor(prefix + _VALUES, (config.num_heads, width, rank))
                continue
            first, experts = shapes[names[0]], len({match[0] for name in names if (match := _EXPERT.search(name))})
            if "_exps." in source and experts:  # of gate and up in one tensor, an expert has both
                sizes = (experts, len(names) // experts * first[0], *first[1:])
            else:
                sizes = (sum(shapes[name][0] for name in names), *first[1:])
            tensor, start = self._tensor(source, sizes, names[0] if len(names) == 1 else ""), 0
            for name in names:
                shape = shapes[name]
                stop = start + math.prod(shape if len(tensor.shape) == 1 else shape[:-1])
                self._places[name] = shape, tensor, slice(start, stop)
                start = stop
        if self._unused:
            raise UnsupportedModelError(
                f"{path} has tensors that a {config.architecture} does not: {', '.join(sorted(self._unused)[:5])}"
            )

    def read(
        self,
        names: Container[str],
        checkpoint_map: Sequence[CheckpointEntry],
        dtype: DType | None,
        mapped: Container[str] = (),
    ) -> Generator[tuple[str, Tensor]]:
        """The tensors ``names`` of the network, in the layouts that its ``checkpoint_map`` expects (transposed where it
        transposes).

        With ``dtype`` None quantised matrices stay in their blocks and other tensors are float32. Tensors ``mapped``
        are views of the mapped file, in its type or blocks, except float16, which is read.
        """
        wanted = dict.fromkeys(each for name, stored in self._stored.items() if name in names for each in stored)
        pairs: Pairs = ((name, self._read(name, dtype, is_mapped=name in mapped)) for name in wanted)
        for entry in layouts(self._arch, self._config):
            pairs = entry.apply(pairs, self._shapes)
        for name, tensor in pairs:
            is_kept = name in mapped or _RECURRENT.search(name) is not None
            if isinstance(tensor, np.ndarray) and dtype is not None and not is_kept:
                tensor = rounded(tensor, dtype)
            yield name, transpose(tensor) if is_transposed(name, checkpoint_map) else tensor

    def _lacks_blocks(self, layers: int) -> bool:
        return not any(name.startswith(f"blk.{layers - 1}.") for name in self.file.tensors)

    def _tensor(self, name: str, shape: tuple[int | None, ...], of: str = "") -> GGUFTensor:
        """A tensor of this shape, but for dimensions of size 1, which files omit at times; of as many values, if the
        shape is a recurrence's vector.

        ``of``: the network's name of the tensor, if that is all of it.
        """
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise WeightError(f"{self.file.path} has no tensor {name!r}")
        sizes, expected = ([size for size in sizes if size != 1] for sizes in (tensor.shape, shape))
        if _RECURRENT.search(of) and len(shape) == 1:
            sizes = [math.prod(tensor.shape)] if sizes else []
        if len(sizes) != len(expected) or any(b not in (None, a) for a, b in zip(sizes, expected, strict=True)):
            fits = tuple(size or 0 for size in shape)
            hint = self._fields.explain(of, tensor.shape, fits)
            raise WeightError(
                f"{self.file.path}: tensor {name!r} has shape {list(tensor.shape)}, not {list(shape)}{hint}"
            )
        self._unused.discard(name)
        self._located.add(name)
        return tensor

    def _setting(self, name: str) -> float | None:
        """The number of a tensor that the file keeps as a setting; None of others."""
        layer = _LAYER.search(name)
        key = next((key for tensor, key in _SETTINGS.items() if name.endswith(f".{tensor}")), None)
        if key is None or layer is None:
            return None
        values = np.ravel(self.file.metadata.get(key, ()))
        if int(layer[1]) >= len(values):
            raise WeightError(f"{self.file.path}: {key} must have a number for each layer")
        return float(values[int(layer[1])])

    def _is_scale(self, name: str) -> bool:
        """Whether the tensor is a factor of a matrix, or of its input, which is not quantised here."""
        matrix, _, part = name.rpartition(".")
        return part in ("scale", "input_scale") and f"{matrix}.weight" in self.file.tensors

    def _factors(self, tensor: GGUFTensor, rows: slice) -> np.ndarray | None:
        """float32 factors of rows, which matrices of NVFP4 have: one for the tensor, or for each expert."""
        scale = self.file.tensors.get(f"{tensor.name.removesuffix('.weight')}.scale")
        if scale is None or scale.name in self._located:
            return None
        values = self._values(scale).ravel()
        if values.size not in (1, tensor.shape[0]) or (values.size > 1 and len(tensor.shape) < 3):
            raise WeightError(
                f"{self.file.path}: tensor {scale.name!r} has {values.size} scales for {list(tensor.shape)}"
            )
        return np.repeat(values, tensor.rows // values.size)[rows]

    def _read(self, name: str, dtype: DType | None, *, is_mapped: bool = False) -> Tensor:
        if name in self._settings:
            return np.full(self._shapes[name], self._settings[name], np.float32)
        if name in self._split:
            keys, values = (self._values(tensor).reshape(tensor.shape) for tensor in self._split[name])
            joined = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
            return joined.reshape(-1, joined.shape[2])
        shape, source, part = self._places[name]
        if _RECURRENT.search(name):
            return self._values(source).reshape(shape)
        if len(source.shape) == 1:
            return self._values(source).ravel()[part].reshape(shape)
        block, factors = GGML_QUANT_SIZES[source.type][0], self._factors(source, part)
        if is_mapped and block > 1:
            return GGUFRows(source.type.name, self.file.map_rows(source, part), shape[-1], block, factors)
        if is_mapped and source.type.name in _MAPPED:
            return self.file.map_rows(source, part).view(_MAPPED[source.type.name].numpy).reshape(shape)
        if dtype is None and block > 1:
            return GGUFRows(source.type.name, self.file.read_rows(source, part), shape[-1], block, factors)
        rows = self.file.read_rows(source, part)
        if factors is not None:
            values = GGUFRows(source.type.name, rows, shape[-1], block, factors).dequantize()
            return rounded(values, dtype or DType.FLOAT32).reshape(shape)
        return dequantize(source.type.name, rows, dtype or DType.FLOAT32).reshape(shape)

    def _values(self, tensor: GGUFTensor) -> np.ndarray:
        """float32 [rows, columns]."""
        return dequantize(tensor.type.name, self.file.read_rows(tensor))
