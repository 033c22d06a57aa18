"""Many small pieces of text as one element: a browser draws that in a tenth of the time of an element for each.

Everything that is shown is made literal first; Streamlit lets no script through either.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from types import MappingProxyType

import streamlit as st

_FAINT = "overflow-wrap:anywhere;opacity:0.8;font-size:0.875rem;margin:0.5rem 0 0.25rem"
_BOLD = "overflow-wrap:anywhere;font-weight:600;margin:0.75rem 0 0"
_MARK = "background:rgba(255,200,60,0.4);color:inherit"
_NOTE_STYLE = "font-size:0.75rem;font-weight:600;margin-left:0.75rem;user-select:none"
_TOKEN = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")
_NO_MARKS: Mapping[int, str] = MappingProxyType({})
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
        self._add(_BOLD, text)

    def caption(self, text: str) -> None:
        """A line that stands back."""
        self._add(_FAINT, text)

    def keys(self, meanings: Mapping[str, str]) -> None:
        """A list that opens on a click: what each key does, or each of several (`j, k`)."""
        rows = "".join(f"<li><b>{escape(keys)}</b>: {escape(meaning)}</li>" for keys, meaning in meanings.items())
        self._pieces.append(f'<details class="keys"><summary>Keys</summary><ul>{rows}</ul></details>')

    def verbatim(self, text: str, marks: Mapping[int, str] = _NO_MARKS) -> None:
        """Text as it is, with its line breaks; lines in `marks`, counted from 0, are highlighted, each with why."""
        lines_html = [
            f'<mark style="{_MARK}" title="{escape(marks[number])}">{escape(line)}</mark>{_margin_note(marks[number])}'
            if number in marks
            else escape(line)
            for number, line in enumerate(text.split("\n"))
        ]
        # HTML drops a line break right after <pre>. One more line break is added here to keep the first line break of
        # the text.
        self._pieces.append("\n".join([f'<pre style="{_VERBATIM}">', *lines_html]) + "</pre>")

    def changes(self, first: str, other: str) -> None:
        """`other` with what only it has highlighted, and what only `first` has struck through, word by word."""
        tokens, other_tokens = _TOKEN.findall(first), _TOKEN.findall(other)
        pieces = (
            (kind == "equal", escape("".join(tokens[start:end])), escape("".join(other_tokens[other_start:other_end])))
            for kind, start, end, other_start, other_end in SequenceMatcher(None, tokens, other_tokens).get_opcodes()
        )
        tag = f'<ins style="{_MARK};text-decoration:none">'
        html = "".join(new if is_equal else f"<del>{old}</del>{tag}{new}</ins>" for is_equal, old, new in pieces)
        self._pieces.append(f'<pre style="{_VERBATIM}">\n{html}</pre>')

    def rows(self, rows: Sequence[Mapping[str, object]], label: str) -> None:
        """A table that is only read, under the names of its columns; numbers stand at the right, `label` is its name.

        Streamlit's own table is a canvas: two of them on a page give the same ids to what a screen reader is told.
        """
        names = "".join(f'<th scope="col">{escape(name)}</th>' for name in (rows[0] if rows else ()))
        lines = ["".join(_cell(value) for value in row.values()) for row in rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        head = f'<div class="rows" role="region" tabindex="0" aria-label="{escape(label)}">'
        self._pieces.append(f"{head}<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>")

    def draw(self) -> None:
        """Put it on the page; nothing if nothing was added."""
        if self._pieces:
            st.html(self)

    def _repr_html_(self) -> str:
        """Streamlit takes this as it is; a string it would try as a path first, and fix its indentation."""
        return "".join(self._pieces)

    def _add(self, style: str, text: str) -> None:
        self._pieces.append(f'<p style="{style}">{escape(text)}</p>')


def _cell(value: object) -> str:
    number = isinstance(value, int | float)
    return f'<td class="number">{value:,}</td>' if number else f"<td>{escape(str(value))}</td>"


def _margin_note(reason: str) -> str:
    """Beside a highlighted line, and no part of what is copied."""
    return f'<small style="{_NOTE_STYLE}">◂ {escape(reason)}</small>' if reason else ""
