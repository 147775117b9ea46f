"""Turns outputs of the core into outputs of requests: text, stop strings, logprobs, finish reasons, metrics."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.core.failures import NO_TOKEN_LEFT, SequenceFailure
from octavo.core.outputs import (
    CompletionOutput,
    Logprob,
    Pooled,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from octavo.core.plan import EngineCoreOutputs, GroupOutput, PositionLogprobs, SequenceOutput, SequenceResult
from octavo.core.request import (
    AdmissionStats,
    Beam,
    BeamResumePoint,
    CompletionResumePoint,
    DraftStats,
    EngineCoreRequest,
    Generate,
    Pool,
    ResumePoint,
    SequenceStatus,
)
from octavo.core.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    failure_of_fields,
)
from octavo.core.stats import MAX_REQUEST_IDS
from octavo.engine.tokenizer import IncrementalDetokenizer, Tokenizer

_STOPPED, _FAILED = SequenceStatus.FINISHED_STOPPED.value, SequenceStatus.FINISHED_ERROR.value
#: Parameters of a pooling request, which samples nothing.
NO_SAMPLING = SamplingParams(max_tokens=0, seed=0, detokenize=False)


class OutputProcessor:
    """Owns the outputs of open requests. A request is open until each of its completions has ended."""

    def __init__(self, tokenizer: Tokenizer, on_end: Callable[[int], object] = lambda group_id: None) -> None:
        """``on_end``: called with the group id when a request ends, however it ends."""
        self._on_end = on_end
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._groups: dict[int, RequestState] = {}
        #: Ids of the requests that ended last, by group.
        self._ended: dict[int, str] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def open(self, request: RequestState, kind: RequestOutputKind) -> RequestState:
        """Opens a request, with an output after each step or only at its end (``FINAL_ONLY``).

        ``params.output_kind`` overrides ``kind`` unless that is ``FINAL_ONLY``. Beam search and ``best_of`` have output
        only at their end. Opening an open request again restarts it.
        """
        task, params = request.group.task, request.params
        if kind is not RequestOutputKind.FINAL_ONLY:
            shows = isinstance(task, Generate) and params.num_sequences == params.n
            kind = (params.output_kind or kind) if shows else RequestOutputKind.FINAL_ONLY
        request.kind, request.metrics = kind, RequestMetrics(request.group.arrival_time)
        request.completions, request.drafts, request.last_token_time, request.taken = [], None, None, None
        request.pooled = request.admission = request.beams = None
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        for index in range(params.num_sequences):
            output = CompletionOutput(index)
            if params.logprobs is not None:
                output.logprobs = []
            if isinstance(task, Generate) and task.params.logprobs is not None:
                output.cumulative_logprob = 0.0
            completion = CompletionState(output)
            if params.detokenize and (params.stop or request.streaming):
                completion.detokenizer = self._detokenizer(request)
            request.completions.append(completion)
        self._requests[request.request_id] = request
        self._groups[request.group_id] = request
        return request

    def _detokenizer(self, request: RequestState) -> IncrementalDetokenizer:
        prompt, visible = request.prompt_token_ids, request.visible_tokens
        return IncrementalDetokenizer(self._tokenizer, prompt, request.params, visible)

    def process(self, step: EngineCoreOutputs) -> tuple[list[RequestState], list[tuple[int, int]]]:
        """Applies a step; returns the requests with new output, and (group, index) of stopped sequences."""
        now = time.monotonic()
        updated: dict[int, RequestState] = {}
        stopped: list[tuple[int, int]] = []
        for admission in step.admissions:
            request = self._groups.get(admission.group_id)
            if request is not None:
                request.admission = admission
                request.metrics = replace(
                    request.metrics,
                    first_scheduled_time=admission.first_scheduled_time,
                    num_cached_tokens=max(0, admission.num_cached_tokens - request.num_virtual_tokens),
                    num_held_tokens=max(0, admission.num_held_tokens - request.num_virtual_tokens),
                    num_preemptions=admission.num_recomputes + admission.num_swaps,
                    num_preemptions_by_swap=admission.num_swaps,
                    num_recomputed_tokens=admission.num_recomputed_tokens,
                    num_swapped_blocks=admission.num_swapped_blocks,
                )
        for drafts in step.drafts:
            request = self._groups.get(drafts.group_id)
            if request is not None:
                request.drafts = drafts
        for beams in step.beams:
            request = self._groups.get(beams.group_id)
            if request is not None:
                request.beams = request.beams or BeamResumePoint([[]], [0.0])
                request.beams.apply(beams)
        for update in step.each_sequence():
            request = self._groups.get(update.group_id)
            if request is None:
                continue
            completion = request.completions[update.index]
            if completion.finished:
                continue
            self._add(request, completion, update, now)
            if update.token_ids or completion.finished:
                updated[update.group_id] = request
            if completion.finished and update.finish_reason is None:
                stopped.append((update.group_id, update.index))
        for end in step.groups:
            request = self._groups.get(end.group_id)
            if request is not None:
                updated[end.group_id] = request
                self._end_group(request, end)
        ready = []
        for request in updated.values():
            finished = request.finished
            if finished:
                self._close(request, now)
            if finished or request.streaming:
                ready.append(request)
        return ready, stopped

    def abort(self, request_id: str) -> RequestState | None:
        """Ends an open request, which the caller must end in the core too; None if it is not open."""
        request = self._requests.get(request_id)
        if request is not None:
            for completion in request.completions:
                if not completion.finished:
                    self._finish(request, completion, SequenceStatus.FINISHED_ABORTED.value)
            self._close(request, time.monotonic())
        return request

    def open_requests(self) -> list[RequestState]:
        """Sorted by arrival."""
        return [self._groups[group_id] for group_id in sorted(self._groups)]

    def id_of_group(self, group_id: int) -> str | None:
        """The id of an open request, or of one of the ``MAX_REQUEST_IDS`` that ended last."""
        request = self._groups.get(group_id)
        return self._ended.get(group_id) if request is None else request.request_id

    def discard(self, request: RequestState) -> None:
        """Closes a request as it is; its untaken output stays."""
        del self._requests[request.request_id]
        del self._groups[request.group_id]
        self._ended[request.group_id] = request.request_id
        if len(self._ended) > MAX_REQUEST_IDS:
            del self._ended[next(iter(self._ended))]
        self._on_end(request.group_id)

    def _close(self, request: RequestState, now: float) -> None:
        request.metrics = replace(request.metrics, last_token_time=request.last_token_time, finished_time=now)
        self.discard(request)

    def _end_group(self, request: RequestState, update: GroupOutput) -> None:
        """Ends a request as a whole: a beam search, a pooling request, or a failure."""
        if update.hypotheses is None:
            for completion in request.completions:
                if not completion.finished:
                    self._set_error(request, completion, update.error)
                    self._finish(request, completion, update.finish_reason)
            return
        stops = request.group.task.stop_token_ids
        # There may be fewer hypotheses than completions if the vocabulary is small.
        request.completions = request.completions[: len(update.hypotheses)]
        for completion, hypothesis in zip(request.completions, update.hypotheses, strict=True):
            output = completion.output
            completion.token_ids = array("i", hypothesis.token_ids)
            output.cumulative_logprob, output.score = hypothesis.cumulative_logprob, hypothesis.score
            self._finish(request, completion, hypothesis.finish_reason, drop_last=hypothesis.token_ids[-1] in stops)

    def _add(self, request: RequestState, completion: CompletionState, update: SequenceOutput, now: float) -> None:
        output, reason, token_ids = completion.output, update.finish_reason, update.token_ids
        # The stop token is not part of the text, unless the user asks for it.
        silent = reason == _STOPPED and not request.params.include_stop_str_in_output
        if reason is not None:
            output.stop_reason = update.stop_reason
        detokenizer = completion.detokenizer
        if token_ids and detokenizer is not None:
            num_tokens = detokenizer.num_tokens
            stop = detokenizer.append(token_ids[:-1] if silent else token_ids)
            if stop is not None:  # later tokens and the finish reason there do not count
                token_ids = token_ids[: detokenizer.num_tokens - num_tokens]
                output.stop_reason, reason, silent = stop, _STOPPED, False
        if token_ids:
            if request.metrics.first_token_time is None:
                request.metrics = replace(request.metrics, first_token_time=now)
            request.last_token_time = now
            completion.token_ids.extend(token_ids)
        if update.extra is not None:
            self._add_logprobs(request, completion, update.extra, len(token_ids))
            if update.extra.pooled is not None:
                request.pooled = update.extra.pooled
            if reason == _FAILED:
                self._set_error(request, completion, update.extra.error)
        if reason is not None:
            self._finish(request, completion, reason, drop_last=silent)

    def _set_error(self, request: RequestState, completion: CompletionState, failure: SequenceFailure | None) -> None:
        if failure is None:
            return
        output = completion.output
        output.error, output.error_kind = failure.text, failure.kind
        output.invalid = failure_of_fields(failure, request.params, len(completion.token_ids))
        if output.invalid is not None and failure.kind == NO_TOKEN_LEFT:
            output.error = str(output.invalid)

    def _finish(
        self, request: RequestState, completion: CompletionState, reason: str, *, drop_last: bool = False
    ) -> None:
        output, params = completion.output, request.params
        output.finish_reason, completion.finished = reason, True
        if completion.detokenizer is not None:
            stop = completion.detokenizer.finish()
            if stop is not None:  # an incomplete character completed a stop string
                output.finish_reason, output.stop_reason = _STOPPED, stop
        elif params.detokenize:
            completion.detokenizer = self._detokenizer(request)
            completion.detokenizer.append(completion.token_ids[:-1] if drop_last else completion.token_ids)
            completion.detokenizer.finish()

    def _add_logprobs(
        self, request: RequestState, completion: CompletionState, extra: SequenceResult, num_tokens: int
    ) -> None:
        """Adds the logprobs of the first ``num_tokens`` new tokens, and of the prompt."""
        output = completion.output
        for position in extra.logprobs[:num_tokens]:
            if output.cumulative_logprob is not None:
                output.cumulative_logprob += position.logprob
            if output.logprobs is not None:
                output.logprobs.append(self._readable(position))
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None and output.index == 0:
            # After a preemption the prompt is computed again; its logprobs are added once.
            start = extra.prompt_start - request.num_virtual_tokens
            fresh = extra.prompt_logprobs[len(prompt_logprobs) - start :] if extra.prompt_logprobs else []
            prompt_logprobs.extend(self._readable(p) for p in fresh)

    def _readable(self, position: PositionLogprobs) -> TokenLogprobs:
        text = self._tokenizer.token_text
        logprobs = {position.token_id: Logprob(position.logprob, position.rank, text(position.token_id))}
        ranks = position.top_ranks or range(1, len(position.top_ids) + 1)
        for token, logprob, rank in zip(position.top_ids, position.top_logprobs, ranks, strict=True):
            logprobs.setdefault(token, Logprob(logprob, rank, text(token)))
        return logprobs


@dataclass(slots=True, eq=False)
class RequestState:
    """A checked request, the core's part of it, and, while it is open, its output since the last ``take``."""

    request_id: str
    prompt: str | None
    #: Without the adapter's virtual tokens.
    prompt_token_ids: list[int]
    #: The user's; for a beam search, those that describe its hypotheses as completions.
    params: SamplingParams
    group: EngineCoreRequest
    visible_tokens: frozenset[int] = frozenset()
    encoder_prompt: str | None = None
    # Set by ``OutputProcessor.open``:
    kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    metrics: RequestMetrics = field(init=False)
    completions: list[CompletionState] = field(init=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    #: ``SequenceResult.pooled``.
    pooled: bytes | None = None
    #: In ``metrics`` from the next ``take`` on.
    drafts: DraftStats | None = None
    last_token_time: float | None = None
    #: The whole output so far, for ``CUMULATIVE``.
    taken: RequestOutput | None = None
    #: The last reports of its engine core.
    admission: AdmissionStats | None = None
    beams: BeamResumePoint | None = None

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def num_virtual_tokens(self) -> int:
        return 0 if self.group.adapter is None else self.group.adapter.num_virtual_tokens

    @property
    def streaming(self) -> bool:
        return self.kind is not RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        return all(c.finished for c in self.completions)

    @property
    def num_untaken_tokens(self) -> int:
        return sum(len(c.token_ids) - c.num_taken for c in self.completions)

    @property
    def num_generated(self) -> int:
        """The tokens reported so far, over all completions or beams."""
        beams = 0 if self.beams is None else sum(map(len, self.beams.token_ids))
        return beams + sum(len(c.token_ids) for c in self.completions)

    @property
    def is_begun(self) -> bool:
        return self.admission is not None

    def resume(self, alone: int = 0) -> EngineCoreRequest:
        """The core's request with a ``ResumePoint``, to continue after the outputs so far.

        ``alone``: tokens to compute alone.
        """
        if self.admission is None and not alone:
            return self.group
        drafts, metrics = self.drafts, self.metrics
        if drafts is None and metrics.num_draft_tokens:
            counts = metrics.drafted_per_position, metrics.accepted_per_position
            drafts = DraftStats(self.group_id, *map(list, counts))
        begun = [(i, c) for i, c in enumerate(self.completions) if c.token_ids and not c.finished]
        completions = [CompletionResumePoint(i, c.token_ids.tolist()) for i, c in begun]
        progress = ResumePoint(completions, self.beams, self.admission, drafts, alone)
        return msgspec.structs.replace(self.group, progress=progress)

    def take(self) -> RequestOutput:
        """Returns the output: all so far for ``CUMULATIVE``, else what is new since the last call."""
        if self.kind is not RequestOutputKind.CUMULATIVE:
            return self._take_new()
        new = self._take_new()
        self.taken = new if self.taken is None else self.taken + new
        return self.taken

    def _take_new(self) -> Any:
        finished = self.finished
        outputs = [c.take() for c in self.completions]
        if (drafts := self.drafts) is not None:
            self.metrics = replace(
                self.metrics,
                drafted_per_position=tuple(drafts.drafted_per_position),
                accepted_per_position=tuple(drafts.accepted_per_position),
            )
            self.drafts = None
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._best(outputs) if finished else outputs,
            finished=finished,
            metrics=self.metrics,
        )
        if (encoder_input := self.group.encoder_input) is not None:
            output.encoder_prompt, output.num_encoder_tokens = self.encoder_prompt, encoder_input.num_tokens
            output.encoder_prompt_token_ids = encoder_input.token_ids
            output.attention_weights, self.pooled = self.pooled, None
        if self.prompt_logprobs is not None and (finished or len(self.prompt_logprobs) == len(self.prompt_token_ids)):
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return output

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """``best_of``: the ``n`` most likely completions, best first, failed ones last. Hypotheses are sorted."""
        n = self.params.n
        if len(outputs) <= n or isinstance(self.group.task, Beam):
            return outputs[:n]
        ranked = sorted(outputs, key=lambda o: (o.error is not None, -(o.cumulative_logprob or 0.0), o.index))
        return [replace(o, index=i) for i, o in enumerate(ranked[:n])]


@dataclass(slots=True, eq=False)
class PoolingState(RequestState):
    """A pooling request, whose only output is the result for its prompt."""

    def _take_new(self) -> Pooled:
        import numpy as np  # a server that generates does without

        end = self.completions[0].output
        error = end.error
        if error is None and self.pooled is None:
            error = f"the request has ended without a result ({end.finish_reason})"
        data = np.frombuffer(self.pooled or b"" if error is None else b"", np.float32)
        task = self.group.task
        assert isinstance(task, Pool)
        if task.is_by_token and len(data):
            data = data.reshape(len(self.prompt_token_ids) + self.num_virtual_tokens - task.first, -1)
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(data, error), self.prompt, self.prompt_token_ids, self.metrics, self.finished
        )


@dataclass(slots=True, eq=False)
class CompletionState:
    """One sequence of a request. Without a detokenizer its text is made once, at its end."""

    #: The output since the last ``take``, except its tokens.
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None = None
    finished: bool = False
    #: All tokens, 4 bytes each, so that another engine core can continue; and how many of them were taken.
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_taken: int = 0

    def take(self) -> CompletionOutput:
        output = self.output
        output.token_ids = self.token_ids[self.num_taken :].tolist()
        self.num_taken = len(self.token_ids)
        if self.detokenizer is not None:
            output.text = self.detokenizer.take_text()
        self.output = CompletionOutput(
            output.index, cumulative_logprob=output.cumulative_logprob, logprobs=None if output.logprobs is None else []
        )
        return output
