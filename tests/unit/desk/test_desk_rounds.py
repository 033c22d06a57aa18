"""Regrading beside the present grades, and adopting it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from desk.assignments import InputError, Inputs, grading_work, read_inputs, save_inputs
from desk.rounds import adopt_round, continue_round, rounds, start_round, versions
from desk.view import BatchView
from grading.report.grades import load_graded
from messages.errors import BatchError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from tests.support.desk import answer, plan, plan_tiny_class, request_for, request_of
from tests.support.homework import RUBRIC
from tests.support.waiting import wait_until


class Program:
    """As much of a Backend as starts something."""

    def __init__(self, script: str = "pass") -> None:
        self._script = script

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", self._script, *arguments]


def graded(folder: Path) -> tuple[Path, BatchView, Path]:
    """(batch folder, its view, another rubric)."""
    out, assignment = plan_tiny_class(folder)
    answer(out, assignment, [0, 1, 2])
    rubric = folder / "stricter.yaml"
    rubric.write_text(RUBRIC.replace("One point for", "Half a point for"), "utf-8")
    save_inputs(out, Inputs("Means", str(folder / "submissions"), str(folder / "rubric.yaml")))
    return out, BatchView(out, request_of).refresh(), rubric


def finished(out: Path, rubric: Path, view: BatchView) -> Path:
    """A round that has graded everything with one point a criterion."""
    place = start_round(Program(), out, view, rubric)  # type: ignore[arg-type]
    wait_until(lambda: not grading_work(place).is_alive, "the program has ended")
    assignment = plan(place, replace(request_for(out.parent), rubric=rubric))
    answer(place, assignment, [0, 1, 2], points=1)
    return place


def test_a_round_leaves_the_present_grades_alone(tmp_path: Path) -> None:
    out, view, rubric = graded(tmp_path)
    before = {name: (out / name).read_bytes() for name in ("batch.json", "results.jsonl", "desk.json")}

    place = finished(out, rubric, view)

    assert rounds(out) == [place]
    assert read_inputs(place).rubric == str(rubric)
    assert batches.batch_id(place) == batches.batch_id(out)
    assert [grade.points for grade in BatchView(place, request_of).refresh().grades] == [2, 2, 2]
    assert {name: (out / name).read_bytes() for name in before} == before


def test_an_adopted_round_computes_nothing_twice_and_keeps_the_old_grades(tmp_path: Path) -> None:
    out, view, rubric = graded(tmp_path)
    place = finished(out, rubric, view)

    adopt_round(Program(), out, view, place, BatchView(place, request_of).refresh().results)  # type: ignore[arg-type]
    wait_until(lambda: not grading_work(out).is_alive, "the program has ended")
    plan(out, replace(request_for(tmp_path), rubric=rubric))

    with Batch(out) as batch:
        assert not batch.open_jobs
    assert [grade.points for grade in view.refresh().grades] == [2, 2, 2]
    (kept,) = versions(out)
    assert [grade.points for grade in load_graded(kept).grades] == [4, 4, 4]
    assert read_inputs(out).rubric == str(rubric)


def test_after_a_trial_a_round_is_adopted_for_the_trial_alone(tmp_path: Path) -> None:
    out, view, rubric = graded(tmp_path)
    names = ("student0_100_1_homework.py", "student1_101_1_homework.py")
    grading_work(out).start(Program().command(), names=names)
    wait_until(lambda: not grading_work(out).is_alive, "the program has ended")
    place = finished(out, rubric, view)

    adopt_round(Program(), out, view, place, BatchView(place, request_of).refresh().results)  # type: ignore[arg-type]
    wait_until(lambda: not grading_work(out).is_alive, "the program has ended")

    record = grading_work(out).record()
    assert record
    assert record.only == names
    assert "--only" in record.command


def test_a_round_that_ended_with_an_error_goes_on_in_its_place_with_whom_it_was_for(tmp_path: Path) -> None:
    out, view, rubric = graded(tmp_path)
    name = "student0_100_1_homework.py"
    place = start_round(Program("raise SystemExit(3)"), out, view, rubric, [name])  # type: ignore[arg-type]
    wait_until(lambda: not grading_work(place).is_alive, "the program has ended")
    first = grading_work(place).record()

    continue_round(Program(), out, view, place)  # type: ignore[arg-type]
    wait_until(lambda: not grading_work(place).is_alive, "the program has ended")
    again = grading_work(place).record()

    assert rounds(out) == [place]
    assert first
    assert again
    assert first.pid != again.pid
    assert again.only == first.only == (name,)
    assert again.command[3:] == first.command[3:]
    assert grading_work(place).exit_code == 0


def test_a_class_that_is_not_done_is_not_regraded(tmp_path: Path) -> None:
    out, _ = plan_tiny_class(tmp_path)

    with pytest.raises(InputError, match="6 jobs have no result yet"):
        start_round(Program(), out, BatchView(out, request_of).refresh(), tmp_path / "rubric.yaml")  # type: ignore[arg-type]

    assert rounds(out) == []


def test_two_rounds_do_not_run_at_once(tmp_path: Path) -> None:
    out, view, rubric = graded(tmp_path)
    waits = Program("import time\nwhile True: time.sleep(0.05)")
    place = start_round(waits, out, view, rubric, ["student0_100_1_homework.py"])  # type: ignore[arg-type]

    try:
        with pytest.raises(BatchError, match="being graded now"):
            start_round(waits, out, view, rubric)  # type: ignore[arg-type]
    finally:
        # Asked again and again: an interrupt that comes while Python starts may be lost.
        wait_until(
            lambda: not grading_work(place).is_alive or grading_work(place).stop(), "the round has ended", poll_s=0.1
        )
