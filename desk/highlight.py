"""Colours for code: keywords, strings, numbers and comments. Pygments finds them; its HTML is not used."""

import time
from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Number, Operator, String, _TokenType

# The languages of submissions, by the names that `grading.submissions` uses.
_LEXERS = {"Python": "python", "R": "r", "SQL": "sql", "Julia": "julia", "Bash": "bash", "JavaScript": "javascript"}
_KINDS = ((Comment, "c"), (String, "s"), (Number, "n"), (Keyword, "k"), (Operator.Word, "k"))
# Maximum number of characters in a line. A file with a longer line is not highlighted, because such a line is data, not
# code, and a lexer's time grows with the square of the line's length.
_MAX_LINE = 1_000
# Maximum seconds of CPU time. If wall-clock time counted, a busy machine would highlight less code.
_MOST_S = 0.2

# The pieces of one line as (kind, text). The kinds are c (comment), s (string), n (number), k (keyword) and "" (other).
Pieces = tuple[tuple[str, str], ...]


def highlight_code(code: str, language: str) -> tuple[Pieces, ...]:
    """Return each line of the code in pieces, which together are the whole line.

    An unknown language gives plain pieces.
    """
    plain = tuple((("", line),) for line in code.split("\n"))
    if language not in _LEXERS or any(len(line) > _MAX_LINE for line in code.split("\n")):
        return plain
    lines = _lines(code, get_lexer_by_name(_LEXERS[language]))
    return lines if lines and ["".join(text for _, text in line) for line in lines] == code.split("\n") else plain


def _lines(code: str, lexer: Lexer) -> tuple[Pieces, ...]:
    """Return the highlighted lines; an empty list if it takes too long."""
    until = time.thread_time() + _MOST_S
    lines: list[list[tuple[str, str]]] = [[]]
    for _, token, text in lexer.get_tokens_unprocessed(code):
        if time.thread_time() > until:
            return ()
        kind = _kind(token)
        first, *next_lines = text.split("\n")
        _add(lines[-1], kind, first)
        for line in next_lines:
            lines.append([])
            _add(lines[-1], kind, line)
    return tuple(map(tuple, lines))


def _add(line: list[tuple[str, str]], kind: str, text: str) -> None:
    if line and line[-1][0] == kind:
        line[-1] = (kind, line[-1][1] + text)
    elif text:
        line.append((kind, text))


@lru_cache
def _kind(token: _TokenType) -> str:
    return next((kind for family, kind in _KINDS if token in family), "")
