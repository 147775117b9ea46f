"""Reads the matrices that sentence-transformers applies after pooling."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.core.errors import WeightError
from octavo.core.pooler_config import DenseConfig
from octavo.loader.weights import read_safetensors


class DenseWeights(NamedTuple):
    """Weights of a layer after pooling, float32."""

    #: [outputs, inputs].
    matrix: np.ndarray
    #: [outputs].
    bias: np.ndarray | None
    #: [outputs, inputs]: what the input is multiplied with before it is added.
    residual: np.ndarray | None


def read_dense(folder: Path, dense: DenseConfig) -> DenseWeights:
    """The weights of a layer of a model's ``folder``.

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
    matrix = (dense.outputs, dense.inputs)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": matrix}
    if dense.bias:
        shapes["linear.bias"] = (dense.outputs,)
    if dense.residual and dense.inputs != dense.outputs:
        shapes["residual.weight"] = matrix
    for name, shape in shapes.items():
        if name not in tensors or tensors[name].shape != shape:
            found = tensors[name].shape if name in tensors else "missing"
            raise WeightError(f"{place}: tensor {name!r} must have the shape {list(shape)}, and is {found}")
    weights = {name: tensors[name].astype(np.float32) for name in shapes}
    return DenseWeights(weights["linear.weight"], weights.get("linear.bias"), weights.get("residual.weight"))
