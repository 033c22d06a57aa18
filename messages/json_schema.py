"""What a JSON schema would cost whoever makes a grammar of it, told from its text."""

from __future__ import annotations

import json
import re
from collections import Counter
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from messages import limits
from messages.errors import InvalidMessage

_ITEMS = ("minItems", "maxItems")
_COUNTS = ("minLength", "maxLength", "minProperties", "maxProperties", "minContains", "maxContains")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")  # what one value has to keep besides
# LLGuidance reads the last three, in `x-guidance`, as patterns too.
_PATTERNS = ("pattern", "whitespace_pattern", "item_separator", "key_separator")
_BASES = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")  # what a $ref could mean besides a path from the root
_CHECKED = frozenset((*_ITEMS, *_COUNTS, *_IN_PLACE, *_PATTERNS, *_BASES, "patternProperties", "multipleOf"))
_KEPT = frozenset((*_IN_PLACE, *_PATTERNS, "multipleOf"))
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*),?(\d*)\}|.", re.DOTALL)
_BUDGETS = {
    "items": (limits.MAX_ALL_ITEMS, "items in all of its arrays together"),
    "steps": (limits.MAX_PATTERN_STEPS, "steps in its patterns, their repetitions written out"),
    "levels": (limits.MAX_REFERENCE_LEVELS, "levels in what it refers to"),
}


@lru_cache(64)
def check_schema(text: str) -> None:
    """Raises InvalidMessage unless it is a JSON object from which a grammar can be made at a bounded cost."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"json_schema is not JSON: {error}") from None
    _require(isinstance(schema, dict), "must be a JSON object")
    try:
        _SchemaCost(schema).check()
    except RecursionError:
        raise InvalidMessage("json_schema refers from part to part too many times") from None


class _SchemaCost:
    """Adds up what the parts of a schema cost. Raises InvalidMessage as soon as it is too much."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._values = 0
        self._spent: Counter[str] = Counter()
        self._targets: list[Any] = []  # all that it refers to
        self._kept_there: dict[str, tuple[int, int]] = {}

    def check(self) -> None:
        """The whole schema, and once more each part that it refers to."""
        self._measure(self._root, 0)
        for target in self._targets:  # which grows meanwhile
            self._spend("levels", self._measure(target, 0))

    def _measure(self, node: Any, depth: int) -> int:
        """How many levels it nests."""
        if isinstance(node, dict):
            if not _CHECKED.isdisjoint(node):
                self._check_object(node, depth)
            node = [*node.values()]
        if not isinstance(node, list):
            return 0
        self._values += len(node)
        _require(depth < limits.MAX_SCHEMA_DEPTH, f"nests more than {limits.MAX_SCHEMA_DEPTH} levels deep")
        _require(self._values <= limits.MAX_SCHEMA_VALUES, f"has more than {limits.MAX_SCHEMA_VALUES:,} values")
        return 1 + max((self._measure(element, depth + 1) for element in node), default=0)

    def _check_object(self, node: dict[str, Any], depth: int) -> None:
        _require(not (depth and any(isinstance(node.get(name), str) for name in _BASES)), "has names within it ($id)")
        for names, most in ((_ITEMS, limits.MAX_ITEMS), (_COUNTS, limits.MAX_COUNT)):
            for name in names:
                count = node.get(name)
                if isinstance(count, int | float):
                    _require(count <= most, f"has a {name} of {count:,}; at most {most:,} are allowed")
                    self._spend("items", max(0, int(count)) if names == _ITEMS else 0)
        keyed = node.get("patternProperties")
        for pattern in (*_patterns(node), *(keyed if isinstance(keyed, dict) else ())):
            self._spend("steps", _steps(pattern))
        _check_divisor(node.get("multipleOf"))
        (patterns, divisors), most = self._kept(node), limits.MAX_PATTERNS_AT_ONCE
        _require(patterns <= most, f"wants a text to match more than {most} patterns at once")
        _require(divisors <= 1, "wants a number to be a multiple of several at once")

    def _kept(self, node: Any) -> tuple[int, int]:
        """How many patterns and divisors one value has to keep at once."""
        if not isinstance(node, dict) or _KEPT.isdisjoint(node):
            return 0, 0
        kept = [(len(_patterns(node)), int("multipleOf" in node)), *self._kept_by_each(node.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            if options := self._kept_by_each(node.get(name)):
                kept.append((max(patterns for patterns, _ in options), max(divisors for _, divisors in options)))
        if isinstance(reference := node.get("$ref"), str):
            kept.append(self._kept_by_target(reference))
        return sum(patterns for patterns, _ in kept), sum(divisors for _, divisors in kept)

    def _kept_by_each(self, schemas: Any) -> list[tuple[int, int]]:
        return [self._kept(schema) for schema in schemas] if isinstance(schemas, list) else []

    def _kept_by_target(self, reference: str) -> tuple[int, int]:
        if reference not in self._kept_there:
            target = self._find(reference)
            self._targets.append(target)
            self._kept_there[reference] = 0, 0  # one within itself adds nothing to itself
            self._kept_there[reference] = self._kept(target)
        return self._kept_there[reference]

    def _find(self, reference: str) -> Any:
        target: Any = self._root
        head, *steps = unquote(reference).split("/")
        try:
            for step in steps if steps != [""] else ():
                name = step.replace("~1", "/").replace("~0", "~")
                target = target[int(name) if isinstance(target, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            head = ""
        _require(head == "#", f"refers to {reference!r:.60}, which is not in it")
        return target

    def _spend(self, budget: str, amount: int) -> None:
        self._spent[budget] += amount
        most, words = _BUDGETS[budget]
        _require(self._spent[budget] <= most, f"has more than {most:,} {words}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise InvalidMessage(f"json_schema {problem}")


def _patterns(node: dict[str, Any]) -> list[str]:
    return [pattern for name in _PATTERNS if isinstance(pattern := node.get(name), str)]


def _check_divisor(divisor: Any) -> None:
    if not isinstance(divisor, int | float):
        return
    exact = Decimal(str(divisor)).normalize()
    shift = -int(exact.as_tuple().exponent) if exact.is_finite() else limits.MAX_REMAINDERS
    is_small = shift <= 9 and abs(exact).scaleb(max(0, shift)) <= limits.MAX_REMAINDERS
    _require(is_small, f"has a multipleOf of {divisor!r:.40}; at most {limits.MAX_REMAINDERS:,} are allowed")


def _steps(pattern: str) -> int:
    """How long a pattern is, its repetitions written out."""
    most = limits.MAX_PATTERN_BYTES
    _require(len(pattern) <= most, f"has a pattern of {len(pattern):,} characters; at most {most:,} are allowed")
    sizes, last = [0], 0  # of the groups that are open, and of what was read last
    for atom in _ATOM.finditer(pattern):
        if atom[0] == "(":
            sizes.append(0)
            continue
        if atom[0] == ")":
            last = sizes.pop() if len(sizes) > 1 else 0
        elif atom[1] or atom[2]:
            repeats = max(1, int(atom[2] or atom[1]))
            sizes[-1] += last * (repeats - 1)
            last *= repeats
            continue
        else:
            last = 1
        sizes[-1] += last
        if sizes[-1] > limits.MAX_PATTERN_STEPS:
            break
    return sum(sizes)
