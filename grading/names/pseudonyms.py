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

What this can't find stands in docs/explanation/security.md. The time it takes grows with a text's length, not with
the class.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import PurePosixPath

from grading.letters import WORD, letters
from grading.names.common_words import COMMON_WORDS
from grading.names.search import MIN_LETTERS, Names, Student, student_called
from grading.roster import EMPTY_ROSTER, FILE_WORDS, HIDDEN_NAMES, Owner, Person, Roster
from grading.submissions.reading import Submission
from producers.batch.forms import PROMPT_FORM

# Words in file names that are not the names of people.
_COMMON = COMMON_WORDS | FILE_WORDS


def pseudonym(name: str, secret: bytes) -> str:
    """Return ten hex digits for a submission's name.

    They are the same within a batch, and need the batch's secret to compute.
    """
    return hashlib.blake2b(name.encode(), digest_size=5, key=secret, person=b"kvasir.item").hexdigest()


def pseudonymise(
    submissions: Iterable[Submission], secret: bytes, form: int = PROMPT_FORM, roster: Roster = EMPTY_ROSTER
) -> list[Submission]:
    """Return the submissions with all their authors' names replaced in all texts. `Submission.name` is not changed.

    `form` is the form of the batch's prompts. Prompts of form 1 recognised only whole names of five letters or more.
    `roster`: all names in it are replaced, also those of people who handed in nothing.
    """
    originals = list(submissions)
    owners = roster.owners(submission.name for submission in originals)

    def stand_in(name: str) -> str:
        return f"student-{pseudonym(name, secret)}"

    authors = [_authors(submission.name, owners[submission.name], stand_in) for submission in originals]
    handed_in = {person.key for owner in owners.values() for person in owner.people}
    absent = [
        _student(person, stand_in(person.key))
        for person in roster.people
        if person.name and person.key not in handed_in
    ]
    names = Names([author for students in authors for author in students] + absent, form)
    if not names.students:
        return originals
    firsts = [next(iter(students), None) for students in authors]
    replace_exact = _exact_names(names.students) if roster.people else str
    return [
        replace(
            submission,
            parts=tuple(
                replace(part, text=names.replace_names(replace_exact(part.text), first, present))
                for part in submission.parts
            ),
        )
        for submission, students, first, near in zip(
            originals, authors, firsts, names.learn(originals, firsts), strict=True
        )
        for present in [near | set(students)]
    ]


def _authors(name: str, owner: Owner, stand_in_of: Callable[[str], str]) -> list[Student]:
    """Return everybody who may have written a submission, including the name in the submission's name."""
    stand_in, claim = stand_in_of(name), owner.claim
    people = [
        _student(person, stand_in_of(person.key if owner.keeps_stand_ins else name))
        for person in owner.people
        if person.name
    ]
    if claim is None:
        # In a text, a classmate can call this student by the name of the file.
        return [*people, *(_whole_name(name, stand_in) if owner.keeps_stand_ins or not people else ())]
    claimed_letters = letters(claim.name)
    if (
        claimed_letters in HIDDEN_NAMES
        or len(claimed_letters) < 2
        or claimed_letters in {letters(student.platform_name) for student in people}
    ):
        return people
    words = WORD.findall(claim.name) if claim.product == "moodle" else ()
    return [*people, student_called(claim.name, stand_in, claim.number, words)]


def _student(person: Person, stand_in: str) -> Student:
    return student_called(person.name, stand_in, person.number, WORD.findall(person.name))


def _whole_name(name: str, stand_in: str) -> list[Student]:
    """Return a student named as a whole file or folder, unless that name consists of words that others use too."""
    path = PurePosixPath(name)
    stem = path.stem if re.fullmatch(r"\.\w{1,5}", path.suffix) else path.name
    identifying_words = [word for word in map(letters, WORD.findall(stem)) if len(word) > 2 and word not in _COMMON]
    is_name = len(letters(stem)) >= MIN_LETTERS and identifying_words
    return [Student(stand_in, stem, is_whole=True)] if is_name else []


def _exact_names(students: Iterable[Student]) -> Callable[[str], str]:
    """Return a function that replaces names exactly as the roster writes them: `Ada O_Brien_42`, `007, Ada`."""
    stand_ins = {
        name: student.stand_in
        for student in students
        for name in (student.platform_name, " ".join(reversed(student.platform_name.split(", ", 1))))
    }
    longest_first = sorted(stand_ins, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
    return lambda text: pattern.sub(lambda match: stand_ins[match[0]], text)
