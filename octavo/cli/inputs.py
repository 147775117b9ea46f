"""Inputs of commands: prompts, texts and images from arguments, files or standard input; text for the terminal."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError, TokenizerError, did_you_mean
from octavo.core.files import JSON_ERRORS, numbered_lines, open_binary, open_parquet, require_pyarrow
from octavo.core.request import DEFAULT_OPTIONS, Prompt, RequestOptions, TokensPrompt, options_from_keywords
from octavo.core.sampling_params import BeamSearchParams, SamplingParams, defaults_beside

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.images.processors import ProcessedImage


# ---- rows of text: words of the command line, lines of a file, JSON lines, rows of a Parquet file

#: Keys of JSON lines and columns of Parquet files: the text, and its id.
TEXT_KEYS = ("text", "prompt", "input")
ID_KEYS = ("id", "_id", "custom_id")
#: Rows of a Parquet file to read at once.
_BATCH = 1024


class NotTextError(InvalidRequestError):
    """A line is not UTF-8 text."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a command's input."""

    index: int
    #: A text, an object with one, or the error that prevents the row.
    content: str | dict[str, Any] | InvalidRequestError
    #: As it stands in the file.
    line: str = ""


@dataclass(frozen=True, slots=True)
class TextRow:
    """One text, or the error that prevents it."""

    index: int
    #: Text or token ids; empty if there is an error.
    text: str | list[int] = ""
    #: The id in the file, None if it has none.
    id: Any = None
    error: str | None = None


class Rows:
    """Rows of a command's input. They are read as they are needed, so that a file can have any size."""

    def __init__(
        self,
        words: Sequence[str],
        file: str | None = None,
        keys: Sequence[str] = TEXT_KEYS,
        ids: Sequence[str] = ID_KEYS,
    ) -> None:
        """``file``: a path, ``-`` for standard input, or None. ``keys``, ``ids``: of an object's text, of its id."""
        self.words, self.file, self.keys, self.ids = words, file, keys, ids
        self._is_parquet = file is not None and file.endswith(".parquet")

    def check(self) -> None:
        """Refuses a file that cannot be read, before a model is loaded."""
        if self.file is None or self.file == "-":
            return
        if not Path(self.file).is_file():
            raise ConfigError(f"cannot read {self.file}: there is no such file")
        if self._is_parquet:
            require_pyarrow(self.file)

    def count(self) -> int | None:
        """The number of rows; None for standard input."""
        if self.file is None:
            return len(self.words)
        if self.file == "-":
            return None
        if self._is_parquet:
            with open_parquet(self.file) as source:
                return len(self.words) + int(source.metadata.num_rows)
        with open_binary(self.file) as stream:
            return len(self.words) + sum(1 for _ in numbered_lines(stream))

    def __iter__(self) -> Iterator[Row]:
        """The rows in order; an invalid one carries its error and does not affect the others."""
        yield from (Row(index, word) for index, word in enumerate(self.words))
        if self.file is not None:
            read = self._read_parquet if self._is_parquet else self._read_lines
            yield from read(self.file, len(self.words))

    def texts(self) -> Iterator[TextRow]:
        """The rows as texts or token ids."""
        for row in self:
            index, content = row.index, row.content
            if isinstance(content, str):
                yield TextRow(index, content)
            elif isinstance(content, InvalidRequestError):
                yield TextRow(index, error=str(content))
            else:
                name = next((content[key] for key in self.ids if content.get(key) is not None), None)
                present = [key for key in self.keys if key in content]
                keys = [key for key in present if content[key] is not None] or present
                if len(keys) != 1:
                    has = ", ".join(content) or "nothing"
                    error = f"the line needs one of {', '.join(self.keys)}, and has {has}"
                    yield TextRow(index, id=name, error=error)
                elif isinstance(value := content[keys[0]], str) or _are_token_ids(value):
                    yield TextRow(index, value, name)
                else:
                    error = f"{keys[0]} must be a text or a list of token ids, not {value!r}"[:200]
                    yield TextRow(index, id=name, error=error)

    def _read_lines(self, file: str, start: int) -> Iterator[Row]:
        with nullcontext(sys.stdin.buffer) if file == "-" else open_binary(file) as stream:
            lines = (line for _, line in numbered_lines(stream))
            first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
            is_json = file.endswith((".jsonl", ".ndjson"))
            if not is_json and not file.endswith(".txt"):
                content = _parse(first)
                is_json = isinstance(content, dict) and any(key in content for key in self.keys)
            for index, line in enumerate(chain([first] if first else [], lines), start):
                try:
                    text = line.decode().rstrip("\r\n")
                except UnicodeDecodeError as e:
                    yield Row(index, NotTextError(f"the line is not UTF-8 text: {e}"))
                else:
                    yield Row(index, _parse(line) if is_json else text, text)

    def _read_parquet(self, file: str, start: int) -> Iterator[Row]:
        with open_parquet(file) as source:
            columns = source.schema_arrow.names
            keys = [key for key in self.keys if key in columns]
            if len(keys) != 1:
                raise ConfigError(
                    f"{file} must have one of the columns {', '.join(self.keys)}, and has {', '.join(columns)}; "
                    "--column names another"
                )
            names = [keys[0], *[key for key in self.ids if key in columns][:1]]
            for batch in source.iter_batches(_BATCH, columns=names):
                yield from (Row(index, row) for index, row in enumerate(batch.to_pylist(), start))
                start += batch.num_rows


def open_rows(
    words: Sequence[str], file: str | None, keys: Sequence[str], ids: Sequence[str] = ID_KEYS, *, what: str, flag: str
) -> Rows:
    """The rows of words and the file of ``flag``; without both, standard input if it is piped."""
    if file is None and not words and not sys.stdin.isatty():
        file = "-"
    if file is None and not words:
        raise ConfigError(f"no {what} given: name some after the model, or use {flag} FILE or standard input")
    rows = Rows(words, file, keys, ids)
    rows.check()
    return rows


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(token, int) for token in value)


def _parse(line: bytes) -> str | dict[str, Any] | InvalidRequestError:
    """A JSON line."""
    try:
        content = msgspec.json.decode(line)
    except JSON_ERRORS as e:
        return InvalidRequestError(f"the line is not valid JSON: {e}")
    if isinstance(content, (str, dict)):
        return content
    shown = line[:80].decode(errors="replace").strip()
    return InvalidRequestError(f"the line must be a JSON object or a text, not {shown}")


# ---- prompts of ``octavo generate``

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "encoder_prompt", "messages")
_BEAM_KEYS = ("beam_width", "length_penalty", "early_stopping")
_SAMPLING_KEYS = tuple(name for name in SamplingParams.__struct_fields__ if name != "logits_processors")
#: Fields of ``RequestOptions`` that scheduling policies use.
_OPTION_KEYS = ("priority", "user", "ttft_target", "tpot_target")
_LINE_KEYS = (*_PROMPT_KEYS, "decoder_prompt", *_OPTION_KEYS, *_SAMPLING_KEYS, *_BEAM_KEYS)


@dataclass(slots=True)
class Job:
    """One prompt to complete, or the error that prevents it."""

    index: int
    #: Text, token ids, or an encoder-decoder model's pair of prompts; the whole line if it is invalid.
    prompt: str | list[int] | dict[str, Any]
    params: SamplingParams | BeamSearchParams
    #: A conversation for the chat template, in place of the prompt.
    messages: list[dict[str, Any]] | None = None
    error: str | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    #: Names of the parameters that its JSON line sets.
    own: frozenset[str] = frozenset()
    #: The engine's prompt, made by ``check``.
    tokenized: Prompt = field(default_factory=list)
    images: list[ProcessedImage] = field(default_factory=list)

    def check(self, inputs: InputProcessor) -> None:
        """Tokenizes and checks the prompt as the engine will; sets ``error`` if it cannot be served."""
        if self.error is not None:
            return
        try:
            prompt = self._as_prompt(inputs)
            if inputs.encoder_prompts is not None:
                prompt = cast("Prompt", inputs.encoder_prompts.split(prompt))
            token_ids = inputs.process(str(self.index), prompt, self.params, self.options).prompt_token_ids
            if isinstance(prompt, dict) and "multi_modal_data" in prompt:
                self.tokenized = cast("Prompt", prompt)
                return
            tokens: TokensPrompt = {"prompt_token_ids": token_ids}
            if isinstance(prompt, str) and self.messages is None:
                tokens["prompt"] = prompt
            self.tokenized = tokens if inputs.encoder_prompts is None else prompt
        except (InvalidRequestError, TokenizerError) as e:
            self.error = str(e)

    def _as_prompt(self, inputs: InputProcessor) -> Prompt:
        """The prompt with its images: at the placeholders of a text, else before the text."""
        from octavo.engine.image_prompts import chat_prompt

        parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in self.images]
        if self.messages is not None:
            messages = self.messages
            if parts:
                *before, last = messages
                text = last.get("content")
                if not isinstance(text, str):
                    raise InvalidRequestError("--image goes with texts: these messages have parts of their own")
                messages = [*before, {**last, "content": [*parts, {"type": "text", "text": text}]}]
            return chat_prompt(inputs, messages) if inputs.image_prompts else inputs.tokenizer.encode_chat(messages)
        if not parts or inputs.image_prompts is None:
            return self.prompt
        if not isinstance(self.prompt, str):
            raise InvalidRequestError("--image goes with texts, not with token ids")
        place = inputs.image_prompts.processor.placeholder
        text = self.prompt if place in self.prompt else place * len(parts) + self.prompt
        return {"prompt": text, "multi_modal_data": {"image": self.images}}

    def take_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Takes the model's defaults for the parameters that the JSON line does not set."""
        fields = defaults_beside(self.own, defaults)
        if fields and self.error is None and isinstance(self.params, SamplingParams):
            try:
                self.params = msgspec.structs.replace(self.params, **fields)
            except InvalidRequestError as e:
                self.error = str(e)


def read_jobs(
    words: list[str],
    file: str | None,
    sampling: Mapping[str, Any],
    *,
    as_chat: bool,
    options: RequestOptions = DEFAULT_OPTIONS,
) -> list[Job]:
    """All prompts in order; an invalid one carries its error and does not affect the others.

    Args:
        words: prompts from the command line.
        file: path of more prompts, ``-`` for standard input; without words and file, standard input if it is piped.
        sampling: parameters, those of a beam search if there is a ``beam_width``; a JSON line overrides them.
        as_chat: texts are questions of a conversation.
        options: a JSON line overrides them.
    """
    example = Job(0, "", _make_params(sampling), options=options)
    jobs = []
    for row in open_rows(words, file, _PROMPT_KEYS, ids=(), what="prompt", flag="--input"):
        if isinstance(row.content, NotTextError):
            raise ConfigError(f"cannot read prompts from {file}: {row.content}")
        if isinstance(row.content, str):
            jobs.append(_from_text(example, row.content, row.index, as_chat))
        else:
            jobs.append(_from_object(example, row, as_chat, sampling))
    if not jobs:
        raise ConfigError(f"no prompt given: {file or 'standard input'} is empty")
    return jobs


def _make_params(values: Mapping[str, Any]) -> SamplingParams | BeamSearchParams:
    beam_width, fields = values.get("beam_width"), BeamSearchParams.__struct_fields__
    for name in values:
        if beam_width is not None and name not in fields:
            raise InvalidRequestError(
                f"is not of beam search (beam_width {beam_width}): {', '.join(fields)}", path=name
            )
        if beam_width is None and not values.get("use_beam_search") and name in _BEAM_KEYS[1:]:
            raise InvalidRequestError("is of beam search only: give beam_width with it", path=name)
    if beam_width is not None:
        return BeamSearchParams(**values)
    return SamplingParams(**{name: value for name, value in values.items() if name != "beam_width"})


def _from_text(example: Job, text: str, index: int, as_chat: bool) -> Job:
    return replace(example, index=index, prompt=text, messages=[{"role": "user", "content": text}] if as_chat else None)


def _from_object(example: Job, row: Row, as_chat: bool, sampling: Mapping[str, Any]) -> Job:
    index = row.index
    try:
        key, value, fields = _split_object(row.content)
        options = options_from_keywords(
            "a line", {key: fields.pop(key) for key in _OPTION_KEYS if key in fields}, example.options
        )
        params = _make_params({**sampling, **fields}) if fields else example.params
        job = replace(example, index=index, prompt=value, params=params, options=options, own=frozenset(fields))
        if key == "prompt" and isinstance(value, str):
            return _from_text(job, value, index, as_chat)
        if key in ("prompt_token_ids", "encoder_prompt") and as_chat:
            raise InvalidRequestError("cannot pass through a chat template; leave out --chat", path=key)
        if key == "encoder_prompt":
            return replace(job, prompt=value)
        if key == "prompt" or not isinstance(value, list):
            raise InvalidRequestError(f"must be a {('text' if key == 'prompt' else 'list')}", path=key, got=value)
    except InvalidRequestError as e:
        return replace(example, index=index, prompt=row.line, error=str(e))
    return replace(job, prompt="", messages=value) if key == "messages" else job


def _split_object(content: Any) -> tuple[str, Any, dict[str, Any]]:
    """(key of the prompt, its value, sampling parameters and options) of an object."""
    if isinstance(content, InvalidRequestError):
        raise content
    for key in content:
        if key not in _LINE_KEYS:
            raise InvalidRequestError(f"unknown key {key!r}; {did_you_mean(key, _LINE_KEYS, cutoff=0.5)}")
    keys = [key for key in _PROMPT_KEYS if content.get(key) is not None]
    if len(keys) != 1:
        raise InvalidRequestError(f"the line needs exactly one of {', '.join(_PROMPT_KEYS)}, not {len(keys)}")
    decoder = content.pop("decoder_prompt", None)
    if decoder is not None and keys[0] != "encoder_prompt":
        raise InvalidRequestError("needs encoder_prompt beside it: what the encoder reads", path="decoder_prompt")
    value = content[keys[0]]
    if keys[0] == "encoder_prompt":
        value = {"encoder_prompt": value, "decoder_prompt": decoder}
    return keys[0], value, {k: v for k, v in content.items() if k not in _PROMPT_KEYS}


# ---- images


def check_image_files(paths: Sequence[str]) -> None:
    """Refuses missing files, and images if Pillow is not installed, before a model is downloaded."""
    if not paths:
        return
    for path in paths:
        try:
            Path(path).expanduser().open("rb").close()
        except OSError as e:
            raise ConfigError(f"the image {path} cannot be read: {e.strerror}") from None
    from octavo.images.image_files import pillow

    pillow()


def read_images(inputs: InputProcessor, paths: Sequence[str]) -> list[ProcessedImage]:
    """Reads image files and runs the model's image processor on them."""
    prompts = inputs.image_prompts
    if prompts is None and paths:
        raise ConfigError(f"the model reads text alone: leave out the image {paths[0]}")
    contents = []
    for path in paths:
        try:
            contents.append(Path(path).expanduser().read_bytes())
        except OSError as e:
            raise ConfigError(f"the image {path} cannot be read: {e.strerror}") from None
    if prompts is None or not contents:
        return []
    try:
        return prompts.read(contents, paths)
    except InvalidRequestError as e:
        raise ConfigError(str(e)) from None


# ---- text for the terminal

#: Replacements of characters that a terminal obeys or hides: C0 (but line feed and tab), DEL, C1, and characters that
#: change the direction of text or have no width, which can make a line look like another. Carriage returns are dropped.
_PRINTABLE: dict[int, int | str | None] = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x0D: None,
    0x7F: 0x2421,
    **{code: f"<U+{code:04X}>" for code in range(0x80, 0xA0)},
    **{code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)},
}


def printable(text: str) -> str:
    """The text with visible characters in place of those that a terminal obeys, as in ``␛[2J``."""
    return text.translate(_PRINTABLE)


def for_output(text: str) -> str:
    """The text for standard output: ``printable`` for a terminal, unchanged for a file or pipe."""
    return printable(text) if sys.stdout.isatty() else text


def notice(text: str) -> None:
    """Prints a message on standard error."""
    print(printable(text), file=sys.stderr)


def is_smart_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
