"""Code in colours: what is a keyword, a string, a number, a comment. Pygments says so; its HTML is not used."""

import time
from functools import lru_cache

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Number, Operator, String, _TokenType

# The languages that submissions are written in, by the names that reading gives them.
_LEXERS = {"Python": "python", "R": "r", "SQL": "sql", "Julia": "julia", "Bash": "bash", "JavaScript": "javascript"}
_KINDS = ((Comment, "c"), (String, "s"), (Number, "n"), (Keyword, "k"), (Operator.Word, "k"))
_MAX_LINE = 1_000  # characters; a longer one is data, and takes a lexer time by its square
_MOST_S = 0.2  # this thread's own time: a busy machine must not change what is shown

Pieces = tuple[tuple[str, str], ...]  # (kind, text) of one line: c, s, n, k, or "" for the rest


def highlight_code(code: str, language: str) -> tuple[Pieces, ...]:
    """Each line of the code in pieces, which joined are that line. Plain where the language isn't known."""
    plain = tuple((("", line),) for line in code.split("\n"))
    if language not in _LEXERS or any(len(line) > _MAX_LINE for line in code.split("\n")):
        return plain
    lines = _lines(code, get_lexer_by_name(_LEXERS[language]))
    return lines if lines and ["".join(text for _, text in line) for line in lines] == code.split("\n") else plain


def _lines(code: str, lexer: Lexer) -> tuple[Pieces, ...]:
    """Empty if it takes too long."""
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
