"""Somebody else's text in places that read Markdown: labels, headings, messages."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:^=&\"'])")
SHOWN_CHARS = 20_000  # of one part; a browser chokes on an output of half a million characters


def escape_markdown(text: str) -> str:
    """The text with everything that Markdown would act on made literal, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def split_off_rest(text: str, longest: int = SHOWN_CHARS) -> tuple[str, int]:
    """(its beginning, how many characters are left out)."""
    return text[:longest], max(0, len(text) - longest)
