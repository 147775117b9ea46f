"""Step profiles: what they cost a step, what is refused, and what is computed from sizes and rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.errors import ConfigError
from octavo.lab.simulate.computed import Accelerator, computed_profile
from octavo.lab.simulate.step_profile import StepProfile, format_profile, load_profile, parse_profile, shipped_profiles
from octavo.lab.simulate.work import StepWork
from octavo.loader.resolve import resolve_model
from octavo.models.config_files import read_model_config

PROFILE: dict[str, Any] = {
    "model": "m",
    "device": "d",
    "device_type": "cpu",
    "origin": "fitted",
    "max_model_len": 4096,
    "kv_cache_tokens": 65536,
    "kv_bytes_per_token": 100,
    "products": [[1, 0.008], [8, 0.008], [16, 0.016]],
    "fixed": 0.001,
    "sampled": 0.0001,
    "context": 1e-6,
    "pairs": 1e-8,
    "chunk": 0.0005,
    "moved": 1e-7,
    "copied": 1e-8,
}


def profile(**changes: Any) -> StepProfile:
    return msgspec.convert(PROFILE | changes, StepProfile)


def test_a_step_costs_the_sum_of_its_parts() -> None:
    decode = StepWork(tokens=4, decodes=4, context=1000, sampled=4)
    assert profile().seconds(decode) == pytest.approx(0.001 + 0.008 + 4e-4 + 1e-3)
    prompt = StepWork(tokens=12, chunks=2, pairs=50, sampled=1)
    assert profile().seconds(prompt) == pytest.approx(0.001 + 0.012 + 1e-4 + 1e-3 + 5e-7)
    assert profile().seconds(StepWork(moved=32, copied=16)) == pytest.approx(0.001 + 32e-7 + 16e-8)
    everything = StepWork(8, 4, 100, 1, 10, 5, 16, 16, 1)
    known = profile(transfer=1e-4)
    assert known.seconds(everything) == pytest.approx(1e-4 + profile().seconds(everything))
    assert known.scaled(1.5).seconds(everything) == pytest.approx(1.5 * known.seconds(everything))


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0.008), (8, 0.008), (9, 0.009), (16, 0.016), (100, 0.1)])
def test_products_lie_on_straight_lines_between_and_after_the_points(tokens: int, seconds: float) -> None:
    assert profile(fixed=0).seconds(StepWork(tokens=tokens)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampled": -1}, "sampled"),
        ({"products": [[1, 0.1]]}, "products"),
        ({"products": [[1, 0.1], [1, 0.2]]}, "ascend"),
        ({"products": [[1, 0.2], [2, 0.1]]}, "ascend"),
        ({"products": [[1, 0], [2, 0.1]], "fixed": 0}, "must take time"),
        ({"format": "octavo-step-profile-9"}, "octavo-step-profile-9"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens"),
        ({"speed": 1}, "speed"),
        ({"model": "x" * 5000}, "model"),
    ],
)
def test_a_wrong_profile_is_refused_with_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_profile(json.dumps(PROFILE | changes).encode(), "p.json")


def test_a_file_is_no_profile_if_it_is_missing_damaged_or_too_large(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with pytest.raises(ConfigError, match="no such file"):
        load_profile(str(file))
    large = f"p.json has {2 << 20} bytes; at most {1 << 20} are read"
    for content, message in ((b"{", "not valid"), (b"\xff\xfe", "not valid"), (b" " * (2 << 20), large)):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            load_profile(str(file))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(format_profile(profile()))
    assert load_profile(str(file)) == profile()


def test_the_profiles_of_the_package_are_valid_and_say_where_they_come_from() -> None:
    profiles = {name: load_profile(name) for name in shipped_profiles()}
    assert set(profiles) == {
        "llama-3.1-8b-h100",
        "opt-13b-a100",
        "smollm2-135m-2-cores",
        "smollm2-135m-epyc-2-cores",
    }
    for found in profiles.values():
        if found.origin == "computed":
            assert found.note.startswith("not measured") and not found.errors
        else:
            assert {"all", "decode", "prefill", "mixed"} <= set(found.errors) and found.errors["all"].median < 0.15


def test_a_computed_profile_follows_from_bytes_and_operations() -> None:
    config = read_model_config(resolve_model("llama-3.1-8b-shape", weights=False))
    device = Accelerator("d", 1e12, 1e15, 80e9, 5e10, bandwidth_share=0.5, operations_share=0.5, step_overhead=0.001)
    found = computed_profile("m", config, device)
    # Llama 3.1 8B: 32 layers of 4096 x (4096 + 2 * 1024 + 4096 + 3 * 14336), head 128256 x 4096, bfloat16.
    elements, head = 32 * 4096 * (4096 * 2 + 2048 + 3 * 14336), 128256 * 4096
    assert found.seconds(StepWork(tokens=1)) == pytest.approx(0.001 + 2 * (elements + head) / 0.5e12)
    many = 10_000
    assert found.seconds(StepWork(tokens=many)) == pytest.approx(
        0.001 + 2 * head / 0.5e12 + 2 * elements * many / 0.5e15, rel=1e-3
    )
    assert found.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert found.context == pytest.approx(found.kv_bytes_per_token / 0.5e12)
    assert found.pairs == pytest.approx(4 * 32 * 32 * 128 / 0.5e15)
    with pytest.raises(ConfigError, match="leave too little"):
        computed_profile("m", config, msgspec.structs.replace(device, memory=16e9))
