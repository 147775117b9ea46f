"""What a model will take, by its headers, against what an engine of it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from octavo import LLM
from octavo.config.engine_config import make_config
from octavo.engine.memory_needs import GGUFSizes, size_model
from octavo.layers.layer import Layer
from tests.embedding_models import make_encoder
from tests.loader.conftest import random_blocks, tiny_llama  # noqa: F401  a fixture
from tests.models.mtp_models import save_mtp

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

OPTIONS: dict[str, Any] = {
    "kernels": "cpu",
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 8,
    "max_num_seqs": 4,
}


def layers(layer: Layer) -> Iterator[Layer]:
    yield layer
    for _, child in layer._children:
        yield from layers(child)


def held_bytes(networks: list[Any]) -> int:
    """Of packed matrices and tables of embeddings, each once."""
    held: dict[int, int] = {}
    for network in networks:
        for layer in layers(network):
            packed: Any = getattr(layer, "packed", None)
            for matrix in [] if packed is None else getattr(packed, "parts", None) or [packed.packed]:
                held[id(matrix)] = matrix.nbytes
            if (table := getattr(layer, "table", None)) is not None:
                held[id(table)] = table.numpy().nbytes
    return sum(held.values())


@contextmanager
def loaded(model: Path, **options: Any) -> Iterator[Any]:
    """The ``LoadedModel`` of an engine."""
    llm = LLM(str(model), **OPTIONS, **options)
    executor: Any = llm.llm_engine.core.executor
    yield executor._alive().runner.loaded


@pytest.mark.parametrize("has_head", [False, True], ids=["tied", "with a head"])
@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.F16])
def test_weights_of_a_gguf_file(tiny_llama: Callable[..., Path], tmp_path: Path, kind: Q, has_head: bool) -> None:  # noqa: F811
    """Types that are kept, one that gets 8 bits, whose tied embedding is a table too, and one that is not quantised."""
    embedding, head = (random_blocks(np.random.default_rng(seed), kind, 512, 256) for seed in (0, 1))
    tensors = {"token_embd.weight": (embedding, kind)} | ({"output.weight": (head, kind)} if has_head else {})
    file = tiny_llama(tmp_path / "m.gguf", kind, tensors=tensors)
    need = size_model(make_config(model=str(file), **OPTIONS), 1 << 30).need
    with loaded(file) as engine:
        assert need.weights == pytest.approx(held_bytes([engine.network]), rel=0.01)
    assert GGUFSizes.of(file).is_tied is not has_head


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_of_a_folder_with_layers_that_draft(tmp_path: Path, quantization: str) -> None:
    save_mtp("qwen3_5", tmp_path, vocab_size=4096)
    options = {"dtype": "bfloat16", "quantization": quantization}
    need = size_model(make_config(model=str(tmp_path), **OPTIONS, **options), 1 << 30).need
    with loaded(tmp_path, **options) as engine:
        assert engine.drafter is not None
        assert need.weights == pytest.approx(held_bytes(engine.networks), rel=0.05)


def test_options_of_decoders_are_left_out_by_others(tiny_model: Path, tmp_path: Path) -> None:
    shared = {"kv_disk": str(tmp_path / "kv"), "kv_disk_bytes": "1GiB", "speculative_config": {"method": "ngram"}}
    encoder = make_encoder(tmp_path / "encoder")
    sized = size_model(make_config(model=str(encoder), device="cpu", **shared), 1 << 30)
    assert sized.options.kv_disk is None and sized.options.speculative_config is None
    sized.options.for_encoder("cpu")
    sized = size_model(make_config(model=str(tiny_model), device="cpu", **shared), 1 << 30)
    assert sized.options.kv_disk and sized.options.speculative_config


def test_adapters_count(tiny_model: Path) -> None:
    """As many as are kept, of the highest rank: what a worker reserves for them."""
    options = {**OPTIONS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float32"}
    with_adapters, without = (
        size_model(make_config(model=str(tiny_model), **{**options, "enable_lora": enabled}), 1 << 30).need.step
        for enabled in (True, False)
    )
    with loaded(tiny_model, **{name: options[name] for name in options if name not in OPTIONS}) as engine:
        reserved = engine.preparations.reserved_bytes(1 << 30)
    assert reserved > 0 and with_adapters - without >= reserved
    assert with_adapters < without + reserved + without


def test_the_largest_step_stays_within_its_bound(tiny_model: Path, tmp_path: Path) -> None:
    """Of a large vocabulary: as many sequences as may run, whose logits are edited and scored, and scored prompts."""
    vocabulary, sequences = 1 << 16, 64
    facts = json.loads((tiny_model / "config.json").read_text()) | {"vocab_size": vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    options = {
        **{"load_format": "dummy", "dtype": "float32", "device": "cpu", "kernels": "cpu", "num_threads": 1},
        **{"skip_tokenizer_init": True, "max_num_seqs": sequences, "max_model_len": 128},
    }
    program = f"""
from pathlib import Path
from octavo import LLM, SamplingParams

def memory(name):
    text = Path("/proc/self/status").read_text().partition(name + ":")[2]
    return 1024 * int(text.split()[0])

llm = LLM({str(tmp_path)!r}, swap_space=0, kv_cache_memory_bytes=4 << 20, enable_prefix_caching=False, **{options!r})
prompts = [{{"prompt_token_ids": [3 + i] * 8}} for i in range({sequences})]
few = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, logit_bias={{5: 1.0}})
llm.generate(prompts[:1], few, use_tqdm=False)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS")
random = SamplingParams(top_p=0.9, max_tokens=4, ignore_eos=True, logprobs=1, logit_bias={{5: 1.0}}, seed=0)
scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
llm.generate(prompts, random, use_tqdm=False)
llm.generate([{{"prompt_token_ids": [7] * 100}}], scored, use_tqdm=False)
print(memory("VmHWM") - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, need = int(result.stdout.split()[-1]), size_model(make_config(model=str(tmp_path), **options), 1 << 30).need
    logits = 4 * vocabulary * sequences
    assert 0.9 * logits < grown < need.step < 2 * logits
