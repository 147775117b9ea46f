"""Readers of ``quantization_config``: what a checkpoint that other programs quantised says of its matrices.

Formats: GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ), compressed-tensors (llm-compressor), and fp8 as of DeepSeek-V3. What
they say of activations and of the KV cache is not read: only weights are quantised here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core.errors import ConfigError, UnsupportedModelError
from octavo.core.model_config import CheckpointQuantization, QuantizationScheme

if TYPE_CHECKING:
    from octavo.models.config_reader import ConfigReader

#: What compressed-tensors calls the ways to store matrices that are read; "dense" and "mixed-precision" are none.
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


def read_quantization(reader: ConfigReader) -> CheckpointQuantization | None:
    """What the object ``quantization_config`` says; None if it is empty.

    Raises:
        ConfigError: a value is of the wrong type or impossible.
        UnsupportedModelError: the method, or a format of it, is not supported.
    """
    if not reader.raw:
        return None
    method = reader.raw.get("quant_method")
    if method in _METHODS:
        return _METHODS[method](reader)
    if method == "bitsandbytes" or (method is None and (reader.flag("load_in_4bit") or reader.flag("load_in_8bit"))):
        raise UnsupportedModelError(
            "the checkpoint is quantized with 'bitsandbytes', which cannot be read: use the original checkpoint with "
            "quantization='int8' or 'int4', which quantises it as it is loaded"
        )
    raise UnsupportedModelError(
        f"the checkpoint is quantized with {method!r}, which cannot be read; supported: {', '.join(_METHODS)}; "
        "or use the float16, bfloat16 or float32 checkpoint"
    )


def _gptq(reader: ConfigReader) -> CheckpointQuantization:
    bits, group = _bits(reader, "bits", (4, 8)), _group(reader, "group_size")
    checkpoint_format = reader.raw.get("checkpoint_format") or reader.raw.get("format") or "gptq"
    _only(reader, "checkpoint_format", checkpoint_format, "gptq", "gptq_v2")
    _only(reader, "pack_dtype", reader.raw.get("pack_dtype") or "int32", "int32")
    if reader.flag("is_marlin_format"):
        raise UnsupportedModelError(
            f"{reader.file}: GPTQ weights in the layout of Marlin (is_marlin_format) are not read"
        )
    if reader.table("dynamic"):
        raise UnsupportedModelError(f"{reader.file}: GPTQ with other settings for some modules (dynamic) is not read")
    reordered = reader.flag("desc_act") and not reader.flag("static_groups") and group is not None
    return CheckpointQuantization(
        "gptq",
        (QuantizationScheme(f"int{bits}", group, symmetric=False),),
        zeros_minus_one=checkpoint_format == "gptq",
        reordered=reordered,
    )


def _awq(reader: ConfigReader) -> CheckpointQuantization:
    _only(reader, "version", str(reader.raw.get("version") or "gemm").lower(), "gemm")
    _bits(reader, "w_bit" if "w_bit" in reader.raw else "bits", (4,))
    group = _group(reader, "q_group_size" if "q_group_size" in reader.raw else "group_size")
    return CheckpointQuantization("awq", (QuantizationScheme("int4", group, symmetric=False),))


def _compressed_tensors(reader: ConfigReader) -> CheckpointQuantization:
    sparsity = reader.table("sparsity_config").get("format") or "dense"
    if sparsity != "dense":
        raise UnsupportedModelError(f"{reader.file}: compressed-tensors with sparsity {sparsity!r} is not read")
    _only(reader, "format", reader.raw.get("format"), *_COMPRESSED_FORMATS)
    schemes = []
    for name, group in reader.table("config_groups").items():
        inside = _inside(reader, group, f"config_groups.{name}")
        _only(reader, "format", inside.raw.get("format") or "dense", *_COMPRESSED_FORMATS)
        if weights := inside.table("weights"):
            schemes.append(_compressed_scheme(_inside(reader, weights, f"config_groups.{name}.weights")))
    return CheckpointQuantization("compressed-tensors", tuple(schemes))


def _compressed_scheme(reader: ConfigReader) -> QuantizationScheme:
    kind = reader.raw.get("type") or "int"
    _only(reader, "type", kind, "int", "float")
    bits = _bits(reader, "num_bits", (4, 8) if kind == "int" else (8,))
    strategy = reader.raw.get("strategy") or ("group" if reader.raw.get("group_size") else "tensor")
    _only(reader, "strategy", strategy, "tensor", "channel", "group", "block")
    return QuantizationScheme(
        f"int{bits}" if kind == "int" else "fp8",
        _group(reader, "group_size") if strategy == "group" else None,
        _block(reader, "block_structure") if strategy == "block" else None,
        reader.raw.get("symmetric") is not False,
    )


def _fp8(reader: ConfigReader) -> CheckpointQuantization:
    _only(reader, "fmt", reader.raw.get("fmt") or "e4m3", "e4m3", "float8_e4m3fn")
    block = None if reader.raw.get("weight_block_size") is None else _block(reader, "weight_block_size")
    return CheckpointQuantization("fp8", (QuantizationScheme("fp8", block=block),))


_METHODS: dict[Any, Callable[[ConfigReader], CheckpointQuantization]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
}


def _inside(reader: ConfigReader, value: Any, name: str) -> ConfigReader:
    if not isinstance(value, dict):
        raise ConfigError(f"{reader.file}: {name} must be an object, not {value!r}")
    return type(reader)(value, reader.file)


def _only(reader: ConfigReader, name: str, value: Any, *supported: str) -> None:
    if value not in supported:
        raise UnsupportedModelError(
            f"{reader.file}: quantization with {name} {value!r} is not supported; supported: {', '.join(supported)}"
        )


def _bits(reader: ConfigReader, name: str, supported: tuple[int, ...]) -> int:
    bits = reader.positive(name)
    if bits not in supported:
        raise UnsupportedModelError(
            f"{reader.file}: weights of {bits} bits are not supported; supported: {', '.join(map(str, supported))}"
        )
    return bits


def _group(reader: ConfigReader, name: str) -> int | None:
    """Values that share a scale; None if it is -1, the whole row."""
    return None if reader.raw.get(name) == -1 else reader.positive(name)


def _block(reader: ConfigReader, name: str) -> tuple[int, int]:
    value = reader.raw.get(name)
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise ConfigError(f"{reader.file}: {name} must be a list of two positive integers, not {value!r}")
    return value[0], value[1]
