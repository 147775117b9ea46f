"""What to do with the blocks of a preempted request: swap them, or compute them again.

Kwon et al. 2023 (PagedAttention), sections 4.5 and 7.3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from octavo.config.engine_config import EngineConfig, make_config
from octavo.core.errors import ConfigError
from octavo.lab.simulate.run import simulate
from octavo.lab.simulate.step_profile import StepProfile
from octavo.lab.simulate.work import StepWork
from octavo.lab.workloads.lengths import Lengths, Uniform, chat_inputs, chat_outputs
from octavo.lab.workloads.workload import Workload

#: Block sizes of the paper's figure 19; and those of whole runs.
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RUN_SIZES = (1, 4, 16, 64, 256)
#: Tokens of context whose blocks are swapped or computed again.
CONTEXTS = (128, 512, 2048)
#: Shares of all blocks that are on the host.
HOST_SHARES = (0.0, 1 / 24, 1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2)


@dataclass(frozen=True)
class Load:
    """Requests that are all there at the start."""

    name: str
    inputs: Lengths
    outputs: Lengths
    requests: int
    #: Of the shared memory: blocks of 16 tokens for about eleven whole requests.
    blocks: int = 0


#: The lengths of the lab's scenarios with few blocks, and the same with longer prompts or longer answers.
SHARED_LOADS = (
    Load("short", Uniform(16, 128), Uniform(64, 384), 150, 192),
    Load("long prompts", Uniform(256, 768), Uniform(64, 384), 150, 512),
    Load("long answers", Uniform(16, 128), Uniform(256, 1024), 150, 512),
)
LINK_LOADS = (
    Load("chat", chat_inputs(), chat_outputs(), 200),
    Load("long prompts", Uniform(512, 1024), Uniform(128, 512), 200),
)


class PreemptionFigures(msgspec.Struct, frozen=True):
    """Of one run; ``latency`` in seconds, mean over requests from the start to the last token."""

    requests_per_s: float
    latency: float
    running: float
    preemptions_by_recompute: int
    preemptions_by_swap: int
    recomputed_tokens: int


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one setting, one for each seed."""

    load: str
    mode: str
    #: Whether what was computed may be found in freed blocks that nothing has been written to since.
    prefix_cache: bool
    block_size: int
    device_blocks: int
    host_blocks: int
    runs: list[PreemptionFigures]


class OnePreemption(msgspec.Struct, frozen=True):
    """Seconds to give up the blocks of one request alone and have them again; by block size."""

    context: int
    recompute: float
    #: Out and in.
    swap: dict[int, float]


def at_equal_memory(
    profile: StepProfile, load: Load, seeds: Sequence[int], shares: Sequence[float] = HOST_SHARES
) -> Iterator[Runs]:
    """Host blocks, these shares of all, are taken from the same memory: so many fewer are on the device.

    Without any a preempted request is computed again; with some it is swapped, or computed again where they are full.
    """
    for share, prefix_cache in itertools.product(shares, (True, False)):
        host = round(share * load.blocks)
        options = make_config(
            model="none",
            num_gpu_blocks_override=load.blocks - host,
            num_host_blocks_override=host,
            max_num_seqs=32,
            preemption_mode="swap" if host else "recompute",
            enable_prefix_caching=prefix_cache,
        )
        yield _runs(profile, options, load, seeds)


def with_link(profile: StepProfile, gb_per_s: float, copies: int, seconds_per_copy: float) -> StepProfile:
    """The profile with another link to host memory.

    Args:
        profile: what computes.
        gb_per_s: what the link carries, one way, in 10^9 bytes a second.
        copies: how many move a block: 1 where a block of all layers is contiguous, as in the GPU backend; one for each
            layer's keys and one for its values where each layer has its own array.
        seconds_per_copy: what each takes beside its bytes.
    """
    moved = profile.kv_bytes_per_token / (gb_per_s * 1e9)
    return msgspec.structs.replace(profile, moved=moved, transfer=copies * seconds_per_copy)


def across_link(
    profile: StepProfile, load: Load, size: int, mode: str, seeds: Sequence[int], *, prefix_cache: bool = True
) -> Runs:
    """Host memory is beside the device's, as many blocks of ``size`` tokens as there."""
    blocks = profile.kv_cache_tokens // size
    options = make_config(
        model="none",
        block_size=size,
        num_gpu_blocks_override=blocks,
        num_host_blocks_override=0 if mode == "recompute" else blocks,
        max_num_seqs=1024,
        preemption_mode=mode,
        enable_prefix_caching=prefix_cache,
    )
    return _runs(profile, options, load, seeds)


def one_preemption(profile: StepProfile, context: int) -> OnePreemption:
    """Of a request with so many tokens: what the paper's figure 19 (a) shows."""
    again = StepWork(tokens=context, chunks=1, pairs=context * (context + 1) // 2)
    blocks = {size: math.ceil(context / size) for size in BLOCK_SIZES}
    swap = {size: 2 * profile.swap_seconds(count, count * size) for size, count in blocks.items()}
    return OnePreemption(context, profile.seconds(again), swap)


def _runs(profile: StepProfile, options: EngineConfig, load: Load, seeds: Sequence[int]) -> Runs:
    host, device = options.num_host_blocks_override, options.num_gpu_blocks_override
    assert host is not None and device is not None
    return Runs(
        load=load.name,
        mode=options.preemption_mode,
        prefix_cache=options.enable_prefix_caching,
        block_size=options.block_size,
        device_blocks=device,
        host_blocks=host,
        runs=[_run(profile, options, load, seed) for seed in seeds],
    )


def _run(profile: StepProfile, options: EngineConfig, load: Load, seed: int) -> PreemptionFigures:
    items = Workload(requests=load.requests, inputs=load.inputs, outputs=load.outputs, seed=seed)
    longest = profile.max_model_len
    fitting = [item for item in items if item.input_len + item.output_len <= longest]
    if not fitting:
        raise ConfigError(f"no request of the load {load.name!r} fits the profile's context of {longest} tokens")
    f = simulate(profile, options, fitting)
    assert f.e2e is not None
    return PreemptionFigures(
        f.requests_per_s,
        f.e2e.mean,
        f.mean_running,
        f.preemptions_by_recompute,
        f.preemptions_by_swap,
        f.recomputed_tokens,
    )
