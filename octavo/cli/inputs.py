"""Prompts of ``octavo generate``: from arguments, a file of texts or JSON lines, or standard input."""

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


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "encoder_prompt", "messages")
_BEAM_KEYS = ("beam_width", "length_penalty", "early_stopping")
_SAMPLING_KEYS = tuple(name for name in SamplingParams.__struct_fields__ if name != "logits_processors")
#: Of ``RequestOptions``: what scheduling policies look at.
_OPTION_KEYS = ("priority", "user", "ttft_target", "tpot_target")
_LINE_KEYS = (*_PROMPT_KEYS, "decoder_prompt", *_OPTION_KEYS, *_SAMPLING_KEYS, *_BEAM_KEYS)


@dataclass(slots=True)
class Job:
    """One prompt to complete, or the error that prevents it."""

    index: int
    #: Text or token ids, or both parts of the prompt of an encoder-decoder model; the line as given if it is invalid.
    prompt: str | list[int] | dict[str, Any]
    params: SamplingParams | BeamSearchParams
    #: A conversation in place of the prompt, for the chat template.
    messages: list[dict[str, Any]] | None = None
    error: str | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    #: Parameters of its own, from a JSON line.
    own: frozenset[str] = frozenset()
    #: As the engine takes it, once ``check`` has made its tokens.
    tokenized: Prompt = field(default_factory=list)
    #: Images beside a text.
    images: list[ProcessedImage] = field(default_factory=list)

    def check(self, inputs: InputProcessor) -> None:
        """Makes its tokens and checks it as the engine will; ``error`` is set if it cannot be served."""
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
            is_text = isinstance(prompt, str) and self.messages is None
            tokens: TokensPrompt = {"prompt_token_ids": token_ids}
            if is_text:
                tokens["prompt"] = str(prompt)
            self.tokenized = tokens if inputs.encoder_prompts is None else prompt
        except (InvalidRequestError, TokenizerError) as e:
            self.error = str(e)

    def _as_prompt(self, inputs: InputProcessor) -> Prompt:
        """What is asked, with the images in their places: in a chat, or in a text without places, before it."""
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

    @property
    def has_one_answer(self) -> bool:
        """Whether there is one completion, whose text may grow."""
        return isinstance(self.params, SamplingParams) and self.params.num_sequences == 1

    def take_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Takes the model's defaults for the parameters that it has not of its own."""
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
        sampling: parameters for all, with a ``beam_width`` those of a beam search; a JSON line may give its own.
        as_chat: texts are questions of a conversation.
        options: of all; a JSON line may give its own.
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
    """Whether the first line is an object with a prompt in it."""
    try:
        first = json.loads(next(iter(lines), ""))
    except ValueError:
        return False
    return isinstance(first, dict) and any(key in first for key in _PROMPT_KEYS)


def _make_params(values: Mapping[str, Any]) -> SamplingParams | BeamSearchParams:
    """Parameters of a beam search if there is a ``beam_width``, else of sampling."""
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
    """Key and value of the prompt, and the sampling parameters and options, of a JSON line."""
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


# Texts of ``octavo embed`` and ``octavo rerank``, one after the other: from arguments, a file or standard input.

#: Keys of a JSON line, and columns of a Parquet file, that hold the text, and what it is called.
TEXT_KEYS = ("text", "prompt", "input")
ID_KEYS = ("id", "_id", "custom_id")
#: Rows of a Parquet file that are read at once.
_BATCH = 1024


@dataclass(frozen=True, slots=True)
class TextRow:
    """One text, or the error that prevents it."""

    #: Its number among all, from 0 on.
    index: int
    #: Text or token ids; empty if there is an error.
    text: str | list[int] = ""
    #: What the file calls it; None: nothing.
    id: Any = None
    error: str | None = None


@dataclass(frozen=True)
class TextSource:
    """Where texts come from. They are read while they are needed, so that a file of any size can be."""

    words: list[str]
    #: A path, ``-`` for standard input, or None.
    file: str | None = None
    #: The key or column that holds the text; None: that of ``TEXT_KEYS`` that is there.
    column: str | None = None

    def check(self) -> None:
        """Refuses what cannot be read, before a model is loaded for it."""
        if self.file is None or self.file == "-":
            return
        if not Path(self.file).is_file():
            raise ConfigError(f"cannot read texts from {self.file}: there is no such file")
        if self._is_parquet:
            require_pyarrow(self.file)

    def count(self) -> int | None:
        """Texts in all; None where they come from standard input."""
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
        """The texts in order; one that is wrong carries its error and does not affect the others."""
        yield from (TextRow(index, word) for index, word in enumerate(self.words))
        if self.file is not None:
            read = self._read_parquet if self._is_parquet else self._read_lines
            yield from read(self.file, len(self.words))

    @property
    def _is_parquet(self) -> bool:
        return self.file is not None and self.file.endswith(".parquet")

    @property
    def _keys(self) -> tuple[str, ...]:
        return TEXT_KEYS if self.column is None else (self.column,)

    def _read_lines(self, file: str, start: int) -> Iterator[TextRow]:
        with _opened(file) as stream:
            lines = (line for line in stream if line.strip())
            first = next(lines, None)
            if first is None:
                return
            first = first.removeprefix(codecs.BOM_UTF8)
            is_json = file.endswith((".jsonl", ".ndjson")) or (not file.endswith(".txt") and _is_object(first))
            for index, line in enumerate(chain([first], lines), start):
                yield self._from_json(index, line) if is_json else _rows_from_text(index, line)

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
            there = source.schema_arrow.names
            keys = [key for key in self._keys if key in there]
            if len(keys) != 1:
                raise ConfigError(
                    f"{file} must have one of the columns {', '.join(self._keys)}, and has {', '.join(there)}; "
                    "--column names another"
                )
            column, name = keys[0], next((key for key in ID_KEYS if key in there), None)
            for batch in source.iter_batches(_BATCH, columns=[column, *([name] if name else [])]):
                texts = batch.column(column).to_pylist()
                names = batch.column(name).to_pylist() if name else [None] * len(texts)
                for index, (text, each) in enumerate(zip(texts, names, strict=True), start):
                    yield _checked(index, column, text, each)
                start += len(texts)


def require_pyarrow(file: str) -> None:
    """Refuses a Parquet file where pyarrow is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"{file}: Parquet files need pyarrow ({e}): {pip_install('pyarrow')}") from None


def _checked(index: int, key: str, value: Any, name: Any) -> TextRow:
    """The row of a text or of token ids."""
    if isinstance(value, str):
        return TextRow(index, value, name)
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        return TextRow(index, value, name)
    return TextRow(index, id=name, error=f"{key} must be a text or a list of token ids, not {value!r}"[:200])


def _rows_from_text(index: int, line: bytes) -> TextRow:
    try:
        return TextRow(index, line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as e:
        return TextRow(index, error=f"the line is not UTF-8 text: {e}")


def _is_object(line: bytes) -> bool:
    """Whether a line is a JSON object with a text in it."""
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


# Files of images that commands are given.


def check_image_files(paths: Sequence[str]) -> None:
    """Refuses files that are not there, and images where Pillow is not installed, before a model is fetched."""
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
    """What a model makes of files."""
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


# Text for a terminal, and what kind of one there is.

#: Characters that a terminal obeys or hides instead of showing them: C0 (but line feed and tab), DEL, C1, and those
#: that change the direction of text or have no width, with which a line can be made to look like another. What has a
#: picture in Unicode is shown as it; carriage returns are left out, as line feeds follow them.
_SHOWN: dict[int, int | str | None] = {
    **{code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)},
    0x0D: None,
    0x7F: 0x2421,
    **{code: f"<U+{code:04X}>" for code in range(0x80, 0xA0)},
    **{code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)},
}


def printable(text: str) -> str:
    """A text without characters that a terminal would obey: they are shown, as in ``␛[2J``, or left out."""
    return text.translate(_SHOWN)


def for_output(text: str) -> str:
    """What is written of a text to standard output: to a file or a pipe exactly it, to a terminal what is printable."""
    return printable(text) if sys.stdout.isatty() else text


def notice(text: str) -> None:
    """Says something that is no answer, on standard error."""
    print(printable(text), file=sys.stderr)


def is_smart_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
