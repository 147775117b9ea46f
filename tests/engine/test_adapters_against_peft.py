"""Answers with LoRA adapters against transformers and peft, in float32: several ranks and none in one batch."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.core.request import LoRARequest
from tests.models.zoo import PARAMS, PROMPTS, SMALL, TOLERANCE, answer_of, logits_of, prompts_of

RANKS = (1, 8, 64)
#: What the adapters of each rank have besides.
SETTINGS: dict[int, dict[str, Any]] = {
    1: {},
    8: {"rank_pattern": {"layers.1.mlp.down_proj": 3, "up_proj": 5}, "alpha_pattern": {"[qk]_proj": 6}},
    64: {"use_rslora": True, "alpha_pattern": {"layers.0.self_attn.v_proj": 2}},
}
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "word_embeddings", "lm_head")


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SMALL)


def gpt2() -> Any:
    from transformers import GPT2Config

    sizes = {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 96}
    return GPT2Config(vocab_size=101, **sizes, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)


def of(module: str, name: str = "config", **values: Any) -> Callable[[], Any]:
    """The configuration that another test of networks has."""
    return lambda: getattr(importlib.import_module(f"tests.models.{module}"), name)(**values)


def named(name: str, **values: Any) -> Callable[[], Any]:
    """A small configuration of a class of transformers."""

    def make() -> Any:
        import transformers

        return getattr(transformers, name)(**{**SMALL, **values})

    return make


#: By architecture: its configuration, and all modules of it that take adapters.
MORE: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "phi3": (
        of("test_phi3", tie_word_embeddings=False),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"),
    ),
    "falcon": (of("test_falcon", tie_word_embeddings=False), FUSED),
    "bloom": (of("test_bloom", tie_word_embeddings=False), FUSED),
    "gpt_neox": (
        of("test_gpt_neox"),
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "embed_in", "embed_out"),
    ),
    "opt": (
        of("test_opt", tie_word_embeddings=False),
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "embed_tokens", "lm_head"),
    ),
    "qwen2": (named("Qwen2Config"), LLAMA),
    "qwen3": (named("Qwen3Config", head_dim=16), LLAMA),
    "cohere": (named("CohereConfig", tie_word_embeddings=False), LLAMA),
    "gemma3": (
        named("Gemma3TextConfig", head_dim=16, sliding_window=7, query_pre_attn_scalar=24, tie_word_embeddings=False),
        LLAMA,
    ),
    "mixtral": (named("MixtralConfig", num_local_experts=5, num_experts_per_tok=2), ("q_proj", "v_proj", "o_proj")),
    "deepseek_v3": (of("test_deepseek", "v3"), ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
}


class Adapted:
    """A random model with adapters of all ``RANKS``, saved, and wrapped by peft."""

    def __init__(self, folder: Path, config: Any, targets: tuple[str, ...]) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
        self.folder = folder / "model"
        model.save_pretrained(self.folder)
        self.plain = copy.deepcopy(model)
        self.names = {rank: f"rank{rank}" for rank in RANKS}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of targets that may be tied
            configs = {
                self.names[rank]: peft.LoraConfig(
                    r=rank,
                    lora_alpha=int(rank**0.5) if rank == 64 else rank,
                    target_modules=list(targets),
                    init_lora_weights=False,
                    **SETTINGS[rank],
                )
                for rank in RANKS
            }
            first, *others = configs
            self.wrapped = peft.get_peft_model(model, configs[first], adapter_name=first)
            for name in others:
                self.wrapped.add_adapter(name, configs[name])
            for name, parameter in self.wrapped.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.15)
            self.wrapped.eval().save_pretrained(str(folder))
        self.requests = {
            name: LoRARequest(name, number, str(folder / name)) for number, name in enumerate(configs, start=1)
        }

    def reference(self, name: str | None) -> Any:
        """The model of transformers with an adapter, or without."""
        if name is None:
            return self.plain
        self.wrapped.set_adapter(name)
        return self.wrapped

    def merged(self, name: str) -> Any:
        """The model with an adapter's products added to its weights."""
        wrapped = copy.deepcopy(self.wrapped)
        wrapped.set_adapter(name)
        return wrapped.merge_and_unload(adapter_names=[name])

    def engine(self, **options: Any) -> LLM:
        """An engine in float32 with as many slots as there are adapters."""
        defaults = {"num_gpu_blocks_override": 200, "max_num_seqs": 8, "max_model_len": 64, "max_loras": len(RANKS)}
        options = {**defaults, "enable_lora": True, "max_lora_rank": max(RANKS), **options}
        return LLM(str(self.folder), dtype="float32", skip_tokenizer_init=True, **options)


def check_against(model: Any, prompt: list[int], answer: tuple[list[int], list[float]]) -> None:
    """Tokens are the best of the model, or as good within the arithmetic of both sides; logprobs are its."""
    tokens, logprobs = answer
    scores = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (scores.max(-1).values - chosen).max() < TOLERANCE
    assert (chosen - torch.tensor(logprobs)).abs().max() < TOLERANCE


def check(adapted: Adapted, *, merged: bool = True, **options: Any) -> None:
    """All adapters and none over several prompts, side by side in one batch."""
    llm = adapted.engine(**options)
    cases = [(name, prompt) for prompt in PROMPTS[1:3] for name in (None, *adapted.requests)]
    requests = [None if name is None else adapted.requests[name] for name, _ in cases]
    outputs = llm.generate(prompts_of([p for _, p in cases]), PARAMS, use_tqdm=False, lora_request=requests)
    for (name, prompt), output in zip(cases, outputs, strict=True):
        assert output.outputs[0].error is None
        check_against(adapted.reference(name), prompt, answer_of(output))
        if name is not None and merged:
            check_against(adapted.merged(name), prompt, answer_of(output))
    answers = {str(answer_of(output)) for output in outputs}
    assert len(answers) == len(cases), "adapters that change no answer would hide errors"


@pytest.fixture(scope="module")
def adapted_llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("llama"), llama(), LLAMA)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_adapters_on_all_matrices_of_a_llama(adapted_llama: Adapted, kernels: str) -> None:
    check(adapted_llama, kernels=kernels)


def test_adapters_on_fused_and_transposed_matrices(tmp_path: Path) -> None:
    check(Adapted(tmp_path, gpt2(), ("c_attn", "c_proj", "c_fc", "wte", "lm_head")))


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_adapters_of_other_networks(tmp_path: Path, family: str) -> None:
    config, targets = MORE[family]
    check(Adapted(tmp_path, config(), targets))
