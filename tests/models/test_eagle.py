"""EAGLE heads against a plain float64 reference, and heads that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.config.kv_spec import group_layers
from octavo.core.dtypes import DType
from octavo.core.errors import ConfigError, OctavoError, UnsupportedModelError, WeightError
from octavo.kernels.forward_batch import BatchSize, ForwardBatch, ForwardOutput, make_batch
from octavo.kernels.interface import Kernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_head, load_model, read_head_config
from octavo.models.config_files import read_model_config
from octavo.models.decoder import Decoder
from octavo.models.draft_head import DraftHead
from octavo.models.eagle import EagleMethod
from tests.models.eagle_heads import TARGET, Head, Reference, eagle1, eagle3
from tests.models.zoo import _backends

TOKENS = [3, 17, 99, 42, 0, 8, 8, 61, 100, 5, 23, 77, 14, 90, 31]
BLOCK, BLOCKS = 4, 16


class Runner:
    """A target and a head, each captured as the engine does, over caches of consecutive blocks."""

    def __init__(self, kernels: Kernels, network: Decoder, head: DraftHead) -> None:
        self.network, self.kernels, self.head = network, kernels, head
        head.attach_target(network)
        largest = BatchSize(64, 4, 64, BLOCK * BLOCKS, BLOCK)
        self._caches = self._make_caches(kernels, network.kv_specs)
        self._head_caches = self._make_caches(kernels, self.head.kv_specs)
        self._features = kernels.zeros((64, self.head.config.hidden_size), DType.FLOAT32)
        self._forward = kernels.capture(self._run_target, largest)
        self._draft = [kernels.capture(partial(self._run_head, step), largest) for step in range(head.depth)]

    @classmethod
    def load(cls, kernels: Kernels, folder: Path, head_folder: Path, method: EagleMethod) -> Runner:
        config, context = read_model_config(folder), LayerContext(kernels, DType.FLOAT32)
        network = load_model(folder, config, context)
        assert isinstance(network, Decoder)
        return cls(kernels, network, load_head(head_folder, read_head_config(head_folder, method, config), context))

    @staticmethod
    def _make_caches(kernels: Kernels, specs: Any) -> Any:
        groups = group_layers(specs)
        caches = kernels.make_cache(groups, [BLOCKS] * len(groups), BLOCK)
        for cache in caches:
            if groups[cache.group].spec.kind == "state":
                cache.state_tokens = BLOCK
            cache.group = 0  # all have the same block tables
        return caches

    def _run_target(self, batch: ForwardBatch) -> ForwardOutput:
        reader = self.head.make_reader()
        residual = self.network.embed(batch.token_ids)
        hidden = self.network.forward_layers(residual, batch, self._caches, reader)
        features = reader.features if reader else None
        return ForwardOutput(hidden, self.network.logits(hidden), features=features)

    def _run_head(self, step: int, batch: ForwardBatch) -> ForwardOutput:
        hidden = self.head.forward_step(step, self._features[: len(batch.token_ids)], batch, self._head_caches)
        return ForwardOutput(hidden, self.head.logits(hidden))

    def _batch(self, start: int, tokens: list[int]) -> ForwardBatch:
        tables, ids = np.arange(BLOCKS, dtype=np.int32)[None], np.array(tokens, np.int64)
        batch = make_batch([len(tokens)], [start + len(tokens)], tables, BLOCK, self.kernels, token_ids=ids)
        return replace(batch, sampled_rows=self.kernels.wrap(np.arange(len(tokens))), all_sampled=True)

    def _values(self, x: Any) -> Tensor:
        return torch.from_numpy(self.kernels.to_numpy(x).copy())  # the next step overwrites it

    def features(self, start: int, tokens: list[int]) -> Tensor:
        """What the head reads of these tokens."""
        with self.kernels.mode():
            output = self._forward(self._batch(start, tokens))
        return self._values(output.hidden if output.features is None else output.features)

    def draft(self, start: int, tokens: list[int], features: Tensor, step: int = 0) -> ForwardOutput:
        """One pass of the head."""
        self.kernels.write(self._features[: len(tokens)], features.numpy())
        with self.kernels.mode():
            output = self._draft[step](self._batch(start, tokens))
        return ForwardOutput(self._values(output.hidden), self._values(output.logits))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random Llama of transformers and its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TARGET)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(folder)
    return model, folder


HEADS: dict[str, tuple[EagleMethod, Callable[[], Head]]] = {
    "EAGLE-1": ("eagle", lambda: eagle1(architectures=["LlamaForCausalLM"])),
    "two layers and a bias": ("eagle", lambda: eagle1(1, bias=True, layers=2)),
    "EAGLE-3": ("eagle3", lambda: eagle3(2, draft_vocab_size=40)),
    "all tokens, other layers": (
        "eagle3",
        lambda: eagle3(3, features=2, eagle_aux_hidden_state_layer_ids=[5, 1], norm_before_residual=True),
    ),
    "narrower": (
        "eagle3",
        lambda: eagle3(4, hidden_size=32, target_hidden_size=48, head_dim=16, own_embedding=True),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_what_the_reference_does(name: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    """Over a context in chunks, then from its own results, on every backend."""
    model, folder = target
    method, make = HEADS[name]
    head = make()
    head.save(tmp_path)
    reference = Reference(head, model)
    expected = reference.features(TOKENS[:-1])
    outputs = reference.outputs(TOKENS[1:], expected)
    for kernels in _backends():
        run = Runner.load(kernels, folder, tmp_path, method)
        features = torch.cat([run.features(0, TOKENS[:5]), run.features(5, TOKENS[5:-1])])
        torch.testing.assert_close(features.double(), expected, atol=2e-4, rtol=1e-4)
        parts = [run.draft(a, TOKENS[a + 1 : b + 1], features[a:b]) for a, b in ((0, 3), (3, 13), (13, 14))]
        hidden = torch.cat([part.hidden for part in parts])
        torch.testing.assert_close(hidden.double(), outputs, atol=1e-3, rtol=1e-3)
        logits = torch.cat([part.logits for part in parts if part.logits is not None])
        torch.testing.assert_close(logits.double(), reference.logits(outputs), atol=5e-3, rtol=1e-3)

        drafts, margins = reference.draft(TOKENS, 6)
        last, position = parts[-1], 14
        targets = None if run.head.target_ids is None else kernels.to_numpy(run.head.target_ids)
        for draft, margin in zip(drafts, margins, strict=True):
            assert last.logits is not None
            choice = int(last.logits[-1].argmax())
            choice = choice if targets is None else int(targets[choice])
            if margin < 1e-2:
                break
            assert choice == draft
            last = run.draft(position, [draft], last.hidden[-1:])
            position += 1
        assert position > 16, "the test needs drafts that are no ties"


def _without(head: Head, *names: str) -> Head:
    return Head(head.config, {name: tensor for name, tensor in head.tensors.items() if name not in names})


def _config_without(head: Head, name: str) -> Head:
    return Head({key: value for key, value in head.config.items() if key != name}, head.tensors)


def _with(head: Head, **tensors: Tensor) -> Head:
    return Head(head.config, head.tensors | {name.replace("__", "."): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("method", "head", "error", "words"),
    [
        ("eagle", lambda: _without(eagle1(), "fc.weight"), WeightError, ["lacks", "fc.weight"]),
        ("eagle3", lambda: _without(eagle3(), "midlayer.hidden_norm.weight"), WeightError, ["midlayer.hidden_norm"]),
        ("eagle", lambda: _with(eagle1(), fc__weight=torch.zeros(48, 48)), WeightError, ["'fc.weight'", "[48, 96]"]),
        ("eagle", lambda: _with(eagle1(), extra=torch.zeros(4)), WeightError, ["'extra'"]),
        ("eagle3", lambda: _without(eagle3(draft_vocab_size=40), "d2t"), WeightError, ["'d2t'", "40", "101"]),
        ("eagle3", lambda: _with(eagle3(draft_vocab_size=40), d2t=torch.zeros(39).long()), WeightError, ["'d2t'"]),
        ("eagle3", lambda: _with(eagle3(draft_vocab_size=40), d2t=torch.zeros(40)), WeightError, ["'d2t'", "F32"]),
        ("eagle3", lambda: eagle3(hidden_size=32, target_hidden_size=48, head_dim=16), WeightError, ["embed_tokens"]),
        ("eagle", lambda: eagle1(hidden_size=64, head_dim=8), ConfigError, ["hidden size is 64", "48"]),
        ("eagle3", lambda: eagle3(target_hidden_size=64), ConfigError, ["hidden size is 64", "48"]),
        ("eagle", lambda: eagle1(vocab_size=102), ConfigError, ["vocab_size is 102", "101"]),
        ("eagle3", lambda: eagle3(draft_vocab_size=200), ConfigError, ["draft_vocab_size", "200"]),
        ("eagle3", lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 3, 8]), ConfigError, ["0 to 7", "[2, 3, 8]"]),
        ("eagle3", lambda: eagle3(eagle_aux_hidden_state_layer_ids=[2, 2, 4]), ConfigError, ["distinct"]),
        ("eagle3", lambda: eagle3(num_hidden_layers=2), UnsupportedModelError, ["num_hidden_layers"]),
        ("eagle3", eagle1, UnsupportedModelError, ["EagleLlamaForCausalLM", "method 'eagle'"]),
        ("eagle", eagle3, UnsupportedModelError, ["LlamaForCausalLMEagle3", "method 'eagle3'"]),
        ("eagle", lambda: eagle1(hidden_act="gelu"), UnsupportedModelError, ["gelu"]),
        ("eagle", lambda: eagle1(quantization_config={"quant_method": "x"}), UnsupportedModelError, ["quantization"]),
        ("eagle", lambda: _config_without(eagle1(), "hidden_size"), ConfigError, ["hidden_size is missing"]),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_weights_are_read(
    method: EagleMethod,
    head: Callable[[], Head],
    error: type[OctavoError],
    words: list[str],
    target: tuple[Any, Path],
    tmp_path: Path,
) -> None:
    head().save(tmp_path)
    with pytest.raises(error) as caught:
        read_head_config(tmp_path, method, read_model_config(target[1]))
    for word in words:
        assert word in str(caught.value)


def test_a_token_map_out_of_the_vocabulary_is_refused(target: tuple[Any, Path], tmp_path: Path) -> None:
    head = eagle3(draft_vocab_size=40)
    head.tensors["d2t"] = torch.full((40,), 80)
    head.save(tmp_path)
    config = read_head_config(tmp_path, "eagle3", read_model_config(target[1]))
    with pytest.raises(WeightError, match="'d2t' leads to 19 tokens outside of the vocabulary of 101"):
        load_head(tmp_path, config, LayerContext(_backends()[0], DType.FLOAT32))


def test_pickles_are_not_read(target: tuple[Any, Path], tmp_path: Path) -> None:
    eagle1().save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin but no safetensors"):
        read_head_config(tmp_path, "eagle", read_model_config(target[1]))


def test_a_head_in_the_layout_of_speculators(target: tuple[Any, Path], tmp_path: Path) -> None:
    """The layer's settings are nested, and tensors are called layers.0."""
    head = eagle3(2, draft_vocab_size=40, norm_before_residual=True)
    inner = {**head.config, "architectures": ["LlamaForCausalLM"]}
    del inner["draft_vocab_size"], inner["norm_before_residual"]
    own = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": 40, "norm_before_residual": True}
    nested = {**own, "eagle_aux_hidden_state_layer_ids": None, "transformer_layer_config": inner}
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    config = read_model_config(target[1])
    head.save(tmp_path / "plain")
    Head(nested, tensors).save(tmp_path / "nested")
    plain, found = (read_head_config(tmp_path / name, "eagle3", config) for name in ("plain", "nested"))
    assert found == plain and found.norm_before_residual
    with pytest.raises(UnsupportedModelError, match="norm_output"):
        read_head_config(Head({**nested, "norm_output": True}, tensors).save(tmp_path / "new"), "eagle3", config)
