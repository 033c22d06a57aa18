"""What leaves the house leaves it on purpose: the right column, no grade replaced unseen, no doubtful class unasked."""

import csv
import io
import json
import zipfile
from pathlib import Path

import pytest

from grading.export import ExportError
from grading.export.canvas import export_canvas
from grading.export.feedback import export_feedback
from grading.export.moodle import export_moodle
from grading.points import CriterionGrade, Grade
from grading.report.grades import GradedClass, load_graded, save_graded
from kvasir import cli
from producers.batch.batch import Batch
from tests.support import lms

NAMES = ["Ada", "Benno", "Cato", "Delphine", "Emil", "Frieda", "Gus"]
USERS = {str(48101 + number) for number in range(len(NAMES))}
ALARM = "nearly everybody is low on every criterion: is this the rubric and the solution of this assignment?"
KINDS = {
    "csv": [],
    "canvas": ["--gradebook", "gradebook.csv", "--assignment", "602"],
    "moodle": ["--worksheet", "worksheet.csv"],
    "moodle-feedback": [],
    "feedback": [],
}


def gradebook(*columns: str, grades: str = "", points: str = "5") -> bytes:
    """A downloaded gradebook with these columns; `grades` stand in the first of them."""
    rest = [","] * (len(columns) - 1)
    lines = [f"Student,ID,SIS User ID,SIS Login ID,Section,{','.join(columns)}"]
    lines.append("    Points Possible,,,,," + ",".join([points] * len(columns)))
    lines += [f'"Sample, {name}",{48101 + n},,,A,{grades}{"".join(rest)}' for n, name in enumerate(NAMES)]
    return "\n".join(lines).encode() + b"\n"


def worksheet(grade: str) -> bytes:
    header = "Identifier,Full name,Grade,Maximum grade,Last modified (grade),Feedback comments"
    rows = [f"Participant {n},{name} Sample,{grade},5.00,-," for n, name in enumerate(NAMES, 1)]
    return "\n".join([header, *rows, ""]).encode()


def homework_6(folder: Path, *alarms: str, moodle: bool = False) -> Path:
    """A class that is called Homework 6, everybody with 3 of 5 points."""
    with Batch(folder):
        pass
    with Batch(folder) as batch:
        batch.plan([], {})
    done = (CriterionGrade("works", "It runs", 5, 3, feedback="Fine."),)
    names = [
        f"{name} Sample_{n + 1}_assignsubmission_file_" if moodle else f"sample{name.lower()}_{48101 + n}_9{n}_hw.py"
        for n, name in enumerate(NAMES)
    ]
    grades = tuple(Grade(name, "graded", 3, 5, done, item_id=f"i{n}") for n, name in enumerate(names))
    save_graded(folder, GradedClass("b", "Homework 6", 5, grades, alarms=alarms))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def export(capsys: pytest.CaptureFixture[str], kind: str, *more: str) -> tuple[int, str]:
    """Its exit code, and all that it says."""
    capsys.readouterr()
    code = cli.run_command(["export", "out", "--format", kind, "--to", "made", *more])
    return code, "".join(capsys.readouterr())


# --- the column


def test_grades_of_another_assignment_are_replaced_only_after_their_first_five_were_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    homework_6(Path("out"))
    Path("gradebook.csv").write_bytes(gradebook("Homework 5 (601)", "Homework 6 (602)", grades="4.5"))
    into_5 = ("--gradebook", "gradebook.csv", "--assignment", "Homework 5")

    code, said = export(capsys, "canvas", *into_5)

    assert code == cli.EXIT_USAGE
    assert not Path("made").exists()
    assert said.count("4.5 → 3") == 5
    assert "Sample, Ada: 4.5 → 3" in said
    assert "Sample, Gus" not in said
    assert "and 2 more" in said
    assert "'Homework 5 (601)' holds grades" in said
    assert "--yes" in said

    assert export(capsys, "canvas", *into_5, "--yes")[0] == 0
    assert set(lms.canvas_import(Path("made").read_bytes(), {"601"}, USERS).grades["601"].values()) == {3.0}


@pytest.mark.parametrize("before", ["3", "3.0", "3.00", ""])
def test_grades_that_stay_as_they_are_ask_nothing(capsys: pytest.CaptureFixture[str], before: str) -> None:
    homework_6(Path("out"))
    Path("gradebook.csv").write_bytes(gradebook("Homework 6 (602)", grades=before))

    code, _ = export(capsys, "canvas", "--gradebook", "gradebook.csv", "--assignment", "602")

    assert code == 0
    assert set(lms.canvas_import(Path("made").read_bytes(), {"602"}, USERS).grades["602"].values()) == {3.0}


@pytest.mark.parametrize(
    ("columns", "assignment"),
    [
        (("Homework 5 (601)",), ""),  # the only one, but another
        (("Homework 5 (601)", "Homework 6 (602)"), ""),
        (("Homework 6 (601)", "Homework 6 (602)"), ""),
        (("Homework 6 (601)", "Homework 6 (602)"), "Homework 6"),
        (("Homework 6 (602)", "Homework 6 (602)"), "602"),  # the same column twice
        (("Homework 5 (601)", "Homework 6 (602)"), "Homework 7"),
        (("Homework 5 (601)", "Final Score (read only)"), "Final Score (read only)"),
        (("Homework 60 (601)", "Homework 6.5 (602)"), "Homework 6"),
    ],
)
def test_a_column_that_is_not_named_by_exactly_one_is_asked_for(
    capsys: pytest.CaptureFixture[str], columns: tuple[str, ...], assignment: str
) -> None:
    homework_6(Path("out"))
    Path("gradebook.csv").write_bytes(gradebook(*columns))

    code, said = export(capsys, "canvas", "--gradebook", "gradebook.csv", "--assignment", assignment, "--yes")

    assert code == cli.EXIT_USAGE
    assert not Path("made").exists()
    [sentence] = [line for line in said.splitlines() if line.startswith("kvasir: ")]
    assert "--assignment" in sentence
    assert all(column in sentence for column in columns if "read only" not in column)


@pytest.mark.parametrize("name", ["Homework 6", "homework  6", "HOMEWORK-6", "Homework: 6", "602", "Homework 6 (602)"])
def test_a_title_is_met_whatever_its_blanks_case_and_punctuation(tmp_path: Path, name: str) -> None:
    homework_6(tmp_path / "out")
    book = gradebook("Homework 5 (601)", "Homework 6 (602)")

    found = lms.canvas_import(export_canvas(tmp_path / "out", book, name).data, {"602"}, USERS)

    assert set(found.grades) == {"602"}


def test_the_only_column_is_taken_if_it_is_called_like_the_class(tmp_path: Path) -> None:
    homework_6(tmp_path / "out")

    made = export_canvas(tmp_path / "out", gradebook("homework 6 (602)"), "")

    assert set(lms.canvas_import(made.data, {"602"}, USERS).grades) == {"602"}


@pytest.mark.parametrize("points", ["1" + "0" * 40, "0", "1e40", "NaN", "inf", "-5"])
@pytest.mark.parametrize("scale", [True, False])
def test_points_possible_that_cannot_be_are_refused(tmp_path: Path, points: str, scale: bool) -> None:
    homework_6(tmp_path / "out")

    with pytest.raises(ExportError, match="Canvas gives this assignment"):
        export_canvas(tmp_path / "out", gradebook("Homework 6 (602)", points=points), "602", scale=scale)


def test_a_worksheet_with_grades_in_it_asks_too(capsys: pytest.CaptureFixture[str]) -> None:
    homework_6(Path("out"), moodle=True)
    Path("worksheet.csv").write_bytes(worksheet("4.00"))

    code, said = export(capsys, "moodle", "--worksheet", "worksheet.csv")

    assert code == cli.EXIT_USAGE
    assert not Path("made").exists()
    assert "Ada Sample: 4.00 → 3" in said
    assert export(capsys, "moodle", "--worksheet", "worksheet.csv", "--yes")[0] == 0
    Path("made").unlink()
    for before in ("3.00", "-", ""):
        Path("worksheet.csv").write_bytes(worksheet(before))
        assert export(capsys, "moodle", "--worksheet", "worksheet.csv")[0] == 0


# --- a class that raised an alarm


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_with_an_alarm_leaves_the_house_only_with_yes(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    homework_6(Path("out"), ALARM, moodle="moodle" in kind)
    Path("gradebook.csv").write_bytes(gradebook("Homework 5 (601)", "Homework 6 (602)"))
    Path("worksheet.csv").write_bytes(worksheet("-"))

    code, said = export(capsys, kind, *KINDS[kind])

    assert code == cli.EXIT_USAGE
    assert not Path("made").exists()
    assert ALARM in said
    assert "--yes" in said
    assert export(capsys, kind, *KINDS[kind], "--yes")[0] == 0
    assert Path("made").stat().st_size > 100


def test_grades_of_a_time_before_alarms_are_read(tmp_path: Path) -> None:
    homework_6(tmp_path / "out")
    path = tmp_path / "out" / "grades.json"
    kept = json.loads(path.read_text("utf-8"))
    del kept["alarms"]
    path.write_text(json.dumps(kept), "utf-8")

    assert load_graded(tmp_path / "out").alarms == ()
    assert len(load_graded(tmp_path / "out").grades) == len(NAMES)


# --- names


def test_files_for_students_are_called_so_that_they_unpack(tmp_path: Path) -> None:
    out = homework_6(tmp_path / "out")
    kept = load_graded(out)
    long = Grade("明" * 300 + ".py", "graded", 3, 5, kept.grades[0].criteria)
    save_graded(out, GradedClass("b", "t" * 200, 5, (long, *kept.grades)))

    with zipfile.ZipFile(io.BytesIO(export_feedback(out).data)) as archive:
        assert max(len(name.encode()) for name in archive.namelist()) <= 255
        archive.extractall(tmp_path / "unpacked")


def test_an_export_to_a_name_of_300_characters_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    homework_6(Path("out"))

    assert cli.run_command(["export", "out", "--format", "csv", "--to", "n" * 300]) == cli.EXIT_USAGE
    assert "File name too long; name another place with --to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("out/results.jsonl", "belongs to the batch"),
        ("out/grades.json", "belongs to the batch"),
        ("gradebook.csv", "is a source of this export"),
        ("notes.txt", "notes.txt holds something other than an export"),
    ],
)
def test_an_export_replaces_no_file_that_is_none_of_its_own(
    to: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    homework_6(Path("out"))
    Path("gradebook.csv").write_bytes(gradebook("Homework 6 (602)"))
    Path("notes.txt").write_text("Ask Gus about part b.\n")
    Path("out/results.jsonl").write_text("")
    before = Path(to).read_bytes()

    code = cli.run_command(["export", "out", "--format", "canvas", *KINDS["canvas"], "--to", to])

    assert code == cli.EXIT_USAGE
    assert why in capsys.readouterr().err
    assert Path(to).read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_replaces_an_earlier_one_of_its_kind(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    homework_6(Path("out"), moodle=kind.startswith("moodle"))
    Path("gradebook.csv").write_bytes(gradebook("Homework 6 (602)"))
    Path("worksheet.csv").write_bytes(worksheet("-"))
    for _ in range(2):
        code, said = export(capsys, kind, *KINDS[kind])
        assert code in (0, 1), said
        assert "Written: made" in said


def test_comments_that_are_left_as_they_are_say_the_same_to_students(tmp_path: Path) -> None:
    out = homework_6(tmp_path / "out", moodle=True)
    sheet = worksheet("-").replace(b"Participant 7,Gus Sample,-,5.00,-,", b"Participant 99,Gus,-,5.00,-,Well done ;-)")

    rows = list(csv.DictReader(io.StringIO(export_moodle(out, sheet).data.decode())))

    assert rows[-1]["Feedback comments"] == "Well done ;&#45;)"  # HTML, as Moodle takes it: no apostrophe is seen
