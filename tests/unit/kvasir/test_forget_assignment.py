"""`kvasir forget` leaves no name and no grade of a desk's assignment, and touches nothing outside its folder."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from desk import assignments
from desk.assignments import Inputs, grading_work
from desk.rounds import keep_grades, start_round
from desk.view import BatchView
from grading.report.grades import load_graded
from grading.reviews import Override, append_override
from infra.config.settings import load_settings
from kvasir import cli
from kvasir.desk_app.configuration import DeskBackend
from tests.support.homework import RUBRIC, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text
from tests.support.waiting import wait_until

PLANTED = ("fairweather", "Fairweather", "brambleby", "Brambleby")


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temp"))
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")


def graded_at_the_desk(home: Path) -> Path:
    """An assignment with uploads, a grading, a review, an export, a regrade and a version, and a crash's leavings."""
    work = [
        (f"{name}_{number}_1_homework.py", f"# {name.title()}\ndef mean(values):\n    return {number}\n".encode())
        for number, name in enumerate(("fairweatherada", "bramblebyivo"), 100)
    ]
    folder = assignments.create_folder(home, "Means")
    rubric = assignments.save_rubric(folder, "rubric.yaml", RUBRIC.encode())
    submissions = assignments.save_submissions(folder, work)
    solution = assignments.save_file(folder / "solution", "solution.py", b"# by Ada Fairweather\nprint(1)\n")
    inputs = Inputs("Means", str(submissions), str(rubric), str(solution))
    assignments.save_inputs(folder, inputs)
    desk = DeskBackend(load_settings(), None, home)
    assert cli.run_command(assignments.grade_command(desk, inputs, folder)[3:]) == 0
    grading_work(folder).start([sys.executable, "-c", "print('fairweatherada: 4 points')"])
    wait_until(lambda: grading_work(folder).exit_code is not None, "its process has ended", 60)
    view = BatchView(folder, desk.request_of).refresh()
    append_override(folder, Override(view.grades[0].item_id, None, None, "Well done, Fairweather.", "read", "Ivo"))
    assert cli.run_command(["export", str(folder), "--format", "feedback", "--include-unreviewed", "--yes"]) in (0, 1)
    other = assignments.save_rubric(folder, "rubric.yaml", RUBRIC.replace("points: 3", "points: 4").encode())
    place = start_round(desk, folder, view, other)
    wait_until(lambda: grading_work(place).exit_code is not None, "the class is regraded", 60)
    keep_grades(folder, load_graded(folder))
    (folder / ".grades.csv.0123abcd").write_text("fairweatherada,4\n")
    (place / ".batch.json.0123abcd").write_text('{"name": "bramblebyivo"}')
    return folder


def planted_in(place: Path) -> list[str]:
    """Where a planted name stands, in a file's name or in a file."""
    found = []
    for path in place.rglob("*"):
        held = path.name.encode() + (path.read_bytes() if path.is_file() else b"")
        found += [str(path)] if any(name.encode() in held for name in PLANTED) else []
    return found


def test_no_name_is_left_of_an_assignment_of_the_desk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = graded_at_the_desk(tmp_path / "home")
    (tmp_path / "home" / f"{folder.name}.before-20260101").mkdir()
    assert len(planted_in(folder)) > 10
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))

    assert cli.run_command(["forget", str(folder)]) == 0

    assert not folder.exists()
    assert planted_in(tmp_path) == []
    said = capsys.readouterr()
    assert "handed-in/ (the uploaded submissions: 2 files)" in said.err
    assert f"{folder.name}.before-20260101" in said.out
    assert "--to" in said.out


def test_an_assignment_that_was_never_graded_is_forgotten_with_its_uploads(tmp_path: Path) -> None:
    folder = assignments.create_folder(tmp_path / "home", "Means")
    submissions = assignments.save_submissions(folder, [("fairweatherada_1_1_hw.py", b"x = 1\n")])
    assignments.save_inputs(folder, Inputs("Means", str(submissions), ""))

    assert cli.run_command(["forget", str(folder), "--yes"]) == 0

    assert not folder.exists()


def test_a_batch_of_prompts_is_forgotten_whole(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"id": "fairweatherada", "prompt": "Hello, Brambleby"}) + "\n")
    assert cli.run_command(["run", "prompts.jsonl", "--model", "tiny:1b", "--out", "out", "--quiet"]) == 0
    (tmp_path / "out" / ".answers.jsonl.89abcdef").write_text("fairweatherada")

    assert cli.run_command(["forget", "out", "--yes"]) == 0

    assert planted_in(tmp_path) == [str(tmp_path / "prompts.jsonl")]


def test_the_export_is_a_file_beside_the_models_table_and_both_are_forgotten(batch: Path) -> None:
    of_models = (batch / "grades.csv").read_bytes()

    cli.run_command(["export", str(batch), "--format", "csv", "--include-unreviewed", "--yes"])

    assert (batch / "grades.csv").read_bytes() == of_models
    assert b"points_by_models" in (batch / "final-grades.csv").read_bytes()
    assert cli.run_command(["forget", str(batch), "--yes"]) == 0
    assert not batch.exists()


# --- nothing else is deleted


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    homework = tiny_class(tmp_path / "homework", 1)
    assert cli.run_command(["grade", *tiny(homework, tmp_path / "out", "--quiet")]) == 0
    return tmp_path / "out"


def test_a_link_to_a_batch_is_refused_by_name(tmp_path: Path, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(batch)

    assert cli.run_command(["forget", str(tmp_path / "link"), "--yes"]) == cli.EXIT_USAGE

    assert (batch / "grades.csv").is_file()
    assert str(batch) in capsys.readouterr().err


def test_links_inside_are_deleted_and_what_they_lead_to_is_not(tmp_path: Path, batch: Path) -> None:
    precious = tmp_path / "precious"
    for name in ("rounds/1", "grade"):
        (precious / name).mkdir(parents=True)
        (precious / name / "grades.csv").write_text("mine")
    (precious / "rounds/1/batch.json").write_text((batch / "batch.json").read_text())
    (precious / "thesis.html").write_text("mine")
    os.link(precious / "thesis.html", batch / "answers.jsonl")
    (batch / "report.html").unlink()
    (batch / "report.html").symlink_to(precious / "thesis.html")
    (batch / "rounds").symlink_to(precious / "rounds")
    (batch / "runs").symlink_to(precious)
    before = sorted(precious.rglob("*"))

    assert cli.run_command(["forget", str(batch), "--yes"]) == 0

    assert sorted(precious.rglob("*")) == before
    assert (precious / "thesis.html").read_text() == "mine"
    assert sorted(path.name for path in batch.iterdir()) == ["rounds", "runs"]


def test_folders_of_the_users_own_that_are_called_like_ours_stay(tmp_path: Path, batch: Path) -> None:
    for name in ("solution/solution.py", "rubrics/notes.txt", "versions/final/grades.json", "runs/mine/log"):
        (batch / name).parent.mkdir(parents=True)
        (batch / name).write_text("mine")

    assert cli.run_command(["forget", str(batch), "--yes"]) == 0

    assert sorted(path.name for path in batch.iterdir()) == ["rubrics", "runs", "solution", "versions"]
    assert len([path for path in batch.rglob("*") if path.is_file()]) == 4
