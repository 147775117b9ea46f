"""Quantised Hugging Face checkpoints: what is computed with them, beside the values that their integers stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.config.engine_config import make_config
from octavo.core.dtypes import DType, Stored
from octavo.core.errors import ConfigError, OctavoError, WeightError
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.weight_rows import GGUFRows, to_values
from octavo.layers.layer import LayerContext
from octavo.loader.quantized import with_unpacking
from octavo.loader.resolve import weight_quantization
from octavo.loader.weights import check_model, load_model
from octavo.models.checkpoint import has_values, without_values
from octavo.models.config_files import ConfigReader, read_model_config, read_quantization
from tests import quantized_checkpoints as packers
from tests.quantized_checkpoints import Packer, write
from tests.small_llama import make_llama

_cpu: Any = pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

from octavo.kernels.cpu.backend import CpuKernels  # noqa: E402

SMALL: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 16, "num_threads": 1}
Q = "model.layers.0.self_attn.q_proj"
PROMPT = [5, 99, 200, 17, 42, 42, 250, 3, 120, 77]


class Case(NamedTuple):
    """A way to quantise."""

    quantization: dict[str, Any]
    pack: Packer
    #: What the CPU kernels compute with; None: the model's dtype.
    format: str | None


def scrambled(weight: Any) -> Any:
    return np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])


def gptq(bits: int, group: int, form: str | None, *, version: int = 1, symmetric: bool = True, **options: Any) -> Case:
    fields = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        **options,
    }
    pack = partial(packers.gptq, bits=bits, group=group, symmetric=symmetric, version=version)
    if fields["desc_act"]:
        return Case(fields, lambda weight: pack(weight, order=scrambled(weight)), form)
    return Case(fields, pack, form)


def compressed(form: str, weights: dict[str, Any], pack: Packer, kept: str | None) -> Case:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    fields = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Case({**fields, "ignore": ["lm_head"]}, pack, kept)


def integers(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 80]}
CASES = {
    "gptq 128": gptq(4, 128, "q4_128"),
    "gptq 64, v2": gptq(4, 64, "q4_32", version=2),
    "gptq 32, zeros": gptq(4, 32, "q4_1", symmetric=False),
    "gptq 128, zeros, v2": gptq(4, 128, "q4_1", symmetric=False, version=2),
    "gptq whole rows": gptq(4, -1, "q4_128"),
    "gptq 8 bits": gptq(8, 64, "q8_32"),
    "gptq 8 bits, whole rows": gptq(8, -1, "q8_channel"),
    "gptq act-order": gptq(4, 32, None, symmetric=False, desc_act=True),
    "gptq small groups": gptq(4, 16, None),
    "awq 128": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
        partial(packers.awq, group=128),
        "q4_1",
    ),
    "awq bfloat16 scales": Case(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
        partial(packers.awq, group=64, scale_type=torch.bfloat16),
        "q4_1",
    ),
    "packed 128": compressed("pack-quantized", integers(4, 128), partial(packers.pack_quantized, group=128), "q4_128"),
    "packed zeros": compressed(
        "pack-quantized", integers(4, 32, False), partial(packers.pack_quantized, group=32, symmetric=False), "q4_1"
    ),
    "packed 8 bits": compressed(
        "pack-quantized", integers(8, None), partial(packers.pack_quantized, bits=8, group=-1), "q8_channel"
    ),
    "packed act-order": compressed(
        "pack-quantized",
        {**integers(4, 32), "actorder": "group"},
        lambda weight: packers.pack_quantized(weight, group=32, order=scrambled(weight)),
        None,
    ),
    "int8": compressed("int-quantized", integers(8, None), packers.int_quantized, "q8_channel"),
    "int8 zeros": compressed(
        "int-quantized", integers(8, None, False), partial(packers.int_quantized, symmetric=False), None
    ),
    "fp8 rows": compressed(
        "float-quantized", FP8_WEIGHTS, partial(packers.fp8, block=None, name="weight_scale", per_row=True), None
    ),
    "fp8 blocks": Case(BLOCKS, partial(packers.fp8, block=(48, 80), name="weight_scale_inv"), None),
    "fp8 matrices": Case({"quant_method": "fp8"}, partial(packers.fp8, block=None, name="weight_scale"), None),
    "mxfp4": Case({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, packers.mxfp4, "mxfp4"),
}


@pytest.fixture(scope="module")
def source(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose matrices have inputs of 128 and 256; with every other linear layer's kind of name."""
    folder = tmp_path_factory.mktemp("source")
    model = make_llama(3, hidden_size=128, intermediate_size=256, num_hidden_layers=1, tie_word_embeddings=True)
    for parameter in model.parameters():  # far from zero, so that the best two logits are not near each other
        parameter.data.mul_(3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, folder / file)
    return folder


def load(folder: Path, kernels: Any, quantization: str | None, dtype: DType = DType.FLOAT32) -> Any:
    config = read_model_config(folder)
    return load_model(folder, config, LayerContext(kernels, dtype, quantization=quantization))


def transformers_logprobs(folder: Path, values: dict[str, Tensor], tokens: int) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens of the model with these weights, and the logprobs of each step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(values, strict=False)
    ids, steps = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(tokens):
            steps.append(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1))
            ids.append(int(steps[-1].argmax()))
    return ids[len(PROMPT) :], steps


@pytest.mark.parametrize("name", CASES)
def test_dequantised_it_is_the_model_of_its_values(name: str, source: Path, tmp_path: Path) -> None:
    """Loaded as a user does, with quantization='none' in float32."""
    case = CASES[name]
    values = write(source, tmp_path, case.quantization, case.pack, files=3 if "128" in name else 1)
    tokens, steps = transformers_logprobs(source, values, 8)
    llm = LLM(str(tmp_path), quantization="none", dtype="float32", **SMALL)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    output = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == tokens
    assert output.logprobs is not None
    for found, wanted in zip(output.logprobs, steps, strict=True):
        for token, logprob in found.items():
            assert abs(logprob.logprob - float(wanted[token])) < 1e-3


@pytest.mark.parametrize("name", CASES)
def test_matrices_keep_their_bits_where_the_kernels_have_them(name: str, source: Path, tmp_path: Path) -> None:
    case = CASES[name]
    values = write(source, tmp_path, case.quantization, case.pack, plain=("down_proj",))
    config = read_model_config(tmp_path)
    assert config.quantization is not None
    kernels, kept = CpuKernels(), weight_quantization(make_config(model=str(tmp_path)), "cpu", config.quantization)
    network = load(tmp_path, kernels, kept, DType.BFLOAT16)
    layer = network.layers[0]
    prefix = "model.layers.0.self_attn"
    matrix = torch.cat([values[f"{prefix}.{part}_proj.weight"] for part in "qkv"]).double().numpy()
    formats = [part.format for part in getattr(layer.attention.qkv.packed, "parts", [])]
    assert formats == ([] if case.format is None else [case.format] * 3)
    assert not hasattr(layer.mlp.down.packed, "parts"), "it was not quantised"
    x = np.random.default_rng(0).standard_normal((5, 128)).astype(DType.BFLOAT16.numpy)

    def product(rows: np.ndarray) -> np.ndarray:
        return kernels.to_numpy(layer.attention.qkv.packed(kernels.wrap(rows), DType.FLOAT32))

    got, want = product(x), x.astype(np.float64) @ matrix.T
    assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)
    assert np.array_equal(product(x[2:3]), got[2:3])


def conv1d(weight: Any) -> Any:
    """GPTQ of [inputs, outputs]: stored as any other matrix."""
    tensors, values = packers.gptq(weight.T.copy(), group=64)
    return tensors, values.T.copy()


SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MIXTRAL = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    **SHAPE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
}
GPT2 = {"vocab_size": 258, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 64}
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")
OTHERS: dict[str, tuple[str, dict[str, Any], Case, tuple[str, ...]]] = {
    "transposed": ("GPT2", GPT2, gptq(4, 64, "gptq-int4")._replace(pack=conv1d), ("wte", "wpe")),
    "fused": ("Phi3", SHAPE, CASES["packed zeros"]._replace(format="compressed-tensors-int4"), ()),
    "experts": ("Mixtral", MIXTRAL, CASES["awq bfloat16 scales"]._replace(format="awq-int4"), ROUTERS),
    "experts of mxfp4": ("Mixtral", MIXTRAL, CASES["mxfp4"], ROUTERS),
    "latent attention": ("DeepseekV3", DEEPSEEK, CASES["fp8 blocks"], ROUTERS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_of_networks(name: str, tmp_path: Path) -> None:
    """Dequantised the model of its values; in their own bits, products that differ from it by rounding."""
    import transformers

    family, shape, case, plain = OTHERS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**shape, bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(tmp_path / "plain")
    values = write(tmp_path / "plain", tmp_path / "quantized", case.quantization, case.pack, plain)
    save_file(values, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5, detokenize=False)
    for quantization, format, tolerance in (("none", None, 1e-3), ("auto", case.format, 0.3)):
        options = {**SMALL, "dtype": "float32", "skip_tokenizer_init": True}
        llm = LLM(str(tmp_path / "quantized"), quantization=quantization, **options)
        assert llm.llm_engine.core.startup.workers[0].quantization == format
        found = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].logprobs
        assert found is not None
        differences = [abs(logprob.logprob - float(wanted[token])) for token, logprob in found[0].items()]
        assert max(differences) < tolerance
        assert (max(differences) > 1e-3) == (format is not None)


def test_stacks_of_experts_come_one_by_one() -> None:
    """Of mxfp4, in the checkpoint's own bits or dequantised, and their shapes where only headers are read."""
    weight = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    parts, values = packers.mxfp4(weight)
    stacks = {
        f"mlp.experts.down_proj{part}": tensor.numpy().reshape(2, 3, *tensor.shape[1:])
        for part, tensor in parts.items()
    }
    stored = {name: Stored("U8", stack.shape, 0) for name, stack in stacks.items()}
    quantization = read_quantization(ConfigReader({"quant_method": "mxfp4"}, Path("config.json")))
    assert quantization is not None
    for keep in (True, False):
        (unpack,) = with_unpacking([], quantization, stored, {}, DType.BFLOAT16, lambda _: keep)  # noqa: B023
        matrices = dict(unpack.apply(iter([("norm", weight[0]), *stacks.items()]), {}))
        assert [*matrices] == ["norm", "mlp.experts.0.down_proj.weight", "mlp.experts.1.down_proj.weight"]
        for index in range(2):
            matrix = matrices[f"mlp.experts.{index}.down_proj.weight"]
            assert isinstance(matrix, GGUFRows) == keep
            assert np.array_equal(to_values(matrix), values[3 * index : 3 * index + 3])
    without = [(name, without_values(stack.shape, np.uint8)) for name, stack in stacks.items()]
    headers = [*unpack.apply(iter(without), {})]
    assert [matrix.shape for _, matrix in headers] == [(3, 64), (3, 64)]
    assert not any(isinstance(matrix, np.ndarray) and has_values(matrix) for _, matrix in headers)


def test_groups_as_they_are_give_the_same_bits_in_any_company(source: Path, tmp_path: Path) -> None:
    case = CASES["awq 128"]
    write(source, tmp_path, case.quantization, case.pack)
    llm = LLM(str(tmp_path), **SMALL, max_num_batched_tokens=16)
    assert llm.llm_engine.core.startup.workers[0].quantization == "awq-int4"
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    prompts = [PROMPT, PROMPT[3:], PROMPT * 3]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate([prompt], params, use_tqdm=False)[0]
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def narrow(tensors: dict[str, Tensor]) -> None:
    """Half of the outputs."""
    for part, columns in (("qweight", 64), ("qzeros", 8), ("scales", 64)):
        tensors[f"{Q}.{part}"] = tensors[f"{Q}.{part}"][:, :columns]


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq 64, v2", lambda t: t.pop(f"{Q}.scales"), f"matrix '{Q}': the checkpoint lacks scales"),
        ("gptq 64, v2", lambda t: [t.pop(name) for name in [*t] if Q in name], f"lacks the tensors {Q}.weight"),
        ("awq 128", lambda t: t.pop(f"{Q}.qzeros"), "lacks qzeros; a matrix of awq-int4 is stored as qweight, qzeros"),
        ("awq 128", lambda t: t.update({f"{Q}.g_idx": torch.zeros(128)}), "the checkpoint has g_idx"),
        ("gptq 64, v2", lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:8]}), "qzeros has shape [2, 16]"),
        ("gptq 64, v2", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].long()}), "scales is of type I64"),
        ("gptq 64, v2", lambda t: t.update({f"{Q}.g_idx": t[f"{Q}.g_idx"] + 1}), "group outside 0 to 1"),
        ("gptq 64, v2", narrow, "its shape is [64, 128], expected [128, 128]"),
        ("packed 128", lambda t: t.pop(f"{Q}.weight_shape"), "lacks weight_shape"),
        ("packed 8 bits", lambda t: t.update({f"{Q}.weight_shape": torch.tensor([128, 90])}), "weight_shape says"),
        ("int8", lambda t: t.pop(f"{Q}.weight_scale"), "lacks weight_scale"),
        ("fp8 blocks", lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 2)}), "expected [3, 2]"),
        ("fp8 blocks", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}), "is of type F32; expected F8"),
        ("mxfp4", lambda t: t.pop(f"{Q}_scales"), f"lacks '{Q}_scales'"),
        (
            "mxfp4",
            lambda t: t.update({f"{Q}_blocks": t[f"{Q}_blocks"].flatten(1)}),
            "expected [outputs, inputs / 32, 16",
        ),
        (
            "mxfp4",
            lambda t: t.update({f"{Q}_scales": t[f"{Q}_scales"][:8]}),
            "_scales has shape [8, 4]; expected [128, 4]",
        ),
        ("mxfp4", lambda t: t[f"{Q}_scales"].fill_(255), "a scale of MXFP4 weights is 255"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, edit: Callable[[dict[str, Tensor]], Any], message: str, source: Path, tmp_path: Path
) -> None:
    write(source, tmp_path, CASES[name].quantization, CASES[name].pack, edit=edit)
    with pytest.raises(WeightError, match=re.escape(message)) as error:
        load(tmp_path, ReferenceKernels(), None)
    assert Q in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq 64, v2", {"bits": 8}, "int8 in groups of 64 as config.json says"),
        ("gptq 64, v2", {"group_size": 32}, "expected [8, 16], for int4 in groups of 32"),
        ("gptq 64, v2", {"bits": 3}, "weights of 3 bits are not supported; supported: 4, 8"),
        ("gptq 64, v2", {"checkpoint_format": "marlin"}, 'checkpoint_format="marlin"'),
        ("gptq 64, v2", {"dynamic": {"-:lm_head": {}}}, "dynamic={"),
        ("gptq 64, v2", {"group_size": 0}, "group_size must be a positive integer"),
        ("awq 128", {"version": "gemv"}, 'version="gemv" is not supported'),
        ("packed 128", {"sparsity_config": {"format": "sparse-24-bitmask"}}, 'format="sparse-24-bitmask"'),
        ("packed 128", {"format": "nvfp4-pack-quantized"}, 'format="nvfp4-pack-quantized"'),
        ("packed 128", {"config_groups": {}}, "config.json says of no matrix that it is quantised"),
        ("fp8 blocks", {"weight_block_size": [128]}, "weight_block_size must be a list of two"),
        ("fp8 blocks", {"fmt": "e5m2"}, 'fmt="e5m2"'),
        ("int8", {"quant_method": "bitsandbytes"}, "with quantization='int8' or 'int4'"),
        ("int8", {"quant_method": None, "load_in_4bit": True}, "'bitsandbytes', which cannot be read"),
        ("int8", {"quant_method": "hqq"}, "'hqq', which cannot be read; supported: awq, compressed-tensors, fp8, gptq"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(
    name: str, change: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    write(source, tmp_path, {**CASES[name].quantization, **change}, CASES[name].pack)
    with pytest.raises(OctavoError, match=re.escape(message)):
        load(tmp_path, ReferenceKernels(), None)


def test_older_folders_say_it_in_a_file_of_their_own(source: Path, tmp_path: Path) -> None:
    """AutoGPTQ's quantize_config.json and file name, and its biases of zero for matrices without one."""
    case = CASES["gptq 128"]

    def add_biases(tensors: dict[str, Tensor]) -> None:
        tensors |= {name.replace("qweight", "bias"): torch.zeros(4) for name in tensors if "qweight" in name}

    write(source, tmp_path, {}, case.pack, edit=add_biases)
    fields = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True}
    (tmp_path / "quantize_config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    quantization = read_model_config(tmp_path).quantization
    assert quantization is not None and quantization.name == "gptq-int4" and quantization.zeros_minus_one
    load(tmp_path, ReferenceKernels(), None)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.bias"] = torch.ones(4)

    write(source, tmp_path / "other", case.quantization, case.pack, edit=spoil)
    with pytest.raises(WeightError, match=f"'{Q}.bias' belongs to no layer"):
        load(tmp_path / "other", ReferenceKernels(), None)


@pytest.mark.parametrize(
    ("name", "options", "kernels", "expected"),
    [
        ("gptq 128", {}, "cpu", "gptq-int4"),
        ("gptq 128", {"quantization": "gptq"}, "cpu", "gptq-int4"),
        ("gptq 128", {"quantization": "gptq"}, "triton", None),
        ("gptq 128", {}, "reference", None),
        ("gptq 128", {"quantization": "none"}, "cpu", None),
        ("gptq 128", {"quantization": "int8"}, "cpu", "int8"),
        ("gptq 128", {"load_format": "dummy"}, "cpu", None),
        ("gptq act-order", {}, "cpu", None),
        ("gptq 8 bits", {}, "cpu", "gptq-int8"),
        ("int8", {}, "cpu", "compressed-tensors-int8"),
        ("fp8 rows", {}, "cpu", None),
        ("fp8 blocks", {}, "cpu", None),
    ],
)
def test_what_the_option_means(
    name: str, options: dict[str, Any], kernels: str, expected: str | None, tmp_path: Path
) -> None:
    checkpoint = read_quantization(ConfigReader(CASES[name].quantization, Path("config.json")))
    assert weight_quantization(make_config(**{"model": str(tmp_path), **options}), kernels, checkpoint) == expected


def test_a_method_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    checkpoint = read_quantization(ConfigReader(CASES["awq 128"].quantization, Path("config.json")))
    options = make_config(model=str(tmp_path), quantization="gptq")
    with pytest.raises(ConfigError, match="'gptq', but the checkpoint is quantized with 'awq'"):
        weight_quantization(options, "cpu", checkpoint)
    with pytest.raises(ConfigError, match="not quantized"):
        weight_quantization(options, "cpu", None)


def test_a_check_reads_the_parts_of_matrices(source: Path, tmp_path: Path) -> None:
    case = CASES["fp8 blocks"]
    write(source, tmp_path, case.quantization, case.pack)
    assert check_model(tmp_path, read_model_config(tmp_path)).problems == []

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight_scale_inv"][1, 1] = torch.inf

    write(source, tmp_path, case.quantization, case.pack, edit=spoil)
    problems = check_model(tmp_path, read_model_config(tmp_path)).problems
    assert [problem.tensor for problem in problems] == [f"{Q}.weight_scale_inv"]


def test_requantised_it_has_the_bits_that_were_asked_for(source: Path, tmp_path: Path) -> None:
    write(source, tmp_path, CASES["awq 128"].quantization, CASES["awq 128"].pack)
    layer = load(tmp_path, CpuKernels(), "int8", DType.BFLOAT16).layers[0]
    assert [part.format for part in layer.attention.qkv.packed.parts] == ["q8_channel"] * 3
