"""Schemas without the keywords that a grammar leaves out."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any


def without_keywords(schema: dict[str, Any], places: Iterable[str]) -> dict[str, Any]:
    """A copy of a schema without the keywords at these JSON pointers."""
    schema = copy.deepcopy(schema)
    for place in places:
        *way, keyword = [step.replace("~1", "/").replace("~0", "~") for step in place.split("/")[1:]]
        part: Any = schema
        for step in way:
            part = part[int(step)] if isinstance(part, list) else part[step]
        part.pop(keyword)
    return schema
