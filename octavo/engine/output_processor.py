"""From what a step did to what a user gets: text, stop strings, logprobs, finish reasons, metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from octavo.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from octavo.core.plan import PositionLogprobs, SequenceResult
from octavo.core.request import SequenceStatus
from octavo.core.sampling_params import SamplingParams
from octavo.core.updates import AdmissionUpdate, GroupUpdate, SequenceUpdate, StepOutputs
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.tokenizer import Tokenizer

#: A token or a text ended the output.
_STOPPED = SequenceStatus.FINISHED_STOPPED.value


@dataclass(slots=True, eq=False)
class _Completion:
    """One sequence of a request. Without a detokenizer its text is made once, at its end."""

    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None = None


@dataclass(slots=True, eq=False)
class _Request:
    """An open request and all that has come of it."""

    source: ProcessedRequest
    metrics: RequestMetrics
    streaming: bool
    completions: list[_Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return None not in [c.output.finish_reason for c in self.completions]

    def snapshot(self) -> RequestOutput:
        """What the user gets now; later steps do not change it."""
        outputs = [
            replace(o, token_ids=o.token_ids.copy(), logprobs=o.logprobs.copy() if o.logprobs is not None else None)
            for o in (c.output for c in self.completions)
        ]
        return RequestOutput(
            request_id=self.source.request_id,
            prompt=self.source.prompt,
            prompt_token_ids=self.source.prompt_token_ids,
            outputs=self._best(outputs) if self.finished else outputs,
            finished=self.finished,
            metrics=replace(self.metrics),
            prompt_logprobs=self.prompt_logprobs,
        )

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """``best_of``: the ``n`` likeliest, best first, and failed ones last."""
        n = self.source.params.n
        if len(outputs) <= n:
            return outputs
        ranked = sorted(outputs, key=lambda o: (o.error is not None, -(o.cumulative_logprob or 0.0), o.index))
        return [replace(o, index=i) for i, o in enumerate(ranked[:n])]


class OutputProcessor:
    """Owns the open requests' outputs. Invariant: a request is open until each of its completions has ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._groups: dict[int, _Request] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def open(self, source: ProcessedRequest, *, streaming: bool) -> None:
        """Begins a request; a streaming one gives an output after each step, another at its end only.

        Beam search and ``best_of`` have nothing to show before their end.
        """
        params = source.params
        streaming = streaming and source.group.beam is None and params.num_sequences == params.n
        request = _Request(source, RequestMetrics(source.arrival_time), streaming)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        for index in range(source.group.num_sequences):
            output = CompletionOutput(index)
            if params.logprobs is not None and source.group.beam is None:
                output.logprobs = []
            if source.group.params.logprobs is not None:
                output.cumulative_logprob = 0.0
            completion = _Completion(output)
            if params.detokenize and (params.stop or streaming):
                completion.detokenizer = self._detokenizer(source.prompt_token_ids, params)
            request.completions.append(completion)
        self._requests[source.request_id] = request
        self._groups[source.group.group_id] = request

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=list(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def process(self, step: StepOutputs) -> tuple[list[RequestOutput], list[tuple[int, int]]]:
        """Takes in a step: the outputs to hand out, and the sequences (group, index) that a stop text has ended."""
        now = time.monotonic()
        touched: dict[int, _Request] = {}
        stopped: list[tuple[int, int]] = []
        for admission in step.admissions:
            request = self._groups.get(admission.group_id)
            if request is not None:
                _take_metrics(request.metrics, admission)
        for update in step.sequences:
            request = self._groups.get(update.group_id)
            if request is None:
                continue
            completion = request.completions[update.index]
            output = completion.output
            if output.finish_reason is not None:
                continue
            touched[update.group_id] = request
            self._take_in(request, completion, update, now)
            if output.finish_reason is not None and update.finish_reason is None:
                stopped.append((update.group_id, update.index))
        for end in step.groups:
            request = self._groups.get(end.group_id)
            if request is not None:
                touched[end.group_id] = request
                self._end_group(request, end)
        outputs = []
        for request in touched.values():
            finished = request.finished
            if finished:
                self._close(request, now)
            if finished or request.streaming:
                outputs.append(request.snapshot())
        return outputs, stopped

    def abort(self, request_id: str) -> tuple[RequestOutput, int] | None:
        """Ends a request: its last output, and its group still to be ended in the core. None if it is not open."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for completion in request.completions:
            if not completion.output.finished:
                self._finish(request, completion, SequenceStatus.FINISHED_ABORTED.value)
        self._close(request, time.monotonic())
        return request.snapshot(), request.source.group.group_id

    def _close(self, request: _Request, now: float) -> None:
        request.metrics.finished_time = now
        del self._requests[request.source.request_id]
        del self._groups[request.source.group.group_id]

    def _end_group(self, request: _Request, update: GroupUpdate) -> None:
        """The whole group has ended: with the hypotheses of a beam search, or because it failed."""
        if update.hypotheses is None:
            for completion in request.completions:
                if not completion.output.finished:
                    completion.output.error, completion.output.outgrown = update.error, update.outgrown
                    self._finish(request, completion, update.finish_reason)
            return
        stops = request.source.group.stop_token_ids
        # Fewer than asked for where the vocabulary has not as many continuations.
        request.completions = request.completions[: len(update.hypotheses)]
        for completion, hypothesis in zip(request.completions, update.hypotheses, strict=True):
            output = completion.output
            output.token_ids = hypothesis.token_ids
            output.cumulative_logprob, output.score = hypothesis.cumulative_logprob, hypothesis.score
            self._finish(request, completion, hypothesis.finish_reason, drop_last=hypothesis.token_ids[-1] in stops)

    def _take_in(self, request: _Request, completion: _Completion, update: SequenceUpdate, now: float) -> None:
        metrics, output, reason = request.metrics, completion.output, update.finish_reason
        if update.extra is not None:
            self._add_logprobs(request, completion, update.extra)
        if update.token_id is not None:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            output.token_ids.append(update.token_id)
        if reason is not None:
            output.error, output.stop_reason = update.error, update.stop_reason
        params = request.source.params
        # The token that ended it has no place in the text, unless the user wants to see what stopped it.
        silent = reason == _STOPPED and not params.include_stop_str_in_output
        if update.token_id is not None and completion.detokenizer is not None and not silent:
            match = completion.detokenizer.append([update.token_id])
            if match is not None:
                output.stop_reason = match.stop
                self._finish(request, completion, _STOPPED)
                return
        if reason is not None:
            self._finish(request, completion, reason, drop_last=silent)
        elif completion.detokenizer is not None:
            output.text += completion.detokenizer.new_text(False)

    def _finish(self, request: _Request, completion: _Completion, reason: str, *, drop_last: bool = False) -> None:
        output, params = completion.output, request.source.params
        output.finish_reason = reason
        if completion.detokenizer is not None:
            match = completion.detokenizer.finish()
            if match is not None:  # it ended in a broken character that completes a stop string
                output.finish_reason, output.stop_reason = _STOPPED, match.stop
            output.text = completion.detokenizer.text
        elif params.detokenize:
            shown = output.token_ids[:-1] if drop_last else output.token_ids
            detokenizer = self._detokenizer(request.source.prompt_token_ids, params)
            detokenizer.append(shown)
            detokenizer.finish()
            output.text = detokenizer.text

    def _add_logprobs(self, request: _Request, completion: _Completion, extra: SequenceResult) -> None:
        output = completion.output
        for position in extra.logprobs:
            if output.cumulative_logprob is not None:
                output.cumulative_logprob += position.logprob
            if output.logprobs is not None:
                output.logprobs.append(self._readable(position))
        known = request.prompt_logprobs
        if known is not None and output.index == 0:
            # After a preemption the prompt is computed again; what is known already is not added twice.
            fresh = extra.prompt_logprobs[len(known) - extra.prompt_start :] if extra.prompt_logprobs else []
            known.extend(self._readable(p) for p in fresh)

    def _readable(self, position: PositionLogprobs) -> TokenLogprobs:
        text = self._tokenizer.token_text
        logprobs = {position.token_id: Logprob(position.logprob, position.rank, text(position.token_id))}
        for rank, (token, logprob) in enumerate(zip(position.top_ids, position.top_logprobs, strict=True), start=1):
            logprobs.setdefault(token, Logprob(logprob, rank, text(token)))
        return logprobs


def _take_metrics(metrics: RequestMetrics, admission: AdmissionUpdate) -> None:
    metrics.first_scheduled_time = admission.first_scheduled_time
    metrics.num_cached_tokens = admission.num_cached_tokens
    metrics.num_preemptions = admission.num_recomputes + admission.num_swaps
    metrics.num_preemptions_by_swap = admission.num_swaps
    metrics.num_recomputed_tokens = admission.num_recomputed_tokens
    metrics.num_swapped_blocks = admission.num_swapped_blocks
