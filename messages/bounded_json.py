"""Reads JSON from outside. Its values are counted first, because two bytes of JSON can take a hundred bytes in
memory."""

import json
import re
from itertools import islice
from typing import Any

from messages.limits import MAX_JSON_PIECES

# Matches one of three things: a whole string (so nothing inside it is counted), the start of a list or an object, or a
# comma between entries.
_PIECE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{,]', re.DOTALL)


class TooManyValues(ValueError):
    """The text holds more values than the limit allows."""


def loads(text: bytes) -> Any:
    """The same as json.loads, with a limit. Raises TooManyValues before any value is created, and ValueError or
    RecursionError where json.loads does."""
    limit = MAX_JSON_PIECES
    # Each match takes at least one byte, so a text with fewer bytes than the limit can't exceed it.
    if len(text) > limit and next(islice(_PIECE.finditer(text), limit, None), None):
        raise TooManyValues("the JSON holds too many values (lists, objects and texts)")
    return json.loads(text)
