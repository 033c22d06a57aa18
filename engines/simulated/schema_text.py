"""Generates a random JSON text that fits a JSON schema. The simulated engine uses it to answer under a constraint.

It knows the keywords that grading schemas use. An unknown keyword that would restrict the answer raises InvalidSchema,
so that a simulated run never claims to have kept a constraint that it ignored.
"""

import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from messages.errors import InvalidSchema

_ANNOTATIONS = {
    "$schema", "$id", "$defs", "$comment", "definitions", "title", "description", "default", "examples", "format",
    "additionalProperties", "readOnly", "writeOnly", "deprecated", "x-guidance",
}  # fmt: skip
_SUPPORTED_KEYWORDS = {
    "$ref", "anyOf", "oneOf", "const", "enum", "type", "properties", "required", "items", "minItems", "maxItems",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
}  # fmt: skip
_MAX_VALUES = 20_000  # in one answer
_MAX_DEPTH = 24
_WORDS = (
    "clear",
    "code",
    "tests",
    "loop",
    "edge",
    "case",
    "input",
    "checks",
    "reads",
    "well",
    "short",
    "helper",
    "early",
)


def json_text(schema: Mapping[str, Any], source: random.Random) -> str:
    """A JSON text valid under `schema`, the same for the same state of `source`. Raises InvalidSchema."""
    return json.dumps(_Generator(schema, source).value(schema, 0), ensure_ascii=False)


class _Generator:
    def __init__(self, root: Mapping[str, Any], source: random.Random) -> None:
        self._root = root
        self._source = source
        self._values = 0

    def value(self, schema: Any, depth: int) -> Any:
        if schema is True:
            return None
        if not isinstance(schema, Mapping):
            raise InvalidSchema(f"a JSON schema must be an object, not {schema!r:.60}")
        if depth > _MAX_DEPTH:
            raise InvalidSchema(f"the JSON schema nests, or refers to itself, more than {_MAX_DEPTH} levels deep")
        self._values += 1
        if self._values > _MAX_VALUES:
            raise InvalidSchema(f"the JSON schema requires more than {_MAX_VALUES:,} values")
        _check_keywords(schema)
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        for choice in ("enum", "anyOf", "oneOf"):
            if choice in schema:
                return self._one_of(choice, schema[choice], depth)
        return self._value_of_type(schema, depth)

    def _one_of(self, keyword: str, options: Any, depth: int) -> Any:
        if not isinstance(options, list) or not options:
            raise InvalidSchema(f"{keyword} must be a list with at least one entry")
        option = self._source.choice(options)
        return option if keyword == "enum" else self.value(option, depth + 1)

    def _value_of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type", _implied_type(schema))
        if isinstance(kind, list) and kind:
            kind = self._source.choice(kind)
        makers: dict[str, Callable[[Mapping[str, Any], int], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda *_: self._source.random() < 0.5,
            "null": lambda *_: None,
        }
        if not isinstance(kind, str) or kind not in makers:
            raise InvalidSchema(f"the JSON schema names the type {kind!r:.40}, which JSON doesn't have")
        return makers[kind](schema, depth)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required_names = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required_names, list):
            raise InvalidSchema("properties must be an object, and required must be a list")
        # At deep levels optional properties are left out, so that the text ends even if the schema refers to itself.
        names = [name for name in properties if name in required_names or (depth < 4 and self._source.random() < 0.8)]
        names += [name for name in required_names if name not in properties]
        return {name: self.value(properties.get(name, True), depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        length = self._length(schema, "Items", 3 if depth < 4 else 0, 8)
        return [self.value(schema.get("items", True), depth + 1) for _ in range(length)]

    def _string(self, schema: Mapping[str, Any], depth: int) -> str:
        return prose(self._source, self._length(schema, "Length", 60, 120))

    def _length(self, schema: Mapping[str, Any], what: str, usual_most: int, most: int) -> int:
        """A length between the schema's minimum and maximum. Without a maximum it is at most `usual_most`, and never
        more than `most`."""
        low = _bound(schema, f"min{what}", 0)
        high = _bound(schema, f"max{what}", max(low, usual_most))
        if low > high:
            raise InvalidSchema(f"min{what} ({low}) is greater than max{what} ({high})")
        return self._source.randint(low, min(high, max(low, most)))

    def _integer(self, schema: Mapping[str, Any], depth: int) -> int:
        low, high = _limits(schema)
        first, last = math.ceil(low), math.floor(high)
        first += first == low and "exclusiveMinimum" in schema and first <= schema["exclusiveMinimum"]
        last -= last == high and "exclusiveMaximum" in schema and last >= schema["exclusiveMaximum"]
        if first > last:
            raise InvalidSchema(f"no whole number fits between {low} and {high}")
        return self._source.randint(first, last)

    def _number(self, schema: Mapping[str, Any], depth: int) -> float:
        low, high = _limits(schema)
        open_ended = "exclusiveMinimum" in schema or "exclusiveMaximum" in schema
        if low > high or (open_ended and low == high):
            raise InvalidSchema(f"no number fits between {low} and {high}")
        # The value is inside the range and not at its ends, so that exclusive limits are kept too.
        return float(low + (high - low) * self._source.randint(1, 15) / 16)

    def _resolve(self, reference: Any) -> Any:
        target: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise InvalidSchema(f"$ref {reference!r:.60} must point to a place in the same schema")
        for step in reference[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or step not in target:
                raise InvalidSchema(f"$ref {reference!r:.60} points to nothing")
            target = target[step]
        return target


def prose(source: random.Random, length: int) -> str:
    """Exactly `length` characters of words. All words are used once before any repeats, so that the text doesn't look
    like a loop."""
    text = ""
    while len(text) < length:
        text += " ".join(source.sample(_WORDS, len(_WORDS))) + " "
    return text[:length]


def _check_keywords(schema: Mapping[str, Any]) -> None:
    unsupported_keywords = sorted(set(schema) - _SUPPORTED_KEYWORDS - _ANNOTATIONS)
    if unsupported_keywords:
        raise InvalidSchema(
            f"the simulated engine can't enforce the JSON schema keyword {unsupported_keywords[0]!r:.60}"
        )


def _implied_type(schema: Mapping[str, Any]) -> str:
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema:
        return "array"
    return "integer" if any(key.endswith("imum") for key in schema) else "string"


def _bound(schema: Mapping[str, Any], keyword: str, default: int) -> int:
    value = schema.get(keyword, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidSchema(f"{keyword} must be a whole number of at least 0, not {value!r:.40}")
    return value


def _limits(schema: Mapping[str, Any]) -> tuple[float, float]:
    """The smallest and largest number; exclusive limits are treated as inclusive ones."""
    limits = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = schema.get(keyword)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise InvalidSchema(f"{keyword} must be a number, not {value!r:.40}")
        limits[keyword] = value
    lows = [limits[key] for key in ("minimum", "exclusiveMinimum") if key in limits]
    highs = [limits[key] for key in ("maximum", "exclusiveMaximum") if key in limits]
    low = max(lows) if lows else min(0, *highs) if highs else 0
    return low, (min(highs) if highs else low + 100)
