"""Rows of packed matrices: a tied head serves as the embedding, with the same bits as a table of its own."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels.torch_backend import from_torch
from octavo.kernels.weight_rows import GGUFRows
from octavo.layers.layer import LayerContext
from octavo.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from tests.torch_types import engine_dtype

pytest.importorskip("octavo._cpu")
torch_facade: Any = importlib.import_module("tests.kernels.torch_facade")

#: More than a panel, and not whole ones.
ROWS = 39
IDS = torch.tensor([0, 38, 17, 5, 39, 16, 2])
#: Bytes and values of a block, and where its float16 scales are.
BLOCKS = {
    "Q8_0": (34, 32, [0]),
    "Q5_0": (22, 32, [0]),
    "Q4_0": (18, 32, [0]),
    "Q4_1": (20, 32, [0, 2]),
    "Q4_K": (144, 256, [0, 2]),
    "IQ4_NL": (18, 32, [0]),
    "MXFP4": (17, 32, []),
    "Q6_K": (210, 256, [208]),
}


def blocks(kind: str, columns: int = 512) -> GGUFRows:
    """Random bits with scales of sensible size."""
    size, values, scales = BLOCKS[kind]
    random = np.random.default_rng(3)
    rows = random.integers(0, 256, (ROWS, columns // values, size), dtype=np.uint8)
    if kind == "MXFP4":
        rows[..., 0] = random.integers(110, 130, rows.shape[:2])
    for start in scales:
        halves = (random.random((ROWS, columns // values, 1)) / 50).astype(np.float16)
        rows[..., start : start + 2] = halves.view(np.uint8)
    return GGUFRows(kind, rows.reshape(ROWS, -1), columns, values)


def tied(dtype: torch.dtype, tensor: Tensor | GGUFRows, quantization: str | None = None) -> VocabParallelEmbedding:
    """An embedding with its head, loaded."""
    context = LayerContext(torch_facade.make_kernels(), engine_dtype(dtype), quantization=quantization)
    embedding = VocabParallelEmbedding(context, ROWS, tensor.shape[1])
    embedding.scale = 1.7
    ParallelLMHead(context, ROWS, tensor.shape[1], embedding)
    embedding.load("weight", from_torch(tensor) if isinstance(tensor, Tensor) else tensor)
    return embedding


def rows_of(table: Tensor) -> Tensor:
    """What a table of its own gives; id 39 is past its end."""
    return torch_facade.make_kernels().embedding(IDS, table, 0, scale=1.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [48, 33])
def test_a_tied_head_gives_the_rows_of_its_matrix(dtype: torch.dtype, columns: int) -> None:
    table = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    embedding = tied(dtype, table)
    assert embedding.table is None
    assert torch.equal(embedding(IDS), rows_of(table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_head_of_gguf_blocks_gives_their_values(kind: str, dtype: torch.dtype) -> None:
    """Those that the head requantises (Q6_K) have a table beside it."""
    matrix = blocks(kind)
    embedding = tied(dtype, matrix, "gguf")
    assert (embedding.table is None) == (kind != "Q6_K")
    assert embedding.holds[0].is_tied == (kind != "Q6_K")
    assert torch.equal(embedding(IDS), rows_of(torch.from_numpy(matrix.dequantize()).to(dtype)))


def test_a_quantised_head_leaves_the_table_as_it_is() -> None:
    table = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1))
    embedding = tied(torch.float32, table, "int8")
    assert embedding.table is not None
    assert torch.equal(embedding(IDS), rows_of(table))
