"""A request as the front end knows it: what its engine core takes of it, and its output so far."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.core.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from octavo.core.progress import AdmissionStats, BeamProgress, CompletionProgress, DraftStats, Progress
from octavo.core.request import EngineCoreRequest
from octavo.core.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.detokenizer import IncrementalDetokenizer


@dataclass(slots=True, eq=False)
class Completion:
    """One sequence of a request. Without a detokenizer its text is made once, at its end."""

    #: What was added since the last ``take``, but for the tokens.
    output: CompletionOutput
    detokenizer: IncrementalDetokenizer | None = None
    finished: bool = False
    #: All of them, 4 bytes each: another engine core can go on from there. How many were taken.
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_taken: int = 0

    def take(self) -> CompletionOutput:
        """What is new since the last call."""
        output = self.output
        output.token_ids = self.token_ids[self.num_taken :].tolist()
        self.num_taken = len(self.token_ids)
        if self.detokenizer is not None:
            output.text = self.detokenizer.take_text()
        self.output = CompletionOutput(
            output.index,
            cumulative_logprob=output.cumulative_logprob,
            logprobs=None if output.logprobs is None else [],
        )
        return output


@dataclass(slots=True, eq=False)
class RequestState:
    """A checked request, what the core takes of it, and while it is open its output since the last ``take``.

    Output that is not taken accumulates.
    """

    #: As the user named it.
    request_id: str
    prompt: str | None
    #: Those of its adapter are not among them: users do not see virtual tokens.
    prompt_token_ids: list[int]
    #: As the user gave them; of a beam search, how its hypotheses are shown as completions.
    params: SamplingParams
    group: EngineCoreRequest
    #: Special tokens that are part of the text although others are not.
    visible_tokens: frozenset[int] = frozenset()
    #: Text of what the encoder reads, if it was given as text.
    encoder_prompt: str | None = None
    # Set when it is opened:
    kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    metrics: RequestMetrics = field(init=False)
    completions: list[Completion] = field(init=False)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    #: What was made of its prompt, see ``SequenceResult``.
    pooled: bytes | None = None
    #: What is in ``metrics`` from the next ``take`` on: drafts so far, and when the last token came.
    drafts: DraftStats | None = None
    last_token_time: float | None = None
    #: All that was taken, of ``CUMULATIVE``.
    taken: RequestOutput | None = None
    #: What its engine core has last said of its admission, and of its beams.
    admission: AdmissionStats | None = None
    beams: BeamProgress | None = None

    @property
    def group_id(self) -> int:
        """As the engine core knows it."""
        return self.group.group_id

    @property
    def num_virtual_tokens(self) -> int:
        """Tokens of its adapter before the prompt."""
        return 0 if self.group.adapter is None else self.group.adapter.num_virtual_tokens

    @property
    def streaming(self) -> bool:
        """Whether it has an output after each step."""
        return self.kind is not RequestOutputKind.FINAL_ONLY

    @property
    def finished(self) -> bool:
        """Whether all of its completions have ended."""
        return all(c.finished for c in self.completions)

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that were generated since the last ``take``."""
        return sum(len(c.token_ids) - c.num_taken for c in self.completions)

    @property
    def num_generated(self) -> int:
        """Tokens that its engine cores have reported, over all completions or beams."""
        beams = 0 if self.beams is None else sum(map(len, self.beams.token_ids))
        return beams + sum(len(c.token_ids) for c in self.completions)

    @property
    def is_begun(self) -> bool:
        """Whether an engine core has reported its admission."""
        return self.admission is not None

    def resume(self, alone: int = 0) -> EngineCoreRequest:
        """The request as another engine core takes it, to go on with what comes after the outputs so far.

        ``alone``: see ``Progress``.
        """
        if self.admission is None and not alone:
            return self.group  # nothing of it was computed
        drafts, metrics = self.drafts, self.metrics
        if drafts is None and metrics.num_draft_tokens:
            drafts = DraftStats(self.group_id, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens)
        begun = [(i, c) for i, c in enumerate(self.completions) if c.token_ids and not c.finished]
        completions = [CompletionProgress(i, c.token_ids.tolist()) for i, c in begun]
        progress = Progress(completions, self.beams, self.admission, drafts, alone)
        return msgspec.structs.replace(self.group, progress=progress)

    def take(self) -> RequestOutput:
        """All of the output so far, of ``CUMULATIVE``; else what is new since the last call.

        The first time that is all there is, so one call at the end gives the whole.
        """
        if self.kind is not RequestOutputKind.CUMULATIVE:
            return self._take_new()
        new = self._take_new()
        self.taken = new if self.taken is None else self.taken + new
        return self.taken

    def _take_new(self) -> Any:
        """Costs nothing for what was taken before."""
        finished = self.finished
        outputs = [c.take() for c in self.completions]
        if (drafts := self.drafts) is not None:
            drafted, accepted, self.drafts = drafts.num_draft_tokens, drafts.num_accepted_tokens, None
            self.metrics = replace(self.metrics, num_draft_tokens=drafted, num_accepted_draft_tokens=accepted)
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._best(outputs) if finished else outputs,
            finished=finished,
            metrics=self.metrics,
        )
        if (given := self.group.encoder_input) is not None:
            output.encoder_prompt, output.num_encoder_tokens = self.encoder_prompt, given.num_tokens
            output.encoder_prompt_token_ids = given.token_ids
            output.attention_weights, self.pooled = self.pooled, None
        if self.prompt_logprobs is not None and (finished or len(self.prompt_logprobs) == len(self.prompt_token_ids)):
            output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return output

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """``best_of``: the ``n`` likeliest, best first, and failed ones last."""
        n = self.params.n
        if len(outputs) <= n:
            return outputs
        ranked = sorted(outputs, key=lambda o: (o.error is not None, -(o.cumulative_logprob or 0.0), o.index))
        return [replace(o, index=i) for i, o in enumerate(ranked[:n])]
