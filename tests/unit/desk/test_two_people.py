"""Two people decide about one class: nobody's word is lost, and their names stay in the house."""

import csv
import io
import json
import threading
import zipfile
from pathlib import Path

import pytest

from desk.decisions import WHOLE, Decisions, GradeChange, accept_grade, make_overrides, round_overrides
from desk.rounds import graded_class_of
from desk.rows import make_rows, standing_words
from desk.view import BatchView
from grading.export.canvas import export_canvas
from grading.export.feedback import export_feedback
from grading.export.moodle import export_moodle
from grading.export.moodle_feedback import export_moodle_feedback
from grading.export.plain import export_csv
from grading.report.grades import save_graded
from grading.reviews import Override, append_override, current_decisions, read_overrides, undo_override
from messages.errors import BatchError
from tests.support.desk import answer, plan_tiny_class, request_of

ITEM = "item"
NAME = "Ada Lovelace"
GRADEBOOK = "Student,ID,SIS User ID,SIS Login ID,Section,Homework (7)\n    Points Possible,,,,,5\nZero,100,z,z,A,\n"
WORKSHEET = (
    "Identifier,Full name,Status,Grade,Maximum Grade,Grade can be changed,Last modified (grade),Feedback comments\n"
)


def decision(points: float, version: str | None = None, name: str = NAME) -> Override:
    return Override(ITEM, "works", points, None, "I ran it", name, **({} if version is None else {"version": version}))


def standing(folder: Path) -> str:
    from grading.reviews import version_of  # late: the other tests can do without

    return version_of(current_decisions(read_overrides(folder), ITEM).values())


@pytest.mark.public_report(
    "PrairieLearn/PrairieLearn 3964", "PrairieLearn/PrairieLearn 3786", "PrairieLearn/PrairieLearn 4038"
)
def test_a_decision_made_on_what_no_longer_stands_is_not_written(tmp_path: Path) -> None:
    seen_by_both = standing(tmp_path)
    append_override(tmp_path, decision(1, seen_by_both))

    with pytest.raises(BatchError, match="decided on this submission since you opened it"):
        append_override(tmp_path, decision(2, seen_by_both))

    assert [each.points for each in read_overrides(tmp_path)] == [1]
    append_override(tmp_path, decision(2, standing(tmp_path)))
    assert [each.points for each in read_overrides(tmp_path)] == [1, 2]


def test_of_many_at_the_same_moment_one_is_kept_and_the_others_are_told(tmp_path: Path) -> None:
    version, told, start = standing(tmp_path), [], threading.Barrier(8)

    def decide(points: int) -> None:
        start.wait()
        try:
            append_override(tmp_path, decision(points / 4, version))
        except BatchError:
            told.append(points)

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(read_overrides(tmp_path)) == 1
    assert len(told) == 7


def test_an_undo_lets_stand_what_stood_before_unless_somebody_has_decided_since(tmp_path: Path) -> None:
    append_override(tmp_path, decision(1))
    before, seen = current_decisions(read_overrides(tmp_path), ITEM), standing(tmp_path)
    append_override(tmp_path, decision(2))
    undo_override(tmp_path, ITEM, standing(tmp_path), before.values(), NAME)

    assert [each.points for each in read_overrides(tmp_path)] == [1]
    assert standing(tmp_path) == seen
    assert len((tmp_path / "reviews.jsonl").read_text("utf-8").splitlines()) == 4, "nothing is rewritten"

    append_override(tmp_path, decision(3))
    with pytest.raises(BatchError, match="decided on this submission since you opened it"):
        undo_override(tmp_path, ITEM, seen, [], NAME)
    assert [each.points for each in current_decisions(read_overrides(tmp_path), ITEM).values()] == [3]


def test_lines_of_before_are_read_and_new_ones_say_by_whom(tmp_path: Path) -> None:
    old = {"item_id": ITEM, "criterion_id": "works", "points": 1, "feedback": None, "reason": "r", "reviewer": "gh"}
    (tmp_path / "reviews.jsonl").write_text(json.dumps(old) + "\n", "utf-8")

    append_override(tmp_path, decision(2))

    assert [each.reviewer for each in read_overrides(tmp_path)] == ["gh", NAME]
    assert json.loads((tmp_path / "reviews.jsonl").read_text().splitlines()[1])["by"] == NAME


def graded(folder: Path, doubtful: int = 0, size: int = 3) -> tuple[Path, BatchView, Decisions]:
    """A class with four points for everybody, the first `doubtful` without evidence."""
    out, assignment = plan_tiny_class(folder, size)
    answer(out, assignment, range(doubtful, size))
    answer(out, assignment, range(doubtful), evidence="nowhere to be found")
    return out, BatchView(out, request_of).refresh(), Decisions(out)


def test_the_desk_reads_a_whole_review_on_one_line_as_exports_do(tmp_path: Path) -> None:
    out, view, decisions = graded(tmp_path)
    line = {"submission": view.grades[0].item_id, "criteria": {"works": {"points": 3}}, "reason": "r", "by": NAME}
    for withdrawn, points in ((False, 5), (True, 4)):
        with (out / "reviews.jsonl").open("a") as file:
            file.write(json.dumps(line | {"withdrawn": withdrawn}) + "\n")
        assert make_rows(view, decisions.refresh())[0].final.points == points


def test_whoever_reads_decisions_leaves_one_that_is_being_written(tmp_path: Path) -> None:
    # A reader that cut the torn line off took along what the other process had written by then.
    out, view, decisions = graded(tmp_path)
    append_override(out, Override(view.grades[0].item_id, "works", 3, None, "r", NAME))
    whole = (out / "reviews.jsonl").read_bytes()
    (out / "reviews.jsonl").write_bytes(whole + b'{"item_id": "being wri')

    assert len(read_overrides(out)) == 1
    assert decisions.refresh()
    assert (out / "reviews.jsonl").read_bytes() == whole + b'{"item_id": "being wri'
    append_override(out, Override(view.grades[0].item_id, "clear", 1, None, "r", NAME))
    assert len(read_overrides(out)) == 2, "and what a crash left torn is cut off by whoever writes next"


def test_looking_at_a_grade_leaves_the_summary_that_somebody_wrote(tmp_path: Path) -> None:
    _, view, decisions = graded(tmp_path)
    grade = view.grades[0]
    append_override(
        view.folder, *make_overrides(grade, {}, {WHOLE: GradeChange("kinder", feedback="Well done.")}, NAME)
    )

    append_override(view.folder, accept_grade(grade, NAME, decisions.refresh()[grade.item_id]))

    assert make_rows(view, decisions.refresh())[0].final.summary == "Well done."


def test_feedback_without_points_is_a_change(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path)
    answer(out, assignment, [0], evidence="")
    view = BatchView(out, request_of).refresh()
    grade = view.grades[1]

    made = make_overrides(grade, {}, {"works": GradeChange("it was cut off", feedback="Hand it in again.")})

    assert [(each.points, each.feedback) for each in made] == [(None, "Hand it in again.")]


def test_a_round_replaces_what_rounds_gave_and_never_what_a_person_decided(tmp_path: Path) -> None:
    _, old, decisions = graded(tmp_path / "old")
    out, assignment = plan_tiny_class(tmp_path / "new")
    answer(out, assignment, [0, 1, 2], points=1)
    new = BatchView(out, request_of).refresh()
    append_override(old.folder, *make_overrides(old.grades[0], {}, {"works": GradeChange("I ran it", 3)}, NAME))
    decided = decisions.refresh()

    for number in (0, 1):
        stands = decided.get(old.grades[number].item_id, {})
        append_override(
            old.folder, *round_overrides(old.grades[number], new.grades[number], "regraded in round 1", NAME, stands)
        )

    assert [row.final.points for row in make_rows(old, decisions.refresh())] == [5, 2, 4]


def test_a_table_shows_what_waits_for_a_person_and_a_decision_ends_it(tmp_path: Path) -> None:
    _, view, decisions = graded(tmp_path, doubtful=2)
    found = make_rows(view, decisions.refresh())
    assert [bool(row.needs_review) for row in found] == [True, True, False]
    assert standing_words(found) == "2 of 3 need review"

    append_override(view.folder, *make_overrides(view.grades[0], {}, {"works": GradeChange("I ran it", 1)}))
    assert make_rows(view, decisions.refresh())[0].needs_review == ("clear: evidence not found",)
    append_override(view.folder, accept_grade(view.grades[0]))
    assert make_rows(view, decisions.refresh())[0].needs_review == ()


def test_a_reviewers_name_is_in_the_instructors_table_and_in_nothing_for_a_learning_platform(tmp_path: Path) -> None:
    out, view, _ = graded(tmp_path)
    grade = view.grades[0]
    changes = {"works": GradeChange("I ran it", 1, "Half."), WHOLE: GradeChange("I ran it", feedback="Half of it.")}
    append_override(out, *make_overrides(grade, {}, changes, NAME))
    made = graded_class_of(view)
    assert made
    save_graded(out, made)

    table = list(csv.DictReader(io.StringIO(export_csv(out).data.decode())))
    assert [row["reviewer"] for row in table] == [NAME, "", ""]

    for exported in (
        export_canvas(out, GRADEBOOK.encode(), "Homework (7)"),
        export_moodle(out, WORKSHEET.encode()),
        export_moodle_feedback(out),
        export_feedback(out, "html"),
        export_feedback(out, "md"),
    ):
        for piece in contents(exported.data):
            assert b"Lovelace" not in piece, exported.name


def contents(data: bytes) -> list[bytes]:
    """The files in a zip; anything else as it is."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return [data]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [name.encode() + archive.read(name) for name in archive.namelist()]
