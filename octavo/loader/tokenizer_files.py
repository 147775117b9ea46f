"""Loads the tokenizer of a model folder: ``load_backend`` reads tokenizer.json, or builds it from a family's files."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Tokenizer

from octavo.core.errors import TokenizerError, UnsupportedModelError
from octavo.loader.sentencepiece import (
    CONTROL,
    MAX_ID,
    PRE_TOKENIZERS,
    ByteLevelVocabulary,
    PreTokenizer,
    SentencePieceModel,
    build_marian,
    byte_alphabet,
    has_marian_files,
    merges_by_rank,
    parse_merges,
    parse_sentencepiece,
    read_bytes,
    read_ids,
    read_lines,
    read_object,
    surround,
    token_text,
    word_piece,
)

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of a folder, with the content of tokenizer_config.json and special_tokens_map.json.

    Read from tokenizer.json, else from the files of the model's family.

    Raises:
        TokenizerError: there is none, or a file cannot be understood.
        UnsupportedModelError: there is no tokenizer.json, and the family of the other files is not supported.
    """
    if (read := _reader(folder)) is None:
        there = sorted(p.name for p in folder.glob("*token*")) if folder.is_dir() else []
        others = f"there is {', '.join(there)}" if there else "and no other tokenizer"
        raise TokenizerError(
            f"{folder} has no tokenizer.json ({others}), nor vocab.json with merges.txt, vocab.txt, "
            "tokenizer.model, spiece.model, *.tiktoken, or source.spm and target.spm with vocab.json; "
            "transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(folder); "
            "measurements with load_format='dummy' need none"
        )
    backend, config = read(folder, _read_config(folder))
    complete_backend(backend, config)
    return backend, config


def _reader(folder: Path) -> Callable[[Path, dict[str, Any]], tuple[Tokenizer, dict[str, Any]]] | None:
    """What makes a tokenizer of a folder and its configuration, and completes that; None: there are no files."""
    if (folder / "tokenizer.json").is_file():
        return _read_json
    if has_marian_files(folder):
        return functools.partial(build_marian, side="target")
    if (folder / "vocab.txt").is_file():
        return build_word_piece
    return build_tokenizer if tokenizer_files(folder) else None


def _read_json(folder: Path, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)), config
    except Exception as e:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {e}") from e


def load_source_backend(folder: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of the encoder's input, if it is not the decoder's."""
    if (folder / "tokenizer.json").is_file() or not has_marian_files(folder):
        return None
    backend, config = build_marian(folder, _read_config(folder), "source")
    complete_backend(backend, config)
    return backend


def has_tokenizer(folder: Path) -> bool:
    """Whether ``load_backend`` has files to read in a folder."""
    return _reader(folder) is not None


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by special_tokens_map.json."""
    config = read_object(folder / "tokenizer_config.json")
    for name, value in read_object(folder / "special_tokens_map.json").items():
        config.setdefault(name, value)
    return config


def complete_backend(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Makes the special tokens of ``config`` special in the tokenizer, with unchanged ids; turns off truncation."""
    backend.no_truncation()
    backend.no_padding()
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    texts = list(named_tokens(config).values())
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name)
        entries = extra if isinstance(extra, list) else list(extra.values()) if isinstance(extra, dict) else []
        texts += [text for entry in entries if (text := token_text(entry)) is not None]
    for text in dict.fromkeys(texts):
        if text not in special:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens under the names that templates use, such as ``bos_token``."""
    return {name: text for name in _NAMED if (text := token_text(config.get(name))) is not None}


_END = "<|endoftext|>"


@dataclass(frozen=True)
class _Family:
    """What the tokenizer files of a family leave to its class in transformers."""

    #: Of ``PRE_TOKENIZERS``, for vocab.json with merges.txt; None: the family has no such files.
    pre: str | None = None
    #: The same for a file of ranks.
    ranked_pre: str | None = None
    #: Special tokens that no file names.
    tokens: Mapping[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    adds_eos: bool = False
    #: Whether a pair of texts has two end tokens in the middle, and one segment.
    doubles_end: bool = False


_GPT2 = _Family("gpt-2", "gpt-2", dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END))
_NEOX = _Family("gpt-neox", None, _GPT2.tokens)
_STARCODER = _Family("starcoder", None, _GPT2.tokens)
_OPT = _Family("gpt-2", None, dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"), adds_bos=True)
_QWEN2 = _Family("qwen2", "qwen2", dict.fromkeys(("eos_token", "pad_token"), _END))
_COHERE = _Family("command-r", None, {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"})
_ROBERTA = _Family(
    "gpt-2",
    None,
    {**dict.fromkeys(("bos_token", "cls_token"), "<s>"), **dict.fromkeys(("eos_token", "sep_token"), "</s>")}
    | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
    adds_bos=True,
    adds_eos=True,
    doubles_end=True,
)
#: SentencePiece, or the ranks of Llama 3.
_LLAMA = _Family(None, "llama-bpe", adds_bos=True)
_T5 = _Family(adds_eos=True)
_PEGASUS = _Family(adds_eos=True)

#: By ``tokenizer_class`` of tokenizer_config.json, without its ending "Fast".
_CLASSES = {
    "GPT2Tokenizer": _GPT2,
    "CodeGenTokenizer": _GPT2,
    "GPTNeoXTokenizer": _NEOX,
    "Qwen2Tokenizer": _QWEN2,
    "CohereTokenizer": _COHERE,
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "GemmaTokenizer": _LLAMA,
    "RobertaTokenizer": _ROBERTA,
    "T5Tokenizer": _T5,
    "PegasusTokenizer": _PEGASUS,
}
#: By ``model_type`` of config.json, if tokenizer_config.json names no class, or GPT-2's, which several families use.
_MODEL_TYPES = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "codegen", "phi"), _GPT2),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe", "mpt"), _NEOX),
    **dict.fromkeys(("gpt_bigcode", "starcoder2"), _STARCODER),
    "opt": _OPT,
    "roberta": _ROBERTA,
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN2),
    **dict.fromkeys(("cohere", "cohere2"), _COHERE),
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "gemma", "gemma2", "gemma3", "gemma3_text"), _LLAMA),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "pegasus": _PEGASUS,
}


def tokenizer_files(folder: Path) -> list[Path]:
    """The vocabulary files for ``build_tokenizer``; empty if the folder has none."""
    pair = [folder / "vocab.json", folder / "merges.txt"]
    if all(path.is_file() for path in pair):
        return pair
    single = [folder / "tokenizer.model", folder / "spiece.model", *sorted(folder.glob("*.tiktoken"))]
    return [path for path in single if path.is_file()][:1]


def build_tokenizer(folder: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a folder, and ``config`` completed with the special tokens of the family.

    Reads ``vocab.json`` with ``merges.txt`` (byte-level BPE), ``tokenizer.model`` (SentencePiece, or tiktoken's lines
    of a token in base64 and its rank), ``spiece.model``, ``*.tiktoken``, and ``added_tokens.json``.
    ``tokenizer_class``, else ``model_type`` of config.json, decides how text is cut and which tokens surround it.
    """
    name, family = _family(folder, config)
    vocabulary = _vocabulary(tokenizer_files(folder), name, family, config)
    if family is _PEGASUS and isinstance(vocabulary, SentencePieceModel):
        _place_masks(vocabulary)
    added = _added_tokens(folder, config)
    for token_id, token in sorted(added.items()):
        vocabulary.place(token_id, token.content, special=token.special)
    if family is _T5 and isinstance(vocabulary, SentencePieceModel):
        _place_sentinels(vocabulary, config)
    tokenizer = vocabulary.build()
    tokenizer.add_tokens(list(added.values()))
    special = {**family.tokens, **vocabulary.named}
    named = {key: token for key, token in special.items() if tokenizer.token_to_id(token) is not None}
    complete = named | {key: value for key, value in config.items() if value is not None}
    around = []
    for side, default in (("bos", family.adds_bos), ("eos", family.adds_eos)):
        text = token_text(complete.get(f"{side}_token"))
        is_added = complete.get(f"add_{side}_token", default) and text and tokenizer.token_to_id(text) is not None
        around.append([str(text)] if is_added else [])
    if family.doubles_end:
        surround(tokenizer, *around, between=around[1], second=0)
    else:
        surround(tokenizer, *around)
    return tokenizer, complete


def _family(folder: Path, config: Mapping[str, Any]) -> tuple[str, _Family]:
    """The family and the name that decided it."""
    model_type = read_object(folder / "config.json").get("model_type")
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    family, of_type = _CLASSES.get(name), _MODEL_TYPES.get(str(model_type))
    if of_type is not None and (family is None or (family is _GPT2 and of_type.pre is not None)):
        return f"model_type {model_type}", of_type
    if family is not None:
        return name, family
    raise UnsupportedModelError(
        f"{folder} has no tokenizer.json, and its tokenizer cannot be built from {tokenizer_files(folder)[0].name}: "
        f"tokenizer_class {name or None!r} and model_type {model_type!r} are not known; supported are the classes "
        f"{', '.join(_CLASSES)} and the model types {', '.join(_MODEL_TYPES)}"
    )


def _vocabulary(
    files: Sequence[Path], name: str, family: _Family, config: Mapping[str, Any]
) -> ByteLevelVocabulary | SentencePieceModel:
    source = files[0]
    space = config.get("add_prefix_space")
    if len(files) == 2:
        pre, ids = _pre_tokenizer(source, name, family.pre), read_ids(source)
        lines = (line for line in read_lines(files[1]) if line and not line.startswith("#version"))
        return ByteLevelVocabulary(source, ids, parse_merges(files[1], lines), pre, space is True)
    data = read_bytes(source)
    if _RANK.match(data):
        pre = replace(_pre_tokenizer(source, name, family.ranked_pre), ignore_merges=True)
        return ByteLevelVocabulary(source, *_from_ranks(source, data), pre, space is True)
    if family.pre is not None:
        raise UnsupportedModelError(f"{source} is not a file of ranks, and {name} has no SentencePiece model")
    model = parse_sentencepiece(source, data)
    if isinstance(space, bool):
        model.prefix_space = space
    return model


def _pre_tokenizer(source: Path, name: str, pre: str | None) -> PreTokenizer:
    if pre is None:
        raise UnsupportedModelError(
            f"{source}: the tokenizer of {name} is not published as {source.name}, so how it cuts text is not known; "
            "name its tokenizer_class in tokenizer_config.json, such as GPT2Tokenizer"
        )
    return PRE_TOKENIZERS[pre]


#: A line of tiktoken's files: the bytes of a token in base64, and its rank, which is its id.
_RANK = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})\r?(?:\n|\Z)")


def _from_ranks(source: Path, data: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids and merges, in the alphabet of byte-level BPE, of a file of ranks."""
    ranks: dict[bytes, int] = {}
    at = 0
    while at < len(data):
        line = _RANK.match(data, at)
        if line is None:
            raise TokenizerError(f"{source} is damaged: no token in base64 with its rank at byte {at}")
        try:
            ranks[base64.b64decode(line[1], validate=True)] = int(line[2])
        except ValueError as e:
            raise TokenizerError(f"{source} is damaged: {line[1][:40]!r} is not base64 ({e})") from e
        at = line.end()
    if len(set(ranks.values())) != len(ranks) or max(ranks.values()) > MAX_ID:
        raise TokenizerError(f"{source} is damaged: a rank occurs twice, or is larger than {MAX_ID}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{source} has no token for {len(missing)} of the 256 bytes, such as {missing[0]}")
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = [(spelled[left], spelled[right]) for left, right in merges_by_rank(source, ranks, ranks)]
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens beside the vocabulary, by id: of added_tokens.json, and of tokenizer_config.json with their flags."""
    special = {text for key, value in config.items() if key.endswith("_token") and (text := token_text(value))}
    added: dict[int, AddedToken] = {}
    for token, token_id in read_object(folder / "added_tokens.json").items():
        added[_id(folder, token_id)] = AddedToken(token, special=token in special, normalized=False)
    entries = config.get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise TokenizerError(f"{folder}: added_tokens_decoder must be an object, not {type(entries).__name__}")
    for token_id, entry in entries.items():
        text = token_text(entry)
        if not text:
            raise TokenizerError(f"{folder}: added_tokens_decoder has no text for the id {token_id}")
        flags = entry if isinstance(entry, dict) else {}
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        added[_id(folder, token_id)] = AddedToken(text, **{name: bool(flags.get(name, False)) for name in names})
    return added


def _id(folder: Path, value: object) -> int:
    text = str(value)
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > MAX_ID:
        raise TokenizerError(f"{folder}: the id of an added token must be a number up to {MAX_ID}, not {text[:40]!r}")
    return int(text)


def _place_sentinels(model: SentencePieceModel, config: Mapping[str, Any]) -> None:
    """Adds T5's ``<extra_id_N>``, which are in no file, after the pieces; the highest number comes first."""
    count = config.get("extra_ids", 100)
    if not isinstance(count, int) or not 0 <= count <= 1000:
        raise TokenizerError(f"{model.source}: extra_ids must be a number up to 1000, not {count!r}")
    for number in reversed(range(count)):
        if (token := f"<extra_id_{number}>") not in model.pieces:
            model.place(len(model.pieces), token, special=True)


def _place_masks(model: SentencePieceModel) -> None:
    """Adds Pegasus's special tokens, which are in no file, after the end token and before the other pieces."""
    if (model.pad_id, model.eos_id, model.unk_id) != (0, 1, 2):
        raise TokenizerError(f"{model.source}: pieces 0, 1 and 2 of Pegasus are <pad>, </s> and <unk>")
    masks = ["<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, 103))]
    model.pieces[2:2] = masks
    model.scores[2:2] = [0.0] * len(masks)
    model.types[2:2] = [CONTROL] * len(masks)
    model.unk_id += len(masks)


# WordPiece: vocab.txt of BERT and its relatives

_SPECIAL = {f"{name.lower()}_token": f"[{name}]" for name in ("UNK", "SEP", "PAD", "CLS", "MASK")}


def build_word_piece(folder: Path, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a vocab.txt, and ``config`` completed with the special tokens."""
    file = folder / "vocab.txt"
    tokens = read_lines(file)
    named = {name: token_text(config.get(name)) or default for name, default in _SPECIAL.items()}
    needed = (named[name] for name in ("unk_token", "sep_token", "cls_token"))
    if missing := [token for token in needed if token not in tokens]:
        raise TokenizerError(f"{file} has no token {missing[0]!r}, which stands around texts or for unknown words")
    accents = config.get("strip_accents")
    tokenizer = word_piece(
        file,
        tokens,
        unknown=named["unk_token"],
        lowercase=config.get("do_lower_case", True) is not False,
        strip_accents=accents if isinstance(accents, bool) else None,
        splits_chinese=config.get("tokenize_chinese_chars", True) is not False,
    )
    kept = [token for token in named.values() if token in tokens]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kept])
    surround(tokenizer, [named["cls_token"]], [named["sep_token"]], between=[])
    return tokenizer, {**named, **{key: value for key, value in config.items() if value is not None}}
