"""Reads JSON of others: counted first, since two bytes of it may become a hundred in memory."""

import json
import re
from itertools import islice
from typing import Any

from messages.limits import MAX_JSON_PIECES

# A text, whole so that nothing in it is counted, or the start of a list or an object, or what divides their entries.
_PIECE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)


class TooManyValues(ValueError):
    """The text holds more values than are read."""


def loads(text: bytes) -> Any:
    """As json.loads. Raises TooManyValues before it makes any; ValueError or RecursionError as that does."""
    limit = MAX_JSON_PIECES
    # A piece has at least one byte, so most texts need not be counted.
    if len(text) > limit and next(islice(_PIECE.finditer(text), limit, None), None):
        raise TooManyValues("it holds too many values: lists, objects and texts")
    return json.loads(text)
