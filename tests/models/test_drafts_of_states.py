"""Drafts change no bit of an answer of the families with recurrent states; other ways: ``engine/test_state_drafts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine import core
from octavo.speculation.speculator import Speculator
from tests.engine.test_drafts_engine import Remembering
from tests.models import test_falcon_h1, test_kimi_linear, test_mamba, test_mamba_hybrids, test_olmo_hybrid
from tests.models.zoo import ON_GPU, PARAMS, PROMPTS, Zoo, answer_of, prompts_of

pytest.importorskip("octavo._cpu", reason="the CPU kernels are not built")
pytestmark = pytest.mark.skipif(ON_GPU, reason="GPUs have no drafts beside states")

HYBRIDS = [test_mamba_hybrids.granite4, test_kimi_linear.config, test_falcon_h1.config, test_olmo_hybrid.config]
ALONE = [test_mamba.mamba2, test_mamba.falcon_mamba]


@pytest.mark.parametrize("config", HYBRIDS + ALONE, ids=lambda config: config.__module__ + config.__name__)
def test_bit_for_bit_the_answers_without_drafts(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, config: Callable[[], Any]
) -> None:
    zoo.save(config())
    near = {"block_size": 4, "state_checkpoint_tokens": 4 if config in ALONE else 8}
    outputs = zoo.engine(**near).generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
    drafter = Remembering({(tuple(o.prompt_token_ids), 0): list(o.outputs[0].token_ids) for o in outputs})
    monkeypatch.setattr(core, "make_speculator", lambda _: Speculator(drafter, 5, adaptive=False))
    llm = zoo.engine(**near, speculative_config={"method": "prediction", "num_speculative_tokens": 5})
    for _ in range(2):
        found = llm.generate(prompts_of(PROMPTS), PARAMS, use_tqdm=False)
        assert [answer_of(output) for output in found] == [answer_of(output) for output in outputs]
    assert any(output.num_cached_tokens for output in found)
    stats = llm.llm_engine.core.scheduler.stats().speculation
    assert stats is not None and 10 < stats.accepted_tokens < stats.draft_tokens
