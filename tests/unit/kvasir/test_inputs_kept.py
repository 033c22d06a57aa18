"""A batch grades by its own copies of rubric, solution and template, and can be read while a run writes."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from desk.decisions import accept_grade
from grading.inputs import FOLDER
from grading.report.grades import load_graded
from grading.reviews import append_override
from kvasir import cli
from producers.batch.batch import Batch, manifest_of
from producers.storage.private import kept_in
from tests.support.homework import RUBRIC, tiny, tiny_class

OUT = Path("out")
CHANGED = "Changed since the class was planned: "


@pytest.fixture(autouse=True)
def homework(configured_folder: Path) -> Path:
    """A class of three with a solution and a template, two of them graded: the run was killed."""
    made = tiny_class(configured_folder / "homework")
    (made / "solution.py").write_text("print(mean([1, 2, 3]))\n", "utf-8")
    (made / "template.py").write_text("# Task 1: the mean\n", "utf-8")
    assert grade(made) == 0
    journal = OUT / "results.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:4]))
    for name in ("grades.csv", "grades.json", "report.html"):
        (OUT / name).unlink()
    return made


def grade(homework: Path, *options: str) -> int:
    documents = ("--solution", str(homework / "solution.py"), "--template", str(homework / "template.py"))
    return cli.run_command(["grade", *tiny(homework, OUT, *documents, *options, "--quiet")])


def states() -> dict[str, int]:
    found = [one.state for one in load_graded(OUT).grades]
    return {state: found.count(state) for state in dict.fromkeys(found)}


def edit_rubric(homework: Path, text: str = RUBRIC.replace("It runs", "It runs well")) -> None:
    (homework / "rubric.yaml").write_text(text, "utf-8")


def edit_solution(homework: Path) -> None:
    (homework / "solution.py").write_text("print(mean([1, 2]))\n", "utf-8")


def edit_template(homework: Path) -> None:
    (homework / "template.py").write_text("# Task 1: the mean of three\n", "utf-8")


def break_rubric(homework: Path) -> None:
    edit_rubric(homework, "criteria: [")


@pytest.mark.parametrize("edit", [edit_rubric, edit_solution, edit_template, break_rubric])
def test_a_file_that_changed_during_a_killed_run_is_named_and_the_copy_counts(
    homework: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Path], None]
) -> None:
    before = {path: path.read_bytes() for path in homework.iterdir() if path.is_file()}
    cli.run_command(["results", "out"])
    graded = states()
    assert set(graded) > {"waiting"}
    edit(homework)
    (edited,) = (path.name for path, data in before.items() if path.read_bytes() != data)
    capsys.readouterr()

    cli.run_command(["results", "out"])

    said = capsys.readouterr().err
    assert states() == graded
    assert f"{CHANGED}{edited}. These grades go by the batch's own copy." in said
    assert "To grade by what is there now: kvasir regrade out\n" in said
    assert CHANGED in (OUT / "report.html").read_text("utf-8")
    assert cli.run_command(["watch", "out", "--quiet"]) == 0
    assert states() == {"graded": 3}
    assert CHANGED in capsys.readouterr().err


def test_the_same_command_takes_the_file_as_it_is_now_and_says_so(
    homework: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old_jobs = {entry.job_id for entry in manifest_of(OUT)["jobs"]}
    edit_rubric(homework)

    assert grade(homework) == 0

    assert "Changed since the class was planned: the rubric." in capsys.readouterr().err
    assert old_jobs.isdisjoint(entry.job_id for entry in manifest_of(OUT)["jobs"])
    cli.run_command(["results", "out"])
    assert CHANGED not in capsys.readouterr().err
    assert states() == {"graded": 3}


def test_work_that_was_handed_in_again_is_named_until_it_is_graded(
    homework: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = "Handed in again since the class was planned: student0_100_1_homework.py."
    assert cli.run_command(["watch", "out", "--quiet"]) == 0
    (homework / "submissions/student0_100_1_homework.py").write_text("mean = sum\n", "utf-8")
    capsys.readouterr()

    for command in ("results", "watch", "results"):
        assert cli.run_command([command, "out"]) == 0
        assert again in capsys.readouterr().err
    assert grade(homework) == 0
    assert again not in capsys.readouterr().err


def test_grades_that_people_have_decided_on_are_not_replaced_by_another_rubric_without_a_yes(
    homework: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade(homework) == 0
    first = load_graded(OUT).grades[0]
    append_override(OUT, accept_grade(first, "Ada"))
    written = {name: (OUT / name).read_bytes() for name in ("batch.json", "results.jsonl", "grades.json")}
    edit_rubric(homework)
    (homework / "submissions/student0_100_1_homework.py").write_text("mean = sum\n", "utf-8")
    capsys.readouterr()

    assert grade(homework) == 2

    said = capsys.readouterr().err
    assert "kvasir: the rubric changed since the class was planned, and people have decided on 1 submission;" in said
    assert said.endswith("To compare the points first: kvasir regrade out\n")
    assert {name: (OUT / name).read_bytes() for name in written} == written
    assert grade(homework, "--yes", "--max-wait", "0") == 1
    assert f"{CHANGED}the rubric; handed in again: student0_100_1_homework.py." in capsys.readouterr().err
    assert grade(homework) == 0, "a run that was stopped goes on without a question"
    assert CHANGED not in capsys.readouterr().err


def test_work_that_was_handed_in_again_is_graded_without_a_question(
    homework: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade(homework) == 0
    append_override(OUT, accept_grade(load_graded(OUT).grades[0], "Ada"))
    (homework / "submissions/student1_101_1_homework.py").write_text("mean = sum\n", "utf-8")
    capsys.readouterr()

    assert grade(homework) == 0
    assert f"{CHANGED}handed in again: student1_101_1_homework.py." in capsys.readouterr().err


def test_results_say_where_the_final_points_are_and_which_approvals_have_lapsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.run_command(["watch", "out", "--quiet"])
    first, second, _ = load_graded(OUT).grades
    assert "reviewed" not in capsys.readouterr().out
    append_override(OUT, accept_grade(first, "Ada"))

    cli.run_command(["results", "out"])
    assert "1 reviewed: their final points are in the desk and in kvasir export.\n" in capsys.readouterr().out
    append_override(OUT, replace(accept_grade(second, "Ada"), seen={}))
    cli.run_command(["results", "out"])
    assert "in kvasir export. 1 approval has lapsed: see Review.\n" in capsys.readouterr().out


def test_what_grades_alike_is_no_change(homework: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "late: {due: 2026-11-03T23:59:00+01:00, percent: 10}\n"
    edit_rubric(homework, f"# The third homework\n{RUBRIC}{rule}")

    cli.run_command(["results", "out"])

    assert CHANGED not in capsys.readouterr().err
    assert load_graded(OUT).late


def test_files_that_are_gone_are_not_missed(homework: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rubric.yaml", "solution.py", "template.py"):
        (homework / name).unlink()

    assert cli.run_command(["watch", "out", "--quiet"]) == 0

    assert states() == {"graded": 3}
    assert capsys.readouterr().err == ""


def test_a_batch_without_copies_and_one_whose_copy_was_changed_go_by_the_file(homework: Path) -> None:
    (copy,) = (path for path in (OUT / FOLDER).rglob("rubric.yaml") if path.is_file())
    copy.write_text(RUBRIC.replace("It runs", "It runs badly"), "utf-8")
    edit_rubric(homework)
    cli.run_command(["results", "out"])
    assert states() == {"waiting": 3}

    shutil.rmtree(OUT / FOLDER)
    manifest = json.loads((OUT / "batch.json").read_text("utf-8"))
    del manifest["request"]["inputs"]
    (OUT / "batch.json").write_text(json.dumps(manifest), "utf-8")
    cli.run_command(["results", "out"])
    assert states() == {"waiting": 3}
    edit_rubric(homework, RUBRIC)
    cli.run_command(["results", "out"])
    assert set(states()) > {"waiting"}


def test_the_copies_are_closed_to_others_and_go_with_the_batch() -> None:
    copies = [path for path in (OUT / FOLDER).rglob("*") if path.is_file()]

    assert sorted(path.name for path in copies) == ["rubric.yaml", "solution.py", "template.py"]
    assert {path.stat().st_mode & 0o077 for path in copies} == {0}
    assert set(copies) < set(kept_in(OUT))
    assert cli.run_command(["forget", "out", "--yes"]) == 0
    assert not any(path.exists() for path in copies)


def test_results_and_exports_are_to_be_had_while_a_run_writes(capsys: pytest.CaptureFixture[str]) -> None:
    torn = (OUT / "results.jsonl").read_bytes() + b'{"job_id": "half a li'
    with Batch(OUT):
        (OUT / "results.jsonl").write_bytes(torn)

        assert cli.run_command(["results", "out"]) == 1
        assert "waiting" in capsys.readouterr().out
        assert cli.run_command(["export", "out", "--format", "csv"]) == 1
        assert "no result yet" in capsys.readouterr().out

        assert (OUT / "results.jsonl").read_bytes() == torn
    assert cli.run_command(["watch", "out", "--quiet"]) == 0
    assert states() == {"graded": 3}


class Killed(BaseException):
    """No more is done by this process."""


def test_a_kill_between_any_two_writes_leaves_the_old_or_the_new(
    homework: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade(homework) == 0
    assert cli.run_command(["export", "out", "--format", "csv", "--include-unreviewed", "--yes"]) == 0
    shutil.copytree(OUT, "graded")
    edit_rubric(homework)
    commands = (["grade", *tiny(homework, OUT, "--quiet")], ["export", "out", "--format", "csv"])
    to_disk, kills = os.fsync, 0

    def kill_after(writes: int) -> bool:
        """Whether the commands were killed after so many writes, of files and of folders."""
        left = writes

        def fsync(descriptor: int) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            to_disk(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            for command in commands:
                cli.run_command([*command])
        except Killed:
            return True
        finally:
            monkeypatch.setattr(os, "fsync", to_disk)
        return False

    while kill_after(kills):
        for path in OUT.glob("*.json"):
            json.loads(path.read_text("utf-8"))
        capsys.readouterr()
        assert cli.run_command(["results", "out"]) in (0, 1), capsys.readouterr().err
        assert len(load_graded(OUT).grades) == 3
        cli.run_command(["export", "out", "--format", "csv"])
        assert len((OUT / "final-grades.csv").read_text("utf-8-sig").splitlines()) == 4
        shutil.rmtree(OUT)
        shutil.copytree("graded", OUT)
        kills += 1

    assert kills > 10
    assert states() == {"graded": 3}


def test_a_folder_that_can_not_be_locked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    (OUT / "report.lock").unlink()
    (OUT / "report.lock").symlink_to("batch.json")

    assert cli.run_command(["results", "out"]) == 2
    assert "the file is a link" in capsys.readouterr().err
