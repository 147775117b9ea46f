"""Towers without an engine: small random checkpoints made by transformers, and a driver that computes features.

A test of a tower: ``save_image_model(folder, model)``, ``TowerDriver.load(folder, kernels)``, and the features of
``tower.prepare(image)`` beside those of transformers. ``ImagePrompts`` feeds features to the decoder.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.config.kv_spec import LayerGroup, group_layers
from octavo.core.dtypes import DType
from octavo.core.request import ImageInput
from octavo.images.image_files import Normalisation
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Kernels
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config
from octavo.models.network import Network, Tower, TowerInput, tower_output


def backends() -> Iterator[Kernels]:
    """The reference, and the compiled kernels where they are built."""
    yield ReferenceKernels()
    try:
        yield importlib.import_module("octavo.kernels.cpu.backend").CpuKernels()
    except ImportError:
        return


def save_image_model(folder: Path, model: Any, std: float = 0.2) -> Any:
    """Makes the weights of a transformers model random, large enough that errors show, saves it and returns it."""
    torch.manual_seed(0)
    model = model.eval()
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and "norm" in name and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=std)
    model.save_pretrained(folder)
    return model


def random_image(pieces: int, height: int, width: int, seed: int = 0) -> ImageInput:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (pieces, height, width, 3), dtype=np.uint8)
    return ImageInput.of(pixels)


#: Colours as CLIP and SigLIP were trained with.
CLIP_PIXELS = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), 1 / 255)
SIGLIP_PIXELS = Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)


def normal_pixels(image: ImageInput, normalisation: Normalisation) -> Tensor:
    """The same pixels as transformers' towers take them: float32 [pieces, 3, height, width]."""
    pixels = (image.array().astype(np.float64) * normalisation.rescale - normalisation.mean) / normalisation.std
    return torch.from_numpy(pixels.astype(np.float32)).permute(0, 3, 1, 2).contiguous()


def padded_pixels(images: Sequence[ImageInput], normalisation: Normalisation) -> dict[str, Tensor]:
    """Images of one piece each, of any size, as transformers' Pixtral takes them."""
    sizes = [(image.height, image.width) for image in images]
    pixels = torch.zeros(len(images), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for padded, image, (height, width) in zip(pixels, images, sizes, strict=True):
        padded[:, :height, :width] = normal_pixels(image, normalisation)[0]
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def padded_patches(images: Sequence[ImageInput], patch: int, normalisation: Normalisation) -> dict[str, Tensor]:
    """Pieces of any size as transformers' SigLIP 2 takes them: their patches by line, column and colour."""
    rows, shapes = [], []
    for part in (part for image in images for part in image.parts()):
        lines, columns = part.height // patch, part.width // patch
        for piece in normal_pixels(part, normalisation).permute(0, 2, 3, 1):
            cut = piece.reshape(lines, patch, columns, patch, 3).transpose(1, 2)
            rows.append(cut.reshape(lines * columns, -1))
            shapes.append((lines, columns))
    most = max(map(len, rows))
    mask = torch.stack([(torch.arange(most) < len(piece)).int() for piece in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"pixel_values": padded, "spatial_shapes": torch.tensor(shapes), "pixel_attention_mask": mask}


def placed_patches(images: Sequence[ImageInput], patch: int) -> dict[str, Tensor]:
    """Patches of images and their columns and lines, padded to the most, as transformers' Gemma 4 takes them."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches, pad_along_first_dim

    most = max(image.height * image.width for image in images) // patch**2
    padded = []
    for image in images:
        pixels = image.array()[0].transpose(2, 0, 1).astype(np.float32) / 255
        lines, columns = np.mgrid[: image.height // patch, : image.width // patch]
        places = np.stack([columns, lines], axis=-1).reshape(-1, 2)
        padded.append(pad_along_first_dim(convert_image_to_patches(pixels, patch), places, most))
    stacked = [torch.from_numpy(np.stack(each)) for each in zip(*padded, strict=True)]
    return dict(zip(("pixel_values", "image_position_ids"), stacked, strict=True))


def padded_tiles(images: Sequence[ImageInput], normalisation: Normalisation) -> Tensor:
    """Images of a whole and tiles as transformers' LLaVA-NeXT takes them: [images, pieces, 3, height, width]."""
    pieces = [normal_pixels(image, normalisation) for image in images]
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)


class TowerDriver:
    """Computes features of pieces, each as a batch of its own, in a recorded forward."""

    def __init__(
        self, tower: Tower, kernels: Kernels, *, block_size: int = 16, tokens: int = 512, segments: int = 64
    ) -> None:
        """``tokens`` and ``segments``: the most of a piece."""
        self.tower, self.kernels, self.block_size = tower, kernels, block_size
        # Each segment begins at a block.
        blocks = -(-tokens // block_size) + segments
        self.caches = []
        for group in range(2):
            spec = tower.whole_workspace or tower.workspace if group else tower.workspace
            cache = kernels.make_cache([LayerGroup(spec, (0,))], [blocks], block_size)[0]
            cache.group = group
            self.caches.append(cache)
        self.rows = kernels.zeros((tokens, tower.row_width), DType.FLOAT32)
        blocks = -(-tokens // block_size)
        size = BatchSize(tokens, segments, tokens, tokens, block_size, 2, blocks, tower.rotary_axes)
        self.forward = kernels.capture(self._forward, size)

    @classmethod
    def load(cls, folder: Path, kernels: Kernels, dtype: DType = DType.FLOAT32, **options: Any) -> TowerDriver:
        """The tower of a saved model."""
        network = load_model(folder, read_model_config(folder), LayerContext(kernels, dtype))
        assert network.tower is not None
        return cls(network.tower, kernels, **options)

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        return tower_output(self.tower.features(self.rows[: len(batch.token_ids)], batch, self.caches))

    def features(self, pieces: Sequence[TowerInput]) -> Tensor:
        """float32 [features of all pieces, ``ImageFacts.vectors`` * E]."""
        each = [self._of_piece(piece).numpy() for piece in pieces]
        return torch.from_numpy(self.tower.join([piece.places for piece in pieces], each))

    def _of_piece(self, piece: TowerInput) -> Tensor:
        with self.kernels.mode():
            self.kernels.write(self.rows[: len(piece.rows)], piece.rows)
            output = self.forward(self.batch(piece))
            vectors = [self.kernels.to_numpy(x) for x in (output.logits, *output.layer_features)]
            features = np.concatenate(vectors, axis=1)
        assert features.dtype == np.float32
        return torch.from_numpy(features)

    def batch(self, piece: TowerInput) -> ForwardBatch:
        """The batch of one piece: see ``Tower``."""
        lens, size = np.array(piece.segments), self.block_size
        count, blocks = len(piece.rows), -(-lens // size)
        assert lens.sum() == count and piece.rows.dtype == np.float32
        first = np.cumsum(blocks) - blocks
        whole = np.arange(-(-count // size), dtype=np.int32)
        tables = np.zeros((2, len(lens), max(len(whole), blocks.max())), np.int32)
        for segment, (start, width) in enumerate(zip(first, blocks, strict=True)):
            tables[0, segment, :width] = np.arange(start, start + width)
        tables[1, :, : len(whole)] = whole
        within = np.arange(count) - np.repeat(np.cumsum(lens) - lens, lens)
        slots = np.stack([np.repeat(first * size, lens) + within, np.arange(count)]).astype(np.int64)
        batch = make_batch(
            lens.tolist(),
            lens.tolist(),
            tables,
            size,
            self.kernels,
            cross_lens=[count] * len(lens),
            cross_tables=np.tile(whole, (len(lens), 1)),
            token_ids=piece.token_ids,
            rotary_positions=piece.rotary_positions,
        )
        return replace(
            batch,
            positions=self.kernels.wrap(piece.positions),
            slot_mapping=self.kernels.wrap(slots),
            sampled_rows=self.kernels.wrap(piece.feature_rows),
            all_sampled=False,
        )


def check_bits(driver: TowerDriver, image: ImageInput, other: ImageInput) -> None:
    """The features of an image are the same bits whatever was computed before, and its pieces' those of each alone."""
    pieces = driver.tower.prepare(image)
    first = driver.features(pieces)
    driver.features(driver.tower.prepare(other))
    assert torch.equal(driver.features(pieces[::-1]), torch.cat([driver.features([p]) for p in pieces[::-1]]))
    assert torch.equal(driver.features(pieces), first)
    alone = [driver.features(driver.tower.prepare(ImageInput.of(piece[None]))) for piece in image.array()]
    assert torch.equal(torch.cat(alone), first)


def assert_close(ours: Tensor, theirs: Tensor, bound: float = 1e-4) -> None:
    """Within ``bound`` of the largest value, and of numbers that differ enough for errors to show."""
    assert ours.shape == theirs.shape and theirs.std() > 0.05
    assert (ours - theirs).abs().max() <= bound * theirs.abs().max()


class ImagePrompts:
    """Runs one prompt at a time through the decoder of a network: features are rows past its vocabulary."""

    def __init__(self, folder: Path, kernels: Kernels, dtype: DType = DType.FLOAT32, block_size: int = 4) -> None:
        config = read_model_config(folder)
        self.kernels, self.block_size, blocks, rows = kernels, block_size, 96, 128
        self.network: Network = load_model(folder, config, LayerContext(kernels, dtype, virtual_tokens=rows))
        assert config.image_facts is not None
        self.config, self.facts = config, config.image_facts
        self.groups = group_layers(self.network.kv_specs)
        self.caches = kernels.make_cache(self.groups, [blocks] * len(self.groups), block_size)
        for cache in self.caches:
            if self.groups[cache.group].spec.kind == "state":
                cache.state_tokens = block_size
        axes = config.rope.axes
        self.size = BatchSize(256, 8, 256, blocks * block_size, block_size, len(self.groups), rotary_axes=axes)
        self.forward = kernels.capture(self._forward, self.size)
        self._free = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def _forward(self, batch: ForwardBatch) -> ForwardOutput:
        hidden = self.network.forward(batch, self.caches)
        return ForwardOutput(hidden, self.network.logits(hidden))

    def run(self, tokens: Sequence[int], features: Tensor, sizes: Sequence[int]) -> Tensor:
        """Logits [tokens, vocab], in chunks of these sizes, the last repeated; ``features`` take the place of the
        image's tokens, in order.
        """
        ids = np.array(tokens, np.int64)
        is_image = ids == self.facts.token_id
        assert is_image.sum() == len(features)
        ids[is_image] = self.config.vocab_size + np.arange(len(features))
        with self.kernels.mode():
            self.network.set_features(0, features.numpy())
        until = self._until(is_image) if self.facts.is_whole else None
        table = [self._free.pop() for _ in range(-(-len(ids) // self.block_size))]
        parts: list[Tensor] = []
        start, left = 0, list(sizes)
        while start < len(ids):
            size = min(left.pop(0) if len(left) > 1 else left[0], len(ids) - start)
            parts.append(self._chunk(ids, start, start + size, table, until))
            start += size
        self._free = table + self._free
        return torch.cat(parts)

    @staticmethod
    def _until(is_image: np.ndarray) -> np.ndarray:
        """The last token of the run of an image's tokens, for each of them; else -1."""
        until = np.full(len(is_image), -1, np.int32)
        for place in range(len(is_image) - 1, -1, -1):
            if is_image[place]:
                follows = place + 1 < len(is_image) and is_image[place + 1]
                until[place] = until[place + 1] if follows else place
        return until

    def rotary_positions(self, start: int, end: int) -> np.ndarray | None:
        """Of the prompt's tokens ``start`` to ``end``: see ``ForwardBatch``."""
        return None

    def _chunk(self, ids: np.ndarray, start: int, end: int, table: list[int], until: np.ndarray | None) -> Tensor:
        tables = np.array([[table]] * len(self.groups), np.int32)
        seen = None
        if until is not None and (until[start:end] >= 0).any():
            seen = until[start:end]
            assert seen.max() < end, "an image is cut"
        batch = make_batch(
            [end - start],
            [end],
            tables,
            self.block_size,
            self.kernels,
            token_ids=ids[start:end],
            sees_until=seen,
            rotary_positions=self.rotary_positions(start, end),
        )
        batch.sampled_rows, batch.all_sampled = self.kernels.wrap(np.arange(end - start)), True
        with self.kernels.mode():
            logits = self.kernels.to_numpy(self.forward(batch).logits).copy()
        return torch.from_numpy(logits)
