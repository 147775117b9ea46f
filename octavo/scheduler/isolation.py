"""Finds the request at which steps fail: suspects are computed in halves, and at last alone, while all others wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from traceback import walk_tb
from types import TracebackType

import msgspec

from octavo.core.errors import WorkerError
from octavo.core.failures import STEP, SequenceFailure
from octavo.core.plan import GroupOutput
from octavo.core.request import Beam, EngineCoreRequest, Generate, SequenceStatus
from octavo.core.sampling_params import SamplingParams
from octavo.scheduler.groups import Sequence, SequenceGroup, suspend
from octavo.scheduler.scheduler import Scheduler

#: Tokens that a suspect computes before it is acquitted; doubled each time that suspects fail only in company.
_TRIAL_TOKENS = 8
#: The engine gives up after this number of exceptions without any request; after calm steps the count restarts.
_MOST_ROUNDS, _CALM_STEPS = 4, 256
#: Group id of the engine's own request, which no front end gives.
PROBE = -2
_PROBE_TOKENS = 2
#: Failures of it in a row, without any other request, after which the engine gives up.
_MOST_PROBES = 2


class Isolation:
    """Stands before the scheduler. Owns the requests that are kept out of it while suspects are computed by themselves.

    Suspects are the requests of a step that failed, those that were computed when the scheduler raised, or when an
    engine core died (``ResumePoint.alone``). They are computed in sets: a set that fails is halved, so that one guilty
    request among n costs at most log2 n + 1 further failures. Suspects are acquitted when they have ended or each got a
    few tokens; one that fails with nothing else in the scheduler ends with an error. Then the others go on.

    After a failed step a request of the engine's own is computed first (``PROBE``): if that fails twice too, no request
    is to blame but the engine. Requests for vectors, and of encoder-decoder networks, go without it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Sets of suspects to compute by themselves, each with the number of tokens that acquits.
        self._suspects: deque[tuple[list[EngineCoreRequest], int]] = deque()
        #: By group id, requests that wait until no suspect is left.
        self._held: dict[int, EngineCoreRequest] = {}
        #: The suspects that are in the scheduler alone, and the number of tokens that acquits each.
        self._trial: dict[int, int] | None = None
        self._adding: EngineCoreRequest | None = None
        #: Groups of the last step that failed.
        self.last_failed: frozenset[int] = frozenset()
        #: Exceptions without a culprit, and steps since the last one.
        self._rounds = self._calm = 0
        #: Failures of the engine's own request in a row.
        self._probes = 0
        #: Called when suspects begin to be computed by themselves, with the first, and with each group that is added.
        self.on_trial: Callable[[int], object] = lambda group_id: None
        self.on_attempt: Callable[[int], object] = lambda group_id: None

    @property
    def is_active(self) -> bool:
        on_trial = self._trial is not None and not self._trial.keys().isdisjoint(self._scheduler.queues.groups)
        return on_trial or bool(self._suspects or self._held)

    @property
    def held_ids(self) -> set[int]:
        """The groups that are kept out of the scheduler."""
        suspects = {request.group_id for requests, _ in self._suspects for request in requests}
        return (suspects | self._held.keys()) - {PROBE}

    @property
    def is_probing(self) -> bool:
        """Whether the engine's own request is computed, of whose outputs nobody is told."""
        return self._trial is not None and PROBE in self._trial

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request: in the scheduler, or until all suspects have been computed."""
        alone = 0 if request.progress is None else request.progress.alone
        if alone and request.progress is not None:
            progress = msgspec.structs.replace(request.progress, alone=0)
            if not self.is_active:
                for group_id in list(self._scheduler.queues.groups):
                    self._set_aside(group_id)
            self._suspects.append(([msgspec.structs.replace(request, progress=progress)], alone))
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
        return self._replace(group_id, lambda request: None)

    def stop(self, group_id: int, index: int) -> bool:
        """Ends one sequence of a request that is kept out of the scheduler; False if it is not."""
        return self._replace(group_id, lambda request: _without(request, index))

    def _probe(self) -> EngineCoreRequest:
        """A prompt of two tokens, and two tokens of output, as far as the context reaches: a step of each kind."""
        params = SamplingParams(max_tokens=_PROBE_TOKENS, seed=0, ignore_eos=True, detokenize=False)
        prompt = [0] * min(2, self._scheduler.max_model_len - 1)
        return EngineCoreRequest(group_id=PROBE, prompt_token_ids=prompt, task=Generate(params, seed=0))

    def _replace(self, group_id: int, change: Callable[[EngineCoreRequest], EngineCoreRequest | None]) -> bool:
        """Changes a request that is kept out of the scheduler, or drops it (None); False if it is not kept."""
        if (request := self._held.pop(group_id, None)) is not None:
            if (left := change(request)) is not None:
                self._held[group_id] = left
            return True
        for requests, _ in self._suspects:
            for place, request in enumerate(requests):
                if request.group_id == group_id:
                    left = change(request)
                    requests[place : place + 1] = [] if left is None else [left]
                    return True
        return False

    def turn(self) -> None:
        """Before each step: acquits the suspects that have enough tokens, and goes on with the next or with all."""
        if self._rounds:
            self._calm += 1
            if self._calm > _CALM_STEPS:
                self._rounds = 0
        if self._trial is not None:
            groups = self._scheduler.queues.groups
            unfinished = [groups[group_id] for group_id in self._trial if group_id in groups]
            if any(_num_generated(group) < self._trial[group.group_id] for group in unfinished):
                return
            self._trial = None
            if self._suspects:
                for group in unfinished:
                    self._set_aside(group.group_id)
        while self._suspects and self._trial is None:
            requests, alone = self._suspects.popleft()
            if requests:  # else all were aborted
                self._trial = {request.group_id: _num_output_tokens(request) + alone for request in requests}
                self._held |= {request.group_id: request for request in requests}
                self.on_trial(requests[0].group_id)
                for request in requests:
                    self._add(self._held.pop(request.group_id))
        while self._held and self._trial is None:
            self._add(self._held.pop(min(self._held)))

    def observe_failure(
        self,
        error: Exception,
        requests: Iterable[EngineCoreRequest],
        *,
        failed: Collection[int] | None = None,
        named: int | None = None,
    ) -> tuple[GroupOutput | None, bool]:
        """The scheduler has raised, or a step has failed; these requests were taken out of the scheduler.

        ``failed``: the groups of the failed step, one of which it may have ``named``; None: the scheduler has raised.

        Returns the end of the culprit, if it is certain; and whether to go on: not if the scheduler raises again and
        again without any request, or a step fails that computes the engine's own. Requests that fail only together go
        on one at a time.
        """
        open_requests = {request.group_id: request for request in requests}
        open_requests.pop(PROBE, None)
        if failed is None:
            first = [group_id for group_id in groups_named_in(error.__traceback__) if group_id in open_requests]
        else:
            first = [named] if named in open_requests else []
            self.last_failed = self.last_failed if self.is_probing else frozenset(failed)
        if (adding := self._adding) is not None:
            self._adding = None
            open_requests.setdefault(adding.group_id, adding)
            first.insert(0, adding.group_id)
        was_probing = self.is_probing
        trial, self._trial = self._trial, None
        if was_probing:
            self._suspects.appendleft(([self._probe()], _PROBE_TOKENS))
            self._probes += 1
            return None, failed is None or self._probes < _MOST_PROBES
        suspects = [i for i in open_requests if (failed is None or i in failed) and (trial is None or i in trial)]
        if trial is not None and len(suspects) == 1:
            [guilty] = suspects
            del open_requests[guilty]
            self._rounds = 0
            # The other suspects are no longer suspected.
            self._held |= open_requests | {r.group_id: r for requests, _ in self._suspects for r in requests}
            self._suspects.clear()
            reason = f"the engine failed at this request: {describe(error)}"
            return GroupOutput(guilty, SequenceStatus.FINISHED_ERROR.value, SequenceFailure(reason, STEP)), True
        alone = _TRIAL_TOKENS << min(self._rounds, 10)
        if trial is not None and not suspects:  # a step of the set before, which was in flight
            self._suspects.appendleft((list(open_requests.values()), alone))
            return None, True
        if trial is None:
            self._rounds, self._calm = self._rounds + 1, 0
            alone = _TRIAL_TOKENS << min(self._rounds, 10)
        # Named requests first; then the latest arrivals, as the earlier ones went well so far.
        first = list(dict.fromkeys(i for i in first if i in suspects))
        others = sorted(set(suspects) - set(first), reverse=True)
        half = len(others) if first else (len(others) + 1) // 2
        sets = [*([i] for i in first), others[:half], others[half:]]
        self._suspects.extendleft(([open_requests[i] for i in each], alone) for each in reversed(sets) if each)
        self._held |= {i: request for i, request in open_requests.items() if i not in suspects}
        if failed is not None and any(_is_decoder(open_requests[i]) for i in suspects):
            self._suspects.appendleft(([self._probe()], _PROBE_TOKENS))
            self._probes = 0
        return None, failed is not None or bool(suspects) or self._rounds <= _MOST_ROUNDS


def describe(error: Exception) -> str:
    """The kind and the text of an exception; a ``WorkerError`` has the kind in its text."""
    return str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"


def _is_decoder(request: EngineCoreRequest) -> bool:
    return isinstance(request.task, Generate | Beam) and request.encoder_input is None


def _num_generated(group: SequenceGroup) -> int:
    prompt = len(group.request.prompt_token_ids)
    return sum(len(seq.token_ids) - prompt for seq in group.seqs)


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
