"""Detects text that repeats the same thing again and again, as a model does when it gets stuck. Works in any script.

Lists, tables, dashes, code, or a word written three times do not count: most of the text's words must repeat.
"""

import re
import unicodedata

_LEAST_CHARS = 16  # shorter texts can't be judged
_LOOP_CHARS = 12  # a shorter loop may just be emphasis, such as "very, very, very"
_MOST_CHARS = 4_000
_WINDOW, _STEP = 80, 20
# A text repeats itself if less than this share of its four-letter sequences is distinct. Even a numbered list has a
# higher share.
_DIFFERENT = 0.2

_ONE_CHARACTER = re.compile(r"([^\W\d_])\1{19,}|(\S)\2{99,}")
_WORD = re.compile(r"[^\W_]+")
_LOOP = re.compile(r"(.{1,200}?)\1{2,}")


def is_repetition(text: str) -> bool:
    """Whether two thirds of the text is a loop, or a stretch of it hardly varies, or it holds no word at all."""
    text = unicodedata.normalize("NFKC", text).casefold().strip()[:_MOST_CHARS]
    words = " ".join(_WORD.findall(text))
    if _ONE_CHARACTER.search(text) or (len(text) >= _LEAST_CHARS and not words):
        return True
    if len(words) < _LEAST_CHARS:
        return False
    loops = (len(match[0]) for match in _LOOP.finditer(words + " "))
    loop_chars = sum(length for length in loops if length >= _LOOP_CHARS)
    pieces = [words, *(words[at : at + _WINDOW] for at in range(0, len(words) - _WINDOW, _STEP))]
    return 3 * loop_chars >= 2 * len(words) or min(map(_variety, pieces)) < _DIFFERENT


def _variety(text: str) -> float:
    """Return the share of distinct runs among its runs of four letters, from 0 to 1."""
    runs = [text[at : at + 4] for at in range(len(text) - 3)]
    return len(set(runs)) / len(runs)
