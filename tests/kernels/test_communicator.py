"""Collectives of ``torch.distributed``, between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.busy_machine import PATIENCE

PROGRAM = """
import sys
import torch
from octavo.kernels.communicator import TorchCommunicator
from octavo.kernels.reference import ReferenceKernels

rank, where = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=3)
pair = torch.distributed.new_group([0, 1])
generator = torch.Generator().manual_seed(0)
first, second, third = (torch.randn(2, 300, generator=generator) * 10.0**i for i in range(3))
bias, add = torch.arange(300.0), torch.full((2, 300), 0.3)
kernels = ReferenceKernels()


def check(group, parts, total):
    kernels.group = TorchCommunicator(group)
    assert (kernels.group.rank, kernels.group.size) == (rank, len(parts))
    x = parts[rank]
    assert torch.equal(kernels.all_gather(x), torch.cat(parts, dim=1))
    assert torch.equal(kernels.all_reduce(x.clone()), total)
    assert torch.equal(kernels.all_reduce(x.clone(), bias, add), total + bias + add)


check(None, [first, second, third], (first + second) + third)
if rank < 2:
    check(pair, [first, second], first + second)
print("right")
"""


def test_processes_sum_as_a_tree_and_join(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    assert [rank.communicate(timeout=PATIENCE)[0].strip() for rank in ranks] == ["right"] * 3
