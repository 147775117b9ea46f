"""Small models of random weights that see images, as transformers saves them, with tokenizers of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

#: Special tokens before the bytes, for all families.
SPECIAL = [
    "<bos>",
    "<eos>",
    "<image>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|image_pad|>",
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|image_start|>",
    "<|img_thumbnail|>",
    "<|image_end|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)),
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """An image of soft colours, uint8 [height, width, 3]: pixels beside each other differ little."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [np.sin(x * a + y * b + c) for a, b, c in rng.uniform(0.02, 0.4, (3, 3))]
    return (127 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def save_tokenizer(folder: Path, image: str = "<image>", *more: str) -> int:
    """A tokenizer of bytes; how many tokens it has. The chat template writes ``image`` for an image.

    ``more``: special tokens, which are the last.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, *more])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=[*SPECIAL[2:], *more],
        chat_template=CHAT_TEMPLATE.replace("IMAGE", image),
    ).save_pretrained(folder)
    return len(vocab)


def save_llava(folder: Path) -> Any:
    """LLaVA whose images have 16 features, and its transformers model."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vocab = save_tokenizer(folder)
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 3}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, image_size=32, patch_size=8),
        text_config=LlamaConfig(**_TEXT, vocab_size=vocab),
        image_token_id=SPECIAL.index("<image>"),
        image_seq_length=16,
    )
    _write(
        folder,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            "do_resize": True,
            "do_center_crop": True,
        },
    )
    return _save(folder, LlavaForConditionalGeneration(config))


def save_smolvlm(folder: Path) -> Any:
    """SmolVLM whose images are up to four tiles and the whole, of 4 features each, and its transformers model."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    vocab = save_tokenizer(folder)
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = SmolVLMConfig(
        vision_config=vision | {"image_size": 32, "patch_size": 8},
        text_config={"model_type": "llama", **_TEXT, "vocab_size": vocab, "pad_token_id": 0},
        image_token_id=SPECIAL.index("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    _write(
        folder,
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
        },
    )
    return _save(folder, SmolVLMForConditionalGeneration(config))


def save_gemma3(folder: Path) -> Any:
    """Gemma 3 whose images have 16 features, which see each other, and its transformers model."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    vocab = save_tokenizer(folder, "<start_of_image>")
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = _TEXT | {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
    text["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**vision, image_size=64, patch_size=8),
        text_config=Gemma3TextConfig(**text, vocab_size=vocab),
        image_token_id=SPECIAL.index("<image_soft_token>"),
        boi_token_index=SPECIAL.index("<start_of_image>"),
        eoi_token_index=SPECIAL.index("<end_of_image>"),
        mm_tokens_per_image=16,
    )
    _write(folder, {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}})
    return _save(folder, Gemma3ForConditionalGeneration(config))


def save_gemma4(folder: Path, kind: str = "small", features: int = 70) -> Any:
    """Gemma 4 whose images have up to this number of ``features`` of 12 x 12 pixels, and its transformers model.

    ``kind``: small, with per-layer inputs, and bounds of the tower's matrices; large, whose images see themselves; or
    unified, without a tower.
    """
    import torch
    import transformers

    vocab = save_tokenizer(folder, "<|image|>", "<|image>", "<|image|>", "<image|>")
    is_unified, name = kind == "unified", "Gemma4Unified" if kind == "unified" else "Gemma4"
    prefix = "gemma4_unified" if is_unified else "gemma4"
    text: dict[str, Any] = _TEXT | {
        **{"model_type": f"{prefix}_text", "vocab_size": vocab, "num_hidden_layers": 4, "pad_token_id": 0},
        **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "final_logit_softcapping": 5.0},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    if kind == "small":
        text |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocab}
    else:
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
        text |= {} if is_unified else {"hidden_size_per_layer_input": 0}
    vision: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "position_embedding_size": 80}
    vision |= {"use_clipped_linears": kind == "small", "standardize": kind == "large"}
    if is_unified:
        vision = {"mm_embed_dim": 40, "mm_posemb_size": 80, "output_proj_dims": 40}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={"model_type": f"{prefix}_vision", **vision, "patch_size": 4, "pooling_kernel_size": 3},
        **{"boi_token_id": vocab - 3, "image_token_id": vocab - 2, "eoi_token_id": vocab - 1},
        **{"video_token_id": vocab + 1, "audio_token_id": vocab + 2},
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for index, (buffer, values) in enumerate(model.named_buffers()):
            if "vision_tower" in buffer and buffer.endswith(("_min", "_max")):
                values.fill_((1.0 + index % 5 / 4) * (-1 if buffer.endswith("_min") else 1))
            elif buffer.endswith(("std_bias", "std_scale", "layer_scalar")):
                values.copy_(torch.linspace(0.5, 1.5, values.numel()).reshape(values.shape))
    _write(
        folder,
        {
            **{"image_processor_type": f"{name}ImageProcessor", "patch_size": 4, "pooling_kernel_size": 3},
            **{"max_soft_tokens": features, "do_normalize": False, "rescale_factor": 1 / 255},
        },
    )
    return _save(folder, model)


def save_mistral3(folder: Path) -> Any:
    """Mistral 3 whose images have 1 to 36 features of 8 x 8 pixels, and its transformers model."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    vocab = save_tokenizer(folder, "[IMG]")
    vision: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "patch_size": 4}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    rope |= {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    config = Mistral3Config(
        vision_config={"model_type": "pixtral", **vision, "num_attention_heads": 3, "head_dim": 16},
        text_config={
            **{"model_type": "ministral3", **_TEXT, "head_dim": 16, "vocab_size": vocab},
            "rope_parameters": rope,
        },
        image_token_index=SPECIAL.index("[IMG]"),
        tie_word_embeddings=False,
    )
    _write(folder, {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48}, "patch_size": 4})
    return _save(folder, Mistral3ForConditionalGeneration(config))


def save_internvl(folder: Path) -> Any:
    """InternVL whose images are up to four tiles and the whole, of 4 features each, and its transformers model."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    vocab = save_tokenizer(folder, "<IMG_CONTEXT>")
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = InternVLConfig(
        vision_config=vision | {"image_size": [32, 32], "patch_size": [8, 8]},
        text_config={"model_type": "qwen3", **_TEXT, "head_dim": 16, "vocab_size": vocab},
        image_token_id=SPECIAL.index("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    _write(
        folder,
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 32, "width": 32}, "max_patches": 4},
    )
    return _save(folder, InternVLForConditionalGeneration(config))


def save_lfm2_vl(folder: Path) -> Any:
    """LFM2-VL with images of 4 to 9 features, or of tiles and a whole of another size, and its transformers model."""
    from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

    vocab = save_tokenizer(folder)
    vision = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = _TEXT | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    config = Lfm2VlConfig(
        vision_config={"model_type": "siglip2_vision_model", **vision, "patch_size": 8, "num_patches": 16},
        text_config={"model_type": "lfm2", **text, "vocab_size": vocab, "block_auto_adjust_ff_dim": False},
        image_token_id=SPECIAL.index("<image>"),
        projector_hidden_size=56,
    )
    _write(
        folder,
        {
            **{"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 8, "tile_size": 32},
            **{"min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 4, "max_pixels_tolerance": 1.0},
        },
    )
    return _save(folder, Lfm2VlForConditionalGeneration(config))


def save_llava_next(folder: Path) -> Any:
    """LLaVA-NeXT over a Granite, whose images are a whole of 16 features and two or four tiles, and its transformers
    model.
    """
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    vocab = save_tokenizer(folder)
    vision: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 3, "image_size": 32, "patch_size": 8, "vision_use_head": False}
    sizes = [[32, 64], [64, 32], [64, 64]]
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    config = LlavaNextConfig(
        vision_config={"model_type": "siglip_vision_model", **vision},
        text_config={"model_type": "granite", **_TEXT, **factors, "attention_multiplier": 0.2, "vocab_size": vocab},
        image_token_index=SPECIAL.index("<image>"),
        image_grid_pinpoints=sizes,
        vision_feature_layer=[-3, -1],
        vision_feature_select_strategy="full",
    )
    square = {"height": 32, "width": 32}
    _write(
        folder,
        {
            **{"image_processor_type": "LlavaNextImageProcessor", "size": square, "crop_size": square},
            **{"image_grid_pinpoints": sizes, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        },
    )
    return _save(folder, LlavaNextForConditionalGeneration(config))


def save_granite4_vision(folder: Path) -> Any:
    """Granite 4 Vision whose images are a whole of 4 features and two or four tiles, with further vectors before five
    layers of six; and its transformers model.
    """
    from transformers import Granite4VisionConfig, Granite4VisionForConditionalGeneration

    vocab = save_tokenizer(folder)
    vision: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8, "vision_use_head": False}
    sizes = [[32, 64], [64, 32], [64, 64]]
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    text = {**_TEXT, **factors, "num_hidden_layers": 6, "attention_multiplier": 0.2, "vocab_size": vocab}
    config = Granite4VisionConfig(
        vision_config={"model_type": "siglip_vision_model", **vision},
        text_config={"model_type": "granite4_vision_text", **text},
        qformer_config={"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 96},
        image_token_index=SPECIAL.index("<image>"),
        image_grid_pinpoints=sizes,
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        **{"deepstack_layer_map": [[-2, 3], [-1, 0]], "spatial_target_layers": [1, 2, 4, 5]},
    )
    square = {"height": 32, "width": 32}
    _write(
        folder,
        {
            **{"image_processor_type": "LlavaNextImageProcessor", "size": square, "crop_size": square},
            **{"image_grid_pinpoints": sizes, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        },
    )
    return _save(folder, Granite4VisionForConditionalGeneration(config))


def save_qwen2_5_vl(folder: Path) -> Any:
    """Qwen2.5-VL whose images have 4 to 64 features of 8 x 8 pixels, and its transformers model."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vocab = save_tokenizer(folder, "<|image_pad|>")
    vision: dict[str, Any] = {"depth": 3, "hidden_size": 48, "intermediate_size": 64, "num_heads": 3}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 24, "fullatt_block_indexes": [1]}
    vision |= {"out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={**_TEXT, "vocab_size": vocab, "rope_parameters": rope},
        image_token_id=SPECIAL.index("<|image_pad|>"),
        video_token_id=vocab + 1,
    )
    _write(
        folder,
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
    )
    return _save(folder, Qwen2_5_VLForConditionalGeneration(config))


#: A tower whose learned positions are 5 x 5, with features of 8 x 8 pixels.
_QWEN3_VISION: dict[str, Any] = {
    **{"depth": 3, "hidden_size": 48, "intermediate_size": 64, "num_heads": 3, "out_hidden_size": 64},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 25},
}
_QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3], "mrope_interleaved": True}


def save_qwen3_vl(folder: Path, *, experts: bool = False) -> Any:
    """Qwen3-VL, or with experts Qwen3-VL-MoE, whose images have 4 to 64 features of 8 x 8 pixels, of which further
    vectors are added before layers 1 and 2 of 4; and its transformers model.
    """
    import transformers

    vocab = save_tokenizer(folder, "<|image_pad|>")
    name = "Qwen3VLMoe" if experts else "Qwen3VL"
    text = {**_TEXT, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": vocab, "rope_parameters": _QWEN3_ROPE}
    if experts:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = getattr(transformers, f"{name}Config")(
        vision_config=_QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}, text_config=text, **_qwen3_ids(vocab)
    )
    _write(folder, _QWEN3_PROCESSOR)
    return _save(folder, getattr(transformers, f"{name}ForConditionalGeneration")(config))


def save_qwen3_5(folder: Path) -> Any:
    """Qwen3.5 with images as those of ``save_qwen3_vl``, without further vectors; and its transformers model."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vocab = save_tokenizer(folder, "<|image_pad|>")
    text = {**_TEXT, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    text |= {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2}
    text |= {"linear_num_value_heads": 4, "vocab_size": vocab}
    text["rope_parameters"] = {**_QWEN3_ROPE, "partial_rotary_factor": 0.5}
    config = Qwen3_5Config(vision_config=_QWEN3_VISION, text_config=text, **_qwen3_ids(vocab))
    _write(folder, _QWEN3_PROCESSOR)
    return _save(folder, Qwen3_5ForConditionalGeneration(config))


_QWEN3_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
    **{"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
}


def _qwen3_ids(vocab: int) -> dict[str, int]:
    special = {"vision_start_token_id": vocab + 2, "vision_end_token_id": vocab + 3}
    return {"image_token_id": SPECIAL.index("<|image_pad|>"), "video_token_id": vocab + 1, **special}


def _write(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _save(folder: Path, model: Any) -> Any:
    import torch

    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and "norm" in name and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.15)
    model.eval().save_pretrained(folder)
    return model
