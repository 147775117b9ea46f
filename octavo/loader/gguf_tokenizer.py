"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.loader.gguf_file import GGUFFile

# Token types, as in ``tokenizer.ggml.token_type``.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(file: GGUFFile, folder: Path, vocab_size: int) -> None:
    """Writes the file's tokenizer in the format of the Hugging Face libraries.

    Raises:
        TokenizerError: it is incomplete or contradicts itself.
        UnsupportedModelError: its kind is not supported.
    """
    data = _Data(file, vocab_size)
    if data.kind == "gpt2":
        tokenizer = _byte_level(data)
    elif data.kind == "llama":
        tokenizer = _sentencepiece(data)
    else:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.model = {data.kind!r} is not supported; supported: gpt2, llama"
        )
    _add_special(tokenizer, data)
    config = _config(data)
    tokenizer.post_processor = _post_processor(data, config)
    # Not ``save``, which raises plain Exception where the disk is full.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


class _Data:
    """The metadata under ``tokenizer.``, checked."""

    def __init__(self, file: GGUFFile, vocab_size: int) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.kind = self.get("model")
        tokens = self.get("tokens")
        if self.kind is None or not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise TokenizerError(f"{file.path} has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        self.tokens: list[str] = tokens
        if len(tokens) > vocab_size:
            raise TokenizerError(f"{file.path} has {len(tokens)} tokens but only {vocab_size} embeddings")
        self.ids = {token: i for i, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(t for i, t in enumerate(tokens) if self.ids[t] != i)
            raise TokenizerError(f"{file.path}: the token {twice!r} occurs twice")
        self.types = self._numbers("token_type", [_NORMAL] * len(tokens))

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def scores(self) -> list[float]:
        return self._numbers("scores", None)

    def token(self, key: str, default: int | None = None) -> str | None:
        """The text of the token that ``tokenizer.ggml.<key>_token_id`` names."""
        token = self.get(f"{key}_token_id", default)
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise TokenizerError(f"{self.path}: tokenizer.ggml.{key}_token_id = {token} is no id of a token")
        return self.tokens[token]

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
    name = data.get("pre", "default")
    tokenizer = Tokenizer(_bpe(data, merges, ignore_merges=name in _LLAMA3_NAMES))
    if name in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name in _LLAMA3_NAMES:
        tokenizer.pre_tokenizer = _split(_LLAMA3_SPLIT)
    elif name in _QWEN2_NAMES:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _split(_QWEN2_SPLIT)
    else:
        known = ["default", "gpt-2", "smollm", *_LLAMA3_NAMES, *_QWEN2_NAMES]
        raise UnsupportedModelError(
            f"{data.path}: tokenizer.ggml.pre = {name!r} is not supported; supported: {', '.join(known)}"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")


def _split(regex: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bpe(data: _Data, merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=data.ids, merges=merges, **options)
    except Exception as e:  # the library raises plain Exception
        raise TokenizerError(f"{data.path}: the tokenizer's merges do not fit its tokens: {e}") from e


def _sentencepiece(data: _Data) -> Tokenizer:
    """SentencePiece BPE (Kudo & Richardson 2018) with byte fallback, in the form of Llama 2's tokenizer.json."""
    unknown = data.token("unknown", default=0)
    model = _bpe(data, _merges_from_scores(data), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = data.get("add_space_prefix", True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefix else [space])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(data: _Data) -> list[tuple[str, str]]:
    """All merges of two tokens into a third, best score first.

    SentencePiece merges the adjacent pair with the best score of the merged token; BPE with these ranks does the same.
    """
    scores = data.scores()
    mergeable = {t: i for t, i in data.ids.items() if data.types[i] in (_NORMAL, _USER_DEFINED)}
    ranked = []
    for token, i in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[i], i, mergeable[left], mergeable[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special(tokenizer: Tokenizer, data: _Data) -> None:
    special, plain = [], []
    for token, kind in zip(data.tokens, data.types, strict=True):
        if kind == _CONTROL or (kind == _UNKNOWN and data.kind == "llama"):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _config(data: _Data) -> dict[str, Any]:
    sentencepiece = data.kind == "llama"
    # Defaults of llama.cpp for files without the keys.
    bos, eos, unknown = (1, 2, 0) if sentencepiece else (None, None, None)
    names = {
        "bos_token": data.token("bos", bos),
        "eos_token": data.token("eos", eos),
        "unk_token": data.token("unknown", unknown),
        "pad_token": data.token("padding"),
    }
    adds_bos = sentencepiece or data.get("pre") in _LLAMA3_NAMES
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(data.get("add_bos_token", adds_bos)) and names["bos_token"] is not None,
        "add_eos_token": bool(data.get("add_eos_token", False)) and names["eos_token"] is not None,
        **{name: token for name, token in names.items() if token is not None},
    }
    if template := _chat_template(data.metadata):
        config["chat_template"] = template
    return config


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


def _post_processor(data: _Data, config: dict[str, Any]) -> processors.TemplateProcessing:
    """The post-processor that adds BOS and EOS tokens if the file says so."""
    before: Sequence[str] = [config["bos_token"]] if config["add_bos_token"] else []
    after: Sequence[str] = [config["eos_token"]] if config["add_eos_token"] else []
    single = [*before, "$A", *after]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=[(t, data.ids[t]) for t in {*before, *after}],
    )
