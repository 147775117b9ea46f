"""Engines with a fake worker, their requests, and the checks at their end."""

from __future__ import annotations

from typing import Any

from octavo.config.options import AdapterOptions, SchedulerOptions
from octavo.core.request import AdapterRef, AnyTask, Beam, EngineCoreRequest, Generate, RequestOptions
from octavo.core.sampling_params import BeamSearchParams, SamplingParams
from octavo.memory.block_manager import BlockManager
from tests.scheduler.fake_preparations import FakePreparations, limits_for
from tests.scheduler.fake_worker import Engine, check_accounting, check_nothing_held, hypotheses_alone, tokens_alone

BLOCK = 4


def make(
    blocks: int = 64,
    host: int = 0,
    watermark: float = 0.0,
    prefix_caching: bool = False,
    host_cache: bool = False,
    depth: int = 1,
    adapters: AdapterOptions | None = None,
    steps_per_preparation: int = 0,
    **options: Any,
) -> Engine:
    manager = BlockManager(
        blocks,
        BLOCK,
        num_host_blocks=host,
        watermark=watermark,
        prefix_caching=prefix_caching,
        host_cache=host_cache,
    )
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "aging_limit": None}
    return Engine(
        manager,
        SchedulerOptions(**{**defaults, **options}),
        blocks * BLOCK,
        max_in_flight=depth,
        preparations=FakePreparations(limits_for(adapters), steps_per_preparation),
    )


def request(
    group_id: int,
    prompt: int | list[int],
    max_tokens: int | None = 30,
    n: int = 1,
    *,
    beams: int = 0,
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    adapter: AdapterRef | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """Does not stop by itself; prompts given as a length have nothing in common."""
    tokens = [100 * group_id + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    task: AnyTask = Generate(SamplingParams(n=n, max_tokens=max_tokens, **params), group_id)
    if beams:
        task = Beam(BeamSearchParams(beam_width=beams, max_tokens=max_tokens or 9))
    return EngineCoreRequest(
        group_id=group_id,
        prompt_token_ids=tokens,
        task=task,
        arrival_time=arrival,
        options=RequestOptions(priority=priority, cache_salt=salt),
        adapter=adapter,
    )


def step(engine: Engine) -> dict[int, int]:
    """Tokens that the next step computes, by group."""
    computed = engine.computed(engine.step())
    check_accounting(engine)
    return computed


def finish(engine: Engine) -> None:
    """Runs to the end: every request has the tokens that it gets alone, and nothing is left behind."""
    engine.run()
    check_nothing_held(engine)
    for answer in engine.answers.values():
        limit = engine.max_model_len
        if isinstance(answer.request.task, Beam):
            assert answer.hypotheses == hypotheses_alone(answer.request, limit)
        elif answer.group_reason is None:
            for index, tokens in answer.tokens.items():
                assert tokens == tokens_alone(answer.request, index, limit)[: len(tokens)]


def finish_all(engine: Engine) -> None:
    """Runs to the end: every request that was not refused has all the tokens that it gets alone."""
    engine.run()
    check_nothing_held(engine)
    for answer in engine.answers.values():
        if answer.group_reason is None:
            assert answer.tokens[0] == tokens_alone(answer.request, 0, engine.max_model_len)
