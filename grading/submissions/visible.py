"""What a reader of the rendered work sees of a text, and what only its source holds.

Markdown, HTML and LaTeX can hold text that nobody sees: comments, elements without size, white letters, phantoms,
titles and alternative texts of links and pictures, definitions of links, and characters without width. Such text is no
evidence. Source code stays visible, whether it was run or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

SEEN, UNSEEN, HIDDEN = range(3)
_FEW_WORDS = 3
_MAX_SHOWN = 80
_MAX_OPEN = 64  # elements in each other
_MAX_MARKUP = 5_000  # pieces of it in one text: what comes after them is taken for unseen

# Without width, or a direction: no reader sees them, and a quote need not have them.
WITHOUT_WIDTH = "\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff"
TAGS = "\U000e0000-\U000e007f"  # invisible twins of ASCII
_INVISIBLE = re.compile(f"[{WITHOUT_WIDTH}{TAGS}]+")
_TOKEN = re.compile(
    r"""
      ^[ ]{0,3}(?P<fence>`{3,16}|~{3,16})[^\n]*$
    | (?<!`)(?P<tick>`{1,2})(?!`)
    | (?P<comment><!--)
    | </?(?P<name>[A-Za-z][A-Za-z0-9]{0,20})(?P<attributes>[\s/][^<>]{0,2000})?>
    | (?P<latex>\\(?:[hv]?phantom|(?:text)?color\s?\{\s?white\s?\})\s?\{?|\\iffalse\b)
    | !\[(?P<alt>[^\[\]\n]{0,1000})\](?:\([^()\n]{0,2000}\)|\[[^\[\]\n]{0,200}\])?
    | \]\([^()\n"']{0,2000}(?P<title>["'][^\n]{0,1000}?["'])?\s?\)
    | ^[ ]{0,3}\[(?!\^)[^\[\]\n]{1,200}\]:[ \t]*\n?[ \t]*\S{1,2000}[ \t]*
      (?P<note>\n?[ \t]*(?:"[^"\n]{0,2000}"|'[^'\n]{0,2000}'|\([^()\n]{0,2000}\))[ \t]*)?$
    """,
    re.MULTILINE | re.VERBOSE,
)
_HIDING = re.compile(
    r"(?<![-\w])hidden(?![-\w])|display\s*:\s*none|opacity\s*:\s*0?(?:\.0+)?(?![\d.])"
    r"|(?:left|top|text-indent)\s*:\s*-\d{3,}",
    re.IGNORECASE,
)
_SIZE = re.compile(r"font-size\s*:\s*(\d{0,4}\.?\d{1,4})\s*(px|pt|em|rem|ex|%)?", re.IGNORECASE)
_SMALLEST = {"": 0.0, "px": 2.0, "pt": 2.0, "em": 0.15, "rem": 0.15, "ex": 0.3, "%": 15.0}  # nobody can read it
_WHITE = re.compile(
    r"(?<![-\w])color\s*[:=]\s*[\"']?\s*(?:white|transparent|#f{3,4}\b|#f{6}\b|rgba?\(\s*255\s*,\s*255\s*,\s*255)",
    re.IGNORECASE,
)
_BACKGROUND = re.compile(r"background|bgcolor", re.IGNORECASE)  # white letters can be read on it
_VALUE = re.compile(r"\b(?:title|alt|aria-[\w-]{1,20}|data-[\w-]{1,20}|id|name)\s*=\s*(\"[^\"]*\"|'[^']*')")
_VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"})
_NEVER_SHOWN = frozenset({"head", "noscript", "script", "style", "template", "title"})
_FILE_NAME = re.compile(r"\S{0,80}\.\w{2,4}|image|\s*")
_ANY_TAG = re.compile(r"<!--|-->|</?[A-Za-z][^<>]{0,2000}>")
_GROUP = re.compile(r"(?<!\\)[{}]|\$|\n\n|\Z")

Span = tuple[int, int, int, str]  # where it begins and ends, its flag, and what a person is asked about


@dataclass(frozen=True, slots=True)
class VisibleText:
    """For each character of a text whether it is SEEN, UNSEEN markup, or HIDDEN; and hidden passages to ask about.

    Alternative texts of pictures are hidden, but usual: nobody is asked about them.
    """

    flags: bytes
    hidden_passages: tuple[str, ...] = ()

    def seen(self, text: str) -> str:
        """What is seen of the text that this was made of."""
        return text if not any(self.flags) else "".join(char for char, flag in zip(text, self.flags, strict=True) if flag == SEEN)


def visible_text(text: str, kind: str) -> VisibleText:
    """What a reader sees of a text. `kind`: `code`, `text` or `output`, of which only `text` is rendered."""
    flags, passages = bytearray(len(text)), []
    for start, end, flag, passage in (*(_rendered(text) if kind == "text" else ()), *_without_width(text)):
        flags[start:end] = bytes(max(flag, earlier) for earlier in flags[start:end])
        shown = " ".join(_ANY_TAG.sub(" ", passage).split())
        if len(shown.split()) > _FEW_WORDS or (any(map(str.isdigit, shown)) and any(map(str.isalpha, shown))):
            passages.append(shown[:_MAX_SHOWN])
    return VisibleText(bytes(flags), tuple(dict.fromkeys(passages)))


def without_invisible(text: str) -> str:
    """The text without characters that have no width."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


def _without_width(text: str) -> Iterator[Span]:
    for match in () if text.isascii() else _INVISIBLE.finditer(text):
        said = "".join(chr(ord(char) - 0xE0000) for char in match[0] if ord(char) > 0xE0000)
        yield match.start(), match.end(), HIDDEN if said else UNSEEN, said


def _rendered(text: str) -> Iterator[Span]:
    """What Markdown with HTML and LaTeX in it does not show. One pass: what is read once is not read again."""
    open_elements: list[tuple[str, bool]] = []  # their names, and whether they have a background
    hidden_from, hidden_depth, cursor = 0, 0, 0  # the outermost element that hides what it holds
    for number in count():
        if not (match := _TOKEN.search(text, cursor)):
            break
        start, cursor = match.span()
        if number == _MAX_MARKUP:
            yield start, len(text), UNSEEN, f"more than {_MAX_MARKUP} pieces of markup"
            break
        if match["fence"]:
            end = re.compile(rf"^ {{0,3}}{match['fence']}", re.MULTILINE).search(text, cursor)
            cursor = end.end() if end else len(text)
        elif match["tick"]:
            end_tick = text.find(match["tick"], cursor)
            cursor = end_tick + len(match["tick"]) if end_tick >= 0 else cursor
        elif match["comment"]:
            end_comment = text.find("-->", cursor)
            if end_comment >= 0 or not text[text.rfind("\n", 0, start) + 1 : start].strip():
                cursor = end_comment + 3 if end_comment >= 0 else len(text)
                yield start, cursor, HIDDEN, text[start:cursor]
        elif match["latex"]:
            cursor = _latex_end(text, match)
            yield start, cursor, HIDDEN, text[match.end() : cursor].rstrip("}")
        elif match["alt"] is not None:
            yield start, cursor, UNSEEN if _FILE_NAME.fullmatch(match["alt"]) else HIDDEN, ""
        elif match["name"]:
            name, attributes = match["name"].lower(), match["attributes"] or ""
            yield start, cursor, UNSEEN, ""
            yield from (
                (start_of + match.start("attributes"), end_of + match.start("attributes"), HIDDEN, "")
                for start_of, end_of in (value.span(1) for value in _VALUE.finditer(attributes))
            )
            if match[0].startswith("</"):
                while name in (element for element, _ in open_elements):
                    if open_elements.pop()[0] == name:
                        break
                if hidden_depth > len(open_elements):
                    yield hidden_from, cursor, HIDDEN, text[hidden_from:cursor]
                    hidden_depth = 0
            elif name not in _VOID and not attributes.endswith("/") and len(open_elements) < _MAX_OPEN:
                on_background = any(background for _, background in open_elements)
                open_elements.append((name, bool(_BACKGROUND.search(attributes))))
                if not hidden_depth and (name in _NEVER_SHOWN or _hides(attributes, on_background)):
                    hidden_from, hidden_depth = start, len(open_elements)
        else:
            yield start, cursor, UNSEEN, ""
            for group in ("title", "note"):
                if match[group]:
                    yield *match.span(group), HIDDEN, match[group]
    if hidden_depth:
        yield hidden_from, len(text), HIDDEN, text[hidden_from:]


def _hides(attributes: str, on_background: bool) -> bool:
    size = _SIZE.search(attributes)
    has_background = on_background or bool(_BACKGROUND.search(attributes))
    return bool(
        _HIDING.search(attributes)
        or (size and float(size[1]) <= _SMALLEST[(size[2] or "").lower()])
        or (_WHITE.search(attributes) and not has_background)
    )


def _latex_end(text: str, match: re.Match[str]) -> int:
    """Where what a command hides ends: with its group, its formula or its paragraph."""
    if match["latex"].startswith("\\iffalse"):
        end_if = text.find("\\fi", match.end())
        return end_if + 3 if end_if >= 0 else len(text)
    depth, has_group = 0, match["latex"].endswith("{")
    for brace in _GROUP.finditer(text, match.end()):
        if brace[0] not in ("{", "}"):
            return brace.start()
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return brace.end() if has_group else brace.start()
    return len(text)
