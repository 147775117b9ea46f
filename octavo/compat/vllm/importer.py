"""The table of vLLM's modules and names, and the finder that makes them importable, also as ``vllm``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = "octavo.compat.vllm"

_LLM = {"LLM": f"{_HERE}.engines:LLM"}
_LLM_ENGINE = {"LLMEngine": f"{_HERE}.engines:LLMEngine"}
_ASYNC = {name: f"{_HERE}.engines:AsyncLLM" for name in ("AsyncLLM", "AsyncLLMEngine")}
_ARGS = {name: f"{_HERE}.engine_args:{name}" for name in ("EngineArgs", "AsyncEngineArgs")}
_PARAMS = {
    "SamplingParams": "octavo.core.sampling_params:SamplingParams",
    "RequestOutputKind": "octavo.core.sampling_params:RequestOutputKind",
    "BeamSearchParams": "octavo.core.sampling_params:BeamSearchParams",
    "StructuredOutputsParams": "octavo.core.sampling_params:StructuredOutputsParams",
}
_OUTPUTS = {
    "RequestOutput": "octavo.core.outputs:RequestOutput",
    "CompletionOutput": "octavo.core.outputs:CompletionOutput",
}
_POOLING_OUTPUTS = {
    **{
        name: f"octavo.core.outputs:{name}"
        for name in ("PoolingOutput", "EmbeddingOutput", "ClassificationOutput", "ScoringOutput")
    },
    **{
        f"{name}RequestOutput": "octavo.core.outputs:PoolingRequestOutput"
        for name in ("Pooling", "Embedding", "Classification", "Scoring")
    },
}
_POOLING = {"PoolingParams": f"{_HERE}.engines:PoolingParams"}
_POOLER = {"PoolerConfig": f"{_HERE}.engines:PoolerConfig"}
_LOGPROB = {"Logprob": "octavo.core.outputs:Logprob"}
_PROMPTS = {
    "ExplicitEncoderDecoderPrompt": "octavo.core.request:ExplicitEncoderDecoderPrompt",
    "TextPrompt": "octavo.core.request:TextPrompt",
    "TokensPrompt": "octavo.core.request:TokensPrompt",
    "PromptType": "octavo.core.request:Prompt",
}
_LORA = {"LoRARequest": "octavo.core.request:LoRARequest"}
_PARSER = {"FlexibleArgumentParser": f"{_HERE}.engine_args:FlexibleArgumentParser"}
_NETWORK = {name: f"{_HERE}.helpers:{name}" for name in ("get_open_port", "get_ip")}
_UUID = {"random_uuid": f"{_HERE}.helpers:random_uuid"}
_CLEAN_UP = {
    name: f"{_HERE}.helpers:{name}"
    for name in ("cleanup_dist_env_and_memory", "destroy_model_parallel", "destroy_distributed_environment")
}
_METRICS = {name: f"{_HERE}.helpers:{name}" for name in ("Metric", "Counter", "Gauge", "Vector", "Histogram")}
_TOKENIZER = {name: f"{_HERE}.helpers:get_tokenizer" for name in ("get_tokenizer", "cached_get_tokenizer")}
_TOKENIZER_TYPES = {name: "octavo.engine.tokenizer:Tokenizer" for name in ("AnyTokenizer", "TokenizerLike")}
_PROCESSORS = {
    name: f"{_HERE}.helpers:{name}"
    for name in (
        "LogitsProcessor",
        "AdapterLogitsProcessor",
        "BatchUpdate",
        "MoveDirectionality",
        "RequestLogitsProcessor",
        "process_dict_updates",
    )
}
_CONFIG = {
    "VllmConfig": f"{_HERE}.helpers:VllmConfig",
    "ProfilerConfig": f"{_HERE}.engines:ProfilerConfig",
    **_POOLER,
}

#: Module ("": the package) -> name -> "module:attribute".
SERVED: dict[str, dict[str, str]] = {
    "": {
        **_LLM,
        **_LLM_ENGINE,
        **_ARGS,
        **_OUTPUTS,
        **_POOLING_OUTPUTS,
        **_POOLING,
        **_PROMPTS,
        "AsyncLLMEngine": _ASYNC["AsyncLLMEngine"],
        "SamplingParams": _PARAMS["SamplingParams"],
        "__version__": f"{_HERE}.helpers:VERSION",
    },
    "benchmarks": {},
    "benchmarks.datasets": {
        name: f"{_HERE}.helpers:{name}" for name in ("SampleRequest", "add_dataset_parser", "get_samples")
    },
    "config": _CONFIG,
    "config.pooler": _POOLER,
    "config.profiler": {"ProfilerConfig": _CONFIG["ProfilerConfig"]},
    "distributed": _CLEAN_UP,
    "distributed.parallel_state": _CLEAN_UP,
    "engine": {},
    "engine.arg_utils": _ARGS,
    "engine.async_llm_engine": _ASYNC,
    "engine.llm_engine": _LLM_ENGINE,
    "entrypoints": {},
    "entrypoints.llm": _LLM,
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "logger": {"init_logger": f"{_HERE}.helpers:init_logger"},
    "logprobs": _LOGPROB,
    "lora": {},
    "lora.request": _LORA,
    "outputs": {**_OUTPUTS, **_POOLING_OUTPUTS},
    "platforms": {"current_platform": f"{_HERE}.helpers:current_platform"},
    "pooling_params": _POOLING,
    "sampling_params": _PARAMS,
    "sequence": _LOGPROB,
    "tokenizers": {**_TOKENIZER, **_TOKENIZER_TYPES},
    "transformers_utils": {},
    "transformers_utils.tokenizer": {**_TOKENIZER, **_TOKENIZER_TYPES},
    "usage": {},
    "usage.usage_lib": {"UsageContext": f"{_HERE}.helpers:UsageContext"},
    "utils": {**_PARSER, **_NETWORK, **_UUID},
    "utils.argparse_utils": _PARSER,
    "utils.network_utils": _NETWORK,
    "utils.print_utils": {"print_embeddings": f"{_HERE}.engines:print_embeddings"},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": _ASYNC,
    "v1.engine.llm_engine": _LLM_ENGINE,
    "v1.metrics": {},
    "v1.metrics.reader": _METRICS,
    "v1.sample": {},
    "v1.sample.logits_processor": _PROCESSORS,
    "v1.sample.logits_processor.builtin": {"process_dict_updates": _PROCESSORS["process_dict_updates"]},
    "v1.sample.logits_processor.interface": _PROCESSORS,
    "version": {"__version__": f"{_HERE}.helpers:VERSION"},
}

_IMAGES = "images are those of PIL, or arrays, in a prompt's multi_modal_data; audio and video are not taken"
_NO_TRANSFER = "the KV cache is not shared between engines; replicas of one server share work (data_parallel_size)"
_WEIGHTS = "weights are read from files, again by sleep(level=2) and wake_up(); LLM.collective_rpc reaches the workers"
_NETWORKS = "networks are Octavo's own; one more is a file in octavo/models and a line of its registry"
_SERVER = "the server is `octavo serve MODEL`, or octavo.server.app.make_app in a program of one's own"
_STATS = "statistics of each step go to an octavo.StatLogger (stat_loggers), and a server has /metrics"

#: Modules without a counterpart -> what Octavo has instead.
ABSENT_MODULES: dict[str, str] = {
    "assets": _IMAGES,
    "attention": "kernels are chosen by the options device and kernels",
    "benchmarks": "measurements are the commands `octavo bench offline`, `octavo bench serve` and others",
    "compilation": "networks are not compiled; decode steps are captured on GPUs (graph_capture)",
    "config": "options are keywords of LLM and fields of EngineArgs; octavo.EngineConfig has them all",
    "distributed.device_communicators": "workers are connected by the option distributed_executor_backend",
    "distributed.ec_transfer": "features of images stay in the engine that made them",
    "distributed.kv_events": _NO_TRANSFER,
    "distributed.kv_transfer": _NO_TRANSFER,
    "distributed.weight_transfer": _WEIGHTS,
    "entrypoints": _SERVER,
    "envs": "variables are OCTAVO_ and the option's name (octavo serve --help=all)",
    "forward_context": _NETWORKS,
    "kernels": "kernels are chosen by the options device and kernels",
    "lora": "adapters are LoRARequest of vllm.lora.request, and the methods add_lora, remove_lora and list_loras",
    "model_executor": _NETWORKS,
    "multimodal": _IMAGES,
    "plugins": "logits processors and scheduling policies are named as module:Class (docs/extending.md)",
    "reasoning": "reasoning is parsed by the server (--reasoning-parser)",
    "renderers": "LLM.chat takes a chat template as text or by name (chat_template)",
    "spec_decode": "drafts are asked for with speculative_config (docs/speculation.md)",
    "tool_parsers": "tool calls are parsed by the server (--tool-call-parser)",
    "v1.core": "the scheduler is octavo.scheduler; an order of one's own is given as scheduling_policy (module:Class)",
    "v1.executor": "workers are chosen by distributed_executor_backend: mp, ray, external_launcher",
    "v1.kv_cache_interface": _NO_TRANSFER,
    "v1.metrics": _STATS,
    "v1.request": "requests are octavo.core.request.EngineCoreRequest",
    "v1.spec_decode": "drafts are asked for with speculative_config (docs/speculation.md)",
    "v1.watermarking": "outputs carry no watermark",
    "v1.worker": "workers are octavo.executor.worker; LLM.collective_rpc calls their methods, or a function with each",
    "worker": "workers are octavo.executor.worker; LLM.collective_rpc calls their methods, or a function with each",
}

#: Names without a counterpart, in any module -> what Octavo has instead.
ABSENT_NAMES: dict[str, str] = {
    **dict.fromkeys(("KVTransferConfig", "KVEventsConfig", "ECTransferConfig"), _NO_TRANSFER),
    "GuidedDecodingParams": "its name is StructuredOutputsParams, given as SamplingParams(structured_outputs=...)",
    "CompilationConfig": "networks are not compiled; decode steps are captured on GPUs (graph_capture)",
    "WeightTransferConfig": _WEIGHTS,
    "ModelRegistry": _NETWORKS,
    "get_world_group": "workers are connected by Octavo; torch.distributed.get_rank() is the rank under torchrun",
    "initialize_ray_cluster": "distributed_executor_backend='ray' connects to a cluster, or starts one",
}


PACKAGE = "octavo.compat.vllm"
ALIAS = "vllm"


class NoCounterpartError(ModuleNotFoundError):
    """A module or name of vLLM without a counterpart; the message names the replacement."""


class Finder(MetaPathFinder):
    """Finds modules of the table; refuses other modules."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of the table with this name."""
        if not fullname.startswith(f"{self._prefix}."):
            return None
        name = fullname.removeprefix(f"{self._prefix}.")
        if name in SERVED:
            loader = ServedModule(name) if self._prefix == PACKAGE else AliasedModule(name)
            return ModuleSpec(fullname, loader, is_package=True)
        if self._prefix == PACKAGE and PathFinder.find_spec(fullname, path) is not None:
            return None  # a file of this package
        raise NoCounterpartError(_refusal(name), name=fullname)


class ServedModule(Loader):
    """A module that looks its names up in the table on demand."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """Default module creation."""

    def exec_module(self, module: ModuleType) -> None:
        """Sets the module's ``__getattr__`` and ``__all__``."""

        def getattribute(name: str) -> object:
            value = value_of(self._name, name)
            setattr(module, name, value)
            return value

        module.__doc__ = f"``vllm.{self._name}``, as far as Octavo has a counterpart."
        module.__getattr__ = getattribute  # type: ignore[method-assign]
        module.__all__ = [*SERVED[self._name]]  # type: ignore[attr-defined]


class AliasedModule(Loader):
    """The same module object under its name in ``vllm``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns this package's module."""
        return importlib.import_module(f"{PACKAGE}.{self._name}")

    def exec_module(self, module: ModuleType) -> None:
        """Has nothing to do."""


def value_of(module: str, name: str) -> object:
    """The value of a name in a module (empty: the package); raises NoCounterpartError or AttributeError."""
    place = SERVED[module].get(name)
    if place is not None:
        source, _, attribute = place.partition(":")
        return getattr(importlib.import_module(source), attribute)
    inner = f"{module}.{name}".lstrip(".")
    if inner in SERVED:
        return importlib.import_module(f"{PACKAGE}.{inner}")
    if name in ABSENT_NAMES or inner in ABSENT_MODULES:
        raise NoCounterpartError(_refusal(inner), name=f"{ALIAS}.{inner}")
    raise AttributeError(f"module 'vllm{'.' if module else ''}{module}' has no attribute {name!r} in Octavo")


def _refusal(name: str) -> str:
    parts = name.split(".")
    reasons = (ABSENT_MODULES.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    reason = ABSENT_NAMES.get(parts[-1]) or next((r for r in reasons if r), "docs/coming-from.md lists what it has")
    return f"Octavo has no vllm.{name}: {reason}"


def register() -> None:
    """Makes the modules importable as ``octavo.compat.vllm.…``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(PACKAGE))


def install() -> None:
    """Makes ``import vllm`` import this package; raises RuntimeError if vLLM itself is imported already."""
    package = importlib.import_module(PACKAGE)
    if sys.modules.get(ALIAS, package) is not package:
        raise RuntimeError("vllm is imported already: install() must come before")
    if ALIAS not in sys.modules:
        sys.meta_path.insert(0, Finder(ALIAS))
        sys.modules[ALIAS] = package
