"""A worker under hand-written plans, and adapters for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo.config.engine_config import make_config
from octavo.core.plan import NewSequence, PositionLogprobs, StepPlan, StepResult, TableChange
from octavo.core.request import AdapterRef, AnyTask, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.loader.adapters import AdapterTargets, check_adapter
from octavo.models.config_files import read_model_config
from octavo.runner.loaded_model import LoadedModel
from octavo.runner.model_runner import ModelRunner

VOCAB = 64
PROMPT = [7, 3, 60, 22, 22, 9, 41, 5, 13, 30]
#: What a sequence sampled at each of its steps.
Samples = list[tuple[int, PositionLogprobs | None]]


class Worker:
    """A runner with blocks of four tokens; plans are numbered by themselves."""

    def __init__(self, folder: Path, num_blocks: int = 96, num_host_blocks: int = 16, **options: Any) -> None:
        defaults = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_threads": 1}
        config = make_config(model=str(folder), **{**defaults, **options})
        self.folder, self.options = folder, options
        #: Whether rounding does not depend on the batch.
        self.exact = config.kernels == "cpu"
        loaded = LoadedModel(config, read_model_config(folder), folder, "float32")
        self.runner = ModelRunner(loaded, [num_blocks], [num_host_blocks], 128)
        self._steps = 0

    def step(self, **plan: Any) -> StepResult:
        self._steps += 1
        return self.runner.submit(StepPlan(step=self._steps, **plan)).wait()

    def alone(
        self, prompt: list[int], params: SamplingParams, count: int, *, seed: int = 0, **sequence: Any
    ) -> Samples:
        """What a sequence samples that has the worker to itself, its prompt computed at once."""
        new = introduce(10**6, prompt, params, seed=seed, **sequence)
        table = TableChange(new.seq_id, 0, list(range(-(-(len(prompt) + count) // 4))))
        results = [self.step(new=[new], table_changes=[table], seq_ids=[new.seq_id], num_tokens=[len(prompt)])]
        results += [self.step(seq_ids=[new.seq_id], num_tokens=[1]) for _ in range(count - 1)]
        self.step(forget=[new.seq_id])
        return [samples(result)[new.seq_id] for result in results]

    def assert_same(self, ours: Samples, expected: Samples) -> None:
        """Bit for bit with the CPU kernels; the others' rounding depends on the batch."""
        if self.exact:
            assert ours == expected
            return
        assert [token for token, _ in ours] == [token for token, _ in expected]
        for (_, mine), (_, other) in zip(ours, expected, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def introduce(
    seq_id: int,
    tokens: list[int],
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    num_prompt_tokens: int | None = None,
    num_computed: int = 0,
    stop: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
    task: AnyTask | None = None,
) -> NewSequence:
    prompt = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    task = task or Generate(params or SamplingParams(), seed, stop or [], bad_words or [])
    return NewSequence(seq_id, tokens, prompt, num_computed, task)


def samples(result: StepResult) -> dict[int, tuple[int, PositionLogprobs | None]]:
    """By sequence."""
    extras = result.extras
    return {
        seq_id: (token, next(iter(extras[seq_id].logprobs), None) if seq_id in extras else None)
        for seq_id, token in zip(result.seq_ids, result.token_ids, strict=True)
    }


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **options)


def steps(results: list[StepResult], seq_id: int) -> Samples:
    """What a sequence sampled over several steps."""
    return [found[seq_id] for found in map(samples, results) if seq_id in found]


def make_adapter(folder: Path, targets: AdapterTargets, seed: int, rank: int = 4) -> AdapterRef:
    """An adapter of all matrices whose effect is plain to see."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in targets:
        kinds = (
            ("lora_embedding_A", "lora_embedding_B") if "embed" in target.layer else ("lora_A.weight", "lora_B.weight")
        )
        module = f"base_model.model.{target.layer}{'.' if target.part else ''}{target.part}"
        tensors[f"{module}.{kinds[0]}"] = torch.randn(rank, target.inputs, generator=generator) * 0.2
        tensors[f"{module}.{kinds[1]}"] = torch.randn(target.outputs, rank, generator=generator) * 0.2
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return check_adapter(folder, folder.name, targets, 16)
