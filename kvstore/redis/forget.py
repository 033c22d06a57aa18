"""Deletes what the store keeps about some jobs: their own blocks, stored results and answers, claims and crash counts.

It also deletes conversations, by their tag. A class's shared blocks contain no student's work, and expire by their TTL.
"""

from collections.abc import Collection
from contextlib import closing
from typing import Any

from kvstore.redis.client import errors_mapped, open_client, place

_PATTERNS = ("kv:*", "kvw:*", "result:*", "claim:*", "takes:*", "answers:*")
_AT_ONCE = 500


def forget_named(url: str, names: Collection[str]) -> int:
    """Delete the records of these jobs and tags from the store at redis://…, and return how many were deleted.

    Raises StoreUnavailable. This scans all keys, so its time depends on how full the store is, but it blocks no other
    client.
    """
    name_set = set(names)
    client: Any = open_client(url)
    count = 0
    with closing(client), errors_mapped(place(url)):
        for pattern in _PATTERNS:
            keys = [key for key in client.scan_iter(match=pattern, count=_AT_ONCE) if _names_in(key) & name_set]
            for start in range(0, len(keys), _AT_ONCE):
                count += client.unlink(*keys[start : start + _AT_ONCE])
    return count


def _names_in(key: bytes | str) -> set[str]:
    """Return the parts of a key that may be a job's id or a tag."""
    text = key.decode("ascii", "replace") if isinstance(key, bytes) else key
    parts = text.replace("{", "").replace("}", "").split(":")[1:]
    return {*parts, parts[-1].partition(".")[0]}
