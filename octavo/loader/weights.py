"""The model loader (get_model in vLLM): weights of safetensors, CTranslate2 or GGUF files, or random ones.

Tensors are loaded one by one. Files are memory-mapped, and remapped every few MB: the pages of a mapping count as the
process's memory until the layers have packed its tensors and it is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import mmap
import re
import sys
import time
import zlib
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from octavo.config.engine_config import EngineConfig
from octavo.core.dtypes import DTYPES, DType, Stored, rounded
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.core.files import read_object
from octavo.core.garbage import return_freed_memory
from octavo.core.model_config import ModelConfig
from octavo.core.outputs import DenseConfig
from octavo.kernels.weight_rows import GGUFRows, QuantizedRows
from octavo.layers.layer import Layer, LayerContext
from octavo.loader.ctranslate2 import whisper_tensors
from octavo.loader.files import MODEL_NAME, is_ctranslate2
from octavo.loader.misfits import Fields
from octavo.loader.quantized import with_unpacking
from octavo.loader.resolve import gguf_source
from octavo.models.checkpoint import (
    CheckpointEntry,
    Drop,
    Pairs,
    Rename,
    Shapes,
    SplitError,
    Tensor,
    ZerosFor,
    without_values,
)
from octavo.models.config_files import ConfigReader, read_json, read_model_config
from octavo.models.draft_head import PublishedHead
from octavo.models.eagle import EagleConfig, EagleMethod, fit_to, read_eagle_config
from octavo.models.network import Network, build_rank_without_weights, build_without_weights
from octavo.models.registry import make_network
from octavo.process.startup import GIB, LOADING

if TYPE_CHECKING:
    from octavo.models.gemma4_assistant import AssistantConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOATS = ("float32", "bfloat16", "float16")
_MAX_INDEX_BYTES = 64 << 20
#: Of a safetensors file, as the library has it.
_MAX_HEADER = 100_000_000
#: Types that safetensors knows and that are not read.
_OTHER_TYPES = (
    "C64",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F8_E8M0",
    "U16",
    "U32",
    "U64",
)
_PICKLES = ("*.bin", "*.pt", "*.pth")
#: A file is remapped after this many bytes.
_MAPPED_BYTES = 16 << 20
#: Bytes of a piece in checks of values.
_PIECE = 8 << 20
_BAR_DELAY = 1.0  # seconds
logger = logging.getLogger("octavo")


def load_model(folder: Path, config: ModelConfig, context: LayerContext, gguf: Path | None = None) -> Network:
    """Builds the network of ``config`` and loads this rank's share of the weights in ``folder``, or in ``gguf``.

    Weights are converted to ``context.dtype``, and matrices quantised by ``context.quantization``. They keep their bits
    where that is "gguf", or the name of ``config.quantization`` and the kernels compute with such bits. Tables of
    positions have ``context.positions`` rows, by default ``config.max_position``.

    Raises:
        UnsupportedModelError: there is no network for the architecture, or the GGUF file is for another network.
        ConfigError: the configuration contradicts itself or the tensor-parallel size; or quantization is "gguf" and
            there is no such file.
        WeightError: the checkpoint is incomplete, damaged or does not fit the configuration.
    """
    before: list[CheckpointEntry] = []
    if gguf is None and context.quantization != "gguf":
        config, before = with_stored_head(config, folder)
    network = make_network(config, context)
    if network.load_itself(None):
        return network
    whole = network if context.layers is None else build_rank_without_weights(config, replace(context, layers=None))
    shapes = whole.tensor_shapes()
    entries = [*before, *network.entries()]
    tensors: Generator[tuple[str, Tensor]]
    if gguf is not None:
        from octavo.loader.projector import GGUFWeights

        # A folder of such a model is said to be bfloat16, as values of some exceed float16.
        stored = DType.FLOAT32 if context.dtype is DType.FLOAT32 else DType.BFLOAT16
        dtype = None if context.quantization == "gguf" else stored
        names = {name for name, _, _ in network.tensors()}
        checkpoint = GGUFWeights(gguf, folder, config, shapes, entries)
        if context.tp_rank == 0 and (context.layers is None or not context.layers.start):
            form_of = context.kernels.form_of if dtype is None else lambda kind: None
            logger.info(checkpoint.language.file.describe(form_of, context.dtype))
        mapped = {weight.name for weight in network.weights() if weight.is_mapped}
        tensors = checkpoint.read(names, entries, dtype, mapped)
        size = sum(part.stat().st_size for part in checkpoint.paths)
    elif context.quantization == "gguf":
        raise ConfigError(f"quantization='gguf' needs a model in a GGUF file; {folder} was not made from one")
    else:
        if config.quantization is not None:
            own = context.quantization == config.quantization.name

            def keep(rows: QuantizedRows) -> bool:
                return own and context.kernels.has_products(rows)

            headers = read_headers(folder)
            entries = with_unpacking(entries, config.quantization, headers, shapes, context.dtype, keep)
        refuse_misfits(folder, config, entries, shapes)
        tensors = read_safetensors(folder)
        size = sum(file.stat().st_size for file in _files(folder))
    with closing(tensors):
        pairs: Pairs = _with_progress(tensors, size, context)
        for entry in entries:
            pairs = entry.apply(pairs, shapes)
        load_weights(network, pairs, shapes)
    return network


def _with_progress(tensors: Pairs, size: int, context: LayerContext) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; the first rank shows a progress bar on a terminal, and logs lines elsewhere.

    The log's lines are the status of a server that starts. Nothing is shown in the first second.
    """
    if context.tp_rank or (context.layers is not None and context.layers.start):
        yield from tensors
        return
    from tqdm import tqdm

    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": _BAR_DELAY, "leave": False}
    is_shown = sys.stderr.isatty()
    read, reported, begun = 0, 0, time.monotonic()
    with tqdm(total=size, desc=LOADING, disable=not is_shown, **options) as bar:
        for name, tensor in tensors:
            yield name, tensor
            values = tensor.rows if isinstance(tensor, GGUFRows) else tensor
            read = min(read + getattr(values, "nbytes", 0), size)  # values of a GGUF file are wider in memory
            bar.update(read - bar.n)
            if not is_shown and read >= reported + size / 10 and time.monotonic() > begun + _BAR_DELAY:
                reported = read
                logger.info("%s: %.0f %% of %.2f GiB", LOADING, 100 * read / size, size / GIB)


def make_dummy_model(config: ModelConfig, context: LayerContext, seed: int) -> Network:
    """The network of ``config`` with random weights (see ``dummy_weights``), quantised by ``context.quantization``."""
    if context.quantization == "gguf":
        raise ConfigError("quantization='gguf' computes with a GGUF file's own bits; load_format='dummy' has no file")
    network = make_network(config, context)
    if network.load_itself(seed):
        return network
    shapes = network.tensor_shapes() if context.quantization == "mxfp4" else {}
    # The matrices that checkpoints have in that form.
    experts = {name: shape for name, shape in shapes.items() if ".experts." in name and len(shape) == 2}
    # The second iterator takes the tensors that are not loaded when it begins.
    load_weights(network, chain(_random_mxfp4(experts, seed), dummy_weights(network, context.dtype, seed)))
    return network


def _random_mxfp4(shapes: Shapes, seed: int) -> Iterator[tuple[str, GGUFRows]]:
    """Random codes, whose mean square is 8.56, with the scale that gives about the variance 1 / columns."""
    for name, (rows, columns) in shapes.items():
        generator = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
        blocks = generator.integers(0, 256, (rows, columns // 32, 17), np.uint8)
        blocks[..., 0] = 127 - round(math.log2(8.56 * columns) / 2)
        yield name, GGUFRows("MXFP4", blocks.reshape(rows, -1), columns, 32)


def dummy_weights(network: Layer, dtype: DType, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """A random (name, tensor) of ``dtype`` for each tensor that ``network`` expects.

    A matrix is uniform around 0 with variance 1 / inputs, which preserves the magnitude of activations: they stay
    finite, and logits are about normal, as in a trained network. Norms and single numbers are 1, biases 0. Each tensor
    depends only on ``seed``, its name and its shape.
    """
    expected = [(name, layer.expected[shard]) for name, layer, shard in network.tensors()]
    for name, shape in expected:
        if len(shape) <= 1:
            yield name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype.numpy)
            continue
        generator = np.random.default_rng(zlib.crc32(f"{seed} {name}".encode()))
        values = generator.random(shape, np.float32)
        values -= np.float32(0.5)
        values *= np.float32(2 * math.sqrt(3.0 / shape[-1]))
        yield name, rounded(values, dtype)


def load_weights(network: Layer, tensors: Pairs, other_stages: Container[str] = ()) -> None:
    """Loads all weights of a network from (name, whole tensor) pairs, in any order.

    Tensors in ``other_stages`` (of other pipeline stages) are skipped if no layer here expects them.

    Raises:
        WeightError: a tensor is missing, unexpected, duplicate, or of the wrong shape or type; the message names it.
    """
    expected = {name: (layer, shard) for name, layer, shard in network.tensors()}
    shapes = {name: layer.expected[shard] for name, (layer, shard) in expected.items()}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in expected and name in other_stages:
            continue
        if problem := tensor_problem(name, tensor, shapes, seen):
            raise WeightError(f"tensor {name!r} {problem}")
        layer, shard = expected[name]
        try:
            layer.load(shard, tensor)
        except WeightError as e:
            raise WeightError(f"tensor {name!r}: {e}") from None
        seen.add(name)
    if missing := [name for name in expected if name not in seen]:
        raise missing_tensors(missing)


def tensor_problem(name: str, tensor: Tensor, shapes: Shapes, seen: Container[str]) -> str | None:
    """The reason why a tensor cannot be loaded, or None; ``seen`` are the names of earlier tensors."""
    if name not in shapes:
        return "belongs to no layer of this network"
    if name in seen:
        return "occurs twice"
    if isinstance(tensor, np.ndarray) and tensor.dtype.name not in _FLOATS:
        metadata: Mapping[Any, Any] = tensor.dtype.metadata or {}
        return f"is of type {metadata.get('name', tensor.dtype)}; expected float32, bfloat16 or float16"
    if tuple(tensor.shape) != shapes[name]:
        return f"does not fit: its shape is {list(tensor.shape)}, expected {list(shapes[name])}"
    return None


def missing_tensors(names: Sequence[str], hint: str = "") -> WeightError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return WeightError(f"the checkpoint lacks the tensors {', '.join(names[:3])}{more}{hint}")


def read_headers(folder: Path) -> dict[str, Stored]:
    """All tensors of ``read_safetensors`` by name, without their values."""
    headers: dict[str, Stored] = {}
    for file, expected in _files(folder).items():
        with _errors_of(file):
            tensors = _stored(file, expected)
        if twice := headers.keys() & tensors.keys():
            raise WeightError(f"tensor {min(twice)!r} occurs twice")
        headers |= tensors
    return headers


def read_safetensors(folder: Path) -> Generator[tuple[str, np.ndarray]]:
    """The (name, tensor) pairs of model.safetensors, or of the files that model.safetensors.index.json names.

    Without these, those of CTranslate2's model.bin under the names of transformers. A tensor is a view of the mapped
    file, which stays mapped while one of its tensors is held.

    Raises:
        WeightError: a file is missing, truncated or no safetensors file, or lacks a tensor of the index.
    """
    for file, expected in _files(folder).items():
        with _errors_of(file):
            yield from _tensors(file, _stored(file, expected))


def _stored(file: Path, expected: set[str]) -> dict[str, Stored]:
    """The tensors in a file, in their order there; must include ``expected``."""
    if file.name == MODEL_NAME:
        return whisper_tensors(file)
    stored = read_header(file)
    if absent := expected.difference(stored):
        raise WeightError(f"{file} lacks the tensor {min(absent)!r} that {INDEX_FILE} says it holds")
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file in the order of their data; SafetensorError if it is damaged."""
    try:
        with safe_open(file, framework="np"):  # checks that sizes and offsets fit each other and the file
            pass
    except SafetensorError:
        _refuse_unknown_types(file)
        raise
    header, length = _header(file)
    stored = {
        name: Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return dict(sorted(stored.items(), key=lambda item: item[1].offset))


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file by name, and the bytes of the header after its length."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(min(length, _MAX_HEADER)))
    header.pop("__metadata__", None)
    return header, length


def _refuse_unknown_types(file: Path) -> None:
    """Names the first tensor whose type safetensors does not know, if that is what is wrong with a file."""
    unknown: list[tuple[str, str]] = []
    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):  # another damage
        types = [(name, entry.get("dtype")) for name, entry in _header(file)[0].items()]
        known = {*DTYPES, *_OTHER_TYPES}
        unknown = [(name, dtype) for name, dtype in types if isinstance(dtype, str) and dtype not in known]
    if unknown:
        name, dtype = unknown[0]
        supported = ", ".join(DTYPES)
        raise WeightError(f"tensor {name!r} is of type {dtype}, which is unknown; supported: {supported}", file=file)


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as e:
        raise WeightError(f"{file} is truncated or no safetensors file: {e}") from None
    except OSError as e:
        raise WeightError(f"{file} cannot be read: {e}") from None


def _tensors(file: Path, stored: Mapping[str, Stored]) -> Iterator[tuple[str, np.ndarray]]:
    mapping, mapped = None, 0
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPES:
            raise WeightError(f"tensor {name!r} is of type {tensor.dtype}, which is not supported")
        if mapping is None or mapped > _MAPPED_BYTES:
            with file.open("rb") as opened:
                mapping, mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), 0
            if hasattr(mmap, "MADV_WILLNEED"):  # reads ahead
                page = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapping.madvise(mmap.MADV_WILLNEED, page, min(2 * _MAPPED_BYTES, len(mapping) - page))
            # An aligned matrix does not fit into the chunk that the C library keeps of a freed one of its size.
            return_freed_memory()
        mapped += tensor.nbytes
        count = math.prod(tensor.shape)
        flat = np.frombuffer(mapping, DTYPES[tensor.dtype], count, tensor.offset) if count else np.empty(0)
        values = flat.astype(DTYPES[tensor.dtype], copy=False).reshape(tensor.shape)
        yield name, values if values.flags.aligned else values.copy()
        del flat, values


def _files(folder: Path) -> dict[Path, set[str]]:
    """The checkpoint's files, each with the tensors that the index lists for it."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: set()}
    if (folder / INDEX_FILE).is_file():
        return _indexed_files(folder)
    if is_ctranslate2(folder / MODEL_NAME):
        return {folder / MODEL_NAME: set()}
    if len(others := [*folder.glob("*.safetensors")]) == 1:  # such as AutoGPTQ's gptq_model-4bit-128g.safetensors
        return {others[0]: set()}
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise WeightError(
            f"{folder} holds {pickles[0]} but no safetensors: such files are pickles, which can run code and are never "
            "loaded; convert the checkpoint: transformers' from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise WeightError(
        f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; for measurements load_format='dummy' needs no weights"
    )


def _indexed_files(folder: Path) -> dict[Path, set[str]]:
    index = folder / INDEX_FILE
    weight_map = read_object(index, WeightError, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightError(f"{index} is no index: expected a JSON object with weight_map, tensor to file")
    files: dict[Path, set[str]] = {}
    for tensor, file in ((tensor, str(file)) for tensor, file in weight_map.items()):
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise WeightError(f"{index} puts {tensor!r} into {file!r}: expected the name of a file in the same folder")
        if not file.endswith(".safetensors"):
            raise WeightError(f"{index} puts {tensor!r} into {file!r}: expected a .safetensors file")
        files.setdefault(folder / file, set()).add(tensor)
    for path in files:
        if not path.is_file():
            raise WeightError(f"{path} is missing; {INDEX_FILE} names it")
    return files


# The language-model head of a checkpoint, where its config.json says something else

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
#: The usual names of the head in files.
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out)\.")
#: What the names of a quantised matrix's bits end in.
_PACKED = (".qweight", ".weight_packed")
#: First parts of the names in a language model's checkpoint, which a base model's lack.
_PREFIXES = ("gpt_neox", "language_model", "model", "transformer")


def with_stored_head(config: ModelConfig, folder: Path) -> tuple[ModelConfig, list[CheckpointEntry]]:
    """The configuration with the head of the checkpoint, and entries to put before the network's checkpoint map.

    As in transformers 5 with ``tie_word_embeddings`` true: a head in the file that differs from the embedding is kept,
    one with the same values is shared, and one without an embedding beside it serves as both.
    """
    if not config.tie_word_embeddings or config.head != "lm" or config.model_impl != "octavo":
        return config, []
    headers = read_headers(folder)
    head, embedding = _stored_names(config, headers)
    if head is None:
        if any(name.endswith(_PACKED) and "lm_head." in name for name in headers):
            return replace(config, tie_word_embeddings=False), []
        # A base model has no bias of the head either; that of a language model that is made of it is zero.
        is_base = config.encoder_facts is None and not any("lm_head." in name for name in headers)
        return config, [ZerosFor(r"^lm_head\.bias$")] if is_base else []
    if embedding is None:
        return config, [Rename(rf"^{re.escape(head)}$", _EMBEDDING)]
    if headers[head].shape == headers[embedding].shape and _are_equal(folder, head, embedding):
        return config, []
    return replace(config, tie_word_embeddings=False), []


def read_config(folder: Path, options: EngineConfig) -> ModelConfig:
    """The configuration of the model in ``folder``, with the head that its weights have, and without vision if prompts
    may have no images.

    Raises:
        WeightError: the weights lack the head of a language model.
    """
    gguf = gguf_source(options.model, options.revision)
    if options.model_impl == "transformers" and gguf is not None:
        raise ConfigError(f"model_impl='transformers' reads folders with safetensors; {gguf} is a GGUF file")
    config = read_model_config(folder, options.hf_overrides, options.model_impl, options.trust_remote_code)
    if (options.limit_mm_per_prompt or {}).get("image") == 0:
        config = replace(config, image_facts=None)
    if config.model_impl != "octavo" or config.head != "lm" or options.load_format == "dummy" or gguf is not None:
        return config
    try:
        headers = read_headers(folder)
    except WeightError:  # no weights, or none that can be read: loading them says why
        return config
    if not config.tie_word_embeddings:
        return _without_missing_head(config, folder, headers, options.task)
    if not any(map(_HEADS.search, headers)):
        return config
    stored, _ = with_stored_head(config, folder)
    if not stored.tie_word_embeddings:
        _warn_once(
            f"{folder}: the checkpoint has a language-model head (lm_head) that differs from the embedding; it is "
            "used, although config.json has tie_word_embeddings=true"
        )
    return stored


def _without_missing_head(config: ModelConfig, folder: Path, headers: Mapping[str, Stored], task: str) -> ModelConfig:
    """The configuration of a decoder, without a head if its files have none and are to make vectors.

    So is a base model under the name of its language model, such as Qwen3-Embedding-8B.
    """
    if config.encoder_facts is not None or any(map(_HEADS.search, headers)):
        return config
    if _stored_names(config, headers)[0] is not None:
        return config
    is_base = not any(name.partition(".")[0] in _PREFIXES for name in headers)
    if task in ("generate", "score") or (task == "auto" and not is_base and not config.pooler.is_from_files):
        raise WeightError(
            "the checkpoint lacks the language-model head 'lm_head.weight', and config.json has "
            "tie_word_embeddings=false, so that the embedding does not take its place; without a head a model makes "
            "vectors (task='embed')",
            file=folder,
        )
    return replace(config, head="none")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def _stored_names(config: ModelConfig, headers: Mapping[str, Stored]) -> tuple[str | None, str | None]:
    """The checkpoint's names of the head's and the embedding's matrix, or None."""
    network = build_without_weights(replace(config, tie_word_embeddings=False), "float32")
    names = dict[str, str]()
    for stored, name in _renamed(headers, network.entries(), network.tensor_shapes()):
        if name in (_HEAD, _EMBEDDING):
            names.setdefault(name, stored)
    return names.get(_HEAD), names.get(_EMBEDDING)


def _renamed(names: Iterable[str], entries: Sequence[CheckpointEntry], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """(name in the file, name after the renaming of the entries) of the tensors that are not dropped."""
    for stored in names:
        name = stored
        for entry in entries:
            if isinstance(entry, Rename):
                name = entry.renamed(name)
            elif isinstance(entry, Drop) and name not in shapes and re.search(entry.pattern, name):
                break
        else:
            yield stored, name


def _are_equal(folder: Path, *names: str) -> bool:
    """Whether two tensors of one shape have the same values, apart from rounding to their types."""
    first, second = (tensor for name, tensor in read_safetensors(folder) if name in names)
    rows = max(1, _PIECE // max(1, first[:1].nbytes))
    for start in range(0, len(first), rows):
        one, other = first[start : start + rows], second[start : start + rows]
        if one.dtype != other.dtype:
            one, other = one.astype(np.float32), other.astype(np.float32)
        if not np.array_equal(one, other):
            return False
    return True


@dataclass(frozen=True)
class Problem:
    """A problem of a tensor, or of the checkpoint if ``tensor`` is None."""

    tensor: str | None
    problem: str


@dataclass(frozen=True)
class CheckReport:
    tensors: int
    size_bytes: int
    problems: list[Problem]


def refuse_misfits(folder: Path, config: ModelConfig, entries: Sequence[CheckpointEntry], shapes: Shapes) -> None:
    """Compares the headers of a checkpoint with the ``shapes`` of the whole network.

    Raises:
        WeightError: tensors are missing, unexpected, repeated, misshapen or of a type that is not read. The message
            names the tensor, and the fields of config.json that it contradicts.
    """
    missing, hint = [], ""
    for problem in _header_problems(folder, read_headers(folder), config, entries, shapes):
        if problem.tensor is not None and problem.problem.startswith(_MISSING):
            missing.append(problem.tensor)
            hint = problem.problem.removeprefix(_MISSING)
        else:
            raise WeightError(
                problem.problem if problem.tensor is None else f"tensor {problem.tensor!r} {problem.problem}"
            )
    if missing:
        raise missing_tensors(missing, hint)


def check_headers(folder: Path, config: ModelConfig, gguf: Path | None = None) -> None:
    """Compares the headers of the weights in ``folder``, or in ``gguf``, with the network; reads no weights but a head.

    Raises:
        WeightError, UnsupportedModelError: a tensor is missing, unexpected, repeated or of a wrong shape.
    """
    before: list[CheckpointEntry] = []
    if gguf is None:
        config, before = with_stored_head(config, folder)
    network = build_without_weights(config, "float32")
    shapes = network.tensor_shapes()
    if gguf is not None:
        from octavo.loader.projector import GGUFWeights

        GGUFWeights(gguf, folder, config, shapes, network.entries())
        return
    entries: Sequence[CheckpointEntry] = [*before, *network.entries()]
    if config.quantization is not None:
        entries = with_unpacking(entries, config.quantization, read_headers(folder), shapes, DType.FLOAT32)
    refuse_misfits(folder, config, entries, shapes)


def check_model(folder: Path, config: ModelConfig, gguf: Path | None = None) -> CheckReport:
    """All problems of the weights in ``folder``, or in ``gguf``; reads all of them, a few MB at a time.

    Of a quantised checkpoint, the tensors of matrices are compared, and scales and plain weights must be finite.
    """
    problems: list[Problem] = []
    tensors = size = 0
    try:
        before: list[CheckpointEntry] = []
        if gguf is None:
            config, before = with_stored_head(config, folder)
        network = build_without_weights(config, "float32")
        shapes = network.tensor_shapes()
        if gguf is None:
            stored = read_headers(folder)
            entries: Sequence[CheckpointEntry] = [*before, *network.entries()]
            if config.quantization is not None:
                entries = with_unpacking(entries, config.quantization, stored, shapes, DType.FLOAT32)
            if config.model_impl == "octavo":  # the names that transformers expects are its own
                problems += _header_problems(folder, stored, config, entries, shapes)
            pairs: Iterator[tuple[str, np.ndarray]] = read_safetensors(folder)
        else:
            from octavo.loader.projector import GGUFWeights

            pairs = GGUFWeights(gguf, folder, config, shapes, network.entries()).values()
        for name, tensor in pairs:
            tensors, size = tensors + 1, size + tensor.nbytes
            if tensor.dtype.kind in "iub" or not tensor.size:
                continue
            flat, step = tensor.reshape(-1), max(1, _PIECE // tensor.itemsize)
            pieces = (flat[start : start + step] for start in range(0, len(flat), step))
            if bad := sum(piece.size - int(np.isfinite(piece).sum()) for piece in pieces):
                problems.append(Problem(name, f"{bad} of {tensor.size} values are infinite or not a number"))
    except (WeightError, UnsupportedModelError) as e:
        problems.append(Problem(None, str(e)))
    return CheckReport(tensors, size, problems)


_MISSING = "is missing"


def _header_problems(
    folder: Path,
    stored: Mapping[str, Stored],
    config: ModelConfig,
    entries: Sequence[CheckpointEntry],
    shapes: Shapes,
) -> Iterator[Problem]:
    """Passes tensors without values through the checkpoint map and compares the results with the network."""
    pairs: Pairs = ((name, _header_of(entry)) for name, entry in stored.items())
    for entry in entries:
        pairs = entry.apply(pairs, shapes)
    seen: set[str] = set()
    hints: _Hints | None = None  # most checkpoints need none
    try:
        for name, tensor in pairs:
            if problem := tensor_problem(name, tensor, shapes, seen):
                hints = hints or _Hints(folder, stored, config, entries, shapes)
                yield Problem(hints.stored_names.get(name, name), problem + hints.of(name, tensor))
            seen.add(name)
    except WeightError as e:  # an entry cannot split or join a tensor
        hints = hints or _Hints(folder, stored, config, entries, shapes)
        yield Problem(None, str(e) + hints.of_entry(e))
        return
    for name in shapes:
        if name not in seen:
            hints = hints or _Hints(folder, stored, config, entries, shapes)
            yield Problem(name, f"{_MISSING}: {hints.layers}" if hints.layers and _LAYER.search(name) else _MISSING)


class _Hints:
    """What config.json says of the tensors of a checkpoint that do not fit."""

    def __init__(
        self,
        folder: Path,
        stored: Mapping[str, Stored],
        config: ModelConfig,
        entries: Sequence[CheckpointEntry],
        shapes: Shapes,
    ) -> None:
        file = folder / "config.json"
        self._fields = Fields.of_json(config, read_json(file) if file.is_file() else {})
        self._architecture, self._shapes = config.architecture, shapes
        #: The file's names by those of the network.
        self.stored_names = {name: original for original, name in _renamed(stored, entries, shapes)}
        self.layers = self._fields.layers(self.stored_names, shapes)

    def of_entry(self, error: WeightError) -> str:
        """For a tensor that cannot be split or joined."""
        if self.layers:
            return f": {self.layers}"
        return self._fields.explain_rows(error.parts) if isinstance(error, SplitError) else ""

    def of(self, name: str, tensor: Tensor) -> str:
        if name in self._shapes:
            return self._fields.explain(name, tuple(tensor.shape), self._shapes[name])
        if self.layers and _LAYER.search(name):
            return f": {self.layers}"
        return f", which config.json says is {self._architecture} (architectures)"


_LAYER = re.compile(r"\blayers\.\d+\.")


def _header_of(stored: Stored) -> np.ndarray:
    """A stand-in for a tensor; its type remembers the name of one that is not read."""
    if stored.dtype in DTYPES:
        return without_values(stored.shape, DTYPES[stored.dtype])
    return without_values(stored.shape, np.dtype(np.bool_, metadata={"name": stored.dtype}))


class DenseWeights(NamedTuple):
    """Weights of a dense layer after pooling, float32."""

    matrix: np.ndarray
    bias: np.ndarray | None
    #: [outputs, inputs], the projection of the residual.
    residual: np.ndarray | None


def read_dense(folder: Path, dense: DenseConfig) -> DenseWeights:
    """The weights of a dense layer of a model's ``folder``."""
    place = folder / dense.folder
    if not (place / "model.safetensors").is_file():
        raise WeightError(
            f"{place} has no model.safetensors; files of pickles (pytorch_model.bin) are not read: save the model "
            "again with sentence-transformers, which writes safetensors"
        )
    tensors = {name: np.asarray(tensor) for name, tensor in read_safetensors(place)}
    matrix = (dense.outputs, dense.inputs)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": matrix}
    if dense.bias:
        shapes["linear.bias"] = (dense.outputs,)
    if dense.residual and dense.inputs != dense.outputs:
        shapes["residual.weight"] = matrix
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            actual = tensors[name].shape if name in tensors else "missing"
            raise WeightError(f"{place}: tensor {name!r} must have the shape {list(shape)}, and is {actual}")
    weights = {name: tensors[name].astype(np.float32) for name in shapes}
    return DenseWeights(weights["linear.weight"], weights.get("linear.bias"), weights.get("residual.weight"))


# Draft heads with a checkpoint of their own: config.json and headers are read before the model is loaded, the weights
# after it


def read_head_config(folder: Path, method: EagleMethod, target: ModelConfig) -> EagleConfig:
    """The configuration of the EAGLE head in ``folder`` for the model ``target``; no weight is read.

    Raises:
        ConfigError: config.json is missing or impossible, or describes a head for another model.
        UnsupportedModelError: it describes no head of this method.
        WeightError: there are no safetensors, or a tensor is missing, unexpected or of the wrong shape or type.
    """
    config, stored = read_dummy_config(folder, method, target), read_headers(folder)
    names = {name.removeprefix("model.") for name in stored}
    config = replace(
        config,
        fc_bias="fc.bias" in names,
        own_embedding=method == "eagle3" and ("embed_tokens.weight" in names or config.own_embedding),
    )
    _check_head(folder, config, stored)
    return config


def read_dummy_config(folder: Path, method: EagleMethod, target: ModelConfig) -> EagleConfig:
    """As ``read_head_config`` for a folder without weights: the head shares all that it can share."""
    file = folder / "config.json"
    config = fit_to(read_eagle_config(method, ConfigReader(read_json(file), file)), target)
    return replace(config, own_embedding=config.hidden_size != target.hidden_size)


def read_assistant(folder: Path, target: ModelConfig, *, has_weights: bool) -> AssistantConfig:
    """As ``read_head_config`` of an assistant of Gemma 4; without weights, config.json alone is read."""
    from octavo.models.gemma4_assistant import read_assistant_config

    file = folder / "config.json"
    config = read_assistant_config(ConfigReader(read_json(file), file), target)
    if has_weights:
        _check_head(folder, config, read_headers(folder))
    return config


def _check_head(folder: Path, config: ModelConfig, stored: Mapping[str, Stored]) -> None:
    head = build_without_weights(config, "float32")
    assert isinstance(head, PublishedHead)
    refuse_misfits(folder, config, head.checkpoint_map, head.tensor_shapes())
    head.check_token_map(stored.get(head.token_map))


def make_dummy_head(config: ModelConfig, context: LayerContext, seed: int) -> PublishedHead:
    """The head with random weights (see ``dummy_weights``)."""
    head = make_network(config, context)
    assert isinstance(head, PublishedHead)
    load_weights(head, dummy_weights(head, context.dtype, seed))
    head.set_token_map(None)
    return head


def load_head(folder: Path, config: ModelConfig, context: LayerContext) -> PublishedHead:
    """The head in ``folder`` with this rank's share of its weights, of ``context.dtype``."""
    head = make_network(config, context)
    assert isinstance(head, PublishedHead)
    shapes = head.tensor_shapes()
    tensors: Pairs = _without_token_map(folder, head)
    for entry in head.checkpoint_map:
        tensors = entry.apply(tensors, shapes)
    load_weights(head, tensors)
    return head


def _without_token_map(folder: Path, head: PublishedHead) -> Pairs:
    """The tensors of the folder but for the head's ``token_map``, which it is given."""
    for name, tensor in read_safetensors(folder):
        if name == head.token_map:
            head.set_token_map(tensor)
        else:
            yield name, tensor
