"""vLLM's logits processors: classes that edit the logits of a batch, here of one request at a time."""

from __future__ import annotations

import enum
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.sampling_params import LogitsProcessor as RequestLogitsProcessor
from octavo.core.sampling_params import SamplingParams
from octavo.kernels import require_torch

S = TypeVar("S")


@dataclass(frozen=True)
class VllmConfig:
    """What a processor's constructor gets of the engine."""

    engine_config: EngineConfig
    model_config: Any
    #: Always None: nothing is shared with vLLM's schedulers.
    speculative_config: None = None


class MoveDirectionality(enum.Enum):
    """How rows of a batch change places; here none ever does."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    """How a batch differs from that of the step before."""

    batch_size: int
    #: Rows that are gone.
    removed: Sequence[int]
    #: (row, parameters, prompt's token ids, output's token ids) of those that are new.
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    #: (row, row, how) of those that changed places.
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """A processor of a batch; ``octavo.LogitsProcessorPlugin`` is what Octavo calls for one request."""

    @classmethod  # noqa: B027
    def validate_params(cls, params: SamplingParams) -> None:
        """Raises ValueError if the parameters of a request are wrong."""

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:  # noqa: B027
        """``device`` is torch's, that of the logits."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the most likely."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each ``apply``, with the change of the batch."""

    @abstractmethod
    def apply(self, logits: Any) -> Any:
        """The logits [rows, vocab_size] of the batch, edited in place or new."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor of a batch that is made of one for each request."""

    def __init__(self, vllm_config: VllmConfig, device: Any, is_pin_memory: bool) -> None:
        """As ``LogitsProcessor``."""
        super().__init__(vllm_config, device, is_pin_memory)
        self._rows: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The processor of a request with these parameters; None: it has none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Makes the processors of new requests."""
        process_dict_updates(self._rows, batch_update, self._new)

    def _new(self, params: SamplingParams, prompt: list[int] | None, outputs: list[int]) -> Callable[[Any], Any] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        if len(inspect.signature(process).parameters) == 3:
            return lambda logits: process(prompt or [], outputs, logits)
        return lambda logits: process(outputs, logits)

    def apply(self, logits: Any) -> Any:
        """Applies each to its row."""
        for row, process in self._rows.items():
            logits[row] = process(logits[row])
        return logits


def process_dict_updates(
    req_entries: dict[int, S],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], S | None],
) -> bool:
    """Keeps what belongs to rows of a batch; whether anything has changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt, outputs in batch_update.added:
        state = new_state(params, prompt, outputs)
        req_entries.pop(row, None)
        if state is not None:
            req_entries[row] = state
    for source, target, how in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and how is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return req_entries != before


class BatchProcessors:
    """The classes that an engine was started with, as processors of its requests."""

    def __init__(self, classes: Sequence[type[LogitsProcessor]], config: VllmConfig, device: str) -> None:
        """Makes an object of each: it serves all requests, one after the other.

        Raises:
            ConfigError: there are classes, which get a device of torch's, and torch is not installed.
        """
        self._processors: list[LogitsProcessor] = []
        if not classes:
            return
        require_torch("vLLM's logits processors")
        import torch

        self._processors = [each(config, torch.device(device), False) for each in classes]

    def given_to(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the processors that edit the logits of such a request; they take its ``extra_args``.

        Raises:
            InvalidRequestError: one of them refuses the parameters.
        """
        if not self._processors:
            return params
        try:
            for processor in self._processors:
                processor.validate_params(params)
        except ValueError as e:
            raise InvalidRequestError(str(e)) from e
        own = [_of_request(processor, params) for processor in self._processors if _concerns(processor, params)]
        clone = params.clone()
        clone.extra_args = None
        clone.logits_processors = [*(params.logits_processors or ()), *own] or None
        return clone


def _concerns(processor: LogitsProcessor, params: SamplingParams) -> bool:
    return not isinstance(processor, AdapterLogitsProcessor) or processor.new_req_logits_processor(params) is not None


def _of_request(processor: LogitsProcessor, params: SamplingParams) -> RequestLogitsProcessor:
    """The processor with a batch of this request alone, which is new in each call: so it keeps nothing of others."""

    def process(prompt: list[int], outputs: list[int], logits: Any) -> Any:
        processor.update_state(BatchUpdate(1, [], [(0, params, list(prompt), list(outputs))], []))
        return processor.apply(logits.reshape(1, -1))[0]

    return process


def split_processors(given: Any) -> tuple[list[type[LogitsProcessor]], list[str]]:
    """Classes of vLLM's kind among the option ``logits_processors``, and names of Octavo's plug-ins.

    Raises:
        ConfigError: one is neither, or cannot be imported.
    """
    classes: list[type[LogitsProcessor]] = []
    names: list[str] = []
    for each in [given] if isinstance(given, (str, type)) else given or []:
        found = _load(each) if isinstance(each, str) else each
        if isinstance(found, type) and issubclass(found, LogitsProcessor):
            classes.append(found)
        elif isinstance(each, str):
            names.append(each)
        else:
            raise ConfigError(f"logits_processors must be classes of LogitsProcessor or module:Class, not {each!r}")
    return classes, names


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError as e:
        raise ConfigError(f"logits processor {name!r} cannot be imported: {e}") from e
