"""The books of `make night` notice what they are there for: here each is given one thing that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.night import books
from tests.night.courses import ASSIGNMENT, Course, made_course
from tests.night.record import Record

JOBS = ["job-1", "job-2", "job-3"]


def course(folder: Path, lines: list[dict[str, Any]]) -> Course:
    """A batch of three jobs with this journal."""
    folder.mkdir()
    (folder / "batch.json").write_text(json.dumps({"jobs": [{"job_id": job} for job in JOBS]}), "utf-8")
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return Course("a class", folder, folder, folder)


def line(job: str, text: str = "fine", run: int = 1, state: str = "succeeded") -> dict[str, Any]:
    return {"job_id": job, "run": run, "state": state, "text": text}


@pytest.mark.parametrize(
    ("lines", "lost", "doubled"),
    [
        ([line(job) for job in JOBS], 0, 0),
        ([line("job-1"), line("job-2")], 1, 0),
        ([*(line(job) for job in JOBS), line("job-1")], 0, 1),
        ([*(line(job) for job in JOBS), line("job-1", run=2)], 0, 0),
    ],
)
def test_a_job_without_a_result_is_lost_and_a_run_with_two_is_doubled(
    tmp_path: Path, lines: list[dict[str, Any]], lost: int, doubled: int
) -> None:
    record = Record(seed=0)
    books.count_jobs(record, [course(tmp_path / "batch", lines)])
    assert (record.jobs, record.lost, record.doubled) == (3, lost, doubled)
    assert record.is_clean == (not lost and not doubled)


def test_the_last_run_of_a_job_counts(tmp_path: Path) -> None:
    lines = [line("job-1", state="expired"), line("job-1", run=2), line("job-2", state="failed")]
    assert books.last_states(course(tmp_path / "batch", lines)) == {"job-1": "succeeded", "job-2": "failed"}


def test_an_answer_that_a_quiet_night_does_not_give_is_wrong(tmp_path: Path) -> None:
    quiet = course(tmp_path / "quiet", [line("job-1"), line("job-2")])
    record = Record(seed=0)
    books.count_wrong_answers(record, course(tmp_path / "batch", [line("job-1"), line("job-2", "other")]), quiet.out)
    assert record.wrong == 1


@pytest.mark.parametrize("shift", [0, 1])
def test_a_cell_of_somebody_else_is_wrong(tmp_path: Path, shift: int) -> None:
    made = made_course(tmp_path / "class", "canvas named", seed=0, size=20)
    assert made.truth
    numbers = [person.number for person in made.truth.people if person.number in made.truth.points]
    values = [made.truth.points[number] for number in numbers]
    rows = ["Student,ID,Section,Homework 5 (5502)", "    Points Possible,,,20.00"]
    shifted = [*values[shift:], *values[:shift]]
    rows += [f"X,{number},S,{value}.5" for number, value in zip(numbers, shifted, strict=True)]
    record = Record(seed=0)

    count = books.count_wrong_cells(record, made, "\n".join(rows).encode())

    assert ASSIGNMENT in rows[0]
    assert count == len(numbers)
    assert bool(record.wrong) == bool(shift)


def test_a_name_is_found_in_whatever_letters_it_is_written() -> None:
    record = Record(seed=0)
    places = {
        "a log": iter([b"all is well", "by ADA ÉMILE".encode()]),
        "a queue": iter([json.dumps("ada émile").encode()]),
        "the store": iter([b"kv:1"]),
    }
    books.count_names(record, ["Ada Émile", "Bo Long"], places)
    assert (record.leaked, record.unequal) == (2, ["a log holds 'ada émile'", "a queue holds 'ada émile'"])


def test_numbers_that_differ_are_named() -> None:
    record = Record(seed=0)
    books.expect(record, "jobs", {"journal": 3, "Prometheus": 3})
    books.expect(record, "answers", {"journal": 3, "report.html": 2})
    assert record.unequal == ["answers: journal 3, report.html 2"]
    assert "answers: journal 3, report.html 2" in record.markdown()
