"""A new engine core in the place of one that has lost a worker, for an engine whose core is in its process."""

from __future__ import annotations

import logging

from octavo.core.engine_outputs import EngineCoreOutputs, GroupOutput
from octavo.core.errors import EngineDeadError, EngineKilledError, OctavoError
from octavo.core.request import SequenceStatus
from octavo.core.stats import SchedulerStats, ended_stats, sum_stats
from octavo.engine.blame import GUILTY, Blame
from octavo.engine.core import EngineCore
from octavo.engine.core_starter import RESTART_WINDOW, RestartLimit
from octavo.engine.flight_recorder import LastSteps
from octavo.engine.front_end import FrontEnd
from octavo.engine.shared_prefixes import request_id_of
from octavo.loader.checkpoint_digest import checkpoint_digest

logger = logging.getLogger("octavo")


class Recovery:
    """Owns how often a core was replaced, what is held against requests, and the totals of the cores before.

    A worker that was killed, hangs or has crashed ends its core with all workers. A new core has the same adapters and
    shared prefixes, and open requests go on there with the same bits, in the order of their arrival. What a program has
    changed on workers by ``collective_rpc`` is lost.
    """

    def __init__(self, front_end: FrontEnd, core: EngineCore) -> None:
        self._front_end = front_end
        self._restarts = RestartLimit(core.options.engine_restarts)
        self._blame = Blame()
        self._digest = self._find_digest()
        self._totals: SchedulerStats | None = None
        self._watch(core)

    def stats(self, core: EngineCore) -> SchedulerStats:
        """Those of the core, with the totals of the cores before it."""
        stats = core.scheduler.stats()
        return sum_stats([stats] if self._totals is None else [self._totals, stats])

    def recover(self, dead: EngineCore, error: EngineDeadError) -> tuple[EngineCore, EngineCoreOutputs]:
        """A core in the place of one that has raised ``error``, with all open requests but those that end thereby.

        Raises:
            EngineDeadError: the core was shut down on purpose, too many have died or could not be made, or the model
                was changed.
        """
        if dead.was_shut_down:
            raise error
        requests, guilty = self._front_end.outputs.open_requests(), None
        if not isinstance(error, EngineKilledError):
            verdict = self._blame.observe_death(self._last_steps.groups, requests)
            if verdict is not None:
                guilty = verdict.group_id
                self._restarts.forgive(len(verdict.replicas))
        core = self._replace(dead, error)
        ended = ended_stats(dead.scheduler.counts())
        self._totals = ended if self._totals is None else sum_stats([self._totals, ended])
        outputs = EngineCoreOutputs()
        for request in requests:
            if request.group_id == guilty:
                reason = GUILTY.format(error)
                outputs.groups.append(GroupOutput(guilty, SequenceStatus.FINISHED_ERROR.value, reason))
            else:
                core.add(request.resume(self._blame.alone(request)))
        return core, outputs

    def _replace(self, core: EngineCore, error: EngineDeadError) -> EngineCore:
        """A core like the others before, with no request yet."""
        files = self._front_end.files
        while self._restarts.take():
            logger.warning(
                "%s; they are started again, for the %d. time in %g minutes, and %d open requests go on",
                error, self._restarts.num_recent, RESTART_WINDOW / 60, self._front_end.outputs.num_open,
            )  # fmt: skip
            core.shutdown()
            if self._find_digest() != self._digest:
                raise EngineDeadError(f"{error}; the model's files were changed, so that no answer can go on")
            try:
                core = EngineCore(files.options, files.folder, core.replica)
                self._make_like_before(core)
                return core
            except OctavoError as e:
                error = e if isinstance(e, EngineDeadError) else EngineDeadError(f"{error}; there is no other: {e}")
        raise error

    def _make_like_before(self, core: EngineCore) -> None:
        """Pins what was pinned."""
        self._watch(core)
        front_end = self._front_end
        front_end.adapters.on_unpin = core.scheduler.preparations.unpin
        for adapter in front_end.adapters:
            if adapter.pinned:
                core.pin_adapter(adapter.ref)
        for prefix in front_end.prefixes:
            if request_id_of(prefix.name) not in front_end.outputs:  # else it goes on as other requests do
                core.add(front_end.prefixes.request(prefix).group)
        while core.has_work:
            core.step()

    def _watch(self, core: EngineCore) -> None:
        core.recorder = self._last_steps = LastSteps(core.max_in_flight)

    def _find_digest(self) -> str:
        files = self._front_end.files
        return checkpoint_digest(files.options.model, files.folder)
