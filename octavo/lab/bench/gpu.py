"""The parts of the GPU benchmark; ``scripts/gpu_bench.py`` runs each part in a process of its own.

``python -m octavo.lab.bench.gpu PART SHAPE FILE`` appends each figure to FILE as a line of JSON as it is measured, so
that a failure keeps the figures before it. Each figure carries its formula, with the numbers filled in.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.lab.bench.gpu_engine import engine_part, profile_part
from octavo.lab.bench.gpu_scale import FULL, SMOKE, Figure, Roofline, Row, Scale, batch_name, each

if TYPE_CHECKING:
    from octavo.lab.bench.kernel_cases import KernelCase


def limits_part(shape: str, scale: Scale, peak: Roofline) -> Iterator[Row]:
    """Peak rates of the device, which other figures are shares of."""
    from octavo.kernels.torch_backend import measure_device

    limits = measure_device(scale.device, scale.copied_bytes, scale.product_size)
    size, n = f"{scale.copied_bytes / 1e9:.4g} GB", scale.product_size
    yield "copy bandwidth", limits.copy_gb_s, "GB/s", f"2 x {size} copied by torch / median time; {limits.device}"
    yield "read bandwidth", limits.read_gb_s, "GB/s", f"{size} of float32 summed by torch / median time"
    yield "bandwidth", limits.bandwidth_gb_s, "GB/s", "the greater of the two; shares are relative to it"
    yield "matrix peak", limits.bf16_tflops, "TFLOP/s", f"2 x {n}^3 / median time of torch.mm, random bfloat16"


def kernels_part(shape: str, scale: Scale, peak: Roofline) -> Iterator[Row]:
    """Each kernel alone, at the shapes of a model."""
    from octavo.core.dtypes import DType
    from octavo.kernels import load_kernels
    from octavo.lab.bench.kernel_cases import Shapes, Types, attention_cases, linear_cases, state_cases
    from octavo.lab.bench.kernels import measure_case
    from octavo.loader.resolve import resolve_model
    from octavo.models.config_files import read_model_config

    config = read_model_config(resolve_model(shape))
    kernels = load_kernels(scale.kernels, scale.device, head_dim=config.head_dim)
    shapes = Shapes(list(scale.rows), [scale.attention], [scale.prefill])
    unknown = float("inf")

    def row(case: KernelCase) -> Iterator[Row]:
        f = measure_case(kernels, case, scale.device, lambda _: (peak.gb_s or unknown, peak.tflops * 1e3 or unknown))
        yield (
            _case_name(case),
            f.share_of_limit or None,
            "of limit",
            f"the greater of {f.gb_per_s:.4g} / {peak.gb_s:.4g} GB/s and {f.gflop_per_s / 1e3:.4g} / "
            f"{peak.tflops:.4g} TFLOP/s; {f.microseconds:.1f} us a call",
        )

    with kernels.mode():
        for cases in (attention_cases, linear_cases, state_cases):
            for case in cases(kernels, config, Types(DType.BFLOAT16), shapes):
                yield from each([(_case_name(case), partial(row, case))])


def _case_name(case: KernelCase) -> str:
    return f"{case.kernel} {case.shape}, {case.rows} rows"


def transformers_part(shape: str, scale: Scale, peak: Roofline) -> Iterator[Row]:
    """The same batches with transformers' ``generate``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo.loader.resolve import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(shape))
    with torch.device(scale.device):  # random weights are created on the device
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def generate(batch: int, tokens: int) -> float:
        ids = torch.randint(config.vocab_size, (batch, scale.input_len), device=scale.device)
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        generated = out[:, ids.shape[1] :].cpu()  # waits for the device
        seconds = time.perf_counter() - start
        if generated.shape != (batch, tokens):
            raise RuntimeError(f"expected {(batch, tokens)} tokens, transformers generated {tuple(generated.shape)}")
        return seconds

    def timed(batch: int) -> Iterator[Row]:
        generate(batch, 2)
        seconds = generate(batch, scale.output_len)
        yield (
            batch_name(scale, batch),
            batch * scale.output_len / seconds,
            "tok/s",
            f"{batch} x {scale.output_len} tokens / {seconds:.3f} s, prefill of {batch} x {scale.input_len} included",
        )

    with torch.inference_mode():
        yield from each([(batch_name(scale, batch), partial(timed, batch)) for batch in scale.batches])


PARTS: dict[str, Callable[[str, Scale, Roofline], Iterator[Row]]] = {
    "limits": limits_part,
    "engine": engine_part,
    "kernels": kernels_part,
    "transformers": transformers_part,
    "deterministic": partial(engine_part, deterministic=True),
    "profile": profile_part,
}


def main(argv: list[str]) -> int:
    """Runs one part; returns 1 if a measurement failed."""
    parser = argparse.ArgumentParser(prog="python -m octavo.lab.bench.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("shape", help="a model's name or folder, of which only config.json is read")
    parser.add_argument("file", type=Path, help="the figures are appended to it")
    parser.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S")
    parser.add_argument("--peak", type=float, default=0.0, metavar="TFLOP/S")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--kernels", help="kernel backend instead of the default")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO)
    scale = SMOKE if arguments.smoke else FULL
    if arguments.kernels is not None:
        scale = dataclasses.replace(scale, kernels=arguments.kernels)
    peak = Roofline(arguments.bandwidth, arguments.peak)
    work = partial(PARTS[arguments.part], arguments.shape, scale, peak)
    failed = False
    with arguments.file.open("a", encoding="utf-8") as file:
        for name, value, unit, formula in each([(arguments.part, work)]):
            failed |= formula.startswith("failed")
            figure = Figure(arguments.part, Path(arguments.shape).name, name, value, unit, formula)
            file.write(json.dumps(dataclasses.asdict(figure)) + "\n")
            file.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
