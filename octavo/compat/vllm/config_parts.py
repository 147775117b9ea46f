"""vLLM's ``VllmConfig`` (earlier ``EngineConfig``) and its parts: read-only views of an engine's options."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError, did_you_mean
from octavo.core.model_config import ModelConfig as NetworkConfig
from octavo.engine.core import EngineCore, resolve_dtype
from octavo.kernels import resolve_device
from octavo.loader.resolve import resolve_model
from octavo.loader.weights import read_config


class VllmConfig:
    """The options of an engine by part, as in ``config.cache_config.block_size``; Octavo's own names work, too.

    Facts of the network are those of the engine; without one they are read from the model's files when first asked for.
    """

    #: Parts of vLLM that have nothing to say here.
    compilation_config = quant_config = kv_transfer_config = observability_config = None

    def __init__(self, engine_config: EngineConfig, core: EngineCore | None = None) -> None:
        self.__dict__.update(engine_config=engine_config, core=core)

    @cached_property
    def network(self) -> NetworkConfig:
        """The configuration of the network."""
        return read_config(self.folder, self.engine_config) if self.core is None else self.core.model_config

    @property
    def folder(self) -> Path:
        """The model's files; without weights if none are there yet."""
        return Path(resolve_model(self.engine_config.model, revision=self.engine_config.revision, weights=False))

    def __getattr__(self, name: str) -> Any:
        if name in PARTS:
            return PARTS[name](self)
        if name in _OPTIONAL_PARTS:
            option, part = _OPTIONAL_PARTS[name]
            return part(self) if getattr(self.engine_config, option) else None
        if name == "speculative_config" or name in EngineConfig.model_fields:
            return getattr(self.engine_config, name)
        known = [*PARTS, *_OPTIONAL_PARTS, *EngineConfig.model_fields]
        raise AttributeError(f"VllmConfig has no {name!r}; {did_you_mean(name, known, 'dir() lists its names')}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(_read_only("VllmConfig", name, value))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *PARTS, *_OPTIONAL_PARTS, *EngineConfig.model_fields})


class ConfigPart:
    """Options that vLLM has together; ``EngineArgs(...).create_engine_config()`` and engines have the parts."""

    #: vLLM's names of options, ``vLLM's=Octavo's`` where they differ.
    options: ClassVar[str] = ""

    def __init__(self, config: VllmConfig | None = None, *_: object, **options: object) -> None:
        if not isinstance(config, VllmConfig):
            given = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "..."
            raise ConfigError(f"{type(self).__name__} is made by EngineArgs({given}).create_engine_config()")
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        own = self._own_names().get(name)
        if name.startswith("__") or own is None:
            others = [f"{part}.{name}" for part, kind in PARTS.items() if name in kind._own_names()]
            hint = f"it is {others[0]}" if others else did_you_mean(name, dir(self), "dir() lists its names")
            raise AttributeError(f"{type(self).__name__} has no {name!r}; {hint}")
        return getattr(self._config.engine_config, own)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(_read_only(type(self).__name__, name, value))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._own_names()})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._own_names())})"

    @classmethod
    def _own_names(cls) -> dict[str, str]:
        return {name.partition("=")[0]: name.rpartition("=")[2] for name in cls.options.split()}


def _read_only(kind: str, name: str, value: object) -> str:
    return f"{kind} is read-only: give the option to EngineArgs or LLM ({name}={value!r})"


class ModelConfig(ConfigPart):
    """The model; further names are those of the network's configuration."""

    options = (
        "model task model_impl trust_remote_code skip_tokenizer_init revision seed quantization hf_overrides "
        "max_logprobs logits_processors generation_config enforce_eager served_model_name=model"
    )

    def __getattr__(self, name: str) -> Any:
        if name in self._own_names() or name not in NetworkConfig.__dataclass_fields__:
            return super().__getattr__(name)
        return getattr(self._config.network, name)

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name; by default the model's."""
        return self._config.engine_config.tokenizer or self.model

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        if self._config.core is not None:
            return self._config.core.max_model_len
        return self._config.engine_config.max_model_len or self._config.network.default_length

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``."""
        return resolve_dtype(self._config.engine_config, self._config.network)

    @property
    def hf_config(self) -> SimpleNamespace:
        """What config.json says, as far as it says it; ``id2label`` by number."""
        content = json.loads((self._config.folder / "config.json").read_text(encoding="utf-8"))
        return SimpleNamespace(**{**content, "id2label": dict(enumerate(self.labels))})

    hf_text_config = hf_config

    def get_vocab_size(self) -> int:
        """Token ids of the network."""
        return self._config.network.vocab_size

    def get_hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return self._config.network.hidden_size

    def get_head_size(self) -> int:
        """Numbers of an attention head."""
        return self._config.network.head_dim


class CacheConfig(ConfigPart):
    """The KV cache."""

    options = (
        "block_size gpu_memory_utilization swap_space cache_dtype=kv_cache_dtype num_gpu_blocks_override "
        "num_cpu_blocks_override=num_host_blocks_override enable_prefix_caching kv_cache_memory_bytes watermark"
    )

    @property
    def num_gpu_blocks(self) -> int | None:
        """Blocks on the device (of the first KV group); None without an engine."""
        core = self._config.core
        return None if core is None else core.startup.groups[0].num_blocks

    @property
    def num_cpu_blocks(self) -> int | None:
        """Blocks for swapping in host memory (of the first KV group); None without an engine."""
        core = self._config.core
        return None if core is None else core.startup.groups[0].num_host_blocks


class ParallelConfig(ConfigPart):
    """Workers and replicas."""

    options = "tensor_parallel_size pipeline_parallel_size data_parallel_size distributed_executor_backend"

    @property
    def world_size(self) -> int:
        """Workers of a replica."""
        return int(self.tensor_parallel_size * self.pipeline_parallel_size)

    @property
    def worker_use_ray(self) -> bool:
        """Whether workers are Ray's."""
        return bool(self.distributed_executor_backend == "ray")


class SchedulerConfig(ConfigPart):
    """The scheduler."""

    options = (
        "max_num_seqs policy=scheduling_policy enable_chunked_prefill chunked_prefill_enabled=enable_chunked_prefill "
        "delay_factor=scheduler_delay_factor preemption_mode async_scheduling max_num_partial_prefills "
        "long_prefill_token_threshold max_num_encoder_input_tokens"
    )

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step."""
        config = self._config
        if config.core is not None:
            return config.core.options.token_budget
        device = resolve_device(config.engine_config.device)
        return config.engine_config.with_token_budget(device, self.max_model_len).token_budget

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence."""
        return ModelConfig(self._config).max_model_len


class DeviceConfig(ConfigPart):
    """The device."""

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return resolve_device(self._config.engine_config.device)

    device = device_type


class LoadConfig(ConfigPart):
    """Weight files."""

    options = "load_format"


class DecodingConfig(ConfigPart):
    """Structured output."""

    options = "structured_outputs_config"

    @property
    def backend(self) -> str:
        """The library that checks grammars."""
        return self._config.engine_config.structured_outputs_config.backend

    guided_decoding_backend = backend


class LoRAConfig(ConfigPart):
    """LoRA adapters."""

    options = "max_loras max_lora_rank max_cpu_loras"


class PromptAdapterConfig(ConfigPart):
    """Prompt adapters."""

    options = "max_prompt_adapters max_prompt_adapter_token"


PARTS: dict[str, type[ConfigPart]] = {
    "model_config": ModelConfig, "cache_config": CacheConfig, "parallel_config": ParallelConfig,
    "scheduler_config": SchedulerConfig, "device_config": DeviceConfig, "load_config": LoadConfig,
    "decoding_config": DecodingConfig, "structured_outputs_config": DecodingConfig,
}  # fmt: skip
#: Parts that are None unless an option enables them.
_OPTIONAL_PARTS: dict[str, tuple[str, type[ConfigPart]]] = {
    "lora_config": ("enable_lora", LoRAConfig),
    "prompt_adapter_config": ("enable_prompt_adapter", PromptAdapterConfig),
}
#: Names of all parts.
PART_NAMES = (*PARTS, *_OPTIONAL_PARTS, "speculative_config")
