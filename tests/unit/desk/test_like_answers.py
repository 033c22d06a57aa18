"""Decisions about several like answers at once: one a student, nothing silently overwritten, undone as one."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from desk.decisions import Decisions, Overrides, accept_grade
from desk.rows import make_rows, undecided_rows
from desk.view import BatchView
from grading.likeness import CriterionAnswer, answer_of, group_answers
from grading.reviews import (
    ROUND_REASON,
    Override,
    append_override,
    current_decisions,
    decide_together,
    decided_together,
    read_overrides,
    undo_together,
    version_of,
)
from messages.errors import BatchError
from tests.support.desk import answer, plan_tiny_class, request_of


def graded(folder: Path, size: int = 4, doubtful: int = 2) -> tuple[Path, BatchView, Decisions]:
    """A class with two points for each criterion, the evidence of the first `doubtful` made up."""
    out, assignment = plan_tiny_class(folder, size)
    answer(out, assignment, range(doubtful, size))
    answer(out, assignment, range(doubtful), evidence="nowhere to be found")
    return out, BatchView(out, request_of).refresh(), Decisions(out)


def answers_of(view: BatchView) -> list[CriterionAnswer]:
    return [
        answer_of(grade.item_id, grade.criteria[0], view.item(number).submission)
        for number, grade in enumerate(view.grades)
    ]


def test_a_decision_on_a_group_settles_each_doubt_and_stands_beside_each_student(tmp_path: Path) -> None:
    out, view, decisions = graded(tmp_path)
    rows = make_rows(view, decisions.refresh())
    doubtful = undecided_rows(rows, {}, "works", doubtful_only=True)
    assert [row.number for row in doubtful.values()] == [0, 1]

    assert decide_together(out, doubtful, "works", 3, "it runs", decisions.refresh(), "Ada") == []

    lines = [json.loads(line) for line in (out / "reviews.jsonl").read_text("utf-8").splitlines()]
    assert [(line["item_id"], line["points"], line["reason"], line["by"]) for line in lines] == [
        (grade.item_id, 3, "it runs", "Ada") for grade in view.grades[:2]
    ]
    rows = make_rows(view, decisions.refresh())
    assert [row.final.points for row in rows] == [None, None, 4, 4], "of the other criterion the doubt is still open"
    assert not undecided_rows(rows, decisions.refresh(), "works", doubtful_only=True)
    others = undecided_rows(rows, decisions.refresh(), "works", doubtful_only=False)
    assert [row.number for row in others.values()] == [2, 3]


def test_whom_somebody_decided_on_meanwhile_is_left_and_named(tmp_path: Path) -> None:
    out, view, decisions = graded(tmp_path)
    seen = decisions.refresh()
    theirs, untouched = view.grades[:2]
    append_override(out, accept_grade(theirs, "Ben"))

    left_ids = decide_together(out, [theirs.item_id, untouched.item_id], "works", 0, "r", seen, "Ada")

    assert left_ids == [theirs.item_id]
    standing = read_overrides(out)
    assert [each.reviewer for each in current_decisions(standing, theirs.item_id).values()] == ["Ben"]
    assert [each.points for each in current_decisions(standing, untouched.item_id).values()] == [0]


def test_a_group_is_undone_as_one_and_what_came_later_or_elsewhere_stays(tmp_path: Path) -> None:
    out, view, decisions = graded(tmp_path)
    ids = [grade.item_id for grade in view.grades]
    before = Override(ids[0], "clear", 1, "Names.", "r", "Ben")
    append_override(out, before)
    decide_together(out, ids[:3], "works", 3, "r", decisions.refresh(), "Ada")
    later = Override(ids[1], "works", 1, None, "it does not run", "Ben")
    append_override(out, later)
    (group,) = [made for made in decided_together(decisions.refresh(), "works") if len(made) > 1]

    # Of the three, one was decided on again: it is no part of what can be undone
    assert [decision.item_id for decision in group] == [ids[0], ids[2]]
    line_count = len((out / "reviews.jsonl").read_text("utf-8").splitlines())
    standing = decisions.refresh()
    assert undo_together(out, group, standing, "Ada") == []

    assert decisions.refresh() == {ids[0]: {"clear": before}, ids[1]: {"works": later}}
    assert {each.item_id: each for each in read_overrides(out)} == {ids[0]: before, ids[1]: later}
    assert len((out / "reviews.jsonl").read_text("utf-8").splitlines()) > line_count, "nothing is rewritten"
    assert undo_together(out, group, standing, "Ada") == [ids[0], ids[2]], "a second click undoes nothing more"


def test_what_was_decided_one_by_one_or_by_a_round_is_no_group() -> None:
    made: dict[str, Overrides] = {
        "a": {"works": Override("a", "works", 1, None, "it fails", "Ada", 5.0)},
        "b": {"works": Override("b", "works", 1, None, "it fails", "Ada", 6.0)},
        "c": {"works": Override("c", "works", 1, None, "it runs", "Ada", 7.0)},
        "d": {"works": Override("d", "works", 1, None, f"{ROUND_REASON} 1", "Ada", 8.0)},
        "e": {"works": Override("e", "works", 1, None, "looked at", "", 0.0)},
    }
    assert [[each.item_id for each in group] for group in decided_together(made, "works")] == [["c"], ["b"], ["a"]]
    assert decided_together(made, "clear") == []


def test_without_a_reason_nothing_is_kept_and_with_nobody_nothing_happens(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="gives no reason"):
        decide_together(tmp_path, ["a"], "works", 1, " ", {}, "Ada")
    assert decide_together(tmp_path, [], "works", 1, "r", {}, "Ada") == []
    assert read_overrides(tmp_path) == []


def test_two_people_who_decide_on_groups_at_once_lose_and_overwrite_nothing(tmp_path: Path) -> None:
    size, acts = 30, 40
    ids = [f"item{number}" for number in range(size)]
    kept: dict[str, list[str]] = {"Ada": [], "Ben": []}
    left: list[str] = []
    start = threading.Barrier(2)

    def decide(name: str) -> None:
        draw = random.Random(name)
        start.wait()
        for _ in range(acts):
            standing: dict[str, dict[str | None, Override]] = {}
            for override in read_overrides(tmp_path):
                standing.setdefault(override.item_id, {})[override.criterion_id] = override
            chosen = draw.sample(ids, 5)
            left_ids = decide_together(tmp_path, chosen, "works", draw.randrange(4), "r", standing, name)
            left.extend(left_ids)
            kept[name] += [id for id in chosen if id not in left_ids]

    with ThreadPoolExecutor() as pool:
        list(pool.map(decide, kept))

    lines = [json.loads(line) for line in (tmp_path / "reviews.jsonl").read_text("utf-8").splitlines()]
    for name, decisions in kept.items():
        assert [line["item_id"] for line in lines if line["by"] == name] == decisions, "none is lost"
    assert len(lines) + len(left) == 2 * acts * 5
    standing: dict[str, Override] = {}
    for line in lines:  # each was made in sight of the one before it
        before = [standing[line["item_id"]]] if line["item_id"] in standing else []
        assert line["version"] == version_of(before)
        standing[line["item_id"]] = Override(
            line["item_id"], "works", line["points"], None, "r", line["by"], line["time"], line["version"]
        )


def test_groups_of_a_class_are_of_equal_evidence(tmp_path: Path) -> None:
    _, view, _ = graded(tmp_path)
    assert [len(group) for group in group_answers(answers_of(view))] == [2, 1, 1], "made-up evidence joins nobody"
