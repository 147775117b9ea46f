"""Finds the request at which the scheduler raises: suspects are computed one at a time, while all others wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

import msgspec

from octavo.core.plan import GroupOutput
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.scheduler.groups import Sequence, SequenceGroup, suspend
from octavo.scheduler.scheduler import Scheduler

#: Tokens that a suspect computes alone before it is acquitted; twice as many each time that nobody was found guilty.
_TRIAL_TOKENS = 8
#: Exceptions in a row without a request that could be guilty, after which the engine gives up; and steps after which
#: exceptions are forgotten.
_MOST_ROUNDS, _CALM_STEPS = 4, 256


class Isolation:
    """Stands before the scheduler. Owns the requests that are kept out of it while a suspect is computed alone.

    Most of the time there are none, and requests go to the scheduler at once. Suspects are those that were computed
    when the scheduler raised, or that come from a front end whose engine core has died with them
    (``ResumePoint.alone``). A suspect is acquitted when it has ended or got a few tokens by itself; one at which the
    scheduler raises when nothing else is in it ends with an error. Then the others go on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Suspects that have still to be computed alone, and for how many tokens each.
        self._suspects: deque[tuple[EngineCoreRequest, int]] = deque()
        #: By group id, requests that wait until no suspect is left.
        self._held: dict[int, EngineCoreRequest] = {}
        #: The suspect that is in the scheduler alone, and the number of tokens that acquits it.
        self._trial: tuple[int, int] | None = None
        #: The request that is being added to the scheduler.
        self._adding: EngineCoreRequest | None = None
        #: Exceptions for which nobody was found guilty, and steps since the last one.
        self._rounds = self._calm = 0
        #: Called with the group of each suspect that begins to be computed alone, and of each that is added.
        self.on_trial: Callable[[int], object] = lambda group_id: None
        self.on_attempt: Callable[[int], object] = lambda group_id: None

    @property
    def is_active(self) -> bool:
        """Whether requests are kept out of the scheduler."""
        on_trial = self._trial is not None and self._trial[0] in self._scheduler.queues.groups
        return on_trial or bool(self._suspects or self._held)

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request: in the scheduler, or until suspects have been computed."""
        alone = 0 if request.progress is None else request.progress.alone
        if alone and request.progress is not None:
            progress = msgspec.structs.replace(request.progress, alone=0)
            if not self.is_active:
                self._set_all_aside()
            self._suspects.append((msgspec.structs.replace(request, progress=progress), alone))
        elif self.is_active:
            self._held[request.group_id] = request
        else:
            self._add(request)

    def _add(self, request: EngineCoreRequest) -> None:
        self._adding = request
        self.on_attempt(request.group_id)
        self._scheduler.add(request)
        self._adding = None

    def _set_all_aside(self) -> None:
        """Takes all groups out of a scheduler that works."""
        for group_id in list(self._scheduler.queues.groups):
            self._set_aside(group_id)

    def _set_aside(self, group_id: int) -> None:
        group = self._scheduler.queues.groups[group_id]
        request = suspend(group)
        assert request is not None, "an unfinished group can go on"
        self._scheduler.finish_group(group_id)
        self._held[group_id] = request

    def abort(self, group_id: int) -> bool:
        """Ends a request that is kept out of the scheduler; whether it was."""
        if self._held.pop(group_id, None) is not None:
            return True
        before = len(self._suspects)
        self._suspects = deque(entry for entry in self._suspects if entry[0].group_id != group_id)
        return len(self._suspects) < before

    def stop(self, group_id: int, index: int) -> bool:
        """Ends one sequence of a request that is kept out of the scheduler; whether it was."""
        if (request := self._held.pop(group_id, None)) is not None:
            if (left := _without(request, index)) is not None:
                self._held[group_id] = left
            return True
        for place, (request, alone) in enumerate(self._suspects):
            if request.group_id == group_id:
                del self._suspects[place]
                if (left := _without(request, index)) is not None:
                    self._suspects.insert(place, (left, alone))
                return True
        return False

    def turn(self) -> None:
        """Before each step: acquits the suspect if it has come far enough, and goes on with the next or with all."""
        if self._rounds:
            self._calm += 1
            if self._calm > _CALM_STEPS:
                self._rounds = 0
        if self._trial is not None:
            group_id, enough = self._trial
            group = self._scheduler.queues.groups.get(group_id)
            if group is not None and _num_generated(group) < enough:
                return
            self._trial = None
            if group is not None and self._suspects:
                self._set_aside(group_id)
        if self._suspects:
            request, alone = self._suspects.popleft()
            self._trial = (request.group_id, _num_known(request) + alone)
            self.on_trial(request.group_id)
            self._add(request)
        while self._held and self._trial is None:
            self._add(self._held.pop(min(self._held)))

    def observe_failure(
        self, error: Exception, requests: Iterable[EngineCoreRequest]
    ) -> tuple[GroupOutput | None, bool]:
        """The scheduler has raised, and these requests were taken out of it: the end of the guilty one, if it is known.

        Returns:
            That, and whether to go on; not so if the scheduler raises again and again although it has no request. One
            that raises only at several requests together goes on with them one at a time.
        """
        open_requests = {request.group_id: request for request in requests}
        named = [group_id for group_id in groups_named_in(error.__traceback__) if group_id in open_requests]
        if (adding := self._adding) is not None:
            self._adding = None
            open_requests.setdefault(adding.group_id, adding)
            named.insert(0, adding.group_id)
        trial, self._trial = self._trial, None
        if trial is not None and trial[0] in open_requests:
            del open_requests[trial[0]]
            self._rounds = 0
            # The other suspects are as good as all others as long as nothing else happens.
            open_requests |= {request.group_id: request for request, _ in self._suspects}
            self._suspects.clear()
            self._held |= open_requests
            reason = f"the engine failed at this request: {type(error).__name__}: {error}"
            return GroupOutput(trial[0], SequenceStatus.FINISHED_ERROR.value, reason), True
        self._rounds, self._calm = self._rounds + 1, 0
        # Those first that the exception is about; then the last to arrive, as those before it went well so far.
        order = [*dict.fromkeys(named), *sorted(open_requests.keys() - set(named), reverse=True)]
        alone = _TRIAL_TOKENS << min(self._rounds, 10)
        self._suspects.extendleft((open_requests[group_id], alone) for group_id in reversed(order))
        return None, bool(order) or self._rounds <= _MOST_ROUNDS


def groups_named_in(traceback: TracebackType | None) -> list[int]:
    """The groups that the frames of an exception were about, those of the innermost frame first.

    A frame is about the groups, sequences and requests among its local variables. This only says where to look first.
    """
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    found: dict[int, None] = {}
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, SequenceGroup | EngineCoreRequest):
                found[value.group_id] = None
            elif isinstance(value, Sequence):
                found[value.group.group_id] = None
    return list(found)


def _num_generated(group: SequenceGroup) -> int:
    prompt = len(group.request.prompt_token_ids)
    return sum(len(seq.token_ids) - prompt for seq in group.seqs)


def _num_known(request: EngineCoreRequest) -> int:
    """Tokens that it has already."""
    progress = request.progress
    if progress is None:
        return 0
    beams = [] if progress.beams is None else progress.beams.token_ids
    return sum(len(completion.token_ids) for completion in progress.completions) + sum(map(len, beams))


def _without(request: EngineCoreRequest, index: int) -> EngineCoreRequest | None:
    """The request without a completion that has ended; None if it was the last."""
    if request.progress is None or request.progress.beams is not None:
        return request
    left = [completion for completion in request.progress.completions if completion.index != index]
    if len(left) == len(request.progress.completions):
        return request
    if not left:
        return None
    progress = msgspec.structs.replace(request.progress, completions=left)
    return msgspec.structs.replace(request, progress=progress)
