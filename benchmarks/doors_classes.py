"""Made-up classes as Canvas and Moodle hand them out, each with the truth beside it. Knows nothing of the product.

Each rule is the LMS's own and names its place. Canvas: instructure/canvas-lms, `lib/content_zipper.rb` (submissions),
`lib/gradebook_exporter.rb` (gradebook). Moodle: moodle/moodle, `mod/assign/classes/downloader.php` and, before 4.1,
`mod/assign/locallib.php` (submissions), `mod/assign/gradingtable.php` (worksheet), `lib/moodlelib.php` (names).

A student's work says `part <letter> = <points>` in each of its files, so what was dropped is missing from the sum.
"""

import csv
import html
import io
import json
import random
import re
import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

TOTAL = 20  # points of the assignment
TITLE = "Homework 5"
_GIVEN = (
    *("Ada", "Bo", "Chloé", "Dörte", "Émile", "Fatima", "Grace", "Hüseyin", "Íris", "Jordan", "Kwame", "Łucja", "Mia"),
    *("Ngọc", "Olu", "Priya", "Quynh", "Rosa", "Søren", "Tomáš", "Uma", "Václav", "Wei", "Ximena", "Yusuf", "Zoë"),
    *("Ann-Marie", "Jean Luc", "May", "Will", "Юлия", "美咲", "محمد", "Αλέξης"),
)
_FAMILY = (
    *("Aldertree", "Birkenau", "Castellan", "D'Autry", "Eichwald", "Fairweather", "Goldfinch", "Hawthorne", "Ibárruri"),
    *(
        "Jökulsson",
        "Kestrelman",
        "Lindqvist",
        "Maplewick",
        "Nightingale",
        "O'Quill",
        "Pemberton",
        "Quarrington",
        "Rosefield",
    ),
    *("Silverbrook", "Thornbury", "Underhill", "Vasilyeva", "Whitlock", "Żółw", "van der Berg", "de la Cruz", "Smith"),
    *("Long", "Young", "Li", "Ek", "Иванова", "田中", "حسين", "Παπαδοπούλου"),
)
_HOSTILE = ("=cmd|calc", "O_Brien_42_Kay", "<b>Bold</b>", "Null", "N/A", "007", 'Quo"te', "Semi;Colon", "Pipe|Line")

Product = Literal["canvas", "moodle"]


@dataclass(frozen=True, slots=True)
class Person:
    """One row of the LMS's own list."""

    number: int  # Canvas's user id, or Moodle's participant number
    given: str
    family: str
    group: str = ""
    section: str = "BA-101 01"

    @property
    def sortable(self) -> str:
        """As Canvas's gradebook has it (`User#sortable_name`)."""
        return f"{self.family}, {self.given}"

    @property
    def full(self) -> str:
        """As Moodle writes it (`fullname`)."""
        return f"{self.given} {self.family}"


@dataclass(slots=True)
class MadeClass:
    """What an instructor downloads, and what must come of it."""

    product: Product
    files: dict[str, bytes] = field(default_factory=dict)  # the zip of submissions
    roster: bytes = b""  # gradebook or worksheet
    groups: bytes = b""  # Canvas's groups CSV; empty without a group set
    participants: bytes = b""  # Moodle's list of participants, where marking is blind; else empty
    people: list[Person] = field(default_factory=list)
    points: dict[int, int] = field(default_factory=dict)  # by number, of those who have to get a grade
    blank: set[int] = field(default_factory=set)  # must stay blank: nothing handed in, a link only
    ambiguous: dict[int, int] = field(default_factory=dict)  # right points or a blank; a person has to be asked
    is_ambiguous: bool = False  # a person has to be asked whose some work is
    names: set[str] = field(default_factory=set)  # that no prompt may hold
    traits: set[str] = field(default_factory=set)  # what is special, for the table of failures

    def zipped(self) -> bytes:
        """The submissions as one zip."""
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, data in self.files.items():
                archive.writestr(path, data)
        return target.getvalue()


# --- how the two products write names


def canvas_user(sortable: str) -> str:
    """`ContentZipper#sanitize_user_name`: a number between underscores loses them; small letters."""
    return re.sub(r"_(\d+)_", r"\1", sortable).lower()


def canvas_prefix(sortable: str | None, late: bool, number: str) -> str:
    """`ContentZipper#get_filename` with `sanitize_file_name`: letters, digits and underscores stay, of any script."""
    joined = "_".join(part for part in (sortable and canvas_user(sortable), "LATE" if late else "", number) if part)
    return "".join(char for char in joined if char == "_" or char.isalnum() or unicodedata.category(char)[0] == "M")


def canvas_file(prefix: str, attachment: int, name: str) -> str:
    """`ContentZipper#add_upload_submission` with `sanitize_attachment_filename`."""
    return f"{prefix}_{attachment}_" + re.sub(r'[\x00/\\:*?"<>|]+', "_", name)


def moodle_clean(name: str) -> str:
    """`clean_filename`, which is `clean_param(…, PARAM_FILE)` in `lib/moodlelib.php`."""
    return re.sub(r"[\x00-\x1f\x7f]|[&<>\"`|':\\/]", "", name)


def moodle_prefix(name: str, number: int | None) -> str:
    """`downloader::get_student_prefix`: underscores of the name become spaces; a default team has no number."""
    shown = name.replace("_", " ")
    return moodle_clean(shown if number is None else f"{shown}_{number}")


# --- a class


def make_class(seed: int, size: int | None = None) -> MadeClass:
    """One random class; of the same seed the same. `size`: people; 3 to 8 if not given."""
    rng = random.Random(f"doors {seed}")
    made = MadeClass("canvas")
    while not made.files:  # of a class in which nobody has handed in there is no download
        product: Product = rng.choice(("canvas", "moodle"))
        made = MadeClass(product)
        made.people = _people(rng, size or rng.randint(3, 8), made.traits)
        (_canvas if product == "canvas" else _moodle)(rng, made)
    return made


def _people(rng: random.Random, count: int, traits: set[str]) -> list[Person]:
    first = rng.randint(10_000, 80_000)
    # Close numbers: a group's id may well be somebody else's participant number.
    numbers = rng.sample(range(first, first + 3 * count + 5), count)
    people = [Person(number, rng.choice(_GIVEN), rng.choice(_FAMILY)) for number in numbers]
    if rng.random() < 0.1:
        people[0] = Person(numbers[0], people[0].given, rng.choice(_HOSTILE))
        traits.add("hostile name")
    if rng.random() < 0.1 and count > 1:
        people[1] = Person(numbers[1], people[0].given, people[0].family)
    if len({person.full for person in people}) < count:
        traits.add("two of one name")
    return sorted(people, key=lambda person: (person.family, person.given))


class _Work:
    """One submission's files, and the points that they add up to."""

    def __init__(self, rng: random.Random, authors: Sequence[Person], classmates: Sequence[Person]) -> None:
        self._rng = rng
        self._authors = authors
        self._classmates = classmates
        self.points = 0
        self._letters = iter("abcdefgh")
        self._first = rng.randint(1, 9)

    def text(self, remark: str = "") -> str:
        """Text with its part of the points, and now and then a name in it."""
        # The first part gives most of the points: a class that is low on everything would raise an alarm of its own.
        part = self._rng.randint(0, 2) if self.points else self._rng.randint(8, 14)
        self.points += part
        mention = self._rng.random()
        by = self._rng.choice(self._authors)
        line = remark
        if mention < 0.25:
            line = f"Author: {by.full}"
        elif mention < 0.35 and self._classmates:
            line = f"I discussed this with {self._rng.choice(self._classmates).full}."
        return (
            f"{line}\npart {next(self._letters)} = {part}\nThe mean of the sample is {self._rng.uniform(1, 99):.5f}.\n"
        )

    def file(self, kind: str) -> bytes:
        """A file of this kind."""
        text = self.text()
        if kind == "ipynb":
            cells = [{"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}]
            return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()
        commented = "".join(f"# {line}\n" for line in text.splitlines()) if kind in ("R", "py") else text
        return f"{commented}x <- 1\n".encode() if kind == "R" else commented.encode()

    def names(self, count: int) -> list[str]:
        """File names as students choose them, with an author's name in some."""
        stems = ["hw5", "analysis", "problem1", "q1", "helper", "report"]
        self._rng.shuffle(stems)
        kinds = [self._rng.choice(("ipynb", "R", "Rmd", "py", "md", "txt")) for _ in range(count)]
        author = self._rng.choice(self._authors)
        named = [f"{stem} {author.full}" if self._rng.random() < 0.2 else stem for stem in stems]
        return [f"{stem}.{kind}" for stem, kind in zip(named, kinds, strict=False)]


def _hand_in(made: MadeClass, authors: Sequence[Person], points: int, is_ambiguous: bool = False) -> None:
    for person in authors:
        (made.ambiguous if is_ambiguous else made.points)[person.number] = points


# --- Canvas


def _canvas(rng: random.Random, made: MadeClass) -> None:
    kind = rng.choices(("named", "anonymous", "groups"), (6, 2, 2))[0]
    made.traits.add(f"canvas {kind}")
    attachment = rng.randint(1, 900_000)
    if kind == "groups":
        names = rng.sample(("Group 1", "Group 2", "Team Mocha", "Les Éclairs", "Team_7_B"), 3)
        made.people = [_with(person, group=rng.choice([*names, ""])) for person in made.people]
        made.groups = _canvas_groups(made.people)
    units = _units(made.people)
    for label, authors in units:
        # Somebody hands in: of an assignment without submissions there is nothing to download.
        if rng.random() < 0.15 and (made.files or authors is not units[-1][1]):
            made.blank |= {person.number for person in authors}
            continue
        late = rng.random() < 0.2
        # `zip_assignment`: of a group its representative's id, and the group's name (`get_user_name`).
        representative = rng.choice(authors)
        renamed = kind == "named" and rng.random() < 0.02
        shown = label or representative.sortable
        if renamed:
            shown = f"Newlywed, {representative.given}"
            made.names.add(f"{representative.given} Newlywed")
            made.traits.add("renamed")
        prefix = canvas_prefix(None if kind == "anonymous" else shown, late, str(representative.number))
        if kind == "anonymous":
            token = "".join(rng.choices("ABCDEFGHJKmnpqrstuvwxyz23456789", k=5))
            prefix = canvas_prefix(None, late, f"anon_{token}")
        work = _Work(rng, authors, [person for person in made.people if person not in authors])
        form = rng.random()
        if form < 0.08:  # `add_text_or_url(:url)` with `redirect_page.html.erb`: a page that leads elsewhere
            redirect = f'<meta http-equiv="Refresh" content="0; url=https://example.org/{rng.random()}">'
            page = _canvas_page(representative, "Click Here to go to the submission", redirect)
            made.files[f"{prefix}_link.html"] = page
            made.traits.add("link")
            made.is_ambiguous |= renamed
            made.blank |= {person.number for person in authors}
            continue
        if form < 0.2:  # `add_text_or_url(:text)` with `text_entry_page.html.erb`
            text = f"<p>{html.escape(work.text())}</p>"
            page = _canvas_page(representative, f'<div style="width: 600px; padding: 20px;">\n  {text}\n</div>')
            made.files[f"{prefix}_text.html"] = page
        else:
            for name in work.names(rng.choice((1, 1, 1, 2, 3))):
                attachment += rng.randint(1, 50)
                stem, _, suffix = name.rpartition(".")
                shown_name = f"{stem}-1.{suffix}" if rng.random() < 0.15 else name  # handed in again: Canvas numbers it
                made.files[canvas_file(prefix, attachment, shown_name)] = work.file(suffix)
        if kind == "anonymous":  # nothing says whose it is
            made.is_ambiguous = True
            made.blank |= {person.number for person in authors}
        else:
            _hand_in(made, authors, work.points, is_ambiguous=renamed)
    made.names |= {name for person in made.people for name in (person.full, person.sortable)}
    made.roster = _gradebook(rng, made)


def _canvas_page(author: Person, body: str, meta: str = "") -> bytes:
    """What both pages have (`app/views/assignments`): the author's name twice, unescaped, of anonymous work, too."""
    heading = f"{TITLE}: {author.full}"
    head = f'<meta http-equiv="Content-Type" content="text/html;charset=utf-8" />\n  {meta}\n<title>{heading}</title>'
    return f"<html>\n<head>\n  {head}\n</head>\n<body>\n<h1>{heading}</h1>\n{body}\n</body>\n</html>".encode()


def _units(people: Sequence[Person]) -> list[tuple[str, list[Person]]]:
    """Who hands in together, with the group's name."""
    groups = sorted({person.group for person in people} - {""})
    together = [(group, [person for person in people if person.group == group]) for group in groups]
    return together + [("", [person]) for person in people if not person.group]


def _with(person: Person, group: str) -> Person:
    return Person(person.number, person.given, person.family, group, person.section)


def _canvas_groups(people: Sequence[Person]) -> bytes:
    """The columns of Canvas's own groups CSV (People, the group set, Export; `lib/group_category/csv_exporter`)."""
    rows = [["name", "canvas_user_id", "user_id", "login_id", "sections", "group_name", "canvas_group_id", "group_id"]]
    rows += [
        [
            person.full,
            str(person.number),
            "",
            f"u{person.number}",
            person.section,
            person.group,
            "9" if person.group else "",
            "",
        ]
        for person in people
    ]
    return _csv(rows, ",", False)


def _gradebook(rng: random.Random, made: MadeClass) -> bytes:
    """`GradebookExporter#csv_data`: header, an optional row of manual posting, Points Possible, then the students."""
    with_sis, by_parts = rng.random() < 0.5, False
    first = ["LastName", "FirstName"] if by_parts else ["Student"]
    facts = [*first, "ID", *(["SIS User ID"] if with_sis else []), "SIS Login ID", "Section"]
    header = [*facts, f"{TITLE} (5502)", "Quiz (5503)", "Current Score", "Unposted Current Score", "Final Score"]
    rows = [header]
    if rng.random() < 0.3:
        rows.append(["" for _ in facts] + ["Manual Posting", "", "", "", ""])
        made.traits.add("manual posting")
    rows.append(["    Points Possible", *["" for _ in facts[1:]], f"{TOTAL}.00", "5.00", *["(read only)"] * 3])
    excel = rng.random()
    for person in made.people:
        number = str(person.number)
        if excel < 0.05:
            number = f"{number}.0"
        elif excel < 0.1:
            number = f"{person.number:.{len(number) - 1}E}"  # as a spreadsheet saves it when the column is narrow
        # `student_name`: a name that begins with = is quoted against formulas.
        name = f'="{person.sortable}"' if person.sortable.lstrip().startswith("=") else person.sortable
        sis = [f"S{person.number}"] if with_sis else []
        rows.append([name, number, *sis, f"u{person.number}", person.section, "", "4.00", "80", "80", "80"])
    if excel < 0.1:
        made.traits.add("ids from a spreadsheet")
    rows.append(
        [
            "Student, Test",
            str(made.people[-1].number + 900_000),
            *([""] if with_sis else []),
            "f00",
            "",
            "",
            "",
            "",
            "",
            "",
        ]
    )
    # The separator and the byte-order mark follow the user's settings (`CSVWithI18n.csv_i18n_settings`).
    return _csv(rows, rng.choice((",", ",", ";")), rng.random() < 0.3)


# --- Moodle


def _moodle(rng: random.Random, made: MadeClass) -> None:
    kind = rng.choices(("named", "blind", "teams"), (6, 2, 3))[0]
    made.traits.add(f"moodle {kind}")
    in_folders = rng.random() < 0.6  # the user's preference `assign_downloadasfolders`
    ending = rng.choice(("", "_"))  # releases before 4.1 end a folder's name with an underscore
    made.traits.add("folders" if in_folders else "flat")
    group_numbers = _make_teams(rng, made) if kind == "teams" else {}
    units = _units(made.people) if kind != "teams" else _teams(made.people)
    for label, authors in units:
        # Somebody hands in: of an assignment without submissions there is nothing to download.
        if rng.random() < 0.15 and (made.files or authors is not units[-1][1]):
            made.blank |= {person.number for person in authors}
            continue
        person = authors[0]
        renamed = kind == "named" and rng.random() < 0.02
        if kind == "teams":
            prefix = moodle_prefix(label or "Default group", group_numbers[label])
        elif kind == "blind":
            prefix = moodle_prefix("Participant", person.number)
        else:
            shown = f"{person.given} Newlywed" if renamed else person.full
            prefix = moodle_prefix(shown, person.number)
            if renamed:
                made.names.add(shown)
                made.traits.add("renamed")
        work = _Work(rng, authors, [each for each in made.people if each not in authors])
        plugins = rng.choice((("file",), ("file",), ("file",), ("onlinetext",), ("file", "onlinetext")))
        for plugin in plugins:
            names = work.names(rng.choice((1, 1, 2, 3))) if plugin == "file" else ["onlinetext.html"]
            for name in names:
                suffix = name.rpartition(".")[2]
                data = _online_text(work.text()) if plugin == "onlinetext" else work.file(suffix)
                inner = rng.choice(("", "", "code/")) if plugin == "file" else ""
                path = (
                    f"{moodle_clean(f'{prefix}_assignsubmission_{plugin}')}{ending}/{inner}{_moodle_path(name)}"
                    if in_folders
                    else moodle_clean(f"{prefix}_assignsubmission_{plugin}_{name}")
                )
                if path in made.files:  # Moodle would overwrite it: `filesforzipping` is keyed by path
                    continue
                made.files[path] = data
        _hand_in(made, authors, work.points, is_ambiguous=renamed)
    made.names |= {name for each in made.people for name in (each.full, each.sortable)}
    made.roster = _worksheet(rng, made, is_blind=kind == "blind", with_groups=kind == "teams")
    if kind == "blind":  # `user/table/participants.php`, downloaded: names, and no participant's number
        rows = [["First name", "Last name", "Email address"]]
        rows += [[each.given, each.family, f"u{each.number}@example.edu"] for each in made.people]
        made.participants = _csv(rows, ",", True)


def _make_teams(rng: random.Random, made: MadeClass) -> dict[str, int | None]:
    """Put people into teams; each team's id, which may equal somebody's participant number: they count other things."""
    names = rng.sample(("Team Espresso", "Team Mocha", "Group_7", "Équipe D'Or", "Gruppe 1 & 2"), 3)
    made.people = [_with(person, group=rng.choice([*names, ""])) for person in made.people]
    numbers = rng.sample([*(person.number for person in made.people), *range(90_000, 90_003)], len(names))
    return {"": None, **dict(zip(names, numbers, strict=True))}


def _online_text(text: str) -> bytes:
    """`assign_submission_onlinetext::get_files` (`mod/assign/submission/onlinetext/locallib.php`)."""
    head = '<!DOCTYPE html><html><head><meta charset="UTF-8"></head>'
    return f"{head}<body>{html.escape(text)}</body></html>".encode()


def _teams(people: Sequence[Person]) -> list[tuple[str, list[Person]]]:
    """Those without a group are together in the default team (`get_submission_group`)."""
    groups = sorted({person.group for person in people})
    return [(group, [person for person in people if person.group == group]) for group in groups]


def _moodle_path(name: str) -> str:
    """`clean_param(…, PARAM_PATH)`: each element as a file's name."""
    return "/".join(moodle_clean(part) for part in name.split("/"))


def _worksheet(rng: random.Random, made: MadeClass, is_blind: bool, with_groups: bool) -> bytes:
    """`assign_grading_table::__construct`, its columns when downloading."""
    header = ["Identifier"]
    header += [] if is_blind else ["Full name", "Email address"]
    header += ["Status", *(["Group"] if with_groups else []), "Grade", "Maximum grade", "Grade can be changed"]
    header += ["Last modified (submission)", "Last modified (grade)", "Feedback comments"]
    delimiter = rng.choice((",", ",", ";"))
    maximum = f"{TOTAL},00" if delimiter == ";" else f"{TOTAL}.00"
    rows = [header]
    locked_share = 0.1 if rng.random() < 0.2 else 0.0
    for person in made.people:
        # A name that a spreadsheet would take for a formula is written as it is: Moodle escapes nothing here.
        who = [] if is_blind else [person.full, f"u{person.number}@example.edu"]
        group = [person.group or "Default group"] if with_groups else []
        is_locked = rng.random() < locked_share
        if is_locked:  # graded in the gradebook: Moodle takes nothing for this row
            made.traits.add("locked row")
            made.is_ambiguous |= person.number in made.ambiguous
            made.points.pop(person.number, None)
            made.ambiguous.pop(person.number, None)
            made.blank.add(person.number)
        status = "No submission" if person.number in made.blank and not is_locked else "Submitted for grading"
        when = "-" if status == "No submission" else "Monday, 2 November 2026, 11:00 PM"
        rows.append(
            [
                f"Participant {person.number}",
                *who,
                status,
                *group,
                "",
                maximum,
                "No" if is_locked else "Yes",
                when,
                "-",
                "",
            ]
        )
    return _csv(rows, delimiter, rng.random() < 0.3)


def _csv(rows: Sequence[Sequence[str]], delimiter: str, bom: bool) -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return (b"\xef\xbb\xbf" if bom else b"") + text.getvalue().encode()
