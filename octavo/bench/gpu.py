"""The figures of a GPU, part by part; ``scripts/gpu_bench.py`` runs each part in a process of its own.

``python -m octavo.bench.gpu PART SHAPE FILE`` appends each figure to FILE as a line of JSON as soon as it is known, so
that what was measured before a failure is kept. Each figure carries the formula that it came from, with its numbers.
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

from octavo.bench.gpu_engine import deterministic_part, engine_part, profile_part
from octavo.bench.gpu_scale import FULL, SMOKE, Figure, Limits, Row, Scale, each, same_work

if TYPE_CHECKING:
    from octavo.bench.kernels import Case


def limits_part(shape: str, scale: Scale, limits: Limits) -> Iterator[Row]:
    """What the device can do at best; everything else is measured against it."""
    from octavo.bench.device import measure_device

    found = measure_device(scale.device, scale.copied_bytes, scale.product_size)
    size, n = f"{scale.copied_bytes / 1e9:.4g} GB", scale.product_size
    yield "copy bandwidth", found.copy_gb_s, "GB/s", f"2 x {size} copied by torch / median time; {found.device}"
    yield "read bandwidth", found.read_gb_s, "GB/s", f"{size} of float32 summed by torch / median time"
    yield "bandwidth", found.bandwidth_gb_s, "GB/s", "the greater of the two: shares are of this one"
    yield "matrix peak", found.bf16_tflops, "TFLOP/s", f"2 x {n}^3 / median time of torch.mm, random bfloat16"


def kernels_part(shape: str, scale: Scale, limits: Limits) -> Iterator[Row]:
    """Each kernel alone at the shapes of a model."""
    import torch

    from octavo.bench.kernels import Shapes, Types, attention_cases, linear_cases, measure_case
    from octavo.kernels import load_kernels
    from octavo.loader.resolve import resolve_model
    from octavo.models.config import read_model_config

    config, device = read_model_config(resolve_model(shape)), torch.device(scale.device)
    kernels = load_kernels(scale.kernels, scale.device, head_dim=config.head_dim)
    shapes = Shapes(list(scale.rows), [scale.attention], [scale.prefill])
    unknown = float("inf")

    def row(case: Case) -> Iterator[Row]:
        f = measure_case(kernels, case, device, limits.gb_s or unknown, limits.tflops * 1e3 or unknown)
        yield (
            _case_name(case),
            f.share_of_limit or None,
            "of limit",
            f"the greater of {f.gb_per_s:.4g} / {limits.gb_s:.4g} GB/s and {f.gflop_per_s / 1e3:.4g} / "
            f"{limits.tflops:.4g} TFLOP/s; {f.microseconds:.1f} us a call",
        )

    with torch.inference_mode():
        for cases in (attention_cases, linear_cases):
            for case in cases(kernels, config, Types(torch.bfloat16), shapes, device):
                yield from each([(_case_name(case), partial(row, case))])


def _case_name(case: Case) -> str:
    return f"{case.kernel} {case.shape}, {case.rows} rows"


def transformers_part(shape: str, scale: Scale, limits: Limits) -> Iterator[Row]:
    """The same work through transformers' generate."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo.loader.resolve import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(shape))
    with torch.device(scale.device):  # random weights are made there, not copied there
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
        made = out[:, ids.shape[1] :].cpu()  # waits for the device
        seconds = time.perf_counter() - start
        if made.shape != (batch, tokens):
            raise RuntimeError(f"expected {(batch, tokens)} tokens, transformers made {tuple(made.shape)}")
        return seconds

    def timed(batch: int) -> Iterator[Row]:
        generate(batch, 2)
        seconds = generate(batch, scale.output_len)
        yield (
            same_work(scale, batch),
            batch * scale.output_len / seconds,
            "tok/s",
            f"{batch} x {scale.output_len} tokens / {seconds:.3f} s, prefill of {batch} x {scale.input_len} included",
        )

    with torch.inference_mode():
        yield from each([(same_work(scale, batch), partial(timed, batch)) for batch in scale.batches])


PARTS: dict[str, Callable[[str, Scale, Limits], Iterator[Row]]] = {
    "limits": limits_part,
    "engine": engine_part,
    "kernels": kernels_part,
    "transformers": transformers_part,
    "deterministic": deterministic_part,
    "profile": profile_part,
}


def main(argv: list[str]) -> int:
    """Runs one part; 1 if anything of it failed."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("shape", help="a model's name or folder, of which only config.json is read")
    parser.add_argument("file", type=Path, help="takes the figures")
    parser.add_argument("--bandwidth", type=float, default=0.0, metavar="GB/S")
    parser.add_argument("--peak", type=float, default=0.0, metavar="TFLOP/S")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--kernels", help="a backend instead of the scale's own")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO)
    scale = SMOKE if arguments.smoke else FULL
    if arguments.kernels is not None:
        scale = dataclasses.replace(scale, kernels=arguments.kernels)
    limits = Limits(arguments.bandwidth, arguments.peak)
    work = partial(PARTS[arguments.part], arguments.shape, scale, limits)
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
