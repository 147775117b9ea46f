"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.loader.gguf_file import GGUFFile
from octavo.loader.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from octavo.loader.sentencepiece_model import BYTE, CONTROL, NORMAL, USER_DEFINED, SentencePieceModel
from octavo.loader.tokenizer_parts import byte_level_bpe, surround, word_piece

#: Ids of the special tokens of each kind (``tokenizer.ggml.model``) where a file does not say; as in llama.cpp.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "bert": {"cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}


def write_tokenizer(file: GGUFFile, folder: Path, vocab_size: int) -> None:
    """Writes the file's tokenizer in the format of the Hugging Face libraries.

    Raises:
        TokenizerError: it is incomplete or contradicts itself.
        UnsupportedModelError: its kind is not supported.
    """
    data = _Data(file, vocab_size)
    if data.kind == "gpt2":
        tokenizer = _byte_level(data)
    elif data.kind in ("llama", "t5"):
        tokenizer = _sentencepiece(data).build()
    else:
        tokenizer = _word_piece(data)
    config = _config(data)
    if data.kind == "bert":
        surround(tokenizer, [config["cls_token"]], [config["sep_token"]], between=[])
    else:
        before = [config["bos_token"]] if config["add_bos_token"] else []
        surround(tokenizer, before, [config["eos_token"]] if config["add_eos_token"] else [])
    # Not ``save``, which raises plain Exception where the disk is full.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class _Data:
    """The metadata under ``tokenizer.``, checked."""

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.kind: str = self.get("model")
        tokens = self.get("tokens")
        if self.kind is None or not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise TokenizerError(f"{file.path} has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        if self.kind not in _DEFAULT_IDS:
            known = ", ".join(_DEFAULT_IDS)
            raise UnsupportedModelError(
                f"{file.path}: tokenizer.ggml.model = {self.kind!r} is not supported; supported: {known}"
            )
        self.tokens: list[str] = tokens
        if len(tokens) > vocab_size:
            raise TokenizerError(f"{file.path} has {len(tokens)} tokens but only {vocab_size} embeddings")
        self.ids = {token: i for i, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(t for i, t in enumerate(tokens) if self.ids[t] != i)
            raise TokenizerError(f"{file.path}: the token {twice!r} occurs twice")
        self.types = self._numbers("token_type", [NORMAL] * len(tokens))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def scores(self) -> list[float]:
        return self._numbers("scores", None)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def token_id(self, key: str) -> int | None:
        """The id that ``tokenizer.ggml.<key>_token_id`` names, else the default of the kind; None if there is none."""
        name = f"{key}_token_id"
        default = _DEFAULT_IDS[self.kind].get(key, len(self.tokens))
        token = self.get(name, default if default < len(self.tokens) else None)
        if token is not None and (not isinstance(token, int) or not 0 <= token < len(self.tokens)):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{name} = {token} is no id of a token")
        return token

    def token(self, key: str) -> str | None:
        """The text of the token with the id ``token_id(key)``."""
        token_id = self.token_id(key)
        return None if token_id is None else self.tokens[token_id]

    def _numbers(self, key: str, default: list[Any] | None) -> list[Any]:
        value = self.get(key)
        values = default if value is None else value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list) or len(values) != len(self.tokens):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key} must have one entry for each token")
        return values


def _byte_level(data: _Data) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019); families differ in the pre-tokenizer."""
    merges = []
    for line in data.get("merges") or []:
        pair = tuple(line.split(" ")) if isinstance(line, str) else ()
        if len(pair) != 2:
            raise TokenizerError(f"{data.path}: the merge {line!r} is not two tokens with a space between them")
        merges.append(pair)
    if not merges:
        raise TokenizerError(f"{data.path} has no tokenizer.ggml.merges")
    tokenizer = byte_level_bpe(data.path, data.ids, merges, _family(data))
    _add_special(tokenizer, data.tokens, data.types)
    return tokenizer


def _family(data: _Data) -> PreTokenizer:
    name = data.get("pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{data.path}: tokenizer.ggml.pre = {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentencepiece(data: _Data) -> SentencePieceModel:
    """SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma), or a unigram model (T5)."""
    unigram, unknown, charsmap = data.kind == "t5", data.token_id("unknown"), data.get("precompiled_charsmap")
    return SentencePieceModel(
        data.path,
        data.tokens,
        data.scores(),
        data.types,
        unigram=unigram,
        unk_id=unknown if unknown is not None else 0 if unigram else -1,
        byte_fallback=not unigram or BYTE in data.types,
        prefix_space=data.flag("add_space_prefix", True),
        collapse_spaces=unigram and data.flag("remove_extra_whitespaces", True),
        charsmap=charsmap.tobytes() if unigram and hasattr(charsmap, "tobytes") else b"",
    )


def _word_piece(data: _Data) -> Tokenizer:
    """WordPiece. The file marks what begins a word by ``▁``; BERT what continues one by ``##``."""
    kinds = list(zip(data.tokens, data.types, strict=True))
    whole = {t for t, k in kinds if k != NORMAL or (t[:1] == "[" and t[-1:] == "]")}
    tokens = [t if t in whole else t[1:] if t.startswith("▁") else f"##{t}" for t in data.tokens]
    needed = {key: data.token(key) for key in ("unknown", "cls", "seperator")}
    if missing := [key for key, token in needed.items() if token not in whole]:
        raise TokenizerError(f"{data.path}: tokenizer.ggml.{missing[0]}_token_id names no special token")
    lowercase = data.flag("normalizer.lowercase", True)
    accents = data.flag("normalizer.strip_accents", lowercase)
    unknown = str(needed["unknown"])
    tokenizer = word_piece(data.path, tokens, unknown=unknown, lowercase=lowercase, strip_accents=accents)
    _add_special(tokenizer, tokens, data.types)
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in kinds if k == USER_DEFINED])


def _config(data: _Data) -> dict[str, Any]:
    names = {
        "bos_token": data.token("bos"),
        "eos_token": data.token("eos"),
        "unk_token": data.token("unknown"),
        "pad_token": data.token("padding"),
        "sep_token": data.token("seperator"),  # the format's own spelling
        "cls_token": data.token("cls"),
        "mask_token": data.token("mask"),
    }
    adds_bos = data.kind == "llama" or (data.kind == "gpt2" and _family(data).adds_bos)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(data.get("add_bos_token", adds_bos)) and names["bos_token"] is not None,
        "add_eos_token": bool(data.get("add_eos_token", data.kind == "t5")) and names["eos_token"] is not None,
        **{name: token for name, token in names.items() if token is not None},
    }
    if fim := _fill_in_middle(data):
        config["fim_tokens"] = fim
    if template := _chat_template(data.metadata):
        config["chat_template"] = template
    return config


def _fill_in_middle(data: _Data) -> dict[str, str]:
    """The tokens before the prefix, the suffix and the middle of a text with a gap; empty if the file names none."""
    keys = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
    # Older files name them without "fim".
    found = {name: data.token(key) or data.token(name) for name, key in keys.items()}
    return {name: token for name, token in found.items() if token is not None} if all(found.values()) else {}


def _chat_template(metadata: dict[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template, or a list if there are further, named ones, as in tokenizer_config.json."""
    default = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix) and isinstance(v, str)}
    if not isinstance(default, str):
        default = None
    if not named:
        return default
    if default is not None:
        named = {"default": default} | named
    return [{"name": name, "template": template} for name, template in named.items()]
