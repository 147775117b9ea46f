"""Reads CTranslate2's ``model.bin`` and converts Whisper models to the names of transformers.

The layout, binary versions 4 to 6: named tensors, each after its own header, then aliases
(``ctranslate2/specs/model_spec.py``).
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from octavo.core.dtypes import DTYPES, Stored
from octavo.core.errors import UnsupportedModelError, WeightError
from octavo.core.files import MAX_TOKENIZER, read_object
from octavo.loader.files import MODEL_NAME

_VERSIONS = (4, 5, 6)
#: By CTranslate2's number of a type.
_TYPES = ("F32", "I8", "I16", "I32", "F16", "BF16")
_MAX_TENSORS = 1 << 17
_MAX_RANK = 8


@dataclass(frozen=True)
class CTranslate2File:
    """The headers of a file."""

    path: Path
    version: int
    spec: str
    revision: int
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]

    def tensor(self, name: str) -> Stored:
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            raise WeightError(f"{self.path} lacks the tensor {name!r}")
        return self.tensors[name]

    def integer(self, name: str, default: int | None = None) -> int:
        """The value of a tensor that is one integer; ``default`` if the file lacks it."""
        if default is not None and name not in self.tensors:
            return default
        stored = self.tensor(name)
        if stored.dtype not in ("I8", "I16", "I32") or stored.shape:
            raise WeightError(f"tensor {name!r} in {self.path} is {stored.dtype} {list(stored.shape)}, not one integer")
        with self.path.open("rb") as file:
            file.seek(stored.offset)
            return int.from_bytes(file.read(stored.nbytes), "little", signed=True)


def read_ctranslate2(path: Path) -> CTranslate2File:
    """Reads the headers of a file and none of its tensors."""
    with path.open("rb") as file:
        reader = _Reader(path, file)
        (version,) = reader.unpack("<I", "its version")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{path} has the binary version {version}; versions {_VERSIONS[0]} to {_VERSIONS[-1]} are read: "
                "convert the model with a current CTranslate2"
            )
        spec = reader.text("its kind of model")
        (revision, count) = reader.unpack("<II", "the number of its tensors")
        if count > _MAX_TENSORS:
            raise WeightError(f"{path} says that it has {count} tensors; at most {_MAX_TENSORS} are read")
        tensors: dict[str, Stored] = {}
        for number in range(count):
            name = reader.text(f"the name of tensor {number}")
            if name in tensors:
                raise WeightError(f"tensor {name!r} occurs twice in {path}")
            tensors[name] = reader.tensor(name)
        aliases: dict[str, str] = {}
        (count,) = reader.unpack("<I", "the number of other names")
        if count > _MAX_TENSORS:
            raise WeightError(f"{path} says that it has {count} other names; at most {_MAX_TENSORS} are read")
        for number in range(count):
            other, name = reader.text(f"other name {number}"), reader.text(f"what other name {number} stands for")
            if name not in tensors:
                raise WeightError(f"{path} calls {name!r} also {other!r}, and has no such tensor")
            aliases[other] = name
        return CTranslate2File(path, version, spec, revision, tensors, aliases)


class _Reader:
    """Reads values in sequence, within the bounds of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size

    def unpack(self, form: str, what: str) -> tuple[int, ...]:
        length = struct.calcsize(form)
        if len(data := self._file.read(length)) < length:
            raise WeightError(f"{self._path} is truncated: it ends before {what}")
        return struct.unpack(form, data)

    def text(self, what: str) -> str:
        (length,) = self.unpack("<H", what)
        data = self._file.read(length)
        if len(data) < length:
            raise WeightError(f"{self._path} is truncated: it ends before {what}")
        try:
            if not data.endswith(b"\0"):
                raise ValueError
            return data[:-1].decode("utf-8")
        except ValueError:
            raise WeightError(f"{self._path} is damaged: {what} is {data[:40]!r}, not a text that ends in 0") from None

    def tensor(self, name: str) -> Stored:
        (rank,) = self.unpack("<B", f"the shape of {name!r}")
        if rank > _MAX_RANK:
            raise WeightError(f"{self._path} is damaged: tensor {name!r} has {rank} dimensions")
        shape = self.unpack(f"<{rank}I", f"the shape of {name!r}")
        kind, length = self.unpack("<BI", f"the type of {name!r}")
        if kind >= len(_TYPES):
            raise WeightError(f"{self._path} is damaged: tensor {name!r} is of type {kind}, which does not exist")
        dtype, offset = _TYPES[kind], self._file.tell()
        if math.prod(shape) * DTYPES[dtype].itemsize != length:
            raise WeightError(f"tensor {name!r} in {self._path} is {dtype} {list(shape)} in {length} bytes")
        if offset + length > self._size:
            raise WeightError(
                f"{self._path} is truncated: tensor {name!r} ends at byte {offset + length}, the file at {self._size}"
            )
        self._file.seek(length, 1)
        return Stored(dtype, shape, offset)


# Whisper

_SPEC = "WhisperSpec"
_EMBEDDING = "decoder/embeddings/weight"
#: Tensors outside layers, without the endings "weight" and "bias".
_TOP = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/layer_norm": "model.decoder.layer_norm",
}
#: Of a layer; several names divide the rows of a tensor equally.
_LAYER: dict[str, tuple[str, ...]] = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_ENDINGS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
#: Settings stored as tensors -> the supported value; None: any.
_FACTS: dict[str, int | None] = {
    **dict.fromkeys(("encoder/num_heads", "decoder/num_heads")),
    **dict.fromkeys(("decoder/alignment_heads", "decoder/alignment_layer")),
    **dict.fromkeys(("decoder/start_from_zero_embedding", "decoder/scale_embeddings", "decoder/alibi"), 0),
    **{"decoder/pre_norm": 1, "decoder/activation": 3},  # GELU
}
#: The ids of languages lie between those of the second and the tasks.
_END, _START = "<|endoftext|>", "<|startoftranscript|>"
_TASKS = ("translate", "transcribe")
_NEEDED = (_END, _START, "<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|notimestamps|>")
#: The end token of multilingual models; that of English models is one less.
_MULTILINGUAL_END = 50257


def whisper_tensors(path: Path) -> dict[str, Stored]:
    """The weights by transformers' names; a fused tensor becomes one for each projection, over the same bytes."""
    file = _checked(path)
    tensors: dict[str, Stored] = {}
    for name, stored in file.tensors.items():
        if name in _FACTS:
            continue
        if name.endswith(("_scale", "_zero")) or stored.dtype in ("I8", "I16", "I32"):
            raise UnsupportedModelError(
                f"{path} is quantized: tensor {name!r}; convert the model with --quantization float16 or without"
            )
        tensors |= dict(_renamed(name, stored, path))
    return dict(sorted(tensors.items(), key=lambda item: item[1].offset))


def _checked(path: Path) -> CTranslate2File:
    file = read_ctranslate2(path)
    if file.spec != _SPEC:
        raise UnsupportedModelError(f"{path} holds a model of CTranslate2 of the kind {file.spec!r}; {_SPEC!r} is read")
    for name, value in _FACTS.items():
        if value is not None and file.integer(name, value) != value:
            raise UnsupportedModelError(f"{path} has {name} = {file.integer(name)}; Whisper models have {value}")
    return file


def _renamed(name: str, stored: Stored, path: Path) -> Iterator[tuple[str, Stored]]:
    base, _, ending = name.rpartition("/")
    if name in _TOP:
        yield _TOP[name], stored
        return
    parts = base.split("/", 2)
    if ending in _ENDINGS and base in _TOP:
        yield f"{_TOP[base]}.{_ENDINGS[ending]}", stored
    elif ending in _ENDINGS and len(parts) == 3 and parts[1].startswith("layer_") and parts[2] in _LAYER:
        names = _LAYER[parts[2]]
        count = len(names)
        if count > 1 and (not stored.shape or stored.shape[0] % count):
            raise WeightError(f"tensor {name!r} in {path} is {list(stored.shape)}, not rows of {count} projections")
        shape = (stored.shape[0] // count, *stored.shape[1:]) if count > 1 else stored.shape
        for index, target in enumerate(names):
            # Keys have no bias; a fused bias has zeros for them.
            if not (ending == "bias" and target.endswith("k_proj")):
                part = replace(stored, shape=shape, offset=stored.offset + index * (stored.nbytes // count))
                yield f"model.{parts[0]}.layers.{parts[1][6:]}.{target}.{_ENDINGS[ending]}", part
    else:
        raise WeightError(f"tensor {name!r} in {path} is none of a Whisper model")


def write_whisper_folder(source: Path, folder: Path) -> None:
    """Writes config.json and generation_config.json for transformers from the CTranslate2 model in ``source``.

    tokenizer.json is copied, the weights are linked.
    """
    file = _checked(source / MODEL_NAME)
    tokenizer = source / "tokenizer.json"
    if not tokenizer.is_file():
        raise WeightError(f"{tokenizer} is missing; a folder of CTranslate2 has {MODEL_NAME}, config.json and it")
    added = read_object(tokenizer, WeightError, MAX_TOKENIZER).get("added_tokens")
    ids = {str(t["content"]): int(t["id"]) for t in added} if isinstance(added, list) else {}
    if missing := [name for name in _NEEDED if name not in ids]:
        raise WeightError(f"{tokenizer} is not Whisper's: it lacks the token {missing[0]}")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids[_END])
    special["decoder_start_token_id"] = ids[_START]
    (folder / "config.json").write_text(json.dumps(_network_facts(file) | special, indent=2), encoding="utf-8")
    raw = read_object(source / "config.json", WeightError)
    # English models have the tokens of languages and tasks too, but are not trained with them.
    is_multilingual = ids[_END] == _MULTILINGUAL_END
    generation: dict[str, Any] = {
        "suppress_tokens": raw.get("suppress_ids", []),
        "begin_suppress_tokens": raw.get("suppress_ids_begin", []),
        "alignment_heads": raw.get("alignment_heads"),
        "is_multilingual": is_multilingual,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
    }
    if is_multilingual:
        languages = (name for name, token in ids.items() if ids[_START] < token < ids["<|translate|>"])
        generation["lang_to_id"] = {name: ids[name] for name in languages}
        generation["task_to_id"] = {name: ids[f"<|{name}|>"] for name in _TASKS}
    generation |= special
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    (folder / MODEL_NAME).symlink_to((source / MODEL_NAME).resolve())


def _network_facts(file: CTranslate2File) -> dict[str, Any]:
    """The network's settings, by the shapes of the tensors."""
    vocab_size, hidden = file.tensor(_EMBEDDING).shape
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        numbers = {name.split("/")[1] for name in file.tensors if name.startswith(f"{side}/layer_")} - {"layer_norm"}
        sides[f"{side}_layers"] = len(numbers)
        sides[f"{side}_attention_heads"] = file.integer(f"{side}/num_heads")
        sides[f"{side}_ffn_dim"] = file.tensor(f"{side}/layer_0/ffn/linear_0/weight").shape[0]
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return {
        **{"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
        **{"d_model": hidden, "vocab_size": vocab_size},
        "num_mel_bins": file.tensor("encoder/conv1/weight").shape[1],
        "max_source_positions": file.tensor("encoder/position_encodings/encodings").shape[0],
        "max_target_positions": file.tensor("decoder/position_encodings/encodings").shape[0],
        **{"activation_function": "gelu", "scale_embedding": False, "is_encoder_decoder": True},
        "tie_word_embeddings": True,
        "torch_dtype": dtypes.get(file.tensor(_EMBEDDING).dtype, "float32"),
        **sides,
    }
