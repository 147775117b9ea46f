"""Shared prefixes (Kwon et al. 2023, section 4.4): beginnings of prompts, computed once and pinned in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, WorkerError
from octavo.core.outputs import RequestOutput
from octavo.core.prompts import Prompt
from octavo.core.request import SequenceStatus
from octavo.core.request_options import DEFAULT_OPTIONS, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.input_processor import InputProcessor
from octavo.engine.request_state import RequestState


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix whose KV cache blocks are pinned: a prompt that begins with its tokens does not compute them."""

    name: str
    token_ids: tuple[int, ...]
    #: KV cache blocks of these tokens; the last one may be partly filled.
    num_blocks: int


class SharedPrefixes:
    """Owns the prefixes of one engine, by name, also while it sleeps and their blocks are lost.

    A prefix is computed as the prompt of a request that samples nothing. The engine's core pins its blocks when they
    are computed.
    """

    def __init__(self, options: EngineConfig, inputs: InputProcessor) -> None:
        self._options = options
        self._inputs = inputs
        self._by_name: dict[str, SharedPrefix] = {}

    def __iter__(self) -> Iterator[SharedPrefix]:
        return iter(list(self._by_name.values()))

    def add(self, prompt: Prompt, name: str | None) -> SharedPrefix:
        """Checks a prefix and takes its name, by default ``prefix-1`` and so on.

        Raises:
            ConfigError: the prefix cache is off, or the name is in use.
            InvalidRequestError: it is no prompt, or longer than ``max_model_len``.
        """
        if not self._options.enable_prefix_caching:
            raise ConfigError("a shared prefix needs the prefix cache, but enable_prefix_caching is False")
        if name is None:
            name = next(n for n in (f"prefix-{i}" for i in range(1, len(self._by_name) + 2)) if n not in self._by_name)
        if name in self._by_name:
            raise ConfigError(f"there is a shared prefix {name!r} already; remove it first, or choose another name")
        tokens = self._process(name, prompt).prompt_token_ids
        count = -(-len(tokens) // self._options.block_size)
        prefix = self._by_name[name] = SharedPrefix(name, tuple(tokens), count)
        return prefix

    def remove(self, name: str) -> None:
        """Forgets a prefix.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self._by_name:
            raise ConfigError(f"there is no shared prefix {name!r}; known: {', '.join(self._by_name) or 'none'}")
        del self._by_name[name]

    def discard(self, prefix: SharedPrefix) -> None:
        """Forgets a prefix that was not computed; nothing happens if it was removed, or replaced, meanwhile."""
        if self._by_name.get(prefix.name) is prefix:
            del self._by_name[prefix.name]

    def request(self, prefix: SharedPrefix) -> RequestState:
        """The request that computes it and has it pinned."""
        return self._process(prefix.name, list(prefix.token_ids), RequestOptions(pin_as=prefix.name))

    def check(self, prefix: SharedPrefix, output: RequestOutput) -> None:
        """Forgets a prefix whose request has failed.

        Raises:
            ConfigError: it would leave too few blocks for a request of full length, or could never be computed.
            WorkerError: it was not computed.
        """
        reason, error = output.outputs[0].finish_reason, output.outputs[0].error
        if reason == SequenceStatus.FINISHED_LENGTH.value:
            return
        self.discard(prefix)
        kind = ConfigError if reason == SequenceStatus.FINISHED_IGNORED.value else WorkerError
        raise kind(f"shared prefix {prefix.name!r} cannot be kept: {error or reason}")

    def _process(self, name: str, prompt: Prompt, options: RequestOptions = DEFAULT_OPTIONS) -> RequestState:
        # With a seed of its own, the seeds of requests without one do not depend on the prefixes before them.
        params = SamplingParams(max_tokens=0, seed=0, detokenize=False)
        return self._inputs.process(request_id_of(name), prompt, params, options)


def request_id_of(name: str) -> str:
    """Id of the request that computes the prefix of this name."""
    return f"shared prefix {name}"
