"""Who is in the class, as the LMS lists them, and whose each submission is.

A roster is what every instructor can download: Canvas's gradebook and the CSV of a group set, Moodle's grading
worksheet, GitHub Classroom's `classroom_roster.csv`. What a submission's name says is a claim: number and name are
compared with the roster, the name as the LMS itself derives it. Where the two disagree a person is asked once, and the
answer is kept in the batch's folder (`assigned.jsonl`), beside the roster that it was planned with (`roster.json`).

A team's folder at Moodle is called after the group and its id, which counts something else than participants; a group's
file at Canvas after the group and one of its members.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path, PurePosixPath

from grading.letters import letters
from grading.submissions.lms_names import Claim, claim_of, same_student
from grading.tables import PARTICIPANT, ExportError, Sheet, cell, column, read_sheet
from messages.errors import BatchError, UsageError
from producers.storage.journal import Lines
from producers.storage.private import read_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as
from producers.words import join_with_and, shorten_names

TEST_STUDENT = "Student, Test"  # Canvas's own
FILE = "roster.json"
ANSWERS = "assigned.jsonl"
# What Moodle calls everybody whose name it hides, in the languages of its own that are met most.
HIDDEN_NAMES = frozenset({"", "anon", "participant", "teilnehmer", "teilnehmerin", "participante", "student"})
_EXCEL_NUMBER = re.compile(r"\d+(?:[.,]\d*)?(?:[eE]\+?\d{1,2})?")
_SAY = "say whose with kvasir assign"
UNASSIGNED = f"nothing in its name says whose it is, so it was not sent: {_SAY}"


@dataclass(frozen=True, slots=True)
class Person:
    """One of the class, as the LMS lists them."""

    number: str  # Canvas's user id, Moodle's participant number, the account at GitHub; "": known by name alone
    name: str = ""  # `Aldertree, Ada` at Canvas, `Ada Aldertree` at Moodle; "" where it is hidden
    group: str = ""
    section: str = ""

    @property
    def shown(self) -> str:
        """How people are shown."""
        return self.name or f"Participant {self.number}"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a submission is, as far as that is known."""

    people: tuple[Person, ...] = ()
    group: str = ""
    shown: str = ""  # whose it is, for people; "" if nothing says so
    question: str = ""  # what a person has to answer before its grade goes to anybody
    is_known: bool = True  # whether some rule explains its name
    claim: Claim | None = None

    def has(self, number: str) -> bool:
        """Whether it is this person's, too."""
        return any(person.number == number for person in self.people)


UNKNOWN = Owner()


@dataclass(frozen=True)
class Roster:
    """The people of a class, and what was answered about submissions. Empty where nobody gave one."""

    product: str = ""  # whose it is: canvas, moodle or classroom
    people: tuple[Person, ...] = ()
    answers: Mapping[str, str] = field(default_factory=dict)  # by submission: a person's number, or a group

    @cached_property
    def by_number(self) -> dict[str, Person]:
        """The people by number."""
        return {person.number: person for person in self.people if person.number}

    @cached_property
    def groups(self) -> dict[str, tuple[Person, ...]]:
        """The members of each group."""
        members: defaultdict[str, tuple[Person, ...]] = defaultdict(tuple)
        for person in self.people:
            if person.group:
                members[person.group] += (person,)
        return dict(members)

    def with_more(self, other: Roster) -> Roster:
        """Both together: of whom both know, what this one says goes first. Raises ExportError: of two products."""
        if self.product and other.product and self.product != other.product:
            raise ExportError(f"one roster is of {self.product}, another of {other.product}; name those of one")
        people = {person.number or person.name: person for person in other.people}
        for person in self.people:
            key = person.number or person.name
            said = {name: value for name, value in asdict(person).items() if value}
            people[key] = replace(people.get(key, person), **said)
        return Roster(self.product or other.product, tuple(people.values()), {**other.answers, **self.answers})

    def find(self, text: str) -> tuple[str, tuple[Person, ...]]:
        """The group of this name, if it is one, and the people meant by a number, a name or a group's name.

        Raises UsageError where that is nobody, or not clear. Without a roster it is a number.
        """
        if not self.people:
            return "", (Person(text),)
        if text in self.by_number:
            return "", (self.by_number[text],)
        if text in self.groups:
            return text, self.groups[text]
        named = [person for person in self.people if text and _words(person.name) == _words(text)]
        if len(named) == 1:
            return "", (named[0],)
        if named:
            raise UsageError(f"{text!r:.60} are {shorten_names([person.number for person in named])}: say the number")
        raise UsageError(f"the roster has nobody, and no group, called {text!r:.60}")

    # --- whose a submission is

    def owners(self, submissions: Iterable[str]) -> tuple[dict[str, Owner], dict[str, str]]:
        """Whose each submission is; and what is open about people whom more than one would go to, by their number.

        Those people are among nobody's. What a person said goes before what a name says.
        """
        owners = {name: self.owner(name) for name in submissions}
        claimed: defaultdict[str, list[str]] = defaultdict(list)
        for name, owner in owners.items():
            for person in owner.people:
                claimed[person.number].append(name)
        contested: dict[str, str] = {}
        lost: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by submission: who it doesn't go to, and why
        for number, names in claimed.items():
            answered = [name for name in names if name in self.answers]
            kept = answered if len(answered) == 1 else names if len(names) == 1 else []
            listed = join_with_and([PurePosixPath(name).name for name in kept or names])
            why = f"{listed} was said to be theirs, so this counts for nobody"
            if not kept:
                why = contested[number] = f"more than one submission is theirs ({listed}): {_SAY}"
            for name in set(names) - set(kept):
                lost[name][number] = why
        for name, reasons in lost.items():
            owner = owners[name]
            left = tuple(person for person in owner.people if person.number not in reasons)
            question = owner.question if left else "; ".join(dict.fromkeys(reasons.values()))
            owners[name] = replace(owner, people=left, question=question)
        return {name: replace(owner, shown=self._shown(owner)) for name, owner in owners.items()}, contested

    def shown(self, person: Person) -> str:
        """As people are shown; with the number where two have one name."""
        return f"{person.name} ({person.number})" if self._names[person.name] > 1 else person.shown

    @cached_property
    def _names(self) -> Counter[str]:
        return Counter(person.name for person in self.people if person.name)

    def _shown(self, owner: Owner) -> str:
        people = "; ".join(map(self.shown, owner.people))
        if owner.group or people:
            return f"{owner.group} ({people or 'nobody'})" if owner.group else people
        if owner.claim is None:
            return ""
        name = owner.claim.name or "anonymous"
        return f"{name} ({owner.claim.number})" if owner.claim.number else name

    def owner(self, submission: str) -> Owner:
        """Whose it is by its name alone, or by what a person said."""
        claim = claim_of(submission)
        if answer := self.answers.get(submission):
            try:
                group, people = self.find(answer)
                return Owner(people, group, claim=claim)
            except UsageError:  # another roster now
                return Owner(question=f"it was given to {answer}, whom the roster doesn't have", claim=claim)
        owner = self._in_canvas(submission) if self.product == "canvas" else None
        if owner is None and claim is not None:
            owner = self._claimed(claim)
        return owner or self._by_hand(submission)

    def key(self, submission: str) -> str:
        """What all that one person handed in has in common."""
        owner = self._in_canvas(submission) if self.product == "canvas" else None
        claim = claim_of(submission)
        if owner and owner.claim:
            claim = owner.claim
        return f"{claim.key} {claim.name}" if claim else same_student(submission)

    def unassigned(self, submissions: Iterable[str]) -> set[str]:
        """Those that no rule explains, where the LMS has named most of the class."""
        known = {name: self.owner(name).is_known for name in submissions}
        count = sum(claim_of(name) is not None or self.key(name) != same_student(name) for name in known)
        is_of_an_lms = count > 1 and 2 * count > len(known)
        return {name for name, is_known in known.items() if not is_known} if is_of_an_lms else set()

    def questions(self, submissions: Iterable[str]) -> dict[str, str]:
        """What a person has to say of whose these are, by name."""
        owners, _ = self.owners(submissions)
        unassigned = self.unassigned(owners)
        questions = {name: UNASSIGNED if name in unassigned else owner.question for name, owner in owners.items()}
        return {name: question for name, question in questions.items() if question}

    @cached_property
    def _canvas_names(self) -> dict[str, list[Owner]]:
        """Whom a name in a file may mean, as Canvas writes it."""
        named: defaultdict[str, list[Owner]] = defaultdict(list)
        for person in self.people:
            named[canvas_name(person.name)].append(Owner((person,)))
        for group, members in self.groups.items():
            named[canvas_name(group)].append(Owner(members, group))
        return dict(named)

    def _in_canvas(self, submission: str) -> Owner | None:
        """Whose name and number stand together in a file's name: a name may hold underscores, and numbers."""
        pieces = unicodedata.normalize("NFC", PurePosixPath(submission).name).split("_")
        for place in range(1, len(pieces)):
            name, is_late = "_".join(pieces[:place]), pieces[place] == "LATE"
            number = "".join(pieces[place + is_late : place + is_late + 1])
            meant = [owner for owner in self._canvas_names.get(name, ()) if owner.has(number)]
            if len(meant) == 1:
                return replace(meant[0], claim=Claim("canvas", name, number, is_late))
        return None

    def _claimed(self, claim: Claim) -> Owner:
        """Whose number and name an LMS wrote, where these agree with the roster's."""
        if claim.product != self.product or (claim.product == "canvas" and not claim.name):
            return Owner(claim=claim)
        if self.product == "moodle" and self.groups:
            return self._team(claim)
        person = self.by_number.get(claim.number)
        if person is None:
            return Owner(claim=claim)
        if claim.product == "moodle" and _agrees(claim.name, person.name):
            return Owner((person,), claim=claim)
        return Owner(question=_ask(claim, f"the number is that of {person.shown}"), claim=claim)

    def _team(self, claim: Claim) -> Owner:
        """Whose a team's folder is: a number that equals a participant's means nothing."""
        named = [group for group in self.groups if moodle_name(group) == claim.name]
        if len(named) == 1:
            return Owner(self.groups[named[0]], named[0], claim=claim)
        problem = f"groups {join_with_and(named)} are written alike" if named else "no group is called so"
        return Owner(question=_ask(claim, problem), claim=claim)

    def _by_hand(self, submission: str) -> Owner:
        """Whose whole name, number or account a name is that no LMS made."""
        path = PurePosixPath(submission)
        stems = {path.name, path.stem}
        if self.product == "classroom":  # `<assignment>-<account>`
            names = [name.casefold() for name in stems]
            meant = [
                person for person in self.people if any(f"-{name}".endswith(f"-{person.number}") for name in names)
            ]
            longest = max((len(person.number) for person in meant), default=0)
            meant = [person for person in meant if len(person.number) == longest]
        else:
            meant = [
                person
                for person in self.people
                if person.number in stems or (person.name and _words(path.stem) == _words(person.name))
            ]
        return Owner((meant[0],)) if len(meant) == 1 else Owner(is_known=False)


def _ask(claim: Claim, problem: str) -> str:
    return f"it says {claim.name!r} and {claim.number or 'no number'}, but {problem}: {_SAY}"


def _words(name: str) -> Counter[str]:
    """A name's words, in any order."""
    return Counter(filter(None, map(letters, re.split(r"[\W_]+", unicodedata.normalize("NFC", name)))))


NOBODY = Roster()


NOBODY = Roster()


# --- how the LMSs write names


def canvas_name(name: str) -> str:
    """As it begins a file's name: `sanitize_user_name` and `sanitize_file_name`, `lib/content_zipper.rb`."""
    folded = unicodedata.normalize("NFC", re.sub(r"_(\d+)_", r"\1", name).lower())
    kinds = ((char, unicodedata.category(char)) for char in folded)
    return "".join(char for char, kind in kinds if kind[0] in "LM" or kind in ("Nd", "Pc"))


def moodle_name(name: str) -> str:
    """As it begins a folder's: `get_student_prefix` and `clean_filename`, that is `clean_param(…, PARAM_FILE)`."""
    spaced = unicodedata.normalize("NFC", name).replace("_", " ")
    return re.sub(r"[\x00-\x1f\x7f&<>\"`|':\\/]", "", spaced)


def _agrees(claimed: str, name: str) -> bool:
    """Whether Moodle wrote this person's name, or none: marking was blind, or is.

    Before 4.1 a group that was chosen for the download stands before it (`assign::download_submissions`).
    """
    expected = moodle_name(name)
    return not name or letters(claimed) in HIDDEN_NAMES or claimed == expected or claimed.endswith(f"-{expected}")


# --- reading rosters


def read_rosters(paths: Iterable[Path]) -> Roster:
    """The roster in these files: CSVs as LMSs hand them out, and what a batch's folder keeps.

    Raises ExportError: a file is none, or they are of two products; BatchError: a line of answers is none.
    """
    roster = Roster()
    for path in paths:
        roster = roster.with_more(_read(path))
    return roster


def _read(path: Path) -> Roster:
    try:
        if path.name == ANSWERS:
            lines = Lines(path).read_all(lambda row: parse_as(_Answer, row, "the answer"), "answer")
            return Roster(answers={answer.submission: answer.person for _, answer in lines})
        if path.name == FILE:
            roster: Roster = parse_as(Roster, from_json(read_ordinary(path)), "the roster")
            return roster
        return roster_in(read_sheet(path.read_bytes(), f"roster {path.name}"))
    except OSError as error:
        raise ExportError(f"the roster {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise BatchError(f"{path} can't be read ({error}); name the roster again with --roster") from None


def roster_in(sheet: Sheet) -> Roster:
    """The people in a gradebook, worksheet, groups CSV or Classroom's roster. Raises ExportError if it is none."""
    header = sheet.rows[0]

    def has(*names: str) -> bool:
        return all(column(header, name) >= 0 for name in names)

    def people(*captions: str) -> list[Person]:
        return [Person(*_cells(sheet, row, *captions)) for row in sheet.rows[1:]]

    if has("canvas_user_id", "group_name"):  # Canvas: People, the group set, Export
        return _roster("canvas", people("canvas_user_id", "name", "group_name", "sections"))
    if has("identifier", "github_username"):
        listed = people("github_username", "identifier" if not has("name") else "name")
        return _roster("classroom", [replace(person, number=person.number.casefold()) for person in listed])
    if has("Identifier", "Grade"):  # `assign_grading_table`, `mod/assign/gradingtable.php`: Group only with teams
        numbers = [(PARTICIPANT.match(person.number), person) for person in people("Identifier", "Full name", "Group")]
        return _roster("moodle", [replace(person, number=match[1]) for match, person in numbers if match])
    if has("ID") and (has("Student") or has("LastName", "FirstName")):
        return _roster("canvas", [_student(sheet, row) for row in sheet.rows[1:] if not _is_heading(row)])
    if has("First name", "Last name"):  # Moodle's participants: names for the texts, of whatever class
        names = [" ".join(_cells(sheet, row, "First name", "Last name")) for row in sheet.rows[1:]]
        return _roster("", [Person("", name) for name in names])
    raise ExportError(
        "a roster is Canvas's gradebook or groups CSV, Moodle's grading worksheet, or GitHub Classroom's roster; "
        f"this file has the columns {', '.join(header)[:80]}"
    )


def _roster(product: str, people: Iterable[Person]) -> Roster:
    keyed = {person.number or person.name: person for person in people}
    return Roster(product, tuple(person for key, person in keyed.items() if key))


def _is_heading(row: list[str]) -> bool:
    """`Points Possible`, or what stands above it: no student (`GradebookImporter#csv_stream`)."""
    return "points possible" in cell(row, 0).casefold()


def _student(sheet: Sheet, row: list[str]) -> Person:
    name, number, section = _cells(sheet, row, "Student", "ID", "Section")
    if column(sheet.rows[0], "Student") < 0:
        name = ", ".join(_cells(sheet, row, "LastName", "FirstName"))
    # `GradebookExporter#student_name` quotes what a spreadsheet would compute.
    name = re.sub(r'\A="(.*)"\Z', r"\1", name, flags=re.DOTALL)
    return Person(number_in(number), name, section=section)


def _cells(sheet: Sheet, row: list[str], *captions: str) -> list[str]:
    return [cell(row, column(sheet.rows[0], caption)).strip() for caption in captions]


def number_in(text: str) -> str:
    """The id in a cell: `71003` where a spreadsheet has made `7.1003E+04` or `71003.0` of it.

    Raises ExportError where a digit is lost.
    """
    text = text.strip()
    if text.isdecimal() or not _EXCEL_NUMBER.fullmatch(text):
        return text
    number = Decimal(text.replace(",", "."))
    exponent = number.as_tuple().exponent
    if number != int(number) or not isinstance(exponent, int) or exponent > 0:
        raise ExportError(f"a spreadsheet has shortened the ID {text}, and digits are lost: export the file anew")
    return str(int(number))


# --- what a batch's folder keeps


@dataclass(frozen=True, slots=True)
class _Answer:
    """A line of `assigned.jsonl`."""

    submission: str
    person: str  # a number, or a group's name
    by: str = ""
    time: float = field(default_factory=time.time)  # seconds since the epoch


def kept_files(folder: Path, given: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """What a batch's folder knows of its people, for `read_rosters`; a roster that is `given` replaces its own."""
    roster, answers = folder / FILE, folder / ANSWERS
    rosters = given or ((roster,) if roster.is_file() else ())
    return (*rosters, *((answers,) if answers.is_file() and answers not in given else ()))


def keep_roster(folder: Path, roster: Roster) -> None:
    """Keep it for the batch in `folder`, on disk on return, if there is anybody in it. Raises BatchError."""
    kept = read_rosters([folder / FILE]) if (folder / FILE).is_file() else Roster()
    if roster.people and (roster.product, roster.people) != (kept.product, kept.people):
        people = [asdict(person) for person in roster.people]
        text = json.dumps({"product": roster.product, "people": people}, indent=1, ensure_ascii=False)
        write_atomically(folder / FILE, text)


def copy_kept(folder: Path, place: Path) -> None:
    """What is kept in one folder, in another that has nothing of the kind. Raises BatchError."""
    for path in kept_files(folder):
        write_atomically(place / path.name, read_ordinary(path))


def keep_answer(folder: Path, submission: str, person: str, by: str = "") -> None:
    """Keep whose a submission is, on disk on return. Raises BatchError."""
    Lines(folder / ANSWERS).append([asdict(_Answer(submission, person, by))])
