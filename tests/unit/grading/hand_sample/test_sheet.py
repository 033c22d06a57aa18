"""The sheet of hand grades filled in one by one, by one person or two."""

import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grading.hand_sample import (
    SHEET,
    BoundError,
    Draw,
    SamplePlan,
    SheetConflict,
    bound_of,
    draw_more,
    draw_sample,
    enter_points,
    entered_points,
)
from grading.report.grades import load_graded
from tests.support.desk import answer, plan_tiny_class, write_grades

SIZE = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A class of twelve with two points for each criterion."""
    out, assignment = plan_tiny_class(tmp_path, SIZE)
    answer(out, assignment, range(SIZE))
    write_grades(out, assignment)
    return out


def held(folder: Path, made: Draw) -> dict[str, dict[str, str]]:
    return entered_points(folder / SHEET, made, load_graded(folder))


def test_points_are_kept_one_by_one_until_the_sheet_can_be_read(folder: Path) -> None:
    made = draw_sample(folder, SamplePlan((3,)), "Ada")
    with pytest.raises(BoundError, match="3 of 3 submissions have no points yet"):
        bound_of(folder)
    for item_id in made.sampled_members():
        enter_points(folder, item_id, "works", "2", "")
        with pytest.raises(BoundError):
            bound_of(folder)
        enter_points(folder, item_id, "clear", "1.0", "")
    assert set(map(tuple, (cells.values() for cells in held(folder, made).values()))) == {("2", "1")}
    (part,) = bound_of(folder).parts
    assert [(one.criterion, one.same, one.bias) for one in part.agreement] == [
        ("works", 3, 0.0),
        ("clear", 0, -1.0),
        ("", 0, -1.0),
    ]


def test_what_somebody_entered_meanwhile_is_not_overwritten(folder: Path) -> None:
    made = draw_sample(folder, SamplePlan((3,)), "Ada")
    item_id = next(iter(made.sampled_members()))
    enter_points(folder, item_id, "works", "2", "")
    with pytest.raises(SheetConflict) as conflict:
        enter_points(folder, item_id, "works", "3", "")
    assert conflict.value.stands == "2"
    assert held(folder, made)[item_id] == {"works": "2", "clear": ""}
    enter_points(folder, item_id, "works", "2", "")  # the same is none
    enter_points(folder, item_id, "works", "3", "2")
    enter_points(folder, item_id, "works", "", "3")
    assert held(folder, made)[item_id] == {"works": "", "clear": ""}


def test_of_many_who_write_at_once_none_loses_anything(folder: Path) -> None:
    made = draw_sample(folder, SamplePlan((SIZE - 2, SIZE)), "Ada")
    cells = [(item_id, criterion) for item_id in made.sampled_members() for criterion in ("works", "clear")]
    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(enter_points, folder, item_id, criterion, "1", "") for item_id, criterion in cells]
        extended = pool.submit(draw_more, folder)
        for each in (*writers, extended):
            each.result()
    made = extended.result()
    filled = held(folder, made)
    assert len(filled) == SIZE
    assert [[*filled[item_id].values()] for item_id in [*filled][: SIZE - 2]] == [["1", "1"]] * (SIZE - 2)


@pytest.mark.parametrize(
    ("criterion", "points", "said"),
    [
        ("works", "4", "points must be from 0 to 3"),
        ("works", "two", "not a number of points"),
        ("gone", "1", "the rubric has changed"),
    ],
)
def test_what_cannot_be_entered_leaves_the_sheet_as_it_was(
    folder: Path, criterion: str, points: str, said: str
) -> None:
    made = draw_sample(folder, SamplePlan((3,)), "Ada")
    before = (folder / SHEET).read_bytes()
    with pytest.raises(BoundError, match=said):
        enter_points(folder, next(iter(made.sampled_members())), criterion, points, "")
    others = {one.item_id for stratum in made.strata for one in stratum.members} - made.sampled_members().keys()
    with pytest.raises(BoundError, match="not drawn"):
        enter_points(folder, min(others), "works", "1", "")
    assert (folder / SHEET).read_bytes() == before


def test_a_remark_that_was_written_elsewhere_and_a_spreadsheets_semicolons_stay(folder: Path) -> None:
    made = draw_sample(folder, SamplePlan((3,)), "Ada")
    rows = list(csv.reader((folder / SHEET).read_text("utf-8").splitlines()))
    rows[1][-1] = "ask her"
    (folder / SHEET).write_text("".join(";".join(row) + "\n" for row in rows), "utf-8")
    enter_points(folder, next(iter(made.sampled_members())), "clear", "0,5", "")
    line = (folder / SHEET).read_text("utf-8").splitlines()[1]
    assert line.split(";")[2:] == ['"0.5"', '"ask her"']
