"""Reads adapters: LoRA in folders of PEFT or GGUF files, and virtual tokens; checked before the first request."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from octavo.config.options import AdapterOptions
from octavo.core.dtypes import DTYPES, Stored
from octavo.core.errors import AdapterError, OctavoError, WeightError
from octavo.core.files import read_bounded, read_object
from octavo.core.model_config import ModelConfig
from octavo.core.request import AdapterRef
from octavo.kernels.weight_rows import dequantize
from octavo.loader.gguf_config import ARCHITECTURES
from octavo.loader.gguf_file import GGUFFile, layouts, stored_names, stored_shapes, tensors_by_source
from octavo.loader.quantized import FLOATS
from octavo.loader.weights import read_header
from octavo.models.checkpoint import CheckpointEntry, Pairs, Permute, Shapes, is_transposed
from octavo.models.network import build_without_weights


def check_adapter(path: str | Path, name: str, targets: AdapterTargets, max_rank: int) -> AdapterRef:
    """Checks a LoRA adapter, all but the values of its matrices, and computes the digest of its files.

    The files are read in small pieces, so that a thread may do this beside an event loop. ``path`` is a folder of PEFT
    or a GGUF file.

    Raises:
        AdapterError: it is missing, damaged, not supported, or does not fit; the message names file and tensor.
    """
    files = _open_adapter(path)
    rank = check_pairs(files.pairs(targets), targets, max_rank, files.file)
    return AdapterRef(files.digest(), name, str(files.path.absolute()), rank)


def check_adapter_path(path: str | Path) -> None:
    _open_adapter(path)


def read_adapter(ref: AdapterRef, targets: AdapterTargets, max_rank: int) -> LoraWeights:
    """The weights of a checked adapter.

    Raises:
        AdapterError: its files have changed or cannot be read, or a value is infinite or not a number.
    """
    with _unchanged(ref) as files:
        pairs, where = files.pairs(targets), files.file
        check_pairs(pairs, targets, max_rank, where)
        tensors = files.values({name for pair in pairs for name in (pair.down, pair.up)})
    return assemble(pairs, tensors, targets, where)


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix [outputs, inputs] that takes an adapter, of all ranks together; an embedding is [width, vocabulary]."""

    #: The layer in the network, and the part of it, as in ``LoraLayer.lora_parts``.
    layer: str
    part: str
    outputs: int
    inputs: int


class AdapterTargets:
    """The matrices of a network that take low-rank products, and the way from a checkpoint's names to them.

    An adapter names modules of transformers' network. Where the network stores these as other matrices (fused, with
    reordered rows, transposed), ``Network.checkpoint_map`` does to the rows of B what it does to the rows of the
    weight; A concerns the inputs, which are the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        """``config`` is that of the whole network."""
        network = build_without_weights(config, "float32", max_loras=1)
        self.config = config
        self._entries: tuple[CheckpointEntry, ...] = tuple(network.entries())
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
        """The matrices of a module of a checkpoint, each with its rows of ``rows`` [outputs, any].

        Raises:
            AdapterError: the network has no such matrix, the matrix takes no adapters, or the number of rows is wrong.
        """
        name = f"{module}.weight"
        pairs: Pairs = [(name, rows.T if is_transposed(name, self._entries) else rows)]
        for entry in self._entries:
            pairs = entry.apply(pairs, self._matrices)
        try:
            matrices = [(name, part) for name, part in pairs if isinstance(part, np.ndarray)]
        except WeightError as e:
            raise AdapterError(f"it does not fit {module!r}: {e}") from None
        if not matrices:
            raise AdapterError(self._refusal(module, name))
        for target, part in matrices:
            if target not in self._targets:
                raise AdapterError(self._refusal(module, target))
            if len(part) != self._targets[target].outputs:
                raise AdapterError(f"it has {len(part)} rows, but {module!r} has {self._targets[target].outputs}")
        return [(self._targets[target], part) for target, part in matrices]

    def _refusal(self, module: str, tensor: str) -> str:
        last = {target.part or target.layer.rpartition(".")[2] for target in self}
        if tensor in self.shapes:
            why = "which takes no adapters"
        else:
            why = f"which a {self.config.architecture} of {self.config.num_layers} layers does not have"
        return f"it adapts {module!r}, {why}; matrices that do: {', '.join(sorted(last))}"


# LoRA adapters (Hu et al. 2021)

#: Layer -> part -> A [rank, in] and B [out, rank], whole, float32; B includes the scale.
LoraWeights = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The product B A that an adapter adds to a module's weight, times a scale."""

    module: str
    #: The tensors A [rank, in] and B [out, rank] in the file.
    down: str
    up: str
    down_shape: tuple[int, ...]
    up_shape: tuple[int, ...]
    scale: float
    #: For each row of B, its row in the file; None: the same.
    row_order: np.ndarray | None = None
    down_transposed: bool = False
    #: For each column of A, its column in the file; None: the same.
    column_order: np.ndarray | None = None


def check_pairs(pairs: Sequence[LoraPair], targets: AdapterTargets, max_rank: int, where: Path) -> int:
    """The largest rank of the pairs; refuses pairs that do not fit the network or exceed ``max_rank``."""
    if not pairs:
        raise AdapterError("holds no low-rank matrices", file=where)
    adapted: dict[tuple[str, str], str] = {}
    for pair in pairs:
        if len(pair.down_shape) != 2 or len(pair.up_shape) != 2:
            name, shape = (pair.down, pair.down_shape) if len(pair.down_shape) != 2 else (pair.up, pair.up_shape)
            raise AdapterError(f"tensor {name!r} has shape {list(shape)}; expected two dimensions", file=where)
        rank = pair.down_shape[0]
        if not 1 <= rank <= max_rank:
            raise AdapterError(
                f"tensor {pair.down!r} has rank {rank}; served are ranks of 1 to {max_rank} (max_lora_rank)", file=where
            )
        if pair.up_shape[1] != rank:
            raise AdapterError(
                f"tensor {pair.up!r} has {pair.up_shape[1]} columns, expected the rank {rank} of {pair.down!r}",
                file=where,
            )
        try:
            matrices = targets.find(pair.module, np.empty((pair.up_shape[0], 0), np.float32))
        except AdapterError as e:
            raise AdapterError(f"tensor {pair.up!r} cannot be used: {e}", file=where) from None
        for target, _ in matrices:
            if pair.down_shape[1] != target.inputs:
                raise AdapterError(
                    f"tensor {pair.down!r} has {pair.down_shape[1]} columns, but {pair.module!r} has "
                    f"{target.inputs} inputs",
                    file=where,
                )
            place = (target.layer, target.part)
            if place in adapted:
                raise AdapterError(f"tensors {adapted[place]!r} and {pair.up!r} are for the same matrix", file=where)
            adapted[place] = pair.up
    return max(pair.down_shape[0] for pair in pairs)


def assemble(
    pairs: Sequence[LoraPair], tensors: Mapping[str, np.ndarray], targets: AdapterTargets, where: Path
) -> LoraWeights:
    """The weights of an adapter from its checked ``pairs`` and the float32 ``tensors`` of its file ``where``."""
    weights: LoraWeights = {}
    for pair in pairs:
        down, up = tensors[pair.down], tensors[pair.up]
        for name, tensor in ((pair.down, down), (pair.up, up)):
            # One quick pass; only if the sum is not finite are the values counted.
            with np.errstate(all="ignore"):
                total = tensor.sum()
            if not math.isfinite(total) and (bad := tensor.size - np.count_nonzero(np.isfinite(tensor))):
                raise AdapterError(f"{bad} of the values of tensor {name!r} are infinite or not a number", file=where)
        if pair.down_transposed:
            down = np.ascontiguousarray(down.T)
        if pair.column_order is not None:
            down = down[:, pair.column_order]
        if pair.row_order is not None:
            up = up[pair.row_order]
        up = up * pair.scale
        for target, rows in targets.find(pair.module, up):
            weights.setdefault(target.layer, {})[target.part] = (down, rows)
    return weights


# The files of an adapter

_DIGEST_BYTES = 16


class AdapterFiles(ABC):
    """An adapter on disk: a folder of PEFT, or a GGUF file of LoRA. Opening it reads its settings only."""

    #: The folder or file that users name, and the file with the tensors.
    path: Path
    file: Path
    #: Files that count beside it.
    settings: tuple[Path, ...] = ()

    @abstractmethod
    def pairs(self, targets: AdapterTargets) -> list[LoraPair]:
        """The pairs of matrices by settings and headers."""

    @abstractmethod
    def values(self, names: Container[str]) -> dict[str, np.ndarray]:
        """The tensors ``names`` as float32."""

    def digest(self) -> str:
        """A digest of the contents of all files."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path in self.settings:
            text = read_bounded(path, _MAX_CONFIG_BYTES, AdapterError)
            digest.update(len(text).to_bytes(8, "little") + text)
        with _errors_of(self.file), self.file.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest()

    def version(self) -> list[tuple[int, int, int]]:
        """Changes when a file is replaced or written."""
        with _errors_of(self.file):
            stats = [path.stat() for path in (self.file, *self.settings)]
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


def _open_adapter(path: str | Path) -> AdapterFiles:
    path = Path(os.path.expanduser(path))
    return GGUFAdapter(path) if path.is_file() else PeftFolder(path)


@contextmanager
def _unchanged(ref: AdapterRef) -> Iterator[AdapterFiles]:
    """The files of a checked adapter; AdapterError unless they have the checked contents before and after the block."""
    changed = AdapterError(
        f"the files of adapter {ref.name!r} changed on disk after it was loaded; load it again", file=ref.path
    )
    try:
        files = _open_adapter(ref.path)
        version, key = files.version(), files.digest()
    except AdapterError:
        raise changed from None
    if key != ref.key:
        raise changed
    yield files
    if files.version() != version:
        raise changed


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as e:
        raise AdapterError(f"is damaged or no safetensors file: {e}", file=file) from None
    except OSError as e:
        raise AdapterError(f"cannot be read: {e.strerror or e}", file=file) from None
    except OctavoError as e:
        raise AdapterError(e.problem, file=e.file or file) from None


# Folders of PEFT: adapter_config.json and adapter_model.safetensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_DOWN = (".lora_A.weight", ".lora_embedding_A")
_UP = (".lora_B.weight", ".lora_embedding_B")
#: PEFT saves the model's own table too if an embedding or head is adapted.
_BASE = ".base_layer.weight"

#: Settings that must be empty or false, and the reason.
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
#: Initialisations that change the model's own weights.
_CHANGES_MODEL = re.compile(r"pissa|olora|corda|loftq|lora_ga|mica")
_KNOWN_INITS = (True, False, "gaussian", "eva", "orthogonal")

#: Limits of the regular expressions for ranks and alphas, which are not trusted.
_MAX_PATTERNS, _MAX_PATTERN_CHARS, _MAX_REPEATS = 65536, 512, 4


class PeftFolder(AdapterFiles):
    """A folder with ``CONFIG_FILE`` and ``WEIGHTS_FILE``."""

    def __init__(self, folder: Path) -> None:
        self.path, self.config_file, self.file = folder, folder / CONFIG_FILE, folder / WEIGHTS_FILE
        if not folder.exists():
            raise AdapterError(f"is missing: expected a folder with {CONFIG_FILE}, or a GGUF file", file=folder)
        if not self.config_file.is_file():
            hint = "; it holds a whole model, which is no adapter" if (folder / "config.json").is_file() else ""
            raise AdapterError(f"has no {CONFIG_FILE}{hint}", file=folder)
        self.settings = (self.config_file,)
        self.config = read_object(self.config_file, AdapterError, _MAX_CONFIG_BYTES)

    @functools.cached_property
    def stored(self) -> dict[str, Stored]:
        """The tensors in the order of their data; all are floating point."""
        if not self.file.is_file() and (self.path / "adapter_model.bin").exists():
            raise AdapterError(
                f"holds adapter_model.bin but no {WEIGHTS_FILE}: such files are pickles, which can run "
                "code and are never loaded; save the adapter with save_pretrained(FOLDER, safe_serialization=True)",
                file=self.path,
            )
        if not self.file.is_file():
            raise AdapterError(f"has no {WEIGHTS_FILE}", file=self.path)
        with _errors_of(self.file):
            stored = read_header(self.file)
        for name, tensor in stored.items():
            if tensor.dtype not in FLOATS:
                raise AdapterError(
                    f"tensor {name!r} is of type {tensor.dtype}; expected float32, bfloat16 or float16", file=self.file
                )
        return stored

    def pairs(self, targets: AdapterTargets) -> list[LoraPair]:
        config, file, stored = _Config(self.config_file, self.config), self.file, self.stored
        downs: dict[str, str] = {}
        ups: dict[str, str] = {}
        for name, tensor in stored.items():
            module, kind = _split_name(name)
            if kind in _DOWN:
                downs[module] = name
            elif kind in _UP:
                ups[module] = name
            elif kind == _BASE:
                _check_copy(module, name, tensor.shape, targets, file)
            else:
                raise AdapterError(
                    f"tensor {name!r} is no low-rank matrix, such as "
                    f"{_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight, but an unsupported tensor, bias or DoRA",
                    file=file,
                )
        for module, name in sorted((downs | ups).items()):
            if module not in downs or module not in ups:
                raise AdapterError(f"tensor {name!r} has no partner: both matrices of {module!r} are needed", file=file)
        pairs = []
        for module, down in downs.items():
            up, rank, shape = ups[module], config.rank(module), stored[down].shape
            if shape[:1] != (rank,):
                raise AdapterError(
                    f"tensor {down!r} has shape {list(shape)}, but {CONFIG_FILE} has rank {rank}", file=file
                )
            pairs.append(LoraPair(module, down, up, shape, stored[up].shape, config.scale(module)))
        return pairs

    def values(self, names: Container[str]) -> dict[str, np.ndarray]:
        tensors = {}
        for name, stored in self.stored.items():
            if name in names:
                with _errors_of(self.file):
                    data = np.fromfile(self.file, np.uint8, stored.nbytes, offset=stored.offset)
                if data.size < stored.nbytes:
                    raise AdapterError(f"has become shorter while tensor {name!r} was read", file=self.file)
                values = data.view(DTYPES[stored.dtype]).reshape(stored.shape)
                tensors[name] = values.astype(np.float32, copy=False)
        return tensors


def _split_name(name: str) -> tuple[str, str]:
    """The module and the suffix of an adapter tensor's name; ("", "") for another name."""
    if name.startswith(_PREFIX):
        for kind in (*_DOWN, *_UP, _BASE):
            if name.endswith(kind):
                return name[len(_PREFIX) : -len(kind)], kind
    return "", ""


def _check_copy(module: str, name: str, shape: tuple[int, ...], targets: AdapterTargets, file: Path) -> None:
    """Refuses a copy of a module's own weight with another shape: the vocabulary was resized."""
    if len(shape) == 2 and 0 not in shape:
        for rows, columns in (shape, shape[::-1]):  # an embedding's is transposed
            with suppress(AdapterError):
                if all(t.inputs == columns for t, _ in targets.find(module, np.empty((rows, 0), np.float32))):
                    return
    raise AdapterError(
        f"tensor {name!r} has shape {list(shape)}, unlike the model's own: adapters of a resized vocabulary "
        "are not supported",
        file=file,
    )


class _Config:
    """The checked settings of a LoRA adapter."""

    def __init__(self, file: Path, raw: Mapping[str, Any]) -> None:
        self._file = file
        _refuse_other_methods(file, raw)
        self._rank = self._positive("r", raw.get("r", 8))
        self._alpha = _number(file, "lora_alpha", raw.get("lora_alpha", 8))
        self._root = raw.get("use_rslora") is True
        self._ranks = self._patterns("rank_pattern", raw)
        self._alphas = self._patterns("alpha_pattern", raw)

    def rank(self, module: str) -> int:
        key = _matching(self._ranks, module)
        return self._rank if key is None else self._positive(f"rank_pattern[{key!r}]", self._ranks[key][1])

    def scale(self, module: str) -> float:
        """The factor of a module's product; for rank-stabilised LoRA see arXiv 2312.03732, section 3."""
        key, rank = _matching(self._alphas, module), self.rank(module)
        alpha = self._alpha if key is None else _number(self._file, f"alpha_pattern[{key!r}]", self._alphas[key][1])
        return alpha / (math.sqrt(rank) if self._root else rank)

    def _positive(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AdapterError(f"{name} must be a positive integer, not {value!r}", file=self._file)
        return value

    def _patterns(self, name: str, raw: Mapping[str, Any]) -> dict[str, tuple[re.Pattern[str], Any]]:
        table = raw.get(name) or {}
        if not isinstance(table, dict) or len(table) > _MAX_PATTERNS:
            raise AdapterError(f"{name} must be an object of at most {_MAX_PATTERNS} patterns", file=self._file)
        patterns = {}
        for key, value in table.items():
            # Repeated groups, and many repetitions, could take hours to match.
            harmless = len(key) <= _MAX_PATTERN_CHARS and len(re.findall(r"[*+{]", key)) <= _MAX_REPEATS
            if harmless and not re.search(r"\)[*+?{]", key):
                with suppress(re.error, OverflowError, RecursionError):
                    patterns[key] = re.compile(rf"(.*\.)?({key})$"), value
            if key not in patterns:
                raise AdapterError(
                    f"{name} has the pattern {key[:100]!r}, which is wrong or too complex", file=self._file
                )
        return patterns


def _number(file: Path, name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e30:
        raise AdapterError(f"{name} must be a number, not {value!r}", file=file)
    return float(value)


def _matching(patterns: Mapping[str, tuple[re.Pattern[str], Any]], module: str) -> str | None:
    """The first pattern that matches the end of a module's name, as in ``peft.utils.get_pattern_key``."""
    return next((key for key, (pattern, _) in patterns.items() if pattern.match(module)), None)


def _refuse_other_methods(file: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type={raw.get('peft_type')!r} is not supported; supported: 'LORA'", file=file)
    if raw.get("bias", "none") != "none":
        raise AdapterError(
            f"bias={raw['bias']!r} is not supported: biases are the model's; supported: 'none'", file=file
        )
    for name, why in _REFUSED.items():
        if raw.get(name):
            raise AdapterError(f"{name}={raw[name]!r} is not supported: {why}", file=file)
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and _CHANGES_MODEL.match(init):
        raise AdapterError(
            f"init_lora_weights={init!r} is not supported: such an adapter belongs to weights that the "
            "initialisation has changed; save it with path_initial_model_for_weight_conversion",
            file=file,
        )
    if init not in (None, *_KNOWN_INITS):
        raise AdapterError(f"init_lora_weights={init!r} is not supported", file=file)
    for name, value in raw.items():  # variants that are newer than this list
        if name.startswith("use_") and name != "use_rslora" and value:
            raise AdapterError(f"{name}={value!r} is not supported", file=file)


# GGUF files of llama.cpp's convert_lora_to_gguf.py

_GGUF_DOWN, _GGUF_UP = ".lora_a", ".lora_b"
_EMBEDDING = "token_embd.weight"
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_LAYER = re.compile(r"\.layers\.\d+\.")


class GGUFAdapter(AdapterFiles):
    def __init__(self, path: Path) -> None:
        self.path = self.file = path
        with _errors_of(path), path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise AdapterError(f"is no adapter: expected a folder with {CONFIG_FILE}, or a GGUF file", file=path)

    @functools.cached_property
    def opened(self) -> GGUFFile:
        with _errors_of(self.path):
            file = GGUFFile(self.path)
        facts = file.metadata
        kind, method = facts.get("general.type"), facts.get("adapter.type")
        if kind != "adapter":
            raise AdapterError(f"general.type is {kind!r}, expected 'adapter': it holds no adapter", file=self.path)
        if method != "lora":
            raise AdapterError(f"adapter.type={method!r} is not supported; supported: 'lora'", file=self.path)
        if other := sorted(key for key in facts if key.startswith("adapter.alora.")):
            raise AdapterError(f"{other[0]} is not supported: activated LoRA is not supported", file=self.path)
        return file

    def pairs(self, targets: AdapterTargets) -> list[LoraPair]:
        """Refuses adapters for another architecture, too."""
        file = self.opened
        arch, architecture = file.metadata.get("general.architecture"), targets.config.architecture
        kinds = {kind.split()[0] for kind, (name, _) in ARCHITECTURES.items() if name == architecture}
        if arch not in kinds:
            expected = " or ".join(map(repr, kinds)) or "none: the model's architecture has no GGUF files here"
            raise AdapterError(
                f"is an adapter for the architecture {arch!r}; the model ({architecture}) takes {expected}",
                file=file.path,
            )
        alpha = _number(file.path, "adapter.lora.alpha", file.metadata.get("adapter.lora.alpha"))
        for tensor in file.tensors:
            if not tensor.endswith((_GGUF_DOWN, _GGUF_UP)):
                raise AdapterError(
                    f"tensor {tensor!r} is no low-rank matrix, such as attn_q.weight.lora_a", file=file.path
                )
        sources = dict.fromkeys(tensor.removesuffix(_GGUF_DOWN).removesuffix(_GGUF_UP) for tensor in file.tensors)
        shapes = stored_shapes({name: stored_names(arch, name, sources) for name in targets.shapes}, targets.shapes)
        # For any layer, so that the error for a layer too many names it.
        by_source = {
            _BLOCK.sub("blk.{}.", source): [_LAYER.sub(".layers.{}.", name) for name in names]
            for source, names in tensors_by_source(arch, [*shapes], sources).items()
        }
        pairs: list[LoraPair] = []
        for source in sources:
            names = by_source.get(_BLOCK.sub("blk.{}.", source))
            if names is None or "_exps." in source:
                raise AdapterError(f"there are no adapters of the tensor {source!r} for this model", file=file.path)
            block = _BLOCK.match(source)
            modules = [name.format(block and block[1]) for name in dict.fromkeys(names)]
            pairs += _pairs(file, source, modules, alpha, targets.config, shapes)
        return pairs

    def values(self, names: Container[str]) -> dict[str, np.ndarray]:
        with _errors_of(self.path):
            return {
                name: dequantize(tensor.type.name, self.opened.read_rows(tensor)).reshape(tensor.shape)
                for name, tensor in self.opened.tensors.items()
                if name in names
            }


def _pairs(
    file: GGUFFile, source: str, names: Sequence[str], alpha: float, config: ModelConfig, shapes: Shapes
) -> Iterator[LoraPair]:
    """A pair for each of the tensors ``names``, which are the row blocks of ``source`` in this order."""
    down, up = file.tensors.get(source + _GGUF_DOWN), file.tensors.get(source + _GGUF_UP)
    if down is None or up is None:
        present, absent = (_GGUF_UP, _GGUF_DOWN) if down is None else (_GGUF_DOWN, _GGUF_UP)
        raise AdapterError(f"tensor {source + present!r} has no partner {source + absent!r}", file=file.path)
    transposed = source == _EMBEDDING
    down_shape = down.shape[::-1] if transposed else down.shape
    # As in llama.cpp, no alpha means no scaling.
    scale = alpha / up.shape[-1] if alpha else 1.0
    counts = [up.rows] if len(names) == 1 else [shapes.get(name, (0,))[0] for name in names]
    if sum(counts) != up.rows:
        raise AdapterError(f"tensor {up.name!r} has {up.rows} rows, expected {sum(counts)}", file=file.path)
    start = 0
    for name, count in zip(names, counts, strict=True):
        order, columns = np.arange(start, start + count), None
        for entry in layouts(str(file.metadata["general.architecture"]), config):
            if isinstance(entry, Permute) and re.search(entry.pattern, name):
                size = down_shape[-1] if entry.columns else count
                try:
                    permuted = entry.order(size)
                except ValueError:
                    tensor, what = (down, "columns") if entry.columns else (up, "rows")
                    raise AdapterError(
                        f"tensor {tensor.name!r} has {size} {what}, which fit no heads", file=file.path
                    ) from None
                order, columns = (order, permuted) if entry.columns else (order[permuted], columns)
        module, up_shape = name.removesuffix(".weight"), (count, *up.shape[1:])
        yield LoraPair(module, down.name, up.name, down_shape, up_shape, scale, order, transposed, columns)
        start += count


# Prompt adapters of PEFT: virtual tokens before the prompt, as embeddings or as keys and values of every layer

_TENSOR = "prompt_embeddings"
#: Trains keys and values (Li and Liang 2021).
_PREFIX_TUNING = "PREFIX_TUNING"
#: The others train embeddings: prompt tuning (Lester et al. 2021) and P-tuning (Liu et al. 2021).
_KINDS = ("PROMPT_TUNING", "P_TUNING", _PREFIX_TUNING)
#: Further kinds with virtual tokens.
_OTHERS = ("MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")


@dataclass(frozen=True)
class VirtualTokenSizes:
    """The shapes of virtual tokens for a model."""

    width: int
    layers: int
    #: 0 if the layers' caches cannot hold keys and values of prefix tuning.
    kv_heads: int
    head_dim: int
    #: The numbers of a token's keys in the order of the cache, if transformers pairs rotated dimensions otherwise.
    key_order: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: ModelConfig) -> VirtualTokenSizes:
        network = build_without_weights(config, "float32")
        width = next(w.shape[1] for w in network.weights() if w.name == "model.embed_tokens.weight")
        plain = all(spec.kind in ("full", "sliding") for spec in network.kv_specs)
        heads = {(spec.num_kv_heads, spec.head_dim) for spec in network.kv_specs}
        if not plain or len(heads) != 1:
            return cls(width, len(network.kv_specs), 0, 0)
        (kv_heads, head_dim) = heads.pop()
        size, name = kv_heads * head_dim, "model.layers.0.self_attn.k_proj.weight"
        order = np.arange(size)
        for entry in network.checkpoint_map:
            if isinstance(entry, Permute) and re.search(entry.pattern, name):
                order = order[entry.order(size)]
        return cls(width, len(network.kv_specs), kv_heads, head_dim, tuple(order.tolist()))


@dataclass(frozen=True)
class VirtualTokens:
    """The n virtual tokens of an adapter, float32; one of the two fields is set."""

    #: [n, E]
    embeddings: np.ndarray | None = None
    #: [layers, 2, n, kv_heads, head_dim]: keys and values, as they are cached.
    keys_values: np.ndarray | None = None


def is_prompt_adapter(path: str | Path) -> bool:
    """Whether a folder's adapter_config.json describes an adapter with virtual tokens, supported or not."""
    try:
        return PeftFolder(Path(os.path.expanduser(path))).config.get("peft_type") in (*_KINDS, *_OTHERS)
    except AdapterError:
        return False


def check_prompt_adapter(path: str | Path, name: str, sizes: VirtualTokenSizes, options: AdapterOptions) -> AdapterRef:
    """Checks a prompt adapter, all but its values, and computes the digest of its files.

    Raises:
        AdapterError: it cannot be used with this model and these options.
    """
    files = PeftFolder(Path(os.path.expanduser(path)))
    if not options.enable_prompt_adapter:
        raise AdapterError(
            "holds a prompt adapter, which needs an engine with enable_prompt_adapter=True", file=files.path
        )
    count = _check(files, sizes)
    if count > options.max_prompt_adapter_token:
        raise AdapterError(
            f"it has {count} virtual tokens, but max_prompt_adapter_token is {options.max_prompt_adapter_token}",
            file=files.config_file,
        )
    return AdapterRef(files.digest(), name, str(files.path.absolute()), 0, count)


def read_prompt_adapter(ref: AdapterRef, sizes: VirtualTokenSizes) -> VirtualTokens:
    """The virtual tokens of a checked adapter.

    Raises:
        AdapterError: its files have changed or cannot be read, or a value is infinite or not a number.
    """
    with _unchanged(ref) as files:
        assert isinstance(files, PeftFolder)
        _check(files, sizes)
        tensor = files.values((_TENSOR,))[_TENSOR]
    wrong = np.argwhere(~np.isfinite(tensor))
    if len(wrong):
        raise AdapterError(f"tensor {_TENSOR!r} has a value at {wrong[0].tolist()} that is not finite", file=files.file)
    if files.config["peft_type"] != _PREFIX_TUNING:
        return VirtualTokens(embeddings=tensor)
    parts = tensor.reshape(len(tensor), sizes.layers, 2, sizes.kv_heads, sizes.head_dim)
    if sizes.key_order:
        keys = parts[:, :, 0].reshape(len(tensor), sizes.layers, -1)[..., list(sizes.key_order)]
        parts = np.stack((keys.reshape(parts[:, :, 0].shape), parts[:, :, 1]), axis=2)
    return VirtualTokens(keys_values=parts.transpose(1, 2, 0, 3, 4))


def _check(files: PeftFolder, sizes: VirtualTokenSizes) -> int:
    """The number of virtual tokens; refuses a config and a tensor that do not fit the model."""
    where, config = files.config_file, files.config
    kind, count = config.get("peft_type"), config.get("num_virtual_tokens")
    if kind not in _KINDS:
        raise AdapterError(
            f"peft_type={kind!r:.100} is not supported; with virtual tokens: {', '.join(_KINDS)}", file=where
        )
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise AdapterError(f"num_virtual_tokens must be a positive integer, not {count!r:.100}", file=where)
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(
            f"task_type={config['task_type']!r:.100} is not supported; supported: 'CAUSAL_LM'", file=where
        )
    if config.get("num_transformer_submodules") not in (None, 1):
        raise AdapterError("adapters of encoder-decoders are not supported", file=where)
    if kind != _PREFIX_TUNING:
        shape, meaning = (count, sizes.width), "virtual tokens and width of the embedding"
    elif not sizes.kv_heads:
        raise AdapterError(
            "prefix tuning needs a cache of equal keys and values in every layer of the model", file=where
        )
    else:
        shape = count, sizes.layers * 2 * sizes.kv_heads * sizes.head_dim
        meaning = (
            f"virtual tokens, and {sizes.layers} layers x 2 x {sizes.kv_heads} KV heads x head size {sizes.head_dim}"
        )
    file, entries = files.file, files.stored
    if _TENSOR not in entries:
        raise AdapterError(f"has no tensor {_TENSOR!r}, in which PEFT saves virtual tokens", file=file)
    if len(entries) > 1:
        other = next(name for name in entries if name != _TENSOR)
        raise AdapterError(f"tensor {other!r} is not supported beside {_TENSOR!r}", file=file)
    if (actual := entries[_TENSOR].shape) != shape:
        raise AdapterError(
            f"tensor {_TENSOR!r} has shape {list(actual)}, but the model needs {list(shape)}: {meaning}", file=file
        )
    return count
