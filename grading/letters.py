"""How names are spelled: what counts as a word, which letters it has, and what may separate two words of a name."""

import html
import re
import unicodedata
from functools import lru_cache
from urllib.parse import unquote

# Possessive quantifiers are not used here, because some of them match too little in Python versions before 3.11.5, such
# as Debian 12's.
_LETTER = r"[^\W\d_]"
# Combining accents, vowel signs, soft hyphens and joiners. These characters do not end a word.
_MARKS = (
    r"[\u00ad\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0670\u0900-\u0903\u093a-\u094f\u0962\u0963\u0981-\u0983\u09bc-\u09cd"
    r"\u0a3c-\u0a4d\u0abc-\u0acd\u0b3c-\u0b4d\u0bbe-\u0bcd\u0c3e-\u0c4d\u0cbc-\u0ccd\u0d3e-\u0d4d\u0e31-\u0e3a\u0e47-\u0e4e"
    r"\u200c\u200d\u3099\u309a]"
)
# An escaped non-ASCII letter, as in JSON, Python, HTML, URLs and LaTeX.
_ESCAPED_LETTER = (
    r"(?:\\{1,2}u(?!00[0-9abAB]|20|3000|feff|FEFF)[0-9a-fA-F]{4}|\\x[c-fC-F][0-9a-fA-F]"
    r"|&[A-Za-z]{1,2}(?:acute|grave|uml|circ|tilde|cedil|ring|slash|caron|lig);|&#(?:x(?!a0;|A0;|20)[0-9a-fA-F]{2,5}|(?!160;|8[12]..;)\d{3,5});"
    r"|%(?!C2%A0|E2%80|c2%a0|e2%80)[C-Ec-e][0-9a-fA-F](?:%[89ABab][0-9a-fA-F]){1,2})"
)
_LATEX = rf"(?<={_LETTER})\{{?\\[\"'`^~]\{{?\\?[A-Za-z]\}}{{0,2}}"
WORD = re.compile(rf"(?:{_LETTER}|{_ESCAPED_LETTER})(?:{_LETTER}|{_MARKS}|{_ESCAPED_LETTER}|{_LATEX})*")
_SPACE = r"[\s\u00ad\u200b-\u200f\u2060\ufeff]"
# Markup that a reader sees as white space, or does not see. In "by\nAda", JSON and Python read \n as a line break, so
# the n is not part of the name. In C:\Users\nina, the n is part of the name.
_MARKUP = re.compile(
    r"</?(?i:[biuaspq]|em|strong|br|hr|span|div|font|t[dhrt]|li|code|small|big|su[bp]|center|h\d)(?:\s[^<>\n]{0,80})?/?>"
    r"|&(?:nbsp|ensp|emsp|thinsp|amp|quot|apos|\#0*39|\#x27|\#0*160|\#x0*[aA]0|\#8\d{3});|%20|%[cC]2%[aA]0"
    r"|\\{1,2}u(?:00[aA]0|20[0-2][0-9a-fA-F]|0020|3000)|\\x(?:20|a0|A0)|(?<!sers)(?<!home)(?<!\\)\\{1,2}[nrt](?=[^\W\d_])"
)
_MARK = r"""[,._'’‘`´"“”\-‐‑–—~*+·・|;:/\\#>()\[\]{}%]"""
_LABEL = r"\b(?:(?:first|last|given|family|sur|middle|fore)?[ _-]?name|given|family|first|last)\b"
_BETWEEN = rf"(?:{_SPACE}|{_MARK}|(?i:{_LABEL})){{0,40}}"
# Text that can stand between two words of a name: blanks, marks, a label, a middle initial or a middle name.
GAP = re.compile(rf"{_BETWEEN}(?:{_LETTER}\.?{_BETWEEN})?|[ \u00a0][^\W\d_a-z][\w'’-]{{1,15}}[ \u00a0]")
NARROW = re.compile(rf"(?:{_SPACE}|[*_~`\\#>'’-]){{1,40}}|,{_SPACE}{{0,2}}")
GAP_CHARS = 48

_CJK_LETTER = r"[\u3005\u3040-\u30fa\u30fc-\u30ff\u3400-\u9fff\uac00-\ud7af]"
CJK = re.compile(rf"{_CJK_LETTER}(?:[ \u00a0\u3000·・]?{_CJK_LETTER})+")

# Unicode does not decompose these letters into a base letter and an accent.
_LIKE = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "þ": "th", "Þ": "Th"}
    | {"æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ı": "i", "ħ": "h", "ə": "e"}
)
_DIGRAPH = re.compile("(?<=[aou])e")
PARTICLES = frozenset("al bin da das de del den der di dos du e el ibn la le ter van von y zu".split())  # noqa: SIM905


def without_markup(text: str) -> str:
    """Replace markup between words with white space. Every letter keeps its position."""
    return _MARKUP.sub(lambda match: " " * len(match[0]), text)


@lru_cache(maxsize=1 << 14)
def letters(text: str) -> str:
    """Return a text's letters in lower case without accents, as Canvas writes names. Escaped letters are decoded."""
    if text.isascii() and text.isalpha():
        return text.lower()
    if not text.isalpha():
        text = re.sub(r"\\{1,2}u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})", lambda hit: chr(int(hit[1] or hit[2], 16)), text)
        text = unquote(html.unescape(text)) if "&" in text or "%" in text else text
    folded_text = unicodedata.normalize("NFKD", text.translate(_LIKE)).casefold()
    return unicodedata.normalize("NFC", "".join(letter for letter in folded_text if letter.isalpha()))


def without_digraphs(word: str) -> str:
    """Write umlauts without the e: `muller` for `mueller`.

    Both spellings occur, and without accents only the first is left.
    """
    return _DIGRAPH.sub("", word)
