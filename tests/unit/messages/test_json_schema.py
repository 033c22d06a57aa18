"""Which JSON schemas are taken: what a grammar of them may cost, and what people ask for."""

import json
import time
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from messages import codec, limits
from messages.errors import InvalidMessage
from messages.jobs import MIB, PrefillJob, Sampling, user_prompt
from messages.strict_schema import check_schema


def chain(length: int, **fields: Any) -> dict[str, Any]:
    """Each part an array of the next, by reference."""
    parts = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(length)}
    return {"$defs": parts | {f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"} | fields


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


BOMBS: dict[str, dict[str, Any]] = {
    # The issue's: 16 GB in an engine that writes out what repeats.
    "minItems": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000_000},
    "maxItems": {"type": "array", "maxItems": limits.MAX_ITEMS + 1},
    "a count that is no whole number": {"type": "array", "maxItems": 1e300},
    "many arrays": {"properties": {str(at): {"type": "array", "maxItems": limits.MAX_ITEMS} for at in range(6)}},
    "minLength": {"type": "string", "minLength": limits.MAX_LENGTHS + 1},
    "minProperties": {"type": "object", "minProperties": 10**9},
    # LLGuidance 1.9.1 recurses into references on the native stack: 1,600 of these ended its process.
    "references": chain(1600),
    "references in place": {"$defs": {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(5000)}, **text("a")}
    | {"$ref": "#/$defs/d0"},
    "depth": nested(limits.MAX_SCHEMA_DEPTH + 1),
    "values": {"enum": [0] * (limits.MAX_SCHEMA_VALUES + 1)},
    "a long pattern": text("a" * (limits.MAX_PATTERN_BYTES + 1)),
    "repetitions": text("^a{1000000}$"),
    "repetitions of repetitions": text("^((a{100}){100}){100}$"),
    "repetitions in a property's name": {"type": "object", "patternProperties": {"^(a{1000}){1000}$": {}}},
    "repetitions between values": {"type": "object", "x-guidance": {"item_separator": "(,{1000}){1000}"}},
    # Minutes, while it looks whether any text matches them all.
    "patterns at once": {"allOf": [text(f"(a|b)*a(a|b){{{at}}}c") for at in range(30)]},
    "patterns at once, by reference": {
        "$defs": {f"p{at}": text(f"(a|b)*a{{{at}}}") | {"$ref": f"#/$defs/p{at + 1}"} for at in range(30)}
        | {"p30": text("a")},
        "$ref": "#/$defs/p0",
    },
    "multipleOf": {"type": "integer", "multipleOf": 99_999_989},
    "multipleOf with many decimals": {"type": "number", "multipleOf": 0.123456789},
    "two of multipleOf": {"type": "integer", "multipleOf": 997, "allOf": [{"multipleOf": 991}]},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_would_cost_too_much_is_no_job(name: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidMessage, match="json_schema"):
        Sampling(8, json_schema=json.dumps(BOMBS[name]))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", BOMBS)
def test_no_worker_reads_a_job_with_such_a_schema(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as unchecked:
        unchecked.setattr("messages.jobs.check_schema", lambda _text: None)
        sampling = Sampling(8, json_schema=json.dumps(BOMBS[name]))
        body = codec.encode(PrefillJob("job", "batch", "item", "model", user_prompt("", "go"), sampling))
    with pytest.raises(InvalidMessage, match="json_schema"):
        codec.decode(body, PrefillJob)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: Annotated[str, Field(max_length=200)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{1,2}\d{2,5}(-\d{4})?$")]


class Node(BaseModel):
    """Refers to itself, as trees do."""

    kind: Literal["leaf", "branch"]
    children: "Annotated[list[Node], Field(max_length=1000)]" = []
    address: Address | None = None
    colour: Colour = Colour.RED
    price: Annotated[float, Field(ge=0, multiple_of=0.01)] = 0
    notes: Annotated[str, Field(min_length=1, max_length=100_000)] = "none"


def large_model(fields: int) -> dict[str, Any]:
    """As pydantic writes a model of many fields, each of one of many models."""
    parts = {f"Part{at}": Node.model_json_schema()["$defs"]["Address"] | {"title": f"Part{at}"} for at in range(150)}
    properties = {f"field_{at}": {"$ref": f"#/$defs/Part{at % 150}"} for at in range(fields)}
    return {"$defs": parts, "type": "object", "properties": properties, "required": [*properties]}


@pytest.mark.parametrize(
    "schema",
    [
        Node.model_json_schema(),
        large_model(1500),
        {"enum": [f"{at:05}" for at in range(20_000)]},
        {"type": "array", "minItems": 10_000, "items": {"type": "integer"}},
        {"$defs": {"a/b~c": {"type": "integer"}}, "$ref": "#/$defs/a~1b~0c"},
        {"prefixItems": [{"type": "integer"}], "items": {"$ref": "#/prefixItems/0"}},
        {"$id": "https://example.org/grade", "$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"properties": {str(at): text(f"^{at}$") for at in range(50)}},
        {"allOf": [text("^a"), {"minLength": 3}]},
        {"type": "object", "properties": {"minItems": {"type": "integer"}, "pattern": {"type": "string"}}},
        chain(200),
    ],
)
def test_a_schema_that_people_use_is_taken(schema: dict[str, Any]) -> None:
    assert Sampling(8, json_schema=json.dumps(schema)).json_schema


def test_a_schema_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json.dumps(large_model(1000))
    Sampling(8, json_schema=schema)
    monkeypatch.setattr("messages.strict_schema._SchemaCost", None)
    Sampling(9, json_schema=schema)


def test_a_schema_is_measured_sooner_than_anybody_notices() -> None:
    branches = [{"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{at}"}}} for at in range(50)]
    schema = json.dumps({"$defs": {f"d{at}": {"anyOf": branches} for at in range(50)}, "$ref": "#/$defs/d0"})
    assert len(schema) < MIB
    start = time.process_time()
    check_schema(schema)
    assert time.process_time() - start < 2
