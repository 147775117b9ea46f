"""Step profiles from first principles: bytes and operations of a network, and rates of a device."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.lab.simulate.step_profile import StepProfile

#: Points of the curve of the matrix products.
_TOKENS = sorted({round(2 ** (i / 2)) for i in range(1, 29)} | {1})
#: Share of the device's memory that is neither weights nor KV cache: activations, and what is left free.
_OTHER_MEMORY = 0.12


class Accelerator(msgspec.Struct, frozen=True):
    """What a device can do. Rates are peak rates; the shares say how much of them kernels reach."""

    name: str
    #: Bytes read a second, operations a second (a multiply-add is two), bytes of memory, bytes a second to the host.
    bandwidth: float
    operations: float
    memory: float
    host_bandwidth: float
    bandwidth_share: float = 0.8
    operations_share: float = 0.6
    #: Seconds of each step in which the device waits for the host or launches kernels.
    step_overhead: float = 0.2e-3
    device_type: Literal["cpu", "gpu"] = "gpu"


def computed_profile(
    model: str, config: ModelConfig, device: Accelerator, *, dtype: str = "bfloat16", quantization: str | None = None
) -> StepProfile:
    """The profile of a network on a device.

    A step's products take the longer of reading the weights once and of computing (Williams et al. 2009); attention of
    decodes takes the time to read the KV cache, and that of prompts the time to compute.

    Raises:
        ConfigError: layers have attention windows or recurrent states, or the weights do not fit the memory.
    """
    from octavo.lab.simulate import step_costs
    from octavo.models import network as sizes

    network = sizes.build_without_weights(config, dtype, quantization)
    if any(spec.kind == "state" for spec in network.kv_specs):
        raise ConfigError(f"{model} has recurrent states: a step profile is for layers that keep all tokens")
    if any(spec.window is not None for spec in network.kv_specs):
        raise ConfigError(f"{model} has attention windows: a step profile is for layers that keep all tokens")
    read, compute = device.bandwidth * device.bandwidth_share, device.operations * device.operations_share
    head = sizes.size_bytes(*(weight for weight in network.weights() if weight.kind == "head"))
    elements, kv_bytes = step_costs.layer_weights(network), sizes.kv_bytes_per_token(network)
    knee = round(compute * (step_costs.weight_bytes_read(network) - head) / read / (2 * elements))
    free = device.memory * (1 - _OTHER_MEMORY) - sizes.weight_bytes(network)
    if free < kv_bytes * 1024:
        raise ConfigError(
            f"{sizes.weight_bytes(network) / 1e9:.1f} GB of weights leave too little of {device.memory / 1e9:.1f} GB"
        )
    curve = [
        (float(n), max((step_costs.weight_bytes_read(network, n) - head) / read, 2 * elements * n / compute))
        for n in sorted({*_TOKENS, max(1, knee)})
    ]
    return StepProfile(
        model=model,
        device=device.name,
        device_type=device.device_type,
        origin="computed",
        note=(
            f"not measured: {device.bandwidth / 1e9:g} GB/s of which {device.bandwidth_share:.0%} are reached, "
            f"{device.operations / 1e12:g} TFLOP/s of which {device.operations_share:.0%}, {dtype}"
        ),
        max_model_len=config.max_position,
        kv_cache_tokens=int(free // kv_bytes),
        kv_bytes_per_token=kv_bytes,
        products=_without_straight_points(curve),
        fixed=device.step_overhead + head / read,
        sampled=2 * config.vocab_size * config.hidden_size / compute,
        context=kv_bytes / read,
        pairs=4 * config.num_heads * sum(spec.head_dim for spec in network.kv_specs) / compute,
        chunk=0.0,
        moved=kv_bytes / device.host_bandwidth,
        copied=2 * kv_bytes / read,
    )


def _without_straight_points(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same curve without the points at which it does not bend."""
    kept = curve[:1]
    for (x, y), (x1, y1) in itertools.pairwise(curve[1:]):
        x0, y0 = kept[-1]
        if abs((y1 - y0) * (x - x0) - (y - y0) * (x1 - x0)) > 1e-9 * y1 * (x1 - x0):
            kept.append((x, y))
    return [*kept, curve[-1]]
