"""Text to token ids and back, from the files of a Hugging Face folder."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, overload

import tokenizers

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.chat_template import choose_template, load_chat_templates, read_chat_template, render_chat
from octavo.loader.sentencepiece import byte_alphabet
from octavo.loader.tokenizer_files import (
    complete_backend,
    has_tokenizer,
    load_backend,
    load_source_backend,
    named_tokens,
)
from octavo.models.config_files import check_architecture
from octavo.models.pooling_files import transformer_settings

if TYPE_CHECKING:
    from octavo.config.engine_config import EngineConfig


# Prompts that ask for the text of a gap, in the order and with the tokens that a model was trained on.


class _Names(NamedTuple):
    """The tokens of a family of models by name. Without ``middle`` the suffix comes first, and the middle follows the
    prefix (SPM)."""

    prefix: str
    suffix: str
    middle: str | None


_FAMILIES = (
    _Names("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code, Yi-Coder
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    _Names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM, CodeGeeX
    _Names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek Coder)
    _Names("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Names("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
#: Tokens with which models of these families end a middle, beside the end-of-sequence token: the end of a middle or of
#: a file, and what only opens the next one.
_ENDS = (
    "▁<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>",
    "<|repo_name|>", "<repo_name>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The token ids of a model for this."""

    prefix: int
    suffix: int
    middle: int | None
    #: Tokens that end the middle.
    ends: tuple[int, ...]

    def arrange(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt whose continuation is what stands between the texts of these token ids."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


def find_fill_in_middle(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> FillInMiddle | None:
    """The tokens of a model that fills gaps: those that its files name, else those of a family that is known.

    Args:
        backend: the tokenizer.
        config: the content of tokenizer_config.json, where ``fim_tokens`` are those that a GGUF file names.
    """
    named = config.get("fim_tokens")
    families = [*_FAMILIES]
    if isinstance(named, dict) and all(isinstance(named.get(k), str) for k in _Names._fields):
        families.insert(0, _Names(**{k: named[k] for k in _Names._fields}))
    find = backend.token_to_id
    for names in families:
        prefix, suffix, middle = find(names.prefix), find(names.suffix), find(names.middle) if names.middle else None
        if prefix is not None and suffix is not None and (middle is None) == (names.middle is None):
            ends = [token for name in _ENDS if (token := find(name)) is not None]
            return FillInMiddle(prefix, suffix, middle, tuple(ends))
    return None


def no_fill_in_middle() -> InvalidRequestError:
    """The error for a model without such tokens."""
    return InvalidRequestError("suffix is not supported by this model: its vocabulary has no tokens to fill gaps with")


# Token by token to text: only whole characters leave, and what left never changes.

#: Prompt tokens looked at to see whether the output continues a text or begins one.
_CONTEXT = 8


class TokenTexts(Protocol):
    """What a stream asks of a ``Tokenizer``."""

    backend: tokenizers.Tokenizer
    special_ids: frozenset[int]
    decoder_kind: str

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None for text; empty for an unknown id."""

    def token_text(self, token_id: int) -> str:
        """What a token adds in the middle of a text."""


class TextStream:
    """The text of a growing sequence of tokens, in constant time a token.

    Invariant: what ``push`` returned so far, with ``flush`` at the end, is ``Tokenizer.decode`` of the tokens, except
    that SentencePiece's space before the first word is kept if there is text before it in the prompt.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """Begins after ``prompt_token_ids``, none of whose text is returned.

        ``visible_tokens``: special tokens that are not skipped with the others.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - visible_tokens if skip_special_tokens else frozenset[int]()
        # Decodes incomplete characters as far as they have come; what can no longer be one becomes U+FFFD.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        context = list(prompt_token_ids[-_CONTEXT:])
        self._at_start = not context or not tokenizer.backend.decode(context, skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before: empty while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data == b"":  # an id that is no token
            return ""
        if self._at_start and self._tokenizer.decoder_kind != "byte_level":
            return self._first(token_id, data)
        if data is not None:
            return self._utf8.decode(data)
        return self.flush() + self._tokenizer.token_text(token_id)

    def flush(self) -> str:
        """Ends an incomplete character: one U+FFFD, or nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _first(self, token_id: int, data: bytes | None) -> str:
        """A token at the start of a text, where decoders drop a space."""
        text: str = self._tokenizer.backend.decode([token_id], skip_special_tokens=False)
        if data is not None:
            self._at_start = False
            return self._utf8.decode(data) if text else ""
        self._at_start = not self._tokenizer.token_text(token_id)
        return text


def bytes_of_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any character outside the alphabet is its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def bytes_of_fallback(token: str) -> bytes | None:
    """The byte that a token such as ``<0x0A>`` stands for; None for others."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


# What programs ask a tokenizer of transformers for, in its names; ``Tokenizer`` has the methods of its own.


class Encoding(dict[str, Any]):
    """The result of a call: ``input_ids`` and ``attention_mask``, as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def encoding_of(input_ids: list[int] | list[list[int]]) -> Encoding:
    """Token ids of a text or of several, with a mask of ones: nothing is padded."""
    mask = [[1] * len(ids) if isinstance(ids, list) else 1 for ids in input_ids]
    return Encoding(input_ids=input_ids, attention_mask=mask)


class TokenizerCalls(ABC):
    """The part of ``Tokenizer`` that is named as in transformers."""

    backend: tokenizers.Tokenizer
    #: Texts of the special tokens under the names that templates use, such as ``bos_token``.
    named_tokens: Mapping[str, str]
    special_ids: frozenset[int]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        padding: bool = False,
        return_tensors: None = None,
    ) -> Encoding:
        """Token ids of a text or of several, as lists; with ``truncation`` the first ``max_length`` of each.

        Raises:
            InvalidRequestError: not texts, or ``padding`` or ``return_tensors`` is asked for: these lists have none.
        """
        if padding or return_tensors is not None:
            raise InvalidRequestError("padding must be False and return_tensors None: token ids are lists of integers")
        ids = self.encode_batch([text] if isinstance(text, str) else list(text), add_special_tokens)
        if truncation and max_length is not None:
            ids = [each[:max_length] for each in ids]
        return encoding_of(ids[0] if isinstance(text, str) else ids)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """``decode`` of each."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Token id by the token's name in the vocabulary, added tokens included."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def tokenize(self, text: str) -> list[str | None]:
        """Names of the tokens of a text, without those that are put around it."""
        [ids] = self.encode_batch([text], add_special_tokens=False)
        return self.convert_ids_to_tokens(ids)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """The name in the vocabulary of a token id or of several; None if unknown."""
        name = self.backend.id_to_token
        return name(ids) if isinstance(ids, int) else [name(i) for i in ids]

    @property
    def all_special_ids(self) -> list[int]:
        """Token ids of the special tokens."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str | None]:
        """Names of the special tokens."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def pad_token(self) -> str | None:
        """The padding token's text, if one is named."""
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Token id of ``pad_token``."""
        return None if self.pad_token is None else self.backend.token_to_id(self.pad_token)


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a folder: tokenizer.json, else what ``build_tokenizer`` makes of the files of its family.

    ``chat_template``: the text of one that takes the place of all that the folder has.

    Raises:
        TokenizerError: there is none, or a file cannot be understood.
        UnsupportedModelError: there is no tokenizer.json, and the family of the other files is not known.
    """
    backend, config = load_backend(folder)
    templates = load_chat_templates(folder, config) if chat_template is None else {"default": chat_template}
    source = load_source_backend(folder)
    return Tokenizer(backend, config, templates, None if source is None else Tokenizer(source, config, {}))


class Tokenizer(TokenizerCalls):
    """A tokenizer with its special tokens and chat templates. It never changes, so threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        templates: Mapping[str, str],
        source: Tokenizer | None = None,
    ) -> None:
        """Takes over ``backend``; ``config`` is the content of tokenizer_config.json."""
        self.backend = backend
        #: Of what an encoder reads, with the same ids, if there is one beside this, the decoder's; else this.
        self.source = source or self
        self.chat_templates = dict(templates)
        complete_backend(backend, config)
        #: Texts of the special tokens under the names that templates use, such as ``bos_token``.
        self.named_tokens = named_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        #: Number of ids that stand for a token; a model may have more embeddings.
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.decoder_kind = _decoder_kind(backend)
        self.fill_in_middle = find_fill_in_middle(backend, config)
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes | None] = {}
        self._anchor = self._find_anchor()
        self._truncation_side = "left" if config.get("truncation_side") == "left" else "right"

    def check_can_decode(self, has_stops: bool = False) -> None:
        """Whether token ids can be made into text, in which stop strings are looked for if it ``has_stops``.

        Raises:
            InvalidRequestError: there is no vocabulary (``NoTokenizer``).
        """

    @property
    def eos_token(self) -> str | None:
        """The end-of-sequence token's text, if one is named."""
        return self.named_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The beginning-of-sequence token's text, if one is named."""
        return self.named_tokens.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Token id of ``eos_token``. A model may have further tokens that end its output."""
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        """Token id of ``bos_token``."""
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """The id of a token by its name in the vocabulary, such as ``<|im_end|>``, or of several; None if unknown."""
        find = self.backend.token_to_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the beginning and end tokens that the model wants around it.

        Which these are is said by tokenizer.json alone; ``add_bos_token`` and ``add_eos_token`` of
        tokenizer_config.json, which say it a second time, are not read (nor does transformers from version 5 on).
        Special tokens that are written out in the text become these tokens.

        Raises:
            InvalidRequestError: not a text, or not one that can be written as UTF-8 (half of a surrogate pair).
        """
        ids: list[int] = self.backend.encode(_checked(text), add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """``encode`` of each text, on several threads."""
        checked = [_checked(text) for text in texts]
        return [e.ids for e in self.backend.encode_batch_fast(checked, add_special_tokens=add_special_tokens)]

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        """``encode``, cut to ``max_tokens`` with the special tokens that are around a text; at the side that
        tokenizer_config.json names (``truncation_side``), by default its end.

        Raises:
            InvalidRequestError: as for ``encode``; or there is no room for anything beside special tokens.
        """
        whole = self.backend.encode(_checked(text), add_special_tokens=False)
        room = self._room(max_tokens, pair=False)
        if len(whole) > room:
            whole.truncate(room, direction=self._truncation_side)
        ids: list[int] = self.backend.post_process(whole).ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts as a model reads them together, and where those of the second one's segment begin.

        That is 0 if the model does not tell segments apart. ``max_tokens`` cuts the longer text, or both to the same
        length, as other libraries do (longest_first).

        Raises:
            InvalidRequestError: as for ``encode_cut``.
        """
        one = self.backend.encode(_checked(first), add_special_tokens=False)
        two = self.backend.encode(_checked(second), add_special_tokens=False)
        if max_tokens is not None and len(one) + len(two) > (room := self._room(max_tokens, pair=True)):
            shorter = min(len(one), len(two), room // 2)
            sizes = (shorter, room - shorter) if len(one) <= len(two) else (room - shorter, shorter)
            for encoding, size in zip((one, two), sizes, strict=True):
                encoding.truncate(size, direction=self._truncation_side)
        encoded = self.backend.post_process(one, two)
        types = encoded.type_ids
        return encoded.ids, types.index(1) if 1 in types else 0

    def _room(self, max_tokens: int, *, pair: bool) -> int:
        """Tokens beside the special ones."""
        special = self.backend.num_special_tokens_to_add(pair)
        if max_tokens <= special:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be more than {special}, the number of special tokens around a text, not "
                f"{max_tokens}"
            )
        return int(max_tokens - special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, ids that are no token nothing."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if self.decoder_kind == "byte_fallback" and "\ufffd" in text:
            # The library gives up a whole run of byte tokens for one bad byte, also the characters before it that a
            # stream has long delivered.
            stream = TextStream(self, [], skip_special_tokens=skip_special_tokens)
            return "".join([*map(stream.push, ids), stream.flush()])
        return text

    def token_text(self, token_id: int) -> str:
        """What one token adds in the middle of a text: with its leading space; U+FFFD for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            before = self.backend.decode(self._anchor, skip_special_tokens=False)
            text = self.backend.decode([*self._anchor, token_id], skip_special_tokens=False)[len(before) :]
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for, perhaps part of a character; None for text; empty for an unknown id."""
        if token_id not in self._bytes:
            token = self.backend.id_to_token(token_id)
            convert = bytes_of_level if self.decoder_kind == "byte_level" else bytes_of_fallback
            self._bytes[token_id] = b"" if token is None else convert(token)
        return self._bytes[token_id]

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, tokenize: Literal[False] = False, **options: Any
    ) -> str: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, tokenize: Literal[True], **options: Any
    ) -> list[int] | Encoding: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        chat_template: str | None = None,
        tokenize: bool = False,
        return_dict: bool = False,
        **options: Any,
    ) -> str | list[int] | Encoding:
        """The prompt for a conversation: its text, or with ``tokenize`` its token ids.

        Args:
            messages: the conversation.
            chat_template: a name among the model's templates or a template's text; None for the model's own.
            tokenize: the result is that of ``encode_chat``.
            return_dict: with it, that as ``input_ids`` of an ``Encoding``.
            options: keywords of ``octavo.engine.chat_template.render_chat``, such as ``tools``.

        Raises:
            InvalidRequestError: as for ``render_chat``.
        """
        if tokenize:
            ids = self.encode_chat(messages, chat_template=chat_template, **options)
            return encoding_of(ids) if return_dict else ids
        template = choose_template(self.chat_templates, chat_template, has_tools=options.get("tools") is not None)
        return render_chat(template, messages, **{**self.named_tokens, **options})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of ``apply_chat_template``: the template itself writes the beginning token, so none is added."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def encode_gap(self, prefix: str, suffix: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt whose continuation stands between two texts.

        Args:
            prefix: the text before the gap.
            suffix: the text after it.
            add_special_tokens: begins with the beginning token, if texts of this model do.

        Raises:
            InvalidRequestError: the model was not trained for this, or as for ``encode``.
        """
        if self.fill_in_middle is None:
            raise no_fill_in_middle()
        ids = self.fill_in_middle.arrange(self.encode(prefix, False), self._encode_within(suffix))
        start = self.encode("", add_special_tokens)[:1]
        return start + ids if start == [self.bos_token_id] else ids

    def _encode_within(self, text: str) -> list[int]:
        """Token ids without the space that SentencePiece puts before a text."""
        line_break = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        within = self.decoder_kind != "byte_level" and ids[: len(line_break)] == line_break
        return ids[len(line_break) :] if within else self.encode(text, add_special_tokens=False)

    def bad_word_ids(self, word: str) -> list[list[int]]:
        """The token sequences a word is written with: at the start of a text, after a space, within a line.

        Raises:
            InvalidRequestError: the word has no tokens.
        """
        line_break = self.encode("\n", add_special_tokens=False)
        variants = [self.encode(text, add_special_tokens=False) for text in (word, " " + word)]
        within = self.encode("\n" + word, add_special_tokens=False)
        if within[: len(line_break)] == line_break:  # SentencePiece puts a space before a text, but not here
            variants.append(within[len(line_break) :])
        unique = [list(ids) for ids in dict.fromkeys(map(tuple, variants)) if ids]
        if not unique:
            raise InvalidRequestError(f"bad_words: {word!r} has no tokens")
        return unique

    def _find_anchor(self) -> list[int]:
        """A token with a visible text to put before others, so that these are not at the start of a text."""
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1:] if self.backend.decode(ids[-1:], skip_special_tokens=False) else []


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidRequestError(f"a prompt must be a text, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InvalidRequestError(
            f"a prompt must be valid Unicode: character {e.start} is half of a surrogate pair ({text[e.start]!r})"
        ) from None
    return text


def _decoder_kind(backend: tokenizers.Tokenizer) -> str:
    """``byte_level`` (tokens are bytes), ``byte_fallback`` (some are a byte each) or ``text`` (all are whole text)."""
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type", "none") for step in steps}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return "byte_level"
    if not kinds <= {"none", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise TokenizerError(f"a tokenizer whose decoder has the steps {', '.join(sorted(kinds))} is not supported")
    return "byte_fallback" if "ByteFallback" in kinds else "text"


# Which tokenizer an engine uses, and what stands in where there is none.


def find_tokenizer(options: EngineConfig, folder: Path) -> Tokenizer:
    """The tokenizer that ``options`` name, else that of the model in ``folder``, with the chat template that they name.

    With random weights the model may have none: then there is one that refuses whatever needs text.
    With ``skip_tokenizer_init`` none is loaded, and output has no text.

    Raises:
        UnsupportedModelError, ConfigError: as for ``check_architecture``, which comes first: what else a model
            lacks that cannot be served does not matter; ``read_chat_template``.
        TokenizerError: as for ``load_tokenizer`` and ``read_chat_template``.
    """
    check_architecture(folder)
    if options.skip_tokenizer_init:
        return SkippedTokenizer(folder)
    template = read_chat_template(options.chat_template)
    if options.tokenizer is None and options.load_format == "dummy" and not has_tokenizer(folder):
        return NoTokenizer(folder)
    tokenizer = load_tokenizer(folder if options.tokenizer is None else Path(options.tokenizer), template)
    settings = transformer_settings(folder)
    if settings is not None and settings.flag("do_lower_case"):
        lower_case(tokenizer.backend)
    return tokenizer


def lower_case(backend: tokenizers.Tokenizer) -> None:
    """Makes texts lower case before all else, as sentence-transformers does where no normalizer is there for it."""
    normalizers, before = tokenizers.normalizers, backend.normalizer
    parts: list[Any] = [] if before is None else [before]
    if isinstance(before, normalizers.Sequence):
        parts = [before[index] for index in range(len(before))]
    if not any(isinstance(part, normalizers.Lowercase) for part in parts):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


class NoTokenizer(Tokenizer):
    """Stands in where there is none: every token's text is empty, and text is refused."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where a tokenizer.json was looked for."""
        self._folder = folder
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), {}, {})

    def check_can_decode(self, has_stops: bool = False) -> None:
        """Refuses."""
        raise self._refusal("output cannot be text: set detokenize=False")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Refuses; ``encode_batch`` and what else is made of it do too."""
        raise self._refusal("text cannot be made into tokens: give the prompt as token ids")

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        """Refuses."""
        return self.encode(text)

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], int]:
        """Refuses."""
        return self.encode(first), 0

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Refuses."""
        return [self.encode(text) for text in texts]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> NoReturn:
        """Refuses."""
        raise self._refusal("a conversation cannot be made into tokens: give the prompt as token ids")

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the model has no tokenizer ({self._folder} holds no tokenizer.json), so {what}, or name a folder with "
            "one in the option tokenizer"
        )

    def _find_anchor(self) -> list[int]:
        return []


class SkippedTokenizer(NoTokenizer):
    """Stands in with ``skip_tokenizer_init``: output is token ids with an empty text, and text is refused."""

    def token_text(self, token_id: int) -> str:
        """``token_id:`` and the id, so that a client of the server can read the ids among the logprobs."""
        return f"token_id:{token_id}"

    def check_can_decode(self, has_stops: bool = False) -> None:
        """Refuses stop strings: there is no text to look for them in."""
        if has_stops:
            raise self._refusal("stop strings cannot be found: use stop_token_ids")

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"no tokenizer is loaded (skip_tokenizer_init), so {what}, or load it")


# The text of a request's output while it grows: whole characters only, ended by stop strings.


class IncrementalDetokenizer:
    """Owns the text of one output sequence.

    The cost of an output is linear in its tokens and characters, whatever the text and the stop strings are.
    Invariant: what ``take_text`` returns, call after call, is the text of the output. A stop string and what follows it
    in its token are not part of it, so what may be the beginning of one is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """An output of no tokens after ``prompt_token_ids``, which tell whether it begins a text or continues one.

        ``visible_tokens``: special tokens that stay in the text, even if the parameters say that others do not.
        """
        self._stream = TextStream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            visible_tokens=visible_tokens,
        )
        self._searches = [_StopSearch(text) for text in params.stop or ()]
        self._keep_stop = params.include_stop_str_in_output
        #: A stop string that is complete before so many tokens is ordinary text.
        self._min_tokens = params.min_tokens
        #: Text that was not taken yet.
        self._pieces: list[str] = []
        self._finished = False
        #: Output tokens seen, without those after a stop string.
        self.num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Takes further output tokens, up to the one that completes a stop string; returns that stop string."""
        for token_id in token_ids:
            if self._finished:
                break
            self.num_tokens += 1
            if match := self._add(self._stream.push(token_id)):
                return match
        return None

    def finish(self) -> str | None:
        """Ends the output: an incomplete character becomes U+FFFD, and nothing is held back any more."""
        match = None if self._finished else self._add(self._stream.flush())
        self._finished = True
        return match

    def take_text(self) -> str:
        """The text since the last call that no later token can take back; once the output has ended, all of it."""
        held = 0 if self._finished or self._keep_stop else max((s.matched for s in self._searches), default=0)
        text = "".join(self._pieces)
        end = len(text) - held
        self._pieces = [text[end:]]
        return text[:end]

    def _add(self, piece: str) -> str | None:
        if not piece:
            return None
        match = self._search(piece) if self._searches else None
        if match is None:
            self._pieces.append(piece)
            return None
        stop, end = match
        self._pieces.append(piece[:end])
        if not self._keep_stop:  # its characters were held back, so that none of them was taken
            self._pieces = ["".join(self._pieces)[: -len(stop)]]
        self._finished = True
        return stop

    def _search(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first in the piece, the longest of several, and where in the piece it ends."""
        counts = self.num_tokens >= self._min_tokens
        best: tuple[str, int] | None = None
        for search in self._searches:
            end = search.feed(piece, counts)
            if end and (best is None or (end, -len(search.text)) < (best[1], -len(best[0]))):
                best = search.text, end
        return best


class _StopSearch:
    """Finds one text in a stream of characters (Knuth, Morris & Pratt 1977): amortised constant time a character."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        #: Length of the longest beginning of ``text`` that the stream ends with.
        self.matched = 0
        # _fallback[n]: length of the longest proper beginning of text[:n] that is also its end.
        self._fallback = [0, 0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = self._fallback[length]
            length += text[length] == character
            self._fallback.append(length)

    def feed(self, piece: str, counts: bool) -> int:
        """Number of characters of the piece up to the end of the first match; 0 if there is none.

        If not ``counts``, matches are passed over.
        """
        text, fallback, matched = self.text, self._fallback, self.matched
        if not matched and text[0] not in piece:  # the usual case, at the speed of C
            return 0
        for position, character in enumerate(piece, 1):
            while matched and text[matched] != character:
                matched = fallback[matched]
            matched += text[matched] == character
            if matched == len(text):
                if counts:
                    self.matched = matched
                    return position
                matched = fallback[matched]
        self.matched = matched
        return 0
