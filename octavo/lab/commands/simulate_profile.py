"""``octavo simulate profile``: a step profile from the sizes of a model and the rates of a device."""

from __future__ import annotations

from octavo.cli.parsing import Arguments, Parser, check_positive, json_stream, refuse_words
from octavo.core.errors import ConfigError

EXAMPLE = """\
examples:
  octavo simulate profile llama-3.1-8b-shape --bandwidth-gb-s 3350 --tflops 989 --memory-gb 80 --json h100.json
  octavo simulate --profile h100.json --request-rate 20 --num-requests 5000

The model is a built-in name, a shape's name, a folder or a hub id; its weights are not needed.
"""


def make_parser() -> Parser:
    """The command's parser."""
    parser = Parser(
        prog="octavo simulate profile",
        usage="octavo simulate profile MODEL --bandwidth-gb-s X --tflops X --memory-gb X [options]",
        description="Computes a step profile for a device that is not at hand, and prints it as JSON.",
        epilog=EXAMPLE,
    )
    add = parser.add_argument
    add("--name", default="computed", metavar="TEXT", help="name of the device (computed)")
    add("--device-type", choices=("cpu", "gpu"), default="gpu", help="decides defaults of options (gpu)")
    add("--bandwidth-gb-s", type=float, required=True, metavar="X", help="peak bandwidth of its memory, 10^9 bytes/s")
    add("--tflops", type=float, required=True, metavar="X", help="peak rate of matrix products, 10^12 operations/s")
    add("--memory-gb", type=float, required=True, metavar="X", help="its memory in 10^9 bytes")
    add("--host-gb-s", type=float, default=50.0, metavar="X", help="rate of swaps to the host, 10^9 bytes/s (50)")
    add("--bandwidth-share", type=float, default=0.8, metavar="X", help="share of the bandwidth that is reached (0.8)")
    add("--tflops-share", type=float, default=0.6, metavar="X", help="share of the operations (0.6)")
    add("--step-overhead-ms", type=float, default=0.2, metavar="X", help="time of a step beside its kernels (0.2)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of weights and KV (bfloat16)")
    add("--quantization", choices=("int8", "int4", "fp8"), help="of the matrices (none)")
    add("--json", default="-", metavar="PATH|-", help="where to write it (standard output)")
    return parser


def run(arguments: Arguments) -> int:
    """Writes the profile."""
    from octavo.lab.simulate.computed import Accelerator, computed_profile
    from octavo.lab.simulate.step_profile import format_profile
    from octavo.loader.resolve import resolve_model
    from octavo.models.config_files import read_model_config

    if not arguments.words:
        raise ConfigError("octavo simulate profile needs a model")
    model = arguments.words.pop(0)
    refuse_words(arguments)
    check_positive(arguments, "bandwidth_gb_s", "tflops", "memory_gb", "host_gb_s", "bandwidth_share", "tflops_share")
    if not 0 <= arguments.step_overhead_ms < 1e6:
        raise ConfigError(f"--step-overhead-ms must be at least 0, not {arguments.step_overhead_ms:g}")
    device = Accelerator(
        name=arguments.name,
        bandwidth=arguments.bandwidth_gb_s * 1e9,
        operations=arguments.tflops * 1e12,
        memory=arguments.memory_gb * 1e9,
        host_bandwidth=arguments.host_gb_s * 1e9,
        bandwidth_share=arguments.bandwidth_share,
        operations_share=arguments.tflops_share,
        step_overhead=arguments.step_overhead_ms * 1e-3,
        device_type=arguments.device_type,
    )
    config = read_model_config(resolve_model(model, weights=False))
    profile = computed_profile(model, config, device, dtype=arguments.dtype, quantization=arguments.quantization)
    with json_stream(arguments.json) as stream:
        stream.write(format_profile(profile).decode())
    return 0
