"""What must be ready on the workers before a request can run: an adapter, a grammar, an encoder's input, an image.

There is one contract for all kinds.
A kind is one entry of ``KINDS``: what a request needs of it, how many are kept, and the ``Preparer``
(``octavo/runner/preparers.py``) that makes them on a worker. Scheduler, plans and executors know no kind by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.adapters import AdapterRef
from octavo.core.image_input import DEFAULT_IMAGE_CACHE
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.structured_outputs import Grammar

#: Most compiled grammars in no use that the workers keep, for requests that come again with the same.
MAX_IDLE_GRAMMARS = 128
#: As many inputs of encoders; what was made of them may be in the prefix cache.
MAX_IDLE_INPUTS = 16


class Preparation(msgspec.Struct, frozen=True, array_like=True):
    """One thing to prepare."""

    #: A name of ``KINDS``.
    kind: str
    #: Digest of its content, of its kind, and of all else that it depends on: two requests with one key share it.
    key: str
    #: What the kind's ``Preparer`` makes it of, or where that is to be read.
    payload: bytes
    #: What it takes of the kind's memory: things are counted, or their bytes.
    size: int = 1


class Limits(msgspec.Struct, frozen=True):
    """How many of a kind the workers keep."""

    #: Most on a worker at once, in use or not, as ``Preparation.size`` counts them; None: all in use, and ``idle``
    #: others.
    host: int | None = None
    #: Places on the device, of which a running sequence needs one; None: it needs none.
    slots: int | None = None
    idle: int | None = None
    #: The option that says the most that may be pinned, for errors.
    option: str = ""

    @property
    def is_scarce(self) -> bool:
        """Whether running groups may hold all there is, so that others must wait for their end."""
        return self.host is not None or self.slots is not None


@dataclass(frozen=True)
class PreparationKind:
    """One kind of things."""

    #: What a request needs of it.
    of: Callable[[EngineCoreRequest], Sequence[Preparation]]
    #: From an ``EngineConfig``.
    limits: Callable[[Any], Limits]
    #: ``module:Class`` of its ``Preparer``.
    preparer: str
    #: What a refusal calls it, and the option that enables it: without it, requests that need this kind are refused.
    #: Empty: it is always enabled.
    noun: str = ""
    option: str = ""
    #: Whether it is counted among the statistics of adapters.
    is_adapter: bool = False


def adapter_preparation(ref: AdapterRef) -> Preparation:
    """The preparation of an adapter: LoRA has low-rank products, a prompt adapter none."""
    return Preparation("lora" if ref.rank else "prompt_adapter", ref.key, msgspec.msgpack.encode(ref))


def grammar_preparation(grammar: Grammar) -> Preparation:
    """The preparation of a grammar."""
    return Preparation("grammar", grammar.key, grammar.source.encode())


def _adapter_of(request: EngineCoreRequest, kind: str) -> Sequence[Preparation]:
    preparation = None if request.adapter is None else adapter_preparation(request.adapter)
    return (preparation,) if preparation is not None and preparation.kind == kind else ()


def _grammar_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    task = request.task
    if not isinstance(task, Generate) or task.grammar is None or not task.samples:
        return ()
    return (grammar_preparation(task.grammar),)


def _encoder_input_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    given = request.encoder_input
    return () if given is None else (Preparation("encoder_input", given.key, msgspec.msgpack.encode(given)),)


def _images_of(request: EngineCoreRequest) -> Sequence[Preparation]:
    return [Preparation("image", image.key, image.payload, image.size) for image in request.images]


#: By name; in the order in which a request's preparations are asked for.
KINDS: dict[str, PreparationKind] = {
    "grammar": PreparationKind(
        of=_grammar_of,
        limits=lambda options: Limits(idle=MAX_IDLE_GRAMMARS),
        preparer="octavo.runner.grammar_preparer:GrammarPreparer",
    ),
    "encoder_input": PreparationKind(
        of=_encoder_input_of,
        limits=lambda options: Limits(idle=MAX_IDLE_INPUTS),
        preparer="octavo.runner.encoder_input_preparer:EncoderInputPreparer",
    ),
    "image": PreparationKind(
        of=_images_of,
        limits=lambda options: Limits(host=getattr(options, "image_cache_bytes", DEFAULT_IMAGE_CACHE)),
        preparer="octavo.runner.image_preparer:ImagePreparer",
    ),
    "lora": PreparationKind(
        of=lambda request: _adapter_of(request, "lora"),
        limits=lambda o: Limits(host=o.num_host_loras, slots=o.max_loras, option="max_loras"),
        preparer="octavo.runner.lora_preparer:LoraPreparer",
        noun="an adapter of LoRA",
        option="enable_lora",
        is_adapter=True,
    ),
    "prompt_adapter": PreparationKind(
        of=lambda request: _adapter_of(request, "prompt_adapter"),
        limits=lambda o: Limits(host=o.max_prompt_adapters, option="max_prompt_adapters"),
        preparer="octavo.runner.prompt_adapters:PromptAdapters",
        noun="an adapter of prompt tuning",
        option="enable_prompt_adapter",
        is_adapter=True,
    ),
}


def preparations_of(request: EngineCoreRequest) -> list[Preparation]:
    """All that must be prepared before a request can run."""
    return [preparation for kind in KINDS.values() for preparation in kind.of(request)]


def limits_of(options: Any) -> dict[str, Limits]:
    """By kind, how many these options (an ``EngineConfig``) allow; None: of the kinds that need no option."""
    enabled = {name: kind for name, kind in KINDS.items() if not kind.option or getattr(options, kind.option, False)}
    return {name: kind.limits(options) for name, kind in enabled.items()}
