"""Links between pipeline stages through torch.distributed."""

from __future__ import annotations

from typing import Any

import torch


class TorchLink:
    """A link of ``torch.distributed``, between any two processes."""

    def __init__(self, peer: int) -> None:
        """``peer`` is the global rank at the other end."""
        self._peer = peer

    def send(self, x: Any) -> None:
        """See ``StageLink``."""
        torch.distributed.send(torch.as_tensor(x).contiguous(), self._peer)

    def receive(self, x: Any) -> None:
        """See ``StageLink``."""
        torch.distributed.recv(torch.as_tensor(x), self._peer)
