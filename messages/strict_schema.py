"""The part of a client's JSON schema that Kvasir enforces: the keywords that grammars support, in closed objects.

In JSON Schema an object is open unless it states `additionalProperties`. A grammar that follows this lets a small model
invent keys endlessly, while the schema's author wants only the keys it names. So objects are closed, except in a schema
that joins conditions for one value: there each closed object would forbid what the other one requires.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection
from functools import lru_cache
from typing import Any, Literal

from messages import checks, limits
from messages.errors import InvalidMessage, InvalidSchema

# How to treat objects without `additionalProperties`. Batches planned by earlier versions use "verbatim".
Objects = Literal["closed", "open", "verbatim"]

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties")
# The other keywords that LLGuidance either enforces, or accepts and ignores (parser/src/json/schema.rs). Keywords that
# are neither here, nor in the lists above, nor in _NOT_ENFORCED are annotations (JSON Schema core, 6.5), and are
# removed from a schema.
_VALUES = {
    "type", "const", "enum", "$ref", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "pattern", "minItems", "maxItems", "minProperties", "maxProperties",
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "x-guidance",
}  # fmt: skip
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# Keywords that no engine can enforce. Each has a list of values with which it has no effect. With such a value, the
# keyword is allowed.
_NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("not", "if", "contains", "$dynamicRef", "$recursiveRef"), ()),
}
_JOINING = ("$ref", "allOf", "anyOf", "oneOf", "properties")
# Look-around and back references. LLGuidance uses the syntax of Rust's `regex`, which has neither.
_NOT_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!]|<[=!])|\\[1-9])")
_REFERRED_TO = re.compile(r'"\$ref":\s*"#/([^/"]+)')  # the first name in the path of a $ref


@lru_cache(64)
def strict_schema(text: str, objects: Objects) -> str:
    """The schema as JSON text, in the form that engines receive.

    Raises InvalidSchema, with place and keyword, for anything that no engine can enforce, and InvalidMessage for a
    schema that costs too much.
    """
    checks.text("json_schema", text, limits.MAX_SCHEMA_BYTES)
    check_schema(text)
    if objects == "verbatim":
        return text
    schema = json.loads(text)
    kept_names = _VALUES.union(_REFERRED_TO.findall(text))
    strict = _strict(schema, "$", kept_names, closes=objects == "closed" and not _joins(schema))
    return json.dumps(strict, separators=(",", ":"), ensure_ascii=False)


def _strict(node: Any, path: str, kept_names: Collection[str], closes: bool) -> Any:
    """One schema made strict; `path` is its place, in JSONPath's notation."""
    if not isinstance(node, dict):
        return node
    strict: dict[str, Any] = {}
    for name, value in node.items():
        place = f"{path}.{name}"
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            strict[name] = {key: _strict(part, f"{place}.{key}", kept_names, closes) for key, part in value.items()}
        elif name in _SCHEMAS and isinstance(value, list):
            strict[name] = [_strict(part, f"{place}[{at}]", kept_names, closes) for at, part in enumerate(value)]
        elif name in _SCHEMAS:
            strict[name] = _strict(value, place, kept_names, closes)
        elif name in kept_names or (name == "format" and str(value) in _FORMATS):
            strict[name] = value
        elif name in _NOT_ENFORCED and value not in _NOT_ENFORCED[name]:
            raise InvalidSchema(f"the JSON schema uses a keyword that Kvasir can't enforce, at {path}: {name}")
    if _NOT_REGULAR.search(str(node.get("pattern", ""))):
        raise InvalidSchema(f"the JSON schema has a pattern with look-around or a back reference, at {path}: pattern")
    if not str(node.get("$ref", "#")).startswith("#"):
        raise InvalidSchema(f"the JSON schema refers to something outside itself, at {path}: $ref")
    return {**strict, "additionalProperties": False} if closes and _names_its_keys(node) else strict


def _names_its_keys(node: dict[str, Any]) -> bool:
    """Whether a schema names an object's keys without stating `additionalProperties`."""
    properties, required_names = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or node.keys() & {"additionalProperties", "patternProperties"}:
        return False
    return isinstance(required_names, list) and all(str(name) in properties for name in required_names)


def _joins(node: Any) -> bool:
    """Whether any part of a schema has several conditions for one value. A closed object in one would forbid the keys
    of the others."""
    if not isinstance(node, dict):
        return isinstance(node, list) and any(map(_joins, node))
    all_of = node.get("allOf")
    if sum(name in node for name in _JOINING) > 1 or (isinstance(all_of, list) and len(all_of) > 1):
        return True
    return any(map(_joins, node.values()))


# The values of these keywords are added up, because they show what the schema's grammar costs. Each keyword is mapped
# to the name of its sum, and to the limit of that sum.
_COUNTS = {
    **dict.fromkeys(("minItems", "maxItems"), ("items in its arrays", limits.MAX_ITEMS)),
    **dict.fromkeys(("minLength", "maxLength"), ("characters in its texts", limits.MAX_LENGTHS)),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), ("entries", limits.MAX_LENGTHS)),
}
# The last three keywords appear in `x-guidance`, and LLGuidance reads them as patterns, too.
_PATTERNS = ("pattern", "whitespace_pattern", "item_separator", "key_separator")
# Several of these keywords can apply to the same value at once.
_CONDITIONS = {"pattern", "multipleOf", "allOf", "anyOf", "oneOf", "$ref"}
_REPETITION = re.compile(r"[{,](\d+)\}")


@lru_cache(64)
def check_schema(text: str) -> None:
    """Raises InvalidMessage unless it is a JSON object from which a grammar can be made at a bounded cost."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"json_schema is not JSON: {error}") from None
    _require(isinstance(schema, dict), "must be a JSON object")
    _SchemaCost().check(schema)


class _SchemaCost:
    """Adds up the cost of a schema's parts. Raises InvalidMessage as soon as it exceeds a limit."""

    def __init__(self) -> None:
        self._total_by_name: dict[str, float] = defaultdict(float)
        self._references: set[str] = set()
        self._joins = False  # whether several conditions apply to one value

    def check(self, schema: dict[str, Any]) -> None:
        """Check the whole schema."""
        levels = self._measure(schema, 0) * len(self._references)
        _require(levels <= limits.MAX_REFERENCE_LEVELS, f"refers to parts that may nest {levels:,} levels deep")
        for name, limit in (("pattern", limits.MAX_JOINED_PATTERNS), ("multipleOf", 1)):
            is_fine = not self._joins or self._total_by_name[name] <= limit
            _require(is_fine, f"has {name} more than {limit} times, beside other conditions for the same value")

    def _measure(self, node: Any, depth: int) -> int:
        """How deep the node nests."""
        if not isinstance(node, dict | list):
            return depth
        self._spend("values", len(node), limits.MAX_SCHEMA_VALUES)
        _require(depth < limits.MAX_SCHEMA_DEPTH, f"nests more than {limits.MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(node, dict):
            self._check_object(node)
        elements = node.values() if isinstance(node, dict) else node
        return max((self._measure(element, depth + 1) for element in elements), default=depth)

    def _check_object(self, node: dict[str, Any]) -> None:
        for name in node.keys() & _COUNTS.keys():
            if isinstance(node[name], int | float):
                counted, limit = _COUNTS[name]
                self._spend(counted, abs(node[name]), limit)
        pattern_properties = node.get("patternProperties")
        for pattern in [node.get(name) for name in _PATTERNS] + [
            *(pattern_properties if isinstance(pattern_properties, dict) else ())
        ]:
            if isinstance(pattern, str):
                self._spend("pattern", 1, limits.MAX_SCHEMA_VALUES)
                repetitions = math.prod(map(int, _REPETITION.findall(pattern[: limits.MAX_PATTERN_BYTES])))
                is_small = len(pattern) <= limits.MAX_PATTERN_BYTES and repetitions <= limits.MAX_REPETITIONS
                _require(is_small, f"has a pattern that is too long, or repeats too much: {pattern:.60}")
        if isinstance(divisor := node.get("multipleOf"), int | float):
            self._spend("multipleOf", 1, limits.MAX_SCHEMA_VALUES)
            is_small = len(str(divisor).lstrip("0.")) <= limits.MAX_DIVISOR_DIGITS
            _require(
                is_small, f"has a multipleOf of {divisor!r:.40}: at most {limits.MAX_DIVISOR_DIGITS} digits are allowed"
            )
        if isinstance(reference := node.get("$ref"), str):
            self._references.add(reference)
        options = node.get("allOf")
        self._joins |= len(node.keys() & _CONDITIONS) > 1 or (isinstance(options, list) and len(options) > 1)

    def _spend(self, counted: str, amount: float, limit: int) -> None:
        self._total_by_name[counted] += amount
        _require(self._total_by_name[counted] <= limit, f"has more than {limit:,} {counted}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidMessage(f"json_schema {problem}")
