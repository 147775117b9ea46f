"""Prompt adapters of PEFT: virtual tokens before the prompt, as embeddings or as keys and values of every layer.

A folder has adapter_config.json, and adapter_model.safetensors with one tensor, ``prompt_embeddings``. What an encoder
computes in training (P-tuning, a prefix projection) is folded into it when PEFT saves.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from octavo.core.adapters import AdapterRef
from octavo.core.errors import AdapterError
from octavo.core.kv_spec import KVSpec
from octavo.core.model_config import ModelConfig
from octavo.core.option_parts import AdapterOptions
from octavo.models.sizes import outline

_CONFIG, _WEIGHTS, _TENSOR = "adapter_config.json", "adapter_model.safetensors", "prompt_embeddings"
#: Prompt tuning (Lester et al. 2021) and P-tuning (Liu et al. 2021) train embeddings.
_EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING")
#: Prefix tuning (Li and Liang 2021) trains keys and values.
_PREFIX = "PREFIX_TUNING"
PROMPT_TYPES = (*_EMBEDDINGS, _PREFIX)
#: Kinds of PEFT that have virtual tokens too, and are not supported.
_OTHERS = ("MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT", "CPT", "CARTRIDGE")
_DTYPES = ("F32", "BF16", "F16")
#: Most bytes of a config, and of what a weight file has beside its tensor.
_MAX_CONFIG = 1 << 20


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
        network = outline(config, "float32")
        width = next(shape[1] for name, shape in _shapes(network) if name == "model.embed_tokens.weight")
        heads = {(spec.num_kv_heads, spec.head_dim) if _holds_keys(spec) else (0, 0) for spec in network.kv_specs}
        kv_heads, head_dim = heads.pop() if len(heads) == 1 else (0, 0)
        return cls(width, len(network.kv_specs), kv_heads, head_dim)


@dataclass(frozen=True)
class VirtualTokens:
    """The n virtual tokens of an adapter: one of the two, of the type that they are stored in."""

    #: [n, E]: embeddings.
    embeddings: Tensor | None = None
    #: [layers, 2, n, kv_heads, head_dim]: keys and values, as they are cached.
    keys_values: Tensor | None = None


def peft_type(path: str) -> str | None:
    """What adapter_config.json of a folder says that its adapter is; None if there is no such file that says it."""
    try:
        file = Path(path) / _CONFIG
        kind = _parse(_read(file, _MAX_CONFIG), file).get("peft_type")
    except AdapterError:
        return None
    return kind if isinstance(kind, str) else None


def check_prompt_adapter(name: str, path: str, options: AdapterOptions, sizes: VirtualTokenSizes) -> AdapterRef:
    """Compares an adapter's config and header with the model; of its values only the digest is taken.

    Raises:
        AdapterError: it cannot be used with this model and these options; the message says why.
    """
    folder = Path(path)
    text = _read(folder / _CONFIG, _MAX_CONFIG)
    count = _check(_parse(text, folder / _CONFIG), folder, sizes, options.max_prompt_adapter_token)
    if not options.enable_prompt_adapter:
        raise AdapterError(f"{path!r} is a prompt adapter, which needs an engine with enable_prompt_adapter=True")
    ref = AdapterRef("", name, str(folder.resolve()), 0, count)
    key = _digest(text, _read(folder / _WEIGHTS, _max_bytes(ref, sizes)))
    return msgspec.structs.replace(ref, key=key)


def read_prompt_adapter(ref: AdapterRef, sizes: VirtualTokenSizes) -> VirtualTokens:
    """The virtual tokens of an adapter that was checked.

    Raises:
        AdapterError: its files are not those that were checked, or a value is not finite.
    """
    folder = Path(ref.path)
    config, weights = _read(folder / _CONFIG, _MAX_CONFIG), _read(folder / _WEIGHTS, _max_bytes(ref, sizes))
    # The digest is of the very bytes that are used: files may change while they are read.
    if _digest(config, weights) != ref.key:
        raise AdapterError(f"the files of {ref.path!r} have changed since the adapter was loaded; load it again")
    tensor = load(weights)[_TENSOR]
    if not torch.isfinite(tensor).all():
        place = [int(i) for i in (~torch.isfinite(tensor)).nonzero()[0]]
        raise AdapterError(f"tensor {_TENSOR!r} of {folder / _WEIGHTS} has a value at {place} that is not finite")
    if _kind(_parse(config, folder / _CONFIG), folder) != _PREFIX:
        return VirtualTokens(embeddings=tensor)
    parts = tensor.view(len(tensor), sizes.layers, 2, sizes.kv_heads, sizes.head_dim)
    return VirtualTokens(keys_values=parts.permute(1, 2, 0, 3, 4).contiguous())


def _check(config: dict[str, Any], folder: Path, sizes: VirtualTokenSizes, most: int) -> int:
    """The number of virtual tokens, at most ``most``, of an adapter that fits a model of these sizes."""
    kind, count = _kind(config, folder), config.get("num_virtual_tokens")
    where = f"{folder / _CONFIG}: "
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise AdapterError(f"{where}num_virtual_tokens must be an integer of at least 1, not {count!r:.100}")
    if count > most:
        raise AdapterError(f"{where}it has {count} virtual tokens; max_prompt_adapter_token allows {most}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"{where}task_type must be CAUSAL_LM, not {config['task_type']!r:.100}")
    if config.get("num_transformer_submodules") not in (None, 1):
        raise AdapterError(f"{where}adapters of encoder-decoders do not belong to this model")
    if kind != _PREFIX:
        shape, meaning = (count, sizes.width), "virtual tokens and width of the embedding"
    elif not sizes.kv_heads:
        raise AdapterError(f"{where}prefix tuning needs a cache of equal keys and values in every layer of the model")
    else:
        shape = count, sizes.layers * 2 * sizes.kv_heads * sizes.head_dim
        meaning = (
            f"virtual tokens, and {sizes.layers} layers x 2 x {sizes.kv_heads} KV heads x head size {sizes.head_dim}"
        )
    _check_header(folder / _WEIGHTS, shape, meaning)
    return count


def _check_header(path: Path, shape: tuple[int, int], meaning: str) -> None:
    """Refuses a weight file that has not the one tensor that it should have."""
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            stored = file.get_slice(_TENSOR) if _TENSOR in names else None
            found = None if stored is None else (stored.get_dtype(), tuple(stored.get_shape()))
    except FileNotFoundError:
        raise AdapterError(f"{path} is missing; adapters are read from safetensors files only") from None
    except (SafetensorError, OSError) as e:
        raise AdapterError(f"{path} cannot be read: {e}") from None
    if found is None:
        raise AdapterError(f"{path} lacks the tensor {_TENSOR!r} of prompt adapters; it has {names[:3]}")
    if len(names) > 1:
        other = next(name for name in names if name != _TENSOR)
        raise AdapterError(f"{path} has the tensor {other!r}; a prompt adapter has {_TENSOR!r} alone")
    dtype, actual = found
    if dtype not in _DTYPES:
        raise AdapterError(f"tensor {_TENSOR!r} of {path} is of type {dtype}; expected {', '.join(_DTYPES)}")
    if actual != shape:
        raise AdapterError(
            f"tensor {_TENSOR!r} of {path} has the shape {list(actual)}, but the model needs {list(shape)}: {meaning}"
        )


def _kind(config: dict[str, Any], folder: Path) -> str:
    kind = config.get("peft_type")
    if kind in PROMPT_TYPES:
        return str(kind)
    hint = "is not supported" if kind in _OTHERS else "is no prompt adapter"
    raise AdapterError(f"{folder / _CONFIG}: peft_type {kind!r:.100} {hint}; supported are {', '.join(PROMPT_TYPES)}")


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as e:
        raise AdapterError(f"{path} cannot be read: {e.strerror}") from None
    if len(content) > most:
        raise AdapterError(f"{path} is longer than {most} bytes")
    return content


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise AdapterError(f"{path} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{path} must hold an object, not {type(value).__name__}")
    return value


def _digest(config: bytes, weights: bytes) -> str:
    """Of the contents of both files."""
    return hashlib.sha256(hashlib.sha256(config).digest() + hashlib.sha256(weights).digest()).hexdigest()


def _max_bytes(ref: AdapterRef, sizes: VirtualTokenSizes) -> int:
    """Of the weight file of an adapter that was checked."""
    keys_values = sizes.layers * 2 * sizes.kv_heads * sizes.head_dim
    return ref.num_virtual_tokens * max(sizes.width, keys_values) * 4 + _MAX_CONFIG


def _holds_keys(spec: KVSpec) -> bool:
    return spec.kind in ("full", "sliding")


def _shapes(network: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, layer.expected[shard]) for name, layer, shard in network.tensors()]
