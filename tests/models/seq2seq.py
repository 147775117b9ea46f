"""Small random encoder-decoder checkpoints made by transformers, and a driver that runs our networks over blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.config.kv_spec import LayerGroup, group_layers
from octavo.core.dtypes import DType
from octavo.core.request import EncoderInput
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Kernels
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.encoder import EncoderDecoder


def save_seq2seq(folder: Path, config: Any, model_class: Any = None) -> Any:
    """Saves a random model of a transformers configuration, with weights large enough that logits differ clearly."""
    from transformers import AutoModelForSeq2SeqLM

    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config) if model_class is None else model_class(config)
    model = model.eval()
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
    model.save_pretrained(folder)
    return model


class EncoderDecoderDriver:
    """Runs one request at a time: ``encode`` its input, then ``run`` its decoder in chunks.

    Blocks are handed out in a shuffled order; those of the input lie among those of the decoder.
    """

    def __init__(self, folder: Path, kernels: Kernels | None = None, dtype: DType = DType.FLOAT32) -> None:
        self.kernels = kernels = kernels or ReferenceKernels()
        config = read_model_config(folder)
        network = load_model(folder, config, LayerContext(kernels, dtype))
        assert isinstance(network, EncoderDecoder) and network.workspace is not None
        self.network, self.config, self.block_size, blocks = network, config, 4, 96
        self.groups = group_layers(network.kv_specs)
        self.caches = kernels.make_cache(self.groups, [blocks] * len(self.groups), self.block_size)
        self.workspace = kernels.make_cache([LayerGroup(network.workspace, (0,))], [blocks], self.block_size)[0]
        self.workspace.group = len(self.groups)
        assert config.encoder_facts is not None
        width = config.encoder_facts.feature_width
        self.features = None if width is None else kernels.zeros((512, width), DType.FLOAT32)
        size = BatchSize(128, 8, 128, blocks * self.block_size, self.block_size, len(self.groups), blocks)
        self.forward = kernels.capture(self._forward, size)
        self.encoder = kernels.capture(
            self._encode, BatchSize(512, 8, 8, blocks * self.block_size, self.block_size, len(self.groups) + 1)
        )
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        hidden = self.network.forward(batch, self.caches)
        return ForwardOutput(hidden, self.network.logits(hidden))

    def _encode(self, batch: ForwardBatch) -> ForwardOutput:
        inputs = batch.token_ids if self.features is None else self.features[: len(batch.token_ids)]
        return ForwardOutput(self.network.encode(inputs, batch, self.workspace, self.caches))

    def encode(self, given: EncoderInput) -> Tensor:
        """Encodes an input into new blocks; the encoder's output [T, E]."""
        prepared = self.network.prepare_input(self.config, given.kind, given.payload)
        count = given.num_tokens
        assert len(prepared) == count
        self.cross_lens, blocks = count, -(-count // self.block_size)
        self.cross_table = [self._free.pop() for _ in range(blocks)]
        tables = np.array([[self.cross_table], [list(range(blocks))]], np.int32)
        ids = prepared if self.features is None else np.zeros(count, np.int64)
        batch = make_batch([count], [count], tables, self.block_size, self.kernels, token_ids=ids)
        with self.kernels.mode():
            if self.features is not None:
                self.kernels.write(self.features[:count], prepared)
            states = self.kernels.to_numpy(self.encoder(batch).hidden).astype(np.float32)
        return torch.from_numpy(states)

    def run(self, tokens: list[int], sizes: list[int]) -> Tensor:
        """All logits [tokens, vocab] of a decoder over the last input, in chunks of these sizes, the last repeated."""
        parts: list[Tensor] = []
        start, sizes = 0, list(sizes)
        table = [self._free.pop() for _ in range(-(-len(tokens) // self.block_size))]
        while start < len(tokens):
            size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - start)
            ids = np.array(tokens[start : start + size], np.int64)
            batch = make_batch(
                [size],
                [start + size],
                np.array([table], np.int32),
                self.block_size,
                self.kernels,
                token_ids=ids,
                cross_lens=[self.cross_lens],
                cross_tables=np.array([self.cross_table], np.int32),
            )
            batch.sampled_rows, batch.all_sampled = self.kernels.wrap(np.arange(size)), True
            with self.kernels.mode():
                logits = self.kernels.to_numpy(self.forward(batch).logits).copy()
            parts.append(torch.from_numpy(logits))
            start += size
        return torch.cat(parts)
