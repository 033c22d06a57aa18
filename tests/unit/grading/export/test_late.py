"""Lateness: what the rubric's rule takes off, where it shows, and that nobody is guessed to be late."""

import csv
import io
import zipfile
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from desk.rounds import graded_class_of
from desk.rows import make_rows
from desk.view import BatchView
from grading.export import ExportError, final_grades, keep_times
from grading.export.feedback import export_feedback
from grading.export.plain import export_csv
from grading.points import CriterionGrade, Grade
from grading.report.grades import GradedClass, load_graded, save_graded
from grading.report.page import render_page
from grading.reviews import Override, append_override
from grading.roster import Person, Roster, keep_roster
from grading.rubric.late import LateRule
from grading.rubric.rubric import parse_rubric
from kvasir import cli
from messages.errors import RubricError
from producers.storage.private import kept_in
from tests.support.desk import answer, plan_tiny_class, request_of

RUBRIC = """
title: Loops
criteria: [{id: loops, title: Loops, points: 6, model: code}]
"""
LATE = "late: {due: 2026-11-03T23:59:00+01:00, percent: 10, grace_minutes: 15, most_percent: 30}\n"
DUE = datetime.fromisoformat("2026-11-03T23:59:00+01:00")
RULE = LateRule(DUE.isoformat(), 10, 15, 30)
ADA, BENNO, CATO = "ada_1_10_a.py", "benno_2_11_b.py", "cato_LATE_3_12_c.py"


def grade(name: str, points: float = 6) -> Grade:
    return Grade(name, "graded", points, 6, (CriterionGrade("loops", "Loops", 6, points),), item_id=f"item-{name[:3]}")


def graded(folder: Path, *grades: Grade, rule: LateRule | None = RULE) -> Path:
    save_graded(folder, GradedClass("b1", "Loops", 6, grades, late=rule))
    return folder


def times(*rows: tuple[str, timedelta]) -> bytes:
    lines = [f"{who},{(DUE + late).isoformat()}" for who, late in rows]
    return "\n".join(["student_id,submitted_at", *lines]).encode()


def keep(folder: Path, data: bytes) -> tuple[int, str]:
    return keep_times(folder, data, load_graded(folder))


def points(folder: Path) -> dict[str, float | None]:
    return {final.submission: final.points for final in final_grades(folder)[1]}


def test_a_rule_is_read_and_leaves_the_digest_alone() -> None:
    with_rule = parse_rubric("r.yaml", RUBRIC + LATE, ".yaml")

    assert with_rule.late == RULE
    assert with_rule.digest == parse_rubric("r.yaml", RUBRIC, ".yaml").digest
    assert with_rule.digest == "29d5d5d0b96c052105ec5aff77d03a34"  # as it was before there were such rules


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ("{due: 2026-11-03, percent: 10}", "a date and a time"),
        ("{due: soon, percent: 10}", "a date and a time"),
        ("{due: 2026-11-03T23:59, percent: 110}", "'percent' must be a number from 0 to 100"),
        ("{due: 2026-11-03T23:59, percent: .nan}", "'percent' must be a number"),
        ("{due: 2026-11-03T23:59, percent: 10, grace: 5}", "unknown key 'grace'"),
        ("{percent: 10}", "'due' is missing"),
        ("10", "late must contain keys and values"),
    ],
)
def test_a_rule_that_is_none_is_said(late: str, said: str) -> None:
    with pytest.raises(RubricError, match=said):
        parse_rubric("r.yaml", f"{RUBRIC}late: {late}\n", ".yaml")


@pytest.mark.parametrize(
    ("after", "days"),
    [
        (timedelta(days=-3), 0),
        (timedelta(minutes=15), 0),
        (timedelta(minutes=15, seconds=1), 1),
        (timedelta(days=1), 1),
        (timedelta(days=1, seconds=1), 2),
    ],
)
def test_each_day_begun_counts_once_the_grace_is_over(after: timedelta, days: int) -> None:
    assert RULE.days(DUE + after) == days


def test_the_penalty_is_capped_rounded_and_takes_no_more_than_there_is(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA), grade(BENNO), grade(CATO, 1), rule=replace(RULE, percent=3.333))
    keep(tmp_path, times(("1", timedelta(hours=1)), ("2", timedelta(days=40)), ("3", timedelta(days=40))))

    assert points(tmp_path) == {ADA: 5.8, BENNO: 4.2, CATO: 0}


def test_late_by_an_unknown_time_is_blank_and_no_mark_means_on_time(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA), grade(CATO))

    assert points(tmp_path) == {ADA: 6, CATO: None}
    assert "when is not known" in final_grades(tmp_path)[1][1].why_blank


def test_a_time_under_the_number_that_only_the_roster_knows_counts(tmp_path: Path) -> None:
    name = "o_brien_kay_7_10_a.py"  # underscores, so that the name alone doesn't say the number
    keep_roster(tmp_path, Roster("canvas", (Person("7", "O_Brien_Kay"),)))
    graded(tmp_path, grade(name))

    assert keep(tmp_path, times(("7", timedelta(hours=2)))) == (1, "")
    assert points(tmp_path) == {name: 5.4}


def test_without_a_rule_nothing_is_taken_off(tmp_path: Path) -> None:
    graded(tmp_path, grade(CATO), rule=None)
    keep(tmp_path, times(("3", timedelta(days=2))))

    assert points(tmp_path) == {CATO: 6}


@pytest.mark.public_report("MarkUsProject/Markus 2136")
def test_a_persons_points_for_a_criterion_lose_the_penalty_and_their_total_does_not(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA), grade(BENNO))
    keep(tmp_path, times(("1", timedelta(hours=1)), ("2", timedelta(hours=1))))
    append_override(tmp_path, Override("item-ada", "loops", 4, None, "half of it", "eve"))
    append_override(tmp_path, Override("item-ben", None, 5, None, "she was ill", "eve"))

    assert points(tmp_path) == {ADA: 3.4, BENNO: 5}


def test_it_is_a_line_of_its_own_in_table_and_feedback(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA))
    keep(tmp_path, times(("1", timedelta(days=1, hours=1))))
    words = "late, 2 days begun: 20 % of 6 points, −1.2"

    row = next(csv.DictReader(io.StringIO(export_csv(tmp_path).data.decode("utf-8-sig"))))
    assert (row["points"], row["loops"], row["late"]) == ("4.8", "6", words)
    archive = zipfile.ZipFile(io.BytesIO(export_feedback(tmp_path, "html").data))
    assert f"<p>Taken off: {words}</p>" in archive.read(archive.namelist()[0]).decode()


def test_the_rule_and_the_times_stay_with_the_batch(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA))
    keep(tmp_path, times(("1", timedelta(0))))

    assert load_graded(tmp_path).late == RULE
    assert tmp_path / "times.csv" in kept_in(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"student_id,when\n1,2026-11-03T23:59", "needs submitted_at"),
        (b"student_id,submitted_at\n1,yesterday", "row 2: 'yesterday' is not a time"),
        (
            b"student_id,submitted_at\n1,2026-11-03T23:59Z\n2,2026-11-03T23:59Z\n1,2026-11-04T23:59Z",
            "times, row 4: '1' has a different time in an earlier row",
        ),
        (
            f"submission,ID,submitted_at\n{ADA},,2026-11-03T23:59Z\n,1,2026-11-04T23:59Z".encode(),
            "times, row 3: '1' has a different time in an earlier row",
        ),
        (b"student_id,submitted_at\n1,2026-11-03T23:59Z,late, ill", "row 2: there are more fields than in the header"),
    ],
)
def test_a_table_that_is_none_is_refused_and_not_kept(tmp_path: Path, data: bytes, said: str) -> None:
    graded(tmp_path, grade(ADA), grade(BENNO))

    with pytest.raises(ExportError, match=said):
        keep(tmp_path, data)
    assert not (tmp_path / "times.csv").exists()


def test_rows_of_nobody_in_the_class_are_named_and_kept(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA))
    absent = [(who, timedelta(0)) for who in ("7", "8", "", "9")]

    assert keep(tmp_path, times(("1", timedelta(hours=1)))) == (1, "")
    assert keep(tmp_path, times(*absent, ("1", timedelta(hours=1)))) == (
        1,
        "times: 4 rows are of no submission of this class: '7', '8', 'nobody' and 1 other",
    )
    assert points(tmp_path) == {ADA: 5.4}


def test_a_table_of_nobody_in_the_class_takes_no_lateness_away(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA))
    keep(tmp_path, times(("1", timedelta(hours=1))))

    for table in (times(("999", timedelta(0))), times(), b"student_id,submitted_at\n1,\n"):
        with pytest.raises(ExportError, match="the table of times can't be used: no "):
            keep(tmp_path, table)

    assert points(tmp_path) == {ADA: 5.4}


def test_the_same_time_twice_is_one_also_in_another_time_zone(tmp_path: Path) -> None:
    graded(tmp_path, grade(ADA))
    table = f"submission,student_id,submitted_at\n{ADA},,2026-11-04T08:00+01:00\n,1,2026-11-04T07:00+00:00"

    assert keep(tmp_path, table.encode()) == (1, "")


@pytest.mark.parametrize("row", [b"1,2026-11-04T08:00:00", b"1,2026-11-04T08:00+01:00\n2,2026-11-04T08:00"])
def test_times_without_an_offset_are_not_compared_with_one_and_not_kept(tmp_path: Path, row: bytes) -> None:
    graded(tmp_path, grade(ADA))

    with pytest.raises(ExportError, match="offset"):
        keep(tmp_path, b"student_id,submitted_at\n" + row)
    assert not (tmp_path / "times.csv").exists()


def test_the_command_takes_times_and_says_that_there_is_no_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, assignment = plan_tiny_class(tmp_path, 1)
    answer(folder, assignment, [0])
    table = tmp_path / "times.csv"
    table.write_bytes(times(("1", timedelta(hours=1))))
    words = ["export", str(folder), "--format", "csv", "--times", str(table)]

    assert cli.run_command(words) == 2
    assert "no rule on lateness" in capsys.readouterr().err

    graded(folder, grade(ADA))
    assert cli.run_command(words) == 0
    assert "late, 1 day begun" in (folder / "final-grades.csv").read_text("utf-8-sig")

    table.write_bytes(times(("1", timedelta(hours=1)), ("9", timedelta(0))))
    assert cli.run_command(words) == 0
    assert "times: 1 row is of no submission of this class: '9'" in capsys.readouterr().err
    table.write_bytes(times(("9", timedelta(0))))
    assert cli.run_command(words) == 2
    assert "no submission of this class is '9'" in capsys.readouterr().err
    assert "late, 1 day begun" in (folder / "final-grades.csv").read_text("utf-8-sig")


def test_the_desk_and_the_report_show_it(tmp_path: Path) -> None:
    folder, assignment = plan_tiny_class(tmp_path, 1)
    answer(folder, assignment, [0])
    view = BatchView(folder, request_of).refresh()
    assert view.assignment
    view.assignment = replace(view.assignment, rubric=replace(assignment.rubric, late=RULE))
    name = view.grades[0].submission
    table = f"submission,submitted_at\n{name},{(DUE + timedelta(hours=2)).isoformat()}"
    made = graded_class_of(view)
    assert made
    keep_times(folder, table.encode(), made)

    (row,) = make_rows(view, {})
    assert row.final.penalty
    assert row.final.penalty.words.startswith("late, 1 day begun: 10 % of")
    assert row.final.grade.points == view.grades[0].points == row.final.earned_points
    page = render_page(view.grades, assignment.rubric, (), late={name: row.final.penalty.words})
    assert f"Taken off: {row.final.penalty.words}" in page
