"""Encoders of a few thousand random weights, in folders as Hugging Face and sentence-transformers write them."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

#: Most tokens of a text.
MAX_TOKENS = 64
HIDDEN_SIZE = 32
#: Texts that the folder of vectors has by name.
PROMPTS = {"query": "query: ", "document": ""}


def make_encoder(folder: Path, labels: int = 0, *, by_token: bool = False) -> Path:
    """Writes a BERT that spells words letter by letter, and returns its folder.

    Without ``labels`` it makes vectors (mean, length 1); with one it is a cross-encoder, with several it classifies
    texts, or tokens if ``by_token``.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel

    folder.mkdir(exist_ok=True)
    size = _write_tokenizer(folder)
    torch.manual_seed(labels)
    names = {index: f"label {index}" for index in range(labels)}
    config = BertConfig(
        vocab_size=size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.5,
        matryoshka_dimensions=[8, 16],
        **({"id2label": names, "label2id": {name: index for index, name in names.items()}} if labels else {}),
    )
    kind: Any = BertForTokenClassification if by_token else BertForSequenceClassification if labels else BertModel
    kind(config).save_pretrained(folder)
    if not labels:
        _write_modules(folder)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Returns the size of the vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase + string.digits + ".,:;!?'-"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special: dict[str, Any] = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_TOKENS, **special).save_pretrained(folder)
    return len(tokens)


def _write_modules(folder: Path) -> None:
    """What sentence-transformers reads beside the network."""
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def make_qwen3(folder: Path, *, base: bool, eos: bool = False) -> tuple[Any, Any]:
    """Writes a Qwen3 that reads bytes, as Qwen publishes its models for vectors (``base``) and ranks.

    A base model has no head, and is saved under the name of the language model. With ``eos`` the tokenizer ends texts
    with a token. Returns the model of transformers and the tokenizer.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "no", "ye", "yes"]
    vocab = {token: index for index, token in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("n", "o"), ("y", "e"), ("ye", "s")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
        )
    tokenizer.add_special_tokens(special)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=0,
    )
    kind: Any = transformers.Qwen3Model if base else transformers.Qwen3ForCausalLM
    model = kind(config).eval()
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["Qwen3ForCausalLM"]}))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return model, tokenizer
