"""Other people's text in places that render Markdown: labels, headings, messages."""

import re

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:^=&\"'])")


def escape_markdown(text: str) -> str:
    """Escape everything that Markdown would interpret, and put the text on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
