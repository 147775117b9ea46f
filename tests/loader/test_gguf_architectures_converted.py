"""Files of llama.cpp's own converter give the answers of the folders that they were made of.

The converter is that of the checkout of llama.cpp at ``LLAMA_CPP_CHECKOUT``: without it, these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM, SamplingParams
from tests.loader.conftest import MERGES, byte_level_tokens
from tests.loader.test_gguf_architectures import CASES, ROPE, SHAPE, YARN, checkpoints, make_model
from tests.models.zoo import rename_tensors

CHECKOUT = os.environ.get("LLAMA_CPP_CHECKOUT", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="LLAMA_CPP_CHECKOUT names no checkout of llama.cpp"),
]

#: Runs the converter for each line of arguments on standard input, and reports errors by line number as JSON. It takes
#: the byte-level tokenizer of all models for GPT-2's.
_DRIVER = """
import json, sys, traceback
sys.path.insert(0, sys.argv[1])
import convert_hf_to_gguf as converter
from conversion.base import TextModel

find = converter.get_model_class

def with_tokenizer(*arguments, **options):
    model = find(*arguments, **options)
    model.set_vocab = TextModel._set_vocab_gpt2
    return model

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
converter.get_model_class = with_tokenizer
errors = {}
for number, line in enumerate(sys.stdin):
    sys.argv[1:] = json.loads(line)
    try:
        converter.main()
    except (Exception, SystemExit):
        errors[number] = traceback.format_exc()
print(json.dumps(errors))
"""

LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
#: Cases that are converted with fused matrices.
FUSED = {"llama, fused": ("llama", "Llama", SHAPE), "qwen3, fused": ("qwen3", "Qwen3", SHAPE)}
#: The converter multiplies matrices by them.
FACTORS = {
    **{"attention_in_multiplier": 0.5, "attention_out_multiplier": 1.5, "key_multiplier": 0.75},
    **{"ssm_in_multiplier": 0.5, "ssm_out_multiplier": 2.0, "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0]},
    **{"mlp_multipliers": [0.5, 2.0], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.25},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", SHAPE),
    "llama 3": ("llama", "Llama", SHAPE | {"rope_parameters": LLAMA3, "head_dim": 32}),
    "qwen2": ("qwen2", "Qwen2", SHAPE),
    "qwen2, yarn": ("qwen2", "Qwen2", SHAPE | {"rope_parameters": YARN}),
    "qwen3": ("qwen3", "Qwen3", SHAPE),
    # The converter does not know GPT-J, and that of GPT-NeoX does not read what transformers 5 has saved.
    **{name: case for name, case in CASES.items() if not name.startswith(("gptj", "gptneox", "stablelm 12b"))},
    **FUSED,
    "falcon-h1, factors": ("falcon-h1", "FalconH1", CASES["falcon-h1"][2] | FACTORS),
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_HALF = _ROPE | {"partial_rotary_factor": 0.5}
#: Settings that the converter does not write: models have them only with the values that it takes for granted.
NOT_WRITTEN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "chatglm": {"rope_parameters": _HALF},
    "cohere2": {"layer_types": ["sliding_attention"] * 2},
    "gemma": {"rope_parameters": _ROPE},
    "gemma2": {"rope_parameters": _ROPE},
    "phi2": {"intermediate_size": 256, "rope_parameters": _HALF},
    "stablelm": {"rope_parameters": _HALF},
    "gemma3": {"vocab_size": 271},  # the tokens, with those that were added counted twice
}
HUNYUAN = {"moe_topk": 2, "num_shared_expert": 1, "moe_intermediate_size": SHAPE["intermediate_size"]}
#: Fields of published config.json that transformers 5 leaves out, and the converter needs.
PUBLISHED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_rotary_emb": 8},
    "cohere2": {"rotary_pct": 1.0},
    "deepseek v3": {"scoring_func": "sigmoid"},
    **{key: {"head_dim": 16} for key in ("falcon-h1", "falcon-h1, factors")},
    "gpt2": {"n_ctx": 128},
    **{key: {"layer_types": ["mamba", "attention"]} for key in ("granite 4", "granite 4, dense")},
    "hunyuan-moe": {name: [value] * 2 for name, value in HUNYUAN.items()},
    "kimi-linear": {
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            **{"full_attn_layers": [2], "kda_layers": [1, 3]},
            **{"short_conv_kernel_size": 4, "head_dim": 24, "num_heads": 4},
        },
        "moe_router_activation_func": "sigmoid",
    },
    # Without this name, the converter takes it for a model without experts.
    "nemotron-h": {"num_experts_per_tok": None, "hybrid_override_pattern": "M-*", "layers_block_type": None},
    "phimoe": {
        "architectures": ["PhiMoEForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 128},
    },
}

#: Tensors of published models that transformers 5 saves under other names: a pattern, and the name.
RENAMED = {
    "kimi-linear": (r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with NAME and NAME.gguf of each case, and the converter's errors by case."""
    root, calls = tmp_path_factory.mktemp("converted"), []
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(byte_level_tokens())}, _merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    for name, (_, family, settings) in MODELS.items():
        make_model(family, settings | NOT_WRITTEN.get(name, {})).save_pretrained(root / name)
        edit_config(root / name, **PUBLISHED.get(name, {}))
        if name in RENAMED:
            rename_tensors(root / name, partial(re.sub, *RENAMED[name]))
        wrapped.save_pretrained(root / name)
        fused = ["--fuse-qkv"] if name in FUSED else []
        calls.append([str(root / name), "--outfile", str(root / f"{name}.gguf"), "--outtype", "f32", *fused])
    driver = [sys.executable, "-c", _DRIVER, CHECKOUT]
    lines = "\n".join(map(json.dumps, calls))
    done = subprocess.run(driver, input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    return root, {name: errors[str(i)] for i, name in enumerate(MODELS) if str(i) in errors}


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {name: value for name, value in (config | fields).items() if fields.get(name, 0) is not None}
    (folder / "config.json").write_text(json.dumps(changed))


def _merges() -> list[tuple[str, str]]:
    return [(first, second) for first, second in (merge.split() for merge in MERGES)]


def answer(model: Path, **options: Any) -> tuple[list[int], list[float]]:
    """Eight greedy tokens and their logprobs, in float32."""
    options |= {"quantization": "none", "dtype": "float32", "num_gpu_blocks_override": 16, "skip_tokenizer_init": True}
    llm = LLM(str(model), max_model_len=64, num_threads=1, device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    output = llm.generate([[7 * i % 272 + 5 for i in range(12)]], params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    return list(output.token_ids), [next(iter(step.values())).logprob for step in output.logprobs]


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_file_answers_as_its_folder(
    name: str, converted: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    root, errors = converted
    if name in errors:
        pytest.fail(f"the converter failed: {errors[name]}")
    file = root / f"{name}.gguf"
    tokens, logprobs = answer(file, **checkpoints(file))
    wanted, expected = answer(root / name, **checkpoints(file))
    assert tokens == wanted
    assert logprobs == pytest.approx(expected, abs=1e-4)
