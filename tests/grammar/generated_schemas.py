"""Schemas as generators write them: pydantic, msgspec, zod, TypeBox, OpenAPI 3.0, quicktype."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Schema = dict[str, Any]


@dataclass
class Shape:
    """A schema, values of it, and what a grammar leaves out."""

    name: str
    schema: Schema
    valid: list[Any] = field(default_factory=list)
    invalid: list[Any] = field(default_factory=list)
    #: JSON pointers of keywords that are relaxed.
    relaxed: list[str] = field(default_factory=list)
    #: The same schema in keywords of draft 2020-12, where it is of an older dialect.
    judged: Schema | None = None


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(max_length=5)]


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Point(msgspec.Struct, tag="point"):
    x: int
    y: int = 0


class Circle(msgspec.Struct, tag="circle"):
    radius: Annotated[float, msgspec.Meta(gt=0)]


class Row(msgspec.Struct, array_like=True):
    a: int
    b: str


class Pair(NamedTuple):
    a: int
    b: str


#: (a type, values of it, values that are not, what is relaxed)
_PYDANTIC: list[tuple[Any, list[Any], list[Any], list[str]]] = [
    (Path, ["/a"], [1], ["/format"]),
    (pydantic.SecretStr, ["x"], [1], []),
    (bytes, ["x"], [1], []),
    (pydantic.Base64Bytes, ["YQ==", ""], ["YQ=", 1], []),
    (set[int], [[1, 2], []], [["a"]], ["/uniqueItems"]),
    (frozenset[Colour], [["red"]], [["green"]], ["/uniqueItems"]),
    (dict[Colour, int], [{"red": 1}, {}, {"red": 1, "blue": 2}], [{"green": 1}, {"red": "a"}], []),
    (dict[str, float], [{"a": 1.5}], [{"a": "x"}], []),
    (dict[Annotated[str, Field(pattern="^[a-z]+$")], int], [{"ab": 1}], [{"AB": 1}], []),
    (dict[Annotated[str, Field(min_length=2, max_length=3)], int], [{"ab": 1}], [{"a": 1}, {"abcd": 1}], []),
    (dict[int, bool], [{"1": True}], [{"1": 1}], []),
    (Decimal, ["1.5", 2, "-0.1"], [True], []),
    (uuid.UUID, ["123e4567-e89b-12d3-a456-426614174000"], ["x"], []),
    (pydantic.UUID4, ["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"], []),
    (datetime.datetime, ["2026-01-02T03:04:05Z"], ["x"], []),
    (datetime.date, ["2026-01-02"], ["2026"], []),
    (datetime.timedelta, ["PT1S"], ["x"], []),
    (pydantic.IPvAnyAddress, ["::1"], [1], ["/format"]),
    (ipaddress.IPv4Address, ["1.2.3.4"], ["1.2"], []),
    (ipaddress.IPv4Network, ["10.0.0.0/8"], [1], ["/format"]),
    (pydantic.AnyUrl, ["http://a.org"], [1], []),
    (pydantic.Json[int], ["1"], [1], []),
    (tuple[int, str], [[1, "a"]], [[1], ["a", 1], [1, "a", 2]], []),
    (tuple[int, ...], [[1, 2]], [["a"]], []),
    (Annotated[list[int], Field(min_length=1, max_length=2)], [[1], [1, 2]], [[], [1, 2, 3]], []),
    (Annotated[int, Field(gt=0, le=10)], [1, 10], [0, 11], []),
    (Annotated[int, Field(ge=0, le=2**64)], [0, 5], [-1], []),
    (Annotated[float, Field(ge=0, lt=1, multiple_of=0.25)], [0.25], [1, 0.3], []),
    (Annotated[str, Field(pattern=r"^\w+@\w+\.\w{2,}$")], ["a@b.org"], ["a@b", "é@b.org"], []),
    (Annotated[Cat | Dog, Field(discriminator="kind")], [{"kind": "cat", "lives": 9}], [{"kind": "cow"}], []),
    (Cat | Dog | None, [None, {"kind": "cat", "lives": 1}], [{}], []),
    (list[Annotated[Cat | Dog, Field(discriminator="kind")]], [[{"kind": "dog", "name": "Rex"}]], [[{}]], []),
    (Node, [{"name": "a", "children": [{"name": "b"}]}], [{"name": 1}], []),
    (Closed, [{}, {"a": None}, {"a": 1}], [{"a": "x"}, {"b": 1}], []),
    (Open, [{"a": 1}, {"a": 1, "b": "x"}], [{}], []),
    (Literal["a", 1, None], ["a", 1, None], ["b", 2], []),
    (Pair, [[1, "a"]], [["a", 1]], []),
    (Annotated[str, Field(json_schema_extra={"not": {"const": "x"}})], ["y", "xx"], ["x"], []),
]
_MSGSPEC: list[tuple[Any, list[Any], list[Any], list[str]]] = [
    (Point | Circle, [{"type": "point", "x": 1}, {"type": "circle", "radius": 0.5}], [{"type": "x"}], []),
    (Row, [[1, "a"]], [["a", 1]], []),
    (dict[Annotated[str, msgspec.Meta(max_length=2)], int], [{"ab": 1}], [{"abc": 1}], []),
    (dict[Annotated[str, msgspec.Meta(pattern="^x")], int], [{"xy": 1}], [{"y": 1}], []),
    (frozenset[str], [["a"]], [[1]], ["/uniqueItems"]),
    (bytes, ["YQ=="], [1], []),
    (Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)], [0], ["a"], []),
    (Decimal, ["1.5"], [None], ["/format"]),
    (uuid.UUID, ["123e4567-e89b-12d3-a456-426614174000"], ["x"], []),
]


def _defs(*names: str, **more: Any) -> Schema:
    """Variants of these kinds, told apart by a const."""
    return {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["kind", "n"],
            **more,
        }
        for name in names
    }


_ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_ZOD_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
_D7 = "http://json-schema.org/draft-07/schema#"
_BY_HAND: list[Shape] = [
    Shape(
        "pydantic decimal", {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["1.5", "+0"], ["-", "."]
    ),
    Shape(
        "pydantic digits",
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}$|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"},
        ["1.25", "123"],
        ["x", "."],
    ),
    Shape(
        "zod record",
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    Shape(
        "zod record of an enum",
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "boolean"},
            "required": ["a", "b"],
        },
        [{"a": True, "b": False}],
        [{"a": True}, {"a": True, "b": True, "c": True}],
    ),
    Shape(
        "zod record of uuids",
        {
            "type": "object",
            "propertyNames": {"type": "string", "format": "uuid", "pattern": _ZOD_UUID},
            "additionalProperties": {"type": "integer"},
        },
        [{"123e4567-e89b-12d3-a456-426614174000": 1}],
        [{"x": 1}],
    ),
    Shape(
        "zod never",
        {"type": "object", "properties": {"k": {"not": {}}, "a": {"type": "null"}}, "additionalProperties": False},
        [{}, {"a": None}],
        [{"k": 1}],
    ),
    Shape(
        "zod email", {"type": "string", "format": "email", "pattern": _ZOD_EMAIL}, ["a.b@c.org"], ["a..b@c.org", "a"]
    ),
    Shape("zod uuid", {"type": "string", "format": "uuid", "pattern": _ZOD_UUID}, [], ["x"]),
    Shape(
        "zod int",
        {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        [0, 9007199254740991],
        [9007199254740992],
    ),
    Shape(
        "zod base64url",
        {"type": "string", "format": "base64url", "pattern": "^[A-Za-z0-9_-]*$"},
        ["a_"],
        ["a+"],
        ["/format"],
    ),
    Shape("zod e164", {"type": "string", "format": "e164", "pattern": r"^\+[1-9]\d{6,14}$"}, ["+4912345678"], ["+0"]),
    Shape("zod starts with", {"type": "string", "pattern": "^ab.*", "minLength": 3}, ["abc"], ["ab", "xabc"]),
    Shape("zod includes", {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["xbya"], ["a"]),
    Shape("zod emoji", {"type": "string", "format": "emoji", "pattern": "^[^a-z]+$"}, ["🙂"], ["x"], ["/format"]),
    Shape(
        "zod discriminated union",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "oneOf": [*_defs("a", "b", additionalProperties=False).values()],
        },
        [{"kind": "a", "n": 1}],
        [{"kind": "c", "n": 1}],
    ),
    Shape(
        "zod tuple",
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False, "minItems": 2},
        [["a", None]],
        [["a"]],
    ),
    Shape("zod nullable", {"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
    Shape("zod literal", {"const": 3, "type": "number"}, [3], [4]),
    Shape(
        "zod intersection",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
            ]
        },
        [{"a": None, "b": None}],
        [{"a": None}],
    ),
    Shape(
        "typebox record",
        {"type": "object", "patternProperties": {"^(.*)$": {"type": "number"}}},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    Shape(
        "typebox record of numbers",
        {
            "type": "object",
            "patternProperties": {"^(0|[1-9][0-9]*)$": {"type": "string"}},
            "additionalProperties": False,
        },
        [{"10": "a"}],
        [{"x": "a"}],
    ),
    Shape(
        "typebox literals",
        {"anyOf": [{"const": "a", "type": "string"}, {"const": "b", "type": "string"}]},
        ["a"],
        ["c"],
    ),
    Shape("typebox never", {"type": "array", "items": {"not": {}}}, [[]], [[1]]),
    Shape("typebox any but null", {"not": {"type": "null"}}, [1, "a", False], [None]),
    Shape("typebox unsafe integer", {"type": "integer", "exclusiveMaximum": 2**65}, [1], ["a"]),
    Shape(
        "typebox unevaluated",
        {
            "type": "object",
            "unevaluatedProperties": False,
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "null"}}},
            ],
        },
        [{"a": None}, {"a": None, "b": None}],
        [{"a": None, "c": 1}],
    ),
    Shape(
        "typebox recursion",
        {
            "$id": "Node",
            "type": "object",
            "properties": {"nodes": {"type": "array", "items": {"$ref": "Node"}}},
            "required": ["nodes"],
        },
        [{"nodes": [{"nodes": []}]}],
        [{"nodes": [1]}],
    ),
    Shape("openapi nullable", {"type": "string", "nullable": True}, ["a", None], [1], [], {"type": ["string", "null"]}),
    Shape(
        "openapi nullable enum",
        {"type": "string", "enum": ["a"], "nullable": True},
        ["a", None],
        ["b"],
        [],
        {"enum": ["a", None]},
    ),
    Shape(
        "openapi int64",
        {"type": "integer", "format": "int64", "minimum": 0, "exclusiveMinimum": True},
        [1],
        [0],
        [],
        {"type": "integer", "exclusiveMinimum": 0},
    ),
    Shape("openapi int32", {"type": "integer", "format": "int32"}, [2**31 - 1], [2**31]),
    Shape(
        "openapi double",
        {"type": "number", "format": "double", "maximum": 5, "exclusiveMaximum": False},
        [5],
        [6],
        [],
        {"type": "number", "maximum": 5},
    ),
    Shape("openapi password", {"type": "string", "format": "password", "writeOnly": True, "example": "x"}, ["x"], [1]),
    Shape("openapi byte", {"type": "string", "format": "byte"}, ["YQ=="], ["!"]),
    Shape(
        "openapi discriminator",
        {
            "oneOf": [{"$ref": "#/components/schemas/A"}, {"$ref": "#/components/schemas/B"}],
            "discriminator": {"propertyName": "kind", "mapping": {"A": "#/components/schemas/A"}},
            "components": {"schemas": _defs("A", "B")},
        },
        [{"kind": "A", "n": 1}],
        [{"kind": "C", "n": 1}],
    ),
    Shape(
        "openapi inheritance",
        {
            "oneOf": [{"$ref": "#/definitions/Cat"}, {"$ref": "#/definitions/Dog"}],
            "definitions": {
                "Pet": {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
                "Cat": {"allOf": [{"$ref": "#/definitions/Pet"}, {"properties": {"type": {"enum": ["cat"]}}}]},
                "Dog": {"allOf": [{"$ref": "#/definitions/Pet"}, {"properties": {"type": {"enum": ["dog"]}}}]},
            },
        },
        [{"type": "cat"}],
        [{"type": "cow"}],
    ),
    Shape(
        "quicktype",
        {
            "$schema": _D7.replace("07", "06"),
            "$ref": "#/definitions/Welcome",
            "definitions": {
                "Welcome": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "id": {"type": "string", "format": "integer"},
                        "url": {"type": "string", "format": "uri", "qt-uri-protocols": ["https"]},
                    },
                    "required": ["id"],
                    "title": "Welcome",
                }
            },
        },
        [{"id": "1"}],
        [{}],
        ["/definitions/Welcome/properties/id/format"],
    ),
    Shape(
        "draft 4",
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 0,
            "exclusiveMinimum": True,
            "maximum": 1,
            "exclusiveMaximum": True,
        },
        [0.5],
        [0, 1],
    ),
    Shape(
        "draft 7 tuple",
        {"$schema": _D7, "type": "array", "items": [{"type": "null"}], "additionalItems": False},
        [[None], []],
        [[1]],
    ),
    Shape(
        "if and then",
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
        },
        [{}],
        [{"a": 1}],
        ["/if"],
    ),
    Shape(
        "dependent",
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "dependentRequired": {"a": ["b"]},
        },
        [{"a": None, "b": None}],
        [{"a": 1}],
        ["/dependentRequired"],
    ),
    Shape(
        "contains",
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}},
        [[1]],
        [["a"]],
        ["/contains"],
    ),
    Shape("not an empty text", {"type": "string", "not": {"const": ""}}, ["a"], [""]),
    Shape("not a pattern", {"type": "string", "not": {"pattern": "^_"}}, ["a_"], ["_a"]),
    Shape(
        "not required",
        {"type": "object", "properties": {"a": {"type": "null"}}, "not": {"required": ["b"]}},
        [{"a": None}],
        [{"b": 1}],
    ),
    Shape("not a bound", {"type": "integer", "not": {"multipleOf": 2}}, [3], ["a"], ["/not"]),
    Shape(
        "at most one property",
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "maxProperties": 1,
        },
        [{"a": None}],
        [{"a": None, "b": None}],
    ),
]


def shapes() -> Iterator[Shape]:
    """All of them."""
    for kind, valid, invalid, relaxed in _PYDANTIC:
        yield Shape(f"pydantic {kind}"[:60], TypeAdapter(kind).json_schema(), valid, invalid, relaxed)
    for kind, valid, invalid, relaxed in _MSGSPEC:
        yield Shape(f"msgspec {kind}"[:60], msgspec.json.schema(kind), valid, invalid, relaxed)
    yield from _BY_HAND
