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
