"""Finds the request at which the scheduler raises: suspects are computed one at a time, while all others wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from traceback import walk_tb
from types import TracebackType

import msgspec

from octavo.core.failures import SequenceFailure
from octavo.core.plan import GroupOutput
from octavo.core.request import EngineCoreRequest, SequenceStatus
from octavo.scheduler.groups import Sequence, SequenceGroup, suspend
from octavo.scheduler.scheduler import Scheduler

#: Tokens that a suspect computes alone before it is acquitted; doubled after each failure without a culprit.
_TRIAL_TOKENS = 8
#: The engine gives up after this number of exceptions without any request; after calm steps the count restarts.
_MOST_ROUNDS, _CALM_STEPS = 4, 256


class Isolation:
    """Stands before the scheduler. Owns the requests that are kept out of it while a suspect is computed alone.

    Suspects are requests that were computed when the scheduler raised or an engine core died (``ResumePoint.alone``). A
    suspect is acquitted when it has ended or got a few tokens by itself; if the scheduler raises with nothing else in
    it, the suspect ends with an error. Then the others go on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Suspects to compute alone, each with its number of tokens.
        self._suspects: deque[tuple[EngineCoreRequest, int]] = deque()
        #: By group id, requests that wait until no suspect is left.
        self._held: dict[int, EngineCoreRequest] = {}
        #: The suspect that is in the scheduler alone, and the number of tokens that acquits it.
        self._trial: tuple[int, int] | None = None
        self._adding: EngineCoreRequest | None = None
        #: Exceptions without a culprit, and steps since the last one.
        self._rounds = self._calm = 0
        #: Called with each group that begins to be computed alone, and with each that is added.
        self.on_trial: Callable[[int], object] = lambda group_id: None
        self.on_attempt: Callable[[int], object] = lambda group_id: None

    @property
    def is_active(self) -> bool:
        on_trial = self._trial is not None and self._trial[0] in self._scheduler.queues.groups
        return on_trial or bool(self._suspects or self._held)

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request: in the scheduler, or until all suspects have been computed."""
        alone = 0 if request.progress is None else request.progress.alone
        if alone and request.progress is not None:
            progress = msgspec.structs.replace(request.progress, alone=0)
            if not self.is_active:
                for group_id in list(self._scheduler.queues.groups):
                    self._set_aside(group_id)
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

    def _set_aside(self, group_id: int) -> None:
        group = self._scheduler.queues.groups[group_id]
        request = suspend(group)
        assert request is not None, "an unfinished group can go on"
        self._scheduler.finish_group(group_id)
        self._held[group_id] = request

    def abort(self, group_id: int) -> bool:
        """Ends a request that is kept out of the scheduler; False if it is not."""
        if self._held.pop(group_id, None) is not None:
            return True
        before = len(self._suspects)
        self._suspects = deque(entry for entry in self._suspects if entry[0].group_id != group_id)
        return len(self._suspects) < before

    def stop(self, group_id: int, index: int) -> bool:
        """Ends one sequence of a request that is kept out of the scheduler; False if it is not."""
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
        """Before each step: acquits the suspect if it has enough tokens, and goes on with the next or with all."""
        if self._rounds:
            self._calm += 1
            if self._calm > _CALM_STEPS:
                self._rounds = 0
        if self._trial is not None:
            group_id, enough = self._trial
            group = self._scheduler.queues.groups.get(group_id)
            if group is not None:
                prompt = len(group.request.prompt_token_ids)
                if sum(len(seq.token_ids) - prompt for seq in group.seqs) < enough:
                    return
            self._trial = None
            if group is not None and self._suspects:
                self._set_aside(group_id)
        if self._suspects:
            request, alone = self._suspects.popleft()
            self._trial = (request.group_id, _num_output_tokens(request) + alone)
            self.on_trial(request.group_id)
            self._add(request)
        while self._held and self._trial is None:
            self._add(self._held.pop(min(self._held)))

    def observe_failure(
        self, error: Exception, requests: Iterable[EngineCoreRequest]
    ) -> tuple[GroupOutput | None, bool]:
        """The scheduler has raised, and these requests were taken out of it.

        Returns the end of the culprit, if it is certain; and whether to go on: not if the scheduler raises again and
        again without any request. Requests that fail only together go on one at a time.
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
            # The other suspects are no longer suspected.
            open_requests |= {request.group_id: request for request, _ in self._suspects}
            self._suspects.clear()
            self._held |= open_requests
            reason = f"the engine failed at this request: {type(error).__name__}: {error}"
            return GroupOutput(trial[0], SequenceStatus.FINISHED_ERROR.value, SequenceFailure(reason)), True
        self._rounds, self._calm = self._rounds + 1, 0
        # Requests of the traceback first; then the latest arrivals, as the earlier ones went well so far.
        order = [*dict.fromkeys(named), *sorted(open_requests.keys() - set(named), reverse=True)]
        alone = _TRIAL_TOKENS << min(self._rounds, 10)
        self._suspects.extendleft((open_requests[group_id], alone) for group_id in reversed(order))
        return None, bool(order) or self._rounds <= _MOST_ROUNDS


def groups_named_in(traceback: TracebackType | None) -> list[int]:
    """Ids of groups among the local variables of a traceback, innermost frame first: which suspects to try first."""
    group_ids: dict[int, None] = {}
    for frame in reversed([frame for frame, _ in walk_tb(traceback)]):
        for value in frame.f_locals.values():
            if isinstance(value, SequenceGroup | EngineCoreRequest):
                group_ids[value.group_id] = None
            elif isinstance(value, Sequence):
                group_ids[value.group.group_id] = None
    return list(group_ids)


def _num_output_tokens(request: EngineCoreRequest) -> int:
    if (progress := request.progress) is None:
        return 0
    beams = [] if progress.beams is None else progress.beams.token_ids
    return sum(len(completion.token_ids) for completion in progress.completions) + sum(map(len, beams))


def _without(request: EngineCoreRequest, index: int) -> EngineCoreRequest | None:
    """The request without one completion; None if it was the last."""
    if request.progress is None or request.progress.beams is not None:
        return request
    left = [completion for completion in request.progress.completions if completion.index != index]
    if not left and request.progress.completions:
        return None
    return msgspec.structs.replace(request, progress=msgspec.structs.replace(request.progress, completions=left))
