"""A format is one file and its registration: the command, the desk and the page of documentation follow from it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from grading.export import DESK_FORMATS, FORMATS, Choices, ExportFormat
from grading.points import CriterionGrade, Grade
from grading.report.grades import GradedClass, save_graded
from producers.batch.batch import Batch
from producers.storage.private import kept_in
from tests.support.processes import ROOT

GRADEBOOK = b"Student,ID,SIS User ID,SIS Login ID,Section,A (1),B (2)\n    Points Possible,,,,,5,5\n"

TOY = '''
"""A line for each student."""

from grading.export.final import ExportFile, final_grades, left_blank
from grading.export.format import ExportFormat, ExportOption


def export_lines(folder, *, include_unreviewed=False, greeting="", is_loud=False, sign=".", list_file=None):
    _, grades = final_grades(folder, include_unreviewed)
    lines = [f"{greeting}, {final.submission}: {final.points}{sign}" for final in grades]
    text = "\\n".join([*lines, (list_file or b"").decode()])
    return ExportFile("lines.txt", "text/plain", (text.upper() if is_loud else text).encode(), left_blank(grades))


FORMAT = ExportFormat(
    "lines",
    "Lines of text",
    "A line for each student.",
    ("lines.txt",),
    export_lines,
    (
        ExportOption("--greeting", "text", "lines: how each begins.", metavar="WORD"),
        ExportOption("--loud", "flag", "lines: in capitals.", "is_loud"),
        ExportOption("--sign", "choice", "lines: how each ends.", choices=("!", "?")),
        ExportOption("--list", "file", "lines: what comes last.", "list_file"),
    ),
)
'''

AS_THE_DESK_DOES = """
import json, sys
from pathlib import Path
from grading.export import DESK_FORMATS

class Form:
    def file(self, label): return b"from the desk"
    def text(self, label): return label.upper()
    def flag(self, label): return False
    def one_of(self, label, choices): return choices[-1]

(lines,) = [each for each in DESK_FORMATS if each.title == "Lines of text"]
choices = lines.choices_from(Form(), ())
print(lines.make(Path(sys.argv[1]), include_unreviewed=False, **choices).data.decode())
"""


def graded_class(folder: Path) -> Path:
    """Ada has 3 of 5 points."""
    with Batch(folder) as batch:
        batch.plan([], {})
    works = CriterionGrade("works", "It runs", 5, 3, feedback="Fine.")
    save_graded(folder, GradedClass("b", "Means", 5, (Grade("ada.py", "graded", 3, 5, (works,), item_id="i1"),)))
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The room `grading` with one more format in it, added as CONTRIBUTING.md says: a module, and its registration."""
    shutil.copytree(ROOT / "grading", tmp_path / "grading", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "grading/export"
    (folder / "lines.py").write_text(TOY, "utf-8")
    registry = (folder / "__init__.py").read_text("utf-8")
    for before, after in (
        ("from grading.export import canvas, feedback,", "from grading.export import canvas, feedback, lines,"),
        ("    feedback.FORMAT,\n", "    feedback.FORMAT,\n    lines.FORMAT,\n"),
    ):
        assert registry.count(before) == 1
        registry = registry.replace(before, after)
    (folder / "__init__.py").write_text(registry, "utf-8")
    return tmp_path


def run(scratch: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=scratch,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(scratch), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_format_works_in_the_command_with_its_options(scratch: Path) -> None:
    out = graded_class(scratch / "out")
    (scratch / "end.txt").write_text("the end")
    options = ("--greeting", "hello", "--loud", "--sign", "!", "--list", "end.txt")

    said = run(scratch, "-m", "kvasir", "export", "out", "--format", "lines", *options)

    assert (out / "lines.txt").read_text() == "HELLO, ADA.PY: 3!\nTHE END"
    assert "Written: out/lines.txt" in said
    assert [json.loads(line)["kind"] for line in (out / "exports.jsonl").read_text().splitlines()] == ["lines"]
    assert "lines: how each begins." in run(scratch, "-m", "kvasir", "export", "--help")

    run(scratch, "-m", "kvasir", "export", "out", "--format", "lines", "--to", "again.txt")
    assert (scratch / "again.txt").read_text() == ", ada.py: 3.\n", "what is not given is as the function says"


def test_a_new_format_is_on_the_desk_and_is_asked_for_its_options(scratch: Path) -> None:
    graded_class(scratch / "out")

    made = run(scratch, "-c", AS_THE_DESK_DOES, "out")

    assert made == "LINES: HOW EACH BEGINS., ada.py: 3?\nfrom the desk\n"


# --- those that there are


class FilledIn:
    """A form in which the uploads are given, and of everything else what is there at first."""

    def __init__(self, upload: bytes | None) -> None:
        self.upload = upload

    def file(self, label: str) -> bytes | None:
        return self.upload

    def text(self, label: str) -> str:
        return "Homework 4 (1234)"

    def flag(self, label: str) -> bool:
        return True

    def one_of(self, label: str, choices: Sequence[str]) -> str:
        return choices[0]

    def column(self, label: str, columns: Sequence[str], suggestion: str | None) -> str | None:
        return suggestion


@pytest.mark.parametrize(
    ("title", "upload", "names", "choices"),
    [
        ("Table (CSV)", None, (), {}),
        ("Canvas gradebook", None, (), None),
        ("Canvas gradebook", GRADEBOOK, ("b",), {"gradebook": GRADEBOOK, "assignment": "B (2)", "scale": True}),
        ("Canvas gradebook", GRADEBOOK, ("a", "b"), None),  # nothing is chosen by its place
        ("Moodle worksheet", None, (), None),
        ("Moodle worksheet", b"w", (), {"worksheet": b"w"}),
        ("Moodle feedback files", None, (), {}),
        ("One feedback file for each student", None, (), {"kind": "html"}),
        ("Replies to requests for another look", None, (), {}),
    ],
)
def test_the_desk_asks_for_what_a_format_needs(
    title: str, upload: bytes | None, names: Sequence[str], choices: Choices | None
) -> None:
    (chosen,) = (each for each in DESK_FORMATS if each.title == title)

    assert chosen.choices_from(FilledIn(upload), names) == choices


def test_the_table_comes_first_on_the_desk_and_every_format_is_there() -> None:
    assert [each.name for each in DESK_FORMATS] == ["csv", "canvas", "moodle", "moodle-feedback", "feedback", "replies"]


def test_an_option_that_several_formats_have_is_the_same_in_all() -> None:
    options = [option for each in FORMATS for option in each.options]

    assert len(set(options)) == len({option.flag for option in options}) == len({option.name for option in options})


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_the_file_is_called_as_the_format_says(each: ExportFormat, tmp_path: Path) -> None:
    graded_class(tmp_path)
    needed: dict[str, Choices] = {
        "canvas": {"gradebook": GRADEBOOK, "assignment": "B"},
        "moodle": {"worksheet": b"Identifier,Grade,Last modified (grade)\n"},
    }
    kinds = [option.choices for option in each.options if option.name == "kind"]
    choices = [{"kind": kind} for kind in kinds[0]] if kinds else [needed.get(each.name, {})]

    made = {each.make(tmp_path, include_unreviewed=False, **chosen).name for chosen in choices}

    assert made == set(each.file_names)


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.name)
def test_what_a_format_writes_into_a_batchs_folder_is_forgotten_with_it(each: ExportFormat, tmp_path: Path) -> None:
    for name in each.file_names:
        (tmp_path / name).touch()
    assert {path.name for path in kept_in(tmp_path)} == set(each.file_names)
