"""From prompts and parameters to requests of the engine core: tokenize, check, resolve."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import InvalidRequestError
from octavo.core.request import Beam, EngineCoreRequest, Feature, Generate
from octavo.core.sampling_params import DefaultMaxTokens, SamplingParams
from octavo.engine.tokenizer import Tokenizer

#: One prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": token ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]

_MASK64 = (1 << 64) - 1
#: 2**64 / golden ratio: spreads consecutive numbers over all 64 bits (Knuth, TAOCP vol. 3, section 6.4).
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class ProcessedRequest:
    """A checked request: its text, the parameters as the user gave them, and what the core takes."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    group: EngineCoreRequest
    arrival_time: float


class InputProcessor:
    """Checks requests against one model. Owns the numbering of groups."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: tuple[int, ...], max_model_len: int, seed: int
    ) -> None:
        """``vocab_size`` is the network's; ``max_model_len`` in tokens, prompt and output together."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        #: Checked in C: a loop in Python takes 5 ms for 100,000 tokens, during which a server does nothing else.
        self._token_ids: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
        self._seed = seed
        self._next_group_id = 0
        self._unseeded = 0

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        features: Sequence[Feature] = (),
    ) -> ProcessedRequest:
        """Tokenizes and checks one request; nothing is changed if it is refused.

        Raises:
            InvalidRequestError: the prompt or a parameter cannot be served by this model.
        """
        arrival = time.monotonic()
        if not isinstance(params, (SamplingParams, BeamSearchParams)):
            raise InvalidRequestError(f"sampling_params must be SamplingParams or BeamSearchParams, not {params!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be an integer, not {priority!r}")
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be text, not {cache_salt!r}")
        if adapter is not None:
            raise InvalidRequestError(f"no adapter {adapter!r} is loaded; leave it out to run the model as it is")
        if features:
            raise InvalidRequestError(
                f"the model takes text alone, but the request has features (images or audio): {len(features)} of them"
            )
        text, token_ids = self.read_prompt(prompt)
        params.validate()  # a field may have been assigned after construction
        token_ids = self._check_prompt(token_ids, samples=params.max_tokens != 0)
        limit = self._max_tokens(params.max_tokens, len(token_ids))
        fitted = params if limit is params.max_tokens else msgspec.structs.replace(params, max_tokens=limit)
        group = EngineCoreRequest(
            group_id=self._next_group_id,
            prompt_token_ids=token_ids,
            task=self._beam(fitted) if isinstance(fitted, BeamSearchParams) else self._generate(fitted),
            arrival_time=arrival,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._next_group_id += 1
        return ProcessedRequest(request_id, text, token_ids, params, group, arrival)

    def _beam(self, params: BeamSearchParams) -> Beam:
        self.tokenizer.check_can_decode()
        self._unseeded += 1  # the seed of the next request does not depend on the task of this one
        return Beam(params, [] if params.ignore_eos else list(self.eos_token_ids))

    def _generate(self, params: SamplingParams) -> Generate:
        self._check_params(params)
        bad_words = [ids for word in params.bad_words or () for ids in self.tokenizer.bad_word_ids(word)]
        stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(self.eos_token_ids))
        seed = self._request_seed(params)
        if params.logprobs is None and params.num_sequences > params.n:
            params = msgspec.structs.replace(params, logprobs=0)  # the best are chosen by them
        return Generate(params, seed, sorted(stops), bad_words)

    def read_prompt(self, prompt: Prompt | Any) -> tuple[str | None, list[int]]:
        """The text (if it was one) and the token ids of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            keys = [k for k in ("prompt", "prompt_token_ids") if prompt.get(k) is not None]
            if len(keys) != 1:
                raise InvalidRequestError(
                    "a prompt given as a dictionary needs exactly one of 'prompt' (text) and 'prompt_token_ids'; "
                    f"this one has {sorted(map(str, prompt))}"
                )
            value = prompt[keys[0]]
            if isinstance(value, str) != (keys[0] == "prompt"):
                raise InvalidRequestError(f"{keys[0]!r} must not be {type(value).__name__}")
            prompt = value
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, (list, tuple)):
            return None, list(prompt)
        raise InvalidRequestError(f"a prompt must be text, a list of token ids or a dictionary, not {prompt!r}")

    def _check_prompt(self, token_ids: Sequence[int], *, samples: bool) -> list[int]:
        """The token ids, as plain integers, if they can be served, with a token after them if it ``samples``."""
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it must have at least one token")
        try:
            checked: list[int] = msgspec.convert(token_ids, self._token_ids)
        except (msgspec.ValidationError, ValueError):  # the latter of text that is no Unicode
            wrong = next(t for t in token_ids if type(t) is not int or not 0 <= t < self.vocab_size)
            raise InvalidRequestError(
                f"prompt token ids must be integers from 0 to {self.vocab_size - 1}, not {wrong!r}"
            ) from None
        if len(token_ids) + samples > self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, but prompt and output together may have at most "
                f"{self.max_model_len}: the model's max_model_len, or what the KV cache blocks hold if that is less"
            )
        return checked

    def _max_tokens(self, wanted: int | None, num_prompt_tokens: int) -> int | None:
        """``max_tokens`` if the context has room for it after the prompt; one that no caller named is cut to that."""
        room = self.max_model_len - num_prompt_tokens
        if isinstance(wanted, DefaultMaxTokens):
            return min(int(wanted), room)
        if wanted is not None and wanted > room:
            raise InvalidRequestError(
                f"max_tokens ({wanted}) does not fit: the prompt has {num_prompt_tokens} tokens, and prompt and output "
                f"together may have at most {self.max_model_len}; {room} or None would fit"
            )
        return wanted

    def _check_params(self, params: SamplingParams) -> None:
        if params.detokenize:
            self.tokenizer.check_can_decode()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token}, but the vocabulary ends at {self.vocab_size - 1}"
                    )

    def _request_seed(self, params: SamplingParams) -> int:
        """The request's own seed, or one drawn from the engine's seed and the number of such requests before."""
        if params.seed is not None:
            return params.seed & _MASK64
        self._unseeded += 1
        return ((self._seed << 32) ^ (self._unseeded * _SPREAD)) & _MASK64
