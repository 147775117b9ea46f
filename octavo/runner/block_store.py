"""``BlockStore``: a worker's end of the KV stores. Blocks go to the stores and come back beside the steps.

The scheduler decides which (``StepPlan``): ``blocks_to_store`` are copied out of the KV cache as a step begins and
written by a thread; the blocks of a ``Fetch`` are read by another thread into host memory, from where a later plan
places them. Both threads have a low priority, and memory for blocks on their way is bounded: a fetch waits for it,
blocks to store are refused without it, and the scheduler names them again.

A block is stored under a key that names its content and all that decides its bits: the model's files, types, backend,
instruction sets, rank (``namespace_facts``). The digest of the files takes seconds at the first start; until it is
known, the stores are not open: fetches find nothing (after a second), and what is to be stored waits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import logging
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import Fetch, StepResult
from octavo.core.stats import StoreTierStats
from octavo.kernels.interface import Kernels, LayerCache, Wait
from octavo.kvstore.namespace import model_digest, namespace, store_key
from octavo.kvstore.open import open_stores
from octavo.kvstore.store import KVStore
from octavo.loader.files import cache_dir, split_paths
from octavo.loader.resolve import gguf_source

if TYPE_CHECKING:
    from octavo.runner.loaded_model import LoadedModel

logger = logging.getLogger("octavo")

T = TypeVar("T")
Bytes = NDArray[np.uint8]
Job = Callable[[], None]

#: Host memory of a worker for fetched blocks, and for blocks to be written: multiples of ``_GRAIN``.
FETCH_BYTES, WRITE_BYTES = 256 << 20, 64 << 20
_GRAIN = 1 << 20
#: Nice values of the threads: a group may wait for what is read.
_READER_NICE, _WRITER_NICE = 5, 10
#: Seconds between two looks at the stores' statistics, while there is something to write and when all is written.
_BUSY_INTERVAL, _IDLE_INTERVAL = 1.0, 0.1
#: Seconds after the weights are there for which fetches wait for the stores, which mostly are open after some ms.
_OPEN_SECONDS = 1.0
#: Seconds for which a fetch waits for the writer to come to blocks that it asks for.
_WRITING_SECONDS = 1.0
#: Seconds that ``close`` and ``free`` take at most: the front end kills a core that does not end within five.
CLOSE_SECONDS = 3.0


@dataclass(eq=False, slots=True)
class Buffer:
    memory: Bytes
    #: Copies by a device that may still read the memory.
    readers: list[Wait] = field(default_factory=list)

    def finish(self) -> None:
        """Waits for them: the memory may be written or freed."""
        for wait in self.readers:
            wait()
        self.readers.clear()


class BufferPool:
    """Host memory of bounded size in buffers, which are used again: the first use of a page is slow."""

    def __init__(self, limit: int, make: Callable[[int], Bytes]) -> None:
        self.limit, self._make = limit, make
        self._changed = threading.Condition()
        self._taken = 0
        self._free: list[Buffer] = []
        self._closed = False

    @property
    def room(self) -> int:
        """Bytes that ``take`` can give now."""
        return self.limit - self._taken

    def take(self, count: int, *, wait: bool) -> Buffer | None:
        """A buffer of at least ``count`` bytes; None if there is no room and it does not ``wait``, or when closed."""
        size = -(-count // _GRAIN) * _GRAIN
        with self._changed:
            while self._taken + size > self.limit:
                if not wait or self._closed:
                    return None
                self._changed.wait()
            if self._closed:
                return None
            fitting = [buffer for buffer in self._free if size <= buffer.memory.nbytes <= 2 * size]
            buffer = min(fitting, key=lambda buffer: buffer.memory.nbytes, default=None)
            if buffer is not None and self._taken + buffer.memory.nbytes <= self.limit:
                self._free.remove(buffer)
                size = buffer.memory.nbytes
            else:
                buffer = None
                while self._free and self._taken + size + sum(b.memory.nbytes for b in self._free) > self.limit:
                    self._free.pop(0).finish()
            self._taken += size
        if buffer is None:
            return Buffer(self._make(size))
        buffer.finish()
        return buffer

    def give(self, buffer: Buffer) -> None:
        with self._changed:
            self._taken -= buffer.memory.nbytes
            self._free.append(buffer)
            self._changed.notify_all()

    def trim(self) -> None:
        """Frees the memory of unused buffers."""
        with self._changed:
            while self._free:
                self._free.pop().finish()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.trim()


class _Worker:
    """A thread of low priority that does jobs in order, and calls ``look`` from time to time after some were done."""

    def __init__(self, name: str, nice: int, look: Job | None = None) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._nice, self._look = nice, look
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self, timeout: float) -> bool:
        """Whether all jobs were done within ``timeout`` seconds; no other may follow."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere the priority is that of the whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        looked, has_news = float("-inf"), False
        while True:
            due = looked + (_IDLE_INTERVAL if self._jobs.empty() else _BUSY_INTERVAL) - time.monotonic()
            try:
                if has_news and self._look is not None and due <= 0:
                    looked, has_news = time.monotonic(), False
                    self._look()
                job = self._jobs.get(timeout=max(due, 0.001) if has_news and self._look is not None else None)
                if job is None:
                    return
                has_news = True
                job()
                del job  # it may hold memory
            except Empty:
                continue
            except Exception:
                logger.exception("the KV stores failed at a job; it is left out")


@dataclass(eq=False)
class _Fetch:
    blocks: list[tuple[int, bytes]]
    #: Leading blocks that are there, and seconds that it took to read them.
    done: Future[tuple[int, float]] = field(default_factory=Future)
    dropped: bool = False
    buffer: Buffer | None = None
    #: By group: a row for each block in the buffer; and each block's row, by its index in ``blocks``.
    rows: dict[int, Bytes] = field(default_factory=dict)
    row_of: list[int] = field(default_factory=list)


class _Found(NamedTuple):
    """What a look-up for a fetch has found."""

    stores: Stores
    #: Indices of the fetch's blocks of which this worker has layers, and the keys of the leading ones that there are.
    kept: list[int]
    keys: list[bytes]
    #: Bytes of their values, and seconds of the look-up.
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Stores:
    """Open stores, the nearest first, for blocks of one namespace."""

    namespace: bytes
    tiers: Sequence[KVStore]

    def ask(self, count: int, ask: Callable[[KVStore, int], int]) -> int:
        """How many leading values of ``count`` the tiers have together; ``ask(tier, at)``: how many from ``at`` on."""
        at, refused = 0, 0
        for tier in itertools.cycle(self.tiers):
            if at == count or refused == len(self.tiers):
                break
            more = ask(tier, at)
            at, refused = at + more, 1 if more else refused + 1
        return at


class BlockStore:
    """Owns the stores, nearest first, the threads that use them, and the memory of blocks on their way.

    All methods but those of its threads are called between steps.
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        kernels: Kernels,
        open_stores: Callable[[bytes | None], Stores | None],
        *,
        reports_stores: bool = True,
        reports_written: bool = False,
        fetch_bytes: int = FETCH_BYTES,
        write_bytes: int = WRITE_BYTES,
    ) -> None:
        """Opens the stores in a thread.

        Args:
            block_bytes: of a stored block, by KV group.
            open_stores: opens the stores for the weights as they are now, which may take long; None: their namespace is
                still the one of the argument.
            reports_stores: whether results have the statistics of the stores, as those of the first worker do.
            reports_written: whether they name the blocks that were written.
        """
        self._sizes, self._kernels = list(block_bytes), kernels
        self._open_stores, self._reports_stores = open_stores, reports_stores
        self._fetches: dict[int, _Fetch] = {}
        #: Ids of fetches that no result has reported.
        self._open: list[int] = []
        largest = -(-max(block_bytes, default=0) // _GRAIN) * _GRAIN  # a recurrent state may take more
        self._fetched = BufferPool(max(fetch_bytes, largest), kernels.host_bytes)
        self._written = BufferPool(max(write_bytes, largest), kernels.host_bytes)
        self._lock = threading.Lock()
        self._dropped = 0
        #: (group, digest) of blocks on their way to the stores.
        self._writing: set[tuple[int, bytes]] = set()
        self._wrote = threading.Condition()
        self._refused: list[tuple[int, bytes]] = []
        #: None: not reported.
        self._written_blocks: deque[tuple[int, bytes]] | None = deque() if reports_written else None
        #: Processor time of copies and writes.
        self._seconds = 0.0
        #: The last look at the stores that no result has reported.
        self._stats: deque[list[StoreTierStats]] = deque(maxlen=1)
        #: Counts the weights that the worker has had; None: they are unknown, and nothing is read or written.
        self._weights: int | None = None
        self._count = itertools.count()
        #: The stores that are open, and the weights whose blocks they are for. Only the writer changes them.
        self._stores: Stores | None = None
        self._stored_weights: int | None = None
        #: Set when the stores of the newest weights are open, or cannot be opened; and until when it is waited for.
        self._opened, self._opening_until = threading.Event(), 0.0
        self._reader = _Worker("octavo-kv-read", _READER_NICE)
        self._writer = _Worker("octavo-kv-write", _WRITER_NICE, self._look)
        self.trust_weights()

    # --- plans --------------------------------------------------------------------------------------------------------

    def begin(self, fetches: Sequence[Fetch]) -> None:
        new = [fetch for fetch in fetches if fetch.fetch_id not in self._fetches]
        for fetch in new:
            self._fetches[fetch.fetch_id] = _Fetch(fetch.blocks)
            self._open.append(fetch.fetch_id)
        if new:
            self._reader.submit(partial(self._fetch, [self._fetches[fetch.fetch_id] for fetch in new]))

    @property
    def pending(self) -> list[Future[tuple[int, float]]]:
        """The fetches that no result has reported."""
        return [self._fetches[fetch_id].done for fetch_id in self._open]

    def report(self, result: StepResult) -> None:
        """Reports fetches that have ended and were not dropped, and what the stores wrote and hold."""
        while self._written_blocks:
            result.written.append(self._written_blocks.popleft())
        if self._open:
            for fetch_id in [fetch_id for fetch_id in self._open if self._fetches[fetch_id].done.done()]:
                self._open.remove(fetch_id)
                count, seconds = self._fetches[fetch_id].done.result()
                count = 0 if self._weights is None else count
                result.fetched[fetch_id] = count
                result.fetch_times.append((count, seconds))
        if self._stats and self._reports_stores:
            result.stores = self._stats.pop()

    def save(self, caches: list[LayerCache], group: int, blocks: list[int], digests: list[bytes]) -> None:
        """Copies device blocks of a group out of its layers, to be written under these digests of their content."""
        size = self._sizes[group]
        if not size:
            return
        weights, count = self._weights, min(len(blocks), self._written.room // size)
        buffer = self._written.take(count * size, wait=False) if count and weights is not None else None
        if weights is None:
            self._drop(len(blocks))
            if self._written_blocks is not None:
                self._written_blocks += [(group, digest) for digest in digests]
            return
        count = count if buffer is not None else 0
        self._refused += [(group, digest) for digest in digests[count:]]
        if buffer is None:
            return
        rows = buffer.memory[: count * size].reshape(count, size)
        start = time.thread_time()
        try:
            copied = self._kernels.read_blocks(caches, blocks[:count], rows)
        except BaseException:  # fails the step
            self._written.give(buffer)
            raise
        self._spend(time.thread_time() - start)
        named = [(group, digest) for digest in digests[:count]]
        with self._wrote:
            self._writing.update(named)
        self._writer.submit(partial(self._write, weights, named, [row.data for row in rows], buffer, copied))

    def take_refused(self) -> list[tuple[int, bytes]]:
        """(group, digest) of the blocks that ``save`` had no room for since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def place(self, caches: list[LayerCache], group: int, blocks: list[int], places: list[tuple[int, int]]) -> None:
        """Writes fetched blocks to device blocks of a group; ``places``: (fetch id, index of its block)."""
        if not self._sizes[group]:
            return
        by_fetch: dict[int, list[tuple[int, int]]] = {}
        for block, (fetch_id, index) in zip(blocks, places, strict=True):
            by_fetch.setdefault(fetch_id, []).append((block, index))
        for fetch_id, moves in by_fetch.items():
            fetch = self._fetches.get(fetch_id)
            there = fetch.done.result()[0] if fetch is not None and fetch.done.done() else 0
            if fetch is None or fetch.buffer is None or any(index >= there for _, index in moves):
                raise RuntimeError(f"a plan places blocks of fetch {fetch_id} that were not fetched")
            rows, numbers = fetch.rows[group], [fetch.row_of[index] for _, index in moves]
            first, last = numbers[0], numbers[-1]
            # Mostly all of them; else a copy of those that are placed.
            values = rows[first : last + 1] if numbers == [*range(first, last + 1)] else rows[numbers]
            fetch.buffer.readers.append(self._kernels.write_blocks(caches, [block for block, _ in moves], values))

    def drop(self, fetch_ids: Sequence[int]) -> None:
        for fetch_id in fetch_ids:
            fetch = self._fetches.pop(fetch_id, None)
            if fetch is not None:
                if fetch_id in self._open:
                    self._open.remove(fetch_id)
                fetch.dropped = True
                if not fetch.done.cancel():  # at the end of the thread's work, if it is not at its end
                    fetch.done.add_done_callback(partial(self._free, fetch))

    def _free(self, fetch: _Fetch, _: object) -> None:
        if fetch.buffer is not None:
            self._fetched.give(fetch.buffer)
            fetch.buffer, fetch.rows = None, {}

    def _drop(self, count: int) -> None:
        with self._lock:
            self._dropped += count

    def _spend(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    # --- weights, memory, the end -------------------------------------------------------------------------------------

    def distrust_weights(self, reason: str | None = None) -> None:
        """Nothing is read or written until ``trust_weights``; ``reason``: why, for the log."""
        if reason is not None and self._weights is not None:
            logger.warning("%s: the KV stores are off until the weights are read from the checkpoint again", reason)
        self._weights = None

    def trust_weights(self) -> None:
        """The weights are those of the checkpoint's files as they are now."""
        self._weights = next(self._count)
        self._opened.clear()
        self._opening_until = time.monotonic() + _OPEN_SECONDS
        self._writer.submit(partial(self._open_for, self._weights))

    def free(self) -> None:
        """Writes what waits, as far as there is time, and frees the memory that no block is in."""
        written = threading.Event()
        self._writer.submit(written.set)
        written.wait(CLOSE_SECONDS)
        self._fetched.trim()
        self._written.trim()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Writes what waits, as far as there is time, and closes the stores; may be called again."""
        end = time.monotonic() + timeout
        self._opening_until = 0.0
        self._fetched.close()
        self.drop([*self._fetches])
        flushed = self._writer.close(timeout)
        self._written.close()
        flushed &= self._reader.close(max(0.0, end - time.monotonic()))
        if not flushed:
            logger.warning("the KV stores were not done within %g s: some blocks were not stored", timeout)
        for tier in () if self._stores is None else self._stores.tiers:
            tier.close()

    # --- in the threads -----------------------------------------------------------------------------------------------

    def _open_for(self, weights: int) -> None:
        before = self._stores
        try:
            opened = self._open_stores(None if before is None else before.namespace)
        except Exception as e:
            logger.warning("the KV stores are off: %s: %s", type(e).__name__, e)
        else:
            if opened is not None:
                self._stores = opened
                for tier in () if before is None else before.tiers:
                    tier.close()
            self._stored_weights = weights
        self._opened.set()

    def _fetch(self, fetches: list[_Fetch]) -> None:
        """Reports in the order of the fetches.

        All are looked up before any is read, so those that the stores lack end together, and an idle engine computes
        their prompts in one step.
        """
        fetches = [fetch for fetch in fetches if fetch.done.set_running_or_notify_cancel()]
        for fetch, found in [(fetch, self._try(self._look_up, fetch)) for fetch in fetches]:
            read = None if found is None else self._try(self._read, fetch, found)
            fetch.done.set_result(read or (0, 0.0))
        self._writer.submit(lambda: None)  # which looks at the statistics

    def _try(self, part: Callable[..., T], *arguments: object) -> T | None:
        try:
            return part(*arguments)
        except Exception:
            logger.exception("a fetch from the KV stores failed: its blocks are computed")
            return None

    def _look_up(self, fetch: _Fetch) -> _Found | None:
        """The leading blocks that there are and that fit; None if the stores are not to be used."""
        self._opened.wait(max(0.0, self._opening_until - time.monotonic()))
        with self._wrote:
            asked = set(fetch.blocks)
            self._wrote.wait_for(lambda: fetch.dropped or self._writing.isdisjoint(asked), _WRITING_SECONDS)
        start = time.perf_counter()
        stores, sizes = self._stores, self._sizes
        if stores is None or self._weights is None or self._weights != self._stored_weights or fetch.dropped:
            return None
        # On a pipeline stage without layers of a group, there is nothing to read of it.
        kept = [i for i, (group, _) in enumerate(fetch.blocks) if sizes[group]]
        keys = [store_key(stores.namespace, *fetch.blocks[i]) for i in kept]
        count = stores.ask(len(keys), lambda tier, at: tier.contains(keys[at:]))
        ends = [*itertools.accumulate(sizes[fetch.blocks[i][0]] for i in kept[:count])]
        count = sum(end <= self._fetched.limit for end in ends)
        num_bytes = ends[count - 1] if count else 0
        return _Found(stores, kept, keys[:count], num_bytes, time.perf_counter() - start)

    def _read(self, fetch: _Fetch, found: _Found) -> tuple[int, float]:
        """Reads the blocks that were found: how many leading ones there are, and the seconds without those for room."""
        stores, kept, keys, num_bytes, _ = found
        if keys:
            fetch.buffer = self._fetched.take(num_bytes, wait=True)
            if fetch.buffer is None or fetch.dropped:
                return 0, 0.0
        start = time.perf_counter()
        values = self._lay_out(fetch, kept[: len(keys)])

        def read(tier: KVStore, at: int) -> int:
            count = tier.read(keys[at:], values[at:])
            if count and tier is not stores.tiers[0]:
                nearer = stores.tiers[: stores.tiers.index(tier)]
                self._keep_nearer(nearer, keys[at : at + count], values[at : at + count])
            return count

        there = stores.ask(len(keys), read)
        count = kept[there] if there < len(kept) else len(fetch.blocks)
        return count, found.seconds + time.perf_counter() - start

    def _lay_out(self, fetch: _Fetch, indices: list[int]) -> list[memoryview]:
        """Divides the buffer among the blocks of these indices, those of a group in rows: the memory of each."""
        fetch.row_of = [0] * len(fetch.blocks)
        counts: dict[int, int] = {}
        for i in indices:
            group = fetch.blocks[i][0]
            fetch.row_of[i] = counts.get(group, 0)
            counts[group] = fetch.row_of[i] + 1
        start = 0
        for group, count in counts.items():
            assert fetch.buffer is not None
            end = start + count * self._sizes[group]
            fetch.rows[group] = fetch.buffer.memory[start:end].reshape(count, -1)
            start = end
        return [fetch.rows[fetch.blocks[i][0]][fetch.row_of[i]].data for i in indices]

    def _keep_nearer(self, tiers: Sequence[KVStore], keys: list[bytes], values: list[memoryview]) -> None:
        """Writes values of a slower tier to the faster ones too, from a copy, if there is room for one."""
        size = sum(value.nbytes for value in values)
        buffer = self._written.take(size, wait=False)
        if buffer is None:
            self._drop(len(keys))
            return
        copies, start = [], 0
        for value in values:
            copies.append(buffer.memory[start : start + value.nbytes].data)
            copies[-1][:] = value
            start += value.nbytes

        def write() -> None:
            try:
                for tier in tiers:
                    tier.write(keys, copies)
            finally:
                self._written.give(buffer)

        self._writer.submit(write)

    def _write(
        self, weights: int, named: list[tuple[int, bytes]], values: list[memoryview], buffer: Buffer, copied: Wait
    ) -> None:
        start = time.thread_time()
        try:
            copied()
            if self._stores is None or weights != self._stored_weights:
                self._drop(len(named))
                return
            keys = [store_key(self._stores.namespace, group, digest) for group, digest in named]
            for tier in self._stores.tiers:
                tier.write(keys, values)
        finally:
            values.clear()
            self._written.give(buffer)
            with self._wrote:
                self._writing.difference_update(named)
                self._wrote.notify_all()
            if self._written_blocks is not None:
                self._written_blocks += named
            self._spend(time.thread_time() - start)

    def _look(self) -> None:
        stats = [tier.stats() for tier in (() if self._stores is None else self._stores.tiers)]
        with self._lock:
            dropped, seconds = self._dropped, self._seconds
        self._stats.append(
            [
                msgspec.structs.replace(
                    tier, dropped=tier.dropped + dropped, processor_seconds=0.0 if number else seconds
                )
                for number, tier in enumerate(stats)
            ]
        )


# What decides the bits of a block.

#: Rooms of the package, and its compiled kernels.
_CODE = ("kernels", "layers", "loader", "models")
#: Kinds of rotary scaling for which the table depends on the longest sequence.
_SCALED_BY_LENGTH = ("dynamic", "longrope")


def make_block_store(loaded: LoadedModel) -> BlockStore:
    """The stores of the worker's options. Files of weights are read in the background."""

    def open_for_weights(known: bytes | None) -> Stores | None:
        name = namespace(namespace_facts(loaded))
        if name == known:
            return None
        about = {
            "model": str(loaded.options.model),
            "dtype": loaded.context.dtype.value,
            "kernels": loaded.kernels.numerics(),
            "rank": f"{loaded.ranks.layout.rank} of {loaded.ranks.layout.world_size}",
        }
        return Stores(name, open_stores(loaded.options, name, about))

    is_first = loaded.ranks.layout.rank == 0
    return BlockStore(
        loaded.layers.stored_bytes(),
        loaded.kernels,
        open_for_weights,
        reports_stores=is_first,
        reports_written=is_first and loaded.options.moves_decodes,
    )


def namespace_facts(loaded: LoadedModel) -> dict[str, Any]:
    """All that decides the bits of this worker's blocks beside their tokens, adapters, images and salts."""
    options, config, context, layout = loaded.options, loaded.config, loaded.context, loaded.ranks.layout
    # Sequences of different lengths share prefixes, so blocks depend on the longest one through the table alone.
    length = config.max_position if config.rope.rope_type in _SCALED_BY_LENGTH else None
    source = gguf_source(options.model, options.revision)
    files = [loaded.folder, *(() if source is None else split_paths(source))]
    drafter = None
    if loaded.layers.stores_drafter and loaded.drafter is not None:
        drafter = model_digest([loaded.drafter.folder], _remembered())
    libraries = ["numpy"] if config.model_impl == "octavo" else ["numpy", "torch", "transformers"]
    return {
        "files": model_digest(files, _remembered()),
        "dummy": options.seed if options.load_format == "dummy" else None,
        "config": {**msgspec.to_builtins(config), "max_position": length, "context_note": ""},
        "network": type(config).__qualname__,
        "dtype": context.dtype.value,
        "quantization": context.quantization,
        "block_size": options.block_size,
        "groups": [[*dataclasses.astuple(group.spec), *group.layers] for group in loaded.layers.groups],
        "block_bytes": loaded.layers.stored_bytes(),
        "drafter": drafter,
        "layers": None if context.layers is None else [context.layers.start, context.layers.stop],
        "rank": [layout.rank, layout.tensor_parallel_size, layout.pipeline_parallel_size],
        "kernels": loaded.kernels.numerics(),
        "machine": platform.machine(),
        "libraries": [importlib.metadata.version(name) for name in libraries],
        "code": _code_digest(),
    }


def _remembered() -> Path:
    return cache_dir() / "digests"


def _code_digest() -> str:
    package = Path(__file__).parent.parent
    files = [*package.glob("_cpu*"), *(file for room in _CODE for file in (package / room).rglob("*.py"))]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(
            file.relative_to(package).as_posix().encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest()
        )
    return digest.hexdigest()
