"""Adapters on disk: folders of PEFT and GGUF files, checked against a network and read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octavo.config.options import AdapterOptions
from octavo.core.dtypes import DType
from octavo.core.errors import AdapterError, OctavoError, WeightError
from octavo.core.files import read_bounded
from octavo.core.model_config import ModelConfig
from octavo.core.request import AdapterRef
from octavo.kernels.weight_rows import dequantize
from octavo.loader.gguf_config import ARCHITECTURES
from octavo.loader.gguf_file import GGUFFile, layouts, tensors_by_source
from octavo.models.checkpoint import CheckpointEntry, Pairs, Permute, is_transposed
from octavo.models.network import build_without_weights

# The matrices of a network that adapters may change, and how a checkpoint's names lead to them.


@dataclass(frozen=True, slots=True)
class Target:
    """A part of a layer: a matrix [outputs, inputs], of all ranks together; of an embedding [width, vocabulary]."""

    #: Name of the layer in the network, and of the part below it, as in ``LoraLayer.lora_parts``.
    layer: str
    part: str
    outputs: int
    inputs: int


class AdapterTargets:
    """All of a network's matrices that take low-rank products.

    An adapter names a module of transformers' network. Where that is stored as other matrices than the network has
    (fused, of reordered rows, transposed), ``Network.checkpoint_map`` does to the rows of the product's second matrix
    what it does to the rows of the weight; the first matrix concerns the inputs, which are the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        """``config`` is that of the whole network.

        Raises:
            UnsupportedModelError, ConfigError: as ``make_network``.
        """
        network = build_without_weights(config, "float32", max_loras=1)
        self.config = config
        self._entries: tuple[CheckpointEntry, ...] = network.checkpoint_map
        self._targets: dict[str, Target] = {}
        for layer, lora in network.lora_layers():
            for part, (outputs, inputs) in lora.lora_parts.items():
                name = f"{layer}.{part}.weight" if part else f"{layer}.weight"
                self._targets[name] = Target(layer, part, outputs, inputs)
        self._matrices = {name: (target.outputs, target.inputs) for name, target in self._targets.items()}
        #: Of all tensors of the network.
        self.shapes = network.tensor_shapes()

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets.values())

    def find(self, module: str, rows: np.ndarray) -> list[tuple[Target, np.ndarray]]:
        """The matrices that a module of a checkpoint consists of, each with its rows of ``rows`` [outputs, any].

        Raises:
            AdapterError: the network has no such matrix, or it takes no adapters; or the number of rows is wrong.
        """
        name = f"{module}.weight"
        pairs: Pairs = [(name, rows.T if is_transposed(name, self._entries) else rows)]
        for entry in self._entries:
            pairs = entry.apply(pairs, self._matrices)
        try:
            found = [(name, part) for name, part in pairs if isinstance(part, np.ndarray)]
        except WeightError as e:
            raise AdapterError(f"it does not fit {module!r}: {e}") from None
        if not found:
            raise AdapterError(self._refusal(module, name))
        for target, part in found:
            if target not in self._targets:
                raise AdapterError(self._refusal(module, target))
            if len(part) != self._targets[target].outputs:
                raise AdapterError(f"it has {len(part)} rows, but {module!r} has {self._targets[target].outputs}")
        return [(self._targets[target], part) for target, part in found]

    def _refusal(self, module: str, tensor: str) -> str:
        last = {target.part or target.layer.rpartition(".")[2] for target in self}
        if tensor in self.shapes:
            why = "which takes no adapters"
        else:
            why = f"which a {self.config.architecture} of {self.config.num_layers} layers does not have"
        return f"it adapts {module!r}, {why}; matrices that do: {', '.join(sorted(last))}"


# What the formats of LoRA adapters have in common: pairs of matrices for modules of a network (Hu et al. 2021).

#: By layer, then by part: A [rank, in] and B [out, rank], whole matrices in float32, the scale in B.
LoraWeights = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The product B A that an adapter adds to a module's weight, times a scale."""

    #: Of transformers' network.
    module: str
    #: Names of the tensors A [rank, in] and B [out, rank] in the file, and these shapes.
    down: str
    up: str
    down_shape: tuple[int, ...]
    up_shape: tuple[int, ...]
    scale: float
    #: Which row of the file's B each row of B is; None: the same.
    row_order: np.ndarray | None = None
    #: Whether the file has A transposed.
    down_transposed: bool = False

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.down_shape[0]


def check_pairs(pairs: Sequence[LoraPair], targets: AdapterTargets, max_rank: int, where: str) -> int:
    """The largest rank of the pairs, which all fit the network.

    Raises:
        AdapterError: one does not, or has a rank above ``max_rank``; the message names the tensor.
    """
    if not pairs:
        raise AdapterError(f"{where} holds no low-rank matrices")
    adapted: dict[tuple[str, str], str] = {}
    for pair in pairs:
        if len(pair.down_shape) != 2 or len(pair.up_shape) != 2:
            name, shape = (pair.down, pair.down_shape) if len(pair.down_shape) != 2 else (pair.up, pair.up_shape)
            raise AdapterError(f"{where}: tensor {name!r} has shape {list(shape)}; expected two dimensions")
        rank = pair.rank
        if not 1 <= rank <= max_rank:
            raise AdapterError(
                f"{where}: tensor {pair.down!r} has rank {rank}; served are ranks of 1 to {max_rank} (max_lora_rank)"
            )
        if pair.up_shape[1] != rank:
            raise AdapterError(
                f"{where}: tensor {pair.up!r} has {pair.up_shape[1]} columns, expected the rank {rank} of {pair.down!r}"
            )
        try:
            found = targets.find(pair.module, np.empty((pair.up_shape[0], 0), np.float32))
        except AdapterError as e:
            raise AdapterError(f"{where}: tensor {pair.up!r} cannot be used: {e}") from None
        for target, _ in found:
            if pair.down_shape[1] != target.inputs:
                raise AdapterError(
                    f"{where}: tensor {pair.down!r} has {pair.down_shape[1]} columns, but {pair.module!r} has "
                    f"{target.inputs} inputs"
                )
            place = (target.layer, target.part)
            if place in adapted:
                raise AdapterError(f"{where}: tensors {adapted[place]!r} and {pair.up!r} are for the same matrix")
            adapted[place] = pair.up
    return max(pair.rank for pair in pairs)


def assemble(
    pairs: Sequence[LoraPair], tensors: Mapping[str, np.ndarray], targets: AdapterTargets, where: str
) -> LoraWeights:
    """The weights of an adapter whose pairs were checked.

    Args:
        pairs: of the file.
        tensors: of the file, float32, by name.
        targets: of the network.
        where: the file, for errors.

    Raises:
        AdapterError: a value is infinite or not a number.
    """
    weights: LoraWeights = {}
    for pair in pairs:
        down, up = tensors[pair.down], tensors[pair.up]
        for name, tensor in ((pair.down, down), (pair.up, up)):
            # A sum of finite numbers is finite, unless they are so large that they are counted; it is one quick pass.
            with np.errstate(all="ignore"):
                total = tensor.sum()
            if not math.isfinite(total) and (bad := tensor.size - np.count_nonzero(np.isfinite(tensor))):
                raise AdapterError(f"{where}: {bad} of the values of tensor {name!r} are infinite or not a number")
        if pair.down_transposed:
            down = np.ascontiguousarray(down.T)
        if pair.row_order is not None:
            up = up[pair.row_order]
        up = up * pair.scale
        for target, rows in targets.find(pair.module, up):
            weights.setdefault(target.layer, {})[target.part] = (down, rows)
    return weights


# Reads the safetensors file of an adapter once: its tensors, and the digest of all of its bytes.

_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
_MAX_HEADER_BYTES = 16 << 20
#: Bytes that are read and hashed at once: other threads run between two pieces, and while one is read.
_PIECE = 1 << 20
_DIGEST_BYTES = 16


class Digest(Protocol):
    """A digest of what it was given, of ``hashlib``."""

    def update(self, data: Any, /) -> None:
        """Adds bytes."""

    def hexdigest(self) -> str:
        """The digest of all of them."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header describes it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    #: In the data after the header.
    start: int
    stop: int


def new_digest(*texts: bytes) -> Digest:
    """A digest that begins with some bytes: the files that belong to the tensors'."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest


def read_entries(path: Path) -> list[TensorEntry]:
    """The tensors of a safetensors file, in the order of their data.

    Raises:
        AdapterError: it cannot be read, is truncated, or a tensor is of a type that is not floating point.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _header(file, path)[1]
    except OSError as e:
        raise unreadable(path, e) from None


def digest_file(path: Path, digest: Digest) -> None:
    """Adds all bytes of a file to a digest.

    Raises:
        AdapterError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            _digest_rest(file, digest)
    except OSError as e:
        raise unreadable(path, e) from None


def read_tensors(path: Path, names: Container[str], digest: Digest) -> dict[str, np.ndarray]:
    """The tensors ``names``, float32; all bytes of the file are added to the digest.

    Raises:
        AdapterError: as ``read_entries``.
    """
    tensors: dict[str, np.ndarray] = {}
    try:
        with path.open("rb", buffering=0) as file:
            head, entries = _header(file, path)
            digest.update(head)
            for entry in entries:
                data = np.empty(entry.stop - entry.start, np.uint8)
                _fill(file, data.data, path, digest)
                if entry.name in names:
                    tensors[entry.name] = (
                        data.view(entry.dtype.numpy).reshape(entry.shape).astype(np.float32, copy=False)
                    )
            _digest_rest(file, digest)
    except OSError as e:
        raise unreadable(path, e) from None
    return tensors


def unreadable(path: Path, error: OSError) -> AdapterError:
    """The error for a file that the system does not read."""
    return AdapterError(f"{path} cannot be read: {error.strerror or error}")


def _header(file: FileIO, path: Path) -> tuple[bytes, list[TensorEntry]]:
    """The bytes before the data, and what they say."""
    head = _exactly(file, 8, path)
    length = int.from_bytes(head, "little")
    if length > _MAX_HEADER_BYTES:
        raise AdapterError(f"{path} is no safetensors file: it claims a header of {length} bytes")
    text = _exactly(file, length, path)
    try:
        raw = json.loads(text)
        entries = [_entry(name, value, path) for name, value in raw.items() if name != "__metadata__"]
    except AdapterError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise AdapterError(f"{path} is no safetensors file: its header is not the expected JSON object") from None
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    stop = 0
    for entry in entries:
        if entry.start != stop or entry.stop - entry.start != math.prod(entry.shape) * entry.dtype.itemsize:
            raise AdapterError(f"{path} is damaged: the place of tensor {entry.name!r} does not fit its shape")
        stop = entry.stop
    size = path.stat().st_size
    if size != 8 + length + stop:
        raise AdapterError(f"{path} is truncated or damaged: it has {size} bytes, expected {8 + length + stop}")
    return head + text, entries


def _entry(name: str, value: Any, path: Path) -> TensorEntry:
    shape, (start, stop) = tuple(int(size) for size in value["shape"]), value["data_offsets"]
    if value["dtype"] not in _DTYPES:
        raise AdapterError(
            f"{path}: tensor {name!r} is of type {value['dtype']}; expected float32, bfloat16 or float16"
        )
    if not all(isinstance(place, int) for place in (start, stop)) or min(start, stop, *shape, 0) < 0:
        raise ValueError(name)
    return TensorEntry(name, _DTYPES[value["dtype"]], shape, start, stop)


def _digest_rest(file: FileIO, digest: Digest) -> None:
    while piece := file.read(_PIECE):
        digest.update(piece)


def _exactly(file: FileIO, count: int, path: Path) -> bytes:
    data = bytearray(min(count, _MAX_HEADER_BYTES))
    _fill(file, memoryview(data), path)
    return bytes(data)


def _fill(file: FileIO, target: memoryview, path: Path, digest: Digest | None = None) -> None:
    while target:
        count = file.readinto(target[:_PIECE])
        if not count:
            raise AdapterError(f"{path} is truncated or no safetensors file")
        if digest is not None:
            digest.update(target[:count])
        target = target[count:]


# LoRA adapters in folders of PEFT: adapter_config.json and adapter_model.safetensors.

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_DOWN = (".lora_A.weight", ".lora_embedding_A")
_UP = (".lora_B.weight", ".lora_embedding_B")
#: A copy of the model's own table, which PEFT saves beside the matrices of an adapted embedding or head.
_BASE = ".base_layer.weight"

#: Settings that change what is computed, with why others than their empty or false values are refused.
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "lora_bias": "biases are not supported",
    "modules_to_save": "whole modules beside the low-rank matrices are not supported",
    "trainable_token_indices": "trained rows of embeddings are not supported",
    "target_parameters": "parameters that are no linear layer, such as those of experts, take no adapters",
    "layer_replication": "layers are not repeated",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "routing between adapters is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "ensure_weight_tying": "an adapter of the embedding is not that of a tied head",
}
#: Initialisations that change the model's own weights: the adapter belongs to other weights than the checkpoint's.
_CHANGES_MODEL = re.compile(r"pissa|olora|corda|loftq|lora_ga|mica")
_KNOWN_INITS = (True, False, "gaussian", "eva", "orthogonal")

#: Limits of the patterns of ranks and alphas, which are regular expressions that others have written.
_MAX_PATTERNS, _MAX_PATTERN_CHARS, _MAX_REPEATS = 65536, 512, 4


def read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The adapter_config.json of a folder, and its bytes.

    Raises:
        AdapterError: there is none, or it is no JSON object.
    """
    file = folder / CONFIG_FILE
    if not folder.exists():
        raise AdapterError(f"there is no adapter at {folder}: expected a folder with {CONFIG_FILE}, or a GGUF file")
    if not file.is_file():
        hint = "; it holds a whole model, which is no adapter" if (folder / "config.json").is_file() else ""
        raise AdapterError(f"{folder} has no {CONFIG_FILE}{hint}")
    text = read_bounded(file, _MAX_CONFIG_BYTES, AdapterError)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterError(f"{file} is no JSON") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{file} is no JSON object")
    return text, raw


def weights_file(folder: Path) -> Path:
    """The safetensors of an adapter.

    Raises:
        AdapterError: there are none.
    """
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    if (folder / "adapter_model.bin").exists():
        raise AdapterError(
            f"{folder} holds adapter_model.bin but no {WEIGHTS_FILE}: such files are pickles, which can run code and "
            "are never loaded; save the adapter with save_pretrained(FOLDER, safe_serialization=True)"
        )
    raise AdapterError(f"{folder} has no {WEIGHTS_FILE}")


def read_peft_pairs(folder: Path, raw: Mapping[str, Any], targets: AdapterTargets) -> list[LoraPair]:
    """The pairs of matrices of a folder, as its configuration and the header of its tensors describe them.

    Raises:
        AdapterError: a setting is wrong or not supported, or a tensor is no low-rank matrix or lacks its partner.
    """
    config = _Config(folder / CONFIG_FILE, raw)
    file = weights_file(folder)
    downs: dict[str, TensorEntry] = {}
    ups: dict[str, TensorEntry] = {}
    for entry in read_entries(file):
        module, kind = _split_name(entry.name)
        if kind in _DOWN:
            downs[module] = entry
        elif kind in _UP:
            ups[module] = entry
        elif kind == _BASE:
            _check_copy(module, entry, targets, file)
        else:
            raise AdapterError(
                f"{file}: tensor {entry.name!r} is no low-rank matrix: expected names such as "
                f"{_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight; whole tensors, biases and DoRA are not "
                "supported"
            )
    for module, entry in sorted((downs | ups).items()):
        if module not in downs or module not in ups:
            raise AdapterError(f"{file}: tensor {entry.name!r} has no partner: both matrices of {module!r} are needed")
    return [_pair(config, module, downs[module], ups[module], file) for module in downs]


def _pair(config: _Config, module: str, down: TensorEntry, up: TensorEntry, file: Path) -> LoraPair:
    rank = config.rank(module)
    if down.shape[:1] != (rank,):
        raise AdapterError(
            f"{file}: tensor {down.name!r} has shape {list(down.shape)}, but {CONFIG_FILE} gives {module!r} rank {rank}"
        )
    return LoraPair(module, down.name, up.name, down.shape, up.shape, config.scale(module))


def _split_name(name: str) -> tuple[str, str]:
    """The module and what follows; ("", "") of a name that is none of an adapter's."""
    if name.startswith(_PREFIX):
        for kind in (*_DOWN, *_UP, _BASE):
            if name.endswith(kind):
                return name[len(_PREFIX) : -len(kind)], kind
    return "", ""


def _check_copy(module: str, entry: TensorEntry, targets: AdapterTargets, file: Path) -> None:
    """Refuses a copy of a module's own weight if its shape is another: the vocabulary was resized."""
    if len(entry.shape) == 2 and 0 not in entry.shape:
        for shape in (entry.shape, entry.shape[::-1]):  # that of an embedding is transposed
            try:
                if all(t.inputs == shape[1] for t, _ in targets.find(module, np.empty((shape[0], 0), np.float32))):
                    return
            except AdapterError:
                continue
    raise AdapterError(
        f"{file}: tensor {entry.name!r} has shape {list(entry.shape)}, which is not that of the model's own: adapters "
        "of a resized vocabulary are not supported"
    )


class _Config:
    """The settings of a LoRA adapter, checked."""

    def __init__(self, file: Path, raw: Mapping[str, Any]) -> None:
        self._file = file
        _refuse_other_methods(file, raw)
        self._rank = self._positive("r", raw.get("r", 8))
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha", 8))
        self._root = raw.get("use_rslora") is True
        self._ranks = self._patterns("rank_pattern", raw)
        self._alphas = self._patterns("alpha_pattern", raw)

    def rank(self, module: str) -> int:
        """Rank of a module's matrices."""
        key = _matching(self._ranks, module)
        return self._rank if key is None else self._positive(f"rank_pattern[{key!r}]", self._ranks[key][1])

    def scale(self, module: str) -> float:
        """What a module's product is multiplied by; of rank-stabilised LoRA see arXiv 2312.03732, section 3."""
        key, rank = _matching(self._alphas, module), self.rank(module)
        alpha = self._alpha if key is None else self._number(f"alpha_pattern[{key!r}]", self._alphas[key][1])
        return alpha / (math.sqrt(rank) if self._root else rank)

    def _positive(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AdapterError(f"{self._file}: {name} must be a positive integer, not {value!r}")
        return value

    def _number(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e30:
            raise AdapterError(f"{self._file}: {name} must be a number, not {value!r}")
        return float(value)

    def _patterns(self, name: str, raw: Mapping[str, Any]) -> dict[str, tuple[re.Pattern[str], Any]]:
        table = raw.get(name) or {}
        if not isinstance(table, dict) or len(table) > _MAX_PATTERNS:
            raise AdapterError(f"{self._file}: {name} must be an object of at most {_MAX_PATTERNS} patterns")
        return {key: (self._compiled(name, key), value) for key, value in table.items()}

    def _compiled(self, name: str, key: str) -> re.Pattern[str]:
        # Repeated groups, and many repetitions, could take hours to match.
        harmless = len(key) <= _MAX_PATTERN_CHARS and len(re.findall(r"[*+{]", key)) <= _MAX_REPEATS
        try:
            if harmless and not re.search(r"\)[*+?{]", key):
                return re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError):
            pass
        raise AdapterError(f"{self._file}: {name} has the pattern {key[:100]!r}, which is wrong or too complex")


def _matching(patterns: Mapping[str, tuple[re.Pattern[str], Any]], module: str) -> str | None:
    """The first pattern that matches the end of a module's name, as ``peft.utils.get_pattern_key`` finds it."""
    return next((key for key, (pattern, _) in patterns.items() if pattern.match(module)), None)


def _refuse_other_methods(file: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type={raw.get('peft_type')!r} is not supported; supported: 'LORA'")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"{file}: bias={raw['bias']!r} is not supported: biases are the model's; supported: 'none'")
    for name, why in _REFUSED.items():
        if raw.get(name):
            raise AdapterError(f"{file}: {name}={raw[name]!r} is not supported: {why}")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and _CHANGES_MODEL.match(init):
        raise AdapterError(
            f"{file}: init_lora_weights={init!r} is not supported: such an adapter belongs to weights that the "
            "initialisation has changed; save it with path_initial_model_for_weight_conversion"
        )
    if init not in (None, *_KNOWN_INITS):
        raise AdapterError(f"{file}: init_lora_weights={init!r} is not supported")
    for name, value in raw.items():  # variants that are newer than this list
        if name.startswith("use_") and name != "use_rslora" and value:
            raise AdapterError(f"{file}: {name}={value!r} is not supported")


# Checks an adapter before its first request, and reads it in a worker.


def check_adapter(path: str | Path, name: str, targets: AdapterTargets, max_rank: int) -> AdapterRef:
    """Checks all of a LoRA adapter but the values of its matrices, and computes the digest of its files.

    The headers say which matrices it has; the files are read once for the digest, in small pieces: another thread may
    do this beside an event loop.

    Args:
        path: a folder of PEFT, or a GGUF file.
        name: of the adapter.
        targets: of the model's network.
        max_rank: the largest rank that is served.

    Raises:
        AdapterError: it is missing, damaged, not supported, or does not fit; the message names file and tensor.
    """
    path = Path(os.path.expanduser(path))
    if path.is_file():
        _refuse_other_files(path)
        pass  # MERGED-IMPORT  # brings the gguf package

        pairs = read_gguf_pairs(open_adapter(path), targets)
        file = path
    else:
        raw = read_config(path)[1]
        file, pairs = weights_file(path), read_peft_pairs(path, raw, targets)
    rank = check_pairs(pairs, targets, max_rank, str(file))
    return AdapterRef(_key(path), name, str(path.absolute()), rank)


def check_adapter_path(path: str | Path) -> None:
    """Refuses a path where no adapter lies, before the model that it is for is loaded.

    Raises:
        AdapterError: there is neither a folder with an adapter's configuration nor a GGUF file.
    """
    path = Path(os.path.expanduser(path))
    if path.is_file():
        _refuse_other_files(path)
    else:
        read_config(path)


def read_adapter(ref: AdapterRef, targets: AdapterTargets, max_rank: int) -> LoraWeights:
    """The weights of an adapter that ``check_adapter`` has checked, if its files are the same.

    Raises:
        AdapterError: they are not, or cannot be read; or a value is infinite or not a number.
    """
    try:
        key, weights = _read(Path(ref.path), targets, max_rank)
    except AdapterError:
        if _is_unchanged(ref):
            raise
        key = ""
    if key != ref.key:
        raise AdapterError(
            f"the files of adapter {ref.name!r} changed on disk after it was loaded; load it again: {ref.path}"
        )
    return weights


def _read(path: Path, targets: AdapterTargets, max_rank: int) -> tuple[str, LoraWeights]:
    """The digest of an adapter's files, and its weights."""
    if path.is_file():
        before = _version(path)

        opened = open_adapter(path)
        pairs, tensors = read_gguf_pairs(opened, targets), read_values(opened)
        file, digest = path, new_digest()
        digest_file(path, digest)
        if _version(path) != before:
            raise AdapterError(f"{path} changed while it was read")
    else:
        text, raw = read_config(path)
        pairs = read_peft_pairs(path, raw, targets)
        wanted = {name for pair in pairs for name in (pair.down, pair.up)}
        file, digest = weights_file(path), new_digest(text)
        tensors = read_tensors(file, wanted, digest)
    check_pairs(pairs, targets, max_rank, str(file))
    return digest.hexdigest(), assemble(pairs, tensors, targets, str(file))


def _is_unchanged(ref: AdapterRef) -> bool:
    try:
        return _key(Path(ref.path)) == ref.key
    except AdapterError:
        return False


def _key(path: Path) -> str:
    """The digest of an adapter's files."""
    if path.is_file():
        file, digest = path, new_digest()
    else:
        file, digest = weights_file(path), new_digest(read_config(path)[0])
    digest_file(file, digest)
    return digest.hexdigest()


def _version(path: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced or written."""
    try:
        stat = path.stat()
    except OSError as e:
        raise unreadable(path, e) from None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _refuse_other_files(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as e:
        raise unreadable(path, e) from None
    if magic != b"GGUF":
        raise AdapterError(f"{path} is no adapter: expected a folder with {CONFIG_FILE}, or a GGUF file")


# LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

_GGUF_DOWN, _GGUF_UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_LAYER = re.compile(r"\.layers\.\d+\.")


def open_adapter(path: Path) -> GGUFFile:
    """The header of a GGUF file that is an adapter.

    Raises:
        AdapterError: it is none, damaged, or an adapter of another kind.
    """
    try:
        file = GGUFFile(path)
    except OctavoError as e:
        raise AdapterError(str(e)) from None
    facts = file.metadata
    kind, method = facts.get("general.type"), facts.get("adapter.type")
    if kind != "adapter":
        raise AdapterError(f"{path}: general.type is {kind!r}, expected 'adapter': it holds no adapter")
    if method != "lora":
        raise AdapterError(f"{path}: adapter.type={method!r} is not supported; supported: 'lora'")
    if other := sorted(key for key in facts if key.startswith("adapter.alora.")):
        raise AdapterError(f"{path}: {other[0]} is not supported: activated LoRA is not supported")
    return file


def read_gguf_pairs(file: GGUFFile, targets: AdapterTargets) -> list[LoraPair]:
    """The pairs of matrices of a file, for a model.

    Raises:
        AdapterError: it is for another architecture, or a tensor is none of its matrices or lacks its partner.
    """
    arch, architecture = file.metadata.get("general.architecture"), targets.config.architecture
    kinds = {kind.split()[0] for kind, (name, _) in ARCHITECTURES.items() if name == architecture}
    if arch not in kinds:
        expected = " or ".join(map(repr, kinds)) or "none: the model's architecture has no GGUF files here"
        raise AdapterError(
            f"{file.path} is an adapter for the architecture {arch!r}; the model ({architecture}) takes {expected}"
        )
    alpha = _alpha(file)
    for tensor in file.tensors:
        if not tensor.endswith((_GGUF_DOWN, _GGUF_UP)):
            raise AdapterError(
                f"{file.path}: tensor {tensor!r} is no low-rank matrix: expected names such as "
                "blk.0.attn_q.weight.lora_a"
            )
    sources = dict.fromkeys(tensor.removesuffix(_GGUF_DOWN).removesuffix(_GGUF_UP) for tensor in file.tensors)
    # Of any layer, so that one that the model does not have is named.
    by_source = {
        _BLOCK.sub("blk.{}.", source): [_LAYER.sub(".layers.{}.", name) for name in names]
        for source, names in tensors_by_source(arch, [*targets.shapes], sources).items()
    }
    pairs: list[LoraPair] = []
    for source in sources:
        names = by_source.get(_BLOCK.sub("blk.{}.", source))
        if names is None or "_exps." in source:
            raise AdapterError(f"{file.path}: there are no adapters of the tensor {source!r} for this model")
        block = _BLOCK.match(source)
        modules = [name.format(block and block[1]) for name in dict.fromkeys(names)]
        pairs += _pairs(file, source, modules, alpha, targets)
    return pairs


def read_values(file: GGUFFile) -> dict[str, np.ndarray]:
    """All tensors of the file, float32.

    Raises:
        AdapterError: it became shorter, or cannot be read.
    """
    try:
        return {
            name: dequantize(tensor.type.name, file.read_rows(tensor)).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }
    except (OctavoError, OSError) as e:
        raise AdapterError(str(e)) from None


def _pairs(
    file: GGUFFile, source: str, names: Sequence[str], alpha: float, targets: AdapterTargets
) -> Iterator[LoraPair]:
    """A pair for each of the network's tensors ``names``, which ``source`` has one below the other."""
    down, up = file.tensors.get(source + _GGUF_DOWN), file.tensors.get(source + _GGUF_UP)
    if down is None or up is None:
        present, absent = (_GGUF_UP, _GGUF_DOWN) if down is None else (_GGUF_DOWN, _GGUF_UP)
        raise AdapterError(f"{file.path}: tensor {source + present!r} has no partner {source + absent!r}")
    transposed = source == _EMBEDDING
    down_shape = down.shape[::-1] if transposed else down.shape
    # As llama.cpp has it, no alpha means no scaling.
    scale = alpha / up.shape[-1] if alpha else 1.0
    counts = [up.rows] if len(names) == 1 else [targets.shapes.get(name, (0,))[0] for name in names]
    if sum(counts) != up.rows:
        raise AdapterError(f"{file.path}: tensor {up.name!r} has {up.rows} rows, expected {sum(counts)}")
    start = 0
    for name, count in zip(names, counts, strict=True):
        order = np.arange(start, start + count)
        for entry in layouts(str(file.metadata["general.architecture"]), targets.config):
            if isinstance(entry, Permute) and re.search(entry.pattern, name):
                try:
                    order = order[entry.order(count)]
                except ValueError:
                    raise AdapterError(
                        f"{file.path}: tensor {up.name!r} has {count} rows, which no heads have"
                    ) from None
        module, up_shape = name.removesuffix(".weight"), (count, *up.shape[1:])
        yield LoraPair(module, down.name, up.name, down_shape, up_shape, scale, order, transposed)
        start += count


def _alpha(file: GGUFFile) -> float:
    alpha: Any = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not abs(alpha) < 1e30:
        raise AdapterError(f"{file.path}: adapter.lora.alpha must be a number, not {alpha!r}")
    return float(alpha)


# Prompt adapters of PEFT: virtual tokens before the prompt, as embeddings or as keys and values of every layer.

_TENSOR = "prompt_embeddings"
#: Prompt tuning (Lester et al. 2021) and P-tuning (Liu et al. 2021) train embeddings.
_EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING")
#: Prefix tuning (Li and Liang 2021) trains keys and values.
_PREFIX_TUNING = "PREFIX_TUNING"
_KINDS = (*_EMBEDDINGS, _PREFIX_TUNING)
#: Kinds of PEFT that have virtual tokens too.
_OTHERS = ("MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")


@dataclass(frozen=True)
class VirtualTokenSizes:
    """What virtual tokens of a model look like."""

    #: E: width of the token embedding.
    width: int
    layers: int
    #: Of every layer; 0 if the layers' caches cannot hold keys and values of prefix tuning.
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> VirtualTokenSizes:
        """Those of the whole network, on all ranks."""
        network = build_without_weights(config, "float32")
        width = next(w.shape[1] for w in network.weights() if w.name == "model.embed_tokens.weight")
        plain = all(spec.kind in ("full", "sliding") for spec in network.kv_specs)
        heads = {(spec.num_kv_heads, spec.head_dim) for spec in network.kv_specs}
        return cls(width, len(network.kv_specs), *(heads.pop() if plain and len(heads) == 1 else (0, 0)))


@dataclass(frozen=True)
class VirtualTokens:
    """The n virtual tokens of an adapter, float32: one of the two."""

    #: [n, E]
    embeddings: np.ndarray | None = None
    #: [layers, 2, n, kv_heads, head_dim]: keys and values, as they are cached.
    keys_values: np.ndarray | None = None


def is_prompt_adapter(path: str | Path) -> bool:
    """Whether a folder's adapter_config.json is that of an adapter with virtual tokens, supported or not."""
    try:
        return read_config(Path(os.path.expanduser(path)))[1].get("peft_type") in (*_KINDS, *_OTHERS)
    except AdapterError:
        return False


def check_prompt_adapter(path: str | Path, name: str, sizes: VirtualTokenSizes, options: AdapterOptions) -> AdapterRef:
    """Checks all of a prompt adapter but its values, and computes the digest of its files, as ``check_adapter`` does.

    Raises:
        AdapterError: it cannot be used with this model and these options; the message says why.
    """
    folder = Path(os.path.expanduser(path))
    text, config = read_config(folder)
    if not options.enable_prompt_adapter:
        raise AdapterError(f"{folder} holds a prompt adapter, which needs an engine with enable_prompt_adapter=True")
    count, file = _check(folder, config, sizes), weights_file(folder)
    if count > options.max_prompt_adapter_token:
        raise AdapterError(
            f"{folder / CONFIG_FILE}: it has {count} virtual tokens, but max_prompt_adapter_token is "
            f"{options.max_prompt_adapter_token}"
        )
    digest = new_digest(text)
    digest_file(file, digest)
    return AdapterRef(digest.hexdigest(), name, str(folder.absolute()), 0, count)


def read_prompt_adapter(ref: AdapterRef, sizes: VirtualTokenSizes) -> VirtualTokens:
    """The virtual tokens of an adapter that ``check_prompt_adapter`` has checked, if its files are the same.

    Raises:
        AdapterError: they are not, or cannot be read; or a value is infinite or not a number.
    """
    folder = Path(ref.path)
    text, config = read_config(folder)
    _check(folder, config, sizes)
    digest, file = new_digest(text), weights_file(folder)
    tensor = read_tensors(file, (_TENSOR,), digest).get(_TENSOR)
    # The digest is of the very bytes that were read.
    if tensor is None or digest.hexdigest() != ref.key:
        raise AdapterError(
            f"the files of adapter {ref.name!r} changed on disk after it was loaded; load it again: {ref.path}"
        )
    wrong = np.argwhere(~np.isfinite(tensor))
    if len(wrong):
        raise AdapterError(f"{file}: tensor {_TENSOR!r} has a value at {wrong[0].tolist()} that is not finite")
    if config["peft_type"] != _PREFIX_TUNING:
        return VirtualTokens(embeddings=tensor)
    parts = tensor.reshape(len(tensor), sizes.layers, 2, sizes.kv_heads, sizes.head_dim)
    return VirtualTokens(keys_values=parts.transpose(1, 2, 0, 3, 4))


def _check(folder: Path, config: Mapping[str, Any], sizes: VirtualTokenSizes) -> int:
    """The number of virtual tokens of an adapter whose config and tensor fit a model of these sizes."""
    where, kind, count = f"{folder / CONFIG_FILE}: ", config.get("peft_type"), config.get("num_virtual_tokens")
    if kind not in _KINDS:
        raise AdapterError(f"{where}peft_type={kind!r:.100} is not supported; with virtual tokens: {', '.join(_KINDS)}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise AdapterError(f"{where}num_virtual_tokens must be a positive integer, not {count!r:.100}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"{where}task_type={config['task_type']!r:.100} is not supported; supported: 'CAUSAL_LM'")
    if config.get("num_transformer_submodules") not in (None, 1):
        raise AdapterError(f"{where}adapters of encoder-decoders are not supported")
    if kind != _PREFIX_TUNING:
        shape, meaning = (count, sizes.width), "virtual tokens and width of the embedding"
    elif not sizes.kv_heads:
        raise AdapterError(f"{where}prefix tuning needs a cache of equal keys and values in every layer of the model")
    else:
        shape = count, sizes.layers * 2 * sizes.kv_heads * sizes.head_dim
        meaning = (
            f"virtual tokens, and {sizes.layers} layers x 2 x {sizes.kv_heads} KV heads x head size {sizes.head_dim}"
        )
    file = weights_file(folder)
    found = {entry.name: entry.shape for entry in read_entries(file)}
    if _TENSOR not in found:
        raise AdapterError(f"{file} has no tensor {_TENSOR!r}, in which PEFT saves virtual tokens")
    if len(found) > 1:
        other = next(name for name in found if name != _TENSOR)
        raise AdapterError(f"{file}: tensor {other!r} is not supported beside {_TENSOR!r}")
    if found[_TENSOR] != shape:
        raise AdapterError(
            f"{file}: tensor {_TENSOR!r} has shape {list(found[_TENSOR])}, but the model needs {list(shape)}: {meaning}"
        )
    return count
