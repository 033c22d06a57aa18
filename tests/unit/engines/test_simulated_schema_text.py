"""Text drawn from a JSON schema fits it; a schema that can't be kept is refused."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated.schema_text import json_text
from messages.errors import InvalidSchema


def _between(kind: str, low: str, high: str, start: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda first, more: {"type": kind, low: first, high: first + more}, start, st.integers(1, 9))


_leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": ["string", "null"]}),
    _between("integer", "minimum", "maximum", st.integers()),
    _between("integer", "exclusiveMinimum", "maximum", st.integers()),
    _between("number", "minimum", "exclusiveMaximum", st.integers(-99, 99)),
    _between("string", "minLength", "maxLength", st.integers(0, 9)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text() | st.integers(), min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, st.text()),
)


def _larger(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            parts,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(parts, min_size=1, max_size=3)),
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)[:2]},
            st.dictionaries(st.text(max_size=5), parts, max_size=4),
        ),
    )


@settings(deadline=None)
@given(schema=st.recursive(_leaves, _larger, max_leaves=8), seed=st.integers(0, 1 << 32))
def test_the_text_is_json_that_fits_its_schema(schema: dict[str, Any], seed: int) -> None:
    jsonschema.validate(json.loads(json_text(schema, random.Random(seed))), schema)


def test_a_reference_into_the_schema_is_followed_and_a_tree_comes_to_an_end() -> None:
    node = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["name", "children"],
    }
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    for seed in range(20):
        jsonschema.validate(json.loads(json_text(schema, random.Random(seed))), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^a+$"},
        {"not": {"type": "string"}},
        {"type": "colour"},
        {"enum": []},
        {"anyOf": {}},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "array", "minItems": "2"},
        {"type": "object", "properties": []},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_can_not_be_kept_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchema):
        json_text(schema, random.Random(0))
