"""``octavo info``: facts about this machine, this installation and a model."""

from __future__ import annotations

import importlib
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo import __version__
from octavo.cli.flags import add_engine_flags, read_engine_config, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, write_json
from octavo.config.engine_config import EngineConfig
from octavo.config.sources import configured_model
from octavo.core.errors import (
    ConfigError,
    InsufficientMemoryError,
    OctavoError,
    TokenizerError,
    UnsupportedModelError,
    WeightError,
)
from octavo.core.model_config import ModelConfig
from octavo.core.sampling_params import describe_sampling, sampling_in_effect
from octavo.loader.builtin import BUILTIN
from octavo.loader.files import readable_size

if TYPE_CHECKING:
    from octavo.config.kv_spec import LayerGroup
    from octavo.kernels.interface import Kernels
    from octavo.models.network import Network

# ---- the machine

#: Instruction sets that matter for kernels, by their names in /proc/cpuinfo (x86, then Arm).
INSTRUCTION_SETS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_MACOS = {
    "asimd": "AdvSIMD",
    "asimdhp": "FEAT_FP16",
    "asimddp": "FEAT_DotProd",
    "i8mm": "FEAT_I8MM",
    "bf16": "FEAT_BF16",
}


def cpu_name() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    if sys.platform == "darwin":
        return [ours for ours, theirs in _MACOS.items() if _sysctl(f"hw.optional.arm.{theirs}") == "1"]
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [name for name in INSTRUCTION_SETS if name in flags]


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_driver() -> str | None:
    return _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0] or None


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(name: str) -> str:
    return _output_of(["sysctl", "-n", name])


def _output_of(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


EXAMPLE = """\
examples:
  octavo info
  octavo info smollm2-135m --json -
  octavo info unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  octavo info --limits
  octavo info ./my-model --check
  octavo info --fields
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo info",
        usage="octavo info [options] [MODEL]",
        description="Shows facts about this machine, this installation and a model.\n"
        "Of a model of the hub, the headers of the weights are fetched, and no weights unless --check is given.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--limits",
        action="store_true",
        help="measure read bandwidth and multiply-add peak (a second for each device)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="read all weights of MODEL and list tensors that are missing, unexpected, of a wrong shape or not "
        "finite; the exit code is then 2",
    )
    parser.add_argument("--fields", action="store_true", help="print the fields of all requests over HTTP, and end")
    parser.add_argument("--metrics", action="store_true", help="print the series of /metrics with advice, and end")
    add_json_flag(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: Arguments) -> int:
    if arguments.fields or arguments.metrics:
        from octavo.cli import reference

        print("\n".join([reference.request_fields()] * arguments.fields + [reference.metrics()] * arguments.metrics))
        return 0
    model = take_model(arguments)
    has_model = model is not None or configured_model(arguments.config) is not None
    # The model is optional; the other options are checked in any case.
    options = read_engine_config(arguments, model if has_model else "none")
    from octavo.kernels import load_kernels, resolve_device

    kernels = load_kernels(options.kernels, resolve_device(options.device), deterministic=options.deterministic)
    facts = machine_facts(options, kernels)
    if arguments.limits:
        facts["limits"] = limit_facts()
    problem = None
    if has_model:
        facts["model"], problem = model_facts(options, kernels.name)
    if arguments.check and problem is None:
        if not has_model:
            raise ConfigError("--check needs a MODEL, as in: octavo info ./my-model --check")
        facts["check"] = check_facts(options)
    if arguments.json is None:
        print("\n".join(_as_lines(facts)))
    else:
        write_json(arguments.json, facts)
    if problem is not None:
        raise problem
    return 2 if arguments.check and facts["check"]["problems"] else 0


def machine_facts(options: EngineConfig, kernels: Kernels) -> dict[str, Any]:
    """Versions, processor, memory and its limits (bytes), devices, and the engine's kernels."""
    import psutil

    from octavo.kernels import num_gpus
    from octavo.loader.files import cache_dir
    from octavo.runner.memory import available_memory, memory_limits

    kernels.set_threads(options.num_threads, options.pin_threads)
    return {
        "octavo": __version__,
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "instruction_sets": instruction_sets(),
        "cores": {
            "physical": psutil.cpu_count(logical=False),
            "logical": psutil.cpu_count(),
            "usable": usable_cores(),
        },
        "memory_bytes": {"total": psutil.virtual_memory().total, "available": available_memory()},
        "memory_limits": [
            {"from": limit.source, "limit": limit.limit, "used": limit.used} for limit in memory_limits()
        ],
        "devices": ["cpu", *(f"cuda:{i}" for i in range(num_gpus()))],
        **_gpu_facts(),
        "gpu_driver": gpu_driver(),
        "triton": installed_version("triton"),
        "kernels": kernels.describe(),
        **_compiled_kernels(),
        "cache": str(cache_dir()),
    }


def _compiled_kernels() -> dict[str, Any]:
    """Instruction sets of the compiled CPU kernels, best first, and whether they may use AMX tiles, or why not."""
    try:
        cpu: Any = importlib.import_module("octavo._cpu")
    except ImportError:
        return {"kernels_built_for": {}, "amx": None}
    names = cpu.built_isas()
    return {"kernels_built_for": {"floats": list(names.floats), "integers": list(names.integers)}, "amx": cpu.amx()}


def installed_version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu_facts() -> dict[str, Any]:
    """Each GPU's name, memory (bytes), compute capability and multiprocessors; torch's version of CUDA."""
    from octavo.kernels import num_gpus

    if not num_gpus():
        return {"gpus": [], "cuda": None}
    from octavo.kernels.torch_backend import cuda_version, describe_gpus

    return {"gpus": describe_gpus(), "cuda": cuda_version()}


def limit_facts() -> dict[str, Any]:
    """Measured peak rates of the processor and of each GPU."""
    from octavo.kernels import num_gpus

    measured = []
    if count := num_gpus():
        from octavo.kernels.torch_backend import measure_device

        measured = [measure_device(f"cuda:{i}") for i in range(count)]
    facts = {} if measured and find_spec("octavo._cpu") is None else _cpu_limit_facts()
    gpus = [
        {
            "name": limits.device,
            "copy_gb_per_s": round(limits.copy_gb_s),
            "read_gb_per_s": round(limits.read_gb_s),
            "bfloat16_product_tflop_per_s": round(limits.bf16_tflops, 1),
        }
        for limits in measured
    ]
    return {**facts, "gpus": gpus}


def _cpu_limit_facts() -> dict[str, Any]:
    from octavo.kernels.cpu.array import measure_cpu

    try:
        limits = measure_cpu()
    except ImportError:
        raise ConfigError("octavo._cpu, which the measurement needs, was not built") from None
    return {
        "threads": limits.threads,
        "instruction_sets": limits.instruction_sets,
        "read_gb_per_s": round(limits.read_gb_s, 1),
        "read_2kib_pieces_gb_per_s": round(limits.chunk_gb_s, 1),
        "multiply_add_gflop_per_s": round(limits.fma_gflops, 1),
        "bfloat16_dot_gflop_per_s": round(limits.bf16_dot_gflops, 1) or None,
        "int8_dot_gop_per_s": round(limits.int8_dot_gops, 1) or None,
    }


@dataclass(frozen=True)
class DescribedModel:
    """The files that ``octavo info`` reads of a model; weights may have headers alone (``write_sketch``)."""

    #: Configuration and tokenizer; None: they cannot be made of the GGUF file.
    folder: Path | None
    gguf: Path | None
    #: Where the model is; None: the weights are not on this machine.
    place: Path | None
    problem: OctavoError | None = None
    #: The temporary folder of files that are not on this machine, and the repository that errors name instead.
    scratch: tuple[str, str] = ("", "")

    def rename(self, error: OctavoError) -> OctavoError:
        """The error with the repository's name instead of the temporary folder's."""
        return type(error)(str(error).replace(*self.scratch)) if self.scratch[0] else error


@contextmanager
def describe_model(options: EngineConfig) -> Iterator[DescribedModel]:
    """The files of a model; of one of the hub, whose weights are not cached, their headers are fetched.

    Raises:
        OctavoError: there is no such model, or its files cannot be read.
    """
    from octavo.loader.gguf_config import write_gguf_folder
    from octavo.loader.resolve import (
        find_projector,
        gguf_folder,
        gguf_source,
        hub_model,
        local_model,
        resolve_model,
        write_sketch,
    )

    local = Path(os.path.expanduser(options.model))
    with tempfile.TemporaryDirectory() as scratch:
        place, gguf, problem = None, None, None
        own, is_local = None, (theirs := local_model(options.model, options.revision)) is not None
        if theirs is not None:
            own = theirs.projector
        if name := None if is_local else hub_model(options.model):
            from octavo.loader.hub import find_files, is_tag

            try:
                beside = options.mmproj if is_tag(options.mmproj) else "none"
                files = find_files(name, options.revision, mmproj=beside)
            except UnsupportedModelError as e:  # no weights that can be read
                files, problem = find_files(name, options.revision, weights=False), e
            if files.is_fetched or files.offline_reason is not None:
                place = files.fetch()
            path = place or write_sketch(files, Path(scratch))
            own = files.within(Path(scratch) if place is None else files.snapshot)
            gguf = None if files.gguf is None else path
        elif os.path.isfile(local):
            path = place = gguf = local
        else:
            path = place = resolve_model(options.model, mmproj=options.mmproj)
            gguf = gguf_source(options.model)
        temporary = (scratch, name.repo) if name and place is None else ("", "")
        if gguf is None or gguf != path:
            yield DescribedModel(path, gguf, place, problem, temporary)
            return
        try:
            projector = find_projector(gguf, options.mmproj, own)
            if place is not None:
                folder = gguf_folder(gguf, projector=projector)
            else:
                folder = Path(scratch) / "converted"
                folder.mkdir()
                write_gguf_folder(gguf, folder, projector=projector)
        except (UnsupportedModelError, TokenizerError, WeightError) as e:
            yield DescribedModel(None, gguf, place, e, temporary)
            return
        yield DescribedModel(folder, gguf, place, scratch=temporary)


def model_facts(options: EngineConfig, backend: str) -> tuple[dict[str, Any], OctavoError | None]:
    """Facts of a model, and why it cannot be served; ``backend``: that of the kernels."""
    from octavo.models.config_files import read_json

    with describe_model(options) as described:
        facts: dict[str, Any] = {
            "name": options.model,
            "description": BUILTIN[options.model].description if options.model in BUILTIN else None,
            "folder": None if described.place is None else str(described.place),
            "architecture": None,
            "supported": True,
            "reason": None,
        }
        problem = described.problem
        folder, gguf = described.folder, described.gguf
        stored = _stored_facts(folder, gguf)
        if folder is not None and problem is None:
            try:
                config = _read_config(folder, options, gguf)
                network_facts = _network_facts(options, config, described, stored, backend)
                return {**facts, **network_facts}, None
            except OctavoError as e:
                problem = e
        assert problem is not None
        problem = described.rename(problem)
        raw: dict[str, Any] = {}
        if folder is not None and (file := folder / "config.json").is_file():
            raw = read_json(file)
        facts |= _raw_facts(raw, gguf) | {"supported": False, "reason": str(problem)} | stored
        return facts, problem


def _read_config(folder: Path, options: EngineConfig, gguf: Path | None) -> ModelConfig:
    from octavo.loader.weights import check_headers, read_config

    config = read_config(folder, options)
    if gguf is not None or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        check_headers(folder, config, gguf)
    return config


def _stored_facts(folder: Path | None, gguf: Path | None) -> dict[str, Any]:
    """Bytes and types of the weights in the files, and their number, as far as headers can be read."""
    from octavo.loader.files import split_paths
    from octavo.loader.projector import projector_of
    from octavo.loader.weights import read_headers

    try:
        if gguf is not None:
            from octavo.loader.gguf_file import GGUFFile

            file, paths = GGUFFile(gguf), split_paths(gguf)
            tensors, own = [*file.tensors.values()], {"quantization": file.file_type}
            if folder is not None and (projector := projector_of(folder)) is not None:
                tensors += GGUFFile(projector).tensors.values()
                paths.append(projector)
            types = Counter(tensor.type.name for tensor in tensors)
            numbers = sum(math.prod(tensor.shape) for tensor in tensors)
        else:
            assert folder is not None
            paths, own = sorted(folder.glob("*.safetensors")), {}
            headers = read_headers(folder) if paths else {}
            types = Counter(tensor.dtype for tensor in headers.values())
            numbers = sum(math.prod(tensor.shape) for tensor in headers.values())
    except OctavoError:
        return {}
    size = sum(path.stat().st_size for path in paths)
    return {**own, "tensor_types": dict(types.most_common()), "weight_bytes": size or None, "stored_numbers": numbers}


def _raw_facts(raw: Mapping[str, Any], gguf: Path | None) -> dict[str, Any]:
    """Architecture and context of a model that is not supported, as its files name them."""
    if gguf is not None:
        from octavo.loader.gguf_file import GGUFFile

        try:
            metadata = GGUFFile(gguf).metadata
        except OctavoError:
            return {}
        kind = metadata.get("general.architecture")
        return {"architecture": kind, "context_length": metadata.get(f"{kind}.context_length")}
    inner = raw.get("text_config")
    text = inner if isinstance(inner, dict) else {}
    return {
        "architecture": next(iter(raw.get("architectures") or ()), raw.get("model_type")),
        "context_length": raw.get("max_position_embeddings", text.get("max_position_embeddings")),
    }


def _network_facts(
    options: EngineConfig, config: ModelConfig, described: DescribedModel, stored: dict[str, Any], backend: str
) -> dict[str, Any]:
    from octavo.config.kv_spec import group_layers
    from octavo.core.model_config import model_tasks
    from octavo.models.network import build_without_weights, kv_bytes_per_token, num_active_parameters, num_parameters

    folder, gguf = described.folder, described.gguf
    assert folder is not None
    tasks = model_tasks(config, options.task)
    dtype = config.checkpoint_dtype if options.dtype == "auto" else options.dtype
    network = build_without_weights(config, dtype, None, options.kv_cache_dtype)
    quantization = config.quantization
    return {
        "architecture": config.architecture,
        "model_impl": config.model_impl,
        "tasks": list(tasks),
        **_pooling_facts(config, tasks),
        **_image_facts(config, folder),
        **_chat_facts(options, folder, tasks),
        **_sampling_facts(options, folder, gguf, tasks),
        "checkpoint_dtype": config.checkpoint_dtype,
        "quantization": stored.get("quantization", None if quantization is None else quantization.name),
        **({"tensor_types": stored["tensor_types"]} if stored.get("tensor_types") else {}),
        "weight_bytes": stored.get("weight_bytes"),
        "parameters": num_parameters(network),
        "active_parameters": num_active_parameters(network),
        "context_length": config.max_position,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        **_draft_facts(config, folder, gguf),
        "kv_bytes_per_token": kv_bytes_per_token(network),
        "kv_groups": [
            {
                "layers": len(group.layers),
                "window": None if group.spec.kind == "state" else group.spec.window,
                "kv_bytes_per_token": len(group.layers) * group.spec.bytes_per_token,
                **_state_facts(options, group),
            }
            for group in group_layers(network.kv_specs)
        ],
        "memory": _memory_facts(options, config, network, gguf, backend),
    }


def _draft_facts(config: ModelConfig, folder: Path, gguf: Path | None) -> dict[str, Any]:
    """The layers for multi-token prediction in the checkpoint, with which the model drafts by default."""
    from octavo.loader.mtp import find_mtp

    found = find_mtp(folder, config, gguf)
    return {} if found is None else {"multi_token_prediction_layers": found.num_layers}


def _state_facts(options: EngineConfig, group: LayerGroup) -> dict[str, int]:
    """Bytes of a recurrent state in all layers of its group, which a sequence and each checkpoint take."""
    if group.spec.kind != "state":
        return {}
    size = len(group.layers) * group.spec.bytes_per_state
    return {"state_bytes": size, "state_checkpoint_tokens": options.state_checkpoint_tokens}


def _memory_facts(
    options: EngineConfig, config: ModelConfig, network: Network, gguf: Path | None, backend: str
) -> dict[str, Any]:
    """Estimated bytes of weights and of the KV cache of one sequence of the whole context, and what fits this machine.

    What fits is what the engine would find (``gpu_memory_utilization``), but for its largest step: some hundred MB.
    """
    from octavo.config.kv_spec import GroupShape, KVLayout, group_layers
    from octavo.engine.memory_needs import GGUFSizes, weights_in_memory
    from octavo.kernels import resolve_device
    from octavo.loader.resolve import weight_quantization
    from octavo.models.network import build_without_weights, size_bytes
    from octavo.runner.memory import available_memory, cache_size

    total = None
    if resolve_device(options.device) == "cpu":
        available = available_memory()
    else:
        from octavo.kernels.torch_backend import describe_gpus

        memory = describe_gpus()[0]["memory_bytes"]
        available, total = memory["available"], memory["total"]
    quantization = weight_quantization(options, backend, config.quantization, is_gguf=gguf is not None)
    sizes = GGUFSizes.of(gguf) if gguf is not None and quantization == "gguf" else None
    dtype = config.checkpoint_dtype if options.dtype == "auto" else options.dtype
    in_form = build_without_weights(config, dtype, quantization)
    weights = weights_in_memory(in_form, dtype, sizes, maps_tables=backend == "cpu")
    context = min(options.max_model_len or config.max_position, config.max_position)
    groups = [
        GroupShape(
            len(group.layers) * (group.spec.bytes_per_token * options.block_size + group.spec.bytes_per_state),
            group.spec.window,
            options.state_checkpoint_tokens if group.spec.kind == "state" else None,
        )
        for group in group_layers(network.kv_specs)
    ]
    layout = KVLayout.of(groups, options, options.token_budget)
    cache, longest, sequences = layout.size(layout.held(context)), context if available >= weights else 0, None
    if cache:
        any_length = options.model_copy(update={"max_model_len": None})
        try:
            size = cache_size(layout, any_length, available - weights, context, total=total)
            longest, sequences = size.max_model_len, layout.full_length_seqs(size.num_blocks, context)
        except InsufficientMemoryError:
            longest, sequences = 0, 0
    mapped = size_bytes(*(weight for weight in network.weights() if weight.is_mapped)) if backend == "cpu" else 0
    return {
        "context": context,
        "weights_bytes": weights,
        **({"mapped_bytes": mapped} if mapped else {}),
        "kv_cache_bytes": cache,
        "needed_bytes": weights + cache,
        "available_bytes": available,
        "fits": longest == context,
        "sequences": sequences,
        "longest_context": longest,
    }


def _chat_facts(options: EngineConfig, folder: Path, tasks: Sequence[str]) -> dict[str, Any]:
    """Whether there is a chat template, and the names of the formats of tool calls and reasoning that it shows."""
    if "generate" not in tasks:
        return {}
    from octavo.engine.chat_template import (
        choose_template,
        find_reasoning_marks,
        load_chat_templates,
        read_chat_template,
    )
    from octavo.models.config_files import read_json
    from octavo.server.tool_parsers import TOOL_PARSERS, find_tool_parser

    own, file = read_chat_template(options.chat_template), folder / "tokenizer_config.json"
    templates = {"default": own} if own is not None else {}
    if own is None:
        templates = load_chat_templates(folder, read_json(file) if file.is_file() else {})
    if not templates:
        return {"chat_template": False, "tool_calls": None, "reasoning": None}
    with_tools = choose_template(templates, None, has_tools=True)
    parser = find_tool_parser(with_tools)
    names = [name for name, each in TOOL_PARSERS.items() if each is parser]
    reasoning = find_reasoning_marks(choose_template(templates, None, has_tools=False))
    return {"chat_template": True, "tool_calls": names[0] if names else None, "reasoning": reasoning}


def _sampling_facts(options: EngineConfig, folder: Path, gguf: Path | None, tasks: Sequence[str]) -> dict[str, Any]:
    """A generative model's default sampling parameters, and their source."""
    if "generate" not in tasks:
        return {}
    from octavo.cli.chat import DEFAULTS
    from octavo.models.config_files import default_sampling

    own, source = default_sampling(options.generation_config, folder), options.generation_config
    if not own:
        source = f"the API; of octavo chat: {describe_sampling(DEFAULTS)}"
    elif source != "auto":
        source = str(Path(source) / "generation_config.json")
    elif options.model in BUILTIN:
        source = "the built-in model"
    else:
        source = "generation_config.json" if gguf is None else "the GGUF file"
    return {"sampling_defaults": sampling_in_effect(own), "sampling_source": source}


def _pooling_facts(config: ModelConfig, tasks: Sequence[str]) -> dict[str, Any]:
    """How a pooling model makes vectors or scores."""
    pooler = config.pooler
    if config.head == "lm" and (tasks[0] == "generate" or pooler.pairs is not None):
        return {}
    if config.head in ("sequence", "token"):
        return {"labels": list(config.labels)}
    return {
        "pooling": pooler.kind,
        "normalize": pooler.normalize,
        "vector_size": pooler.dense[-1].outputs if pooler.dense else config.hidden_size,
        "dimensions": list(pooler.dimensions) if pooler.dimensions is not None else "any",
        "prompts": list(pooler.prompts),
        "max_text_length": config.default_length,
    }


def _image_facts(config: ModelConfig, folder: Path) -> dict[str, Any]:
    """The placeholder of an image in a vision model's prompts, and the most tokens of one."""
    if config.image_facts is None:
        return {}
    from octavo.images.processors import read_image_processor
    from octavo.loader.projector import projector_of
    from octavo.models.config_files import read_json

    projector = projector_of(folder)
    processor = read_image_processor(folder, read_json(folder / "config.json"))
    return {
        "inputs": ["text", "image"],
        "image_placeholder": processor.placeholder,
        "tokens_of_an_image": processor.max_features,
        **({} if projector is None else {"projector": projector.name}),
    }


def check_facts(options: EngineConfig) -> dict[str, Any]:
    """The number of tensors read, and each problem with its tensor's name."""
    from octavo.loader.resolve import gguf_source, resolve_model
    from octavo.loader.weights import check_model
    from octavo.models.config_files import read_model_config

    folder = resolve_model(options.model, revision=options.revision, mmproj=options.mmproj)
    return msgspec.to_builtins(check_model(folder, read_model_config(folder), gguf_source(options.model)))


def _as_lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in facts.items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if name == "gpus":
            for i, gpu in enumerate(value):
                lines += [f"{indent}gpu {i}:", *_as_lines(gpu, indent + "  ")]
        elif name == "problems":
            lines += [f"{indent}{problem['tensor'] or 'checkpoint'}: {problem['problem']}" for problem in value]
            lines += [] if value else [f"{indent}no problems found"]
        elif isinstance(value, dict) and name not in _IN_ONE_LINE:
            lines += [f"{indent}{label}:", *_as_lines(value, indent + "  ")]
        else:
            lines += [f"{f'{indent}{head}:':<22} {text}" for head, text in _values(name, label, value)]
    return lines


#: Facts of several numbers on one line or two.
_IN_ONE_LINE = ("memory_bytes", "cores", "sampling_defaults", "tensor_types", "memory")


def _values(name: str, label: str, value: Any) -> list[tuple[str, str]]:
    """(label, text) of each line of a fact."""
    lines = []
    if name == "memory_limits":
        for limit in value:
            text = f"{readable_size(limit['limit'])}, {readable_size(limit['used'])} used, by {limit['from']}"
            lines.append(("memory limit", text))
        return lines
    if name == "kv_groups":
        for group in value:
            if "state_bytes" in group:
                size, distance = readable_size(group["state_bytes"]), group["state_checkpoint_tokens"]
                text = f"{group['layers']} layers keep a recurrent state: {size} a sequence, and a checkpoint: every "
                lines.append(("kv cache", f"{text}{distance} tokens and at the ends of prompts and answers"))
                continue
            kept = "all tokens" if group["window"] is None else f"the last {group['window']} tokens"
            size = readable_size(group["kv_bytes_per_token"])
            lines.append(("kv cache", f"{group['layers']} layers keep {kept}, {size} each"))
        return lines
    if name == "memory":
        return _memory_lines(value)
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif value is None:
        text = "-"
    elif name == "memory_bytes":
        text = ", ".join(f"{readable_size(number)} {kind}" for kind, number in value.items())
    elif name == "sampling_defaults":
        text = describe_sampling(value)
    elif name in ("cores", "tensor_types"):
        text = ", ".join(f"{number} {kind}" for kind, number in value.items() if number is not None)
    elif name.endswith("_bytes"):
        text = readable_size(value)
    else:
        between = ", " if name in ("labels", "prompts") else " "
        text = (between.join(map(str, value)) or "-") if isinstance(value, list) else str(value)
    return [(label, text)]


def _memory_lines(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts = f"{readable_size(memory['weights_bytes'])} weights"
    if memory["kv_cache_bytes"]:
        parts += f" + {readable_size(memory['kv_cache_bytes'])} kv cache of {memory['context']} tokens"
    if "mapped_bytes" in memory:
        parts += f"; {readable_size(memory['mapped_bytes'])} of embeddings stay in the mapped file"
    free = f"{readable_size(memory['available_bytes'])} are free"
    if not memory["fits"]:
        longest = memory["longest_context"]
        less = f"a context of {longest} tokens would (--max-model-len)" if longest else "the weights alone take more"
        fits = f"no, {free}: {less}"
    else:
        count = memory["sequences"]
        many = f": {count} sequence{'s' * (count > 1)} of this length at once" if count else ""
        fits = f"yes, {free}{many}"
    return [("memory needed", f"about {readable_size(memory['needed_bytes'])}: {parts}"), ("fits here", fits)]
