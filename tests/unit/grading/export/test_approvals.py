"""An approval covers the points that its person saw, and no others."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from desk.decisions import WHOLE, Decisions, GradeChange, accept_grade, make_overrides
from desk.rows import QUEUES, make_rows, open_questions, select, undecided_rows, what_goes_out
from desk.view import BatchView
from grading.evaluation.hand_grades import reviewed_grades
from grading.export.final import apply_decisions, final_grades, lapsing_approvals
from grading.export.plain import export_csv
from grading.points import Grade, total_of
from grading.report.grades import load_graded, save_graded
from grading.reviews import Override, append_override, read_overrides
from tests.support.desk import answer, plan_tiny_class, request_of, write_grades

NAME = "Dr. Miller"
WHY = "Dr. Miller approved a total of 4; since then it has become 3 (works: 2 → 1)"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Three submissions, 2 points for each of the criteria `works` and `clear`."""
    folder, assignment = plan_tiny_class(tmp_path)
    answer(folder, assignment, range(3))
    write_grades(folder, assignment)
    return folder


def with_points(grade: Grade, **points: float) -> Grade:
    criteria = tuple(replace(item, points=points.get(item.id, item.points)) for item in grade.criteria)
    return replace(grade, criteria=criteria, points=total_of(criteria))


def grade_again(out: Path, keep: bool = False, **points: float) -> None:
    """Give the first submission other points of the model, and `keep` what it had as a round does."""
    graded_class = load_graded(out)
    if keep:
        place = out / "versions" / f"{len(list(out.glob('versions/*'))) + 1}-12345678"
        place.mkdir(parents=True)
        save_graded(place, graded_class)
    first, *others = graded_class.grades
    save_graded(out, replace(graded_class, grades=(with_points(first, **points), *others)))


def first_final(out: Path, include_unreviewed: bool = False):  # type: ignore[no-untyped-def]
    return final_grades(out, include_unreviewed)[1][0]


def approve(out: Path, **fields: object) -> Override:
    grade = load_graded(out).grades[0]
    standing = Decisions(out).refresh().get(grade.item_id, {})
    approval = replace(accept_grade(grade, NAME, standing), **fields)  # type: ignore[arg-type]
    append_override(out, approval)
    return approval


def test_an_approval_lapses_when_the_models_points_change_and_counts_again_when_they_are_as_they_were(
    out: Path,
) -> None:
    approve(out)
    assert (first_final(out).points, first_final(out).is_reviewed) == (4, True)

    grade_again(out, works=1)

    final = first_final(out)
    assert (final.points, final.why_blank) == (None, f"needs review: {WHY}")
    assert (final.is_reviewed, final.reviewers, final.lapsed) == (False, (), WHY)
    exported = export_csv(out)
    assert [blank.reason for blank in exported.left_blank] == [f"needs review: {WHY}"]
    assert b'"no",""' in exported.data.splitlines()[1]
    assert first_final(out, include_unreviewed=True).points == 3
    assert reviewed_grades(out) == {}, "points that nobody saw are no person's grades"
    grade_again(out, works=2)
    assert (first_final(out).points, first_final(out).is_reviewed) == (4, True)


def test_a_new_approval_covers_the_new_points(out: Path) -> None:
    approve(out)
    grade_again(out, works=1)
    approve(out)

    assert (first_final(out).points, first_final(out).is_reviewed, first_final(out).reviewers) == (3, True, (NAME,))


def test_points_that_a_person_typed_stay_and_so_does_the_approval_of_them(out: Path) -> None:
    grade = load_graded(out).grades[0]
    append_override(out, *make_overrides(grade, {}, {"works": GradeChange("I ran it", 3)}, NAME))
    approval = approve(out)
    assert approval.seen == {"works": 3, "clear": 2}

    grade_again(out, works=0)
    assert (first_final(out).points, first_final(out).is_reviewed) == (5, True)
    grade_again(out, clear=1)
    assert first_final(out).lapsed == f"{NAME} approved a total of 5; since then it has become 4 (clear: 2 → 1)"


def test_a_total_that_a_person_set_stays(out: Path) -> None:
    grade = load_graded(out).grades[0]
    append_override(out, Override(grade.item_id, None, 5, None, "agreed", NAME))
    approve(out)
    grade_again(out, works=0)

    assert (first_final(out).points, first_final(out).lapsed) == (5, "")


def test_a_new_summary_settles_the_doubts_about_the_points_that_were_seen_only(out: Path) -> None:
    grade = load_graded(out).grades[0]
    append_override(out, *make_overrides(grade, {}, {WHOLE: GradeChange("kinder", feedback="Well done.")}, NAME))
    assert first_final(out).is_reviewed
    grade_again(out, works=1)

    assert (first_final(out).lapsed, first_final(out).summary) == (WHY, "Well done.")


def test_criteria_that_came_or_went_change_what_was_approved(out: Path) -> None:
    grade = load_graded(out).grades[0]
    approval = accept_grade(grade, NAME)
    alone = replace(grade, criteria=grade.criteria[:1])
    assert apply_decisions(alone, {None: approval}).lapsed.endswith("become 2 (clear: 2 → –)")
    less = replace(approval, seen={"works": 2})
    assert apply_decisions(grade, {None: less}).lapsed.endswith("total of 2; since then it has become 4 (clear: – → 2)")
    nothing = replace(approval, seen={"works": None, "clear": 2})
    assert "approved a total of –;" in apply_decisions(grade, {None: nothing}).lapsed


def test_an_old_line_is_judged_by_the_grades_that_a_round_replaced_after_it(out: Path) -> None:
    before = approve(out, seen=None)
    assert '"seen"' not in (out / "reviews.jsonl").read_text("utf-8")
    grade_again(out, works=1)
    assert first_final(out).points == 3, "nothing says what was seen"

    grade_again(out, works=2)
    grade_again(out, keep=True, works=1)
    assert first_final(out).lapsed == WHY
    (kept,) = out.glob("versions/*/grades.json")
    os.utime(kept, (before.time - 10, before.time - 10))
    assert (first_final(out).points, first_final(out).lapsed) == (3, ""), "it was written after the round"


def test_a_line_of_the_form_before_without_a_time_counts_as_it_did(out: Path) -> None:
    item = load_graded(out).grades[0].item_id
    (out / "reviews.jsonl").write_text(f'{{"submission": "{item}", "by": "{NAME}"}}\n', "utf-8")
    grade_again(out, keep=True, works=1)

    assert (first_final(out).points, first_final(out).is_reviewed) == (3, True)


def test_which_approvals_a_round_would_end_is_told_before(out: Path) -> None:
    approve(out)
    before = load_graded(out).grades
    after = [with_points(before[0], works=1), *before[1:]]

    told = lapsing_approvals(out, before, after)

    assert told[0].startswith("1 approval would lapse")
    assert told[1:] == [f"{before[0].display_name}: {WHY}"]
    assert lapsing_approvals(out, before, before) == []
    append_override(out, replace(read_overrides(out)[0], seen=None))
    assert lapsing_approvals(out, before, after) == told, "an old line saw the grades that it would replace"


def test_the_desk_asks_again_where_an_approval_has_lapsed(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path)
    answer(out, assignment, range(3))
    view = BatchView(out, request_of).refresh()
    grade = view.grades[0]
    append_override(out, replace(accept_grade(grade, NAME), seen={"works": 1, "clear": 2}))
    decisions = Decisions(out).refresh()
    rows = make_rows(view, decisions)

    assert [row.name for row in select(rows, QUEUES["needs review"])] == [grade.display_name]
    assert open_questions(rows) == "the whole work in 1"
    assert grade.item_id in undecided_rows(rows, decisions, "works", doubtful_only=False)
    given = [apply_decisions(grade, decisions[grade.item_id], include_unreviewed=True)]
    assert what_goes_out(given, decisions)[0].endswith("0 that a person has decided on, 1 on the model's points alone.")


def test_a_class_in_which_everybody_would_get_0_is_not_given_out_without_a_word(out: Path) -> None:
    graded_class = load_graded(out)
    zeros = tuple(with_points(grade, works=0, clear=0) for grade in graded_class.grades)
    save_graded(out, replace(graded_class, grades=zeros))
    assert export_csv(out).asks == ("everybody would get 0 points, all 3 submissions that have a grade",)

    save_graded(out, replace(graded_class, grades=(*zeros[1:], with_points(zeros[0], works=0.5))))
    assert export_csv(out).asks == ()
