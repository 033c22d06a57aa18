"""What is enforced of a JSON schema that a client sends: the keywords of grammars, in objects that are closed.

JSON Schema leaves an object open that doesn't state `additionalProperties`. A grammar that takes it at its word lets a
small model invent keys without an end, and whoever wrote the schema wants those that it names. A schema that joins
conditions for one value keeps its objects as they are: each would forbid what the other asks for.
"""

import json
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any, Literal

from messages import checks
from messages.errors import InvalidSchema
from messages.json_schema import check_schema
from messages.limits import MAX_SCHEMA_BYTES

# How objects without `additionalProperties` are taken. "verbatim" is the form of batches that were planned earlier.
Objects = Literal["closed", "open", "verbatim"]

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties")
# The rest of what LLGuidance enforces (parser/src/json/schema.rs), and what it reads as saying nothing. Any other
# keyword is an annotation by JSON Schema's own rule (core, 6.5), and is left out.
_VALUES = {
    "type", "const", "enum", "$ref", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "pattern", "minItems", "maxItems", "minProperties", "maxProperties",
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "x-guidance",
}  # fmt: skip
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# What no engine can enforce, and the values with which it asks for nothing.
_NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
    **dict.fromkeys(("not", "if", "contains", "$dynamicRef", "$recursiveRef"), ()),
}
_JOINING = ("$ref", "allOf", "anyOf", "oneOf", "properties")
# Look-around and back references: the regular expressions of LLGuidance's are those of Rust's `regex`.
_NOT_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!]|<[=!])|\\[1-9])")
_REFERRED_TO = re.compile(r'"\$ref":\s*"#/([^/"]+)')  # the keyword, or another place, that a reference leads to


@lru_cache(64)
def strict_schema(text: str, objects: Objects) -> str:
    """The schema as engines get it, as JSON text.

    Raises InvalidSchema, with place and keyword, for what none can enforce; InvalidMessage for what costs too much.
    """
    checks.text("json_schema", text, MAX_SCHEMA_BYTES)
    check_schema(text)
    if objects == "verbatim":
        return text
    schema = json.loads(text)
    kept_names = _VALUES.union(_REFERRED_TO.findall(text))
    strict = _strict(schema, "$", kept_names, closes=objects == "closed" and not _joins(schema))
    return json.dumps(strict, separators=(",", ":"), ensure_ascii=False)


def _strict(node: Any, path: str, kept_names: Collection[str], closes: bool) -> Any:
    """One schema; `path` as JSONPath has it."""
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
            raise InvalidSchema(f"the JSON schema asks for what can't be enforced, at {path}: {name}")
    if _NOT_REGULAR.search(str(node.get("pattern", ""))):
        raise InvalidSchema(f"the JSON schema has look-around or a back reference, at {path}: pattern")
    if not str(node.get("$ref", "#")).startswith("#"):
        raise InvalidSchema(f"the JSON schema refers to something outside it, at {path}: $ref")
    return {**strict, "additionalProperties": False} if closes and _names_its_keys(node) else strict


def _names_its_keys(node: dict[str, Any]) -> bool:
    """Whether a schema names the keys of an object, and doesn't say what others may be."""
    properties, required_names = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or node.keys() & {"additionalProperties", "patternProperties"}:
        return False
    return isinstance(required_names, list) and all(str(name) in properties for name in required_names)


def _joins(node: Any) -> bool:
    """Whether several conditions hold for one value, in any part of a schema: a closed one would forbid the others'."""
    if not isinstance(node, dict):
        return isinstance(node, list) and any(map(_joins, node))
    all_of = node.get("allOf")
    if sum(name in node for name in _JOINING) > 1 or (isinstance(all_of, list) and len(all_of) > 1):
        return True
    return any(map(_joins, node.values()))
