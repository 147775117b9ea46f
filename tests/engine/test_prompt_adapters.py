"""Prompt tuning and prefix tuning: answers are those of transformers and peft, whatever happens around a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, LoRARequest, OctavoError, PromptAdapterRequest, SamplingParams

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


SHAPE = {
    **{"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 96},
    **{"bos_token_id": 0, "eos_token_id": 1},
}


def ernie() -> Any:
    """Neighbouring dimensions are rotated."""
    from transformers import Ernie4_5Config

    return Ernie4_5Config(**SHAPE, head_dim=16)


def granite() -> Any:
    """Virtual tokens are scaled as other embeddings are."""
    from transformers import GraniteConfig

    return GraniteConfig(**SHAPE, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3)


def peft_config(kind: str, count: int) -> Any:
    import peft

    common: Any = {"task_type": "CAUSAL_LM", "num_virtual_tokens": count}
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


def every_prompt(adapted: Adapted) -> list[Any]:
    """Every prompt with every adapter, and with none."""
    adapters = [None, *map(adapted.request, adapted.kinds)]
    return [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("llama"), llama())


@pytest.fixture(scope="module")
def work(adapted: Adapted) -> list[Any]:
    return every_prompt(adapted)


@pytest.fixture(scope="module")
def mixed(adapted: Adapted, work: list[Any]) -> list[Answer]:
    """The answers of one batch."""
    return answers(adapted.engine(), work)


def test_all_kinds_in_one_batch_answer_as_peft_does(adapted: Adapted, work: list[Any], mixed: list[Answer]) -> None:
    for (prompt, request), answer in zip(work, mixed, strict=True):
        assert_peft(adapted, request and request.lora_name, prompt, answer)
    last = {tuple(tokens) for tokens, _ in mixed[-len(adapted.kinds) - 1 :]}
    assert len(last) == len(adapted.kinds) + 1, "adapters that change nothing would hide errors"


@pytest.mark.parametrize("config", [gpt2, opt, gemma2, ernie, granite])
def test_other_families_answer_as_peft_does(tmp_path: Path, config: Callable[[], Any]) -> None:
    """Learned positions, and scaled embeddings with windows."""
    adapted = Adapted(tmp_path, config(), ["long", "prefix"])
    work = every_prompt(adapted)
    for (prompt, request), answer in zip(work, answers(adapted.engine(), work), strict=True):
        assert_peft(adapted, request and request.lora_name, prompt, answer)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
        {"batching": "prefill_first"},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 5, "max_num_seqs": 5, "block_size": 4},
    ],
    ids=["alone", "chunks", "running ahead", "prefill first", "small chunks"],
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
    run(llm, work)  # while adapters are loaded, fewer requests run at once
    outputs = run(llm, work)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert preemptions > 2
    assert [list(output.outputs[0].token_ids) for output in outputs] == [tokens for tokens, _ in mixed]


def test_bits_survive_eviction(adapted: Adapted, work: list[Any], mixed: list[Answer]) -> None:
    """Two places in memory for five adapters, which are dropped and read again."""
    llm = adapted.engine(max_prompt_adapters=2, enable_prefix_caching=False)
    assert answers(llm, work) == mixed
    assert answers(llm, work[::-1]) == mixed[::-1]


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}], ids=["int8 cache", "bfloat16"])
def test_bits_of_other_types(adapted: Adapted, work: list[Any], options: dict[str, Any]) -> None:
    """As one batch, and alone without a prefix cache; near what float32 gives."""
    found = answers(adapted.engine(**options), work)
    assert answers(adapted.engine(max_num_seqs=1, enable_prefix_caching=False, **options), work) == found
    errors = []
    for (prompt, request), (tokens, logprobs) in zip(work, found, strict=True):
        scores = adapted.logits(request and request.lora_name, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        errors.append(scores.gather(1, torch.tensor(tokens)[:, None])[:, 0] - torch.tensor(logprobs))
    assert torch.cat(errors).square().mean().sqrt() < 0.2


@pytest.mark.parametrize("kind", ["long", "projected"])
def test_requests_share_the_blocks_of_virtual_tokens(adapted: Adapted, kind: str) -> None:
    llm = adapted.engine(block_size=4)
    blocks = llm.llm_engine.core.blocks
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    whole = LENGTHS[kind] // 4

    def held(requests: list[LoRARequest | None]) -> int:
        """Most blocks that two requests of three tokens hold at once."""
        for i, request in enumerate(requests):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": [5 + i, 6, 7]}, params, lora_request=request)
        most = 0
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            most = max(most, blocks.state.used)
        return most

    adapter = adapted.request(kind)
    assert run(llm, [([9], adapter)], params)[0].metrics.num_cached_tokens == 0
    one = held([adapter])
    assert held([adapter, adapter]) == 2 * one - whole
    # The prompt itself was not found, and virtual tokens are not counted.
    output = run(llm, [([1, 2], adapter)], params)[0]
    assert output.metrics.num_cached_tokens == 0 and output.prompt_token_ids == [1, 2]
    other = adapted.request("prefix" if kind == "long" else "prompt")
    assert run(llm, [([1, 2], other)], params)[0].metrics.num_cached_tokens == 0


@pytest.mark.parametrize("kind", ["long", "projected"])
def test_logprobs_of_a_prompt_are_those_of_its_own_tokens(adapted: Adapted, kind: str) -> None:
    prompt = PROMPTS[2]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    for options in ({}, {"max_num_batched_tokens": 8, "max_num_seqs": 5}):
        output = run(adapted.engine(**options), [(prompt, adapted.request(kind))], params)[0]
        assert output.prompt_token_ids == prompt and len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        scores = adapted.logits(kind, prompt).log_softmax(-1)
        for i, token in enumerate(prompt[1:]):
            assert abs(output.prompt_logprobs[i + 1][token].logprob - scores[i, token].item()) < TOLERANCE


def test_sampling_sees_the_tokens_of_the_prompt_alone(adapted: Adapted) -> None:
    seen: list[list[int]] = []

    def watch(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(prompt + output)
        return logits

    prompt, request = PROMPTS[1], adapted.request("long")
    base = run(adapted.engine(), [(prompt, request)])[0].outputs[0]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logits_processors=[watch], logprobs=1)
    output = run(adapted.engine(), [(prompt, request)], params)[0].outputs[0]
    assert output.token_ids == base.token_ids
    assert seen == [prompt + list(base.token_ids[:i]) for i in range(12)]
    # Penalties of tokens of the vocabulary, computed from what peft gives.
    params = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=1e6, ignore_eos=True)
    token = run(adapted.engine(), [(prompt, request)], params)[0].outputs[0].token_ids[0]
    logits = adapted.logits("long", prompt)[-1]
    penalised = logits.clone()
    penalised[prompt] = torch.where(logits[prompt] > 0, logits[prompt] / 1e6, logits[prompt] * 1e6)
    assert token == penalised.argmax()


def test_several_completions_and_beams(adapted: Adapted) -> None:
    from octavo import BeamSearchParams

    prompt = PROMPTS[1]
    for kind in ("long", "projected"):
        work = [(prompt, adapted.request(kind))]
        params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
        once = run(adapted.engine(), work, params)[0]
        again = run(adapted.engine(max_num_batched_tokens=5, max_num_seqs=5), work, params)[0]
        assert [c.token_ids for c in once.outputs] == [c.token_ids for c in again.outputs]
        assert len({tuple(c.token_ids) for c in once.outputs}) == 3
        beams = run(adapted.engine(), work, BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True))[0].outputs
        for beam in beams:
            scores = adapted.logits(kind, prompt + beam.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
            total = scores.gather(1, torch.tensor(beam.token_ids)[:, None]).sum().item()
            assert abs(total - beam.cumulative_logprob) < 4 * TOLERANCE


def test_what_cannot_be_served_fails_alone(adapted: Adapted, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_bytes((adapted.folder / "prompt" / "adapter_config.json").read_bytes())
    tensors = load_file(adapted.folder / "prompt" / "adapter_model.safetensors")
    tensors["prompt_embeddings"][0, 0] = float("inf")
    save_file(tensors, broken / "adapter_model.safetensors")
    llm = adapted.engine(max_prompt_adapter_token=20)
    long = [1] * 60  # fits 72 tokens by itself
    outputs = run(
        llm,
        [
            (PROMPTS[1], adapted.request("prefix")),
            (PROMPTS[1], LoRARequest("broken", 9, str(broken))),
            (PROMPTS[1], adapted.request("long")),
            (long, adapted.request("prefix")),
        ],
    )
    errors = [output.outputs[0].error for output in outputs]
    assert errors[0] is None
    assert "has a value at [0, 0] that is not finite" in errors[1]
    assert "it has 21 virtual tokens, but max_prompt_adapter_token is 20" in errors[2]
    assert "max_tokens: 12 does not fit: the prompt has 60 tokens and the adapter 8 virtual ones" in errors[3]
    cut = SamplingParams(temperature=0.0, max_tokens=4, truncate_prompt_tokens=-1)
    assert len(run(llm, [(long * 2, adapted.request("prefix"))], cut)[0].prompt_token_ids) == 72 - 8 - 4


def test_prompt_adapters_must_be_enabled(adapted: Adapted) -> None:
    llm = adapted.engine(enable_prompt_adapter=False)
    error = run(llm, [(PROMPTS[0], None), (PROMPTS[0], adapted.request("prefix"))])[1].outputs[0].error
    assert error is not None and "enable_prompt_adapter=True" in error


def test_requests_of_prompt_adapters(adapted: Adapted, work: list[Any], mixed: list[Answer]) -> None:
    prompt, request = work[1]
    llm, name, path = adapted.engine(), request.lora_name, request.lora_path
    tokens: Any = {"prompt_token_ids": prompt}
    named = PromptAdapterRequest(name, 1, path, LENGTHS[name])
    output = llm.generate(tokens, PARAMS, prompt_adapter_request=named, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == mixed[1][0]
    for adapters, message in (
        ({"prompt_adapter_request": PromptAdapterRequest(name, 1, path, 7)}, "has 3 virtual tokens, not 7"),
        ({"prompt_adapter_request": named, "lora_request": request}, "either lora_request or prompt_adapter_request"),
        ({"prompt_adapter_request": request}, "prompt_adapter_request must be"),
    ):
        with pytest.raises(OctavoError, match=message):
            llm.generate(tokens, PARAMS, use_tqdm=False, **adapters)


def test_adapters_survive_a_sleep(adapted: Adapted, work: list[Any], mixed: list[Answer]) -> None:
    llm = adapted.engine()
    assert answers(llm, work[:6]) == mixed[:6]
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert answers(llm, work[:6]) == mixed[:6]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_workers_share_virtual_tokens(adapted: Adapted, work: list[Any], mixed: list[Answer], split: str) -> None:
    found = answers(adapted.engine(max_prompt_adapters=2, **{split: 2}), work)
    if split == "pipeline_parallel_size":
        assert found == mixed
    for (prompt, request), answer in zip(work, found, strict=True):
        assert_peft(adapted, request and request.lora_name, prompt, answer)


def test_the_reference_kernels_answer_as_peft_does(adapted: Adapted, work: list[Any]) -> None:
    work = work[6:12]
    found = answers(adapted.engine(kernels="reference", max_num_batched_tokens=16), work)
    for (prompt, request), answer in zip(work, found, strict=True):
        assert_peft(adapted, request and request.lora_name, prompt, answer)
