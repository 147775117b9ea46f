"""An engine says what it got at its start, to those who listen."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM


def test_an_engine_says_what_it_got(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"num_gpu_blocks_override": 40, "num_host_blocks_override": 8, "max_num_seqs": 16}
    with caplog.at_level(logging.INFO, logger="octavo.startup"):
        llm = LLM(str(tiny_model), device="cpu", **options)
    model, kernels, cache, steps, ready = [r.getMessage() for r in caplog.records if r.name == "octavo.startup"]
    facts = llm.llm_engine.core.startup
    # Embedding and tied head once, per layer attention (q, o; k, v), MLP and two norms, and the last norm.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert facts.parameters == 258 * 32 + 2 * layer + 32
    assert model == f"model: {tiny_model} (LlamaForCausalLM), 26.85 K parameters in float32, 0.00 GiB"
    assert kernels == f"kernels: {facts.workers[0].kernels}" and "threads" in kernels
    assert cache == (
        "KV cache: 40 blocks of 16 tokens (640 tokens, 0.00 GiB in float32), at most 2 requests of 256 tokens at once; "
        "8 host blocks (0.00 GiB)"
    )
    assert steps == "steps: at most 16 sequences run at once, 512 tokens a step"
    assert (facts.workers[0].cache_bytes, facts.workers[0].host_cache_bytes) == (40 * 8192, 8 * 8192)
    assert re.fullmatch(
        r"ready in \d+\.\d\d s: reading and packing weights \S+ s, memory profile \S+ s, KV cache \S+ s, "
        r"tables of positions \S+ s, recording the step \S+ s",
        ready,
    )
    assert sum(facts.workers[0].seconds.values()) <= facts.seconds


def test_it_is_quiet_where_nobody_listens(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="octavo.startup"):
        LLM(str(tiny_model), device="cpu", num_gpu_blocks_override=40, quantization="int8")
    assert not caplog.records
