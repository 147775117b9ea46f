"""Assistants of Gemma 4 in the engine: no bit of an answer changes, and what they draft is what transformers drafts."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.errors import ConfigError, UnsupportedModelError, WeightError
from octavo.core.request import LoRARequest
from octavo.core.sampling_params import BeamSearchParams
from octavo.engine.memory_needs import size_model
from octavo.loader.adapters import AdapterTargets
from octavo.models.config_files import read_model_config
from octavo.runner import loaded_model
from octavo.sampling.sampler import Sampler
from tests.engine import test_grammars_engine as forms
from tests.grammar_cases import generate
from tests.image_models import picture, save_gemma4
from tests.models.gemma4_assistants import KINDS, VOCAB, Reference, save_assistant, save_assisted
from tests.models.zoo import edit_config
from tests.random_mixes import random_params
from tests.runner.plan_worker import make_adapter
from tests.whole_outputs import all_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

PROMPTS = [[(i * i * 7 + 13 * j + i) % VOCAB for i in range(length)] for j, length in enumerate([1, 9, 22, 40, 13])]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, seed=1, n=3, max_tokens=25, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, max_tokens=30, ignore_eos=True, logprobs=1, min_tokens=9),
    SamplingParams(temperature=0.7, seed=4, max_tokens=30, ignore_eos=True, logprobs=1, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=1, stop_token_ids=[40, 41, 42], prompt_logprobs=1),
]
TIGHT = {"num_gpu_blocks_override": 40, "num_host_blocks_override": 100, "watermark": 0.0}
SMALL, LARGE, UNIFIED = KINDS


def load(folder: Path, drafts: int | None = 4, **options: Any) -> LLM:
    """``folder``: of a model and its assistant; ``drafts``: None of no assistant."""
    if drafts is not None:
        assistant = {"method": "mtp", "model": str(folder / "assistant"), "num_speculative_tokens": drafts}
        options["speculative_config"] = {**assistant, "adaptive": False}
    defaults = {"num_gpu_blocks_override": 300, "max_num_seqs": 12, "max_model_len": 128, "block_size": 4}
    fixed = {"dtype": "float32", "skip_tokenizer_init": True, "kernels": "cpu"}
    return LLM(str(folder / "model"), **{**fixed, **defaults, **options})


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def drafted(llm: LLM) -> int:
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.failures == 0
    return stats.draft_tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Reference]]:
    """Folder and reference of each kind."""
    root = tmp_path_factory.mktemp("assisted")
    return {kind: (root / str(i), save_assisted(kind, root / str(i))) for i, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def plain(files: dict[str, tuple[Path, Reference]]) -> dict[str, Any]:
    """The answers without drafts."""
    return {kind: all_of(run(load(folder, None), PROMPTS, PARAMS)) for kind, (folder, _) in files.items()}


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "in chunks and ahead": (SMALL, {"max_num_batched_tokens": 17, "async_scheduling": True}),
    "recomputed": (SMALL, {"max_num_batched_tokens": 24, **TIGHT, "preemption_mode": "recompute"}),
    "swapped": (SMALL, {**TIGHT, "preemption_mode": "swap", "enable_prefix_caching": False}),
    "values are keys, recomputed": (LARGE, {**TIGHT, "preemption_mode": "recompute"}),
    "unified, in chunks": (UNIFIED, {"max_num_batched_tokens": 17}),
}


@pytest.mark.parametrize(("kind", "options"), OPTIONS.values(), ids=OPTIONS)
def test_bit_for_bit_the_answers_without_an_assistant(
    files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], kind: str, options: dict[str, Any]
) -> None:
    llm = load(files[kind][0], **options)
    outputs = run(llm, PROMPTS, PARAMS)
    assert all_of(outputs) == plain[kind]
    if "preemption_mode" in options:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain[kind]  # with hits in the prefix cache
    assert drafted(llm) > 200


Calls = list[tuple[list[int], list[int], torch.Tensor]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The known tokens, the drafts behind them, and the assistant's logits [vocab] of each draft from now on."""
    found: Calls = []
    draft = Sampler.draft

    def recorded(self: Sampler, logits: Any, rows: Any, positions: Any) -> Any:
        table, values = self._tokens, logits if isinstance(logits, torch.Tensor) else torch.from_numpy(logits.numpy())
        for row, position, own in zip(rows.tolist(), positions.tolist(), values.clone(), strict=True):
            known = int(table.num_tokens[row])
            ids = table.ids[row, :position].tolist()
            found.append((ids[:known], ids[known:], own))
        return draft(self, logits, rows, positions)

    monkeypatch.setattr(Sampler, "draft", recorded)
    return found


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        *((kind, "cpu") for kind in KINDS),
        (SMALL, "reference"),
        *(pytest.param(kind, "reference", marks=pytest.mark.slow) for kind in (LARGE, UNIFIED)),
    ],
)
def test_logits_are_those_of_transformers(
    files: dict[str, tuple[Path, Reference]], calls: Calls, kind: str, kernels: str
) -> None:
    """Within and beyond the window, after chunks and hits in the prefix cache, greedy and sampled, several deep."""
    folder, reference = files[kind]
    llm = load(folder, kernels=kernels, max_num_batched_tokens=15)
    params = [structs.replace(each, max_tokens=9, n=1) for each in PARAMS]
    for _ in range(2):
        run(llm, PROMPTS, params)
    assert {len(tokens) > 6 for tokens, _, _ in calls} == {True, False}  # tokens of a window
    assert {len(drafts) for _, drafts, _ in calls} == {0, 1, 2, 3}
    for tokens, drafts, logits in calls[:: max(1, len(calls) // 24)]:
        expected = reference.logits(tokens, drafts)[-1]
        kept = torch.isfinite(logits)
        assert int(kept.sum()) == (30 if kind == SMALL else VOCAB)  # three clusters of ten
        torch.testing.assert_close(logits[kept], expected[kept], atol=5e-4, rtol=1e-4)
        assert kept.all() or (expected[~kept] == expected[kept].min() - 1.0).all()
        assert expected[kept].std() > 0.1


def test_the_reference_drafts_as_generate_of_transformers_does(files: dict[str, tuple[Path, Reference]]) -> None:
    """Within the window, of which there transformers reads one or two tokens more."""
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    for _, reference in files.values():
        assistant = reference.assistant
        assistant.generation_config.num_assistant_tokens = 5
        generator = SinglePositionMultiTokenCandidateGenerator(
            assistant, reference.target.get_input_embeddings(), GenerationConfig(max_length=64)
        )
        for prompt in (PROMPTS[1][:5], PROMPTS[2][3:9]):
            hidden, shared = reference.inputs(prompt)
            generator.is_main_model_prefill = True
            outputs = SimpleNamespace(hidden_states=[hidden], shared_kv_states=shared)
            ids, logits = generator.get_candidates(torch.tensor([prompt]), {}, outputs, False, 0)
            drafts = ids[0, len(prompt) :].tolist()
            assert drafts == reference.draft(prompt, 5)
            assert torch.equal(logits[0], reference.logits(prompt, drafts[:-1]))


def test_an_assistant_that_is_right_is_accepted(tmp_path: Path) -> None:
    """The model's layers add nothing, and so do the assistant's: the last token decides both."""
    width = 48

    def silence(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
                tensor.zero_()
            elif name.endswith(("norm.weight", "layer_scalar")):
                tensor.fill_(1.0)
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    save_assisted(UNIFIED, tmp_path, vocab_size=40)
    edit_config(tmp_path / "model", tie_word_embeddings=False)
    after = (torch.arange(40) + 14) % 40
    head = torch.zeros(40, width)
    head[after, torch.arange(40)] = 1.0

    def model(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = torch.eye(40, width)
        tensors["lm_head.weight"] = head

    def assistant(tensors: dict[str, torch.Tensor]) -> None:
        # A random projection tells the tokens apart, of which the best is the one that it was made of.
        projection = torch.nn.functional.normalize(torch.randn(32, width, generator=torch.Generator().manual_seed(1)))
        tensors["pre_projection.weight"] = torch.cat([projection, torch.zeros(32, width)], 1)
        tokens = torch.nn.functional.normalize(projection[:, :40].T)
        tensors["lm_head.weight"] = torch.zeros(40, 32).index_copy_(0, after, tokens)

    silence(tmp_path / "model", model)
    silence(tmp_path / "assistant", assistant)
    prompts = [[0, 2, 4, 18, 6, 38, 20, 8], [2], [(6 * i) % 40 for i in range(30)]]
    for temperature in (0.0, 0.02):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True, logprobs=1)
        wanted = all_of(run(load(tmp_path, None), prompts, params))
        for options in ({}, {"max_num_batched_tokens": 13}, {"num_gpu_blocks_override": 45, "watermark": 0.0}):
            llm = load(tmp_path, 5, **options)
            assert all_of(run(llm, prompts, params)) == wanted
            stats = llm.llm_engine.core.scheduler.stats().speculation
            assert stats is not None and stats.draft_tokens > 100
            assert stats.accepted_tokens / stats.draft_tokens > 0.9


def test_names_and_defaults(
    files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = files[SMALL][0]
    assistant = str(folder / "assistant")
    for given in ({"model": assistant}, {"method": "gemma4_mtp", "model": assistant}):
        with caplog.at_level(logging.INFO, "octavo.startup"):
            llm = load(folder, None, speculative_config=given)
        drafts = llm.llm_engine.core.options.speculative_config
        assert drafts is not None and (drafts.method, drafts.num_speculative_tokens, drafts.adaptive) == (
            "mtp",
            3,
            True,
        )
        assert all_of(run(llm, PROMPTS, PARAMS)) == plain[SMALL]
    assert f"drafts: mtp {assistant} (Gemma4AssistantForCausalLM), 0.00 GiB, 0.0% of the KV cache" in caplog.text
    named = {"model": assistant, "num_speculative_tokens": 6}
    drafts = load(folder, None, speculative_config=named).llm_engine.core.options.speculative_config
    assert drafts is not None and (drafts.method, drafts.num_speculative_tokens) == ("mtp", 6)
    for fields, words in (
        ({"method": "mtp", "model": "x", "quantization": "int8"}, "are not quantised"),
        ({"method": "mtp", "revision": "x"}, "own checkpoint"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_config(model="m", speculative_config=fields)


def test_the_memory_of_an_assistant_is_counted_and_takes_no_cache(files: dict[str, tuple[Path, Reference]]) -> None:
    folder = files[LARGE][0]
    alone, assisted = (load(folder, drafts) for drafts in (None, 3))
    groups = [llm.llm_engine.core.executor.kv_groups() for llm in (alone, assisted)]
    assert groups[0] == groups[1]
    needs = []
    for drafts in (None, {"method": "mtp", "model": str(folder / "assistant")}):
        options = make_config(
            model=str(folder / "model"), dtype="float32", quantization="int8", kernels="cpu", speculative_config=drafts
        )
        needs.append(size_model(options, 1 << 30).need.weights)
    tensors = load_file(folder / "assistant" / "model.safetensors")
    assert needs[1] - needs[0] == sum(tensor.numel() for tensor in tensors.values()) * 4


def _edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _set(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.update({name: tensor}))


def _text(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        edit_config(folder, text_config={**config["text_config"], **values})

    return change


ORDERING = "masked_embedding.token_ordering"
MISFITS: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "hidden size": (
        lambda f: edit_config(f, backbone_hidden_size=64),
        ConfigError,
        r"backbone_hidden_size\) is 64, .* 48",
    ),
    "vocabulary": (_text(vocab_size=90), ConfigError, "vocab_size is 90, that of the model 100"),
    "heads": (_text(num_key_value_heads=1), ConfigError, "KV heads of global layers is 1, that of the model 2"),
    "window": (_text(sliding_window=7), ConfigError, "sliding_window is 7, that of the model 6"),
    "experts": (_text(enable_moe_block=True), UnsupportedModelError, "enable_moe_block"),
    "own cache": (_text(num_kv_shared_layers=2), UnsupportedModelError, "num_kv_shared_layers"),
    "clusters": (lambda f: edit_config(f, num_centroids=7), ConfigError, r"vocab_size \(100\).*num_centroids \(7\)"),
    "quantised": (
        lambda f: edit_config(f, quantization_config={"quant_method": "x"}),
        UnsupportedModelError,
        "quantiz",
    ),
    "projection": (
        _set("post_projection.weight", torch.zeros(48, 33)),
        WeightError,
        "post_projection.*hidden_size = 32",
    ),
    "missing": (lambda f: _edit(f, lambda t: t.pop("model.norm.weight")), WeightError, "lacks.*model.norm"),
    "no order": (lambda f: _edit(f, lambda t: t.pop(ORDERING)), WeightError, f"lacks the tensor '{ORDERING}'"),
    "short order": (_set(ORDERING, torch.arange(99)), WeightError, r"is I64 \[99\], not I64 \[100\]"),
    "another network": (
        lambda f: edit_config(f, architectures=["LlamaForCausalLM"], model_type="llama"),
        UnsupportedModelError,
        "is no assistant for method 'mtp'",
    ),
}


@pytest.mark.parametrize(("change", "error", "words"), MISFITS.values(), ids=MISFITS)
def test_assistants_that_do_not_fit_are_refused_before_the_model_is_read(
    files: dict[str, tuple[Path, Reference]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    error: type[Exception],
    words: str,
) -> None:
    def unread(*_: Any) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr(loaded_model, "load_network", unread)
    shutil.copytree(files[SMALL][0] / "assistant", tmp_path / "assistant")
    (tmp_path / "model").symlink_to(files[SMALL][0] / "model")
    change(tmp_path / "assistant")
    with pytest.raises(error, match=words):
        load(tmp_path)


def test_an_order_without_all_tokens_and_a_model_of_another_family(
    files: dict[str, tuple[Path, Reference]], tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(files[SMALL][0] / "assistant", tmp_path / "assistant")
    (tmp_path / "model").symlink_to(files[SMALL][0] / "model")
    _set(ORDERING, torch.zeros(VOCAB, dtype=torch.long))(tmp_path / "assistant")
    with pytest.raises(WeightError, match="each of the 100 tokens once"):
        load(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model").symlink_to(tiny_model)
    (tmp_path / "other" / "assistant").symlink_to(tmp_path / "assistant")
    with pytest.raises(ConfigError, match="an assistant of Gemma 4 cannot draft for"):
        load(tmp_path / "other")
    with pytest.raises(UnsupportedModelError, match="it only drafts for another model"):
        LLM(str(tmp_path / "assistant"), skip_tokenizer_init=True)


def test_a_sleep_beams_and_adapters(
    files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], tmp_path: Path
) -> None:
    folder = files[LARGE][0]
    ref = make_adapter(tmp_path / "adapter", AdapterTargets(read_model_config(folder / "model")), 0, rank=4)
    work: list[SamplingParams | BeamSearchParams] = [*PARAMS, BeamSearchParams(beam_width=3, max_tokens=12)]
    adapted = [None, LoRARequest(ref.name, 1, ref.path)] * 3

    def answers(llm: LLM) -> Any:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in [*PROMPTS, PROMPTS[2]]]
        mixed = llm.generate(prompts, work, use_tqdm=False)
        return all_of(mixed), all_of(llm.generate(prompts, work[0], use_tqdm=False, lora_request=adapted))

    options: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 16, "max_num_batched_tokens": 32}
    wanted = answers(load(folder, None, **options))
    llm = load(folder, **options)
    assert answers(llm) == wanted and drafted(llm) > 100
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        assert all_of(run(llm, PROMPTS, PARAMS)) == plain[LARGE]


def test_grammars(tiny_model: Path, tmp_path: Path) -> None:
    vocab_size = read_model_config(tiny_model).vocab_size
    centroids = next(count for count in range(16, 0, -1) if not vocab_size % count)
    save_assisted(SMALL, tmp_path, vocab_size, num_centroids=centroids, centroid_intermediate_top_k=1)
    for file in tiny_model.glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    prompts, params, grammars = forms.PROMPTS[2:4], forms.PARAMS[2:4], forms.FORMS[2:4]
    text = {"skip_tokenizer_init": False, "max_model_len": 200}
    wanted = all_of(generate(load(tmp_path, None, **text), prompts, params, grammars))
    llm = load(tmp_path, **text)
    assert all_of(generate(llm, prompts, params, grammars)) == wanted
    assert drafted(llm) > 20


def test_random_weights(files: dict[str, tuple[Path, Reference]]) -> None:
    folder = files[SMALL][0]
    wanted = all_of(run(load(folder, None, load_format="dummy"), PROMPTS, PARAMS))
    llm = load(folder, load_format="dummy")
    assert all_of(run(llm, PROMPTS, PARAMS)) == wanted
    assert drafted(llm) > 200


def test_images(tmp_path: Path) -> None:
    model = save_gemma4(tmp_path / "model")
    save_assistant(tmp_path / "assistant", model.config.get_text_config().to_dict() | {"global_head_dim": 32})
    places = "<|image|>"
    prompts: list[Any] = [
        {"prompt": f"{places} and {places}", "multi_modal_data": {"image": [picture(40, 56, 1), picture(90, 31, 2)]}},
        {"prompt": f"what is it? {places}", "multi_modal_data": {"image": picture(32, 32, 3)}},
        {"prompt": "no image"},
    ]
    options: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_batched_tokens": 24}
    wanted = all_of(load(tmp_path, None, **options).generate(prompts, PARAMS[:3], use_tqdm=False))
    llm = load(tmp_path, **options)
    for _ in range(2):
        assert all_of(llm.generate(prompts, PARAMS[:3], use_tqdm=False)) == wanted
    assert drafted(llm) > 100


@pytest.mark.parametrize("kind", [SMALL, LARGE])
def test_with_blocks_of_a_store(
    files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """What an engine without an assistant has stored serves one with it, as it has no cache."""
    stored = {"kv_disk": str(tmp_path / "store"), "kv_disk_bytes": 1 << 24}
    for drafts in (None, 4):
        llm = load(files[kind][0], drafts, **stored)
        outputs = run(llm, PROMPTS, PARAMS)
        assert all_of(outputs) == plain[kind]
        assert (sum(output.metrics.num_cached_tokens for output in outputs) > 40) == (drafts is not None)
        llm.llm_engine.core.shutdown()
    assert drafted(llm) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_draft_the_same(files: dict[str, tuple[Path, Reference]], plain: dict[str, Any], kind: str) -> None:
    llm = load(files[kind][0], tensor_parallel_size=2, num_threads=2, device="cpu")
    assert all_of(run(llm, PROMPTS, PARAMS)) == plain[kind]
    number = drafted(llm)
    llm.llm_engine.core.shutdown()
    assert number > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_mixes(files: dict[str, tuple[Path, Reference]], seed: int) -> None:
    rng = random.Random(seed)
    folder = files[rng.choice(list(KINDS))][0]
    kind: dict[str, Any] = {
        "dtype": rng.choice(["float32", "bfloat16"]),
        "quantization": rng.choice(["none", "int8"]),
        "kv_cache_dtype": rng.choice(["auto", "int8"]),
        "num_gpu_blocks_override": rng.choice([50, 300]),
        "num_host_blocks_override": 100,
        "preemption_mode": rng.choice(["recompute", "swap"]),
        "max_num_batched_tokens": rng.choice([16, 40, 200]),
    }
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(8)]
    params = [structs.replace(random_params(rng, with_texts=False), max_tokens=rng.randint(1, 40)) for _ in prompts]
    wanted = all_of(run(load(folder, None, **kind), prompts, params))
    llm = load(folder, drafts=rng.randint(1, 6), async_scheduling=rng.random() < 0.5, **kind)
    for _ in range(2):
        assert all_of(run(llm, prompts, params)) == wanted
