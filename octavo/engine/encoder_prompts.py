"""Prompts of encoder-decoder models: what the encoder reads, and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import EncoderFacts, ModelConfig
from octavo.core.request import EncoderInput, Feature, Prompt, PromptImage, SplitPrompt
from octavo.engine.tokenizer import Tokenizer

_EXPLICIT = ("encoder_prompt", "decoder_prompt")


class PlainPrompts(Protocol):
    """What reads each of the two parts: ``InputProcessor``."""

    tokenizer: Tokenizer

    def read_prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        """Its text, if there is one, and its token ids."""
        ...

    def prompt_ids(self, token_ids: Sequence[int], what: str = "prompt") -> list[int]:
        """Token ids as plain integers: at least one, and all of the vocabulary."""
        ...


class EncoderPrompts:
    """Reads the prompts of one model, whose forms are:

    - a text, token ids, or a dictionary with one of these: the encoder reads it, and the decoder begins as the model's
      do. Of a model that reads sound it is what the decoder begins with, and ``multi_modal_data`` has the sound;
    - ``{"encoder_prompt": ..., "decoder_prompt": ...}``, each in any of these forms, the second one perhaps None.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, inputs: PlainPrompts) -> None:
        facts, longest = config.encoder_facts, config.longest_input(max_model_len)
        assert facts is not None and longest is not None
        #: Positions of the longest input.
        self.longest = longest
        self.facts, self._inputs = facts, inputs

    def split(self, prompt: Prompt | Any) -> SplitPrompt:
        """A prompt in any of its forms; one that is split already comes back as it is.

        Raises:
            InvalidRequestError: it is none that the model can read.
        """
        if isinstance(prompt, Mapping) and isinstance(prompt.get("encoder_input"), EncoderInput):
            return prompt  # type: ignore[return-value]
        salt = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            prompt = {key: value for key, value in prompt.items() if key != "cache_salt" and value is not None}
            if "encoder_prompt" in prompt or "decoder_prompt" in prompt:
                split = self._explicit(prompt)
                return split if salt is None else {**split, "cache_salt": salt}
        if self.facts.takes_audio:
            data, rest = _take_data(prompt)
            split = self._split(None, data, rest)
        else:
            split = self._split(prompt, None, None)
        return split if salt is None else {**split, "cache_salt": salt}

    def _explicit(self, prompt: Mapping[str, Any]) -> SplitPrompt:
        if unknown := [key for key in prompt if key not in _EXPLICIT]:
            raise InvalidRequestError(
                f"a prompt with 'encoder_prompt' has 'decoder_prompt' and 'cache_salt' beside it, not {unknown[0]!r}"
            )
        if "encoder_prompt" not in prompt:
            raise InvalidRequestError("a prompt with 'decoder_prompt' needs 'encoder_prompt': what the encoder reads")
        encoder = prompt["encoder_prompt"]
        data = None
        if self.facts.takes_audio:
            data, rest = _take_data(encoder)
            if rest not in (None, "", []):
                raise InvalidRequestError(f"the encoder reads sound alone, not {rest!r} beside it")
        return self._split(encoder, data, prompt.get("decoder_prompt"))

    def _split(self, encoder: Any, data: Any, decoder: Any) -> SplitPrompt:
        text: str | None = None
        if self.facts.takes_audio:
            given = audio_input(data, self.facts)
        else:
            text, ids = self._inputs.read_prompt(encoder)
            given = self._text_input(ids)
        split = self._decoder_prompt(decoder)
        split["encoder_input"], split["encoder_prompt"] = given, text
        return split

    def _text_input(self, ids: Sequence[int]) -> EncoderInput:
        checked = self._inputs.prompt_ids(ids, "encoder's prompt")
        if len(checked) > self.longest:
            raise InvalidRequestError(
                f"the encoder's prompt has {len(checked)} tokens, but may have at most {self.longest}: the model's "
                "positions, or max_model_len where it has no limit of its own"
            )
        return EncoderInput.of_tokens(checked)

    def _decoder_prompt(self, prompt: Any) -> SplitPrompt:
        """The decoder's beginning: every prompt of it begins with the start token, which is added if it is not there.

        A text is read without the special tokens that a tokenizer adds.
        """
        start, forced = self.facts.decoder_start_ids, self.facts.forced_ids
        if prompt is None or prompt in ("", [], ()):
            return SplitPrompt(prompt_token_ids=[*start, *forced], num_forced=len(forced))
        text: str | None = None
        if isinstance(prompt, str):
            text, ids = prompt, self._inputs.tokenizer.encode(prompt, add_special_tokens=False)
        elif isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
            text, _ = self._inputs.read_prompt({**prompt, "prompt_token_ids": [0]})
            if text is None:
                raise InvalidRequestError("a decoder prompt needs 'prompt' (text) or 'prompt_token_ids'")
            ids = self._inputs.tokenizer.encode(text, add_special_tokens=False)
        else:
            text, ids = self._inputs.read_prompt(prompt)
        ids = self._inputs.prompt_ids(ids, "decoder's prompt")
        if ids[:1] != [*start[:1]]:
            ids = [*start[:1], *ids]
        split = SplitPrompt(prompt_token_ids=ids, num_forced=0)
        if text is not None:
            split["prompt"] = text
        return split


def audio_input(data: Any, facts: EncoderFacts) -> EncoderInput:
    """The input that sound is: samples float32 [n], mono, at the model's rate, alone or as (samples, rate).

    Raises:
        InvalidRequestError: it is no such thing, has no samples or too many.
    """
    samples, rate = data if isinstance(data, tuple) and len(data) == 2 else (data, facts.audio_rate)
    if data is None:
        raise InvalidRequestError('the model reads sound: give it as {"multi_modal_data": {"audio": (samples, rate)}}')
    if rate != facts.audio_rate:
        raise InvalidRequestError(f"sound must have {facts.audio_rate} samples a second, not {rate!r}")
    import numpy as np

    values = np.asarray(samples)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.floating):
        raise InvalidRequestError(f"sound must be float32 [samples] of one channel, not {values.dtype} {values.shape}")
    if not 0 < len(values) <= facts.audio_samples:
        raise InvalidRequestError(f"sound must have 1 to {facts.audio_samples} samples, not {len(values)}")
    return EncoderInput.of_audio(values, facts.audio_tokens)


def _take_data(prompt: Any) -> tuple[Any, Any]:
    """The sound of a prompt, and what is left of it; None each where there is none."""
    if not isinstance(prompt, Mapping):
        return None, prompt
    data = prompt.get("multi_modal_data")
    if data is not None and (not isinstance(data, Mapping) or set(data) != {"audio"}):
        raise InvalidRequestError(f"multi_modal_data must be a dictionary with 'audio' alone, not {data!r:.200}")
    rest = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
    if set(rest) == {"prompt"}:
        return data and data["audio"], rest["prompt"]
    return (None if data is None else data["audio"]), rest or None


# What prompts have of images, for models that see and for those that do not: without what reads them.


@dataclass
class PromptFeatures:
    """A prompt's images, each once, and the tokens that stand for their features, in the order of their offsets."""

    images: list[PromptImage] = field(default_factory=list)
    features: list[Feature] = field(default_factory=list)

    def moved(self, tokens: int) -> list[Feature]:
        """The features where so many tokens come before the prompt."""
        if not tokens:
            return self.features
        return [
            Feature(f.offset + tokens, f.length, f.key, f.image, f.first, f.is_whole, f.grid) for f in self.features
        ]


#: Of a prompt without images.
NO_FEATURES = PromptFeatures()


def take_images(prompt: Any) -> tuple[Any, list[Any] | PromptFeatures]:
    """A prompt without its images, and these; or what ``ImagePrompts.expand`` has made of them already.

    Raises:
        InvalidRequestError: ``multi_modal_data`` has something else.
    """
    if not isinstance(prompt, Mapping) or prompt.get("multi_modal_data") is None:
        return prompt, []
    data = prompt["multi_modal_data"]
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        kinds = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InvalidRequestError(f"multi_modal_data must be a dictionary with 'image' alone, not {kinds}")
    given = data.get("image")
    if isinstance(given, PromptFeatures):
        return {key: value for key, value in prompt.items() if key != "multi_modal_data"}, given
    images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    return {key: value for key, value in prompt.items() if key != "multi_modal_data"}, images


def takes_images(config: ModelConfig, options: EngineConfig) -> bool:
    """Whether prompts may have images."""
    limit = (options.limit_mm_per_prompt or {}).get("image")
    return config.image_facts is not None and limit != 0
