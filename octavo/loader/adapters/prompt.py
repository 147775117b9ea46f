"""Prompt adapters of PEFT: virtual tokens before the prompt, as embeddings or as keys and values of every layer.

A folder has adapter_config.json, and adapter_model.safetensors with one tensor, ``prompt_embeddings``. What an encoder
computes in training (P-tuning, a prefix projection) is folded into it when PEFT saves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.adapters import AdapterRef
from octavo.core.errors import AdapterError
from octavo.core.model_config import ModelConfig
from octavo.core.option_parts import AdapterOptions
from octavo.loader.adapters.peft_folder import CONFIG_FILE, read_config, weights_file
from octavo.loader.adapters.tensor_file import digest_file, new_digest, read_entries, read_tensors
from octavo.models.sizes import build_without_weights

_TENSOR = "prompt_embeddings"
#: Prompt tuning (Lester et al. 2021) and P-tuning (Liu et al. 2021) train embeddings.
_EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING")
#: Prefix tuning (Li and Liang 2021) trains keys and values.
_PREFIX = "PREFIX_TUNING"
_KINDS = (*_EMBEDDINGS, _PREFIX)
#: Kinds of PEFT that have virtual tokens too.
_OTHERS = ("MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")


@dataclass(frozen=True)
class VirtualTokenSizes:
    """What virtual tokens of a model look like."""

    #: E: width of the token embedding.
    width: int
    layers: int
    #: Of every layer; 0 if the layers' caches cannot hold keys and values of prefix tuning.
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> VirtualTokenSizes:
        """Those of the whole network, on all ranks."""
        network = build_without_weights(config, "float32")
        width = next(w.shape[1] for w in network.weights() if w.name == "model.embed_tokens.weight")
        plain = all(spec.kind in ("full", "sliding") for spec in network.kv_specs)
        heads = {(spec.num_kv_heads, spec.head_dim) for spec in network.kv_specs}
        return cls(width, len(network.kv_specs), *(heads.pop() if plain and len(heads) == 1 else (0, 0)))


@dataclass(frozen=True)
class VirtualTokens:
    """The n virtual tokens of an adapter, float32: one of the two."""

    #: [n, E]
    embeddings: np.ndarray | None = None
    #: [layers, 2, n, kv_heads, head_dim]: keys and values, as they are cached.
    keys_values: np.ndarray | None = None


def is_prompt_adapter(path: str | Path) -> bool:
    """Whether a folder's adapter_config.json is that of an adapter with virtual tokens, supported or not."""
    try:
        return read_config(Path(os.path.expanduser(path)))[1].get("peft_type") in (*_KINDS, *_OTHERS)
    except AdapterError:
        return False


def check_prompt_adapter(path: str | Path, name: str, sizes: VirtualTokenSizes, options: AdapterOptions) -> AdapterRef:
    """Checks all of a prompt adapter but its values, and computes the digest of its files, as ``check_adapter`` does.

    Raises:
        AdapterError: it cannot be used with this model and these options; the message says why.
    """
    folder = Path(os.path.expanduser(path))
    text, config = read_config(folder)
    if not options.enable_prompt_adapter:
        raise AdapterError(f"{folder} holds a prompt adapter, which needs an engine with enable_prompt_adapter=True")
    count, file = _check(folder, config, sizes), weights_file(folder)
    if count > options.max_prompt_adapter_token:
        raise AdapterError(
            f"{folder / CONFIG_FILE}: it has {count} virtual tokens, but max_prompt_adapter_token is "
            f"{options.max_prompt_adapter_token}"
        )
    digest = new_digest(text)
    digest_file(file, digest)
    return AdapterRef(digest.hexdigest(), name, str(folder.absolute()), 0, count)


def read_prompt_adapter(ref: AdapterRef, sizes: VirtualTokenSizes) -> VirtualTokens:
    """The virtual tokens of an adapter that ``check_prompt_adapter`` has checked, if its files are the same.

    Raises:
        AdapterError: they are not, or cannot be read; or a value is infinite or not a number.
    """
    folder = Path(ref.path)
    text, config = read_config(folder)
    _check(folder, config, sizes)
    digest, file = new_digest(text), weights_file(folder)
    tensor = read_tensors(file, (_TENSOR,), digest).get(_TENSOR)
    # The digest is of the very bytes that were read.
    if tensor is None or digest.hexdigest() != ref.key:
        raise AdapterError(
            f"the files of adapter {ref.name!r} changed on disk after it was loaded; load it again: {ref.path}"
        )
    wrong = np.argwhere(~np.isfinite(tensor))
    if len(wrong):
        raise AdapterError(f"{file}: tensor {_TENSOR!r} has a value at {wrong[0].tolist()} that is not finite")
    if config["peft_type"] != _PREFIX:
        return VirtualTokens(embeddings=tensor)
    parts = tensor.reshape(len(tensor), sizes.layers, 2, sizes.kv_heads, sizes.head_dim)
    return VirtualTokens(keys_values=parts.transpose(1, 2, 0, 3, 4))


def _check(folder: Path, config: Mapping[str, Any], sizes: VirtualTokenSizes) -> int:
    """The number of virtual tokens of an adapter whose config and tensor fit a model of these sizes."""
    where, kind, count = f"{folder / CONFIG_FILE}: ", config.get("peft_type"), config.get("num_virtual_tokens")
    if kind not in _KINDS:
        raise AdapterError(f"{where}peft_type={kind!r:.100} is not supported; with virtual tokens: {', '.join(_KINDS)}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise AdapterError(f"{where}num_virtual_tokens must be a positive integer, not {count!r:.100}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"{where}task_type={config['task_type']!r:.100} is not supported; supported: 'CAUSAL_LM'")
    if config.get("num_transformer_submodules") not in (None, 1):
        raise AdapterError(f"{where}adapters of encoder-decoders are not supported")
    if kind != _PREFIX:
        shape, meaning = (count, sizes.width), "virtual tokens and width of the embedding"
    elif not sizes.kv_heads:
        raise AdapterError(f"{where}prefix tuning needs a cache of equal keys and values in every layer of the model")
    else:
        shape = count, sizes.layers * 2 * sizes.kv_heads * sizes.head_dim
        meaning = (
            f"virtual tokens, and {sizes.layers} layers x 2 x {sizes.kv_heads} KV heads x head size {sizes.head_dim}"
        )
    file = weights_file(folder)
    found = {entry.name: entry.shape for entry in read_entries(file)}
    if _TENSOR not in found:
        raise AdapterError(f"{file} has no tensor {_TENSOR!r}, in which PEFT saves virtual tokens")
    if len(found) > 1:
        other = next(name for name in found if name != _TENSOR)
        raise AdapterError(f"{file}: tensor {other!r} is not supported beside {_TENSOR!r}")
    if found[_TENSOR] != shape:
        raise AdapterError(
            f"{file}: tensor {_TENSOR!r} has shape {list(found[_TENSOR])}, but the model needs {list(shape)}: {meaning}"
        )
    return count
