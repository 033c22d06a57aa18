"""What is enforced of a schema that somebody sends, as LLGuidance enforces it."""

import json
from typing import Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from engines.guidance import guidance_schema
from messages.errors import InvalidMessage, InvalidSchema
from messages.strict_schema import Objects, strict_schema

TEXT = {"type": "string"}


def strict(schema: dict[str, Any], objects: Objects = "closed") -> dict[str, Any]:
    read: dict[str, Any] = json.loads(strict_schema(json.dumps(schema), objects))
    return read


def accepts(schema: dict[str, Any], answer: Any) -> bool:
    """Whether the grammar of LLGuidance, as engines make it, lets a model answer this."""
    grammar = LLMatcher.grammar_from_json_schema(guidance_schema(json.dumps(schema)))
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(json.dumps(answer))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


class Step(BaseModel):
    """One of several."""

    text: str


class Plan(BaseModel):
    """With what pydantic makes of nested, optional and free fields."""

    title: Literal["a", "b"]
    first: Step = Field(description="How it begins")
    steps: list[Step] = []
    last: Step | None = None
    notes: dict[str, int] = {}


def test_an_object_has_the_keys_that_its_schema_names() -> None:
    closed, opened = (strict(Plan.model_json_schema(), objects) for objects in ("closed", "open"))
    plan = {"title": "a", "first": {"text": "x"}, "steps": [{"text": "y"}], "last": {"text": "z"}, "notes": {"k": 1}}
    assert accepts(closed, plan)
    for more in ({"more": 1}, {"last": {"text": "z", "more": 1}}):
        assert not accepts(closed, plan | more)
        assert accepts(opened, plan | more)


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"type": "object"}, {"any": 1}),
        ({"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}, {"a": "x", "any": 1}),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["b"]}, {"a": "x", "b": 1}),
        (
            {"allOf": [{"type": "object", "properties": {"a": TEXT}}, {"type": "object", "properties": {"b": TEXT}}]},
            {"a": "x", "b": "y"},
        ),
        (
            {
                "$ref": "#/$defs/base",
                "properties": {"b": TEXT},
                "$defs": {"base": {"type": "object", "properties": {"a": TEXT}}},
            },
            {"a": "x", "b": "y"},
        ),
    ],
)
def test_what_says_so_or_joins_conditions_stays_open(schema: dict[str, Any], answer: Any) -> None:
    assert accepts(strict(schema), answer)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {"type": "object", "properties": {"when": {"type": "array", "uniqueItems": True}}},
            "$.properties.when: uniqueItems",
        ),
        ({"anyOf": [TEXT, {"not": TEXT}]}, "$.anyOf[1]: not"),
        ({"$defs": {"a": {"if": TEXT}}}, "$.$defs.a: if"),
        ({"items": {"type": "string", "pattern": "^(?!a)"}}, "$.items: pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "$: pattern"),
        ({"$ref": "https://example.com/schema"}, "$: $ref"),
        *(({name: {"a": ["b"]}}, f"$: {name}") for name in ("dependentRequired", "contains", "unevaluatedProperties")),
    ],
)
def test_what_can_not_be_enforced_is_refused_with_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidSchema) as refused:
        strict(schema)
    assert str(refused.value).endswith(place)


def test_what_is_refused_here_llguidance_refuses() -> None:
    for keyword in ("uniqueItems", "propertyNames", "not", "if", "contains", "dependentRequired", "dependencies"):
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema({keyword: TEXT}), log_level=0)
        assert keyword in matcher.get_error()


@pytest.mark.parametrize(
    "annotated",
    [
        {"format": "password"}, {"format": "uri-reference"}, {"title": "t", "examples": ["a"]}, {"x-order": 1},
        {"nullable": True}, {"uniqueItems": False}, {"contentEncoding": "base64", "$anchor": "a"},
        {"propertyNames": {"type": "string"}}, {"deprecated": True, "readOnly": True, "$comment": "c"},
    ],
)  # fmt: skip
def test_annotations_are_ignored(annotated: dict[str, Any]) -> None:
    assert accepts(strict({"type": "object", "properties": {"a": TEXT | annotated}}), {"a": "any text at all"})


def test_properties_that_are_called_like_keywords_are_properties() -> None:
    names = ("not", "title", "format", "$ref", "items", "uniqueItems")
    schema = strict({"type": "object", "properties": dict.fromkeys(names, TEXT)})
    assert set(schema["properties"]) == set(names)
    assert accepts(schema, dict.fromkeys(names, "x"))


def test_references_lead_where_they_led() -> None:
    schema = {"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {"type": "integer"}}}}
    assert accepts(strict(schema), 5)
    assert not accepts(strict(schema), "5")


def test_a_verbatim_schema_is_the_text_that_came() -> None:
    text = '{ "type":"object","uniqueItems":true,"properties" : {}}'
    assert strict_schema(text, "verbatim") == text


@pytest.mark.parametrize("text", ['{"a":' * 70 + "1" + "}" * 70, '{"enum":["' + "x" * (257 << 10) + '"]}', "[]"])
def test_what_costs_too_much_is_refused_first(text: str) -> None:
    with pytest.raises(InvalidMessage):
        strict_schema(text, "closed")


@pytest.mark.parametrize("schema", [{"required": 5, "properties": {}}, {"format": {}}, {"properties": 5}, {"allOf": 5}])
def test_malformed_schemas_are_left_to_the_engine(schema: dict[str, Any]) -> None:
    assert set(strict(schema)) <= set(schema)
