"""Throughput with LoRA adapters against the model alone, and a run with more adapters than fit. One JSON line a case.

    python scripts/research/bench_adapters.py throughput --model FOLDER --ranks 8,64 --adapters 1,8,64
    python scripts/research/bench_adapters.py throughput --engine vllm --model FOLDER --option enforce_eager=true
    python scripts/research/bench_adapters.py many --model FOLDER

``throughput``: 64 requests of 128 tokens in, 128 out, greedy, in turn with so many adapters and without; medians.
``many``: requests that choose among 1,000 adapters by Zipf's law, through 16 slots and 128 places in host memory.
Adapters are random: a rank for each linear layer (``throughput``), or for the query and value projections (``many``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("throughput", "many"))
    parser.add_argument("--engine", choices=("octavo", "vllm"), default="octavo")
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--ranks", default="8,64")
    parser.add_argument("--adapters", default="1,8,64")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt, and of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4000, help="of many")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine option")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (throughput if arguments.what == "throughput" else many)(arguments, Path(folder))


def throughput(arguments: Any, folder: Path) -> None:
    """Prints the medians of each number of adapters, and their share of the throughput without."""
    counts = [int(word) for word in arguments.adapters.split(",")]
    prompts = make_prompts(arguments.batch, arguments.tokens)
    for rank in (int(word) for word in arguments.ranks.split(",")):
        paths = [make_adapter(arguments.model, folder / f"{rank}-{i}", rank, i) for i in range(max(counts))]
        engine = Engine(arguments, max_loras=max(counts), max_cpu_loras=max(counts), max_lora_rank=rank)
        seconds: dict[int, list[float]] = {count: [] for count in (0, *counts)}
        engine.run(prompts, paths, 1)
        for _ in range(arguments.repeats):
            for count, times in seconds.items():
                start = time.perf_counter()
                engine.run(prompts, paths[:count], arguments.tokens)
                times.append(time.perf_counter() - start)
        base = statistics.median(seconds[0])
        for count, times in seconds.items():
            median = statistics.median(times)
            figures = {"rank": rank, "adapters": count, "seconds": round(median, 2), "share": round(base / median, 3)}
            print(json.dumps({"engine": arguments.engine, "batch": arguments.batch, **figures}), flush=True)
        del engine


def many(arguments: Any, folder: Path) -> None:
    """Prints how requests fared, and what the scheduler counted."""
    paths = [make_adapter(arguments.model, folder / str(i), 8, i, ("q_proj", "v_proj")) for i in range(1000)]
    engine = Engine(arguments, max_loras=16, max_cpu_loras=128, max_lora_rank=8, max_num_seqs=64)
    rng = random.Random(0)
    chosen = rng.choices(paths, [1 / (i + 1) for i in range(len(paths))], k=arguments.requests)
    start = time.perf_counter()
    lengths = engine.run(make_prompts(arguments.requests, 32), chosen, 16)
    figures: dict[str, Any] = {"requests": arguments.requests, "adapters": len(set(chosen))}
    figures |= {"seconds": round(time.perf_counter() - start, 1), "complete": sum(n == 16 for n in lengths)}
    stats = engine.llm.llm_engine.stats().adapters
    counted = {name: round(getattr(stats, name), 4) for name in stats.__struct_fields__}
    print(json.dumps({**figures, "scheduler": counted}), flush=True)


class Engine:
    """Octavo or vLLM, whose interfaces are alike."""

    def __init__(self, arguments: Any, **options: Any) -> None:
        self._module = importlib.import_module(arguments.engine)
        lora: Any = importlib.import_module("vllm.lora.request" if arguments.engine == "vllm" else "octavo")
        self._request = lora.LoRARequest
        given = {name: json.loads(value) for name, value in (option.split("=", 1) for option in arguments.option)}
        shared = {"enable_lora": True, "enable_prefix_caching": False, "max_model_len": 1024, "dtype": "bfloat16"}
        self.llm: Any = self._module.LLM(arguments.model, **shared, **options, **given)
        self._requests: dict[Path, Any] = {}

    def run(self, prompts: list[list[int]], paths: list[Path], tokens: int) -> list[int]:
        """The lengths of the answers; the adapters take turns."""
        for path in dict.fromkeys(paths):
            if path not in self._requests:
                number = len(self._requests) + 1
                self._requests[path] = self._request(f"adapter-{number}", number, str(path))
        params = self._module.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        requests = [self._requests[paths[i % len(paths)]] for i in range(len(prompts))] if paths else None
        outputs = self.llm.generate(inputs, params, lora_request=requests, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


def make_prompts(count: int, tokens: int) -> list[list[int]]:
    """Random token ids, the same ones every time."""
    rng = random.Random(1)
    return [[rng.randrange(100, 40000) for _ in range(tokens)] for _ in range(count)]


def make_adapter(model: str, path: Path, rank: int, seed: int, targets: tuple[str, ...] | None = None) -> Path:
    """A random adapter of a Llama-like model in the format of PEFT."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, query)}
    sizes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target in targets or sizes:
            (outputs, inputs), part = sizes[target], "self_attn" if target in _ATTENTION else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            tensors[f"{name}.lora_A.weight"] = values(rank, inputs)
            tensors[f"{name}.lora_B.weight"] = values(outputs, rank)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    settings |= {"target_modules": list(targets or sizes), "base_model_name_or_path": model}
    (path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
