"""Text to token ids and back: ``Tokenizer``; ``IncrementalDetokenizer`` makes the text of an output while it grows."""

from __future__ import annotations

import codecs
import json
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import tokenizers

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.chat_template import choose_template, load_chat_templates, read_chat_template, render_chat
from octavo.loader.resolve import resolve_tokenizer
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

#: Prompt tokens that tell whether the output continues a text or begins one.
_CONTEXT = 8


class Tokenizer:
    """A model's tokenizer with its special tokens and chat templates. Immutable, so threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        templates: Mapping[str, str],
        source: Tokenizer | None = None,
    ) -> None:
        """Takes over ``backend``; ``config``: the content of tokenizer_config.json."""
        self.backend = backend
        #: The encoder's tokenizer, with the same ids, if it has its own.
        self.source = source or self
        self.chat_templates = dict(templates)
        complete_backend(backend, config)
        #: Texts of the special tokens by the names that templates use, such as ``bos_token``.
        self.named_tokens = named_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        #: Number of token ids; a model may have more embeddings.
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
        self.decoder_kind = _decoder_kind(backend)
        self.fill_in_middle = find_fill_in_middle(backend, config)
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes | None] = {}
        self._anchor = self._find_anchor()
        self._truncation_side = "left" if config.get("truncation_side") == "left" else "right"

    def check_can_decode(self, has_stops: bool = False) -> None:
        """Raises ``InvalidRequestError`` if tokens have no text; ``has_stops``: stop strings are looked for in it."""

    @property
    def eos_token(self) -> str | None:
        return self.named_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self.named_tokens.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """A model may have further tokens that end its output."""
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.backend.token_to_id(self.bos_token)

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Returns the id of a token name, such as ``<|im_end|>``, or of several; None if unknown."""
        find = self.backend.token_to_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenizes a text, with the begin and end tokens that tokenizer.json puts around it.

        ``add_bos_token`` and ``add_eos_token`` of tokenizer_config.json are not read, as in transformers 5. Special
        tokens written in the text become these tokens.

        Raises:
            InvalidRequestError: not a text, or not valid Unicode (half of a surrogate pair).
        """
        ids: list[int] = self.backend.encode(_checked(text), add_special_tokens=add_special_tokens).ids
        return ids

    def encode_with_ends(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """``encode``, and for each token the characters of the text up to its end, or up to that of one before it."""
        [encoding] = self.backend.encode_batch([_checked(text)], add_special_tokens=add_special_tokens)
        return encoding.ids, [*accumulate((end for _, end in encoding.offsets), max)]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        checked = [_checked(text) for text in texts]
        return [e.ids for e in self.backend.encode_batch_fast(checked, add_special_tokens=add_special_tokens)]

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        """Tokenizes a text, cut to ``max_tokens`` including special tokens, at its end or at ``truncation_side``."""
        whole = self.backend.encode(_checked(text), add_special_tokens=False)
        room = self._room(max_tokens, pair=False)
        if len(whole) > room:
            whole.truncate(room, direction=self._truncation_side)
        ids: list[int] = self.backend.post_process(whole).ids
        return ids

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], int]:
        """Tokenizes two texts together; also returns where the second one's segment begins, 0 without segments.

        ``max_tokens`` cuts the longer text, or both to the same length (longest_first in transformers).
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
        special = self.backend.num_special_tokens_to_add(pair)
        if max_tokens <= special:
            raise InvalidRequestError(
                f"must be more than {special}, the number of special tokens around a text, not {max_tokens}",
                path="truncate_prompt_tokens",
            )
        return int(max_tokens - special)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; invalid UTF-8 becomes U+FFFD, unknown ids are skipped."""
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if self.decoder_kind == "byte_fallback" and "\ufffd" in text:
            # The library replaces a whole run of byte tokens for one bad byte, even the characters before it, which a
            # stream has delivered already.
            stream = TextStream(self, [], skip_special_tokens=skip_special_tokens)
            return "".join([*map(stream.push, ids), stream.flush()])
        return text

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token inside a text: with its leading space; U+FFFD for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            before = self.backend.decode(self._anchor, skip_special_tokens=False)
            text = self.backend.decode([*self._anchor, token_id], skip_special_tokens=False)[len(before) :]
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Returns the bytes of a token, perhaps part of a character; None for text; empty for an unknown id."""
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
        """Renders a conversation to its text, or with ``tokenize`` to token ids.

        Args:
            chat_template: the name of one of the model's templates, or a template's text; None for the default.
            return_dict: with ``tokenize``, returns an ``Encoding``.
            options: keywords of ``octavo.engine.chat_template.render_chat``, such as ``tools``.
        """
        if tokenize:
            ids = self.encode_chat(messages, chat_template=chat_template, **options)
            return _encoding_of(ids) if return_dict else ids
        template = choose_template(self.chat_templates, chat_template, has_tools=options.get("tools") is not None)
        return render_chat(template, messages, **{**self.named_tokens, **options})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Tokenizes ``apply_chat_template``; the template itself writes the begin token."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def encode_gap(self, prefix: str, suffix: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the prompt whose continuation stands between ``prefix`` and ``suffix`` (fill-in-the-middle).

        ``add_special_tokens``: begins with the begin token if the model's texts do.
        """
        if self.fill_in_middle is None:
            raise no_fill_in_middle()
        ids = self.fill_in_middle.arrange(self.encode(prefix, False), self._encode_within(suffix))
        start = self.encode("", add_special_tokens)[:1]
        return start + ids if start == [self.bos_token_id] else ids

    def _encode_within(self, text: str) -> list[int]:
        """Tokenizes without the space that SentencePiece puts before a text."""
        line_break = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        within = self.decoder_kind != "byte_level" and ids[: len(line_break)] == line_break
        return ids[len(line_break) :] if within else self.encode(text, add_special_tokens=False)

    def bad_word_ids(self, word: str) -> list[list[int]]:
        """Returns the token sequences of a word: at the start of a text, after a space, within a line."""
        line_break = self.encode("\n", add_special_tokens=False)
        variants = [self.encode(text, add_special_tokens=False) for text in (word, " " + word)]
        within = self.encode("\n" + word, add_special_tokens=False)
        if within[: len(line_break)] == line_break:  # SentencePiece puts a space before a text, but not here
            variants.append(within[len(line_break) :])
        unique = [list(ids) for ids in dict.fromkeys(map(tuple, variants)) if ids]
        if not unique:
            raise InvalidRequestError(f"{word!r} has no tokens", path="bad_words")
        return unique

    # --- names of transformers ---------------------------------------------------------------------------------------

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
        """Tokenizes a text or several, as lists; ``truncation`` keeps the first ``max_length`` tokens of each."""
        if padding or return_tensors is not None:
            raise InvalidRequestError(
                "must be False and return_tensors None: token ids are lists of integers", path="padding"
            )
        ids = self.encode_batch([text] if isinstance(text, str) else list(text), add_special_tokens)
        if truncation and max_length is not None:
            ids = [each[:max_length] for each in ids]
        return _encoding_of(ids[0] if isinstance(text, str) else ids)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def tokenize(self, text: str) -> list[str | None]:
        """Returns the names of a text's tokens, without special tokens around it."""
        [ids] = self.encode_batch([text], add_special_tokens=False)
        return self.convert_ids_to_tokens(ids)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        name = self.backend.id_to_token
        return name(ids) if isinstance(ids, int) else [name(i) for i in ids]

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str | None]:
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def pad_token(self) -> str | None:
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.backend.token_to_id(self.pad_token)

    def _find_anchor(self) -> list[int]:
        """A visible token to put before others, so that these are not at the start of a text."""
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1:] if self.backend.decode(ids[-1:], skip_special_tokens=False) else []


class Encoding(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _encoding_of(input_ids: list[int] | list[list[int]]) -> Encoding:
    mask = [[1] * len(ids) if isinstance(ids, list) else 1 for ids in input_ids]
    return Encoding(input_ids=input_ids, attention_mask=mask)


#: Living tokenizers of ``find_tokenizer``. Reading one of 262,144 tokens takes a second, in which no other thread runs,
#: as ``tokenizers`` holds the lock of Python.
_loaded: weakref.WeakValueDictionary[Hashable, Tokenizer] = weakref.WeakValueDictionary()


def find_tokenizer(options: EngineConfig, folder: Path) -> Tokenizer:
    """The tokenizer and the chat template that the options name, else those of the model in ``folder``.

    They are read unless they are still in use, of unchanged files. With random weights a missing tokenizer is replaced
    by one that refuses text. With ``skip_tokenizer_init`` none is loaded, and output has no text.
    """
    check_architecture(folder, options.model_impl)
    if options.skip_tokenizer_init:
        return SkippedTokenizer(folder)
    template = read_chat_template(options.chat_template)
    if options.tokenizer is None and options.load_format == "dummy" and not has_tokenizer(folder):
        return NoTokenizer(folder)
    source = folder if options.tokenizer is None else resolve_tokenizer(options.tokenizer)
    key = template, *(_files_of(each) for each in (source, folder))
    tokenizer = _loaded.get(key)
    if tokenizer is None:
        tokenizer = _loaded[key] = _read_tokenizer(source, template, folder)
    return tokenizer


def _files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Paths, sizes and modification times of a folder's files that a tokenizer may depend on."""
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    facts = [(str(path), path.stat()) for path in sorted(paths) if path.is_file()]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in facts)


def _read_tokenizer(source: Path, template: str | None, folder: Path) -> Tokenizer:
    """The tokenizer of the folder ``source``, for the model in ``folder``."""
    tokenizer = load_tokenizer(source, template)
    settings = transformer_settings(folder)
    if settings is not None and settings.flag("do_lower_case"):
        # As sentence-transformers does if no normalizer makes texts lower case.
        normalizers, before = tokenizers.normalizers, tokenizer.backend.normalizer
        parts: list[Any] = [] if before is None else [before]
        if isinstance(before, normalizers.Sequence):
            parts = [before[index] for index in range(len(before))]
        if not any(isinstance(part, normalizers.Lowercase) for part in parts):
            tokenizer.backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])
    return tokenizer


def load_tokenizer(folder: Path, chat_template: str | None = None) -> Tokenizer:
    """Loads the tokenizer of a folder: tokenizer.json, else one built from the files of a known family.

    ``chat_template``: replaces all templates of the folder.

    Raises:
        TokenizerError: there is none, or a file cannot be read.
        UnsupportedModelError: there is no tokenizer.json, and the family of the other files is unknown.
    """
    backend, config = load_backend(folder)
    templates = load_chat_templates(folder, config) if chat_template is None else {"default": chat_template}
    source = load_source_backend(folder)
    return Tokenizer(backend, config, templates, None if source is None else Tokenizer(source, config, {}))


class NoTokenizer(Tokenizer):
    """Replaces a missing tokenizer: refuses text; the text of every token is empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        super().__init__(tokenizers.Tokenizer(tokenizers.models.BPE()), {}, {})

    def check_can_decode(self, has_stops: bool = False) -> None:
        raise self._refusal("output cannot be text: set detokenize=False")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise self._refusal("text cannot be made into tokens: give the prompt as token ids")

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        return self.encode(text)

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> tuple[list[int], int]:
        return self.encode(first), 0

    def encode_with_ends(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        return self.encode(text), []

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> NoReturn:
        raise self._refusal("a conversation cannot be made into tokens: give the prompt as token ids")

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the model has no tokenizer (its folder holds no tokenizer.json), so {what}, or name a folder with one in "
            "the option tokenizer"
        )

    def _find_anchor(self) -> list[int]:
        return []


class SkippedTokenizer(NoTokenizer):
    """The tokenizer of ``skip_tokenizer_init``: output is token ids with an empty text; text is refused."""

    def token_text(self, token_id: int) -> str:
        """``token_id:`` and the id, so that clients can read the ids among the logprobs."""
        return f"token_id:{token_id}"

    def check_can_decode(self, has_stops: bool = False) -> None:
        if has_stops:
            raise self._refusal("stop strings cannot be found: use stop_token_ids")

    def _refusal(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"no tokenizer is loaded (skip_tokenizer_init), so {what}, or load it")


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidRequestError(f"must be a text, not {type(text).__name__}", path="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InvalidRequestError(
            f"must be valid Unicode: character {e.start} is half of a surrogate pair ({text[e.start]!r})",
            path="prompt",
        ) from None
    return text


def _decoder_kind(backend: tokenizers.Tokenizer) -> str:
    """``byte_level`` (tokens are bytes), ``byte_fallback`` (some tokens are single bytes) or ``text``."""
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type", "none") for step in steps}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return "byte_level"
    if not kinds <= {"none", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}:
        raise TokenizerError(f"a tokenizer whose decoder has the steps {', '.join(sorted(kinds))} is not supported")
    return "byte_fallback" if "ByteFallback" in kinds else "text"


def bytes_of_level(token: str) -> bytes:
    """The bytes of a byte-level token; a token with a character outside the alphabet is its own text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def bytes_of_fallback(token: str) -> bytes | None:
    """The byte of a token such as ``<0x0A>``; None for others."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


class TextStream:
    """The text of a growing sequence of tokens, in constant time per token.

    Invariant: the results of ``push`` and of ``flush`` at the end are together ``Tokenizer.decode`` of the tokens,
    except that SentencePiece's space before the first word is kept if the prompt has text before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """Begins after ``prompt_token_ids``. ``visible_tokens``: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - visible_tokens if skip_special_tokens else frozenset[int]()
        # Keeps incomplete characters; invalid bytes become U+FFFD.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        context = list(prompt_token_ids[-_CONTEXT:])
        self._at_start = not context or not tokenizer.backend.decode(context, skip_special_tokens=skip_special_tokens)

    def push(self, token_id: int) -> str:
        """Returns the text that no later token can change: empty while a character is incomplete."""
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
        """Ends an incomplete character: returns one U+FFFD, or nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _first(self, token_id: int, data: bytes | None) -> str:
        """Handles the first token of a text, where decoders drop a space."""
        text: str = self._tokenizer.backend.decode([token_id], skip_special_tokens=False)
        if data is not None:
            self._at_start = False
            return self._utf8.decode(data) if text else ""
        self._at_start = not self._tokenizer.token_text(token_id)
        return text


class IncrementalDetokenizer:
    """The text of one output sequence, in time linear in its tokens and characters.

    Invariant: the results of ``take_text`` are together the text of the output. A stop string and what follows it in
    its token are not part of it, so text that may begin a stop string is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        visible_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """``visible_tokens``: special tokens that stay in the text even if others are skipped."""
        self._stream = TextStream(
            tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens, visible_tokens=visible_tokens
        )
        self._searches = [_StopSearch(text) for text in params.stop or ()]
        self._keep_stop = params.include_stop_str_in_output
        #: A stop string that is complete before this number of tokens is ordinary text.
        self._min_tokens = params.min_tokens
        self._pieces: list[str] = []
        self._finished = False
        #: Output tokens seen, without those after a stop string.
        self.num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> str | None:
        """Adds output tokens, up to the one that completes a stop string; returns that stop string."""
        for token_id in token_ids:
            if self._finished:
                break
            self.num_tokens += 1
            if match := self._add(self._stream.push(token_id)):
                return match
        return None

    def finish(self) -> str | None:
        """Ends the output: an incomplete character becomes U+FFFD, and nothing is held back."""
        match = None if self._finished else self._add(self._stream.flush())
        self._finished = True
        return match

    def take_text(self) -> str:
        """Returns the text since the last call that no later token can change; all of it at the end."""
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
        if not self._keep_stop:  # its characters were held back
            self._pieces = ["".join(self._pieces)[: -len(stop)]]
        self._finished = True
        return stop

    def _search(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first in the piece, the longest of several, and its end in the piece."""
        counts = self.num_tokens >= self._min_tokens
        best: tuple[str, int] | None = None
        for search in self._searches:
            end = search.feed(piece, counts)
            if end and (best is None or (end, -len(search.text)) < (best[1], -len(best[0]))):
                best = search.text, end
        return best


class _StopSearch:
    """Finds one text in a stream (Knuth, Morris & Pratt 1977) in amortised constant time per character."""

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
        """Returns the end of the first match in the piece, or 0; if not ``counts``, matches are ignored."""
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


class _Names(NamedTuple):
    """The names of a family's tokens. Without ``middle`` the order is suffix, prefix, middle (SPM)."""

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
#: Tokens that end a middle, beside the EOS token: the end of a middle or of a file, or the start of the next file.
_ENDS = (
    "▁<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>",
    "<|repo_name|>", "<repo_name>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    def arrange(self, prefix: list[int], suffix: list[int]) -> list[int]:
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle]


def find_fill_in_middle(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> FillInMiddle | None:
    """Finds the fill-in-the-middle tokens: those of ``fim_tokens`` in the model's files, else a known family's."""
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
    return InvalidRequestError(
        "is not supported by this model: its vocabulary has no tokens to fill gaps with",
        path="suffix",
        kind="unsupported_parameter",
    )
