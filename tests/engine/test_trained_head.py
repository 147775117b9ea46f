"""A head that scripts/research/train_draft_head.py trains on the demo model's own answers."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.lab.bench.speculation import example_prompts
from octavo.models.config_files import read_json

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")

SCRIPT = Path(__file__).parents[2] / "scripts" / "research" / "train_draft_head.py"
REQUESTS, TOKENS = 10_000, 6


@pytest.fixture
def training() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_draft_head", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_its_drafts_are_accepted_and_no_token_differs(demo_model: Path, training: ModuleType, tmp_path: Path) -> None:
    """Trained for a minute or two; in sampled requests, of which many share their prompts."""
    options = ["--updates", "60", "--batches", "1", "--answers", "12", "--tokens", "64", "--draft-vocab", "2048"]
    training.train(training.make_parser().parse_args([str(tmp_path / "head"), "--model", str(demo_model), *options]))

    def answers(config: Any) -> tuple[list[list[int]], LLM]:
        llm = LLM(str(demo_model), max_num_seqs=64, max_model_len=512, speculative_config=config)
        texts = example_prompts(50, random.Random(1))
        chats = [llm.get_tokenizer().encode_chat([{"role": "user", "content": text}]) for text in texts]
        prompts: Any = [{"prompt_token_ids": chats[i % len(chats)]} for i in range(REQUESTS)]
        params = [
            SamplingParams(temperature=0.8, seed=i, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            for i in range(REQUESTS)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], llm

    wanted, plain = answers("none")
    plain.llm_engine.core.shutdown()
    head = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3, "adaptive": False}
    found, llm = answers(head)
    assert sum(one != other for one, other in zip(found, wanted, strict=True)) == 0
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and stats.draft_tokens > REQUESTS and stats.failures == 0
    chance = 1 / read_json(tmp_path / "head" / "config.json")["draft_vocab_size"]
    assert stats.accepted_tokens / stats.draft_tokens > 5 * chance
