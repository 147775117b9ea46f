"""Step profiles: the cost model of a model on a device, a small JSON file.

The seconds of a step are

    fixed + products(tokens) + chunk * chunks + sampled * rows sampled
    + context * tokens of context that decodes read + pairs * pairs of the prompts' attention
    + transfer * blocks swapped + moved * token slots swapped + copied * token slots copied

where ``products`` is the time of the layers' matrix products, a curve over the step's tokens: flat while reading the
weights takes longest, then proportional to the tokens (Williams et al. 2009, "Roofline").
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.files import read_bounded
from octavo.lab.simulate.work import StepWork

#: Largest profile file in bytes; most points of a curve.
_MOST_BYTES, _MOST_POINTS = 1 << 20, 256

#: A cost: seconds for each unit.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]


class Overhead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs around the steps, of one way to run the engine."""

    #: The engine's time for each request that is added, and for each step beside its own time.
    request: Seconds = 0.0
    step: Seconds = 0.0
    #: From the end of a step to the arrival of its tokens at the client, and of a request on its way to the engine.
    answer: Seconds = 0.0
    arrival: Seconds = 0.0


class StoreCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a KV store, beside the steps: it reads while it writes, and one call after the other."""

    #: Of each call: of a write, and of a fetch.
    call: Seconds
    #: Of each byte.
    read: Seconds
    write: Seconds
    #: Most bytes of a shared store; the bound of a disk is ``kv_disk_bytes``.
    max_bytes: _Count = 64 << 30


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Relative error of the fitted seconds of some steps, as shares of the measured ones."""

    steps: int
    median: float
    p90: float
    worst: float
    #: Fitted seconds of all these steps together, relative to the measured ones.
    total: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of a step of one model on one device; times in seconds."""

    format: Literal["octavo-step-profile-1"] = "octavo-step-profile-1"
    model: Text
    device: Text
    #: Decides defaults of options: the token budget and steps in flight.
    device_type: Literal["cpu", "gpu"]
    #: Whether the costs were fitted to measured steps, or computed from sizes and rates and not measured yet.
    origin: Literal["fitted", "computed"]
    note: Text = ""
    #: Context length of the model; tokens that the KV cache holds; bytes of a token in it.
    max_model_len: _Count
    kv_cache_tokens: _Count
    kv_bytes_per_token: _Count
    #: (tokens of a step, seconds) of the matrix products: both ascending. Straight lines between them and after them.
    products: Annotated[list[tuple[Seconds, Seconds]], msgspec.Meta(min_length=2, max_length=_MOST_POINTS)]
    #: Of each step.
    fixed: Seconds
    #: Of each row that is sampled: head, sampling, output.
    sampled: Seconds
    #: Of each token of context that a decode reads.
    context: Seconds
    #: Of each pair of a prompt's token and one that it attends to.
    pairs: Seconds
    #: Of each chunk of a prompt.
    chunk: Seconds
    #: Of each token slot swapped out or in, and copied on the device.
    moved: Seconds
    copied: Seconds
    #: Of each block swapped out or in, whatever its size: what it takes to start its copies.
    transfer: Seconds = 0.0
    #: KV stores, if an engine has them. The defaults are those of an NVMe disk (2.5 and 1.25 GB/s), and of a Redis
    #: server behind a network of 10 Gbit/s.
    disk: StoreCosts = StoreCosts(call=100e-6, read=4e-10, write=8e-10)
    shared: StoreCosts = StoreCosts(call=500e-6, read=1e-9, write=1e-9)
    #: In one process with the program that adds requests, and behind a server.
    offline: Overhead = Overhead()
    server: Overhead = Overhead()
    #: Of a fitted profile: errors of all steps, and by kind of step.
    errors: dict[str, FitError] = {}

    def __post_init__(self) -> None:
        xs, ys = zip(*self.products, strict=True)
        if any(a >= b for a, b in itertools.pairwise(xs)) or list(ys) != sorted(ys):
            raise ValueError("products must ascend: more tokens in each point, and no fewer seconds")
        if not self.fixed + ys[0] > 0:
            raise ValueError("a step must take time: fixed, or the first seconds of products, must be above 0")

    def seconds(self, work: StepWork) -> float:
        """The time of a step."""
        points = self.products
        tokens = work.tokens
        seconds = self.fixed + self.sampled * work.sampled + self.context * work.context
        if tokens:
            i = min(max(bisect_right(points, (tokens, math.inf)), 1), len(points) - 1)
            (x0, y0), (x1, y1) = points[i - 1], points[i]
            seconds += y0 if tokens <= x0 else y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)
        if work.chunks:
            seconds += self.chunk * work.chunks + self.pairs * work.pairs
        if work.moved or work.copied:
            seconds += self.swap_seconds(work.transfers, work.moved) + self.copied * work.copied
        return seconds

    def swap_seconds(self, blocks: int, slots: int) -> float:
        """The time to move so many blocks with so many token slots in all, one way."""
        return self.transfer * blocks + self.moved * slots

    def scaled(self, factor: float) -> StepProfile:
        """The profile of a device on which steps take so many times as long."""
        costs = ("fixed", "sampled", "context", "pairs", "chunk", "moved", "copied", "transfer")
        return msgspec.structs.replace(
            self,
            products=[(tokens, factor * seconds) for tokens, seconds in self.products],
            **{name: factor * getattr(self, name) for name in costs},
        )


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files("octavo.lab.simulate") / "profiles"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def load_profile(name: str) -> StepProfile:
    """The profile of this name that comes with the package, or in this JSON file.

    Raises:
        ConfigError: there is none, or it is not valid.
    """
    known = shipped_profiles()
    if name in known:
        data = (resources.files("octavo.lab.simulate") / "profiles" / f"{name}.json").read_bytes()
        return parse_profile(data, name)
    path = Path(name)
    if not path.is_file():
        what = "no such file" if path.suffix == ".json" or len(path.parts) > 1 else "no profile"
        raise ConfigError(f"{what} {name!r}: give a JSON file, or one of {', '.join(known)}")
    return parse_profile(read_bounded(path, _MOST_BYTES), name)


def parse_profile(data: bytes, name: str) -> StepProfile:
    """The profile in this JSON text, which has the given name in messages.

    Raises:
        ConfigError: it is not a valid profile.
    """
    try:
        return msgspec.json.decode(data, type=StepProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"the profile {name} is not valid: {e}") from None


def format_profile(profile: StepProfile) -> bytes:
    """The profile as JSON, indented; numbers with six digits."""
    plain = _rounded(msgspec.to_builtins(profile))
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
