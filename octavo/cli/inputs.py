"""Inputs of commands: prompts, texts and images from arguments, files or standard input; text for the terminal."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError, TokenizerError, did_you_mean
from octavo.core.plugins import pip_install
from octavo.core.request import DEFAULT_OPTIONS, Prompt, RequestOptions, TokensPrompt, options_from_keywords
from octavo.core.sampling_params import BeamSearchParams, SamplingParams, defaults_beside

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.images.processors import ProcessedImage


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
    params = _make_params(sampling)
    if file is None and not words and not sys.stdin.isatty():
        file = "-"
    example = Job(0, "", params, options=options)
    jobs = [_from_text(example, word, index, as_chat) for index, word in enumerate(words)]
    if file is not None:
        lines = [line for line in _read_lines(file) if line.strip()]
        is_json = file.endswith((".jsonl", ".ndjson")) or _looks_like_json_lines(lines)
        for index, line in enumerate(lines, start=len(jobs)):
            if is_json:
                jobs.append(_from_json(example, line, index, as_chat, sampling))
            else:
                jobs.append(_from_text(example, line, index, as_chat))
    if not jobs:
        raise ConfigError("no prompt given: name some after the model, or use --input FILE or standard input")
    return jobs


def _read_lines(file: str) -> list[str]:
    try:
        if file == "-":
            return sys.stdin.buffer.read().decode("utf-8").splitlines()
        return Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read prompts from {file}: it is not UTF-8 text") from None
    except OSError as e:
        raise ConfigError(f"cannot read prompts from {file}: {e.strerror}") from None


def _looks_like_json_lines(lines: Iterable[str]) -> bool:
    try:
        first = json.loads(next(iter(lines), ""))
    except ValueError:
        return False
    return isinstance(first, dict) and any(key in first for key in _PROMPT_KEYS)


def _make_params(values: Mapping[str, Any]) -> SamplingParams | BeamSearchParams:
    beam_width, fields = values.get("beam_width"), BeamSearchParams.__struct_fields__
    for name in values:
        if beam_width is not None and name not in fields:
            raise InvalidRequestError(f"{name} is not of beam search (beam_width {beam_width}): {', '.join(fields)}")
        if beam_width is None and name in _BEAM_KEYS[1:]:
            raise InvalidRequestError(f"{name} is of beam search only: give beam_width with it")
    if beam_width is not None:
        return BeamSearchParams(**values)
    return SamplingParams(**{name: value for name, value in values.items() if name != "beam_width"})


def _from_text(example: Job, text: str, index: int, as_chat: bool) -> Job:
    return replace(example, index=index, prompt=text, messages=[{"role": "user", "content": text}] if as_chat else None)


def _from_json(example: Job, line: str, index: int, as_chat: bool, sampling: Mapping[str, Any]) -> Job:
    try:
        key, value, fields = _parse_line(line)
        options = options_from_keywords(
            "a line", {key: fields.pop(key) for key in _OPTION_KEYS if key in fields}, example.options
        )
        params = _make_params({**sampling, **fields}) if fields else example.params
        job = replace(example, index=index, prompt=value, params=params, options=options, own=frozenset(fields))
        if key == "prompt" and isinstance(value, str):
            return _from_text(job, value, index, as_chat)
        if key in ("prompt_token_ids", "encoder_prompt") and as_chat:
            raise InvalidRequestError(f"{key} cannot pass through a chat template; leave out --chat")
        if key == "encoder_prompt":
            return replace(job, prompt=value)
        if key == "prompt" or not isinstance(value, list):
            raise InvalidRequestError(f"{key} must be a {'text' if key == 'prompt' else 'list'}, not {value!r}")
    except InvalidRequestError as e:
        return replace(example, index=index, prompt=line, error=str(e))
    return replace(job, prompt="", messages=value) if key == "messages" else job


def _parse_line(line: str) -> tuple[str, Any, dict[str, Any]]:
    """(key of the prompt, its value, sampling parameters and options) of a JSON line."""
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as e:
        raise InvalidRequestError(f"the line is not valid JSON: {e}") from None
    if not isinstance(content, dict):
        raise InvalidRequestError(f"the line must be a JSON object, not {line[:80]!r}")
    for key in content:
        if key not in _LINE_KEYS:
            raise InvalidRequestError(f"unknown key {key!r}; {did_you_mean(key, _LINE_KEYS, cutoff=0.5)}")
    keys = [key for key in _PROMPT_KEYS if content.get(key) is not None]
    if len(keys) != 1:
        raise InvalidRequestError(f"the line needs exactly one of {', '.join(_PROMPT_KEYS)}, not {len(keys)}")
    decoder = content.pop("decoder_prompt", None)
    if decoder is not None and keys[0] != "encoder_prompt":
        raise InvalidRequestError("decoder_prompt needs encoder_prompt beside it: what the encoder reads")
    value = content[keys[0]]
    if keys[0] == "encoder_prompt":
        value = {"encoder_prompt": value, "decoder_prompt": decoder}
    return keys[0], value, {k: v for k, v in content.items() if k not in _PROMPT_KEYS}


# ---- texts of ``octavo embed`` and ``octavo rerank``

#: Keys of JSON lines and columns of Parquet files: the text, and its id.
TEXT_KEYS = ("text", "prompt", "input")
ID_KEYS = ("id", "_id", "custom_id")
#: Rows of a Parquet file to read at once.
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class TextRow:
    """One text, or the error that prevents it."""

    index: int
    #: Text or token ids; empty if there is an error.
    text: str | list[int] = ""
    #: The id in the file, None if it has none.
    id: Any = None
    error: str | None = None


@dataclass
class TextSource:
    """Texts of a command. They are read as they are needed, so that a file can have any size."""

    words: list[str]
    #: A path, ``-`` for standard input, or None.
    file: str | None = None
    #: The key or column of the text; None: one of ``TEXT_KEYS``.
    column: str | None = None

    def check(self) -> None:
        """Refuses a file that cannot be read, before a model is loaded."""
        if self.file is None or self.file == "-":
            return
        if not Path(self.file).is_file():
            raise ConfigError(f"cannot read texts from {self.file}: there is no such file")
        if self._is_parquet:
            require_pyarrow(self.file)

    def count(self) -> int | None:
        """The number of texts; None for standard input."""
        if self.file == "-":
            return None
        if self.file is None:
            return len(self.words)
        if self._is_parquet:
            with _parquet(self.file) as source:
                return len(self.words) + int(source.metadata.num_rows)
        with _opened(self.file) as stream:
            return len(self.words) + sum(1 for line in stream if line.strip())

    def __iter__(self) -> Iterator[TextRow]:
        """The texts in order; an invalid one carries its error and does not affect the others."""
        yield from (TextRow(index, word) for index, word in enumerate(self.words))
        if self.file is not None:
            read = self._read_parquet if self._is_parquet else self._read_lines
            yield from read(self.file, len(self.words))

    def __post_init__(self) -> None:
        self._is_parquet = self.file is not None and self.file.endswith(".parquet")
        self._keys = TEXT_KEYS if self.column is None else (self.column,)

    def _read_lines(self, file: str, start: int) -> Iterator[TextRow]:
        with _opened(file) as stream:
            lines = (line for line in stream if line.strip())
            first = next(lines, None)
            if first is None:
                return
            first = first.removeprefix(codecs.BOM_UTF8)
            is_json = file.endswith((".jsonl", ".ndjson")) or (not file.endswith(".txt") and _is_object(first))
            for index, line in enumerate(chain([first], lines), start):
                yield self._from_json(index, line) if is_json else _from_line(index, line)

    def _from_json(self, index: int, line: bytes) -> TextRow:
        try:
            content = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            return TextRow(index, error=f"the line is not valid JSON: {e}")
        if isinstance(content, str):
            return TextRow(index, content)
        if not isinstance(content, dict):
            shown = line[:80].decode(errors="replace").strip()
            return TextRow(index, error=f"the line must be a JSON object or a text, not {shown}")
        name = next((content[key] for key in ID_KEYS if content.get(key) is not None), None)
        keys = [key for key in self._keys if content.get(key) is not None]
        if len(keys) != 1:
            has = ", ".join(content) or "nothing"
            return TextRow(index, id=name, error=f"the line needs one of {', '.join(self._keys)}, and has {has}")
        return _checked(index, keys[0], content[keys[0]], name)

    def _read_parquet(self, file: str, start: int) -> Iterator[TextRow]:
        with _parquet(file) as source:
            columns = source.schema_arrow.names
            keys = [key for key in self._keys if key in columns]
            if len(keys) != 1:
                raise ConfigError(
                    f"{file} must have one of the columns {', '.join(self._keys)}, and has {', '.join(columns)}; "
                    "--column names another"
                )
            column, name = keys[0], next((key for key in ID_KEYS if key in columns), None)
            for batch in source.iter_batches(_BATCH, columns=[column, *([name] if name else [])]):
                texts = batch.column(column).to_pylist()
                names = batch.column(name).to_pylist() if name else [None] * len(texts)
                for index, (text, each) in enumerate(zip(texts, names, strict=True), start):
                    yield _checked(index, column, text, each)
                start += len(texts)


def require_pyarrow(file: str) -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"{file}: Parquet files need pyarrow ({e}): {pip_install('pyarrow')}") from None


def _checked(index: int, key: str, value: Any, name: Any) -> TextRow:
    """The row of a text or of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(i, int) for i in value)):
        return TextRow(index, value, name)
    return TextRow(index, id=name, error=f"{key} must be a text or a list of token ids, not {value!r}"[:200])


def _from_line(index: int, line: bytes) -> TextRow:
    try:
        return TextRow(index, line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as e:
        return TextRow(index, error=f"the line is not UTF-8 text: {e}")


def _is_object(line: bytes) -> bool:
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(content, dict) and any(key in content for key in TEXT_KEYS)


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(file).open("rb")  # noqa: SIM115  closed below, outside of this try
    except OSError as e:
        raise ConfigError(f"cannot read texts from {file}: {e.strerror}") from None
    with stream:
        yield stream


@contextmanager
def _parquet(file: str) -> Iterator[Any]:
    require_pyarrow(file)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as e:
        raise ConfigError(f"cannot read texts from {file}: it is no Parquet file: {e}") from None
    with source:
        yield source


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
