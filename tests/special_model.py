"""The tiny model with tokens to fill gaps, and to mark reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

#: Its special tokens, in place of bytes that no text of its tests has.
SPECIAL_TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>", "<think>", "</think>")
#: Begins its answers with reasoning, unless ``enable_thinking`` is false, and leaves that of earlier turns out.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% else %}<think></think>{% endif %}{% endif %}"
)


def make_special_model(tiny_model: Path, folder: Path) -> None:
    """Writes it to a new folder."""
    shutil.copytree(tiny_model, folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    vocab = parts["model"]["vocab"]
    for token, byte in zip(SPECIAL_TOKENS, "ĀāĂăĄą", strict=True):
        vocab[token] = vocab.pop(byte)
        entry = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        parts["added_tokens"].append({"id": vocab[token], "content": token, "special": True, **entry})
    parts["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
