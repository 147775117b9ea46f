"""Small random checkpoints made by transformers, and a driver that runs our networks over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import group_layers
from octavo.kernels.forward_batch import BatchSize, Forward, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Kernels, LayerCache
from octavo.kernels.reference import ReferenceKernels
from octavo.models.network import Network
from tests.models.zoo import ON_GPU, Zoo


class PagedDriver:
    """Runs sequences through a network: each ``step`` appends tokens to some of them.

    Blocks are handed out in a shuffled order, so that no test passes because blocks happen to be neighbours.
    """

    def __init__(self, network: Network, block_size: int = 4, blocks: int = 96, kernels: Kernels | None = None) -> None:
        self.kernels = kernels = kernels or ReferenceKernels()
        self.network = network
        self.block_size = block_size
        self.groups = group_layers(network.kv_specs)
        count = len(self.groups)
        self.caches: list[LayerCache] = kernels.make_cache(self.groups, [blocks] * count, block_size)
        for cache in self.caches:
            if self.groups[cache.group].spec.kind == "state":
                cache.state_tokens = block_size
        self.forward: Forward = self._forward
        if network.is_recordable:
            largest = BatchSize(128, 8, 128, blocks * block_size, block_size, count)
            self.forward = kernels.capture(self._forward, largest)
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        hidden = self.network.forward(batch, self.caches)
        return ForwardOutput(hidden, self.network.logits(hidden))

    def step(self, chunks: dict[str, list[int]]) -> dict[str, Tensor]:
        """Appends tokens to each named sequence; the logits [tokens, vocab] of those tokens."""
        order = sorted(chunks, key=lambda name: len(chunks[name]) > 1)
        ids = np.array([token for name in order for token in chunks[name]], np.int64)
        batch = self._batch(order, [len(chunks[name]) for name in order], ids)
        with self.kernels.mode():
            logits = self.kernels.to_numpy(self.forward(batch).logits).copy()  # the next step overwrites it
        assert logits.dtype == np.float32
        parts = torch.from_numpy(logits).split([len(chunks[name]) for name in order])
        return dict(zip(order, parts, strict=True))

    def run(self, name: str, tokens: list[int], sizes: list[int]) -> Tensor:
        """All logits of one sequence computed in chunks of the given sizes, the last as often as needed."""
        parts, start = [], 0
        while start < len(tokens):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            parts.append(self.step({name: tokens[start : start + size]})[name])
            start += size
        return torch.cat(parts)

    def _batch(self, order: list[str], counts: list[int], ids: np.ndarray) -> ForwardBatch:
        for name, count in zip(order, counts, strict=True):
            table, length = self._tables.setdefault(name, []), self._lengths.get(name, 0) + count
            while len(table) * self.block_size < length:
                table.append(self._free.pop())
            self._lengths[name] = length
        tables = [self._tables[name] for name in order]
        widest = max(map(len, tables))
        padded = np.array([t + [0] * (widest - len(t)) for t in tables], np.int32)
        lengths = [self._lengths[name] for name in order]
        tables_of_groups = np.stack([padded] * len(self.groups))
        batch = make_batch(counts, lengths, tables_of_groups, self.block_size, self.kernels, token_ids=ids)
        return replace(batch, sampled_rows=self.kernels.wrap(np.arange(len(ids))), all_sampled=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, architectures are checked on it."""
    for item in items:
        if ON_GPU and isinstance(item, pytest.Function) and "zoo" in item.fixturenames:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def driver() -> type[PagedDriver]:
    return PagedDriver


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., Any]:
    """Makes a random model of a transformers configuration, saves it to tmp_path and returns it."""

    def save(config: Any, change: Callable[[Any], None] | None = None, **options: Any) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            # Large enough that logits differ clearly; norms around one.
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
        if change is not None:
            change(model)
        model.save_pretrained(tmp_path, **options)
        return model

    return save


@pytest.fixture
def zoo(tmp_path: Path, save_model: Callable[..., Any], driver: Any) -> Zoo:
    return Zoo(tmp_path, save_model, driver)
