"""Many small pieces of text as one element: a browser draws that in a tenth of the time of an element for each.

Everything that is shown is made literal first; Streamlit lets no script through either.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from types import MappingProxyType

import streamlit as st

_FAINT = "opacity:0.8;font-size:0.875rem;margin:0.5rem 0 0.25rem"
_BOLD = "font-weight:600;margin:0.75rem 0 0"
_MARK = "background:rgba(255,200,60,0.4);color:inherit"
_WHY = "font-size:0.75rem;font-weight:600;margin-left:0.75rem;user-select:none"
_LARGE = "font-size:2.25rem;line-height:1.2;margin:0"
_VERBATIM = (
    "white-space:pre-wrap;overflow-wrap:anywhere;margin:0 0 0.5rem;padding:0.6rem 0.8rem;border-radius:0.5rem;"
    "background:rgba(128,132,149,0.12);font-size:0.875rem;line-height:1.5"
)


class Markup:
    """HTML in the making; `str` arguments are plain text, whoever wrote them."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def title(self, text: str) -> None:
        """A line that stands out."""
        self._add("p", _BOLD, text)

    def figures(self, values: Mapping[str, str]) -> None:
        """Large figures side by side, each under its label."""
        self._pieces.append('<div style="display:flex;gap:3rem">')
        for label, value in values.items():
            self._pieces.append("<div>")
            self._add("p", _FAINT, label)
            self._add("p", _LARGE, value)
            self._pieces.append("</div>")
        self._pieces.append("</div>")

    def caption(self, text: str) -> None:
        """A line that stands back."""
        self._add("p", _FAINT, text)

    def verbatim(self, text: str, marked: Mapping[int, str] = MappingProxyType({})) -> None:
        """Text as it is, with its line breaks; the `marked` lines, counted from 0, are highlighted, each with why."""
        lines = [
            f'<mark style="{_MARK}" title="{escape(marked[number])}">{escape(line)}</mark>{_why(marked[number])}'
            if number in marked
            else escape(line)
            for number, line in enumerate(text.split("\n"))
        ]
        # HTML drops a line break right after <pre>: one more keeps the text's own.
        self._pieces.append("\n".join([f'<pre style="{_VERBATIM}">', *lines]) + "</pre>")

    def draw(self) -> None:
        """Put it on the page; nothing if nothing was added."""
        if self._pieces:
            st.html(self)

    def _repr_html_(self) -> str:
        """Streamlit takes this as it is; a string it would try as a path first, and mend its indentation."""
        return "".join(self._pieces)

    def _add(self, tag: str, style: str, text: str) -> None:
        self._pieces.append(f'<{tag} style="{style}">{escape(text)}</{tag}>')


def _why(reason: str) -> str:
    """Beside a highlighted line, and no part of what is copied."""
    return f'<small style="{_WHY}">◂ {escape(reason)}</small>' if reason else ""
