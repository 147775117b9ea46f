"""``octavo info``: facts about this machine, this installation and a model."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from octavo import __version__
from octavo.cli.flags import add_engine_flags, read_engine_config, take_model
from octavo.cli.parsing import Arguments, Parser, add_json_flag, write_json
from octavo.config.engine_config import EngineConfig
from octavo.config.sources import configured_model
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.sampling_params import describe_sampling, sampling_in_effect
from octavo.loader.builtin import BUILTIN

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
  octavo info --limits
  octavo info ./my-model --check
  octavo info --fields
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="octavo info",
        usage="octavo info [options] [MODEL]",
        description="Shows facts about this machine, this installation and a model.\n"
        "The model is downloaded if necessary.",
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
    facts = machine_facts(options)
    if arguments.limits:
        facts["limits"] = limit_facts()
    if has_model:
        facts["model"] = model_facts(options)
    if arguments.check:
        if not has_model:
            raise ConfigError("--check needs a MODEL, as in: octavo info ./my-model --check")
        facts["check"] = check_facts(options)
    if arguments.json is None:
        print("\n".join(_as_lines(facts)))
    else:
        write_json(arguments.json, facts)
    return 2 if arguments.check and facts["check"]["problems"] else 0


def machine_facts(options: EngineConfig) -> dict[str, Any]:
    """Versions, processor, memory and its limits (bytes), devices, and the engine's kernels."""
    import psutil

    from octavo.kernels import load_kernels, num_gpus, resolve_device
    from octavo.loader.files import cache_dir
    from octavo.runner.memory import available_memory, memory_limits

    kernels = load_kernels(options.kernels, resolve_device(options.device), deterministic=options.deterministic)
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


def model_facts(options: EngineConfig) -> dict[str, Any]:
    from octavo.config.kv_spec import group_layers
    from octavo.core.model_config import model_tasks
    from octavo.loader.files import split_paths
    from octavo.loader.resolve import gguf_source, resolve_model
    from octavo.models.config_files import read_model_config
    from octavo.models.network import build_without_weights, kv_bytes_per_token, num_active_parameters, num_parameters

    folder = resolve_model(options.model, revision=options.revision)
    config, gguf = read_model_config(folder), gguf_source(options.model)
    tasks = model_tasks(config, options.task)
    dtype = config.checkpoint_dtype if options.dtype == "auto" else options.dtype
    network = build_without_weights(config, dtype, None, options.kv_cache_dtype)
    files = Path(folder).glob("*.safetensors") if gguf is None else split_paths(gguf)
    return {
        "name": options.model,
        "description": BUILTIN[options.model].description if options.model in BUILTIN else None,
        "folder": str(folder),
        "architecture": config.architecture,
        "tasks": list(tasks),
        **_pooling_facts(config, tasks),
        **_image_facts(config, folder),
        **_sampling_facts(options, folder, gguf, tasks),
        "checkpoint_dtype": config.checkpoint_dtype,
        **_quantization_facts(config, gguf),
        "weight_bytes": sum(file.stat().st_size for file in files) or None,
        "parameters": num_parameters(network),
        "active_parameters": num_active_parameters(network),
        "context_length": config.max_position,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "kv_bytes_per_token": kv_bytes_per_token(network),
        "kv_groups": [
            {
                "layers": len(group.layers),
                "window": group.spec.window,
                "kv_bytes_per_token": len(group.layers) * group.spec.bytes_per_token,
            }
            for group in group_layers(network.kv_specs)
        ],
    }


def _quantization_facts(config: ModelConfig, gguf: Path | None) -> dict[str, Any]:
    if gguf is None:
        return {"quantization": None if config.quantization is None else config.quantization.name}
    from octavo.loader.gguf_file import GGUFFile

    file = GGUFFile(gguf)
    types = Counter(tensor.type.name for tensor in file.tensors.values())
    return {"quantization": file.file_type, "tensor_types": dict(types.most_common())}


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
    if config.head == "lm" and tasks[0] == "generate":
        return {}
    pooler = config.pooler
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
    from octavo.models.config_files import read_json

    processor = read_image_processor(folder, read_json(folder / "config.json"))
    return {
        "inputs": ["text", "image"],
        "image_placeholder": processor.placeholder,
        "tokens_of_an_image": processor.max_features,
    }


def check_facts(options: EngineConfig) -> dict[str, Any]:
    """The number of tensors read, and each problem with its tensor's name."""
    from octavo.loader.resolve import gguf_source, resolve_model
    from octavo.loader.weights import check_model
    from octavo.models.config_files import read_model_config

    folder = resolve_model(options.model, revision=options.revision)
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


#: Facts of several numbers on one line.
_IN_ONE_LINE = ("memory_bytes", "cores", "sampling_defaults", "tensor_types")


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
            kept = "all tokens" if group["window"] is None else f"the last {group['window']} tokens"
            size = readable_size(group["kv_bytes_per_token"])
            lines.append(("kv cache", f"{group['layers']} layers keep {kept}, {size} each"))
        return lines
    if value is None:
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


def readable_size(number: float) -> str:
    """A number of bytes, with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
