"""Prepares what encoders read: of text its token ids, of sound what the network makes of it on the host."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from octavo.core.encoder_input import EncoderInput
from octavo.core.errors import OctavoError
from octavo.models.network import Network
from octavo.models.registry import network_class
from octavo.runner.preparers import Preparer, PreparerContext


class EncoderInputPreparer(Preparer):
    """Owns the prepared inputs of this worker."""

    def __init__(self, context: PreparerContext) -> None:
        self._config = context.config
        self._network: type[Network] = network_class(context.config.architecture)
        self._inputs: dict[str, np.ndarray] = {}

    def prepare(self, payload: bytes) -> np.ndarray:
        """See ``Preparer``; the payload is an ``EncoderInput``.

        Raises:
            InvalidRequestError: the network cannot read it.
            RuntimeError: it made another number of positions of it than the request says.
        """
        given = msgspec.msgpack.decode(payload, type=EncoderInput)
        prepared = self._network.prepare_input(self._config, given.kind, given.payload)
        if len(prepared) != given.num_tokens:
            raise RuntimeError(f"the encoder's input has {len(prepared)} positions, not {given.num_tokens}")
        return prepared

    def message(self, payload: bytes, error: Exception) -> str:
        """See ``Preparer``."""
        return str(error) if isinstance(error, OctavoError) else super().message(payload, error)

    def keep(self, key: str, thing: Any) -> None:
        """See ``Preparer``."""
        self._inputs[key] = thing

    def drop(self, key: str) -> None:
        """See ``Preparer``."""
        del self._inputs[key]

    def find(self, key: str) -> np.ndarray:
        """A prepared input: int64 [T], or float32 [T, width].

        Raises:
            RuntimeError: it was not prepared, or dropped since.
        """
        if key not in self._inputs:
            raise RuntimeError(f"the encoder's input {key} is not prepared")
        return self._inputs[key]
