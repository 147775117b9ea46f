"""EAGLE heads in the engine: no bit of an answer changes, and what they draft is what the reference drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.core.request import LoRARequest
from octavo.core.sampling_params import BeamSearchParams
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from octavo.runner import loaded_model
from octavo.runner.drafters import Drafts, HeadDrafter
from tests.models.eagle_heads import TARGET, Head, Reference, eagle1, eagle3
from tests.models.mtp_models import deepseek, glm, qwen3_5
from tests.random_mixes import random_params
from tests.runner.plan_worker import make_adapter
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

VOCAB = TARGET["vocab_size"]
PROMPTS = [[(i * i * 7 + 13 * j + i) % VOCAB for i in range(length)] for j, length in enumerate([1, 9, 22, 40, 13])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=25, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=1, min_tokens=9),
    SamplingParams(temperature=0.7, seed=4, max_tokens=30, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=1, stop_token_ids=[40, 41, 42], prompt_logprobs=1),
]
HEADS: dict[str, Callable[[], Head]] = {"eagle": eagle1, "eagle3": lambda: eagle3(draft_vocab_size=60)}
TIGHT = {"num_gpu_blocks_override": 40, "num_host_blocks_override": 100, "watermark": 0.0}


def save_target(folder: Path, config: dict[str, Any], change: Callable[[Any], None]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder)
    return model


def randomise(model: Any) -> None:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random target with a head of each method: folders, and references."""
    folder = tmp_path_factory.mktemp("eagle")
    model = save_target(folder / "target", TARGET, randomise)
    found: dict[str, Any] = {"target": folder / "target"}
    for method, make in HEADS.items():
        head = make()
        found[method], found[f"{method} reference"] = head.save(folder / method), Reference(head, model)
    return found


def load(target: Path, head: Path | None = None, method: str = "eagle", drafts: int = 4, **options: Any) -> LLM:
    if head is not None:
        options["speculative_config"] = {
            "method": method,
            "model": str(head),
            "num_speculative_tokens": drafts,
            "adaptive": False,
        }
    defaults = {"num_gpu_blocks_override": 300, "max_num_seqs": 12, "max_model_len": 128, "block_size": 4}
    fixed = {"dtype": "float32", "skip_tokenizer_init": True, "kernels": "cpu"}
    return LLM(str(target), **{**fixed, **defaults, **options})


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def plain(files: dict[str, Any]) -> Any:
    """The answers without drafts."""
    return all_of(run(load(files["target"]), PROMPTS, PARAMS))


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """All that heads draft from now on: the tokens of a sequence, and those drafted to follow them."""
    found: list[tuple[list[int], list[int]]] = []
    draft = HeadDrafter.draft

    def recorded(self: HeadDrafter, counts: dict[int, int]) -> Drafts:
        drafts, table = draft(self, counts), self._batch.tokens
        for row, tokens in drafts.tokens.items():
            found.append((table.ids[row, : table.num_tokens[row]].tolist(), tokens))
        return drafts

    monkeypatch.setattr(HeadDrafter, "draft", recorded)
    return found


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 17, "async_scheduling": True},
        {"max_num_batched_tokens": 24, "batching": "mixed", **TIGHT, "preemption_mode": "recompute"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({}, {**TIGHT, "preemption_mode": "swap", "enable_prefix_caching": False})
        ),
    ],
    ids=["in chunks and ahead", "recomputed", "plain", "swapped"],
)
def test_bit_for_bit_the_answers_without_a_head(
    files: dict[str, Any], plain: Any, method: str, options: dict[str, Any]
) -> None:
    llm = load(files["target"], files[method], method, **options)
    outputs = run(llm, PROMPTS, PARAMS)
    assert all_of(outputs) == plain
    if "preemption_mode" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain  # with hits in the prefix cache
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.draft_tokens > 200 and stats.failures == 0


def check_proposals(found: list[tuple[list[int], list[int]]], reference: Reference) -> int:
    """Compares what was drafted with the reference as far as its best token is no tie; the tokens compared."""
    compared = 0
    for tokens, drafts in found:
        wanted, margins = reference.draft(tokens, len(drafts))
        for token, right, margin in zip(drafts, wanted, margins, strict=True):
            if margin < 2e-3:
                break
            assert token == right
            compared += 1
    return compared


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 12},
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {**TIGHT, "preemption_mode": "swap"})),
    ],
    ids=["in chunks", "plain", "swapped"],
)
def test_drafts_are_those_of_the_reference_over_the_whole_context(
    files: dict[str, Any], proposals: list[tuple[list[int], list[int]]], method: str, options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8 if not options else 20, ignore_eos=True)
    llm = load(files["target"], files[method], method, drafts=3, **options)
    first = run(llm, PROMPTS, params)
    if "preemption_mode" in options:
        assert sum(output.metrics.num_preemptions for output in first) > 0
    else:
        count = len(proposals)
        again = run(llm, PROMPTS, params)
        assert sum(output.metrics.num_cached_tokens for output in again) > 50
        assert len(proposals) > count + 20
    assert check_proposals(proposals[::3], files[f"{method} reference"]) > 20


#: A target whose next token is decided by the last one: its layers add nothing, and embeddings are orthogonal.
ORDERED = {**TARGET, "vocab_size": 40, "tie_word_embeddings": False}
WIDTH = TARGET["hidden_size"]


def successors() -> torch.Tensor:
    """The token after each token: cycles of the even ones and of the odd ones."""
    return (torch.arange(40) + 14) % 40


def without_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # The norm leaves rows of this length as they are.
    model.model.embed_tokens.weight.copy_(WIDTH**0.5 * torch.eye(40, WIDTH))


def deterministic(model: Any) -> None:
    without_layers(model)
    model.lm_head.weight.zero_()
    model.lm_head.weight[successors(), torch.arange(40)] = 1.0


def random_choice(model: Any) -> None:
    without_layers(model)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)


def silence(head: Head, prefix: str) -> Head:
    """Makes the layer add nothing."""
    head.tensors[f"{prefix}.self_attn.o_proj.weight"].zero_()
    head.tensors[f"{prefix}.mlp.down_proj.weight"].zero_()
    return head


def knows_the_token() -> Head:
    """EAGLE-1: what the model makes of a token is its embedding."""
    head = silence(eagle1(vocab_size=40), "layers.0")
    head.tensors["fc.weight"] = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], 1)
    return head


def step() -> torch.Tensor:
    """Leads the embedding of a token to that of the next."""
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[successors(), torch.arange(40)] = 1.0
    return matrix


def knows_the_hidden_state() -> Head:
    """EAGLE-1: it looks at the hidden state alone, and thus a token further back."""
    head = silence(eagle1(vocab_size=40), "layers.0")
    head.tensors["fc.weight"] = torch.cat([torch.zeros(WIDTH, WIDTH), step()], 1)
    return head


def knows_the_middle_layer() -> Head:
    """EAGLE-3: the same from the second of three layers, by its feed-forward network; it drafts even tokens only."""
    head = silence(eagle3(vocab_size=40, draft_vocab_size=20, intermediate_size=WIDTH), "midlayer")
    head.tensors["fc.weight"] = torch.cat([torch.zeros(WIDTH, WIDTH), torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], 1)
    for name in ("midlayer.post_attention_layernorm", "norm"):
        head.tensors[f"{name}.weight"] = torch.ones(WIDTH)
    # The norm of an embedding is itself, so that the gate is the same for all; the rest is linear.
    gate = torch.tensor(WIDTH**0.5)
    head.tensors["midlayer.mlp.gate_proj.weight"] = torch.ones(WIDTH, WIDTH)
    head.tensors["midlayer.mlp.up_proj.weight"] = step() - torch.eye(WIDTH)
    head.tensors["midlayer.mlp.down_proj.weight"] = torch.eye(WIDTH) / torch.nn.functional.silu(gate)
    head.tensors["lm_head.weight"] = torch.zeros(20, WIDTH)
    even = torch.arange(0, 40, 2)
    head.tensors["lm_head.weight"][successors()[even] // 2, even] = 1.0
    head.tensors["d2t"] = even - torch.arange(20)
    return head


@pytest.mark.parametrize(
    ("method", "head", "change", "temperature"),
    [
        ("eagle", knows_the_token, random_choice, 1.0),
        ("eagle", knows_the_hidden_state, deterministic, 0.0),
        ("eagle3", knows_the_middle_layer, deterministic, 0.0),
    ],
)
def test_a_head_that_is_right_is_accepted(
    method: str, head: Callable[[], Head], change: Callable[[Any], None], temperature: float, tmp_path: Path
) -> None:
    save_target(tmp_path / "target", ORDERED, change)
    head().save(tmp_path / "head")
    prompts = [[0, 2, 4, 18, 6, 38, 20, 8], [2], [(6 * i) % 40 for i in range(30)]]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True, logprobs=1)
    wanted = all_of(run(load(tmp_path / "target"), prompts, params))
    for options in ({}, {"max_num_batched_tokens": 13}, {"num_gpu_blocks_override": 45, "watermark": 0.0}):
        llm = load(tmp_path / "target", tmp_path / "head", method, drafts=5, **options)
        assert all_of(run(llm, prompts, params)) == wanted
        stats = llm.llm_engine.core.scheduler.stats().speculation
        assert stats is not None and stats.draft_tokens > 100
        assert stats.accepted_tokens / stats.draft_tokens > 0.9


def test_heads_that_do_not_fit_are_refused_before_the_model_is_read(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: Any) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr(loaded_model, "load_network", unread)
    head = eagle1()
    del head.tensors["layers.0.mlp.up_proj.weight"]
    cases: list[tuple[str, Head, type[Exception], str]] = [
        ("eagle", head, WeightError, r"lacks the tensors layers\.0\.mlp\.up_proj\.weight"),
        ("eagle", eagle1(vocab_size=99), ConfigError, "vocab_size is 99, that of the model 101"),
        ("eagle3", eagle1(), UnsupportedModelError, "EagleLlamaForCausalLM"),
    ]
    for number, (method, made, error, message) in enumerate(cases):
        with pytest.raises(error, match=message):
            load(files["target"], made.save(tmp_path / str(number)), method)
    with pytest.raises(ConfigError, match="method 'eagle3' needs a model"):
        load(files["target"], speculative_config={"method": "eagle3"})
    with pytest.raises(ConfigError, match="heads of method 'eagle' are not quantised"):
        load(files["target"], speculative_config={"method": "eagle", "model": "x", "quantization": "int8"})


def test_a_head_sleeps_and_wakes_with_the_model(files: dict[str, Any], plain: Any) -> None:
    llm = load(files["target"], files["eagle3"], "eagle3")
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        assert all_of(run(llm, PROMPTS, PARAMS)) == plain


def test_beams_and_adapters_beside_drafts(files: dict[str, Any], tmp_path: Path) -> None:
    targets = AdapterTargets(read_model_config(files["target"]))
    ref = make_adapter(tmp_path / "adapter", targets, 0, rank=4)
    work: list[SamplingParams | BeamSearchParams] = [*PARAMS, BeamSearchParams(beam_width=3, max_tokens=12)]
    adapted = [None, LoRARequest(ref.name, 1, ref.path)] * 3

    def answers(llm: LLM) -> Any:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in [*PROMPTS, PROMPTS[2]]]
        plain = llm.generate(prompts, work, use_tqdm=False)
        return all_of(plain), all_of(llm.generate(prompts, work[0], use_tqdm=False, lora_request=adapted))

    options: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    wanted = answers(load(files["target"], **options))
    for method in HEADS:
        llm = load(files["target"], files[method], method, **options)
        assert answers(llm) == wanted
        stats = llm.llm_engine.core.scheduler.stats().speculation
        assert stats is not None and stats.draft_tokens > 100 and stats.failures == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
def test_two_ranks_draft_the_same(files: dict[str, Any], plain: Any, method: str, tmp_path: Path) -> None:
    llm = load(files["target"], files[method], method, tensor_parallel_size=2, num_threads=2, device="cpu")
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain
    llm.llm_engine.core.shutdown()
    save_target(tmp_path / "target", ORDERED, deterministic)
    head = knows_the_hidden_state() if method == "eagle" else knows_the_middle_layer()
    head.save(tmp_path / "head")
    llm = load(tmp_path / "target", tmp_path / "head", method, tensor_parallel_size=2, num_threads=2, device="cpu")
    run(llm, [[0, 2, 4, 18]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    stats = llm.llm_engine.core.scheduler.stats().speculation
    llm.llm_engine.core.shutdown()
    assert stats is not None and stats.accepted_tokens > 0.9 * stats.draft_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_mixes(files: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    batching, method = rng.choice(["mixed", "prefill_first"]), rng.choice(list(HEADS))
    kind: dict[str, Any] = {
        "dtype": rng.choice(["float32", "bfloat16"]),
        "quantization": rng.choice(["none", "int8"]),
        "kv_cache_dtype": rng.choice(["auto", "int8"]),
    }
    options: dict[str, Any] = {
        "batching": batching,
        "max_num_batched_tokens": rng.choice([24, 128]) if batching == "mixed" else 300,
        "num_gpu_blocks_override": rng.choice([70, 110, 250]),
        "preemption_mode": rng.choice(["recompute", "swap", "auto"]),
        "num_host_blocks_override": rng.choice([20, 100]),
        "enable_prefix_caching": rng.random() < 0.6,
        "async_scheduling": rng.random() < 0.4,
        "watermark": 0.0,
    }
    start = [rng.randrange(VOCAB) for _ in range(20)]
    prompts, params = [], []
    for _ in range(14):
        prompts.append(start[: rng.randrange(20)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))])
        params.append(random_params(rng, with_texts=False))
    wanted = all_of(run(load(files["target"], **kind), prompts, params))
    drafts = rng.choice([1, 3, 7])
    llm = load(files["target"], files[method], method, drafts, **kind, **options)
    for _ in range(2):
        assert all_of(run(llm, prompts, params)) == wanted


def _target(kind: str) -> Any:
    import transformers

    if kind == "deepseek":
        return deepseek(5)
    if kind in ("glm", "qwen3_5"):
        return {"glm": glm, "qwen3_5": qwen3_5}[kind](5)
    values: dict[str, Any] = {**TARGET, "head_dim": 16, "num_hidden_layers": 5}
    if kind == "Gemma3Text":
        values |= {"sliding_window": 8, "layer_types": [*["sliding_attention"] * 4, "full_attention"]}
    if kind == "GptOss":
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return getattr(transformers, f"{kind}Config")(**values)


@pytest.mark.parametrize(
    "kind",
    [
        *("GptOss", "Gemma3Text", "qwen3_5"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Qwen3", "deepseek", "glm")),
    ],
)
def test_eagle_3_on_other_families(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_target(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path / "target")
    eagle3(vocab_size=model.config.vocab_size, eagle_aux_hidden_state_layer_ids=[1, 2, 4]).save(tmp_path / "head")
    options: dict[str, Any] = {"state_checkpoint_tokens": 8} if kind == "qwen3_5" else {}
    params = [PARAMS[0], PARAMS[2]]
    wanted = all_of(run(load(tmp_path / "target", **options), PROMPTS[2:4], params))
    llm = load(tmp_path / "target", tmp_path / "head", "eagle3", drafts=3, **options)
    assert all_of(run(llm, PROMPTS[2:4], params)) == wanted
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.draft_tokens > 30 and stats.failures == 0
