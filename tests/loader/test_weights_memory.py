"""How much memory loading takes at its peak: hardly more than what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.core.dtypes import DType
from octavo.core.model_config import ModelConfig
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.models.registry import make_network
from tests.busy_machine import PATIENCE

#: 300 MB in bfloat16, a ninth of it the embedding, which serves as the head too.
SHAPE = ("LlamaForCausalLM", 16384, 1024, 3584, 10, 16, 4, 64, 128)

#: Prints the peak's bytes above what the process took before it loaded, and the bytes that stay.
LOAD = """
import json, sys
from pathlib import Path
import numpy as np
from octavo.core.dtypes import DType
from octavo.core.model_config import ModelConfig
from octavo.kernels import load_kernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

config = ModelConfig(*json.loads(sys.argv[2]), tie_word_embeddings=True)
context = LayerContext(load_kernels("cpu", "cpu", head_dim=config.head_dim), DType.BFLOAT16)
context.kernels.pack([np.zeros((64, 64), DType.BFLOAT16.numpy)], dtype=DType.BFLOAT16)
before = status("VmRSS")
network = load_model(Path(sys.argv[1]), config, context)
print(status("VmHWM") - before, status("VmRSS") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc/self/status, which tells the peak")
def test_the_peak_while_loading_is_little_more_than_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("octavo._cpu", reason="octavo._cpu is not built")
    config = ModelConfig(*SHAPE, tie_word_embeddings=True)
    network = make_network(config, LayerContext(ReferenceKernels(), DType.BFLOAT16))
    tensors = {
        name: torch.ones(layer.expected[shard], dtype=torch.bfloat16) for name, layer, shard in network.tensors()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    command = [sys.executable, "-c", LOAD, str(tmp_path), json.dumps(SHAPE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    peak, left = (int(word) for word in printed.split())
    assert left > 0.9 * weights  # else the peak was not measured
    assert peak < 1.3 * weights, f"{peak / weights:.2f} times the weights at the peak, {left / weights:.2f} after it"
