"""Grades that people gave: read from one form of table, from a gradebook's column, from the desk's reviews."""

from pathlib import Path

import pytest

from grading.evaluation.hand_grades import in_class, read_hand_grades, reviewed_grades
from grading.reviews import ROUND_REASON, Override, append_override
from messages.errors import UsageError
from tests.support.desk import answer, plan_tiny_class, write_grades

TABLE = b"submission,criterion,points,rater\nann.R,works,2.5,Ada\nann.R,works,3,Bo\nben.R,works,,Ada\nben.R,,4,Ada\n"


def test_a_row_is_a_grade_and_one_without_points_is_none() -> None:
    assert read_hand_grades(TABLE, "hand.csv") == {
        ("ann.R", "works", "Ada"): 2.5,
        ("ann.R", "works", "Bo"): 3,
        ("ben.R", "", "Ada"): 4,
    }


def test_a_decimal_comma_and_a_table_without_criteria_and_raters_are_read() -> None:
    assert read_hand_grades(b"submission;points\nann.R;2,5\n", "hand.csv") == {("ann.R", "", ""): 2.5}


def test_a_gradebooks_column_is_the_totals() -> None:
    gradebook = b'Student,ID,Homework 4 (17)\n  Points Possible,,10\n"Aldertree, Ada",48101,7\n"Berg, Bo",48102,\n'

    assert read_hand_grades(gradebook, "gradebook", "Homework 4 (17)") == {("48101", "", ""): 7, ("", "", ""): 10}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (b"name,points\nann.R,2\n", "needs the columns submission"),
        (b"submission,criterion\nann.R,works\n", "needs the columns submission"),
        (b"submission,points\nann.R,two\n", "row 2: 'two' is not a number"),
        (b"submission,points\nann.R,-20000\n", "points must be from -10000"),
        (b"submission,points\nann.R,1\nann.R,2\n", "has graded the same work twice"),
        (b"", "is empty"),
    ],
)
def test_what_can_not_be_read_for_certain_is_refused(table: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_hand_grades(table, "hand.csv")


def test_grades_of_nobody_in_the_class_count_for_nobody_and_a_number_means_its_submission() -> None:
    names = ["aldertreeada_48101_9_hw.R", "bo.R"]
    grades = in_class(
        {("48101", "a", ""): 1, ("48101", "b", ""): 2, ("who", "a", ""): 3, ("", "a", ""): 3}, names, "ab"
    )

    assert grades == {(names[0], "a", ""): 1, (names[0], "b", ""): 2, (names[0], "", ""): 3}


def test_a_total_follows_only_where_every_criterion_was_graded_and_a_given_one_stands() -> None:
    halves = {
        ("ann", "a", "Ada"): 1,
        ("ann", "b", "Bo"): 2,
        ("ben", "a", ""): 1,
        ("ben", "b", ""): 1,
        ("ben", "", ""): 5,
    }

    assert in_class(halves, ["ann", "ben"], "ab") == halves


def test_reviews_are_what_stands_of_submissions_that_a_person_decided_on(tmp_path: Path) -> None:
    out, assignment = plan_tiny_class(tmp_path)
    answer(out, assignment, range(3))
    write_grades(out, assignment)
    first, second, third = (item.item_id for item in assignment.items)
    append_override(out, Override(first, "works", 0, None, "it does not run"))
    append_override(out, Override(second, "works", 3, None, f"{ROUND_REASON} 1"))
    append_override(out, Override(third, None, None, None, "looked at"))

    reviewed = reviewed_grades(out)

    name, _, last = (item.submission.name for item in assignment.items)
    assert reviewed == {
        **{(name, "works", "reviews"): 0, (name, "clear", "reviews"): 2, (name, "", "reviews"): 2},
        **{(last, "works", "reviews"): 2, (last, "clear", "reviews"): 2, (last, "", "reviews"): 4},
    }
