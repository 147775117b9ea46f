"""A chaos run: the truth first, then clients that ask while the server's processes are killed, stopped and starved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.lab.bench import chaos_report
from octavo.lab.bench.chaos_adapters import write_adapter
from octavo.lab.bench.chaos_client import ChaosClient, Checker, Exchange, ask_at_random, ask_each
from octavo.lab.bench.chaos_faults import FAULTS, Fault, Monkey
from octavo.lab.bench.chaos_leftovers import Holdings, after_its_end, until_settled
from octavo.lab.bench.chaos_processes import MARK, shared_memory
from octavo.lab.bench.chaos_stores import ChaosStores, store_counts
from octavo.lab.bench.chaos_workload import ADAPTERS, KINDS, ChaosRequest, make_requests
from octavo.lab.bench.own_server import OwnServer, own_server, token_id_range
from octavo.loader.resolve import resolve_model
from octavo.models.config_files import read_model_config

#: So that the limit is not reached.
_RESTARTS = 1_000_000
#: Streams go on after a fault when so many chunks a client have come.
_GONE_ON = 4
#: Seconds after which a process is taken to hang, where no option says it.
_HANG_SECONDS = 10.0


@dataclass(frozen=True)
class ChaosSettings:
    """What a run does."""

    clients: int = 64
    #: Seconds in which clients begin requests.
    duration: float = 600.0
    #: Mean seconds between faults; 0: none.
    interval: float = 15.0
    #: Kinds of requests and of faults.
    kinds: tuple[str, ...] = KINDS
    faults: tuple[str, ...] = FAULTS
    #: KV stores of the server, some of ``chaos_stores.STORES``; their faults come beside the others.
    stores: tuple[str, ...] = ()
    #: Seconds without a chunk after which a stream counts as broken.
    patience: float = 300.0
    #: Where the server's log goes.
    log: Path | None = None


@dataclass
class _Notes:
    """What a run finds out."""

    checker: Checker = field(default_factory=lambda: Checker({}))
    truth_seconds: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    begin: float = 0.0
    seconds: float = 0.0
    leftovers: list[str] = field(default_factory=list)
    #: By tier of the KV stores and event: blocks.
    stores: dict[str, dict[str, int]] = field(default_factory=dict)


def run(options: EngineConfig, settings: ChaosSettings, told: Callable[[str], object]) -> chaos_report.ChaosReport:
    """Starts a server of these options, disturbs it and ends it. ``told`` is called with what happens, in words.

    Raises:
        ConfigError: the server does not start, or a request fails on the undisturbed server.
    """
    config = read_model_config(resolve_model(options.model, revision=options.revision, weights=False))
    requests = make_requests(settings.kinds, options.max_model_len or config.default_length, token_id_range(options))
    notes = _Notes()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        temp = Path(name, "temp")
        temp.mkdir()
        more = _server_options(options, settings)
        if "adapters" in settings.kinds:
            for seed, adapter in enumerate(ADAPTERS):
                write_adapter(Path(name, adapter), config, seed)
            more |= {"enable_lora": True, "lora_modules": {adapter: str(Path(name, adapter)) for adapter in ADAPTERS}}
        mark = f"{os.getpid()}-{time.time_ns()}"
        shm_before = shared_memory()
        folder = Path(name, "stores")
        folder.mkdir()
        stores = ChaosStores(folder, settings.stores) if settings.stores else None
        with contextlib.ExitStack() as stack:
            if stores is not None:
                more |= stack.enter_context(stores.running())
            server = stack.enter_context(own_server(options, more, {MARK: mark, "TMPDIR": str(temp)}))
            try:
                asyncio.run(_measure(server, temp, requests, options, settings, stores, notes, told))
                told("the server ends")
                notes.leftovers += after_its_end(server, temp, mark, shm_before)
            finally:
                if settings.log is not None:
                    settings.log.write_bytes(server.log.read_bytes())
    return _report(options, settings, requests, notes)


def _server_options(options: EngineConfig, settings: ChaosSettings) -> dict[str, Any]:
    """What the run needs, where no option says otherwise."""
    changes: dict[str, Any] = {"engine_restarts": _RESTARTS, "step_timeout": _HANG_SECONDS}
    if "drafts" in settings.kinds and options.pipeline_parallel_size == 1:
        changes["speculative_config"] = {"method": "ngram"}
    known = EngineConfig.model_fields.keys() - options.model_fields_set
    return {name: value for name, value in changes.items() if name in known}


async def _measure(
    server: OwnServer,
    temp: Path,
    requests: list[ChaosRequest],
    options: EngineConfig,
    settings: ChaosSettings,
    stores: ChaosStores | None,
    notes: _Notes,
    told: Callable[[str], object],
) -> None:
    client = ChaosClient(server.url, settings.patience)
    told(f"the truth: {len(requests)} requests, one after the other")
    begin = time.perf_counter()
    notes.checker = _truths(await ask_each(client, requests))
    notes.truth_seconds = time.perf_counter() - begin

    async def load(goes_on: Callable[[], bool]) -> None:
        await ask_at_random(
            client,
            requests,
            notes.checker,
            clients=settings.clients,
            seed=options.seed,
            goes_on=goes_on,
            exchanges=notes.exchanges,
        )

    told(f"{settings.clients} requests at once, undisturbed")
    await load(lambda: False)
    before = Holdings.of(server, temp)
    told(f"{settings.clients} clients for {settings.duration:g} s")
    notes.begin = time.perf_counter()
    end = notes.begin + settings.duration
    monkey = Monkey(
        server.process.pid,
        interval=settings.interval,
        seed=options.seed,
        hang=options.step_timeout if "step_timeout" in options.model_fields_set else _HANG_SECONDS,
        kinds=settings.faults,
        goes_on=lambda since: sum(at > since for at in client.recent) >= _GONE_ON * settings.clients,
        stores=stores,
        told=lambda fault: told(f"{fault.at - notes.begin:.1f} s: {fault.name} {fault.pid}"),
    )
    notes.faults = monkey.faults
    faults = asyncio.create_task(_disturb(monkey, settings.duration)) if settings.interval else None
    try:
        await load(lambda: time.perf_counter() < end and server.process.poll() is None)
    finally:
        if faults is not None:
            faults.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await faults
        monkey.close()
    notes.seconds = time.perf_counter() - notes.begin
    notes.leftovers += await until_settled(server, temp, before)
    if stores is not None and server.process.poll() is None:
        notes.stores = await asyncio.to_thread(store_counts, server.url)


async def _disturb(monkey: Monkey, seconds: float) -> None:
    """Faults for a time; what is stopped for ever stays so: the server has to notice it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await monkey.run()


def _truths(exchanges: list[Exchange]) -> Checker:
    """The answers of requests that were computed alone.

    Raises:
        ConfigError: one has failed.
    """
    truths = {}
    for exchange in exchanges:
        if exchange.answer is None:
            raise ConfigError(f"the undisturbed server does not answer {exchange.request.name}: {exchange.error}")
        truths[exchange.request.name] = exchange.answer
    return Checker(truths)


def _report(
    options: EngineConfig, settings: ChaosSettings, requests: list[ChaosRequest], notes: _Notes
) -> chaos_report.ChaosReport:
    given = options.model_dump(mode="json", exclude_unset=True, exclude={"model", "seed"})
    return chaos_report.ChaosReport(
        model=options.model,
        clients=settings.clients,
        seed=options.seed,
        interval=settings.interval,
        options=given,
        seconds=round(notes.seconds, 3),
        distinct_requests=len(requests),
        truth_seconds=round(notes.truth_seconds, 3),
        requests=chaos_report.by_kind(notes.exchanges),
        faults=chaos_report.by_fault(notes.faults, notes.exchanges, options.data_parallel_size),
        timeline=chaos_report.timeline(notes.faults, notes.begin),
        failures=chaos_report.failures(notes.exchanges, notes.checker.truths, notes.begin),
        leftovers=notes.leftovers,
        stores=notes.stores,
    )
