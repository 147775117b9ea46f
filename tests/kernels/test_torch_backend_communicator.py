"""Collectives of ``torch.distributed``, between processes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.busy_machine import PATIENCE

PROGRAM = """
import sys
import numpy as np
import torch
from octavo.kernels import load_kernels
from octavo.kernels.torch_backend import TorchCommunicator

rank, where, backends = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=3)
pair = torch.distributed.new_group([0, 1])
random = np.random.default_rng(0)
first, second, third = (random.standard_normal((2, 300), np.float32) * np.float32(10**i) for i in range(3))
bias, add = np.arange(300, dtype=np.float32), np.full((2, 300), 0.3, np.float32)


def check(kernels, group, parts, total):
    kernels.join(TorchCommunicator(group))
    assert (kernels.group.rank, kernels.group.size) == (rank, len(parts))
    x, offset, residual = (kernels.array(values) for values in (parts[rank], bias, add))
    assert np.array_equal(kernels.to_numpy(kernels.all_gather(x)), np.concatenate(parts, axis=1))
    assert np.array_equal(kernels.to_numpy(kernels.all_reduce(kernels.array(parts[rank]))), total)
    assert np.array_equal(kernels.to_numpy(kernels.all_reduce(x, offset, residual)), total + bias + add)


for backend in backends:
    kernels = load_kernels(backend, "cpu")
    check(kernels, None, [first, second, third], (first + second) + third)
    if rank < 2:
        check(kernels, pair, [first, second], first + second)
print("right")
"""


def test_processes_sum_as_a_tree_and_join(tmp_path: Path) -> None:
    backends = ["reference"] if find_spec("octavo._cpu") is None else ["reference", "cpu"]
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting"), *backends], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    assert [rank.communicate(timeout=PATIENCE)[0].strip() for rank in ranks] == ["right"] * 3
