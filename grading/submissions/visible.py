"""Separates text that a reader of the rendered work sees from text that only its source holds.

Markdown, HTML and LaTeX can hold text that nobody sees: comments, elements without size, white letters, phantoms,
titles and alternative texts of links and pictures, link definitions, and zero-width characters. Such text does not
count as evidence. Source code counts as visible, whether it was run or not.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SEEN, UNSEEN, HIDDEN = range(3)
MAX_PASSAGES = 10  # maximum number of passages of one submission that are shown to a person
_FEW_WORDS, _MAX_SHOWN = 3, 80
_MAX_MARKUP = 5_000  # maximum number of pieces of markup that are read in one text; text after them counts as not seen

# Zero-width characters, direction marks, and invisible copies of ASCII characters. A reader does not see them, so a
# quote need not contain them.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\U000e0000-\U000e007f]+"
)
_TWINS = re.compile("[\U000e0020-\U000e007e]+")
_TOKEN = re.compile(
    r"""
      ^[ ]{0,3}(?P<fence>`{3,16}(?=[^`\n]*$)|~{3,16})[^\n]*$
    | (?<![`\\])(?P<tick>`{1,2})(?!`)
    | (?P<comment><!--)
    | <(?P<slash>/?)(?P<name>[A-Za-z][A-Za-z0-9]{0,20})
      (?P<attributes>[\s/](?:[^<>"']|"[^"<]{0,2000}"|'[^'<]{0,2000}'){0,2000}+|[\s/][^<>]{0,2000})?>
    | \\(?:[hv]?phantom|(?:text)?color\s?\{\s?white\s?\})\s?(?P<group>\{?)
    | !\[(?P<alt>[^\[\]\n]{0,1000})\](?:\([^()\n]{0,2000}\)|\[[^\[\]\n]{0,200}\])?
    | \]\([^()\n"']{0,2000}(?P<title>(?<=\s)["'][^\n]{0,1000}?["'])?\s?\)
    | ^[ ]{0,3}\[(?!\^)[^\[\]\n]{1,200}\]:[ \t]*\n?[ \t]*\S{1,2000}[ \t]*
      (?P<note>\n?[ \t]*(?:"[^"\n]{0,2000}"|'[^'\n]{0,2000}'|\([^()\n]{0,2000}\))[ \t]*)?$
    """,
    re.MULTILINE | re.VERBOSE,
)
# The pattern that finds markup, for each kind of text.
_TOKENS = {"text": _TOKEN, "html": re.compile(f"(?=<)(?:{_TOKEN.pattern})", _TOKEN.flags)}
_LINE_START = re.compile(r"(?:\A|\n) {0,3}<\Z")
_HIDING = re.compile(
    r"(?<![-\w:])(?<!: )hidden(?![-\w])|visibility\s*:\s*hidden|display\s*:\s*none|opacity\s*:\s*0?(?:\.0+)?(?![\d.])"
    r"|(?:left|top|text-indent)\s*:\s*-\d{3,}"
    r"|font-size\s*:\s*(?:0+(?:\.0+)?(?![\d.])|[01]?(?:\.\d+)?\s*p[xt]|0?\.[01]\d*\s*r?em|\d(?:\.\d+)?\s*%)",
    re.IGNORECASE,
)
_WHITE = re.compile(
    r"(?<![-\w])color\s*[:=]\s*[\"']?\s*(?:white|transparent|#f{3,4}\b|#f{6}\b|rgba?\(\s*255\s*,\s*255\s*,\s*255)",
    re.IGNORECASE,
)
_GROUND = re.compile(r"\b(?:background|bgcolor)\b", re.IGNORECASE)
_VALUE = re.compile(r"\b(?:title|alt|aria-\w{1,20}|data-\w{1,20}|id|name)\s*=", re.IGNORECASE)
_WITHOUT_CONTENT = frozenset({"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})
_NEVER_SHOWN = frozenset({"head", "noscript", "script", "style", "svg", "template", "title"})
_FILE_NAME = re.compile(r"\S{0,80}\.\w{2,4}|image|\s*")
_MARKUP = re.compile(r"<!--|-->|</?[A-Za-z][^<>]{0,2000}>")
_GROUP = re.compile(r"(?<!\\)[{}]|\$|\n\n")


@dataclass(frozen=True, slots=True)
class VisibleText:
    """A flag for each character of a text (SEEN, UNSEEN markup, or HIDDEN), and hidden passages to ask about.

    Alternative texts of pictures are hidden, but so common that nobody is asked about them.
    """

    flags: bytes
    hidden_passages: tuple[str, ...]

    def shown(self, text: str, *, with_markup: bool = False) -> str:
        """Return the visible characters of the text from which this was made."""
        return "".join(char for char, flag in zip(text, self.flags, strict=True) if flag <= with_markup * UNSEEN)


def visible_text(text: str, kind: str) -> VisibleText:
    """Find out what a reader sees of a text.

    Args:
        kind: `html`, or the kind of a part (`code`, `text` or `output`). Of these only `text` is rendered, as Markdown.
    """
    flags, passages = bytearray(len(text)), []
    twins = (
        (*run.span(), HIDDEN, "".join(chr(ord(char) - 0xE0000) for char in run[0])) for run in _TWINS.finditer(text)
    )
    for start, end, flag, hidden_text in (*(_rendered(text, _TOKENS[kind]) if kind in _TOKENS else ()), *twins):
        flags[start:end] = bytes(max(flag, earlier) for earlier in flags[start:end])
        passage = " ".join(_MARKUP.sub(" ", hidden_text).split())
        if len(passage.split()) > _FEW_WORDS or (any(map(str.isdigit, passage)) and any(map(str.isalpha, passage))):
            passages.append(passage[:_MAX_SHOWN])
    return VisibleText(bytes(flags), tuple(dict.fromkeys(passages)))


def without_invisible(text: str) -> str:
    """Remove zero-width characters from a text."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


def _rendered(text: str, token: re.Pattern[str]) -> Iterator[tuple[int, int, int, str]]:
    """Find what rendered HTML, or Markdown with HTML and LaTeX, does not show. Each character is read only once.

    Yields the start and end of each piece, its flag, and the text that a person may be asked about.
    """
    cursor, tags = 0, list[tuple[re.Match[str], int]]()
    # End of the current HTML block. Inside it, the marks of inline code are ordinary characters (CommonMark, 4.6).
    html_end = 0
    for _ in range(_MAX_MARKUP):
        if not (match := token.search(text, cursor)):
            break
        is_letters = match.start() < html_end and (match["fence"] or match["tick"])
        cursor = match.end() if is_letters else _end(match, text)
        if cursor > html_end and _LINE_START.search(text[max(match.start() - 4, 0) : match.start()] + match[0][:1]):
            last = re.compile(r"$" if match["comment"] else r"\n[ \t]*$", re.MULTILINE).search(text, cursor)
            html_end = last.end() if last else len(text)
        hidden_end = cursor if match["comment"] or match["group"] is not None else match.end()
        yield match.start(), cursor, _flag(match), text[match.end() : hidden_end].rstrip("}")
        if match["name"]:
            tags.append((match, cursor))
        elif title := match["title"] or match["note"]:
            yield cursor - len(title) - bool(match["title"]), cursor, HIDDEN, title
    else:
        yield cursor, len(text), UNSEEN, f"more than {_MAX_MARKUP} pieces of markup"
    yield from ((start, end, HIDDEN, text[start:end]) for start, end in _hidden_elements(text, tags))


def _end(match: re.Match[str], text: str) -> int:
    """Return where the element that a piece of markup begins ends."""
    if match["group"] is not None:
        return _group_end(text, match.end(), bool(match["group"]))
    # Inline code ends on the line where it begins. A backtick on a later line could belong to another paragraph.
    if tick := match["tick"]:
        line_end = text.find("\n", match.end())
        found = re.compile(f"(?<!`){tick}(?!`)").search(text, match.end(), line_end if line_end >= 0 else len(text))
        return found.end() if found else match.end()
    if fence := match["fence"]:
        mark = f"^ {{0,3}}{fence}{fence[0]}*[ \\t]*$"
    elif match["comment"] or _is_never_shown(match):
        mark = "-->" if match["comment"] else f"</{match['name']}>"
    else:
        return match.end()
    found = re.compile(mark, re.IGNORECASE | re.MULTILINE).search(text, match.end())
    return found.end() if found else len(text)


def _flag(match: re.Match[str]) -> int:
    is_hidden = (
        match["comment"]
        or match["group"] is not None
        or _is_never_shown(match)
        or _VALUE.search(match["attributes"] or "")
        or not _FILE_NAME.fullmatch(match["alt"] or "")
    )
    return HIDDEN if is_hidden else SEEN if match["fence"] or match["tick"] else UNSEEN


def _is_never_shown(match: re.Match[str]) -> bool:
    return (match["name"] or "").lower() in _NEVER_SHOWN and not match["slash"]


def _hidden_elements(text: str, tags: Iterable[tuple[re.Match[str], int]]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the outermost elements that hide their content."""
    hidden_from, hidden_depth = 0, 0
    open_elements: list[str] = []
    # Whether each open element has a background colour. The first entry stands for the page.
    has_ground = [False]
    for tag, end in tags:
        name, attributes = tag["name"].lower(), tag["attributes"] or ""
        if tag["slash"] and name in open_elements:
            del open_elements[len(open_elements) - 1 - open_elements[::-1].index(name) :]
            del has_ground[len(open_elements) + 1 :]
            if hidden_depth > len(open_elements):
                yield hidden_from, end
                hidden_depth = 0
        elif not (tag["slash"] or name in _WITHOUT_CONTENT | _NEVER_SHOWN or attributes.endswith("/")):
            open_elements.append(name)
            has_ground.append(has_ground[-1] or bool(_GROUND.search(attributes)))
            is_white = _WHITE.search(attributes) and not has_ground[-1]
            if not hidden_depth and (is_white or _HIDING.search(attributes)):
                hidden_from, hidden_depth = tag.start(), len(open_elements)
    if hidden_depth:
        yield hidden_from, len(text)


def _group_end(text: str, start: int, has_begun: bool) -> int:
    """Return where a LaTeX command's effect ends.

    It ends with its group, the enclosing group, the formula or the paragraph.
    """
    depth = 0
    for match in _GROUP.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], -len(text))
        if depth < 0:
            return match.end() if has_begun and match[0] == "}" else match.start()
    return len(text)
