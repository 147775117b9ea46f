"""The front end of an engine: turns prompts into requests of its cores, and their outputs into text."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from octavo.config.engine_config import EngineConfig
from octavo.core.cache_hints import CacheHints
from octavo.core.errors import ConfigError, InvalidRequestError, WorkerError
from octavo.core.outputs import PoolingParams, RequestOutput
from octavo.core.request import DEFAULT_OPTIONS, AdapterRef, LoRARequest, Prompt, RequestOptions, SequenceStatus
from octavo.core.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.core.stats import MAX_ADAPTER_NAMES, MAX_ID_LENGTH, MAX_REQUEST_IDS, EngineView, SpeculationStats, StepStats
from octavo.engine.adapters import make_registry
from octavo.engine.image_prompts import PromptFeatures, take_images
from octavo.engine.input_processor import InputProcessor, PoolingInputs
from octavo.engine.messages import check_sendable
from octavo.engine.model_files import ModelFiles
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.process.children import finish_in_thread

if TYPE_CHECKING:
    from octavo.engine.transcription import SpeechRequests

logger = logging.getLogger("octavo")
Params = SamplingParams | BeamSearchParams | PoolingParams
_AUDIO_KEYS = ("encoder_input", "encoder_prompt", "multi_modal_data")
#: Texts of this many characters take some 10 ms to tokenize, and are tokenized in a thread.
LONG_TEXT = 8192


class FrontEnd:
    """The open requests of an engine, and everything about them outside of its cores. For one thread.

    Invariant: the adapter of a request counts as used from ``add`` until the request ends, however it ends.
    """

    def __init__(self, files: ModelFiles, max_model_len: int, *, crosses_process: bool) -> None:
        """``max_model_len``: the longest sequence in tokens; ``crosses_process``: requests go to another process."""
        self.files = files
        self._crosses_process = crosses_process
        self.tokenizer = files.tokenizer
        self.inputs = InputProcessor(files, max_model_len)
        self.adapters = make_registry(files.options, files.model_config)
        self.pooling = PoolingInputs(files, self.inputs)
        self.outputs = OutputProcessor(files.tokenizer, self.adapters.end)
        self.prefixes = SharedPrefixes(files.options, self.inputs)
        #: By name; held while an adapter is read.
        self._adapter_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @cached_property
    def speech(self) -> SpeechRequests:
        from octavo.engine.transcription import SpeechRequests

        return SpeechRequests(self.files)

    async def prepare(
        self, prompt: Prompt, params: Params | None, options: RequestOptions
    ) -> tuple[Prompt, RequestOptions, AdapterRef | None]:
        """Does the slow work of ``add``, in threads and in the sandbox; returns its arguments.

        Tokenizes long texts, reads images and the adapter, and compiles the grammar of structured output.

        Raises:
            InvalidRequestError: the prompt, an image or the grammar is invalid.
            ClientLimitError: the client has used up its seconds for compiling (``Sandbox``).
            AdapterError: the adapter cannot be used.
        """
        prompt = await self.tokenize(prompt, params)
        if self.inputs.image_prompts is not None:
            rest, images = take_images(prompt)
            if images and not isinstance(images, PromptFeatures):
                processed = await finish_in_thread(self.inputs.image_prompts.read, images)
                prompt = {**rest, "multi_modal_data": {"image": processed}}
        if isinstance(options.prediction, str) and len(options.prediction) >= LONG_TEXT:
            [ids] = await asyncio.to_thread(self.tokenizer.encode_batch, [options.prediction], False)
            options = msgspec.structs.replace(options, prediction=ids)
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            params.validate()  # fields may have been assigned
            await self.inputs.grammars.compile_for(options.client, params.structured_outputs)
        lora_request = options.lora_request
        return prompt, options, None if lora_request is None else await self._find_adapter(lora_request)

    async def tokenize(self, prompt: Prompt, params: Params | None = None) -> Prompt:
        """Adds token ids to a prompt with a long text, in a thread."""
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        if "encoder_prompt" in fields and "encoder_input" not in fields:
            return {**fields, "encoder_prompt": await self.tokenize(fields["encoder_prompt"])}
        text = fields.get("prompt")
        if not isinstance(text, str) or len(text) < LONG_TEXT or fields.get("prompt_token_ids") is not None:
            return prompt
        if isinstance(params, PoolingParams):
            return await asyncio.to_thread(self.pooling.tokenize, prompt, params)
        # Unlike ``encode``, this lets other threads run.
        [ids] = await asyncio.to_thread(self.tokenizer.encode_batch, [text])
        return {**fields, "prompt_token_ids": ids}

    async def _find_adapter(self, request: LoRARequest) -> AdapterRef:
        """Finds the adapter, or reads it in a thread, once for all requests that wait for it."""
        ref = self.adapters.find(request)
        if ref is None:
            async with self._adapter_locks.setdefault(request.lora_name, asyncio.Lock()):
                if (ref := self.adapters.find(request)) is None:
                    self.adapters.add(request, await asyncio.to_thread(self.adapters.read, request))
                    return self.adapters.load(request)
        return ref

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None,
        options: RequestOptions,
        adapter: AdapterRef | None,
        kind: RequestOutputKind,
    ) -> RequestState:
        """Registers a request, which the caller then sends to a core; without ``params`` it gets the model's defaults.

        Raises:
            InvalidRequestError: the request is invalid, or its id is in use; nothing has changed.
        """
        if request_id in self.outputs:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use by an unfinished request", path="request_id"
            )
        request: RequestState
        if isinstance(params, PoolingParams):
            request = self.pooling.process(request_id, prompt, params, options, adapter)
        else:
            # A prompt with audio is a transcription if the model can do that.
            has_audio = isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in _AUDIO_KEYS)
            self.pooling.require("transcribe" if has_audio and "transcribe" in self.pooling.tasks else "generate")
            params = params if params is not None else self.inputs.default_params()
            request = self.inputs.process(request_id, prompt, params, options, adapter)
        if self._crosses_process:
            check_sendable(request.group)
        if adapter is not None:
            self.adapters.begin(request.group.group_id, adapter)
        return self.outputs.open(request, kind)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A pinned or held prefix: prompts that begin with its tokens reuse its KV cache blocks."""

    name: str
    token_ids: tuple[int, ...]
    #: KV cache blocks of these tokens; the last one may be partly filled.
    num_blocks: int
    #: Until when its blocks are held, in seconds of ``time.monotonic()``; None: they are pinned.
    expires: float | None = None


class SharedPrefixes:
    """Owns an engine's shared prefixes by name, even while the engine sleeps (Kwon et al. 2023, section 4.4).

    A prefix is computed as the prompt of a request that samples nothing; the core then pins its blocks, or holds them
    for a time: then running requests may take them (``memory.retention``).
    """

    def __init__(self, options: EngineConfig, inputs: InputProcessor) -> None:
        self._options = options
        self._inputs = inputs
        self._by_name: dict[str, SharedPrefix] = {}

    def __iter__(self) -> Iterator[SharedPrefix]:
        now = time.monotonic()
        for name in [name for name, one in self._by_name.items() if one.expires is not None and one.expires <= now]:
            del self._by_name[name]
        return iter(list(self._by_name.values()))

    def add(self, prompt: Prompt, name: str | None, ttl: float | None = None) -> SharedPrefix:
        """Checks a prefix and names it, by default ``prefix-1`` and so on; ``ttl``: seconds to hold it."""
        if not self._options.enable_prefix_caching:
            raise ConfigError("a shared prefix needs the prefix cache, but enable_prefix_caching is False")
        if name is None:
            name = next(n for n in (f"prefix-{i}" for i in range(1, len(self._by_name) + 2)) if n not in self._by_name)
        if name in self._by_name:
            raise ConfigError(f"there is a shared prefix {name!r} already; remove it first, or choose another name")
        tokens = self._process(name, prompt).prompt_token_ids
        count = -(-len(tokens) // self._options.block_size)
        expires = None if ttl is None else time.monotonic() + ttl
        prefix = self._by_name[name] = SharedPrefix(name, tuple(tokens), count, expires)
        return prefix

    def remove(self, name: str) -> None:
        if name not in self._by_name:
            raise ConfigError(f"there is no shared prefix {name!r}; known: {', '.join(self._by_name) or 'none'}")
        del self._by_name[name]

    def discard(self, prefix: SharedPrefix) -> None:
        """Removes a prefix that was not computed, unless its name was removed or replaced meanwhile."""
        if self._by_name.get(prefix.name) is prefix:
            del self._by_name[prefix.name]

    def request(self, prefix: SharedPrefix) -> RequestState:
        options = RequestOptions(pin_as=prefix.name)
        if prefix.expires is not None:
            left = max(prefix.expires - time.monotonic(), 0.001)
            options = RequestOptions(cache_hints=CacheHints(ttl=left, pin=prefix.name))
        return self._process(prefix.name, list(prefix.token_ids), options)

    def check(self, prefix: SharedPrefix, output: RequestOutput) -> None:
        """Removes a prefix whose request failed, and raises.

        Raises:
            ConfigError: it leaves too few blocks for a request of full length, or can never be computed.
            WorkerError: it was not computed.
        """
        reason, error = output.outputs[0].finish_reason, output.outputs[0].error
        if reason == SequenceStatus.FINISHED_LENGTH.value:
            size = self._options.block_size
            if prefix.expires is None or output.metrics.num_held_tokens >= len(prefix.token_ids) // size * size:
                return
            self.discard(prefix)
            raise ConfigError(
                f"the {prefix.num_blocks} blocks of prefix {prefix.name!r} and those that are held already are more "
                f"than cache_hold_share={self._options.cache_hold_share} of the KV cache: release others, raise it, or "
                "give the KV cache more memory"
            )
        self.discard(prefix)
        kind = ConfigError if reason == SequenceStatus.FINISHED_IGNORED.value else WorkerError
        raise kind(f"shared prefix {prefix.name!r} cannot be kept: {error or reason}")

    def _process(self, name: str, prompt: Prompt, options: RequestOptions = DEFAULT_OPTIONS) -> RequestState:
        # Its own seed, so that prefixes do not change the seeds of unseeded requests.
        params = SamplingParams(max_tokens=0, seed=0, detokenize=False)
        return self._inputs.process(request_id_of(name), prompt, params, options)


def request_id_of(name: str) -> str:
    return f"shared prefix {name}"


class StatLogger(Protocol):
    """What follows an engine's work: ``LLM(model, stat_loggers=[...])`` calls ``log`` after every step.

    >>> class Progress:
    ...     def log(self, stats: StepStats) -> None:
    ...         print(stats.num_running, stats.decode_tokens / stats.seconds)
    """

    def log(self, stats: StepStats) -> None:
        """Takes the statistics of a step. The next step waits for it; an exception is logged and nothing else."""


def make_stat_loggers(options: EngineConfig, loggers: Iterable[StatLogger] = ()) -> list[StatLogger]:
    status = [StatusLine(options.log_stats_interval)] if options.log_stats_interval else []
    return [*loggers, *status]


def log_stats(loggers: Iterable[StatLogger], stats: StepStats) -> None:
    for stat_logger in loggers:
        try:
            stat_logger.log(stats)
        except Exception:
            logger.exception("stat logger %s failed", type(stat_logger).__name__)


class StatusLine:
    """A ``StatLogger`` that logs a line of rates after each interval while the engine is busy."""

    def __init__(self, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``interval`` in seconds; 0 logs nothing."""
        self._interval = interval
        self._clock = clock
        self._idle = True
        self._since = 0.0
        self._prefill = self._decode = 0
        #: ``_totals`` at the last line.
        self._last = (0, 0, 0, 0, 0)

    def log(self, stats: StepStats) -> None:
        if not self._interval:
            return
        now = self._clock()
        if self._idle:
            self._since = now - stats.seconds
            self._prefill = self._decode = 0
        self._prefill += stats.prefill_tokens
        self._decode += stats.decode_tokens
        self._idle = not (stats.num_running or stats.num_waiting or stats.num_swapped)
        if now - self._since >= self._interval:
            logger.info("%s", self._line(stats, now - self._since))
            self._since = now
            self._prefill = self._decode = 0
            self._last = _totals(stats)

    def _line(self, stats: StepStats, seconds: float) -> str:
        since = [now - last for now, last in zip(_totals(stats), self._last, strict=True)]
        queried, hits, drafts, draft_tokens, accepted = since
        share = f"{accepted / draft_tokens:.1%}, {1 + accepted / drafts:.2f} tokens a draft" if drafts else "-"
        swapped = f", {stats.num_swapped} swapped" if stats.num_swapped else ""
        host = f", {stats.host_blocks_used} host blocks" if stats.host_blocks_used else ""
        return (
            f"{stats.num_running} running, {stats.num_waiting} waiting{swapped}; "
            f"prompts {self._prefill / seconds:.1f} tokens/s, output {self._decode / seconds:.1f} tokens/s; "
            f"KV cache {stats.kv_cache_usage:.1%} used{host}; "
            f"prefix hits {f'{hits / queried:.1%}' if queried else '-'}"
            f"{'' if stats.speculation is None else f'; drafts accepted {share}'}"
        )


def _totals(stats: StepStats) -> tuple[int, int, int, int, int]:
    """Prompt tokens queried and hit in the prefix cache; drafts, their tokens, and the accepted ones."""
    drafts = stats.speculation or SpeculationStats()
    cache = stats.prefix_queried_tokens, stats.prefix_hit_tokens
    return *cache, drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens


def name_requests(view: EngineView, id_of_group: Callable[[int], str | None]) -> None:
    """Sets ``view.request_ids`` for the groups in the view, those in its queues first.

    ``id_of_group``: returns the request id of a group, or None if it ended long ago.
    """
    ids = ((group_id, id_of_group(group_id)) for group_id in dict.fromkeys(_mentioned(view)))
    named = ((group_id, _bounded(request_id)) for group_id, request_id in ids if request_id is not None)
    view.request_ids = dict(itertools.islice(named, MAX_REQUEST_IDS))


def name_adapters(view: EngineView, names_of: Callable[[str], Sequence[str]]) -> None:
    for one in view.adapters:
        one.names = [_bounded(name) for name in names_of(one.key)[:MAX_ADAPTER_NAMES]]


def _mentioned(view: EngineView) -> Iterator[int]:
    yield from (row.group_id for row in view.groups)
    yield from (event.group_id for event in view.lives)
    for shown in view.blocks:
        yield from (run.group_id for run in shown.runs)
    yield from (change.group_id for change in view.changes)
    for other in (*(row.preempted_for for row in view.groups), *(change.preempted_for for change in view.changes)):
        if other is not None:
            yield other


def _bounded(name: str) -> str:
    return name if len(name) <= MAX_ID_LENGTH else name[: MAX_ID_LENGTH - 1] + "…"
