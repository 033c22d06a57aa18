"""Text for line-based formats: one record stays on one line, whichever characters the reader breaks lines at."""

import re

# The characters at which str.splitlines() ends a line. httpx and Ollama's client split lines with this method. In JSON
# text, the last three are not escaped.
_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def on_one_line(text: str) -> str:
    """The same JSON, or any text, with these characters escaped, so that it stays on one line."""
    return text if text.isprintable() else _BREAKS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def with_plain_breaks(text: str) -> str:
    """The text with every unusual line break turned into a plain one, which CSV readers accept inside quotes."""
    return text if text.isprintable() else re.sub("[\v\f\x1c-\x1e\x85\u2028\u2029]", "\n", text)
