"""Which adapters are loaded, and when: those of the first waiting groups, before they are needed."""

from __future__ import annotations

import logging

from octavo.core.plan import StepResult
from octavo.scheduler.adapter_queue import AdapterQueue
from octavo.scheduler.adapters import AdapterPool, Adapters, AdapterState
from octavo.scheduler.groups import SequenceGroup
from octavo.scheduler.queues import Queues

logger = logging.getLogger("octavo")


class AdapterLoading:
    """Begins loads in the order in which groups wait, as far as host memory has room.

    An adapter that groups wait for makes room only for that of a group which goes before all of them: so what is loaded
    ahead does not displace what is needed sooner, and the first group of all can always be served.
    """

    def __init__(self, queues: Queues, adapters: Adapters) -> None:
        self._queues, self._adapters = queues, adapters

    def start_loads(self, now: float) -> None:
        """Begins to load what is to be loaded next."""
        for pool in self._adapters.pools:
            self._load_pinned(pool)
            while pool.may_load:
                group = self._first(pool, (AdapterState.UNLOADED,), now)
                if group is None or not (pool.has_room or self._make_room(pool, group, now)):
                    break
                assert group.request.adapter is not None
                pool.load(pool.adapters[group.request.adapter.key])

    def _load_pinned(self, pool: AdapterPool) -> None:
        for adapter in list(pool.unready_pins.values()):
            if adapter.state is AdapterState.UNLOADED and pool.may_load and (pool.has_room or self._drop_last(pool)):
                pool.load(adapter)

    def _make_room(self, pool: AdapterPool, group: SequenceGroup, now: float) -> bool:
        """Drops an adapter that groups wait for, if ``group`` goes before all that wait for what is in host memory."""
        if not pool.wanted:
            return False
        first = self._first(pool, (AdapterState.LOADED, AdapterState.READY), now)
        order = self._queues.order
        return (first is None or order(group) < order(first)) and self._drop_last(pool)

    def _drop_last(self, pool: AdapterPool) -> bool:
        """Drops the adapter in no use whose first group is the last in order; False if there is none."""
        if not pool.wanted:
            return False
        order = self._queues.order
        pool.drop(max(pool.wanted, key=lambda adapter: min(map(order, self._heads(adapter.key)))))
        return True

    def _first(self, pool: AdapterPool, states: tuple[AdapterState, ...], now: float) -> SequenceGroup | None:
        found = (queue.peek_state(pool, state, now) for queue in self._adapter_queues for state in states)
        return min((g for g in found if g is not None), key=self._queues.order, default=None)

    def _heads(self, key: str) -> list[SequenceGroup]:
        lanes = (queue.lane_of(key) for queue in self._adapter_queues)
        heads = (lane.first_by_key() for lane in lanes if lane is not None)
        return [head for head in heads if head is not None]

    @property
    def _adapter_queues(self) -> list[AdapterQueue]:
        return [queue for queue in self._queues.not_running if isinstance(queue, AdapterQueue)]

    def update(self, result: StepResult) -> list[tuple[SequenceGroup, str]]:
        """Takes what a result says of loads; returns the groups whose adapter cannot be loaded, and why."""
        stats, failed = self._adapters.stats, []
        stats.seconds += result.adapter_seconds
        stats.longest_seconds = max(stats.longest_seconds, result.adapter_seconds)
        for pool in self._adapters.pools:
            for key in result.loaded_adapters:
                pool.finish_load(key)
            for key, message in result.adapter_errors.items():
                if pool.fail_load(key):
                    logger.warning("an adapter could not be loaded: %s", message)
                    failed += [(group, message) for group in self._groups(key)]
        return failed

    def _groups(self, key: str) -> list[SequenceGroup]:
        """All that wait for this adapter, in order of arrival."""
        lanes = (queue.lane_of(key) for queue in self._adapter_queues)
        groups = [group for lane in lanes if lane is not None for group in lane.groups()]
        return sorted(groups, key=lambda group: group.arrival)
