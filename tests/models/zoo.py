"""What every architecture is held to: transformers' results over the same checkpoint, and one answer whatever happens.

A test of an architecture is one call of ``Zoo`` with a small random configuration of transformers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.core.dtypes import DType
from octavo.kernels.interface import Kernels
from octavo.kernels.reference import ReferenceKernels
from octavo.layers.layer import LayerContext
from octavo.loader.weights import load_model
from octavo.models.config_files import read_model_config

#: What most small configurations have in common; the vocabulary is that of ``PROMPTS``.
SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PROMPT = [3, 17, 99, 42, 0, 8, 8, 61, 100, 5, 23, 77, 14, 90, 31, 2, 66, 51, 12, 37, 71, 29, 4, 88, 19]
#: One token, less and more than a block, and more than the step of a chunked run takes.
PROMPTS = [PROMPT[:1], PROMPT[4:11], PROMPT, [(i * 37) % 101 for i in range(40)]]
OUTPUT = 16
#: There the tests are marked ``gpu``.
ON_GPU = torch.cuda.is_available()
#: Of the float32 logits of both sides, which sum in other orders.
TOLERANCE = 1e-3


class Zoo:
    """Checks an architecture: ``zoo(config)`` saves a random model of the transformers configuration and compares."""

    #: Whether the fastest kernels give one answer in any company.
    exact = True
    #: Bound of the error of bfloat16, a share of the spread of the logits.
    rounding = 0.12

    def __init__(self, folder: Path, save: Callable[..., Any], driver: Any) -> None:
        self.folder, self.save, self._driver = folder, save, driver

    def __call__(
        self,
        config: Any,
        *,
        tight: Mapping[str, Any] | None = None,
        preempts: bool = True,
        change: Callable[[Any], None] | None = None,
    ) -> Any:
        """All checks; returns the model of transformers.

        Args:
            config: of transformers.
            tight: options of an engine in which the four requests preempt each other.
            preempts: false if they do not there, as layers with a window hold few blocks.
            change: called with the model before it is saved.
        """
        model = self.save(config, change=change)
        self.check_network(model)
        self.check_engine(model, tight or {"num_gpu_blocks_override": 24, "block_size": 4}, preempts=preempts)
        return model

    def check_network(self, model: Any) -> None:
        """Logits on the reference and the compiled kernels, and their bits on the compiled ones."""
        expected = logits_of(model, PROMPT)
        assert expected.std() > 0.2, "logits that hardly differ would hide errors"
        for kernels in _backends():
            run = self._runner(kernels, DType.FLOAT32)
            at_once = run("at once", PROMPT, [len(PROMPT)])
            assert_same(at_once, expected)
            for name, sizes in (("in chunks", [5, 1, 9, 3]), ("token by token", [3, 1])):
                pieces = run(name, PROMPT, sizes)
                if self.exact and kernels.name != "reference":
                    assert torch.equal(pieces, at_once), f"{name}: other bits than at once"
                else:
                    assert_same(pieces, expected)
            if kernels.name != "reference":
                # Errors of bfloat16, and not more: nothing is computed of the wrong number.
                rounded = self._runner(kernels, DType.BFLOAT16)("bfloat16", PROMPT, [13, 1])
                assert (rounded - expected).square().mean().sqrt() < self.rounding * expected.std()

    def check_engine(self, model: Any, tight: Mapping[str, Any], *, preempts: bool = True) -> None:
        """Greedy tokens and logprobs of the engine: alone, and in chunks while others preempt."""
        alone = self.engine(enable_prefix_caching=False)
        wanted = [answers(alone, [prompt])[0] for prompt in PROMPTS]
        for prompt, (tokens, logprobs) in zip(PROMPTS, wanted, strict=True):
            scores = logits_of(model, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
            chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            # Tokens whose scores differ by less than the arithmetic of both sides are a tie.
            assert (scores.max(-1).values - chosen).max() < TOLERANCE
            assert (chosen - torch.tensor(logprobs)).abs().max() < TOLERANCE
        crowded = self.engine(max_num_batched_tokens=16, watermark=0.0, **tight)
        outputs = crowded.generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
        # Steps that are planned ahead may finish requests before the others need their blocks.
        assert (sum(output.metrics.num_preemptions for output in outputs) > 0) == preempts or ON_GPU
        found = [answer_of(output) for output in outputs]
        if self.exact and _backends()[-1].name != "reference":
            assert found == wanted
        else:
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]

    def engine(self, folder: Path | None = None, /, **options: Any) -> LLM:
        """An engine of the saved model or of another folder, in float32 and without a tokenizer."""
        place = {"device": "cuda", "deterministic": True} if ON_GPU else {"kernels": _backends()[-1].name}
        sizes = {"num_gpu_blocks_override": 200, "max_num_seqs": 8, "max_model_len": 64}
        defaults = {"dtype": "float32", "skip_tokenizer_init": True, **sizes, **place}
        return LLM(str(folder or self.folder), **{**defaults, **options})

    def _runner(self, kernels: Kernels, dtype: DType) -> Callable[..., Tensor]:
        network = load_model(self.folder, read_model_config(self.folder), LayerContext(kernels, dtype))
        run: Callable[..., Tensor] = self._driver(network, kernels=kernels).run
        return run


PARAMS = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1)


def prompts_of(prompts: list[list[int]]) -> list[Any]:
    """Prompts of token ids, as the engine takes them."""
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their logprobs."""
    return [answer_of(output) for output in llm.generate(prompts_of(prompts), PARAMS, use_tqdm=False)]


def answer_of(output: Any) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    return tokens, [place[token].logprob for token, place in zip(tokens, completion.logprobs, strict=True)]


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    """transformers' logits float32 [tokens, vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Within the errors of float32; the best token is the best, or as good."""
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE / 4, rtol=1e-5)
    best = theirs.gather(1, ours.argmax(-1, keepdim=True))[:, 0]
    assert (theirs.max(-1).values - best).max() < TOLERANCE


def rename_tensors(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Writes model.safetensors anew under other names, as older checkpoints have them; None leaves a tensor out."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    renamed = {new: tensor for name, tensor in tensors.items() if (new := rename(name)) is not None}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    """Changes values of config.json; None removes one."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def _backends() -> list[Kernels]:
    """The reference, and the fastest with one answer in any company."""
    if ON_GPU:
        triton = importlib.import_module("octavo.kernels.triton.backend")
        return [ReferenceKernels(), triton.TritonKernels("cuda", deterministic=True)]
    try:
        return [ReferenceKernels(), importlib.import_module("octavo.kernels.cpu.backend").CpuKernels()]
    except ImportError:
        return [ReferenceKernels()]
