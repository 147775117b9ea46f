"""Writes a Qwen3 mixture of experts with random bfloat16 weights, for Octavo, transformers, vLLM and llama.cpp alike.

    python scripts/research/dummy_moe.py qwen3-moe-1b-a0.3b-shape OUT --tokenizer FOLDER

makes OUT/hf (config.json, tokenizer, safetensors) and OUT/model-BF16.gguf. FOLDER has a tokenizer of fewer ids than the
model, such as that of a small model; texts mean nothing, but other engines want one. Then, on a quiet machine:

    octavo bench offline OUT/hf --batches 1,8,64 --input-len 128 --output-len 128
    vllm bench throughput --model OUT/hf ...
    llama-batched-bench -m OUT/model-BF16.gguf -t 2 -tb 2 -c 20480 -b 2048 -ub 512 -npp 128 -ntg 128 -npl 1,8,64
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.core.dtypes import DType
from octavo.kernels.torch_backend import to_torch
from octavo.loader.resolve import resolve_model
from octavo.loader.weights import dummy_weights
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights

#: Names in GGUF files of the tensors of a layer, and of the others.
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    """Writes both forms, a layer at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of a shape, or folder with the config.json of a Qwen3MoeForCausalLM")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer files")
    arguments = parser.parse_args()
    source, folder = resolve_model(arguments.model), arguments.out / "hf"
    raw = json.loads((source / "config.json").read_text())
    if raw["architectures"] != ["Qwen3MoeForCausalLM"]:
        raise SystemExit(f"expected the shape of a Qwen3MoeForCausalLM, not of {raw['architectures']}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in arguments.tokenizer.glob("*token*"):
        shutil.copy(file, folder)
    for file in arguments.tokenizer.glob("chat_template*"):
        shutil.copy(file, folder)
    # transformers 4 and 5 name the number of experts differently.
    config = raw | {"num_local_experts": raw["num_experts"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    writer = gguf_writer(arguments.out / "model-BF16.gguf", raw)
    files: dict[str, Any] = {}
    for part, tensors in parts_of(folder):
        name = f"model-{part}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        add_tensors(writer, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{folder} and {arguments.out / 'model-BF16.gguf'}")


def parts_of(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of each layer, and those of none."""
    network = build_without_weights(read_model_config(folder), "bfloat16")
    part, tensors = "", dict[str, Tensor]()
    for name, tensor in dummy_weights(network, DType.BFLOAT16):
        here = name.split(".")[2] if name.startswith("model.layers.") else "ends"
        if here != part and tensors:
            yield part, tensors
            tensors = {}
        part = here if here != "ends" or not tensors else part
        tensors[name] = to_torch(tensor)
    yield "last", tensors


def gguf_writer(file: Path, config: dict[str, Any]) -> gguf.GGUFWriter:
    """A writer with the keys that llama.cpp reads, and a vocabulary of bytes and names of ids."""
    writer = gguf.GGUFWriter(file, "qwen3moe", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*letters, "ab"]
    writer.add_token_list([*tokens, *(f"<id {i}>" for i in range(len(tokens), config["vocab_size"]))])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    return writer


def add_tensors(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> None:
    """Adds a part's tensors, the matrices of its experts stacked."""
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if ".experts." in stem:
            _, _, layer, *_, kind = stem.split(".")
            stacks.setdefault(f"blk.{layer}.ffn_{kind.removesuffix('_proj')}_exps", []).append(tensor)
        elif stem in OTHERS:
            add_tensor(writer, OTHERS[stem], tensor)
        else:
            _, _, layer, rest = stem.split(".", 3)
            add_tensor(writer, f"blk.{layer}.{LAYER[rest]}", tensor)
    for name, stack in stacks.items():
        add_tensor(writer, name, torch.stack(stack))


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    """Norms and routers in float32, as llama.cpp's converter writes them."""
    if tensor.dim() == 1 or name.endswith("gate_inp"):
        writer.add_tensor(f"{name}.weight", tensor.float().numpy())
        return
    values = tensor.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(f"{name}.weight", values, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main()
