"""Removes the disguises of a text that can be removed mechanically.

These are: invisible characters, look-alike letters, accents, full-width letters, HTML tags, comments, entities,
escapes, LaTeX colours, base64, base32 and hex (also nested), Morse code, letters set apart, and digits used as letters.
A decoded text counts only if it reads as language and the original did not.
"""

import base64
import binascii
import html
import re
import unicodedata
from collections.abc import Callable
from urllib.parse import unquote

FULL = "\ue000"  # stands for any full score, such as 10/10, 10 of 10 or 100 %
_MAX_PAYLOADS = 50
_MAX_PAYLOAD = 4096
_MAX_TIMES = 3  # maximum number of encoding layers that are decoded
_LETTERS_OF_LANGUAGE = 0.85  # a decoded text counts as language if at least this share is letters and spaces

_INLINE_TAG = re.compile(
    r"</?(?:a|b|big|code|em|font|i|ins|mark|s|small|span|strong|sub|sup|u|wbr)(?:\s[^<>]{0,300})?>", re.I
)
_MARKUP = re.compile(
    r"<!--|-->|</?(?:br|details|div|h\d|hr|li|ol|p|summary|table|td|th|tr|ul)(?:\s[^<>]{0,300})?/?>"
    r"|\\(?:text)?color\{\w{1,20}\}|\\(?:text|mathrm|phantom|tiny)\b",
    re.I,
)
_CONCATENATION = re.compile(r"(?<=\w)[\"']\s?\+\s?[\"'](?=\w)|\\(?=\n)")  # "ig" + "nore"
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})")
_PAYLOAD = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{20,}={0,2}")
_MORSE = re.compile(r"(?:[.-]{1,5}(?: */ *| +)){8,}[.-]{1,5}")
_MORSE_LETTERS = {
    signs: letter
    for letter, signs in re.findall(
        r"(\w)([.-]+)",
        "a.-b-...c-.-.d-..e.f..-.g--.h....i..j.---k-.-l.-..m--n-.o---p.--.q--.-r.-.s...t-u..-v..."
        "-w.--x-..-y-.--z--..0-----1.----2..---3...--4....-5.....6-....7--...8---..9----.",
    )
}
_BLOB = 64  # a word with at least this many letters and digits counts as data
_TAGS = re.compile(r"[\U000e0020-\U000e007e]+")  # invisible copies of the ASCII characters
_MIXED_SCRIPTS = re.compile(r"\b(?=\w*[A-Za-z])(?=\w*[\u0370-\u052f])\w+")
_TWINS = str.maketrans(
    "аеорсухіјѕԁһкмтвнАВЕІЈКМНОРСТУХαβεικμνορτυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧ",
    "aeopcyxijsdhkmtbhABEIJKMHOPCTYXabeikmvoptuxABEZHIKMNOPTYX",
)
_LETTER_FORMS = {
    **str.maketrans("ᴀʙᴄᴅᴇꜰɢʜɪᴊᴋʟᴍɴᴏᴘʀꜱᴛᴜᴠᴡʏᴢ", "abcdefghijklmnoprstuvwyz"),  # small capitals
    **str.maketrans("ıłøđ", "ilod"),  # Unicode normalisation does not turn these into plain letters
    **{first + n: 97 + n for first in (0x1F150, 0x1F170, 0x1F1E6) for n in range(26)},  # boxed
}
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_TEN_OF_TEN = re.compile(
    r"(?<![\d.])(\d{1,3})(?:[.,]0+)? ?(?:/|out of|of|von|sur|de|su|di|из) ?\1(?:[.,]0+)?(?![\d.]*\d)|\b100 ?[%٪]"
)
_DIGIT = re.compile(r"\d")
_RULE = re.compile(r"([^\w\s])\1{2,}")
_LETTERS_APART = re.compile(r"(?<!\w)(?:\w[ .\-_*·])+\w(?!\w)")
_LEET_WORD = re.compile(r"(?<![\w@$!|+])(?=[\w@$!|+]*[a-zA-Z])(?=[\w@$!|+]*[013457@$!|+])[\w@$!|+]{2,}")
_LEET = str.maketrans("0134578@$!|+", "oieastbasilt")


def uncover(text: str) -> str:
    """Return the text without markup and escapes, followed by what its hidden characters and encoded words say."""
    text = _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), text)
    text = unquote(html.unescape(text)) if "&" in text or "%" in text else text
    hidden = ["".join(chr(ord(char) - 0xE0000) for char in run) for run in _TAGS.findall(text)]
    hidden += [_decode_payload(word) for word in list(dict.fromkeys(_PAYLOAD.findall(text)))[:_MAX_PAYLOADS]]
    hidden += [_decode_morse(signs) for signs in _MORSE.findall(text)[:_MAX_PAYLOADS]]
    text = _PAYLOAD.sub(lambda match: " " if len(match[0]) > _BLOB and _DIGIT.search(match[0]) else match[0], text)
    text = _MARKUP.sub(" ", _INLINE_TAG.sub("", _CONCATENATION.sub("", text)))
    return "\n".join(filter(None, [text, *hidden]))


def _decode_payload(word: str, times: int = 1) -> str:
    """Decode hex, base32 or base64, repeatedly if needed.

    The result counts only if it is words with spaces between them.
    """
    bare = word.strip().rstrip("=")[:_MAX_PAYLOAD]
    for decode in _DECODERS:
        try:
            text = decode(bare).decode()
        except (ValueError, binascii.Error):
            continue
        if _PAYLOAD.fullmatch(text.strip()) and times < _MAX_TIMES:
            return _decode_payload(text, times + 1)
        if sum(char.isalpha() or char.isspace() for char in text) >= _LETTERS_OF_LANGUAGE * len(text):
            return text if " " in text.strip() or not text.isascii() else ""
    return ""


_DECODERS: tuple[Callable[[str], bytes], ...] = (
    bytes.fromhex,
    lambda word: base64.b32decode(word + "=" * (-len(word) % 8)),
    lambda word: base64.b64decode(word + "==", "-_" if "_" in word else None),
)


def _decode_morse(signs: str) -> str:
    return " ".join(
        "".join(_MORSE_LETTERS.get(letter, "") for letter in word.split()) for word in re.split(r" */ *| {3,}", signs)
    )


def plain(text: str) -> str:
    """Simplify a text: lower case, no accents, no look-alikes.

    Variable names become words, and all digits become one digit.
    """
    text = _RULE.sub(r"\1\1", _CAMEL.sub(" ", text).replace("_", " "))
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text.translate(_LETTER_FORMS))
        text = "".join(char for char in text if unicodedata.category(char) not in {"Mn", "Cf"})
        text = _MIXED_SCRIPTS.sub(lambda match: match[0].translate(_TWINS), unicodedata.normalize("NFC", text))
    return " ".join(_DIGIT.sub("0", _TEN_OF_TEN.sub(f" {FULL} ", text.casefold())).split())


# The first function returns the sentence itself. Each of the other functions removes a disguise, and its result is
# scored only if it differs from the sentence.
READINGS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: _LETTERS_APART.sub(lambda match: re.sub(r"[ .\-_*·]", "", match[0]), text),
    lambda text: _LEET_WORD.sub(lambda match: re.sub(r"11\b", "ll", match[0]).translate(_LEET), text),
)
