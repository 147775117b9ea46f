"""Prompts of ``octavo generate``: from arguments, a file of texts or JSON lines, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import ConfigError, InvalidRequestError, TokenizerError
from octavo.core.near_names import did_you_mean
from octavo.core.prompts import Prompt, TokensPrompt
from octavo.core.request_options import DEFAULT_OPTIONS, RequestOptions, options_from_keywords
from octavo.core.sampling_params import SamplingParams, defaults_beside

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor
    from octavo.images.processor import ProcessedImage

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
        from octavo.engine.chat_images import chat_prompt

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

    Raises:
        ConfigError: there is no prompt, or the file cannot be read.
        InvalidRequestError: ``sampling`` itself is out of range.
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
