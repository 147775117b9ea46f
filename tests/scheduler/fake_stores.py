"""KV stores of a worker without a model: lossy, late, and checked against what every digest names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from octavo.core.plan import StepPlan, StepResult
from octavo.memory.prefix_cache import PrefixChain
from octavo.memory.stored import StoreLimits
from octavo.scheduler.groups import Sequence

#: (KV group, digest).
Key = tuple[int, bytes]


class FakeStores:
    """What outlives an engine; ``WorkerStores`` is the side of one worker."""

    def __init__(self, seed: int, *, lossy: bool = True) -> None:
        self.rng = random.Random(seed)
        self.lossy = lossy
        self.values: dict[Key, list[Any]] = {}
        #: The slots of a block of tokens with this digest, and the position of the last.
        self.names: dict[bytes, list[int]] = {}
        self.ends: dict[bytes, int] = {}
        self.num_placed = 0

    def limits(self) -> StoreLimits:
        rng = self.rng
        return StoreLimits(
            step_bytes=rng.choice([1, 3, 1000]),
            fetch_bytes=rng.choice([1, 2, 5, 1000]),
            max_fetches=(most := rng.choice([1, 2, 4])),
            max_small_fetches=most + rng.choice([0, 4]),
            patience=rng.choice([3.0, 20.0]),
            pause=rng.choice([0.0, 10.0]),
            max_known=rng.choice([2, 1000]),
        )

    def learn(self, sequences: Iterable[Sequence], block_size: int, prints: Any) -> None:
        """Notes what the digests of these sequences' blocks name; ``prints(sequence)``: of each of its tokens."""
        for seq in sequences:
            full = len(seq.token_ids) // block_size
            chain = PrefixChain(seq.group.context, block_size, seq.group.features)
            chain.extend(seq.token_ids, full)
            slots = prints(seq)
            for index in range(full):
                content = slots[index * block_size : (index + 1) * block_size]
                assert self.names.setdefault(chain.digests[index + 1], content) == content
                self.ends[chain.digests[index + 1]] = (index + 1) * block_size - 1

    def is_named(self, digest: bytes, block: list[Any]) -> bool:
        """Whether a block has what its digest names: the tokens, or the state after them."""
        if hasattr(block[0], "after"):
            return bool(block[0].after(self.ends[digest]) == self.names[digest][-1])
        return block == self.names[digest]


class WorkerStores:
    """Writes at once, and answers fetches late, partly or never."""

    def __init__(self, stores: FakeStores, group_of: list[int]) -> None:
        """``group_of``: the KV group of each device block."""
        self.stores, self._group_of = stores, group_of
        #: By id: steps until the report (None: never), keys, and what was found.
        self.fetching: dict[int, list[Any]] = {}
        #: By id, of reported fetches: what was found, with its keys.
        self.found: dict[int, list[tuple[Key, list[Any]]]] = {}
        #: Of stores that are not lossy: steps until a report, None for never, and seconds of a block.
        self.delay: int | None = 0
        self.seconds_per_block = 1e-5
        self.num_begun = 0

    def write(self, plan: StepPlan, device: list[list[Any]], computed_by: dict[int, int], last_known: int) -> None:
        """Before any block moves."""
        rng, stores = self.stores.rng, self.stores
        blocks = [block for block, _ in plan.blocks_to_store]
        assert len(set(blocks)) == len(blocks)
        for block, digest in plan.blocks_to_store:
            assert computed_by.get(block, 0) <= last_known, "stored before its step is known to be right"
            assert stores.is_named(digest, device[block]), f"block {block} is not what it is stored as"
            if not stores.lossy or rng.random() < 0.9:
                stores.values[self._group_of[block], digest] = list(device[block])
        if stores.lossy and stores.values and rng.random() < 0.1:
            del stores.values[rng.choice(list(stores.values))]

    def begin(self, plan: StepPlan) -> None:
        rng, lossy = self.stores.rng, self.stores.lossy
        for fetch in plan.fetch:
            assert fetch.fetch_id not in self.fetching and fetch.fetch_id not in self.found
            assert fetch.blocks and len(set(fetch.blocks)) == len(fetch.blocks)
            delay = rng.choice([0, 0, 1, 2, 5, None]) if lossy else self.delay
            self.fetching[fetch.fetch_id] = [delay, fetch.blocks]
            self.num_begun += 1

    def place(self, plan: StepPlan, device: list[list[Any]]) -> None:
        for fetch_id, index, block in plan.blocks_fetched:
            (number, digest), value = self.found[fetch_id][index]
            assert number == self._group_of[block], "of another group"
            assert self.stores.is_named(digest, value)
            device[block] = list(value)
            self.stores.num_placed += 1
        for fetch_id in plan.drop_fetches:
            self.fetching.pop(fetch_id, None)
            self.found.pop(fetch_id, None)

    def report(self, plan: StepPlan, result: StepResult) -> None:
        rng, stores = self.stores.rng, self.stores
        for fetch_id, (delay, keys) in list(self.fetching.items()):
            if delay is None:
                continue
            if delay and not plan.awaits_prepared:
                self.fetching[fetch_id][0] = delay - 1
                continue
            values: list[tuple[Key, list[Any]]] = []
            for key in keys:
                if key not in stores.values or (stores.lossy and rng.random() < 0.05):
                    break
                values.append((key, stores.values[key]))
            del self.fetching[fetch_id]
            self.found[fetch_id] = values
            result.fetched[fetch_id] = len(values)
            seconds = rng.choice([1e-4, 1e-2]) if stores.lossy else self.seconds_per_block
            result.fetch_times.append((len(values), seconds * len(keys)))
