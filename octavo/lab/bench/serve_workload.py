"""The requests that ``octavo bench serve`` sends for a workload."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.core.cache_hints import RETENTION_SECONDS
from octavo.core.errors import ConfigError
from octavo.lab.workloads.draws import Weighted, zipf
from octavo.lab.workloads.work_items import WorkItem


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send."""

    prompt: str | Sequence[int]
    #: Tokens to generate; exact if the server honours ``ignore_eos``.
    output_len: int
    #: Seconds after the start of the run, for open-loop arrivals.
    at: float = 0.0
    #: Its own fields of the request's body.
    body: dict[str, Any] = field(default_factory=dict)
    #: Its own limits of latency in seconds, by name: ttft, tpot.
    limits: dict[str, float] = field(default_factory=dict)


def requests(items: Iterable[WorkItem], prompt: Callable[[WorkItem], str | list[int]]) -> list[Request]:
    """A request for each item, with the trace's prompt or else the one that ``prompt`` makes.

    User, priority and cache hints are fields of its body. The targets are not: only servers that schedule by them take
    them, see ``with_targets``.
    """
    return [_request(item, prompt(item) if item.prompt is None else item.prompt) for item in items]


def with_targets(request: Request) -> Request:
    """The request with its limits in its body, as ``ttft_target`` and ``tpot_target`` in seconds."""
    return replace(request, body=request.body | {f"{name}_target": limit for name, limit in request.limits.items()})


def with_models(requests: Sequence[Request], names: Sequence[str], exponent: float, seed: int) -> list[Request]:
    """The requests, each to one of these models: drawn by Zipf's law, the first the most popular; 0: all alike."""
    draws, rng = Weighted(zipf(len(names), exponent)), random.Random(seed)
    return [replace(request, body=request.body | {"model": names[draws.draw(rng)]}) for request in requests]


def _request(item: WorkItem, prompt: str | Sequence[int]) -> Request:
    body: dict[str, Any] = {}
    if item.user is not None:
        body["user"] = item.user
    if item.priority:
        body["priority"] = item.priority
    if item.cache_ttl:
        body["prompt_cache_retention"] = "in_memory" if item.cache_ttl <= RETENTION_SECONDS["in_memory"] else "24h"
    if item.cache_ttl and item.session is not None:
        body["prompt_cache_key"] = item.session
    targets = {"ttft": item.ttft_target, "tpot": item.tpot_target}
    limits = {name: target for name, target in targets.items() if target is not None}
    return Request(prompt, item.output_len, item.at, body, limits)


def extra_fields(text: str) -> dict[str, Any]:
    """The JSON object of ``--extra-body``.

    Raises:
        ConfigError: it is not a JSON object.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--extra-body is not JSON: {e}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text!r}")
    return fields
