from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.cli.main import main

#: One turn a line; an assistant's turn ends with the end-of-sequence token.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(autouse=True)
def clean_surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No option of the environment and no log handler passes from one test to another."""
    for name in os.environ:
        if name.startswith("OCTAVO_") and name != "OCTAVO_CACHE":
            monkeypatch.delenv(name)
    logger = logging.getLogger("octavo")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand random weights that speaks bytes, with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<bos>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the program in this process: ``octavo("generate", ..., stdin=...)`` gives its exit code."""

    def run(*argv: object, stdin: str | bytes = "") -> int:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return main([str(word) for word in argv])

    return run
