"""What stands before engine cores: prompts become requests of a core, and what it gives becomes text."""

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
from octavo.core.errors import ConfigError, InvalidRequestError, WorkerError
from octavo.core.outputs import PoolingParams, RequestOutput
from octavo.core.request import DEFAULT_OPTIONS, AdapterRef, LoRARequest, Prompt, RequestOptions, SequenceStatus
from octavo.core.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.core.stats import MAX_ADAPTER_NAMES, MAX_ID_LENGTH, MAX_REQUEST_IDS, EngineView, SpeculationStats, StepStats
from octavo.engine.adapters import make_registry
from octavo.engine.encoder_prompts import PromptFeatures, take_images
from octavo.engine.input_processor import InputProcessor
from octavo.engine.messages import check_sendable
from octavo.engine.model_files import ModelFiles
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.pooling_inputs import PoolingInputs
from octavo.process.children import finish_in_thread

if TYPE_CHECKING:
    from octavo.engine.transcription import SpeechRequests


# Shared prefixes (Kwon et al. 2023, section 4.4): beginnings of prompts, computed once and pinned in the KV cache.


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


#: What a request asks for.
Params = SamplingParams | BeamSearchParams | PoolingParams
#: Keys of prompts that may have sound.
_SOUND = ("encoder_input", "encoder_prompt", "multi_modal_data")
#: Texts of this many characters take some 10 ms to tokenize, and are tokenized in a thread.
LONG_TEXT = 8192


class FrontEnd:
    """Owns the open requests of an engine, and all that they need outside of its cores. For one thread.

    Invariant: an adapter that a request names is in use from ``add`` until the request has ended, in whichever way.
    """

    def __init__(self, files: ModelFiles, max_model_len: int, *, sends: bool) -> None:
        """``max_model_len``: the longest sequence that a core can hold, in tokens, prompt and output together.

        ``sends``: requests go to another process, so that code cannot be part of them.
        """
        self.files = files
        self._sends = sends
        self.tokenizer = files.tokenizer
        self.inputs = InputProcessor(files, max_model_len)
        #: The adapters that requests may name.
        self.adapters = make_registry(files.options, files.model_config)
        self.pooling = PoolingInputs(files, self.inputs)
        self.outputs = OutputProcessor(files.tokenizer, self.adapters.end)
        self.prefixes = SharedPrefixes(files.options, self.inputs)
        #: By name: held while an adapter is read.
        self._adapter_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @cached_property
    def speech(self) -> SpeechRequests:
        """What the model's files say of speech.

        Raises:
            InvalidRequestError: the model does not read sound.
            ConfigError: its files do not say what its tokens mean.
        """
        from octavo.engine.transcription import SpeechRequests

        return SpeechRequests(self.files)

    async def prepare(
        self, prompt: Prompt, params: Params | None, options: RequestOptions
    ) -> tuple[Prompt, RequestOptions, AdapterRef | None]:
        """What ``add`` takes, after all that takes long, so that it does not: done in threads and in the sandbox.

        Long texts are tokenized, images and the adapter are read, if they are not yet, and the grammar of structured
        output is compiled.

        Raises:
            InvalidRequestError: the prompt is no text, an image is none, or there can be no such grammar.
            ClientLimitError: the client has used up the seconds that it may have for compiling (``Sandbox``).
            AdapterError: the adapter cannot be used.
        """
        prompt = await self._read_images(await self.tokenize(prompt, params))
        if isinstance(options.prediction, str) and len(options.prediction) >= LONG_TEXT:
            [ids] = await asyncio.to_thread(self.tokenizer.encode_batch, [options.prediction], False)
            options = msgspec.structs.replace(options, prediction=ids)
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            params.validate()  # fields may have been assigned
            await self.inputs.grammars.compile_for(options.client, params.structured_outputs)
        named = options.lora_request
        return prompt, options, None if named is None else await self._find_adapter(named)

    async def tokenize(self, prompt: Prompt, params: Params | None = None) -> Prompt:
        """The prompt, to which token ids are added if it is a long text; that is done in a thread."""
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

    async def _read_images(self, prompt: Prompt) -> Prompt:
        """The prompt with its images as the model sees them; they are made in a thread, and files in the sandbox."""
        if self.inputs.image_prompts is None:
            return prompt
        rest, images = take_images(prompt)
        if not images or isinstance(images, PromptFeatures):
            return prompt
        return {**rest, "multi_modal_data": {"image": await finish_in_thread(self.inputs.image_prompts.read, images)}}

    async def _find_adapter(self, request: LoRARequest) -> AdapterRef:
        """The adapter that a request names, read in a thread if it is not loaded; one read serves all that wait."""
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
        """Begins a request, which goes to a core now; without ``params`` it has the model's defaults.

        ``adapter``: what ``options`` name. ``kind``: see ``OutputProcessor.open``.

        Raises:
            InvalidRequestError: its id is in use, or as ``InputProcessor.process``; nothing is changed.
        """
        if request_id in self.outputs:
            raise InvalidRequestError(f"request id {request_id!r} is in use by an unfinished request")
        request: RequestState
        if isinstance(params, PoolingParams):
            request = self.pooling.process(request_id, prompt, params, options, adapter)
        else:
            # What is said of sound is the task of a model that hears, however it is asked.
            hears = isinstance(prompt, Mapping) and any(prompt.get(key) is not None for key in _SOUND)
            self.pooling.require("transcribe" if hears and "transcribe" in self.pooling.tasks else "generate")
            params = params if params is not None else self.inputs.default_params()
            request = self.inputs.process(request_id, prompt, params, options, adapter)
        if self._sends:
            check_sendable(request.group)
        if adapter is not None:
            self.adapters.begin(request.group.group_id, adapter)
        return self.outputs.open(request, kind)


# Where the statistics of an engine's steps go: a status line in the log, or loggers of a user's own.

logger = logging.getLogger("octavo")


class StatLogger(Protocol):
    """What follows an engine's work: ``LLM(model, stat_loggers=[...])`` calls ``log`` after every step.

    >>> class Progress:
    ...     def log(self, stats: StepStats) -> None:
    ...         print(stats.num_running, stats.decode_tokens / stats.seconds)
    """

    def log(self, stats: StepStats) -> None:
        """Takes the statistics of a step. The next step waits for it; an exception is logged and nothing else."""


def make_stat_loggers(options: EngineConfig, loggers: Iterable[StatLogger] = ()) -> list[StatLogger]:
    """These loggers, and the status line that the options ask for."""
    status = [StatusLine(options.log_stats_interval)] if options.log_stats_interval else []
    return [*loggers, *status]


def log_stats(loggers: Iterable[StatLogger], stats: StepStats) -> None:
    """Gives the statistics to each of the loggers."""
    for stat_logger in loggers:
        try:
            stat_logger.log(stats)
        except Exception:
            logger.exception("stat logger %s failed", type(stat_logger).__name__)


class StatusLine:
    """A ``StatLogger`` that sums over steps and logs a line at the first step after each interval, while busy.

    Rates are over the time since the last line, or since the engine became busy.
    """

    def __init__(self, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        """``interval`` in seconds; 0 logs nothing."""
        self._interval = interval
        self._clock = clock
        self._idle = True
        self._since = 0.0
        self._prefill = self._decode = 0
        #: At the last line, as ``_totals`` gives them.
        self._last = (0, 0, 0, 0, 0)

    def log(self, stats: StepStats) -> None:
        """Adds a step; microseconds unless a line is due."""
        if not self._interval:
            return
        now = self._clock()
        if self._idle:
            # The step itself began before now.
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
        return (
            f"{stats.num_running} running, {stats.num_waiting} waiting{swapped}; "
            f"prompts {self._prefill / seconds:.1f} tokens/s, output {self._decode / seconds:.1f} tokens/s; "
            f"KV cache {stats.kv_cache_usage:.1%} used; "
            f"prefix hits {f'{hits / queried:.1%}' if queried else '-'}"
            f"{'' if stats.speculation is None else f'; drafts accepted {share}'}"
        )


def _totals(stats: StepStats) -> tuple[int, int, int, int, int]:
    """Prompt tokens looked up in the prefix cache and found; drafts, their tokens, and those that were accepted."""
    drafts = stats.speculation or SpeculationStats()
    cache = stats.prefix_queried_tokens, stats.prefix_hit_tokens
    return *cache, drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens


# Names in a view: ids of requests and names of adapters, which the front end knows and engine cores do not.


def name_requests(view: EngineView, id_of_group: Callable[[int], str | None]) -> None:
    """Sets ``view.request_ids``: of the groups that the view mentions, those in its queues first.

    ``id_of_group``: the id of a group's request, None if it has ended.
    """
    ids = ((group_id, id_of_group(group_id)) for group_id in dict.fromkeys(_mentioned(view)))
    named = ((group_id, _bounded(request_id)) for group_id, request_id in ids if request_id is not None)
    view.request_ids = dict(itertools.islice(named, MAX_REQUEST_IDS))


def name_adapters(view: EngineView, names_of: Callable[[str], Sequence[str]]) -> None:
    """Sets the names of adapters in slots; ``names_of``: those of a content, by its digest."""
    for one in view.adapters:
        one.names = [_bounded(name) for name in names_of(one.key)[:MAX_ADAPTER_NAMES]]


def _mentioned(view: EngineView) -> Iterator[int]:
    yield from (row.group_id for row in view.groups)
    for shown in view.blocks:
        yield from (run.group_id for run in shown.runs)
    yield from (change.group_id for change in view.changes)
    for other in (*(row.preempted_for for row in view.groups), *(change.preempted_for for change in view.changes)):
        if other is not None:
            yield other


def _bounded(name: str) -> str:
    return name if len(name) <= MAX_ID_LENGTH else name[: MAX_ID_LENGTH - 1] + "…"
