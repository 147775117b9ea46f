"""Which engine core has each open request: one that the router chooses, and another when that is lost or drained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from octavo.core.errors import EngineDeadError, InvalidRequestError
from octavo.core.messages import Add, ToCore
from octavo.core.progress import AdmissionStats
from octavo.engine.blame import GUILTY, Blame
from octavo.engine.replica import OpenRequest, Replica
from octavo.engine.request_state import RequestState
from octavo.engine.router import Router

#: Output tokens that a request without a limit is expected to take.
_EXPECTED_TOKENS = 256

#: Why requests end that cannot go on. The first are those that were for one core only.
CORE_ENDED = "the engine's process has ended"
_MODEL_CHANGED = (
    "the model's files were changed while the answer was being generated, and no engine has those that it began with"
)


class Placement:
    """Owns the open requests: each is at one replica, or waits until one takes requests. For one event loop."""

    def __init__(self, replicas: Sequence[Replica], router: Router) -> None:
        self.router = router
        self._replicas = replicas
        self._open: dict[int, OpenRequest] = {}
        #: Of them, those that wait for a core.
        self._waiting: dict[int, OpenRequest] = {}
        self._blame = Blame()
        #: Called with a request that has failed, and why.
        self.on_failed: Callable[[RequestState, str], None] = lambda request, reason: None
        #: Requests that went from one core to another, or to the same replica's next one.
        self.num_resumed = 0

    def add(self, request: RequestState, number: int | None = None) -> None:
        """Gives a request to the core of replica ``number``, or to the one that the router chooses.

        Raises:
            InvalidRequestError: as ``CoreClient.send``.
        """
        group = request.group
        limit = group.task.max_tokens
        work = len(group.prompt_token_ids) + (_EXPECTED_TOKENS if limit is None else limit)
        entry = self._open[request.group_id] = OpenRequest(request, work, is_fixed=number is not None)
        try:
            self._place(entry, number)
        except InvalidRequestError:
            self.forget(request.group_id)
            raise

    def _place(self, entry: OpenRequest, number: int | None = None) -> None:
        """Sends a request to a core, or has it wait for one, or fail if there will be none that can go on with it."""
        usable = [replica.number for replica in self._replicas if _may_take(replica, entry)]
        if number is None and not usable:
            later = any(replica.status == "starting" or replica.is_restarting for replica in self._replicas)
            if not later and entry.digest is not None and any(replica.lives for replica in self._replicas):
                self._fail(entry, _MODEL_CHANGED)
            else:
                self._waiting[entry.group_id] = entry
            return
        self._waiting.pop(entry.group_id, None)
        group = entry.request.group
        chosen = self.router.choose(
            group.prompt_token_ids, entry.work, group.cache_context, usable if number is None else [number]
        )
        entry.replica = replica = self._replicas[chosen]
        replica.open[entry.group_id] = entry
        self.num_resumed += entry.was_sent
        entry.was_sent = True
        replica.client.send(Add(entry.request.resume(self._blame.alone(entry.request))))

    def _fail(self, entry: OpenRequest, reason: str) -> None:
        self.forget(entry.group_id)
        self.on_failed(entry.request, reason)

    def send(self, group_id: int, message: ToCore) -> None:
        """Sends a message about a request to the core that has it; nothing happens if none has."""
        entry = self._open.get(group_id)
        if entry is not None and entry.replica is not None:
            entry.replica.client.send(message)

    def forget(self, group_id: int) -> None:
        """The request has ended."""
        entry = self._open.pop(group_id, None)
        if entry is not None:
            self._take_back(entry)
            self._waiting.pop(group_id, None)
            self._blame.forget(group_id)

    def observe_admissions(self, replica: Replica, admissions: Iterable[AdmissionStats]) -> None:
        """The core of a replica has begun these requests, so that only the same model can go on with them."""
        for admission in admissions:
            entry = self._open.get(admission.group_id)
            if entry is not None:
                entry.digest = replica.digest

    # --- from one core to another -----------------------------------------------------------------------------------

    def _take_back(self, entry: OpenRequest) -> None:
        """The core that had a request has it no longer."""
        if entry.replica is not None:
            entry.replica.open.pop(entry.group_id, None)
            self.router.release(entry.replica.number, entry.work)
            entry.replica = None

    def take_all(self, replica: Replica, error: EngineDeadError, computed: set[int] | None) -> list[OpenRequest]:
        """The requests that a core had, which has died of ``error``; that which is to blame for it fails.

        ``computed``: the groups of its last steps; None: it was killed from outside.
        """
        lost, verdict = list(replica.open.values()), None
        if computed is not None:
            requests = [entry.request for entry in lost]
            verdict = self._blame.observe_death(computed, requests, replica.number)
        for entry in lost:
            self._take_back(entry)
        self.router.restart(replica.number)
        if verdict is not None:
            lost = [entry for entry in lost if entry.group_id != verdict.group_id]
            self._fail(self._open[verdict.group_id], GUILTY.format(error))
            for number in verdict.replicas:  # it is not the cores that fail: one request must not end a server
                self._replicas[number].restarts.forgive(1)
        return lost

    async def move(self, number: int, next_digest: str | None = None) -> int:
        """Gives the requests of a replica, which takes no more, to others that can go on with them: how many.

        ``next_digest``: of the model that the next core of this replica will have, for which requests can wait. Those
        that can go on nowhere else stay.

        Raises:
            EngineDeadError: its core has died meanwhile; its requests are where they shall be.
        """
        replica = self._replicas[number]
        others = [r for r in self._replicas if r is not replica]
        movable = [
            i
            for i, entry in replica.open.items()
            if not entry.is_fixed
            and (
                any(_may_take(r, entry) for r in others)
                or (next_digest is not None and entry.digest in (None, next_digest))
            )
        ]
        if not movable:
            return 0
        await replica.client.hand_over(movable)
        moved = [entry for i in movable if (entry := replica.open.get(i)) is not None]
        self.send_on(moved)
        return len(moved)

    def send_on(self, entries: list[OpenRequest]) -> None:
        """Requests that no core has any more go to other cores, in order of their arrival."""
        entries.sort(key=lambda entry: entry.group_id)
        for entry in entries:
            self._take_back(entry)
        for entry in entries:
            if entry.is_fixed:
                self._fail(entry, CORE_ENDED)
            else:
                self._place(entry)

    def send_waiting(self) -> None:
        """Places the requests that wait for a core again: a replica has begun to take requests, or one more is lost."""
        self.send_on(list(self._waiting.values()))


def _may_take(replica: Replica, entry: OpenRequest) -> bool:
    return replica.status == "ready" and entry.digest in (None, replica.digest)
