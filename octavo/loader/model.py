"""Builds networks and loads their weights from a Hugging Face folder."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.startup import GIB, LOADING
from octavo.kernels.gguf_rows import GGUFRows
from octavo.kernels.quantized_rows import QuantizedRows
from octavo.layers.context import LayerContext
from octavo.loader.checkpoint_check import refuse_misfits
from octavo.loader.dummy import dummy_weights
from octavo.loader.gguf_parts import split_paths
from octavo.loader.quantized.reader import with_unpacking
from octavo.loader.stored_head import with_stored_head
from octavo.loader.weights import (
    checkpoint_bytes,
    load_weights,
    read_headers,
    read_safetensors,
)
from octavo.models.checkpoint import CheckpointEntry, Pairs
from octavo.models.network import Network
from octavo.models.registry import make_network
from octavo.models.sizes import build_rank_without_weights

logger = logging.getLogger("octavo")

#: Seconds after which progress is told.
_BAR_DELAY = 1.0


def load_model(folder: Path, config: ModelConfig, context: LayerContext, gguf: Path | None = None) -> Network:
    """Builds the network of ``config`` and loads this rank's share of the weights in ``folder``, or in ``gguf``.

    Weights are converted to ``context.dtype``, and matrices quantised by ``context.quantization``. They keep their bits
    where that is "gguf", or the name of ``config.quantization`` and the kernels have products with them. Tables of
    positions have ``context.positions`` rows, by default ``config.max_position``.

    Raises:
        UnsupportedModelError: there is no network for the architecture; or the GGUF file has tensors of other ones.
        ConfigError: the configuration contradicts itself or the tensor-parallel size; or quantization is "gguf" and
            there is no such file.
        WeightError: the checkpoint is incomplete, damaged or does not fit the configuration.
    """
    before: list[CheckpointEntry] = []
    if gguf is None and context.quantization != "gguf":
        config, before = with_stored_head(config, folder)
    network = make_network(config, context)
    whole = network if context.layers is None else build_rank_without_weights(config, replace(context, layers=None))
    shapes = whole.tensor_shapes()
    entries = [*before, *network.entries()]
    tensors: Generator[tuple[str, np.ndarray | QuantizedRows]]
    if gguf is not None:
        from octavo.loader.gguf_weights import GGUFCheckpoint

        # A folder of such a model is said to be bfloat16, as values of some exceed float16.
        stored = DType.FLOAT32 if context.dtype is DType.FLOAT32 else DType.BFLOAT16
        dtype = None if context.quantization == "gguf" else stored
        names = {name for name, _, _ in network.tensors()}
        tensors = GGUFCheckpoint(gguf, config, shapes).read(names, entries, dtype)
        size = sum(part.stat().st_size for part in split_paths(gguf))
    elif context.quantization == "gguf":
        raise ConfigError(f"quantization='gguf' needs a model in a GGUF file; {folder} was not made from one")
    else:
        if config.quantization is not None:
            own = context.quantization == config.quantization.name

            def keep(rows: QuantizedRows) -> bool:
                return own and context.kernels.has_products(rows)

            headers = read_headers(folder)
            entries = with_unpacking(entries, config.quantization, headers, shapes, context.dtype, keep)
        refuse_misfits(folder, config, entries, shapes)
        tensors = read_safetensors(folder)
        size = checkpoint_bytes(folder)
    with closing(tensors):
        pairs: Pairs = _with_progress(tensors, size, context)
        for entry in entries:
            pairs = entry.apply(pairs, shapes)
        load_weights(network, pairs, shapes)
    return network


def _with_progress(
    tensors: Iterable[tuple[str, np.ndarray | QuantizedRows]], size: int, context: LayerContext
) -> Iterator[tuple[str, np.ndarray | QuantizedRows]]:
    """The same tensors. The first rank says how many of ``size`` bytes are read, if that takes more than a second.

    On a terminal by a progress bar, elsewhere by lines of the log, which a server that starts answers with.
    """
    if context.tp_rank or (context.layers is not None and context.layers.start):
        yield from tensors
        return
    from tqdm import tqdm

    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": _BAR_DELAY, "leave": False}
    is_shown = sys.stderr.isatty()
    read, told, begun = 0, 0, time.monotonic()
    with tqdm(total=size, desc=LOADING, disable=not is_shown, **options) as bar:
        for name, tensor in tensors:
            yield name, tensor
            values = tensor.rows if isinstance(tensor, GGUFRows) else tensor
            read = min(read + getattr(values, "nbytes", 0), size)  # values of a GGUF file are wider in memory
            bar.update(read - bar.n)
            if not is_shown and read >= told + size / 10 and time.monotonic() > begun + _BAR_DELAY:
                told = read
                logger.info("%s: %.0f %% of %.2f GiB", LOADING, 100 * read / size, size / GIB)


def make_dummy_model(config: ModelConfig, context: LayerContext, seed: int) -> Network:
    """The network of ``config`` with random weights (see ``dummy_weights``), quantised by ``context.quantization``.

    Raises:
        UnsupportedModelError, ConfigError: as for ``load_model``; or quantization is "gguf".
    """
    if context.quantization == "gguf":
        raise ConfigError("quantization='gguf' computes with a GGUF file's own bits; load_format='dummy' has no file")
    network = make_network(config, context)
    load_weights(network, dummy_weights(network, context.dtype, seed))
    return network
