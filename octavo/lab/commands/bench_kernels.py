"""``octavo bench kernels``: prints the speed of each kernel and its share of the machine's limits."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from octavo.cli.flags import read_engine_config
from octavo.cli.parsing import Arguments
from octavo.core.errors import ConfigError
from octavo.lab.commands.records import show

if TYPE_CHECKING:
    from octavo.core.model_config import ModelConfig
    from octavo.kernels.interface import Kernels
    from octavo.lab.bench.kernel_cases import Types


def run(arguments: Arguments, model: str | None, stream: IO[str] | None) -> None:
    """Measures the kernels at the shapes of a model; records go as JSON lines to ``stream``, if there is one.

    Raises:
        ConfigError: the model is quantised with several kinds of matrices.
    """
    from octavo.core.dtypes import DType
    from octavo.kernels import load_kernels, resolve_device
    from octavo.lab.bench.kernel_cases import KernelCase, Types, cpu_shapes, gpu_shapes
    from octavo.lab.bench.kernels import cpu_limits, measure
    from octavo.loader.resolve import resolve_model, weight_quantization
    from octavo.models.config_files import read_model_config

    options = read_engine_config(arguments, model)
    folder = resolve_model(options.model, revision=options.revision, weights=False)
    config = read_model_config(folder)
    device = resolve_device(options.device)
    kernels = load_kernels(options.kernels, device, head_dim=config.head_dim, deterministic=options.deterministic)
    kernels.set_threads(options.num_threads, options.pin_threads)
    if device == "cpu":
        peaks, limits = cpu_limits()
        known = (
            f"reads {peaks.read_gb_s:.1f} GB/s, {peaks.chunk_gb_s:.1f} in pieces of 2 KiB, computes "
            f"{peaks.fma_gflops:.0f} GFLOP/s in float32, {peaks.bf16_dot_gflops:.0f} in dots of bfloat16, "
            f"{peaks.int8_dot_gops:.0f} in dots of int8"
        )
    else:
        from octavo.kernels.torch_backend import measure_device

        of_gpu = measure_device(device)
        gpu_limits = of_gpu.bandwidth_gb_s, of_gpu.bf16_tflops * 1e3

        def limits(case: KernelCase) -> tuple[float, float]:
            return gpu_limits

        known = f"reads {gpu_limits[0]:.1f} GB/s, computes {gpu_limits[1]:.0f} GFLOP/s"
    dtype = DType.BFLOAT16 if options.dtype == "auto" else DType(options.dtype)
    quantization = weight_quantization(options, kernels.name, config.quantization)
    if quantization not in (None, "int8", "int4", "fp8"):
        raise ConfigError(
            f"the matrices of a quantised model may differ in bits (quantization={quantization}): name int8, int4, fp8 "
            "or none"
        )
    types = Types(dtype, quantization, options.kv_cache_dtype)
    with kernels.mode():
        show(
            measure(
                kernels,
                config,
                types,
                (cpu_shapes if device == "cpu" else gpu_shapes)(arguments.rows),
                limits=limits,
                device=device,
            ),
            stream,
            f"{kernels.describe()}, {quantization or dtype}: {known}\n"
            f"{'kernel':27} {'shape':>14} {'rows':>5} {'us':>10} {'GB/s':>7} {'of':>5} {'GFLOP/s':>8} {'of':>5}"
            f" {'of limit':>8} {'at best':>7} {'load':>5}",
            lambda f: (
                f"{f.kernel:27} {f.shape:>14} {f.rows:5} {f.microseconds:10.1f} {f.gb_per_s:7.1f}"
                f" {f.limit_gb_per_s:5.1f} {f.gflop_per_s:8.1f} {f.limit_gflop_per_s:5.0f} {f.share_of_limit:8.0%}"
                f" {f.share_at_best:7.0%} {f.load:5.1f}"
            ),
        )
        if kernels.name == "cpu":
            _compare_instruction_sets(kernels, config, types)


def _compare_instruction_sets(kernels: Kernels, config: ModelConfig, types: Types) -> None:
    """Prints how fast a product is on each instruction set; warns if the chosen one is not the fastest by far."""
    from octavo.lab.bench.kernels import COMPARED_ROWS, FASTER, compare_instruction_sets

    times = compare_instruction_sets(kernels, config, types)
    if not times:
        return
    kind = "float" if types.quantization is None else "integer"
    chosen = kernels.describe().split(f"{kind} ")[1].split(",")[0]
    listed = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in times.items())
    print(
        f"the first product at {COMPARED_ROWS} rows, least us by instruction set of {kind}s: {listed}", file=sys.stderr
    )
    best = min(times, key=lambda name: times[name])
    if chosen in times and times[chosen] > FASTER * times[best]:
        print(
            f"WARNING: {best} is {times[chosen] / times[best]:.1f} times as fast as {chosen}, which is chosen on this "
            f"processor: report it, and set OCTAVO_CPU_ISA={best}",
            file=sys.stderr,
        )
