"""Text in formats of lines: one record stays one line, however its reader cuts them."""

import re

# Where str.splitlines() ends a line, and with it httpx and Ollama's client. JSON leaves the last three as they are.
_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def on_one_line(text: str) -> str:
    """JSON that says the same on one line, or any text with such escapes."""
    return text if text.isprintable() else _BREAKS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def with_plain_breaks(text: str) -> str:
    """A text in which only the usual characters end a line: in a CSV's quotes those are read as they are."""
    return text if text.isprintable() else re.sub("[\v\f\x1c-\x1e\x85\u2028\u2029]", "\n", text)
