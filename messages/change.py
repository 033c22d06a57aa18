"""A dataclass's values, all or those that say something, and `dataclasses.replace` in half its time."""

import dataclasses
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def replace_fields(whole: T, **changes: Any) -> T:
    """The same dataclass with some fields changed; it checks itself. Raises what it raises, TypeError included."""
    kind: Any = type(whole)
    copy: T = kind(**(values_of(whole) | changes))
    return copy


def values_of(whole: Any) -> dict[str, Any]:
    """All fields of a dataclass by name, nested ones as they are."""
    names, values, _ = _fields(whole.__class__)
    return dict(zip(names, values(whole), strict=True))


def non_default_fields(whole: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, by name, nested ones as they are."""
    names, values, defaults = _fields(whole.__class__)
    fields = zip(names, values(whole), defaults, strict=True)
    return {name: value for name, value, default in fields if value != default}


@cache
def _fields(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[Any]]:
    """Names, how to get their values, and their defaults; a field without one has MISSING, which equals nothing."""
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    defaults = [
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory() for field in fields
    ]
    return names, attrgetter(*names), defaults
