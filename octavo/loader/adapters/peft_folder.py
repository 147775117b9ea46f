"""LoRA adapters in folders of PEFT: adapter_config.json and adapter_model.safetensors.

The meaning of the settings is that of ``peft.LoraConfig`` (https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.bounded_file import read_bounded
from octavo.core.errors import AdapterError
from octavo.loader.adapters.lora_pairs import LoraPair
from octavo.loader.adapters.targets import AdapterTargets
from octavo.loader.adapters.tensor_file import TensorEntry, read_entries

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_DOWN = (".lora_A.weight", ".lora_embedding_A")
_UP = (".lora_B.weight", ".lora_embedding_B")
#: A copy of the model's own table, which PEFT saves beside the matrices of an adapted embedding or head.
_BASE = ".base_layer.weight"

#: Settings that change what is computed, with why others than their empty or false values are refused.
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "lora_bias": "biases are not supported",
    "modules_to_save": "whole modules beside the low-rank matrices are not supported",
    "trainable_token_indices": "trained rows of embeddings are not supported",
    "target_parameters": "parameters that are no linear layer, such as those of experts, take no adapters",
    "layer_replication": "layers are not repeated",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "routing between adapters is not supported",
    "kasa_config": "KaSA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "ensure_weight_tying": "an adapter of the embedding is not that of a tied head",
}
#: Initialisations that change the model's own weights: the adapter belongs to other weights than the checkpoint's.
_CHANGES_MODEL = re.compile(r"pissa|olora|corda|loftq|lora_ga|mica")
_KNOWN_INITS = (True, False, "gaussian", "eva", "orthogonal")

#: Limits of the patterns of ranks and alphas, which are regular expressions that others have written.
_MAX_PATTERNS, _MAX_PATTERN_CHARS, _MAX_REPEATS = 65536, 512, 4


def read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """The adapter_config.json of a folder, and its bytes.

    Raises:
        AdapterError: there is none, or it is no JSON object.
    """
    file = folder / CONFIG_FILE
    if not folder.exists():
        raise AdapterError(f"there is no adapter at {folder}: expected a folder with {CONFIG_FILE}, or a GGUF file")
    if not file.is_file():
        hint = "; it holds a whole model, which is no adapter" if (folder / "config.json").is_file() else ""
        raise AdapterError(f"{folder} has no {CONFIG_FILE}{hint}")
    text = read_bounded(file, _MAX_CONFIG_BYTES, AdapterError)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterError(f"{file} is no JSON") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{file} is no JSON object")
    return text, raw


def weights_file(folder: Path) -> Path:
    """The safetensors of an adapter.

    Raises:
        AdapterError: there are none.
    """
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    if (folder / "adapter_model.bin").exists():
        raise AdapterError(
            f"{folder} holds adapter_model.bin but no {WEIGHTS_FILE}: such files are pickles, which can run code and "
            "are never loaded; save the adapter with save_pretrained(FOLDER, safe_serialization=True)"
        )
    raise AdapterError(f"{folder} has no {WEIGHTS_FILE}")


def read_pairs(folder: Path, raw: Mapping[str, Any], targets: AdapterTargets) -> list[LoraPair]:
    """The pairs of matrices of a folder, as its configuration and the header of its tensors describe them.

    Raises:
        AdapterError: a setting is wrong or not supported, or a tensor is no low-rank matrix or lacks its partner.
    """
    config = _Config(folder / CONFIG_FILE, raw)
    file = weights_file(folder)
    downs: dict[str, TensorEntry] = {}
    ups: dict[str, TensorEntry] = {}
    for entry in read_entries(file):
        module, kind = _split_name(entry.name)
        if kind in _DOWN:
            downs[module] = entry
        elif kind in _UP:
            ups[module] = entry
        elif kind == _BASE:
            _check_copy(module, entry, targets, file)
        else:
            raise AdapterError(
                f"{file}: tensor {entry.name!r} is no low-rank matrix: expected names such as "
                f"{_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight; whole tensors, biases and DoRA are not "
                "supported"
            )
    for module, entry in sorted((downs | ups).items()):
        if module not in downs or module not in ups:
            raise AdapterError(f"{file}: tensor {entry.name!r} has no partner: both matrices of {module!r} are needed")
    return [_pair(config, module, downs[module], ups[module], file) for module in downs]


def _pair(config: _Config, module: str, down: TensorEntry, up: TensorEntry, file: Path) -> LoraPair:
    rank = config.rank(module)
    if down.shape[:1] != (rank,):
        raise AdapterError(
            f"{file}: tensor {down.name!r} has shape {list(down.shape)}, but {CONFIG_FILE} gives {module!r} rank {rank}"
        )
    return LoraPair(module, down.name, up.name, down.shape, up.shape, config.scale(module))


def _split_name(name: str) -> tuple[str, str]:
    """The module and what follows; ("", "") of a name that is none of an adapter's."""
    if name.startswith(_PREFIX):
        for kind in (*_DOWN, *_UP, _BASE):
            if name.endswith(kind):
                return name[len(_PREFIX) : -len(kind)], kind
    return "", ""


def _check_copy(module: str, entry: TensorEntry, targets: AdapterTargets, file: Path) -> None:
    """Refuses a copy of a module's own weight if its shape is another: the vocabulary was resized."""
    if len(entry.shape) == 2 and 0 not in entry.shape:
        for shape in (entry.shape, entry.shape[::-1]):  # that of an embedding is transposed
            try:
                if all(t.inputs == shape[1] for t, _ in targets.find(module, np.empty((shape[0], 0), np.float32))):
                    return
            except AdapterError:
                continue
    raise AdapterError(
        f"{file}: tensor {entry.name!r} has shape {list(entry.shape)}, which is not that of the model's own: adapters "
        "of a resized vocabulary are not supported"
    )


class _Config:
    """The settings of a LoRA adapter, checked."""

    def __init__(self, file: Path, raw: Mapping[str, Any]) -> None:
        self._file = file
        _refuse_other_methods(file, raw)
        self._rank = self._positive("r", raw.get("r", 8))
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha", 8))
        self._root = raw.get("use_rslora") is True
        self._ranks = self._patterns("rank_pattern", raw)
        self._alphas = self._patterns("alpha_pattern", raw)

    def rank(self, module: str) -> int:
        """Rank of a module's matrices."""
        key = _matching(self._ranks, module)
        return self._rank if key is None else self._positive(f"rank_pattern[{key!r}]", self._ranks[key][1])

    def scale(self, module: str) -> float:
        """What a module's product is multiplied by; of rank-stabilised LoRA see arXiv 2312.03732, section 3."""
        key, rank = _matching(self._alphas, module), self.rank(module)
        alpha = self._alpha if key is None else self._number(f"alpha_pattern[{key!r}]", self._alphas[key][1])
        return alpha / (math.sqrt(rank) if self._root else rank)

    def _positive(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AdapterError(f"{self._file}: {name} must be a positive integer, not {value!r}")
        return value

    def _number(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e30:
            raise AdapterError(f"{self._file}: {name} must be a number, not {value!r}")
        return float(value)

    def _patterns(self, name: str, raw: Mapping[str, Any]) -> dict[str, tuple[re.Pattern[str], Any]]:
        table = raw.get(name) or {}
        if not isinstance(table, dict) or len(table) > _MAX_PATTERNS:
            raise AdapterError(f"{self._file}: {name} must be an object of at most {_MAX_PATTERNS} patterns")
        return {key: (self._compiled(name, key), value) for key, value in table.items()}

    def _compiled(self, name: str, key: str) -> re.Pattern[str]:
        # Repeated groups, and many repetitions, could take hours to match.
        harmless = len(key) <= _MAX_PATTERN_CHARS and len(re.findall(r"[*+{]", key)) <= _MAX_REPEATS
        try:
            if harmless and not re.search(r"\)[*+?{]", key):
                return re.compile(rf"(.*\.)?({key})$")
        except (re.error, OverflowError, RecursionError):
            pass
        raise AdapterError(f"{self._file}: {name} has the pattern {key[:100]!r}, which is wrong or too complex")


def _matching(patterns: Mapping[str, tuple[re.Pattern[str], Any]], module: str) -> str | None:
    """The first pattern that matches the end of a module's name, as ``peft.utils.get_pattern_key`` finds it."""
    return next((key for key, (pattern, _) in patterns.items() if pattern.match(module)), None)


def _refuse_other_methods(file: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type={raw.get('peft_type')!r} is not supported; supported: 'LORA'")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"{file}: bias={raw['bias']!r} is not supported: biases are the model's; supported: 'none'")
    for name, why in _REFUSED.items():
        if raw.get(name):
            raise AdapterError(f"{file}: {name}={raw[name]!r} is not supported: {why}")
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and _CHANGES_MODEL.match(init):
        raise AdapterError(
            f"{file}: init_lora_weights={init!r} is not supported: such an adapter belongs to weights that the "
            "initialisation has changed; save it with path_initial_model_for_weight_conversion"
        )
    if init not in (None, *_KNOWN_INITS):
        raise AdapterError(f"{file}: init_lora_weights={init!r} is not supported")
    for name, value in raw.items():  # variants that are newer than this list
        if name.startswith("use_") and name != "use_rslora" and value:
            raise AdapterError(f"{file}: {name}={value!r} is not supported")
