"""Reads the matrices that sentence-transformers applies after pooling."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.core.errors import WeightError
from octavo.core.pooler_config import DenseConfig
from octavo.loader.weights import read_safetensors


def read_dense(folder: Path, dense: DenseConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """The matrix [outputs, inputs] and the bias [outputs] of a layer of a model's ``folder``, float32.

    Raises:
        WeightError: there is no model.safetensors, or its tensors do not fit.
    """
    place = folder / dense.folder
    if not (place / "model.safetensors").is_file():
        raise WeightError(
            f"{place} has no model.safetensors; files of pickles (pytorch_model.bin) are not read: save the model "
            "again with sentence-transformers, which writes safetensors"
        )
    tensors = {name: np.asarray(tensor) for name, tensor in read_safetensors(place)}
    shapes = {"linear.weight": (dense.outputs, dense.inputs)} | (
        {"linear.bias": (dense.outputs,)} if dense.bias else {}
    )
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            found = tensors[name].shape if name in tensors else "missing"
            raise WeightError(f"{place}: tensor {name!r} must have the shape {list(shape)}, and is {found}")
    bias = tensors.get("linear.bias") if dense.bias else None
    return tensors["linear.weight"].astype(np.float32), None if bias is None else bias.astype(np.float32)
