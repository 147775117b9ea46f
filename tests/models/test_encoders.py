"""Networks for vectors and scores against transformers: encoders, and the heads of these and of decoders."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from octavo import LLM, LoRARequest, PoolingParams, UnsupportedModelError
from octavo.models.config_files import read_model_config
from octavo.models.registry import ENCODERS, find_base
from tests.engine.test_pooling import KINDS, expected, pooled_as
from tests.models.zoo import PROMPTS, edit_config, prompts_of, rename_tensors

RAW = PoolingParams(use_activation=False)
SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 96,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: By the beginning of the names of transformers' classes: values of the configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": SHAPE,
    "Roberta": {**SHAPE, "pad_token_id": 1},
    "XLMRoberta": {**SHAPE, "pad_token_id": 1, "type_vocab_size": 1},
    "Camembert": {**SHAPE, "pad_token_id": 1},
    "DistilBert": {"vocab_size": 101, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6},
    "ModernBert": {**SHAPE, **SPECIAL, "num_hidden_layers": 4, "local_attention": 8, "cls_token_id": 1},
    "NomicBert": SHAPE,
    "MPNet": {**SHAPE, "pad_token_id": 0},
    "EuroBert": {
        **{**SHAPE, **SPECIAL, "num_key_value_heads": 2},
        **{"mask_token_id": 3, "classifier_pooling": "mean"},
    },
    "Gte": {**SHAPE, "pad_token_id": 1},
    "JinaEmbeddingsV3": {**SHAPE, "pad_token_id": 1},
    "Llama": {**SHAPE, **SPECIAL, "num_key_value_heads": 2},
    "Qwen3": {**SHAPE, **SPECIAL, "num_key_value_heads": 2, "head_dim": 8},
    "Gemma2": {**SHAPE, **SPECIAL, "num_key_value_heads": 2, "head_dim": 8},
    "GPT2": {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 96, "pad_token_id": 0},
    "Mixtral": {**SHAPE, **SPECIAL, "num_key_value_heads": 2, "num_local_experts": 4},
}
#: Decoders whose names for their parts differ; those above stand for the others.
DECODERS: dict[str, dict[str, Any]] = {
    **{family: {**SHAPE, **SPECIAL} for family in ("Cohere", "Phi", "GPTNeoX")},
    "StableLm": {**SHAPE, **SPECIAL, "num_key_value_heads": 2},
    "Gemma3Text": {**SHAPE, **SPECIAL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "Starcoder2": {**SHAPE, **SPECIAL, "num_key_value_heads": 2},
    "Bloom": {**SPECIAL, "vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "Falcon": {**SHAPE, **SPECIAL},
    "OPT": {**SHAPE, **SPECIAL, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "GPTJ": {**SPECIAL, "vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 96, "rotary_dim": 8},
}
#: Decoders whose attention is bidirectional, by what config.json says.
BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    "Gemma3Text": {
        **{**DECODERS["Gemma3Text"], "num_hidden_layers": 7},
        **{"use_bidirectional_attention": True, "sliding_window": 12},
    },
    "Llama": {**FAMILIES["Llama"], "is_causal": False},
    "Qwen2": {
        **{**SHAPE, **SPECIAL, "num_key_value_heads": 2, "is_causal": False},
        **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    },
}
TASKS = {
    "Model": "token_embed",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
}


def save(folder: Path, family: str, ending: str, **values: Any) -> Any:
    """Saves a random model of transformers, and returns it."""
    config = getattr(transformers, f"{family}Config")(**{**(FAMILIES | DECODERS).get(family, {}), **values})
    if ending != "Model":
        config.num_labels = 3
    torch.manual_seed(0)
    model = getattr(transformers, family + ending)(config).eval()
    for name, tensor in model.named_parameters():
        if tensor.ndim > 1:
            tensor.data.normal_(0, 0.15)
        elif "bias" in name:
            tensor.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def results(folder: Path, task: Any, prompts: Sequence[Any] = (), **options: Any) -> list[np.ndarray]:
    llm = LLM(str(folder), skip_tokenizer_init=True, **{"dtype": "float32", "num_gpu_blocks_override": 64, **options})
    given = prompts or prompts_of(PROMPTS)
    outputs = [o.outputs for o in llm.encode(list(given), RAW, pooling_task=task, use_tqdm=False)]
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.data for output in outputs]


def save_bidirectional(folder: Path, family: str, ending: str) -> Any:
    # With others than "eager", transformers ignores the configuration.
    return save(folder, family, ending, **BIDIRECTIONAL[family], attn_implementation="eager")


def theirs(model: Any, prompt: list[int], **inputs: Any) -> np.ndarray:
    with torch.inference_mode():
        output = model(torch.tensor([prompt]), **inputs)
    values: np.ndarray = (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0].numpy()
    return values


def assert_close(ours: np.ndarray, right: np.ndarray, bound: float = 1e-5) -> None:
    """Errors relative to the largest number."""
    assert ours.shape == right.shape
    assert np.abs(ours - right).max() < bound * max(1.0, float(np.abs(right).max()))


def kernels() -> list[str]:
    return ["reference", "cpu"] if importlib.util.find_spec("octavo._cpu") else ["reference"]


@pytest.mark.parametrize(
    ("family", "ending"),
    [
        # Every head with an encoder and with a decoder; of the others by default the one that reads the whole text.
        pytest.param(
            family,
            ending,
            marks=[] if ending == "ForSequenceClassification" or family in ("Bert", "Llama") else pytest.mark.slow,
        )
        for family in FAMILIES
        for ending in TASKS
    ],
)
def test_the_results_are_those_of_transformers(family: str, ending: str, tmp_path: Path) -> None:
    if not hasattr(transformers, family + ending):
        pytest.skip(f"transformers has no {family}{ending}")
    model = save(tmp_path, family, ending)
    right = [theirs(model, prompt) for prompt in PROMPTS]
    for name in kernels():
        ours = results(tmp_path, TASKS[ending], kernels=name)
        for mine, its in zip(ours, right, strict=True):
            assert_close(mine, its)
    if name == "cpu":  # a text that is longer than a step, and steps of several
        assert [r.tobytes() for r in results(tmp_path, TASKS[ending], max_num_batched_tokens=16)] == [
            r.tobytes() for r in ours
        ]
        whole = np.concatenate([its.ravel() for its in right])
        for options in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
            rounded = results(tmp_path, TASKS[ending], **options)
            assert np.corrcoef(np.concatenate([mine.ravel() for mine in rounded]), whole)[0, 1] > 0.98


@pytest.mark.parametrize("family", [family for family in ENCODERS if family in FAMILIES])
def test_each_pooling_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    """Those of the last token alone may look for the text in the prefix cache, which encoders have none of."""
    model = save(tmp_path / "encoder", family, "Model")
    states = [theirs(model, prompt).astype(np.float64) for prompt in PROMPTS]
    for kind in KINDS:
        folder = pooled_as(kind, tmp_path / "encoder", tmp_path / kind)
        for prefix_caching in (True, False):
            ours = results(folder, "embed", enable_prefix_caching=prefix_caching)
            for mine, its in zip(ours, states, strict=True):
                assert_close(mine, expected(kind, its))


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_decoders_without_a_causal_mask(family: str, tmp_path: Path) -> None:
    model = save_bidirectional(tmp_path, family, "Model")
    states = [theirs(model, prompt) for prompt in PROMPTS]
    for name in kernels():
        ours = results(tmp_path, "token_embed", kernels=name)
        for mine, its in zip(ours, states, strict=True):
            assert_close(mine, its)
    if name == "cpu":
        again = results(tmp_path, "token_embed", max_num_batched_tokens=16)
        assert [r.tobytes() for r in again] == [r.tobytes() for r in ours]
    for mine, its in zip(results(tmp_path, "embed"), states, strict=True):
        assert_close(mine, its.mean(0))


def test_scores_of_a_decoder_without_a_causal_mask(tmp_path: Path) -> None:
    """transformers scores the last token; NVIDIA's models the mean, or what config.json says."""
    model = save_bidirectional(tmp_path, "Llama", "ForSequenceClassification")
    last, states = ([theirs(part, prompt) for prompt in PROMPTS] for part in (model, model.model))
    for mine, its in zip(results(tmp_path, "classify"), last, strict=True):
        assert_close(mine, its)
    score = model.score.weight.detach().numpy()
    edit_config(tmp_path, architectures=["LlamaBidirectionalForSequenceClassification"], is_causal=None)
    for pooling, rows in (("avg", [s.mean(0) for s in states]), ("last", [s[-1] for s in states])):
        edit_config(tmp_path, pooling=pooling)
        for mine, row in zip(results(tmp_path, "classify"), rows, strict=True):
            assert_close(mine, score @ row)
    model.model.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["LlamaBidirectionalModel"], is_causal=None, pooling=None)
    for mine, its in zip(results(tmp_path, "embed"), states, strict=True):
        assert_close(mine, its.mean(0))


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("Bert", ["query", "value", "output.dense"]),
        ("JinaEmbeddingsV3", ["q_proj", "v_proj", "fc1"]),  # whose tasks are adapters
        ("Gemma3Text", ["q_proj", "embed_tokens"]),
        ("Qwen3", ["q_proj", "down_proj"]),  # a base model, whose names lack a prefix
    ],
)
def test_adapters(family: str, modules: list[str], tmp_path: Path) -> None:
    """LoRA against PEFT, alone and beside requests without it."""
    peft = pytest.importorskip("peft")
    model = save(tmp_path / "base", family, "Model", **BIDIRECTIONAL.get(family, {}))
    plain = [theirs(model, prompt) for prompt in PROMPTS]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    right = [theirs(adapted, prompt) for prompt in PROMPTS]
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_lora_rank": 8}
    llm = LLM(str(tmp_path / "base"), skip_tokenizer_init=True, enable_lora=True, **options)
    task = LoRARequest("task", 1, str(tmp_path / "adapter"))

    def run(prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[np.ndarray]:
        outputs = llm.encode(
            prompts_of(prompts), RAW, pooling_task="token_embed", use_tqdm=False, lora_request=adapters
        )
        assert [output.outputs.error for output in outputs] == [None] * len(outputs)
        return [output.outputs.data for output in outputs]

    alone = [run([prompt], [task])[0] for prompt in PROMPTS]
    for mine, its, without in zip(alone, right, plain, strict=True):
        assert_close(mine, its)
        assert np.abs(its - without).max() > 1e-2
    mixed = run([*PROMPTS, *PROMPTS], [task] * len(PROMPTS) + [None] * len(PROMPTS))
    assert [r.tobytes() for r in mixed[: len(PROMPTS)]] == [r.tobytes() for r in alone]
    for mine, its in zip(mixed[len(PROMPTS) :], plain, strict=True):
        assert_close(mine, its)


def test_a_published_gte_has_the_names_of_its_own_code(tmp_path: Path) -> None:
    model = save(tmp_path, "Gte", "Model")
    rename_tensors(tmp_path, lambda name: f"new.{name}")
    for mine, prompt in zip(results(tmp_path, "token_embed"), PROMPTS, strict=True):
        assert_close(mine, theirs(model, prompt))
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    for mine, prompt in zip(results(tmp_path, "token_embed"), PROMPTS, strict=True):
        assert_close(mine, theirs(model, prompt))


def test_every_encoder_of_the_registry_is_tested() -> None:
    assert set(ENCODERS) <= {*FAMILIES, "LlamaBidirectional"}
    assert find_base("Qwen3ForSequenceClassification") == "Qwen3ForCausalLM"
    assert find_base("BertForMaskedLM") == "BertModel" and find_base("LlamaForMaskedLM") is None
    assert find_base("NoSuchModel") is None


@pytest.mark.parametrize("family", ["Bert", "NomicBert", "Roberta"])
def test_segments_of_a_pair(family: str, tmp_path: Path) -> None:
    model = save(tmp_path, family, "ForSequenceClassification", type_vocab_size=2)
    types = [[0] * 4 + [1] * 6, [0] * 9 + [1], [0] * 10]
    prompts = [{"prompt_token_ids": list(range(3, 13)), "token_type_ids": each} for each in types]
    ours = results(tmp_path, "classify", prompts)
    for mine, each in zip(ours, types, strict=True):
        assert_close(mine, theirs(model, list(range(3, 13)), token_type_ids=torch.tensor([each])))
    assert not np.allclose(ours[0], ours[2])


def test_buckets_of_distances() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    from octavo.layers.attention import buckets_of

    distance = np.arange(-600, 601)
    theirs = MPNetEncoder.relative_position_bucket(torch.from_numpy(distance), num_buckets=32).numpy()
    np.testing.assert_array_equal(buckets_of(distance, 32, 128), theirs)


def test_where_a_classifier_pools(tmp_path: Path) -> None:
    for pooling in ("cls", "mean"):
        model = save(tmp_path / pooling, "ModernBert", "ForSequenceClassification", classifier_pooling=pooling)
        for mine, prompt in zip(results(tmp_path / pooling, "classify"), PROMPTS, strict=True):
            assert_close(mine, theirs(model, prompt))


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("Bert", lambda name: "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma")),
        ("Bert", lambda name: name.replace("LayerNorm.bias", "LayerNorm.beta")),
        ("Roberta", lambda name: "roberta." + name),
        ("Llama", lambda name: "model." + name),
    ],
)
def test_names_of_other_checkpoints(family: str, rename: Callable[[str], str | None], tmp_path: Path) -> None:
    save(tmp_path, family, "Model")
    before = results(tmp_path, "token_embed")
    rename_tensors(tmp_path, rename)
    for mine, its in zip(results(tmp_path, "token_embed"), before, strict=True):
        assert mine.tobytes() == its.tobytes()


def test_a_checkpoint_of_nomic_before_transformers_had_it(tmp_path: Path) -> None:
    model = save(tmp_path, "NomicBert", "Model")
    old = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": 80,
        "n_positions": 96,
        "vocab_size": 101,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "prenorm": False,
        "activation_function": "swiglu",
        "qkv_proj_bias": False,
        "layer_norm_epsilon": 1e-12,
    }
    (tmp_path / "config.json").write_text(json.dumps(old))
    for mine, prompt in zip(results(tmp_path, "token_embed"), PROMPTS, strict=True):
        assert_close(mine, theirs(model, prompt))
    edit_config(tmp_path, prenorm=True)
    with pytest.raises(UnsupportedModelError, match="prenorm=true is not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("Bert", {"is_decoder": True}),
        ("Roberta", {"is_decoder": True}),
        ("NomicBert", {"hidden_act": "gelu"}),
        ("NomicBert", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}}),
        ("ModernBert", {"local_attention": 1}),
        ("EuroBert", {"classifier_pooling": "late", "architectures": ["EuroBertForSequenceClassification"]}),
        ("Gte", {"rope_scaling": {"type": "ntk", "factor": 8.0}}),
        ("Gemma3Text", {"use_bidirectional_attention": True, "sliding_window": 1}),
        ("Cohere", {"is_causal": False}),
    ],
)
def test_settings_that_are_not_computed_are_refused(family: str, values: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, family, "Model")
    edit_config(tmp_path, **values)
    with pytest.raises(UnsupportedModelError, match=r"supported|at least 2"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("ending", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("family", DECODERS)
def test_heads_of_other_decoders(family: str, ending: str, tmp_path: Path) -> None:
    if not hasattr(transformers, family + ending):
        pytest.skip(f"transformers has no {family}{ending}")
    model = save(tmp_path, family, ending)
    for mine, prompt in zip(results(tmp_path, TASKS[ending]), PROMPTS, strict=True):
        assert_close(mine, theirs(model, prompt))


def test_one_class_is_a_score_and_several_are_not(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SHAPE, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    assert LLM(str(tmp_path), skip_tokenizer_init=True).front_end.pooling.tasks == ("classify", "score")
    assert read_model_config(tmp_path).pooler.activation == "sigmoid"
    edit_config(tmp_path, problem_type="regression")
    assert read_model_config(tmp_path).pooler.activation == "identity"
    edit_config(tmp_path, id2label={"0": "a", "1": "b"}, problem_type=None)
    assert read_model_config(tmp_path).pooler.activation == "softmax"
    edit_config(tmp_path, problem_type="multi_label_classification")
    assert read_model_config(tmp_path).pooler.activation == "sigmoid"


@pytest.mark.slow  # processes of two workers
@pytest.mark.parametrize("family", ["Bert", "Gemma3Text"])
def test_two_ranks_give_the_bits_of_one(family: str, tmp_path: Path) -> None:
    save(tmp_path, family, "ForSequenceClassification", **BIDIRECTIONAL.get(family, {}))
    one = results(tmp_path, "classify")
    two = results(tmp_path, "classify", tensor_parallel_size=2)
    assert [r.tobytes() for r in one] == [r.tobytes() for r in two]
