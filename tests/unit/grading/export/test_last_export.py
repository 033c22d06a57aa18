"""What differs from the last export is said before the next one is made."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from grading.export import record_export, since_last
from grading.export.canvas import export_canvas
from grading.export.final import ExportFile, apply_decisions, final_grades
from grading.export.last import FILE
from grading.export.moodle import export_moodle
from grading.export.moodle_feedback import export_moodle_feedback
from grading.points import CriterionGrade, Grade
from grading.report.grades import GradedClass, save_graded
from grading.reviews import Override, append_override
from grading.roster import Owner, Person, Roster, keep_answer, keep_roster
from kvasir import cli
from messages.errors import BatchError
from producers.storage.private import kept_in
from tests.support.desk import answer, plan_tiny_class


def grade(name: str, points: float) -> Grade:
    criteria = (CriterionGrade("loops", "Loops", 6, points),)
    return Grade(name, "graded", points, 6, criteria, item_id=f"item-{name}")


CLASS = [grade("ada", 4), grade("benno", 5)]


def finals(*decided: Override) -> list:  # type: ignore[type-arg]
    return [
        apply_decisions(one, {each.criterion_id: each for each in decided if each.item_id == one.item_id})
        for one in CLASS
    ]


def test_the_first_export_has_nothing_before_it(tmp_path: Path) -> None:
    assert since_last(tmp_path, "csv", finals()).summary() == "No export of this kind has been given out before."


def test_only_what_differs_is_named_and_kinds_are_kept_apart(tmp_path: Path) -> None:
    record_export(tmp_path, since_last(tmp_path, "canvas", finals()).now)
    ada = Override("item-ada", "loops", 6, None, "I ran it", "eve")

    since = since_last(tmp_path, "canvas", finals(ada))

    assert since.summary().startswith("1 grade would differ from the last export of this kind (")
    assert since.lines() == ["ada: 4 → 6"]
    assert since_last(tmp_path, "moodle", finals(ada)).last is None
    record_export(tmp_path, since.now)
    assert since_last(tmp_path, "canvas", finals(ada)).summary().startswith("Nothing would differ")
    assert since_last(tmp_path, "canvas", finals()).lines() == ["ada: 6 → 4"]


def test_what_is_blank_or_gone_by_now_is_told(tmp_path: Path) -> None:
    record_export(tmp_path, since_last(tmp_path, "csv", finals()).now)
    failed = Grade("ada", "failed", None, 6, (), reason="not a notebook", item_id="item-ada")

    assert since_last(tmp_path, "csv", [apply_decisions(failed, {})]).lines() == [
        "ada: 4 → blank",
        "item-benno: 5 → blank",
    ]


def test_of_what_the_file_does_not_hold_nothing_is_said_or_noted(tmp_path: Path) -> None:
    ada, benno = finals()
    record_export(tmp_path, since_last(tmp_path, "canvas", finals(), [ada.grade.id]).now)
    both_changed = finals(
        Override("item-ada", "loops", 6, None, "I ran it", "eve"), Override("item-benno", "loops", 6, None, "so", "eve")
    )

    since = since_last(tmp_path, "canvas", both_changed, [both_changed[1].grade.id])

    assert since.lines() == ["benno: blank → 6"]
    assert since.now.points == {"item-benno": 6}
    record_export(tmp_path, since.now)
    # Ada's section was the last export but one: her grade is compared with that.
    assert since_last(tmp_path, "canvas", both_changed).lines() == ["ada: 4 → 6"]
    assert since_last(tmp_path, "canvas", [ada, benno], [ada.grade.id]).lines() == []


NAMES = ["ada_101_1_a.py", "benno_102_2_b.py", "cato_103_3_c.py", "dora_104_4_d.py", "eve.py"]
GRADEBOOK = b"""Student,ID,Section,Loops (7)
    Points Possible,,,6
Ada,101,A,
Benno,102,A,EX
Dora,104,A,3
"""


def canvas_class(folder: Path) -> Path:
    """Cato isn't in the gradebook, Dora's work has no points, Eve's no id."""
    failed = Grade(NAMES[3], "failed", None, 6, (), reason="not a notebook", item_id=f"item-{NAMES[3]}")
    made = [failed if name == NAMES[3] else grade(name, 4) for name in NAMES]
    save_graded(folder, GradedClass("b1", "Loops", 6, tuple(made)))
    return folder


def held(folder: Path, export_file: ExportFile) -> list[str]:
    return [final.submission for final in final_grades(folder)[1] if final.grade.id in (export_file.held_ids or ())]


def test_a_gradebook_holds_whom_it_lists_and_neither_excuses_nor_grades_that_stay(tmp_path: Path) -> None:
    canvas_class(tmp_path)

    assert held(tmp_path, export_canvas(tmp_path, GRADEBOOK, "7")) == [NAMES[0]]
    assert held(tmp_path, export_canvas(tmp_path, GRADEBOOK.replace(b"A,3", b"A,"), "7")) == [NAMES[0], NAMES[3]]


def test_a_worksheet_holds_whom_it_lists_and_no_grade_that_is_locked_or_stays(tmp_path: Path) -> None:
    names = [f"{name}_{number}_assignsubmission_file_" for number, name in enumerate(("ada", "benno", "cato", "dora"))]
    failed = Grade(names[3], "failed", None, 6, (), reason="not a notebook")
    made = (*(grade(name, 4) for name in names[:3]), failed, grade("eve.py", 4))
    save_graded(tmp_path, GradedClass("b1", "Loops", 6, made))
    worksheet = b"""Identifier,Grade,Last modified (grade),Grade can be changed
Participant 0,,-,Yes
Participant 1,,-,No
Participant 3,%s,-,Yes
"""

    assert held(tmp_path, export_moodle(tmp_path, worksheet % b"3.00")) == names[:1]
    assert held(tmp_path, export_moodle(tmp_path, worksheet % b"-")) == [names[0], names[3]]
    assert held(tmp_path, export_moodle_feedback(tmp_path)) == names


def test_feedback_goes_to_the_roster_s_people_and_to_nobody_while_it_is_asked_whose_it_is(tmp_path: Path) -> None:
    """`assignfeedback_file_zip_importer` goes by the number: a team's, or one that was corrected, is another's."""
    people = (Person("7", "Ada Aldertree"), Person("8", "Bo Birkenau", "Espresso"), Person("9", "Cy Li"))
    ada, corrected = "Ada Aldertree_7_assignsubmission_file_", "Cy L_6_assignsubmission_file_"
    team, unknown_team = "Espresso_assignsubmission_file_", "Mocha_7_assignsubmission_file_"
    save_graded(tmp_path, GradedClass("b1", "Loops", 6, tuple(grade(name, 4) for name in (team, unknown_team))))
    keep_roster(tmp_path, Roster("moodle", people))

    of_teams = export_moodle_feedback(tmp_path)
    assert held(tmp_path, of_teams) == [team]
    assert folders(of_teams) == ["Bo Birkenau_8_assignsubmission_file_"]
    assert "Mocha" in of_teams.left_blank[0].reason

    save_graded(tmp_path, GradedClass("b1", "Loops", 6, tuple(grade(name, 4) for name in (ada, corrected))))
    keep_roster(tmp_path, Roster("moodle", (people[0], people[2])))
    keep_answer(tmp_path, corrected, Owner((people[2],)))

    assert folders(export_moodle_feedback(tmp_path)) == [ada, "Cy Li_9_assignsubmission_file_"]


def folders(export_file: ExportFile) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(export_file.data)) as archive:
        return [name.partition("/")[0] for name in archive.namelist()]


def test_the_command_compares_and_notes_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, assignment = plan_tiny_class(tmp_path, 2)
    answer(folder, assignment, range(2))
    canvas_class(folder)
    (tmp_path / "gradebook.csv").write_bytes(GRADEBOOK)
    words = ["export", str(folder), "--format", "canvas", "--gradebook", str(tmp_path / "gradebook.csv")]

    assert cli.run_command(words) == 1
    noted = [json.loads(line)["points"] for line in (folder / FILE).read_text("utf-8").splitlines()]
    assert noted == [{f"item-{NAMES[0]}": 4}]

    for name, points in ((NAMES[0], 5), (NAMES[1], 5), (NAMES[2], 5)):
        append_override(folder, Override(f"item-{name}", "loops", points, None, "I ran it", "eve"))
    capsys.readouterr()
    assert cli.run_command([*words, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "1 grade would differ" in said
    assert said.splitlines()[1:] == [f"{NAMES[0]}: 4 → 5"]
    assert cli.run_command(["export", str(folder), "--format", "canvas", "--dry-run"]) == 2  # compared with what?


def test_the_file_names_nobody_and_is_forgotten_with_the_batch(tmp_path: Path) -> None:
    record_export(tmp_path, since_last(tmp_path, "csv", finals()).now)

    assert '"ada"' not in (tmp_path / FILE).read_text("utf-8")
    assert tmp_path / FILE in kept_in(tmp_path)


def test_a_line_of_somebody_elses_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"kind": "csv", "points": {"a": "many"}, "at": 1.0}\n', "utf-8")

    with pytest.raises(BatchError, match="line 1 is not a valid export"):
        since_last(tmp_path, "csv", finals())


def test_the_command_says_it_first_and_a_dry_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, assignment = plan_tiny_class(tmp_path, 2)
    answer(folder, assignment, range(2))
    save_graded(folder, GradedClass("b1", "Homework 4", 6, tuple(CLASS)))
    words = ["export", str(folder), "--format", "csv"]

    assert cli.run_command([*words, "--dry-run"]) == 0
    assert "No export of this kind" in capsys.readouterr().err
    assert not (folder / FILE).exists()
    assert not (folder / "grades.csv").exists()
    assert not (folder / "final-grades.csv").exists()

    assert cli.run_command(words) == 0
    capsys.readouterr()
    assert cli.run_command(words) == 0
    assert "Nothing would differ" in capsys.readouterr().err
