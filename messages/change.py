"""`dataclasses.replace` in half its time, for what is done with every job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")


def changed(whole: T, **changes: Any) -> T:
    """The same dataclass with some fields changed; it checks itself anew. Raises what it raises, TypeError included."""
    kind: Any = type(whole)
    names, values = _fields(kind)
    same: T = kind(**(dict(zip(names, values(whole), strict=True)) | changes))
    return same


@cache
def _fields(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    names = [field.name for field in dataclasses.fields(kind)]
    return names, attrgetter(*names)
