"""Students' names, taken out of what leaves the producer's folder.

Learning platforms put the name into the file's name: Canvas as `fairweatherada_48101_910001_hw4.R`, Moodle as
`Ada Fairweather_48101_assignsubmission_file`. From there it is known, and replaced in every text of the class. Canvas
doesn't say where the family name ends; the class's own texts do, wherever somebody wrote the name in two words.

    the whole name      in any order, in one word or with white space, punctuation or markup between its parts:
                        `Ada Fairweather`, `Fairweather, **Ada**`, `ada.fairweather@…`, `/Users/adafairweather/`
    with initials       `A. Fairweather`, `Fairweather, A.`, `Ada F.`
    an account's name   `afairweather@…`, `/home/ada/`, `github.com/fairweathera`: only where accounts stand
    a part alone        `Fairweather's`: only with a capital, in the student's own work or where the whole name stands,
                        and only if it is no common word and nothing that others in the class write about

A name that is made of words, or is very short (`Max Long`, `Bo Wu`), counts only with capitals and with nothing but
white space or markup between, or as an account: `max(long)`, `max_long` and "mean list" stay what they are.

What this can't find stands in docs/security.md. The time it takes grows with a text's length, not with the class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from grading.names.letters import WORD, letters
from grading.names.search import Names, Student, student_called
from grading.submissions.lms_names import canvas_name, moodle_id, student_id
from grading.submissions.reading import Submission
from producers.batch.forms import PROMPT_FORM

_PLACEHOLDER_NAMES = frozenset({"", "anon", "participant", "teilnehmer", "teilnehmerin", "participante", "student"})


def pseudonym(name: str, secret: bytes) -> str:
    """Ten hex digits for a submission's name: the same within a batch, and nobody's without the batch's secret."""
    return hashlib.blake2b(name.encode(), digest_size=5, key=secret, person=b"kvasir.item").hexdigest()


def pseudonymise(submissions: Iterable[Submission], secret: bytes, form: int = PROMPT_FORM) -> list[Submission]:
    """The same submissions, with the names of all their authors replaced in all their texts; `name` stays.

    `form`: that of the batch's prompts. Prompts of form 1 knew only whole names of five letters or more.
    """
    originals = list(submissions)
    authors = [_author(submission.name, f"student-{pseudonym(submission.name, secret)}") for submission in originals]
    names = Names([author for author in authors if author], form)
    if not names.students:
        return originals
    safe_submissions = []
    for submission, author, near in zip(originals, authors, names.learn(originals, authors), strict=True):
        parts = tuple(replace(part, text=names.replace_names(part.text, author, near)) for part in submission.parts)
        safe_submissions.append(replace(submission, parts=parts))
    return safe_submissions


def _author(name: str, stand_in: str) -> Student | None:
    """The author, as far as the platform wrote a name; None if the file's name doesn't follow one."""
    platform_name = canvas_name(name)  # Moodle's is in the same place
    number = student_id(name)
    if not number or letters(platform_name) in _PLACEHOLDER_NAMES or len(letters(platform_name)) < 2:
        return None
    return student_called(platform_name, stand_in, number, WORD.findall(platform_name) if moodle_id(name) else ())
