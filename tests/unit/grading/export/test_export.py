"""What leaves the house: files that Canvas and Moodle take, and a blank where there is no grade."""

import csv
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from grading.export import ExportError, ExportFile
from grading.export.canvas import assignment_columns, export_canvas
from grading.export.feedback import export_feedback
from grading.export.moodle import export_moodle
from grading.export.moodle_feedback import export_moodle_feedback
from grading.export.plain import export_csv
from grading.points import CriterionGrade, Doubt, Grade
from grading.report.grades import GradedClass, load_graded, save_graded
from grading.reviews import Override, append_override, read_overrides
from grading.roster import SAY_WHOSE
from grading.tables import two_decimals
from messages.errors import BatchError
from tests.support import lms

# As Canvas writes it: a manual-posting row, points possible, a test student without a grade.
GRADEBOOK = b"""\xef\xbb\xbfStudent,ID,SIS User ID,SIS Login ID,Section,Homework 3 (700),Homework 4 (701),\
Current Score (read only)
,,,,,,Manual Posting,
    Points Possible,,,,,10,6,(read only)
"Brookside, Benno",48102,b1,benno,Course A,9.5,,95
"Cloverfield, Cato",48103,c1,cato,Course A,8,3,80
"Dewhurst, Delphine",48104,-d1,=delphine,Course A and Course B,7,EX,70
"Fairweather, Ada",48101,f1,ada,Course A,10,,100
"Nobody, Nora",48199,n1,nora,Course A,,,
"Student, Test",48200,,abc,Course A,,,
"""
SEMICOLONS = b"""Student;ID;SIS User ID;SIS Login ID;Section;Homework 4 (701)
    Points Possible;;;;;6
"Brookside, Benno";48102;b1;benno;A;1,5
"Cloverfield, Cato";48103;c1;cato;A;
"""
WORKSHEET = b"""Identifier,Full name,Email address,Status,Grade,Maximum Grade,Grade can be changed,\
Last modified (submission),Last modified (grade),Feedback comments
Participant 11,Benno Brookside,b@example.org,Submitted for grading,,6.00,Yes,"Monday, 3 November",-,
Participant 12,Cato Cloverfield,c@example.org,Submitted for grading,2.00,6.00,Yes,"Monday, 3 November","Tuesday",old
Participant 13,Delphine Dewhurst,d@example.org,Submitted for grading,,6.00,No,"Monday, 3 November",-,
Participant 14,Nora Nobody,n@example.org,No submission,,6.00,Yes,-,-,
"""
USERS = {"48101", "48102", "48103", "48104", "48199", "48200"}


def criterion(id: str, points: float | None, maximum: int, **more: object) -> CriterionGrade:
    fields = {"evidence": f"code of {id}", "evidence_state": "found", "feedback": f"Right about {id}."}
    return CriterionGrade(id, f"Title of {id}", maximum, points, **{**fields, **more})  # type: ignore[arg-type]


def grade(name: str, loops: float | None = 2, words: float | None = 3.5, **more: object) -> Grade:
    criteria = (criterion("loops", loops, 2), criterion("words", words, 4))
    whole = loops is not None and words is not None
    fields = {"state": "graded" if whole else "incomplete", "reason": "" if whole else "no points for words: late"}
    total = (loops or 0) + (words or 0) if whole else None
    made = Grade(name, fields["state"], total, 6, criteria, "Keep on.", reason=fields["reason"])  # type: ignore[arg-type]
    return Grade(**{**{key: getattr(made, key) for key in Grade.__slots__}, "item_id": f"item-{name}", **more})  # type: ignore[arg-type]


CANVAS = {
    "whole": "brooksidebenno_48102_910002_homework4.ipynb",
    "doubtful": "cloverfieldcato_LATE_48103_910003_Untitled3.ipynb",
    "failed": "dewhurstdelphine_48104_910004_analysis.ipynb",
    "empty": "fairweatherada_48101_910001_sales.ipynb",
}
MOODLE = {
    "whole": "Benno Brookside_11_assignsubmission_file_",
    "doubtful": "Cato Cloverfield_12_assignsubmission_file_",
    "failed": "Delphine Dewhurst_13_assignsubmission_file_",
    "empty": "Nora Nobody_14_assignsubmission_file_",
}


def four_grades(names: dict[str, str]) -> list[Grade]:
    nothing = (criterion("loops", None, 2, feedback=""), criterion("words", None, 4, feedback=""))
    zero = (criterion("loops", 0, 2, feedback=""), criterion("words", 0, 4, feedback=""))
    return [
        grade(names["whole"]),
        grade(names["doubtful"], doubts=(Doubt("words", "words: evidence not found"),)),
        grade(names["failed"], state="failed", points=None, criteria=nothing, reason="not valid JSON"),
        grade(names["empty"], state="empty", points=0, criteria=zero, reason="nothing was handed in", summary=""),
    ]


def batch(folder: Path, grades: list[Grade]) -> Path:
    save_graded(folder, GradedClass("b", "Homework 4", 6, tuple(grades)))
    return folder


@pytest.fixture
def canvas(tmp_path: Path) -> Path:
    return batch(tmp_path, four_grades(CANVAS))


@pytest.fixture
def moodle(tmp_path: Path) -> Path:
    return batch(tmp_path, four_grades(MOODLE))


def reasons(made: ExportFile) -> dict[str, str]:
    return {blank.submission: blank.reason for blank in made.left_blank}


# --- what is final


def test_grades_survive_their_file(canvas: Path) -> None:
    assert load_graded(canvas).grades == tuple(four_grades(CANVAS))


def test_a_folder_without_grades_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="holds no batch"):
        load_graded(tmp_path)
    (tmp_path / "batch.json").touch()
    with pytest.raises(BatchError, match="kvasir results"):
        export_csv(tmp_path)


# --- Canvas


def test_canvas_takes_the_gradebook_back_with_blanks_for_what_is_not_settled(canvas: Path) -> None:
    made = export_canvas(canvas, GRADEBOOK, "701")

    found = lms.canvas_import(made.data, {"700", "701"}, USERS)
    assert found.grades == {"701": {"48102": 5.5, "48101": 0.0, "48103": 3.0}}  # Cato's is what Canvas had before
    assert found.points_possible == {"701": 6.0}
    assert found.excuses == {("701", "48104")}
    assert reasons(made) == {
        CANVAS["doubtful"]: "needs review: words: evidence not found",
        CANVAS["failed"]: "failed: not valid JSON",
    }


def test_other_assignments_are_left_out_unless_asked_for(canvas: Path) -> None:
    few = export_canvas(canvas, GRADEBOOK, "Homework 4").data
    many = export_canvas(canvas, GRADEBOOK, "Homework 4 (701)", all_columns=True).data

    assert lms.canvas_import(few, {"700", "701"}, USERS).grades.keys() == {"701"}
    assert lms.canvas_import(many, {"700", "701"}, USERS).grades["700"]["48102"] == 9.5
    assert b"(read only)" in many


def test_unreviewed_grades_go_out_only_when_that_is_said(canvas: Path) -> None:
    made = export_canvas(canvas, GRADEBOOK, "701", include_unreviewed=True)

    assert lms.canvas_import(made.data, {"701"}, USERS).grades["701"]["48103"] == 5.5
    assert list(reasons(made)) == [CANVAS["failed"]]
    assert made.asks == (
        "the column 'Homework 4 (701)' holds grades already, and 1 of them would change:",
        "Cloverfield, Cato: 3 → 5.5",
    )


def test_a_semicolon_file_keeps_its_decimal_commas(canvas: Path) -> None:
    made = export_canvas(canvas, SEMICOLONS, "")

    assert b'"48102";"b1";"benno";"A";"5,5"' in made.data
    assert lms.canvas_import(made.data, {"701"}, USERS).grades == {"701": {"48102": 5.5}}
    assert "not in the gradebook" in reasons(made)[CANVAS["empty"]]


def test_points_possible_must_be_the_rubrics_total_or_be_scaled_to(canvas: Path) -> None:
    hundred = GRADEBOOK.replace(b"10,6,(read only)", b"10,100,(read only)")

    with pytest.raises(
        ExportError, match=r"100 points, but the rubric adds up to 6.*let the export scale the points"
    ) as refused:
        export_canvas(canvas, hundred, "701")
    assert "--" not in str(refused.value), "the desk has no flags"
    made = export_canvas(canvas, hundred, "701", scale=True)

    assert lms.canvas_import(made.data, {"701"}, USERS).grades["701"]["48102"] == 91.67


def test_without_a_gradebook_nothing_says_whose_a_grade_is(canvas: Path) -> None:
    with pytest.raises(ExportError, match="export the gradebook from Canvas"):
        export_canvas(canvas, None, "Homework 4 (701)")


@pytest.mark.parametrize(
    ("gradebook", "assignment", "why"),
    [
        (b"", "701", "empty"),
        (b"Student,ID\n", "701", "lacks a column"),
        (b"Name,ID,Section,H (701)\n    Points Possible,,,6\n", "701", "lacks a column"),
        (b"Student,ID,Section,H (701)\nA,1,S,\n", "701", "no row 'Points Possible'"),
        (GRADEBOOK, "", "more than one assignment"),
        (GRADEBOOK, "702", "no assignment"),
        (GRADEBOOK, "Current Score", "no assignment"),
        (b"Student,ID\xff\n", "701", "not UTF-8"),
        (b'Student,"ID\n', "701", "read as CSV"),
    ],
)
def test_a_file_that_is_no_gradebook_is_refused(canvas: Path, gradebook: bytes, assignment: str, why: str) -> None:
    with pytest.raises(ExportError, match=why):
        export_canvas(canvas, gradebook, assignment)


def test_a_row_that_is_longer_than_the_header_is_refused_unless_only_blanks_follow(canvas: Path) -> None:
    unquoted = GRADEBOOK.replace(b'"Brookside, Benno"', b"Brookside, Benno").replace(b"9.5,,95", b"9.5,,95,")
    with pytest.raises(ExportError, match="the gradebook, row 4: there are more fields than in the header"):
        export_canvas(canvas, unquoted, "701")

    trailing = GRADEBOOK.replace(b"9.5,,95", b"9.5,,95, ,")
    assert export_canvas(canvas, trailing, "701").data == export_canvas(canvas, GRADEBOOK, "701").data


def test_an_assignment_that_nobody_named_is_not_called_something(canvas: Path) -> None:
    with pytest.raises(ExportError) as refused:
        export_canvas(canvas, GRADEBOOK, "")
    assert "''" not in str(refused.value)
    assert "Its columns are: Homework 3 (700); Homework 4 (701)." in str(refused.value)


def test_the_assignments_of_a_gradebook_can_be_listed() -> None:
    assert assignment_columns(GRADEBOOK) == ["Homework 3 (700)", "Homework 4 (701)"]


def test_a_submission_without_an_id_is_listed_with_its_other_reasons(tmp_path: Path) -> None:
    batch(tmp_path, [grade("anna.ipynb"), grade("plain.R", words=None)])

    assert reasons(export_canvas(tmp_path, GRADEBOOK, "701")) == {
        "anna.ipynb": f"its name holds no Canvas user id, so it is not in the file: {SAY_WHOSE}",
        "plain.R": (
            "incomplete: no points for words: late; its name holds no Canvas user id, so it is not in the file: "
            f"{SAY_WHOSE}"
        ),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        GRADEBOOK.replace(b"(701)", b""),  # a new assignment
        GRADEBOOK.replace(b"(701)", b"(999)"),
        GRADEBOOK.replace(b",Section,", b",Group,"),
        GRADEBOOK.replace(b"Student,ID", b"Student,Number"),
        GRADEBOOK.replace(b"    Points Possible", b"Points Possible"),
        GRADEBOOK.replace(b"48103", b"48100"),
        GRADEBOOK.replace(b",9.5,", b",9.512,"),
        GRADEBOOK.replace(b",9.5,", b",nine,"),
    ],
)
def test_the_validator_refuses_what_canvas_refuses(wrong: bytes) -> None:
    lms.canvas_import(GRADEBOOK, {"700", "701"}, USERS)

    with pytest.raises(lms.ImportRejected):
        lms.canvas_import(wrong, {"700", "701"}, USERS)


# --- Moodle

TIMES = {"11": "-", "12": "Tuesday", "13": "-", "14": "-"}


def test_moodle_takes_the_worksheet_back(moodle: Path) -> None:
    made = export_moodle(moodle, WORKSHEET)

    found = lms.moodle_worksheet(made.data, TIMES, 6)
    assert found.grades == {"11": 5.5, "12": 2.0, "14": 0.0}  # 12 is what Moodle had before
    assert "Right about loops" in found.comments["11"]
    assert found.comments["12"] == "old"
    assert set(reasons(made)) == {MOODLE["doubtful"], MOODLE["failed"]}
    assert made.notes == ("1 grade can't be changed in Moodle: left as it is",)


@pytest.mark.parametrize("lost", [b"Identifier", b"Grade,", b"Last modified (grade)"])
def test_a_worksheet_without_a_needed_column_is_refused(moodle: Path, lost: bytes) -> None:
    wrong = WORKSHEET.replace(lost, b"Other," if lost.endswith(b",") else b"Other", 1)

    with pytest.raises(ExportError, match="lacks the column"):
        export_moodle(moodle, wrong)
    with pytest.raises(lms.ImportRejected):
        lms.moodle_worksheet(wrong, TIMES, 6)


def test_a_maximum_that_is_not_the_rubrics_total_is_refused(moodle: Path) -> None:
    with pytest.raises(ExportError, match=r"100\.00 points, but the rubric adds up to 6"):
        export_moodle(moodle, WORKSHEET.replace(b"6.00", b"100.00"))


def test_moodle_takes_the_feedback_zip(moodle: Path) -> None:
    files = lms.moodle_feedback_zip(export_moodle_feedback(moodle).data, {"11", "12", "13", "14"})

    assert files.keys() == {"11", "14"}
    assert b"5.5 of 6 points" in files["11"]


# --- feedback and the table


def unpacked(made: ExportFile) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(made.data)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.mark.parametrize("kind", ["md", "html"])
def test_each_student_with_a_grade_has_one_file_and_nobody_else(canvas: Path, kind: str) -> None:
    files = unpacked(export_feedback(canvas, kind))  # type: ignore[arg-type]

    assert set(files) == {f"{CANVAS['whole']}.{kind}", f"{CANVAS['empty']}.{kind}"}
    text = files[f"{CANVAS['whole']}.{kind}"]
    assert "5.5 of 6 points" in text
    assert "code of words" in text
    assert "nothing was handed in" in files[f"{CANVAS['empty']}.{kind}"]


def test_feedback_that_repeats_what_only_graders_see_is_withheld_and_listed(tmp_path: Path) -> None:
    leaking = (criterion("loops", 2, 2, feedback="SECRET NOTES", leaks=True), criterion("words", 4, 4))
    batch(tmp_path, [grade("s_1_2_x.R", criteria=leaking, points=6)])

    made = export_feedback(tmp_path, "html")

    [text] = unpacked(made).values()
    assert "SECRET" not in text
    assert "withheld" in text
    assert reasons(made) == {"s_1_2_x.R": "feedback withheld for loops: it repeats what only graders see"}


@pytest.mark.parametrize(
    "export",
    [
        lambda folder: export_canvas(folder, GRADEBOOK, "701"),
        lambda folder: export_moodle(folder, WORKSHEET),
        export_moodle_feedback,
        export_feedback,
        export_csv,
    ],
)
def test_who_is_left_out_stands_there_once_on_one_line_with_every_reason(
    tmp_path: Path, export: Callable[[Path], ExportFile]
) -> None:
    leaking = (criterion("loops", 2, 2, leaks=True), criterion("words", 4, 4))
    unfinished = grade("nobody\nknown.R", words=None, reason="no points\nfor words: late")
    doubtful = grade("seen.R", criteria=leaking, points=6, doubts=(Doubt("words", "words: evidence not found"),))
    batch(tmp_path, [unfinished, doubtful])

    listed = export(tmp_path).left_blank

    assert [blank.submission for blank in listed] == ["nobody known.R", "seen.R"]
    assert [line for blank in listed for line in blank.reason.splitlines()] == [blank.reason for blank in listed]
    assert listed[0].reason.startswith("incomplete: no points for words: late")
    assert listed[1].reason.startswith("needs review: words: evidence not found")
    assert "feedback withheld" not in listed[1].reason  # there is no file that it could be withheld from


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> ![x](http://x/y) # Title"
    batch(tmp_path, [grade("s.R", summary=evil, criteria=(criterion("loops", 6, 6, feedback=evil),), points=6)])

    [page] = unpacked(export_feedback(tmp_path, "html")).values()
    [markdown] = unpacked(export_feedback(tmp_path, "md")).values()

    assert "<script" not in page
    assert "<script" not in markdown
    assert "![x]" not in markdown


def test_the_table_has_a_row_for_everybody(canvas: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(export_csv(canvas).data.decode())))

    assert [(row["state"], row["points"], row["points_by_models"]) for row in rows] == [
        ("graded", "5.5", "5.5"),
        ("graded", "", "5.5"),
        ("failed", "", ""),
        ("empty", "0", "0"),
    ]
    assert [row["student_id"] for row in rows] == ["48102", "48103", "48104", "48101"]


@pytest.mark.parametrize(
    ("points", "text"), [(7, "7"), (7.5, "7.5"), (1.005, "1.01"), (0, "0"), (10, "10"), (None, "")]
)
def test_points_have_two_decimals_at_most(points: float | None, text: str) -> None:
    assert two_decimals(points) == text


# --- reviews


def decision(submission: str, criterion_id: str | None = None, points: float | None = None, **more: str) -> Override:
    fields = {"feedback": None, "reason": "I looked", **more}
    return Override(f"item-{submission}", criterion_id, points, time=1.0, **fields)  # type: ignore[arg-type]


def points_of(folder: Path) -> dict[str, str]:
    rows = csv.DictReader(io.StringIO(export_csv(folder).data.decode()))
    return {row["submission"]: row["points"] for row in rows}


@pytest.mark.parametrize(("decided", "points"), [(("words", 1), "3"), (("loops", 1), ""), ((), "5.5")])
def test_a_decision_about_the_doubtful_criterion_or_the_whole_settles_the_doubt(
    canvas: Path, decided: tuple[str, int] | tuple[()], points: str
) -> None:
    append_override(canvas, decision(CANVAS["doubtful"], *decided))

    assert points_of(canvas)[CANVAS["doubtful"]] == points


def test_a_total_by_hand_grades_what_failed_and_the_last_decision_counts(canvas: Path) -> None:
    for points in (1, 4.5):
        append_override(canvas, decision(CANVAS["failed"], None, points))

    assert points_of(canvas)[CANVAS["failed"]] == "4.5"
    assert CANVAS["failed"] + ".md" in unpacked(export_feedback(canvas))


def test_the_desks_reviews_are_read_and_can_be_withdrawn(canvas: Path) -> None:
    line = '{"submission": "%s", "criteria": {"words": {"points": 1, "feedback": "Mine."}}, "reason": "r"%s}\n'
    with (canvas / "reviews.jsonl").open("w") as file:
        file.write(line % (CANVAS["doubtful"], ""))
    assert points_of(canvas)[CANVAS["doubtful"]] == "3"

    with (canvas / "reviews.jsonl").open("a") as file:
        file.write(line % (CANVAS["doubtful"], ', "withdrawn": true'))

    assert points_of(canvas)[CANVAS["doubtful"]] == ""
    assert read_overrides(canvas) == []


@pytest.mark.parametrize("wrong", [{"reason": " "}, {"points": -1}, {"points": float("nan")}, {"item_id": ""}])
def test_a_decision_without_sense_or_reason_is_refused(wrong: dict[str, object]) -> None:
    fields = {"item_id": "i", "criterion_id": None, "points": 1, "feedback": None, "reason": "r", **wrong}

    with pytest.raises(BatchError, match="a review can't be used"):
        Override(**fields)  # type: ignore[arg-type]
