"""`make demo`: a newcomer's first minutes."""

import csv
import json

import pytest

from examples.model.scores import kendall_tau
from tests.support.homework import EXAMPLE, Demo, assert_each_once, journal

pytestmark = pytest.mark.system  # minutes, not seconds


def test_the_demo_grades_the_whole_class_and_ends_well(demo: Demo) -> None:
    assert demo.first.code == 0, demo.first.stdout + demo.first.stderr
    assert "Traceback" not in demo.first.stderr
    assert "not real grades" in demo.first.stdout


def test_every_submission_is_in_the_grades_with_points_or_the_expected_reason(demo: Demo) -> None:
    expected = json.loads((EXAMPLE / "expected.json").read_text("utf-8"))

    with (demo.out / "grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["submission"]: row for row in csv.DictReader(file)}

    assert set(rows) == {path.name for path in (EXAMPLE / "submissions").iterdir()}
    assert {name for name, row in rows.items() if row["state"] == "failed"} == set(expected["failed"])
    assert {name for name, row in rows.items() if row["state"] == "empty"} == set(expected["empty"])
    assert all(rows[name]["points"] == "" and why in rows[name]["reason"] for name, why in expected["failed"].items())
    graded = [row for row in rows.values() if row["state"] == "graded"]
    assert len(graded) == len(rows) - len(expected["failed"]) - len(expected["empty"])
    assert all(0 <= float(row["points"]) <= float(row["max_points"]) for row in graded)


def test_the_grades_rank_the_class_as_its_labels_do(demo: Demo) -> None:
    labels = json.loads((EXAMPLE / "labels.json").read_text("utf-8"))["submissions"]

    with (demo.out / "grades.csv").open(encoding="utf-8", newline="") as file:
        given = {row["submission"]: float(row["points"]) for row in csv.DictReader(file) if row["points"]}
    pairs = [(float(label["total"]), given[name]) for name, label in labels.items() if label["points"] is not None]

    assert len(pairs) == len(given) == 15
    assert kendall_tau(pairs) >= 0.8


def test_the_report_says_that_these_are_no_real_grades(demo: Demo) -> None:
    page = (demo.out / "report.html").read_text("utf-8")

    assert "not real grades" in page
    assert "http://" not in page
    assert "https://" not in page


def test_every_answer_of_the_demo_came_through_a_real_kv_transfer(demo: Demo) -> None:
    answers = [row for row in journal(demo.out) if row["state"] == "succeeded"]

    assert len(answers) == 28
    assert {row["decode"]["kv_transfer"] for row in answers} == {"verified"}
    assert {row["decode"]["evaluated_tokens"] for row in answers} == {1}
    assert min(row["decode"]["prompt_tokens"] for row in answers) >= 1000


def test_run_again_the_demo_says_that_all_is_graded_and_calls_no_engine(demo: Demo) -> None:
    before = (demo.out / "results.jsonl").read_bytes()

    again = demo.run()

    assert again.code == 0, again.stdout + again.stderr
    assert "already graded; no engine was called" in again.stdout
    assert (demo.out / "results.jsonl").read_bytes() == before
    assert_each_once(demo.out)
