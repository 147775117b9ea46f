"""Messages between a front end and the process of its engine core: msgpack, tagged, limited in size.

There are three channels: front end to core (``ToCore``), core to front end (``FromCore``), and a socket pair without
traffic, which closes when either process ends; a core that fails sends its ``Failure`` there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import EngineCoreOutputs
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.stats import StepStats
from octavo.process.children import Failure, LogMessage
from octavo.process.startup import ProcessProfile

#: Names of the sockets in the private folder. The core binds the first, the front end the second.
TO_CORE, FROM_CORE = "to_core", "from_core"
#: Steps queued on either side for a slow front end before the core waits.
MAX_WAITING_STEPS = 64
#: Longest message to the core; a prompt takes 5 bytes a token.
MAX_BYTES_TO_CORE = 64 << 20
#: Longest message from the core: ``max_logprobs`` prompt logprobs for each token of a step.
MAX_BYTES_FROM_CORE = 1 << 30
BYTES_OF_LOGPROB = 14
MAX_EXIT_REPORT = 8000


def check_sendable(request: EngineCoreRequest) -> None:
    """Refuses a request with code, which cannot be sent to another process."""
    processors = request.task.params.logits_processors if isinstance(request.task, Generate) else None
    for i, processor in enumerate(processors or ()):
        named = processor if hasattr(processor, "__qualname__") else type(processor)
        raise InvalidRequestError(
            f"{named.__module__}.{named.__qualname__} is code and cannot be sent to another process; use an LLM that "
            "runs in one process",
            path=f"logits_processors[{i}]",
        )


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: the engine's options and its working folder."""

    options: dict[str, Any]
    folder: str
    #: Log messages below this level are not sent back.
    log_level: int
    replica: int = 0


class Add(msgspec.Struct, tag=True, array_like=True):
    """Queues a request."""

    request: EngineCoreRequest


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Ends a request in any state; ignored if it has ended."""

    group_id: int


class Stop(msgspec.Struct, tag=True, array_like=True):
    """Ends one sequence of a request, after a stop string."""

    group_id: int
    index: int


#: The id of a call whose reply nobody awaits.
NO_REPLY = -1


class Call(msgspec.Struct, tag=True, array_like=True):
    """Calls a method (``EngineCore.call``); answered by a ``Reply``."""

    call_id: int
    method: str
    args: list[Any] = []


class HandOver(msgspec.Struct, tag=True, array_like=True):
    """Takes requests from a core: their outputs come before the ``Reply``, and none after it."""

    call_id: int
    group_ids: list[int]


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """Ends the core's process, in any state."""


ToCore = Start | Add | Abort | Stop | Call | HandOver | Shutdown


class Ready(msgspec.Struct, tag=True, array_like=True):
    model_config: ModelConfig
    #: Longest sequence in tokens, prompt and output together.
    max_model_len: int
    #: ``checkpoint_digest`` of the model.
    digest: str
    #: Start-up profiles of the core and of its workers' processes.
    profiles: list[ProcessProfile] = []


class StepDone(msgspec.Struct, tag=True, array_like=True):
    outputs: EngineCoreOutputs
    stats: StepStats


class Reply(msgspec.Struct, tag=True, array_like=True):
    """The answer to a ``Call`` or ``HandOver``: a value or an error."""

    call_id: int
    value: msgspec.Raw
    error: Failure | None = None


FromCore = Ready | StepDone | Reply | LogMessage
