"""Prompt tuning and prefix tuning: answers are those of transformers and peft, whatever happens around a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.adapters import LoRARequest

pytest.importorskip("peft")
pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

VOCAB = 101
PROMPTS = [[3], [17, 99, 42, 0, 8, 8, 61], [(i * 37) % VOCAB for i in range(25)]]
TOLERANCE = 1e-3
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
#: Virtual tokens: less than a block, a whole block, and more than the chunk of a step.
LENGTHS = {"prompt": 3, "long": 21, "encoded": 4, "prefix": 8, "projected": 19}


def llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )


def gpt2() -> Any:
    from transformers import GPT2Config

    return GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=6, n_positions=96, bos_token_id=0, eos_token_id=1)


def opt() -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=1,
    )


def peft_config(kind: str, count: int) -> Any:
    import peft

    common = {"task_type": "CAUSAL_LM", "num_virtual_tokens": count}
    match kind:
        case "prompt" | "long":
            return peft.PromptTuningConfig(**common)
        case "encoded":
            return peft.PromptEncoderConfig(encoder_hidden_size=16, **common)
        case "projected":
            return peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=16, **common)
    return peft.PrefixTuningConfig(**common)


class Adapted:
    """A model of transformers, saved with adapters of peft."""

    def __init__(self, folder: Path, config: Any, kinds: Sequence[str] = tuple(LENGTHS)) -> None:
        import peft
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.folder, self.kinds = folder, list(kinds)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in self.model.named_parameters():
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
        self.model.save_pretrained(folder / "model")
        for kind in kinds:
            tuned = peft.get_peft_model(self.model, peft_config(kind, LENGTHS[kind]))
            for parameter in tuned.prompt_encoder.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
            tuned.save_pretrained(folder / kind)

    def request(self, kind: str) -> LoRARequest:
        return LoRARequest(kind, 1 + self.kinds.index(kind), str(self.folder / kind))

    def engine(self, **options: Any) -> LLM:
        defaults = {"num_gpu_blocks_override": 400, "block_size": 8, "max_num_seqs": 16, "max_model_len": 72}
        adapters = {"enable_prompt_adapter": True, "max_prompt_adapter_token": 24}
        options = {"dtype": "float32", **defaults, **adapters, **options}
        return LLM(str(self.folder / "model"), skip_tokenizer_init=True, **options)

    def logits(self, kind: str | None, tokens: list[int]) -> torch.Tensor:
        """Those of peft at each of the tokens, float32 [tokens, vocab]."""
        import peft

        model = self.model
        if kind is not None:
            model = peft.PeftModel.from_pretrained(self.model, self.folder / kind).eval()
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        return logits[-len(tokens) :]


Answer = tuple[list[int], list[float]]


def answers(llm: LLM, work: Sequence[tuple[list[int], LoRARequest | None]], params: Any = PARAMS) -> list[Answer]:
    outputs = run(llm, work, params)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.error is None, completion.error
        places = zip(completion.token_ids, completion.logprobs or [], strict=True)
        found.append((list(completion.token_ids), [place[token].logprob for token, place in places]))
    return found


def run(llm: LLM, work: Sequence[tuple[list[int], LoRARequest | None]], params: Any = PARAMS) -> list[Any]:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in work]
    return llm.generate(prompts, params, lora_request=[adapter for _, adapter in work], use_tqdm=False)


def assert_peft(adapted: Adapted, kind: str | None, prompt: list[int], answer: Answer) -> None:
    """Greedy tokens, unless logits tie, and their logprobs."""
    tokens, logprobs = answer
    scores = adapted.logits(kind, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (scores.max(-1).values - chosen).max() < TOLERANCE
    assert (chosen - torch.tensor(logprobs)).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("llama"), llama())


@pytest.fixture(scope="module")
def work(adapted: Adapted) -> list[tuple[list[int], LoRARequest | None]]:
    """Every prompt with every adapter, and with none."""
    return [(prompt, kind and adapted.request(kind)) for prompt in PROMPTS for kind in [None, *adapted.kinds]]


@pytest.fixture(scope="module")
def mixed(adapted: Adapted, work: list[Any]) -> list[Answer]:
    """The answers of one batch."""
    return answers(adapted.engine(), work)


def test_all_kinds_in_one_batch_answer_as_peft_does(adapted: Adapted, work: list[Any], mixed: list[Answer]) -> None:
    for (prompt, request), answer in zip(work, mixed, strict=True):
        assert_peft(adapted, request and request.lora_name, prompt, answer)
    last = {tuple(tokens) for tokens, _ in mixed[-len(adapted.kinds) - 1 :]}
    assert len(last) == len(adapted.kinds) + 1, "adapters that change nothing would hide errors"


@pytest.mark.parametrize("config", [gpt2, opt, gemma2])
def test_other_families_answer_as_peft_does(tmp_path: Path, config: Callable[[], Any]) -> None:
    """Learned positions, and scaled embeddings with windows."""
    adapted = Adapted(tmp_path, config(), ["long", "prefix"])
    work = [(prompt, kind and adapted.request(kind)) for prompt in PROMPTS for kind in [None, *adapted.kinds]]
    for (prompt, request), answer in zip(work, answers(adapted.engine(), work), strict=True):
        assert_peft(adapted, request and request.lora_name, prompt, answer)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 5, "max_num_seqs": 5, "block_size": 4},
    ],
    ids=["alone", "chunks", "small chunks"],
)
def test_bits_do_not_depend_on_the_batch(
    adapted: Adapted, work: list[Any], mixed: list[Answer], options: dict[str, Any]
) -> None:
    assert answers(adapted.engine(**options), work) == mixed


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_bits_survive_preemption(adapted: Adapted, work: list[Any], mixed: list[Answer], mode: str) -> None:
    llm = adapted.engine(
        num_gpu_blocks_override=24, block_size=4, watermark=0.0, preemption_mode=mode, enable_prefix_caching=False
    )
    outputs = run(llm, work)
    assert sum(output.metrics.num_preemptions for output in outputs) > 2
    assert [list(output.outputs[0].token_ids) for output in outputs] == [tokens for tokens, _ in mixed]
