"""From outputs of the core to outputs of requests: text, stop strings, logprobs, finish reasons, metrics."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import replace

from octavo.core.engine_outputs import EngineCoreOutputs, GroupOutput, SequenceOutput
from octavo.core.outputs import CompletionOutput, Logprob, RequestMetrics, TokenLogprobs
from octavo.core.plan import PositionLogprobs, SequenceResult
from octavo.core.progress import AdmissionStats, BeamProgress
from octavo.core.request import Generate, SequenceStatus
from octavo.core.sampling_params import NO_TOKEN_LEFT, RequestOutputKind, excluding_fields, no_token_message
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.request_state import Completion, RequestState
from octavo.engine.tokenizer import Tokenizer

#: A token or a text ended the output; it failed.
_STOPPED, _FAILED = SequenceStatus.FINISHED_STOPPED.value, SequenceStatus.FINISHED_ERROR.value


class OutputProcessor:
    """Owns the open requests' outputs. Invariant: a request is open until each of its completions has ended."""

    def __init__(self, tokenizer: Tokenizer, on_end: Callable[[int], object] = lambda group_id: None) -> None:
        """``on_end`` is called with the group of each request that has ended, in whichever way."""
        self._on_end = on_end
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._groups: dict[int, RequestState] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def open(self, request: RequestState, kind: RequestOutputKind) -> RequestState:
        """Begins a request; it has an output after each step, or at its end only (``FINAL_ONLY``).

        Its parameters may name another kind than ``kind``, but for that. Beam search and ``best_of`` have nothing to
        show before their end. One that is open begins anew, as if nothing of it had been computed.
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
            completion = Completion(output)
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
        """Adds a step: the requests with an output to take, and the sequences (group, index) ended by a stop text."""
        now = time.monotonic()
        updated: dict[int, RequestState] = {}
        stopped: list[tuple[int, int]] = []
        for admission in step.admissions:
            request = self._groups.get(admission.group_id)
            if request is not None:
                request.admission = admission
                request.metrics = _with_admission(request.metrics, admission, request.num_virtual_tokens)
        for drafts in step.drafts:
            request = self._groups.get(drafts.group_id)
            if request is not None:
                request.drafts = drafts
        for beams in step.beams:
            request = self._groups.get(beams.group_id)
            if request is not None:
                request.beams = request.beams or BeamProgress([[]], [0.0])
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
        """Ends a request, whose group is still to be ended in the core. None if it is not open."""
        request = self._requests.get(request_id)
        if request is not None:
            for completion in request.completions:
                if not completion.finished:
                    self._finish(request, completion, SequenceStatus.FINISHED_ABORTED.value)
            self._close(request, time.monotonic())
        return request

    def open_requests(self) -> list[RequestState]:
        """Those that have not ended, in order of their arrival."""
        return [self._groups[group_id] for group_id in sorted(self._groups)]

    def id_of_group(self, group_id: int) -> str | None:
        """The id of the open request that the engine core knows by this number; None: there is none."""
        request = self._groups.get(group_id)
        return None if request is None else request.request_id

    def of_group(self, group_id: int) -> RequestState:
        """The open request that the engine core knows by this id."""
        return self._groups[group_id]

    def discard(self, request: RequestState) -> None:
        """Closes a request as it is; output not yet taken stays in it."""
        del self._requests[request.request_id]
        del self._groups[request.group_id]
        self._on_end(request.group_id)

    def _close(self, request: RequestState, now: float) -> None:
        request.metrics = replace(request.metrics, last_token_time=request.last_token_time, finished_time=now)
        self.discard(request)

    def _end_group(self, request: RequestState, update: GroupOutput) -> None:
        """The whole group has ended: with the hypotheses of a beam search, with its prompt, or because it failed."""
        if update.hypotheses is None:
            for completion in request.completions:
                if not completion.finished:
                    completion.output.error, completion.output.exceeds_kv_cache = update.error, update.exceeds_kv_cache
                    completion.output.adapter_failed = update.adapter_failed
                    self._finish(request, completion, update.finish_reason)
            return
        stops = request.group.task.stop_token_ids
        # Fewer than asked for where the vocabulary has not as many continuations.
        request.completions = request.completions[: len(update.hypotheses)]
        for completion, hypothesis in zip(request.completions, update.hypotheses, strict=True):
            output = completion.output
            completion.token_ids = array("i", hypothesis.token_ids)
            output.cumulative_logprob, output.score = hypothesis.cumulative_logprob, hypothesis.score
            self._finish(request, completion, hypothesis.finish_reason, drop_last=hypothesis.token_ids[-1] in stops)

    def _add(self, request: RequestState, completion: Completion, update: SequenceOutput, now: float) -> None:
        output, reason, token_ids = completion.output, update.finish_reason, update.token_ids
        # The token that ended it has no place in the text, unless the user wants to see what stopped it.
        silent = reason == _STOPPED and not request.params.include_stop_str_in_output
        if reason is not None:
            output.stop_reason = update.stop_reason
        detokenizer = completion.detokenizer
        if token_ids and detokenizer is not None:
            num_tokens = detokenizer.num_tokens
            stop = detokenizer.append(token_ids[:-1] if silent else token_ids)
            if stop is not None:  # what follows it does not count, nor how the sequence ended there
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
                output.error = update.extra.error
                fields = excluding_fields(request.params)
                if fields and (output.error or "").startswith(NO_TOKEN_LEFT):
                    output.excludes_all_tokens = True
                    output.error = no_token_message(fields, len(completion.token_ids))
        if reason is not None:
            self._finish(request, completion, reason, drop_last=silent)

    def _finish(self, request: RequestState, completion: Completion, reason: str, *, drop_last: bool = False) -> None:
        output, params = completion.output, request.params
        output.finish_reason, completion.finished = reason, True
        if completion.detokenizer is not None:
            stop = completion.detokenizer.finish()
            if stop is not None:  # it ended in a broken character that completes a stop string
                output.finish_reason, output.stop_reason = _STOPPED, stop
        elif params.detokenize:
            completion.detokenizer = self._detokenizer(request)
            completion.detokenizer.append(completion.token_ids[:-1] if drop_last else completion.token_ids)
            completion.detokenizer.finish()

    def _add_logprobs(
        self, request: RequestState, completion: Completion, extra: SequenceResult, num_tokens: int
    ) -> None:
        """Adds those of the first ``num_tokens`` new tokens, and of the prompt."""
        output = completion.output
        for position in extra.logprobs[:num_tokens]:
            if output.cumulative_logprob is not None:
                output.cumulative_logprob += position.logprob
            if output.logprobs is not None:
                output.logprobs.append(self._readable(position))
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs is not None and output.index == 0:
            # After a preemption the prompt is computed again; what is known already is not added twice.
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


def _with_admission(metrics: RequestMetrics, admission: AdmissionStats, num_virtual_tokens: int) -> RequestMetrics:
    return replace(
        metrics,
        first_scheduled_time=admission.first_scheduled_time,
        num_cached_tokens=max(0, admission.num_cached_tokens - num_virtual_tokens),
        num_preemptions=admission.num_recomputes + admission.num_swaps,
        num_preemptions_by_swap=admission.num_swaps,
        num_recomputed_tokens=admission.num_recomputed_tokens,
        num_swapped_blocks=admission.num_swapped_blocks,
    )
