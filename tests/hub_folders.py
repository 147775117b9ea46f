"""GGUF models as folders of the Hugging Face hub, for transformers and for tests of such folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from octavo.core.dtypes import DType
from octavo.kernels.torch_backend import to_torch
from octavo.loader.files import cache_dir, publish
from octavo.loader.gguf_file import GGUFCheckpoint
from octavo.loader.resolve import gguf_source, resolve_model
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights


def hub_folder(model: str, dtype: str) -> Path:
    """The folder of a GGUF file or built-in model whose network has transformers' names, in the cache.

    Args:
        model: path or name.
        dtype: of the dequantised weights, "float32" or "bfloat16".
    """
    source, file = resolve_model(model), gguf_source(model)
    assert file is not None

    def fill(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        config = json.loads((source / "config.json").read_text()) | {"dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config))
        network = build_without_weights(read_model_config(source), "float32")
        shapes = network.tensor_shapes()
        tensors = GGUFCheckpoint(file, network.config, shapes).read(shapes, [], DType(dtype))
        weights = {name: to_torch(tensor) for name, tensor in tensors if isinstance(tensor, np.ndarray)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return publish(cache_dir() / "tests" / f"{source.name}-{dtype}", fill)
