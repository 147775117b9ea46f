"""Small Whisper models in CTranslate2's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
HIDDEN, INNER, VOCAB, MELS, SOURCE, TARGET = 8, 16, 51864, 80, 1500, 448
END = 50256


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def model_bytes(
    tensors: Mapping[str, np.ndarray],
    aliases: Mapping[str, str] | None = None,
    spec: str = "WhisperSpec",
    version: int = 6,
) -> bytes:
    parts = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(tensors))]
    for name, tensor in tensors.items():
        parts += [text(name), struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)]
        parts += [struct.pack("<BI", TYPES[tensor.dtype.name], tensor.nbytes), tensor.tobytes()]
    parts.append(struct.pack("<I", len(aliases or {})))
    parts += [text(other) + text(name) for other, name in (aliases or {}).items()]
    return b"".join(parts)


def whisper_arrays(dtype: type = np.float16, seed: int = 0, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (0.1 * rng.standard_normal(shape)).astype(dtype)

    arrays: dict[str, np.ndarray] = {}
    for side, positions in (("decoder", TARGET), ("encoder", SOURCE)):
        arrays[f"{side}/num_heads"] = np.array(2, np.int16)
        arrays[f"{side}/position_encodings/encodings"] = draw(positions, HIDDEN)
        arrays |= {f"{side}/layer_norm/{name}": draw(HIDDEN) for name in ("beta", "gamma")}
        for layer in range(2):
            at = f"{side}/layer_{layer}"
            products = {"self_attention/linear_0": (3 * HIDDEN, HIDDEN), "self_attention/linear_1": (HIDDEN, HIDDEN)}
            norms = ["self_attention", "ffn"]
            if side == "decoder":
                norms.append("attention")
                products |= {f"attention/linear_{i}": (n * HIDDEN, HIDDEN) for i, n in enumerate((1, 2, 1))}
            products |= {"ffn/linear_0": (INNER, HIDDEN), "ffn/linear_1": (HIDDEN, INNER)}
            for name, shape in products.items():
                arrays |= {f"{at}/{name}/bias": draw(shape[0]), f"{at}/{name}/weight": draw(*shape)}
            for name in norms:
                arrays |= {f"{at}/{name}/layer_norm/{part}": draw(HIDDEN) for part in ("beta", "gamma")}
    arrays["decoder/embeddings/weight"] = draw(vocab, HIDDEN)
    arrays |= {"encoder/conv1/bias": draw(HIDDEN), "encoder/conv1/weight": draw(HIDDEN, MELS, 3)}
    arrays |= {"encoder/conv2/bias": draw(HIDDEN), "encoder/conv2/weight": draw(HIDDEN, HIDDEN, 3)}
    return arrays


def write_folder(folder: Path, arrays: Mapping[str, np.ndarray] | None = None, end: int = END) -> Path:
    """As CTranslate2's converter leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    (folder / "model.bin").write_bytes(model_bytes(whisper_arrays() if arrays is None else arrays, aliases))
    config = {"alignment_heads": [[1, 0]], "lang_ids": [], "suppress_ids": [1, 2], "suppress_ids_begin": [220, end]}
    (folder / "config.json").write_text(json.dumps(config))
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    names += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    added = [{"id": end + i, "content": name} for i, name in enumerate(names)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder
