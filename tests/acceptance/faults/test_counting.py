"""The table's figures: each kind of damage is seen."""

from typing import Any

import pytest

from tests.acceptance.faults.row import Row, count


def result(job: str, text: str = "right", state: str = "succeeded", run: int = 1) -> dict[str, Any]:
    return {"job_id": job, "run": run, "state": state, "text": text}


def figures(*results: dict[str, Any], submitted: str = "ab", started: str = "ab") -> Row:
    return count(
        "a fault",
        wanted=["a", "b"],
        submitted=[{"job_id": job, "run": 1} for job in submitted],
        results=list(results),
        texts={"a": "right", "b": "right"},
        steps=[{"job": job, "event": "decode_started"} for job in started],
        dead_lettered=0,
        recovery_s=None,
    )


@pytest.mark.parametrize(
    ("row", "counted", "clean"),
    [
        (figures(result("a"), result("b")), {"attempted": 2, "confirmed": 2, "succeeded": 2}, True),
        (figures(result("a")), {"lost": 1}, False),
        (figures(result("a"), result("b", state="failed", text="")), {"failed": 1, "lost": 0}, True),
        (figures(result("a"), result("b"), result("c")), {"unexpected": 1}, False),  # a stranger's
        (figures(result("a"), result("b", text="wrong")), {"unexpected": 1}, False),
        # A second line of the same run is a duplicate, and one of another run is none
        (figures(result("a"), result("a"), result("b"), result("b", run=2)), {"journal_duplicates": 1}, False),
        (figures(result("a"), result("b"), submitted="abb"), {"lost_before_rerun": 1, "confirmed": 2}, True),
        (figures(result("a"), result("b"), started="aaab"), {"executed_twice": 1}, True),
    ],
)
def test_each_kind_of_damage_is_counted(row: Row, counted: dict[str, int], clean: bool) -> None:
    assert ({name: getattr(row, name) for name in counted}, row.is_clean()) == (counted, clean)


def test_an_answer_that_was_noted_and_given_again_is_no_clean_crash():
    noted = [{"job": "-", "event": f"job a: answer {number} is noted"} for number in (0, 1, 2, 1)]
    steps = [*noted, {"job": "-", "event": "job a: 3 answers are noted, 5 left"}]
    row = count("a fault", ["a"], [], [result("a")], {"a": "right"}, steps, 0, None)
    assert (row.resumed, row.answers_redone, row.is_clean()) == (1, 1, False)


def test_of_a_job_with_questions_all_answers_are_compared():
    answers = {**result("a", text=""), "answers": [{"text": "yes"}, {"text": "no"}]}
    rows = [count("a fault", ["a"], [], [answers], {"a": text}, [], 0, None) for text in ("yes\nno", "yes\nyes")]
    assert [row.unexpected for row in rows] == [0, 1]
