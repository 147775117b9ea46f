"""A sampler with rows, for tests; and logits and requests for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import NewSequence
from octavo.core.request import Generate
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.sampling import SamplingBackend
from octavo.kernels.torch_backend import TorchLogits
from octavo.sampling.logits_processors import PendingSamplerOutput, SamplerOutput
from octavo.sampling.sampler import Sampler, TokenTable

VOCAB = 200


class Rows:
    """A sampler and its table, as the runner uses them."""

    make_backend: Callable[[int], SamplingBackend] = TorchLogits

    def __init__(
        self,
        rows: int = 8,
        vocab: int = VOCAB,
        max_len: int = 64,
        *,
        backend: SamplingBackend | None = None,
        device: str = "cpu",
    ) -> None:
        self.tokens, self.device = TokenTable(rows, max_len), device
        self.sampler = Sampler(vocab, self.tokens, backend or type(self).make_backend(vocab))

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt: list[int] | None = None,
        outputs: list[int] | None = None,
        seed: int = 0,
        stop: list[int] | None = None,
        bad_words: list[list[int]] | None = None,
    ) -> None:
        prompt, outputs = prompt or [1, 2, 3], outputs or []
        known = prompt + outputs
        self.tokens.ids[row, : len(known)] = known
        self.tokens.num_tokens[row], self.tokens.num_prompt[row] = len(known), len(prompt)
        task = Generate(params, seed, stop or [], bad_words or [])
        self.sampler.add(row, NewSequence(row, known, len(prompt), 0, task))

    def append(self, row: int, token: int) -> None:
        self.tokens.ids[row, self.tokens.num_tokens[row]] = token
        self.tokens.num_tokens[row] += 1

    def start(self, logits: Tensor, rows: list[int]) -> PendingSamplerOutput:
        return self.sampler.start(logits.clone().to(self.device), np.array(rows, np.int64))

    def step(self, logits: Tensor, rows: list[int]) -> SamplerOutput:
        output = self.start(logits, rows).wait()
        for row, token in zip(rows, output.token_ids.tolist(), strict=True):
            self.append(row, token)
        return output

    def one(self, logits: Tensor, row: int = 0) -> int:
        output = self.step(logits[None], [row])
        assert not output.errors
        return int(output.token_ids[0])


def gaussian(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32))


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def shy(outputs: list[int], logits: Tensor) -> Tensor:
    return logits - 0.5 * (torch.arange(len(logits)) % 7 == len(outputs) % 7)


def failing(outputs: list[int], logits: Tensor) -> Tensor:
    raise RuntimeError("out of ideas")
