"""Students' names, taken out of what leaves the producer's folder.

Learning platforms put the name into the file's name: Canvas as `fairweatherada_48101_910001_hw4.R`, Moodle as
`Ada Fairweather_48101_assignsubmission_file`. From there it is known, and replaced in every text of the class wherever
its parts stand together: `Ada Fairweather`, `Fairweather, Ada`, `ada.fairweather@…`, `ada_fairweather`.

What this can't find: a nickname, a first name alone (too many are words: May, Will), names in pictures, and anybody's
name where the files are named by people, as in `homework.R`.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from producers.names import canvas_name, student_id
from producers.submissions import Submission

MIN_LETTERS = 5  # of a whole name: shorter ones are too often something else
MAX_WORDS = 5

_WORD = re.compile(r"[^\W\d_]+")
_BETWEEN = re.compile(r"[ \t,._'’\-]{0,3}\Z")


def pseudonym(name: str, secret: bytes) -> str:
    """Ten hex digits for a submission's name: the same within a batch, and nobody's without the batch's secret."""
    return hashlib.blake2b(name.encode(), digest_size=5, key=secret, person=b"kvasir.item").hexdigest()


def pseudonymise(submissions: Iterable[Submission], secret: bytes) -> list[Submission]:
    """The same submissions, with the names of all their authors replaced in all their texts; `name` stays."""
    kept = list(submissions)
    known = {letters: f"student-{pseudonym(one.name, secret)}" for one in kept if (letters := _author(one.name))}
    return [_without_names(one, known) for one in kept] if known else kept


def _author(name: str) -> str:
    """The letters of the author's name, as the platform wrote it; "" if the file's name doesn't follow one."""
    letters = _letters(canvas_name(name))  # Moodle's is in the same place
    return letters if student_id(name) and letters != "anon" and len(letters) >= MIN_LETTERS else ""


def _without_names(submission: Submission, known: Mapping[str, str]) -> Submission:
    parts = tuple(replace(part, text=replace_names(part.text, known)) for part in submission.parts)
    return replace(submission, parts=parts)


def replace_names(text: str, known: Mapping[str, str]) -> str:
    """The text with each name replaced; `known`: the letters of a name, in small, to what stands in for it."""
    pieces, cursor = [], 0
    for start, end, stand_in in _found(text, known):
        pieces += [text[cursor:start], stand_in]
        cursor = end
    return "".join([*pieces, text[cursor:]]) if pieces else text


def _found(text: str, known: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    words = [(match.start(), match.end(), _letters(match[0])) for match in _WORD.finditer(text)]
    at = 0
    while at < len(words):
        count, stand_in = _name_at(text, words, at, known)
        if stand_in:
            yield words[at][0], words[at + count - 1][1], stand_in
        at += max(1, count)


def _name_at(text: str, words: list[tuple[int, int, str]], at: int, known: Mapping[str, str]) -> tuple[int, str]:
    """How many words from here on are a name, the most of them, and what stands in for it; (0, "") if none are."""
    best = (0, "")
    parts: list[str] = []
    for count, (start, _, letters) in enumerate(words[at : at + MAX_WORDS], 1):
        if count > 1 and not _BETWEEN.match(text, words[at + count - 2][1], start):
            break
        parts.append(letters)
        turned = ("".join(parts[turn:] + parts[:turn]) for turn in range(count))
        stand_in = next((known[joined] for joined in turned if joined in known), "")
        best = (count, stand_in) if stand_in else best
    return best


def _letters(text: str) -> str:
    """Only letters, small, without accents: as Canvas writes names."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return "".join(letter for letter in plain if letter.isalpha())
