"""What tests need of an engine that its interface does not show: its processes, and whether it holds anything."""

from __future__ import annotations

from typing import Any

import msgspec
import psutil

from octavo import LLM, AsyncLLM, LLMEngine
from octavo.core.request import EngineCoreRequest
from octavo.engine.core import EngineCore
from octavo.engine.local_core import LocalCore


def workers_of(llm: LLM) -> list[psutil.Process]:
    """The worker processes, by rank."""
    executor: Any = llm.llm_engine.core.executor
    return [psutil.Process(process.pid) for process in executor._processes]


def client_of(llm: AsyncLLM, replica: int = 0) -> Any:
    """The ``CoreClient`` of a replica."""
    return llm._replicas.all[replica].core


def core_process_of(llm: AsyncLLM, replica: int = 0) -> Any:
    """The ``CoreProcess`` of a replica."""
    return client_of(llm, replica).process


def check_nothing_held(llm: LLM) -> None:
    """No request is left: neither its blocks nor a step, nor the request itself."""
    core = llm.llm_engine.core
    assert core.blocks.state.used == core.blocks.state.host_used == core.blocks.num_tables == 0
    assert not core.scheduler.has_work and not core._in_flight
    assert not llm.llm_engine.has_unfinished_requests()


def replace_core(llm: LLMEngine) -> None:
    """Ends the engine's core; a new one goes on, with requests as they would be sent to another process."""
    files, (replica,) = llm.front_end.files, llm._pump._replicas.all
    options = llm.core.options
    llm.core.shutdown()
    replica.core = LocalCore(EngineCore(options, files.folder))
    for request in llm.front_end.outputs.open_requests():
        data = msgspec.msgpack.encode(request.resume())
        llm.core.scheduler.add(msgspec.msgpack.decode(data, type=EngineCoreRequest))
