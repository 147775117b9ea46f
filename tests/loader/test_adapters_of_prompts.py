"""Prompt adapters of PEFT in folders: what is read, and what is refused by which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.config.options import AdapterOptions
from octavo.core.errors import AdapterError
from octavo.core.request import AdapterRef
from octavo.loader.adapters import VirtualTokenSizes, check_prompt_adapter, is_prompt_adapter, read_prompt_adapter

SIZES = VirtualTokenSizes(width=6, layers=2, kv_heads=2, head_dim=4)
OPTIONS = AdapterOptions(enable_prompt_adapter=True, max_prompt_adapter_token=5)
PREFIX = {"peft_type": "PREFIX_TUNING"}


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    count = next(iter(tensors.values())).shape[0]
    values = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": count, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def check(folder: Path, options: AdapterOptions = OPTIONS, sizes: VirtualTokenSizes = SIZES) -> AdapterRef:
    return check_prompt_adapter(folder, "a", sizes, options)


def embeddings(*shape: int) -> dict[str, np.ndarray]:
    return {"prompt_embeddings": np.random.default_rng(1).standard_normal(shape, np.float32)}


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_embeddings_are_read(tmp_path: Path, kind: str) -> None:
    tensors = embeddings(3, 6)
    ref = check(write(tmp_path / "a", tensors, peft_type=kind))
    assert (ref.rank, ref.num_virtual_tokens, is_prompt_adapter(ref.path)) == (0, 3, True)
    tokens = read_prompt_adapter(ref, SIZES)
    assert tokens.keys_values is None and tokens.embeddings is not None
    assert np.array_equal(tokens.embeddings, tensors["prompt_embeddings"])


def test_keys_and_values_are_read_by_layer(tmp_path: Path) -> None:
    tensors = embeddings(3, 32)
    found = read_prompt_adapter(check(write(tmp_path / "a", tensors, **PREFIX)), SIZES).keys_values
    assert found is not None and found.shape == (2, 2, 3, 2, 4)
    # Token 2, layer 1: its key is the third of four parts, its value the last.
    row = tensors["prompt_embeddings"][2].reshape(4, 2, 4)
    assert np.array_equal(found[1, 0, 2], row[2]) and np.array_equal(found[1, 1, 2], row[3])


def test_the_key_names_the_content(tmp_path: Path) -> None:
    first = check(write(tmp_path / "a", embeddings(3, 6)))
    copy = check(write(tmp_path / "b", embeddings(3, 6)))
    other = check(write(tmp_path / "c", {"prompt_embeddings": np.ones((3, 6), np.float32)}))
    assert first.key == copy.key != other.key


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (embeddings(3, 7), {}, r"has shape \[3, 7\], but the model needs \[3, 6\]: virtual tokens and width"),
        (embeddings(3, 48), PREFIX, r"\[3, 48\], but the model needs \[3, 32\]: virtual tokens, and 2 layers x 2 x 2"),
        (embeddings(6, 6), {}, "it has 6 virtual tokens, but max_prompt_adapter_token is 5"),
        (embeddings(3, 6), {"num_virtual_tokens": 4}, r"\[3, 6\], but the model needs \[4, 6\]"),
        (embeddings(3, 6), {"num_virtual_tokens": "3"}, "num_virtual_tokens must be a positive integer"),
        (embeddings(3, 6), {"num_virtual_tokens": True}, "num_virtual_tokens must be a positive integer"),
        (embeddings(3, 6), {"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' is not supported"),
        (embeddings(3, 6), {"num_transformer_submodules": 2}, "adapters of encoder-decoders"),
        (
            embeddings(3, 6),
            {"peft_type": "MULTITASK_PROMPT_TUNING"},
            "peft_type='MULTITASK_PROMPT_TUNING' is not supported",
        ),
        (
            embeddings(3, 6),
            {"peft_type": "LORA"},
            "peft_type='LORA' is not supported; with virtual tokens: PROMPT_TUNING",
        ),
        ({"weight": np.ones((3, 6), np.float32)}, {}, "has no tensor 'prompt_embeddings'"),
        (
            {**embeddings(3, 6), "lm_head.weight": np.ones(2, np.float32)},
            {},
            "tensor 'lm_head.weight' is not supported beside",
        ),
        ({"prompt_embeddings": np.ones((3, 6), np.int64)}, {}, "is of type I64; expected float32"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        check(write(tmp_path / "a", tensors, **config))


def test_prefixes_need_keys_and_values(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="needs a cache of equal keys and values"):
        check(write(tmp_path / "a", embeddings(3, 32), **PREFIX), sizes=VirtualTokenSizes(6, 2, 0, 0))


def test_the_option_must_be_on(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="needs an engine with enable_prompt_adapter=True"):
        check(write(tmp_path / "a", embeddings(3, 6)), AdapterOptions())


def test_values_that_are_not_finite_are_refused_when_they_are_read(tmp_path: Path) -> None:
    tensors = embeddings(3, 6)
    tensors["prompt_embeddings"][1, 4] = float("nan")
    ref = check(write(tmp_path / "a", tensors))
    with pytest.raises(AdapterError, match=r"'prompt_embeddings' .* a value at \[1, 4\] that is not finite"):
        read_prompt_adapter(ref, SIZES)


def test_changed_files_are_noticed(tmp_path: Path) -> None:
    ref = check(write(tmp_path / "a", embeddings(3, 6)))
    write(tmp_path / "a", {"prompt_embeddings": np.ones((3, 6), np.float32)})
    with pytest.raises(AdapterError, match="changed on disk after it was loaded"):
        read_prompt_adapter(ref, SIZES)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", embeddings(3, 6))
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="has no adapter_model"):
        check(folder)
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(AdapterError, match="must hold a JSON object"):
        check(folder)
    assert not is_prompt_adapter(folder) and not is_prompt_adapter(tmp_path / "nowhere")
    assert is_prompt_adapter(write(tmp_path / "b", embeddings(3, 6), peft_type="CPT"))
    assert not is_prompt_adapter(write(tmp_path / "c", embeddings(3, 6), peft_type="LORA"))
