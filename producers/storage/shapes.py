"""Checks data from a batch's folder before it is used: it may be damaged, or come from anywhere.

Unknown fields are ignored, so a later version may add some. A later version that changes the meaning of fields writes
"v": 2 into the object, which older readers refuse.
"""

import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar

from infra.config.next_command import UPGRADE_COMMAND
from messages.errors import BatchError, KvasirError

T = TypeVar("T")
_LARGEST = 1e15  # the largest number that is accepted; larger numbers, infinity and NaN would break sums
_KINDS = {str: "text", bool: "true or false", types.NoneType: "null", list: "a list", dict: "an object"}
_WORDS: dict[Any, str] = {**_KINDS, tuple: "a list", int: "a whole number", float: "a number", typing.Literal: "known"}


class NewerForm(ValueError):
    """A later version wrote it, in a form that this one doesn't know."""


def from_json(data: str | bytes, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the JSON value in a text. Raises ValueError for any other text."""
    try:
        return json.loads(data, object_hook=hook)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def parse_as(hint: Any, value: Any, place: str) -> Any:
    """Read a JSON value as a type: objects as dataclasses, lists as tuples. Unknown fields are ignored.

    A dict of types stands for an object whose fields have these types if they are present. Raises NewerForm, and
    ValueError that names the place within the value.
    """
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return parse_as(type(value) if type(value) in inner else inner[0], value, place)
    if (is_dataclass(hint) or isinstance(hint, dict)) and isinstance(value, dict):
        return _build(hint, value, place)
    if kind in (tuple, list) and isinstance(value, list):
        return kind(parse_as(inner[0], item, f"{place}[{number}]") for number, item in enumerate(value))
    if kind is Mapping and isinstance(value, dict):
        return {key: parse_as(inner[1], item, f"{place}.{key:.60}") for key, item in value.items()}
    if kind is typing.Literal and value in inner:
        return value
    classes = (int, float) if hint is float else (hint,)
    if value.__class__ not in classes or (hint in (int, float) and not abs(value) < _LARGEST):
        words = "an object" if isinstance(hint, dict) else _WORDS.get(hint) or _WORDS.get(kind, "an object")
        raise ValueError(f"{place} must be {words}, not {_KINDS.get(type(value), 'another number')}")
    if hint is str:
        value.encode()  # fails for half a character (a lone surrogate), which can't be shown or sent
    return value


def _build(hint: Any, fields: Mapping[str, Any], place: str) -> Any:
    hints = hint if isinstance(hint, dict) else _hints(hint)
    if fields.get("v", 1) != 1:
        raise NewerForm(f"{place} was written by a newer kvasir; to upgrade, run: {UPGRADE_COMMAND}")
    parsed_fields = {
        name: parse_as(hint, fields[name], f"{place}.{name}") for name, hint in hints.items() if name in fields
    }
    try:
        return parsed_fields if isinstance(hint, dict) else hint(**parsed_fields)
    except TypeError as error:
        raise ValueError(f"{place} lacks {str(error).rpartition(': ')[2]}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def row_of(line: bytes, place: str, make: Callable[[dict[str, Any]], T], kind: str = "line") -> T:
    """Return a line of JSON as `make` reads it. Raises a BatchError that begins with `place`."""
    try:
        row = from_json(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        return make(row)
    except NewerForm as error:
        raise BatchError(f"{place}: {error}") from None
    except (KvasirError, ValueError) as error:
        raise BatchError(f"{place} is not a valid {kind}: {error}; remove the line to go on") from None
