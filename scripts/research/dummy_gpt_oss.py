"""Writes a GGUF file of gpt-oss-20b, cut to a few layers, with random weights: experts in MXFP4, all else in bfloat16.

    python scripts/research/dummy_gpt_oss.py OUT.gguf --layers 2

Octavo and llama.cpp compute the same file; then, on a quiet machine:

    octavo bench offline OUT.gguf --batches 1,8,64 --input-len 128 --output-len 128
    llama-batched-bench -m OUT.gguf -t 2 -tb 2 -c 20480 -b 2048 -ub 512 -npp 128 -ntg 128 -npl 1,8,64
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo.core.dtypes import DType, rounded
from octavo.loader.builtin import SHAPES, shape_folder
from octavo.loader.gguf_file import tensors_by_source
from octavo.models.config_files import read_model_config
from octavo.models.network import build_without_weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    raw = SHAPES["gpt-oss-20b-shape"] | {"num_hidden_layers": arguments.layers}
    config = read_model_config(shape_folder("gpt-oss-20b-shape"), {"num_hidden_layers": arguments.layers})
    shapes = build_without_weights(config, "bfloat16").tensor_shapes()
    writer = gguf.GGUFWriter(arguments.out, "gpt-oss", use_temp_file=True)
    add_settings(writer, raw)
    for source, names in tensors_by_source("gpt-oss", [*shapes], ()).items():
        add_tensor(writer, source, len(names), shapes[names[0]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size / (1 << 30):.2f} GiB")


def add_settings(writer: gguf.GGUFWriter, raw: dict[str, Any]) -> None:
    """The keys that llama.cpp's converter writes, and a vocabulary of bytes and names of ids."""
    rope = raw["rope_scaling"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_expert_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_sliding_window(raw["sliding_window"])
    writer.add_expert_count(raw["num_local_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*letters, "ab"]
    writer.add_token_list([*tokens, *(f"<id {i}>" for i in range(len(tokens), raw["vocab_size"]))])
    writer.add_token_types([1] * raw["vocab_size"])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(raw["bos_token_id"])
    writer.add_eos_token_id(raw["eos_token_id"])


def add_tensor(writer: gguf.GGUFWriter, name: str, experts: int, shape: tuple[int, ...]) -> None:
    """Matrices of variance 1 / columns; norms and sinks of ones and biases of zeros, in float32 like the router."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    whole = (experts, *shape) if "_exps." in name else shape
    if len(shape) == 1:
        writer.add_tensor(name, np.full(whole, 0.0 if name.endswith("bias") else 1.0, np.float32))
    elif "_exps." in name:
        blocks = generator.integers(0, 256, (*whole[:2], whole[2] // 32, 17), np.uint8)
        blocks[..., 0] = 127 - round(np.log2(8.56 * whole[2]) / 2)  # the mean square of random codes
        writer.add_tensor(name, blocks.reshape(*whole[:2], -1), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    else:
        values = generator.standard_normal(whole, np.float32) / np.float32(whole[1] ** 0.5)
        if "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
        else:
            bits = rounded(values, DType.BFLOAT16).view(np.uint8)
            writer.add_tensor(name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    main()
