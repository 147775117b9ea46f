"""Random JSON schemas of supported keywords."""

from __future__ import annotations

from random import Random
from typing import Any

_TYPES: list[Any] = [
    "null", "boolean", "integer", "number", "string", "array", "object", ["integer", "string"], ["object", "null"],
    ["number", "array"],
]  # fmt: skip
_NAMES = ["a", "b", "c", "a b", "é", '"q']
_VALUES: list[Any] = [1, "a", None, True, [1], {"a": 1}, 2.5, "b\n", "é", 1.0, 0]
#: Keyword -> how often a schema has it, and values.
_SIMPLE: dict[str, tuple[float, list[Any]]] = {
    "minimum": (0.15, [-5, 0, 1.5, 3, 1000]),
    "maximum": (0.15, [3, 10, 2000, 7.25]),
    "exclusiveMinimum": (0.08, [-1, 0, 0.5]),
    "exclusiveMaximum": (0.08, [4, 100]),
    "multipleOf": (0.08, [2, 3, 5, 0.5, 0.25]),
    "minLength": (0.12, [0, 1, 3]),
    "maxLength": (0.12, [3, 5]),
    "pattern": (0.08, ["^a", "b$", "[0-9]{2}", "^x?y+$", "é", r"^\w+$", r"^\d", r"\s"]),
    "format": (0.05, ["date", "ipv4", "uuid", "email", "time"]),
    "minItems": (0.15, [0, 1, 3]),
    "maxItems": (0.15, [3, 4]),
    "minProperties": (0.04, [0, 1, 2]),
    "maxProperties": (0.1, [0, 1, 2, 3]),
    "const": (0.05, _VALUES),
    "uniqueItems": (0.05, [False]),
}


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A schema of at most four levels; many are contradictions or not supported."""

    def inner() -> Any:
        return random_schema(random, depth + 1) if depth < 3 else random.choice([True, {"type": "integer"}])

    def some(probability: float) -> bool:
        return random.random() < probability

    schema: dict[str, Any] = {"type": random.choice(_TYPES)} if some(0.8) else {}
    schema |= {name: random.choice(values) for name, (often, values) in _SIMPLE.items() if some(often)}
    if some(0.25):
        schema["items"] = inner()
    if some(0.4):
        schema["properties"] = {name: inner() for name in random.sample(_NAMES, random.randint(1, 3))}
    if some(0.2):
        schema["required"] = random.sample(["a", "b", "c", "z"], random.randint(1, 2))
    if some(0.2):
        schema["additionalProperties"] = random.choice([False, True, {"type": "integer"}, inner()])
    if some(0.1):
        schema["patternProperties"] = {random.choice(["^x_", "^n", "^[a-c]$", "z$"]): inner()}
    if some(0.1):
        schema["enum"] = random.sample(_VALUES, random.randint(1, 3))
    for keyword in ("anyOf", "allOf", "oneOf"):
        if some(0.1):
            schema[keyword] = [inner(), inner()]
    return schema
