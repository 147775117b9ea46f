"""Prompts for scripts that measure: random tokens, or a file's."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError


@dataclass
class SampleRequest:
    """One prompt, its length and the tokens that it asks for."""

    prompt: str
    prompt_len: int
    expected_output_len: int | None = None
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that ``get_samples`` reads."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument(
        "--dataset-name",
        choices=["random", "custom", "sharegpt"],
        default="random",
        help='custom: JSON lines with "prompt"; sharegpt: a JSON list of conversations, whose first message counts',
    )
    parser.add_argument("--dataset-path", type=Path, default=None)
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """``num_prompts`` prompts of the data set that the arguments name; a file with fewer is repeated.

    Raises:
        ConfigError: the file is missing or cannot be read.
    """
    if args.dataset_name == "random":
        draw, size = random.Random(args.seed), len(tokenizer)
        texts = [
            tokenizer.decode([draw.randrange(size) for _ in range(args.random_input_len)])
            for _ in range(args.num_prompts)
        ]
    else:
        texts = list(_texts(args.dataset_path, args.dataset_name))
        texts = (texts * (args.num_prompts // max(1, len(texts)) + 1))[: args.num_prompts]
    expected = args.random_output_len if args.dataset_name == "random" else None
    return [SampleRequest(text, len(tokenizer.encode(text)), expected) for text in texts]


def _texts(path: Path | None, kind: str) -> Iterator[str]:
    if path is None:
        raise ConfigError(f"--dataset-name {kind} needs --dataset-path")
    try:
        content = path.read_text(encoding="utf-8")
        if kind == "custom":
            yield from (json.loads(line)["prompt"] for line in content.splitlines() if line.strip())
        else:
            yield from (entry["conversations"][0]["value"] for entry in json.loads(content) if entry["conversations"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read as {kind}: {type(e).__name__}: {e}") from e
