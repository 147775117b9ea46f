"""Collectives of ``torch.distributed``, between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
from octavo.kernels.communicator import TorchCommunicator
from octavo.kernels.reference import ReferenceKernels

rank, where = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
kernels = ReferenceKernels()
kernels.group = TorchCommunicator()
assert (kernels.group.rank, kernels.group.size) == (rank, 2)
x = torch.arange(6.0).view(2, 3) + 10 * rank
first, second = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10
assert torch.equal(kernels.all_gather(x), torch.cat((first, second), dim=1))
assert torch.equal(kernels.all_reduce(x), first + second)
print("right")
"""


def test_two_processes_sum_and_join(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["right", "right"]
