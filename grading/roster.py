"""Who is in the class according to the LMS, and whose each submission is.

A roster is a file that every instructor can download: Canvas's gradebook or the CSV of a group set, Moodle's grading
worksheet, or GitHub Classroom's `classroom_roster.csv`. A submission's name only claims whose it is. Its number and
name are compared with the roster, in the way in which the LMS derives them. If they disagree, a person is asked once.
The answer is kept in the batch's folder (`assigned.jsonl`), beside the roster with which the batch was planned
(`roster.json`).

In Moodle, a team's folder is named after the group and its id, which is not a participant's number. In Canvas, a
group's file is named after the group and one of its members.
"""

import json
import re
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

from grading.letters import letters
from grading.submissions.lms_names import Claim, claim_of, same_student, student_id
from grading.tables import PARTICIPANT, ExportError, Sheet, cell, column, read_sheet
from messages.errors import BatchError, UsageError
from producers.storage.journal import Lines, append_line
from producers.storage.private import read_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as
from producers.words import join_with_and

FILE = "roster.json"
ANSWERS = "assigned.jsonl"
# The version of a line in the file of answers. Lines from earlier releases have no version. An answer without a version
# gives the person another stand-in in all texts (`Owner.keeps_stand_ins`).
_ANSWER_FORM = "2"
# Canvas's own test student.
TEST_STUDENT = "Student, Test"
# Names that Moodle shows in place of a hidden name, in the most common languages of Moodle.
HIDDEN_NAMES = frozenset({"", "anon", "participant", "teilnehmer", "teilnehmerin", "participante", "student"})
SAY_WHOSE = "say whose with kvasir assign"
# The question about a submission whose name follows no known pattern, if most names follow one. The submission is not
# sent until a person answers.
UNASSIGNED_QUESTION = f"nothing in its name says whose it is: {SAY_WHOSE}"
# The question about a submission whose name follows no known pattern, if most names follow none. The submission is
# graded even before a person answers.
UNMATCHED_QUESTION = f"its name matches nobody in the roster: {SAY_WHOSE}"
# Words in file names that are not the names of people. The two-letter words are common abbreviations.
FILE_WORDS = frozenset(
    """
    analysis assignment code coursework ex exercise exercises final homework hw lab main notebook notes plot problem
    project ps question report script sheet solution submission task untitled work
    """.split()  # noqa: SIM905  as the table of common words
)


@dataclass(frozen=True, slots=True)
class Person:
    """A person in the class, as the LMS lists them."""

    # Canvas's user id, Moodle's participant number, or the GitHub account. "" if only the name is known.
    number: str
    name: str = ""  # `Aldertree, Ada` in Canvas, `Ada Aldertree` in Moodle; "" if the name is hidden
    group: str = ""
    section: str = ""

    @property
    def key(self) -> str:
        """What identifies this person within the class."""
        return self.number or self.name


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a submission, as far as it is known: a person or a group."""

    people: tuple[Person, ...] = ()
    group: str = ""
    # The name that people see; "" if the owner is not known.
    display_name: str = ""
    # A question that a person must answer before the grade is given to anybody.
    question: str = ""
    is_explained: bool = True  # whether the submission's name follows a known pattern, regardless of people's answers
    claim: Claim | None = None
    # Whether the people keep the stand-ins that they had before anybody knew that the submission is theirs. If they
    # keep them, the prompts stay the same.
    keeps_stand_ins: bool = False

    @property
    def name(self) -> str:
        """The group's name, or the person's."""
        return self.group or self.people[0].name

    @property
    def numbers(self) -> set[str]:
        """The people's."""
        return {person.number for person in self.people}


UNKNOWN_OWNER = Owner()


@dataclass(frozen=True)
class Roster:
    """The people of a class, and the answers about whose a submission is. It is empty if no roster was given."""

    product: str = ""  # the LMS that made the roster: canvas, moodle or classroom
    people: tuple[Person, ...] = ()
    # The owners, keyed by the submission's name. An owner is a person's number, or a group's name.
    answers: Mapping[str, str] = field(default_factory=dict)
    # The submissions for which `Owner.keeps_stand_ins` can be true after a person's answer.
    keeping: frozenset[str] = frozenset()

    @cached_property
    def by_number(self) -> dict[str, Person]:
        """The people by number."""
        return {person.number: person for person in self.people if person.number}

    @cached_property
    def groups(self) -> list[Owner]:
        """The groups whose members hand in together."""
        members: defaultdict[str, list[Person]] = defaultdict(list)
        for person in self.people:
            members[person.group].append(person)
        return [Owner(tuple(people), group) for group, people in members.items() if group]

    @cached_property
    def possible_owners(self) -> list[Owner]:
        """Everybody who may hand in: each person, and each group."""
        return [*(Owner((person,)) for person in self.by_number.values()), *self.groups]

    def with_more(self, other_roster: "Roster") -> "Roster":
        """Merge two rosters; this one takes precedence. Raises ExportError if they come from different LMSs."""
        if self.product and other_roster.product and self.product != other_roster.product:
            raise ExportError(
                f"one roster is from {self.product} and another from {other_roster.product}; "
                "use the rosters of only one of these systems"
            )
        people = {person.key: person for person in other_roster.people}
        for person in self.people:
            filled_fields = {name: value for name, value in asdict(person).items() if value}
            people[person.key] = replace(people.get(person.key, person), **filled_fields)
        return Roster(
            self.product or other_roster.product,
            tuple(people.values()),
            {**other_roster.answers, **self.answers},
            self.keeping | other_roster.keeping,
        )

    def find(self, text: str) -> Owner:
        """Find the owner with this number, name or group name. Without a roster, the text is taken as a number.

        Raises UsageError if nobody matches, or more than one does.
        """
        if not self.people:
            return Owner((Person(text),))
        exact = [owner for owner in self.possible_owners if text == (owner.group or owner.people[0].number)]
        matches = exact or [
            owner for owner in self.possible_owners if owner.name and _words(owner.name) == _words(text)
        ]
        if len(matches) != 1:
            count = "more than one person or group" if matches else "no person or group"
            raise UsageError(f"the roster has {count} called {text!r:.60}; use the student's number, which is unique")
        return matches[0]

    def display_name(self, owner: Owner) -> str:
        """Return the owner's name for people to read, with the number if the name is hidden or not unique."""
        people = "; ".join(
            person.name if self._names[person.name] == 1 else f"{person.name or 'Participant'} ({person.number})"
            for person in owner.people
        )
        return f"{owner.group} ({people})" if owner.group else people

    @cached_property
    def _names(self) -> Counter[str]:
        return Counter(person.name for person in self.people)

    # --- the owners of submissions

    def owners(self, submissions: Iterable[str]) -> dict[str, Owner]:
        """Return the owner of each submission. A person's answer takes precedence over the submission's name.

        If more than one submission would belong to a person, none does until somebody has said which one counts. If a
        name follows no known pattern, the question is UNASSIGNED_QUESTION if most other names do, else
        UNMATCHED_QUESTION if there is a roster. Answers don't count as names that follow a pattern, so that the first
        ones don't turn one question into the other.
        """
        owners = {name: self._owner(name) for name in submissions}
        names_by_number: defaultdict[str, list[str]] = defaultdict(list)
        for name, owner in owners.items():
            for number in owner.numbers:
                names_by_number[number].append(name)
        for number, names in names_by_number.items():
            answered_names = [name for name in names if name in self.answers]
            kept_names = answered_names if len(answered_names) == 1 else names[:1] if len(names) == 1 else []
            name_list = join_with_and([PurePosixPath(name).name for name in names])
            for name in set(names) - set(kept_names):
                other_people = tuple(person for person in owners[name].people if person.number != number)
                question = f"of {name_list} only one can count for {self.by_number[number].name or number}: {SAY_WHOSE}"
                owners[name] = replace(owners[name], people=other_people, question=question)
        known_count = sum(owner.is_explained for owner in owners.values())
        is_mostly_known = known_count > 1 and 2 * known_count > len(owners)
        unexplained_question = UNASSIGNED_QUESTION if is_mostly_known else UNMATCHED_QUESTION if self.by_number else ""
        for name, owner in owners.items():
            question = owner.question if owner.is_explained or name in self.answers else unexplained_question
            claimed_name = f"{owner.claim.name}?" if owner.claim and owner.claim.name and question else ""
            owners[name] = replace(owner, display_name=self.display_name(owner) or claimed_name, question=question)
        return owners

    def names(self, submission: str) -> list[str]:
        """Return the names under which a table may list a submission: its name, or the number of one of its people.

        The id in the submission's name is used only if nothing else is known about the owner: a team's id is nobody's
        number.
        """
        owner = self._owner(submission)
        ids = sorted(owner.numbers) or ([] if owner.question else [student_id(submission)])
        return [submission, *filter(None, ids)]

    def key(self, submission: str) -> str:
        """Return a key that is the same for everything that one person handed in."""
        claim = self._owner(submission).claim
        return f"{claim.key} {claim.name}" if claim else same_student(submission)

    def _owner(self, submission: str) -> Owner:
        """Return the owner according to the name, or according to a person's answer."""
        owner = self._by_name(submission)
        if answer := self.answers.get(submission):
            try:
                answered_owner = self.find(answer)
            except UsageError as error:  # the roster has been replaced since the answer
                return replace(owner, people=(), group="", question=str(error))
            return replace(
                answered_owner,
                claim=owner.claim,
                is_explained=owner.is_explained,
                keeps_stand_ins=submission in self.keeping
                and (owner.keeps_stand_ins or owner.people != answered_owner.people),
            )
        return owner

    def _by_name(self, submission: str) -> Owner:
        owner = self._in_canvas(submission) if self.product == "canvas" else None
        claim = claim_of(submission)
        return owner or (self._by_claim(claim) if claim else self._by_hand(submission))

    @cached_property
    def _by_canvas_name(self) -> dict[str, list[Owner]]:
        owners_by_name: defaultdict[str, list[Owner]] = defaultdict(list)
        for owner in self.possible_owners:
            owners_by_name[canvas_name(owner.name)].append(owner)
        return owners_by_name

    def _in_canvas(self, submission: str) -> Owner | None:
        """Find the owner by name and number at the beginning of a Canvas file name.

        A name may contain underscores and digits.
        """
        pieces = unicodedata.normalize("NFC", PurePosixPath(submission).name).split("_")
        for place in range(1, len(pieces)):
            name, is_late = "_".join(pieces[:place]), pieces[place] == "LATE"
            number = "".join(pieces[place + is_late : place + is_late + 1])
            matches = [owner for owner in self._by_canvas_name.get(name, ()) if number in owner.numbers]
            if len(matches) == 1:
                return replace(matches[0], claim=Claim("canvas", name, number, is_late))
        return None

    def _by_claim(self, claim: Claim) -> Owner:
        """Find the owner by the number and name that the LMS wrote, if they agree with the roster."""
        person = self.by_number.get(claim.number)
        if claim.product != self.product or not (person or self.groups):
            return Owner(claim=claim)
        # A group's id can equal a participant's number by chance, so only the group's name is compared.
        if claim.product == "moodle" and self.groups:
            matches = [owner for owner in self.groups if moodle_name(owner.group) == claim.name]
        else:
            is_theirs = person and (not person.name or (claim.product == "moodle" and _agrees(claim, person)))
            matches = [Owner((person,))] if person and is_theirs else []
        if len(matches) == 1:
            return replace(matches[0], claim=claim)
        discrepancy = f"{claim.number} is the number of {person.name}" if person else "the roster has none of that name"
        return Owner(
            question=f"it is called {claim.name!r}, but {discrepancy}: {SAY_WHOSE}" if claim.name else "", claim=claim
        )

    def _by_hand(self, submission: str) -> Owner:
        """Find the person by a name that no LMS made.

        The name must be a person's whole name, number or account. GitHub writes `<assignment>-<account>`. Only words
        that name no person (`hw1`) may stand beside a whole name, and no other person's number.
        """
        stem, is_classroom = PurePosixPath(submission).stem, self.product == "classroom"
        words = frozenset(word for word in _words(stem) if word[0] not in self._file_words)
        matches = [
            person
            for number, person in self.by_number.items()
            if number == stem
            or (is_classroom and submission.casefold().endswith(f"-{number}"))
            or (words and words == _words(person.name))
        ]
        matches.sort(key=lambda person: len(person.number), reverse=is_classroom)
        numbers = self.by_number.keys() & set(re.split(r"[\W_]+", stem))
        is_clear = bool(matches) and (is_classroom or (len(matches) == 1 and numbers <= {matches[0].number}))
        return Owner((matches[0],), keeps_stand_ins=words != _words(stem)) if is_clear else Owner(is_explained=False)

    @cached_property
    def _file_words(self) -> frozenset[str]:
        """The FILE_WORDS that may stand beside a name. A word in somebody's name may not, nor any beside an account."""
        name_words = {word for person in self.people for word, _ in _words(person.name)}
        return FILE_WORDS - name_words if self.product != "classroom" else frozenset()


EMPTY_ROSTER = Roster()


@lru_cache(maxsize=1 << 14)
def _words(name: str) -> frozenset[tuple[str, int]]:
    """Return a name's words in any order, each with how often it occurs."""
    words = re.split(r"[\W_]+", unicodedata.normalize("NFC", name))
    return frozenset(Counter(filter(None, map(letters, words))).items())


# --- how the LMSs write names


def canvas_name(name: str) -> str:
    """Write a name as Canvas begins a file name.

    See `sanitize_user_name` and `sanitize_file_name` in `lib/content_zipper.rb`.
    """
    lower_name = unicodedata.normalize("NFC", re.sub(r"_(\d+)_", r"\1", name).lower())
    return "".join(char for char in lower_name if unicodedata.category(char).startswith(("L", "M", "Nd", "Pc")))


def moodle_name(name: str) -> str:
    """Write a name as Moodle begins a folder name.

    See `get_student_prefix` and `clean_filename`, which is `clean_param(…, PARAM_FILE)`.
    """
    spaced_name = unicodedata.normalize("NFC", name).replace("_", " ")
    return re.sub(r"[\x00-\x1f\x7f&<>\"`|':\\/]", "", spaced_name)


def _agrees(claim: Claim, person: Person) -> bool:
    """Whether the claim has this person's name, or a hidden name because Moodle's marking was blind.

    Before Moodle 4.1, the group chosen for the download comes first in the name (`assign::download_submissions`).
    """
    return letters(claim.name) in HIDDEN_NAMES or f"-{claim.name}".endswith(f"-{moodle_name(person.name)}")


# --- reading rosters


def read_rosters(paths: Iterable[Path]) -> Roster:
    """Read a roster from these files: CSVs from an LMS, and the files kept in a batch's folder.

    Raises ExportError if a file is not a roster, or if they come from different LMSs. Raises BatchError if a kept file
    is damaged.
    """
    roster = EMPTY_ROSTER
    for path in paths:
        roster = roster.with_more(_read(path))
    return roster


def _read(path: Path) -> Roster:
    try:
        if path.name == ANSWERS:
            lines = Lines(path).read_all(lambda row: parse_as(Mapping[str, str], row, "it"), "answer")
            last_answers = {answer.get("submission", ""): answer for _, answer in lines}
            return Roster(
                answers={name: answer.get("person", "") for name, answer in last_answers.items()},
                keeping=frozenset(name for name, answer in last_answers.items() if answer.get("v") == _ANSWER_FORM),
            )
        if path.name == FILE:
            roster: Roster = parse_as(Roster, from_json(read_ordinary(path)), "the roster")
            return roster
        return roster_in(read_sheet(path.read_bytes(), f"roster {path.name}"))
    except OSError as error:
        raise ExportError(f"the roster {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise BatchError(f"{path} can't be read ({error}); name the roster again with --roster") from None


# Each key has columns that only one kind of roster has. Its value names the LMS, and the columns for number, name,
# group and section.
_KINDS = {
    ("canvas_user_id", "group_name"): ("canvas", ("canvas_user_id", "name", "group_name", "sections")),
    ("github_username", "identifier"): ("classroom", ("github_username", "identifier")),
    # `assign_grading_table` in `mod/assign/gradingtable.php` writes these columns. The column Group exists only if
    # students hand in as teams.
    ("Identifier", "Grade"): ("moodle", ("Identifier", "Full name", "Group")),
    ("Student", "ID"): ("canvas", ("ID", "Student", "", "Section")),
    ("LastName", "FirstName", "ID"): ("canvas", ("ID", "LastName", "", "Section")),
    # Moodle's list of participants. Its student numbers differ from those in the worksheet, so Kvasir uses only the
    # names, which it replaces in texts.
    ("First name", "Last name"): ("", ("", "Last name")),
}


def roster_in(sheet: Sheet) -> Roster:
    """Read the people in a gradebook, worksheet, groups CSV or Classroom roster.

    Raises ExportError if it is none of these.
    """
    header = sheet.rows[0]
    for required_captions, (product, captions) in _KINDS.items():
        if all(column(header, caption) >= 0 for caption in required_captions):
            people = [
                _person(product, sheet, row, captions)
                for row in sheet.rows[1:]
                if "points possible" not in cell(row, 0).casefold()  # not a student (`GradebookImporter#csv_stream`)
            ]
            return Roster(product, tuple({person.key: person for person in people if person.key}.values()))
    raise ExportError(
        f"this file is not a known kind of roster. Its columns are {', '.join(header)[:80]}. Use Canvas's "
        "gradebook or groups CSV, Moodle's grading worksheet, or GitHub Classroom's roster"
    )


def _person(product: str, sheet: Sheet, row: list[str], captions: Iterable[str]) -> Person:
    number, name, *group_and_section = (cell(row, column(sheet.rows[0], caption)).strip() for caption in captions)
    given_name = cell(row, column(sheet.rows[0], "FirstName" if product else "First name")).strip()
    name = f"{name}, {given_name}" if given_name and product else f"{given_name} {name}".strip()
    # `GradebookExporter#student_name` writes ="…" around a name that a spreadsheet would take for a formula.
    name = re.sub(r'\A="(.*)"\Z', r"\1", name, flags=re.DOTALL)
    match = PARTICIPANT.match(number) if product == "moodle" else None
    number = number_in(number) if product == "canvas" else number.casefold()
    return Person(match[1] if match else number, name, *group_and_section)


def number_in(text: str) -> str:
    """Return the id in a cell: `71003` even if a spreadsheet turned it into `7.1003E+04` or `71003.0`.

    Raises ExportError if digits were lost.
    """
    if not re.fullmatch(r"\d+(?:[.,]\d*)?(?:[eE]\+?\d{1,2})?", text.strip()):
        return text.strip()
    number = Decimal(text.strip().replace(",", "."))
    exponent = number.as_tuple().exponent
    if number != int(number) or not isinstance(exponent, int) or exponent > 0:
        raise ExportError(
            f"a spreadsheet has cut off digits of the ID {text}: export the file again, and do not save it in a "
            "spreadsheet"
        )
    return f"{number:.0f}"


# --- the copy of the roster in a batch's folder


def kept_files(folder: Path, rosters: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Return the files in a batch's folder that `read_rosters` reads.

    `rosters`, if given, replace the batch's own roster.
    """
    roster, answers = folder / FILE, folder / ANSWERS
    files = [*(rosters or [roster]), *([] if answers in rosters else [answers])]
    return tuple(path for path in files if path in rosters or path.is_file())


def keep_roster(folder: Path, roster: Roster) -> None:
    """Keep the roster for the batch in `folder`, unless it is empty. It is on disk on return. Raises BatchError."""
    if roster.people:
        fields = {"product": roster.product, "people": [asdict(person) for person in roster.people]}
        write_atomically(folder / FILE, json.dumps(fields, indent=1, ensure_ascii=False))


def copy_kept(folder: Path, place: Path) -> None:
    """Copy the roster and answers of one folder to another folder that has none. Raises BatchError."""
    for path in kept_files(folder):
        write_atomically(place / path.name, read_ordinary(path))


def keep_answer(folder: Path, submission: str, owner: Owner, by: str = "") -> None:
    """Record whose a submission is. It is on disk on return. Raises BatchError."""
    person = owner.group or owner.people[0].number
    line = {"submission": submission, "person": person, "by": by, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    append_line(folder / ANSWERS, {"v": _ANSWER_FORM, **line}, "answer")
