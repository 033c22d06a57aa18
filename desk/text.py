"""Somebody else's text in places that read Markdown: labels, headings, messages."""

import re

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:^=&\"'])")


def escape_markdown(text: str) -> str:
    """The text with everything that Markdown would act on made literal, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
