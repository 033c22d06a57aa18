"""Estimates from a JSON schema's text what it costs to build a grammar from it."""

import json
import math
import re
from collections import defaultdict
from functools import lru_cache
from typing import Any

from messages import limits
from messages.errors import InvalidMessage

# For each keyword: the name of the sum to which its values are added, and the limit of that sum in a schema.
_COUNTS = {
    **dict.fromkeys(("minItems", "maxItems"), ("items in its arrays", limits.MAX_ITEMS)),
    **dict.fromkeys(("minLength", "maxLength"), ("characters in its texts", limits.MAX_LENGTHS)),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), ("entries", limits.MAX_LENGTHS)),
}
# The last three stand in `x-guidance`. LLGuidance reads them as patterns, too.
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
