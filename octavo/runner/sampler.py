"""From logits to tokens, for the rows of one step."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from octavo.core.plan import NewSequence, PositionLogprobs
from octavo.runner import noise
from octavo.runner.adjustments import Adjustments, RowError
from octavo.runner.arithmetic import Arithmetic, fastest_arithmetic
from octavo.runner.device_sampling import DeviceSample, DeviceSampling
from octavo.runner.filters import RECORD, Filters
from octavo.runner.sample_output import PendingLogprobs, PendingSample, Sampled, SampleOutput, Scored, output_of
from octavo.runner.token_table import TokenTable


class Sampler:
    """Chooses the next token of each row as its request asks.

    Owns what each row of the persistent batch asks for, and reads the tokens so far from the table. Invariant: the
    result of a row depends on its logits, its tokens and its request only, bit for bit, and not on the other rows.
    """

    def __init__(
        self,
        vocab_size: int,
        tokens: TokenTable,
        arithmetic: Arithmetic | None = None,
        device: torch.device | str = "cpu",
        use_triton: bool = False,
    ) -> None:
        """For the rows of the table.

        Args:
            vocab_size: number of tokens.
            tokens: the tokens so far.
            arithmetic: what computes on the host; the fastest there is unless one is given.
            device: where the logits are.
            use_triton: computes on the device, and takes nothing to the host but what was chosen.
        """
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._arithmetic = arithmetic or fastest_arithmetic(vocab_size)
        rows = tokens.num_rows
        self._device = torch.device(device)
        self._on_device = DeviceSampling(vocab_size, self._device, rows) if use_triton else None
        #: Rows that ask for more than the most likely token; a set, as most often there are none.
        self._special: set[int] = set()
        self._adjusted = np.zeros(rows, bool)
        self._num_logprobs = np.full(rows, -1, np.int64)
        self._seeds = np.zeros(rows, np.uint64)
        self._filters = np.zeros(rows, RECORD)  # a temperature of 0 where nothing is drawn
        self._adjustments: dict[int, Adjustments] = {}

    def add(self, row: int, sequence: NewSequence) -> None:
        """The sequence joins at this row, for the first time or back from preemption with its outputs."""
        self.remove(row)
        params = sequence.params
        random = not params.greedy and params.top_k != 1
        if random:
            self._seeds[row] = sequence.seed & 0xFFFFFFFFFFFFFFFF
            self._filters[row] = astuple(Filters.of(params, self._vocab_size))
        if Adjustments.needed(sequence):
            self._adjusted[row] = True
            self._adjustments[row] = Adjustments(self._vocab_size, self._tokens, sequence)
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        if random or self._adjusted[row] or params.logprobs is not None:
            self._special.add(row)

    def fork(self, parent: int, child: int, seed: int) -> None:
        """A copy of the sequence at row ``parent`` joins at row ``child``, where it draws by its own seed."""
        for state in (self._adjusted, self._num_logprobs, self._filters):
            state[child] = state[parent]
        (self._special.add if parent in self._special else self._special.discard)(child)
        self._seeds[child] = seed & 0xFFFFFFFFFFFFFFFF
        self._adjustments.pop(child, None)
        if self._adjusted[parent]:
            self._adjustments[child] = self._adjustments[parent].fork()

    def remove(self, row: int) -> None:
        """Forgets what the row asked for, if anything."""
        self._special.discard(row)
        self._adjusted[row] = False
        self._num_logprobs[row] = -1
        self._filters[row] = 0
        self._adjustments.pop(row, None)

    def start(self, logits: Tensor, rows: NDArray[np.int64]) -> PendingSample:
        """Chooses a token for each row; the caller appends it to the table.

        Rows may be added, removed and given other tokens before the result is waited for: it does not change. Where a
        row has adjustments, its tokens must all be in the table by now; otherwise their number is enough.

        Args:
            logits: [n, vocab_size]; may be changed in place.
            rows: [n], the row of each, all different. The token chosen gets position ``tokens.num_tokens[row]``.
        """
        if self._on_device is not None:
            return self._start_on_device(self._on_device, _as_rows(logits), rows)
        return Sampled(self._sample_on_host(logits, rows), self._device)

    def sample(self, logits: Tensor, rows: NDArray[np.int64]) -> SampleOutput:
        """``start`` and ``wait`` in one."""
        return self.start(logits, rows).wait()

    def _sample_on_host(self, logits: Tensor, rows: NDArray[np.int64]) -> SampleOutput:
        values = _on_host(logits)
        if self._special.isdisjoint(rows.tolist()):
            return output_of(self._arithmetic.choose_most_likely(values), {})
        return self._sample_special(values.numpy(), rows)

    def prompt_logprobs(self, logits: Tensor, targets: ArrayLike, k: int) -> list[PositionLogprobs]:
        """``start_prompt_logprobs`` and ``wait`` in one."""
        return self.start_prompt_logprobs(logits, targets, k).wait()

    def start_prompt_logprobs(self, logits: Tensor, targets: ArrayLike, k: int) -> PendingLogprobs:
        """Logprobs of known tokens.

        Args:
            logits: [n, vocab_size], those that the model gave at the positions before the targets.
            targets: [n] token ids.
            k: number of most likely tokens to name at each position.
        """
        tokens = np.asarray(targets, np.int64)
        every = np.arange(len(tokens))
        if (device := self._on_device) is not None:
            return device.logprobs(_as_rows(logits), every, device.to_device(tokens), np.full_like(tokens, k))
        return Scored(self._arithmetic.logprobs(_on_host(logits).numpy(), every, tokens, np.full_like(tokens, k)))

    def _sample_special(self, values: NDArray[np.float32], rows: NDArray[np.int64]) -> SampleOutput:
        adjusted, scored = self._adjusted[rows], self._num_logprobs[rows] >= 0
        changed = np.flatnonzero(adjusted & scored)
        originals = values[changed]
        edited = np.flatnonzero(adjusted)
        failed = self._adjust(values, edited, rows, edited)
        keys = noise.keys(self._seeds[rows], self._tokens.num_tokens[rows])
        output = output_of(self._arithmetic.choose(values, self._filters[rows], keys), failed)
        unchanged = np.flatnonzero(scored & ~adjusted)
        self._add_logprobs(output, values, unchanged, rows, unchanged)
        self._add_logprobs(output, originals, np.arange(len(changed)), rows, changed)
        return output

    def _start_on_device(self, device: DeviceSampling, logits: Tensor, rows: NDArray[np.int64]) -> PendingSample:
        """Only rows with adjustments go to the host and come back, so that one arithmetic chooses for all rows."""
        if self._special.isdisjoint(rows.tolist()):
            return DeviceSample(device.choose_most_likely(logits), {}, [])
        adjusted, counts = self._adjusted[rows], self._num_logprobs[rows]
        failed: dict[int, str] = {}
        changed = np.flatnonzero(adjusted & (counts >= 0))
        originals = logits[device.to_device(changed)] if len(changed) else logits
        if adjusted.any():
            edited = np.flatnonzero(adjusted)
            places = device.to_device(edited)
            values = logits[places].cpu()
            failed = self._adjust(values.numpy(), np.arange(len(edited)), rows, edited)
            logits[places] = values.to(logits.device)
        tokens = device.choose(
            logits, self._filters[rows], noise.keys(self._seeds[rows], self._tokens.num_tokens[rows])
        )
        scored = []
        unchanged = np.flatnonzero((counts >= 0) & ~adjusted)
        for which, source, at in (unchanged, logits, unchanged), (changed, originals, np.arange(len(changed))):
            if len(which):
                own = tokens[device.to_device(which)]
                scored.append((which, device.logprobs(source, at, own, counts[which])))
        return DeviceSample(tokens, failed, scored)

    def _adjust(
        self,
        logits: NDArray[np.float32],
        places: NDArray[np.int64],
        rows: NDArray[np.int64],
        which: NDArray[np.int64],
    ) -> dict[int, str]:
        """Edits, in place, the logits at ``places``, those of the indices ``which`` of the batch.

        Returns the errors of those that failed.
        """
        failed: dict[int, str] = {}
        with np.errstate(over="ignore"):
            for place, i in zip(places.tolist(), which.tolist(), strict=True):
                row = int(rows[i])
                try:
                    self._adjustments[row].apply(row, logits[place])
                except RowError as error:
                    failed[i] = str(error)
        return failed

    def _add_logprobs(
        self,
        output: SampleOutput,
        logits: NDArray[np.float32],
        places: NDArray[np.int64],
        rows: NDArray[np.int64],
        which: NDArray[np.int64],
    ) -> None:
        """Adds logprobs for the indices ``which`` of the batch, whose logits are at ``places`` of ``logits``."""
        if not len(which):
            return
        found = self._arithmetic.logprobs(logits, places, output.token_ids[which], self._num_logprobs[rows[which]])
        output.logprobs.update((i, f) for i, f in zip(which.tolist(), found, strict=True) if i not in output.errors)


def _as_rows(logits: Tensor) -> Tensor:
    """The same memory where it can be: float32, contiguous in the last dimension."""
    values = logits.detach().float()
    return values if values.stride(-1) == 1 else values.contiguous()


def _on_host(logits: Tensor) -> Tensor:
    """As ``_as_rows``, on the CPU."""
    if logits.is_cpu and logits.dtype is torch.float32 and logits.is_contiguous():
        return logits  # most often; calls of torch that change nothing are not free
    return _as_rows(logits.cpu())
