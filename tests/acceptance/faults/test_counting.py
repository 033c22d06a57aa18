"""The table's figures: each kind of damage is seen."""

from __future__ import annotations

from typing import Any

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


def test_a_batch_that_went_well_is_clean():
    row = figures(result("a"), result("b"))
    assert row.is_clean()
    assert (row.attempted, row.confirmed, row.succeeded) == (2, 2, 2)


def test_a_job_without_a_result_is_lost():
    row = figures(result("a"))
    assert (row.lost, row.is_clean()) == (1, False)


def test_a_failed_job_has_a_result():
    row = figures(result("a"), result("b", state="failed", text=""))
    assert (row.failed, row.lost, row.is_clean()) == (1, 0, True)


def test_a_strangers_result_is_unexpected():
    row = figures(result("a"), result("b"), result("c"))
    assert (row.unexpected, row.is_clean()) == (1, False)


def test_another_answer_is_unexpected():
    row = figures(result("a"), result("b", text="wrong"))
    assert (row.unexpected, row.is_clean()) == (1, False)


def test_a_second_line_of_the_same_run_is_a_duplicate_and_one_of_another_run_is_none():
    row = figures(result("a"), result("a"), result("b"), result("b", run=2))
    assert (row.journal_duplicates, row.is_clean()) == (1, False)


def test_a_job_confirmed_twice_was_lost_before_the_rerun():
    row = figures(result("a"), result("b"), submitted="abb")
    assert (row.lost_before_rerun, row.confirmed, row.is_clean()) == (1, 2, True)


def test_an_answer_that_was_noted_and_given_again_is_no_clean_crash():
    noted = [{"job": "-", "event": f"job a: answer {number} is noted"} for number in (0, 1, 2, 1)]
    steps = [*noted, {"job": "-", "event": "job a: 3 answers are noted, 5 left"}]
    row = count("a fault", ["a"], [], [result("a")], {"a": "right"}, steps, 0, None)
    assert (row.resumed, row.answers_redone, row.is_clean()) == (1, 1, False)


def test_of_a_job_with_questions_all_answers_are_compared():
    answers = {**result("a", text=""), "answers": [{"text": "yes"}, {"text": "no"}]}
    rows = [count("a fault", ["a"], [], [answers], {"a": text}, [], 0, None) for text in ("yes\nno", "yes\nyes")]
    assert [row.unexpected for row in rows] == [0, 1]


def test_a_job_begun_twice_is_counted_once():
    assert figures(result("a"), result("b"), started="aaab").executed_twice == 1
