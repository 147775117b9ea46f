"""Text to token ids and back, from the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers

from octavo.core.errors import InvalidRequestError, TokenizerError
from octavo.engine.chat_template import choose_template, load_chat_templates, render_chat
from octavo.engine.fill_in_middle import find_fill_in_middle, no_fill_in_middle
from octavo.engine.text_stream import TextStream, bytes_of_fallback, bytes_of_level
from octavo.engine.tokenizer_calls import Encoding, TokenizerCalls, encoding_of
from octavo.loader.tokenizer_backend import (
    complete_backend,
    load_backend,
    load_source_backend,
    named_tokens,
)


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
