"""What attention windows and recurrent states save: the memory of a sequence, and the sequences that run at once.

Each kind of layers has blocks of its own and gives back those behind its window; beside it the same scheduler with
blocks that hold every token in every layer, except that states never do. No weights are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.config.kv_spec import GroupBlocks, GroupShape, KVLayout, KVSpec, group_layers
from octavo.config.options import SchedulerOptions
from octavo.core.request import EngineCoreRequest, Generate
from octavo.core.sampling_params import SamplingParams
from octavo.lab.bench.memory_use import trace
from octavo.lab.bench.scheduler_cost import sampled
from octavo.memory.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

#: Models with windows, by the names of their shapes.
SHAPES = ("gemma-3-270m-shape", "gemma-3-12b-shape", "mistral-7b-v0.1-shape")
_TOKEN = 7
_BLOCK = 16
_OPTIONS = SchedulerOptions(max_num_seqs=512, max_num_batched_tokens=8192)

#: (prompt, output) lengths of requests, and the tokens that the KV cache would hold without windows.
Load = tuple[list[tuple[int, int]], int]
#: Tokens of a state's block: the default of ``state_checkpoint_tokens``.
_STATE_TOKENS = 512
#: Of each kind of layers.
Groups = list[GroupShape]


@dataclass(frozen=True)
class WindowFigures:
    """One model under one load; averages over the steps in which requests wait for memory."""

    model: str
    load: str
    #: Whether each kind of layers has blocks of its own, so that windows count.
    groups: bool
    #: Tokens of the longest request, at its end, and the bytes that it holds then.
    tokens: int
    sequence_bytes: int
    cache_bytes: int
    #: Requests running at once.
    running: float
    #: Share of the bytes of the KV cache with an entry that a later token may read.
    share_of_cache: float
    steps: int
    preemptions: int


def loads(requests: int = 600, seed: int = 0) -> dict[str, Load]:
    """Chat logs (see ``trace``), and documents of 32,256 tokens with answers of 512."""
    return {"chat": (trace(requests, 2048, seed), 1 << 16), "32k": ([(32256, 512)] * (requests // 6), 1 << 18)}


def measure_windows(model: str, specs: list[KVSpec], given: dict[str, Load] | None = None) -> Iterator[WindowFigures]:
    """Each load through the scheduler in the same memory, without groups and with them; ``specs``: of the layers."""
    kinds = group_layers(specs)
    groups: Groups = sorted(
        (
            GroupShape(
                len(kind.layers) * (kind.spec.bytes_per_token * _BLOCK + kind.spec.bytes_per_state),
                kind.spec.window,
                _STATE_TOKENS if kind.spec.kind == "state" else None,
            )
            for kind in kinds
        ),
        key=lambda group: (group.window is not None, -(group.window or 0)),
    )
    states = [group for group in groups if group.state_tokens]
    tokens = [group for group in groups if not group.state_tokens]
    whole = [GroupShape(sum(group.block_bytes for group in tokens)), *states]
    for load, (lengths, slots) in (given or loads()).items():
        cache_bytes = sum(slots // (group.state_tokens or _BLOCK) * group.block_bytes for group in groups)
        for split in [whole, groups] if any(group.window is not None for group in tokens) else [groups]:
            yield _run(model, load, groups, split, lengths, cache_bytes)


def _run(
    model: str, load: str, groups: Groups, split: Groups, lengths: list[tuple[int, int]], cache_bytes: int
) -> WindowFigures:
    """``groups`` of the model by the bytes of a block and the window, and how the blocks are split into groups."""
    longest = max(prompt + output for prompt, output in lengths)
    budget = _OPTIONS.token_budget
    layout = KVLayout(split, _BLOCK, _OPTIONS.max_num_seqs, budget)
    counts = layout.split(cache_bytes, longest)
    blocks = BlockManager(
        [GroupBlocks(n, 0, g.window, g.block_bytes, g.state_tokens) for n, g in zip(counts, split, strict=True)],
        _BLOCK,
        watermark=0.01,
        max_num_batched_tokens=budget,
    )
    scheduler = Scheduler(blocks, _OPTIONS, longest)
    for i, (prompt, output) in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        scheduler.add(EngineCoreRequest(group_id=i, prompt_token_ids=[_TOKEN] * prompt, task=Generate(params, seed=i)))
    running, read, steps, largest, saturated = 0, 0.0, 0, 0, False
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.update(plan, sampled(plan, scheduler))
        seqs = [seq for group in scheduler.queues.running for seq in group.seqs]
        largest = max([largest, *(blocks.held_bytes(s.seq_id) for s in seqs if s.num_computed >= longest - 2)])
        saturated = saturated or scheduler.counts().kv_cache_usage > 0.9
        if saturated and scheduler.queues.num_waiting:
            running += len(seqs)
            for size, window, state_tokens in groups:
                of_tokens = sum(min(s.num_computed, window or s.num_computed) for s in seqs) * size / _BLOCK
                read += len(seqs) * size if state_tokens else of_tokens
            steps += 1
    stats = scheduler.counts()
    return WindowFigures(
        model,
        load,
        split is groups,
        longest,
        largest,
        cache_bytes,
        running / max(1, steps),
        read / max(1, steps) / cache_bytes,
        steps,
        stats.preemptions_by_recompute + stats.preemptions_by_swap,
    )
