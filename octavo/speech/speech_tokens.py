"""The special tokens of a Whisper model, and what its files say of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.json_values import MAX_TOKENIZER, read_object
from octavo.core.timestamp_rules import TimestampRules
from octavo.speech.languages import LANGUAGES, language_code

#: Seconds between two times that a model can say.
TIME_STEP = 0.02
_SPEC_TOKENS = {
    "end": "<|endoftext|>",
    "start": "<|startoftranscript|>",
    "translate": "<|translate|>",
    "transcribe": "<|transcribe|>",
    "previous": "<|startofprev|>",
    "no_times": "<|notimestamps|>",
}
#: Its name has changed.
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
#: The id of ``end`` of models that tell languages apart; in English ones it is another.
_MULTILINGUAL_END = 50257


@dataclass(frozen=True)
class SpeechTokens:
    """Ids of special tokens, and bounds."""

    end: int
    start: int
    translate: int
    transcribe: int
    previous: int
    no_speech: int
    no_times: int
    #: Longest prompt and answer in tokens.
    context: int
    #: By code; empty: the model is English.
    languages: dict[str, int] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    latest_first: int = 50
    #: (layer, head) whose cross attention follows the speech.
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def first_time(self) -> int:
        """The token of time 0."""
        return self.no_times + 1

    @property
    def most_tokens(self) -> int:
        """Most tokens of the answer to a window."""
        return self.context // 2

    def prompt(self, language: str | None, task: str, *, has_times: bool) -> list[int]:
        """The tokens that an answer begins after; ``language`` is a code."""
        tokens = [self.start]
        if self.languages:
            tokens += [self.languages[language or "en"], self.translate if task == "translate" else self.transcribe]
        return tokens if has_times else [*tokens, self.no_times]

    def rules(self, *, has_times: bool) -> TimestampRules:
        """What answers may look like."""
        never = {*self.suppress, self.start, self.translate, self.transcribe, self.previous, self.no_speech}
        never |= {self.no_times, *self.languages.values()}
        return TimestampRules(
            self.end, self.first_time, sorted(never), sorted(self.suppress_first), has_times, self.latest_first
        )

    def check_task(self, task: str) -> None:
        """Raises:
        InvalidRequestError: an English model cannot translate.
        """
        if task == "translate" and not self.languages:
            raise InvalidRequestError("task 'translate' needs a multilingual model: this one knows English alone")

    def check_language(self, language: str) -> str:
        """The code of a language that the model knows.

        Raises:
            InvalidRequestError: it is none, or another one than English of an English model.
        """
        code = language_code(language)
        if not self.languages and code != "en":
            raise InvalidRequestError(f"language must be 'en', not {language!r}: the model is English")
        if self.languages and code not in self.languages:
            raise InvalidRequestError(f"language {language!r} is none of the model's: {', '.join(self.languages)}")
        return code


def read_speech_tokens(folder: Path) -> SpeechTokens:
    """Of a model folder as transformers has it.

    Raises:
        ConfigError: a file is missing or not readable, or the tokenizer is not Whisper's.
    """
    ids = _special_ids(folder)
    missing = [name for name in _SPEC_TOKENS.values() if name not in ids]
    if missing:
        raise ConfigError(f"the tokenizer in {folder} is not Whisper's: it lacks the token {missing[0]}")
    config = read_object(folder / "config.json")
    file = folder / "generation_config.json"
    generation = read_object(file) if file.is_file() else config
    is_multilingual = generation.get("is_multilingual", ids[_SPEC_TOKENS["end"]] == _MULTILINGUAL_END)
    languages = {code: ids[f"<|{code}|>"] for code in LANGUAGES if f"<|{code}|>" in ids} if is_multilingual else {}
    heads = generation.get("alignment_heads") or ()
    return SpeechTokens(
        **{name: ids[token] for name, token in _SPEC_TOKENS.items()},
        no_speech=next((ids[name] for name in _NO_SPEECH if name in ids), ids["<|notimestamps|>"] - 1),
        context=int(config.get("max_target_positions", 448)),
        languages=languages,
        suppress=_ids(generation, "suppress_tokens"),
        suppress_first=_ids(generation, "begin_suppress_tokens"),
        latest_first=int(generation.get("max_initial_timestamp_index") or 50),
        alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
    )


def _ids(values: dict[str, Any], name: str) -> tuple[int, ...]:
    return tuple(int(token) for token in values.get(name) or () if int(token) >= 0)


def _special_ids(folder: Path) -> dict[str, int]:
    """Of tokenizer.json, or of added_tokens.json beside the files of a slow tokenizer."""
    if (folder / "tokenizer.json").is_file():
        added = read_object(folder / "tokenizer.json", most=MAX_TOKENIZER).get("added_tokens") or ()
        return {str(token["content"]): int(token["id"]) for token in added}
    return {str(name): int(token) for name, token in read_object(folder / "added_tokens.json").items()}
