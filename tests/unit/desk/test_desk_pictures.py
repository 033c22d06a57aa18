"""The class as the desk draws it: the model's points, and beside them what people decided."""

from pathlib import Path

from desk.decisions import Decisions
from desk.pictures import BY_MODEL, NOW, draw_class, draw_criteria
from desk.rows import make_rows
from desk.view import BatchView
from grading.reviews import Override, append_override
from tests.support.desk import answer, plan_tiny_class, request_of


def drawn(folder: Path) -> tuple[list[str], list[str]]:
    view = BatchView(folder, request_of).refresh()
    assert view.rubric
    found = make_rows(view, Decisions(folder).refresh())
    return [one.words for one in draw_class(view.rubric, found)], [
        one.words for one in draw_criteria(view.rubric, found)
    ]


def test_nothing_is_drawn_before_there_are_grades(tmp_path: Path) -> None:
    folder, _ = plan_tiny_class(tmp_path, 2)

    assert drawn(folder) == ([], [])


def test_a_decision_moves_one_submission_and_shows_as_a_difference(tmp_path: Path) -> None:
    folder, assignment = plan_tiny_class(tmp_path, 3)
    answer(folder, assignment, range(3))
    before, _ = drawn(folder)
    assert len(before) == 1
    assert NOW not in before[0]

    criterion = assignment.rubric.criteria[0]
    append_override(folder, Override(assignment.items[0].item_id, criterion.id, 0, None, "it fails", "ada"))
    (points,), each = drawn(folder)

    assert points.count("×3") == 1  # by the model
    assert {BY_MODEL, NOW} == {part.split(":")[0] for part in points.split("; ")}
    assert each[0].split(f"{NOW}: ")[1].startswith("0 ×1, 1 ×0, 2 ×2")
