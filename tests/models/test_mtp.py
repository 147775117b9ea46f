"""Layers for multi-token prediction against transformers' layers, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config.engine_config import make_config
from octavo.core.dtypes import DType
from octavo.layers.layer import LayerContext
from octavo.loader.mtp import require_mtp
from octavo.loader.weights import check_headers, load_model
from octavo.models.config_files import read_model_config
from octavo.models.decoder import Decoder
from octavo.models.draft_head import DraftHead
from octavo.models.network import build_without_weights, kv_bytes_per_token
from octavo.models.registry import model_type_of
from tests.models.mtp_models import FAMILIES, LAYERS, save_mtp
from tests.models.test_eagle import TOKENS, Runner
from tests.models.zoo import _backends


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "qwen3_next" else ()) for name in FAMILIES]
)
def test_modules_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    depth = 2 if name in ("glm", "qwen3_5") else 1
    reference = save_mtp(name, tmp_path, depth)
    config = read_model_config(tmp_path)
    assert config.num_layers == LAYERS and model_type_of(config.architecture)
    found = require_mtp(tmp_path, config, make_config(model=str(tmp_path)))
    assert found.num_layers == depth
    check_headers(tmp_path, found)
    network = build_without_weights(found, "float32")
    assert kv_bytes_per_token(network) == depth * network.kv_specs[0].bytes_per_token
    expected = reference.features(TOKENS[:-1])
    for kernels in _backends() if name == "glm" else _backends()[-1:]:
        context = LayerContext(kernels, DType.FLOAT32)
        model, head = (load_model(tmp_path, each, context) for each in (config, found))
        assert isinstance(model, Decoder) and isinstance(head, DraftHead)
        run = Runner(kernels, model, head)
        features = torch.cat([run.features(0, TOKENS[:5]), run.features(5, TOKENS[5:-1])])
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
        inputs = features
        for step in range(depth):
            tokens, count = TOKENS[1 + step :], len(TOKENS) - 1 - step
            outputs = reference.outputs(step, tokens, inputs[:count])
            spans = ((0, 3), (3, 10), (10, count))
            parts = [run.draft(a, tokens[a:b], inputs[a:b], step) for a, b in spans]
            hidden = torch.cat([part.hidden for part in parts])
            torch.testing.assert_close(hidden, outputs, atol=5e-4, rtol=1e-3)
            logits = torch.cat([part.logits for part in parts if part.logits is not None])
            torch.testing.assert_close(logits, reference.logits(outputs), atol=2e-3, rtol=1e-3)
            inputs = hidden


@pytest.mark.parametrize("change", [{"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_modules_have_the_form_of_the_model(change: dict[str, Any], tmp_path: Path) -> None:
    save_mtp("glm", tmp_path)
    config = read_model_config(tmp_path)
    found = require_mtp(tmp_path, config, make_config(model=str(tmp_path)))
    context = LayerContext(
        _backends()[-1], DType(change.get("dtype", "float32")), quantization=change.get("quantization")
    )
    head = load_model(tmp_path, found, context)
    weights = {weight.dtype for weight in head.weights() if weight.kind == "linear"}
    assert change.get("quantization", change.get("dtype")) in weights
