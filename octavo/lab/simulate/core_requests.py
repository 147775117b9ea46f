"""Requests of simulated traffic as the scheduler takes them."""

from __future__ import annotations

from functools import lru_cache

from octavo.core.cache_hints import Breakpoint, CacheHints
from octavo.core.request import EngineCoreRequest, Generate, RequestOptions, SequenceStatus
from octavo.core.sampling_params import SamplingParams
from octavo.lab.workloads.work_items import WorkItem
from octavo.scheduler.state import SchedulingState

#: The token that ends a sequence before its ``max_tokens``.
STOP = 0


@lru_cache(maxsize=4096)
def _task(max_tokens: int | None, samples: int) -> Generate:
    """Shared by all requests with this limit; nothing changes it."""
    heat = 0.0 if samples == 1 else 1.0
    params = SamplingParams(n=samples, temperature=heat, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return Generate(params, seed=0, stop_token_ids=[STOP])


def cache_hints(item: WorkItem) -> CacheHints:
    """What an item asks to be kept: what it shares with other conversations, and its whole prompt."""
    marks, end = [], 0
    for name, length in item.prefix:
        end += length
        if name != item.stream:
            marks.append(Breakpoint(end, item.cache_ttl))
    return CacheHints(tuple(marks), item.cache_ttl, item.session or "")


def core_request(
    number: int, item: WorkItem, prompt: list[int], max_tokens: int | None, samples: int = 1
) -> EngineCoreRequest:
    """What the scheduler gets of an item with this prompt."""
    return EngineCoreRequest(
        group_id=number,
        prompt_token_ids=prompt,
        task=_task(max_tokens, samples),
        arrival_time=item.at,
        options=RequestOptions(
            priority=item.priority,
            user=item.user or "",
            ttft_target=item.ttft_target,
            tpot_target=item.tpot_target,
            cache_hints=cache_hints(item) if item.cache_ttl else None,
        ),
    )


def add_with_computed_kv(queues: SchedulingState, request: EngineCoreRequest) -> bool:
    """Adds a group of one sequence whose prompt, but for its last token, another engine has computed: it is swapped.

    False, and nothing is changed, if too few host blocks are available.

    Raises:
        ValueError: layers have windows.
    """
    blocks, computed = queues.blocks, len(request.prompt_token_ids) - 1
    if any(layers.window is not None for layers in blocks.groups):
        raise ValueError("what another engine has computed can be received only where all layers keep all tokens")
    count = blocks.blocks_for(computed)
    if any(layers.host.num_available < count for layers in blocks.groups):
        return False
    group = queues.add(request)
    seq = group.seqs[0]
    for layers in blocks.groups:
        layers.on_host.by_id[seq.seq_id] = layers.cache.allocate_on_host(count)
    seq.num_computed, group.prefilling = computed, False
    queues.move(group, SequenceStatus.SWAPPED)
    return True
