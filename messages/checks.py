"""Field checks. Each error names the field, what was wrong and what is allowed. All raise `InvalidMessage`."""

import math
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from messages.errors import InvalidMessage

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}\Z")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/\-]{0,99}\Z")


def identifier(field: str, value: object) -> None:
    """1 to 128 characters out of letters, digits and `._:-`: safe in a queue name, a Redis key and a file name."""
    if not isinstance(value, str) or not _IDENTIFIER.match(value):
        raise InvalidMessage(f"{field} must be 1 to 128 letters, digits, '.', '_', ':' or '-', not {value!r:.60}")


def model_name(field: str, value: object) -> None:
    """A model's name as people write it: `qwen3-coder:30b`, `org/model`."""
    if not isinstance(value, str) or not _MODEL.match(value):
        raise InvalidMessage(f"{field} must be a model name such as 'qwen3-coder:30b', not {value!r:.60}")


def text(field: str, value: object, max_bytes: int) -> None:
    """A str of at most `max_bytes` in UTF-8."""
    if not isinstance(value, str):
        raise InvalidMessage(f"{field} must be text, not {type(value).__name__}")
    # A character takes at most 4 bytes, so most texts can be accepted without encoding them.
    if len(value) * 4 > max_bytes:
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise InvalidMessage(
                f"{field} holds half a character (a lone surrogate) at position {error.start}"
            ) from None
        if size > max_bytes:
            raise InvalidMessage(f"{field} is {size:,} bytes long; at most {max_bytes:,} are allowed")


def readable(field: str, value: str) -> None:
    """If the text is an address, its host and port must be readable; any other text passes. The error never quotes the
    address, which may hold a password."""
    try:
        _ = value.startswith(("http://", "https://")) and urlsplit(value).port
    except ValueError:
        raise InvalidMessage(f"{field} must be an address whose host and port can be read") from None


def whole(field: str, value: object, low: int, high: int) -> None:
    """An int (not a bool) from `low` to `high`, both included."""
    if value.__class__ is not int or not low <= value <= high:
        raise InvalidMessage(f"{field} must be a whole number from {low:,} to {high:,}, not {value!r:.40}")


def number(field: str, value: object, low: float, high: float) -> None:
    """A finite int or float from `low` to `high`, both included."""
    if value.__class__ is float and low <= value <= high:  # a shortcut for nearly all values
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidMessage(f"{field} must be a number, not {value!r:.40}")
    if not low <= value <= high:
        raise InvalidMessage(f"{field} must be from {low:g} to {high:g}, not {value:g}")


def instance(field: str, value: object, kind: type) -> None:
    """The value must have this type."""
    if not isinstance(value, kind):
        raise InvalidMessage(f"{field} must be a {kind.__name__}, not {type(value).__name__}")


def tuple_of(field: str, value: object, kind: type, most: int) -> None:
    """A tuple of at most `most` values of this type."""
    if value == ():  # a shortcut, because nearly all tuples are empty
        return
    if not isinstance(value, tuple) or len(value) > most or not all(isinstance(element, kind) for element in value):
        name = "text" if kind is str else kind.__name__
        raise InvalidMessage(f"{field} must hold at most {most:,} {name}s")


def one_of(field: str, value: object, choices: Collection[str]) -> None:
    """The value must be one of `choices`."""
    if value not in choices:
        raise InvalidMessage(f"{field} must be one of {', '.join(sorted(choices))}, not {value!r:.40}")
