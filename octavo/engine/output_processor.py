"""From what a step did to what a user gets: text, stop strings, logprobs, finish reasons, metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from octavo.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from octavo.core.plan import PositionLogprobs
from octavo.core.request import SequenceStatus
from octavo.core.sampling_params import SamplingParams
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.tokenizer import Tokenizer
from octavo.scheduler.scheduler import SequenceUpdate


@dataclass(slots=True, eq=False)
class _Completion:
    """One sequence of a request. Without a detokenizer its text is made once, at its end."""

    seq_id: int
    request: _Request
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None


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
        return all(c.output.finished for c in self.completions)

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
            outputs=outputs,
            finished=self.finished,
            metrics=replace(self.metrics),
            prompt_logprobs=self.prompt_logprobs,
        )


class OutputProcessor:
    """Owns the open requests' outputs. Invariant: a request is open until each of its completions has ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._completions: dict[int, _Completion] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def open(self, source: ProcessedRequest, *, streaming: bool) -> None:
        """Begins a request; a streaming one gives an output after each step, another at its end only."""
        params = source.params
        request = _Request(source, RequestMetrics(source.arrival_time), streaming)
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        for index, sequence in enumerate(source.sequences):
            output = CompletionOutput(index)
            if params.logprobs is not None:
                output.logprobs, output.cumulative_logprob = [], 0.0
            completion = _Completion(sequence.seq_id, request, output, None)
            if params.detokenize and (params.stop or streaming):
                completion.detokenizer = self._detokenizer(source.prompt_token_ids, params)
            request.completions.append(completion)
            self._completions[sequence.seq_id] = completion
        self._requests[source.request_id] = request

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=list(params.stop or ()),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def process(self, updates: list[SequenceUpdate]) -> tuple[list[RequestOutput], list[int]]:
        """Takes in a step: the outputs to hand out, and the sequences that a stop string has ended."""
        now = time.monotonic()
        touched: dict[str, _Request] = {}
        stopped = []
        for update in updates:
            completion = self._completions.get(update.seq_id)
            if completion is None:
                continue
            request = completion.request
            self._take_in(completion, update, now)
            if completion.output.finished:
                del self._completions[completion.seq_id]
                if not update.sequence.status.finished:
                    stopped.append(completion.seq_id)
                request.metrics.num_preemptions += update.sequence.num_preemptions
            touched[request.source.request_id] = request
        outputs = []
        for request_id, request in touched.items():
            if request.finished:
                request.metrics.finished_time = now
                del self._requests[request_id]
            if request.finished or request.streaming:
                outputs.append(request.snapshot())
        return outputs, stopped

    def abort(self, request_id: str) -> tuple[RequestOutput, list[int]] | None:
        """Ends a request: its last output, and its sequences still to be ended in the core. None if it is not open."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        running = [c for c in request.completions if not c.output.finished]
        for completion in running:
            self._finish(completion, SequenceStatus.FINISHED_ABORTED.value)
            del self._completions[completion.seq_id]
        request.metrics.finished_time = time.monotonic()
        return request.snapshot(), [c.seq_id for c in running]

    def _take_in(self, completion: _Completion, update: SequenceUpdate, now: float) -> None:
        metrics, output, sequence = completion.request.metrics, completion.output, update.sequence
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = sequence.first_scheduled_time
        if update.extra is not None:
            self._add_logprobs(completion, update)
        if update.token_id is not None:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            output.token_ids.append(update.token_id)
        if sequence.status.finished:
            output.error, output.stop_reason = update.error, update.stop_reason
        params = completion.request.source.params
        # The token that ended it has no place in the text, unless the user wants to see what stopped it.
        silent = sequence.status is SequenceStatus.FINISHED_STOPPED and not params.include_stop_str_in_output
        if update.token_id is not None and completion.detokenizer is not None and not silent:
            match = completion.detokenizer.append([update.token_id])
            if match is not None:
                output.stop_reason = match.stop
                self._finish(completion, SequenceStatus.FINISHED_STOPPED.value)
                return
        if sequence.status.finished:
            self._finish(completion, sequence.status.value, drop_last=silent)
        elif completion.detokenizer is not None:
            output.text += completion.detokenizer.new_text(False)

    def _finish(self, completion: _Completion, reason: str, *, drop_last: bool = False) -> None:
        output, params = completion.output, completion.request.source.params
        output.finish_reason = reason
        if completion.detokenizer is not None:
            match = completion.detokenizer.finish()
            if match is not None:  # it ended in a broken character that completes a stop string
                output.finish_reason, output.stop_reason = SequenceStatus.FINISHED_STOPPED.value, match.stop
            output.text = completion.detokenizer.text
        elif params.detokenize:
            shown = output.token_ids[:-1] if drop_last else output.token_ids
            detokenizer = self._detokenizer(completion.request.source.prompt_token_ids, params)
            detokenizer.append(shown)
            detokenizer.finish()
            output.text = detokenizer.text

    def _add_logprobs(self, completion: _Completion, update: SequenceUpdate) -> None:
        output, extra, request = completion.output, update.extra, completion.request
        assert extra is not None
        if extra.logprobs is not None and output.logprobs is not None and output.cumulative_logprob is not None:
            output.logprobs.append(self._readable(extra.logprobs))
            output.cumulative_logprob += extra.logprobs.logprob
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
