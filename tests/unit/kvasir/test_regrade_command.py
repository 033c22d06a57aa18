"""`kvasir regrade`: only what a rubric edit touches is asked about; nothing is replaced before a yes."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

import kvasir
from desk.decisions import accept_grade
from grading.points import Grade
from grading.report.grades import load_graded, save_graded
from grading.reviews import Override, append_override
from kvasir import cli
from messages.jobs import JobError, JobResult
from producers.batch.batch import Batch
from tests.support.homework import RUBRIC, journal, tiny, tiny_class

GRADES = Path("out/grades.csv")


@pytest.fixture(autouse=True)
def homework(configured_folder: Path) -> Path:
    made = tiny_class(configured_folder / "homework")
    assert cli.run_command(["grade", *tiny(made, Path("out"), "--ask", "criteria", "--quiet")]) == 0
    return made


def edit(homework: Path, old: str = "It runs", new: str = "It runs well") -> None:
    (homework / "rubric.yaml").write_text(RUBRIC.replace(old, new), "utf-8")


def points(name: str) -> list[str]:
    return [row[name] for row in csv.DictReader(io.StringIO(GRADES.read_text("utf-8")))]


def test_only_the_changed_criterion_is_asked_about_and_the_others_keep_their_points(
    homework: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, clear = len(journal(Path("out"))), points("clear")
    edit(homework)
    capsys.readouterr()

    assert cli.run_command(["regrade", "out", "--criterion", "works", "--yes", "--quiet"]) == 0

    said = capsys.readouterr()
    assert "Asked about anew: works. 3 submissions, 3 jobs, 3 questions" in said.err
    assert "of 3 submissions would change" in said.out
    new = journal(Path("out"))[before:]
    assert [len(row["answers"]) for row in new] == [1, 1, 1]
    assert points("clear") == clear
    change = json.loads(Path("out/changes.jsonl").read_text("utf-8"))
    assert list(change["criteria"]) == ["works"]
    assert "It runs well" in change["criteria"]["works"]
    assert change["who"]
    assert change["at"] > 1e9
    assert len(list(Path("out/versions").iterdir())) == 1
    assert cli.run_command(["regrade", "out"]) == 0
    assert "Nothing has changed" in capsys.readouterr().out


def test_a_ruling_asks_about_its_criterion_alone_and_names_whom_it_may_affect(
    homework: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = load_graded(Path("out"))
    evidence = dict(zip((one.submission for one in made.grades), ["left_join(a, b)", "merge(a, b)", ""], strict=True))
    told = [_with_evidence(one, evidence[one.submission]) for one in made.grades]
    save_graded(Path("out"), replace(made, grades=tuple(told)))
    edit(homework, "function that works.}", "function that works., rulings: [Half of it for a JOIN that is unnamed.]}")
    capsys.readouterr()

    assert cli.run_command(["regrade", "out", "--criterion", "works", "--yes", "--quiet"]) == 0

    said = capsys.readouterr().err
    assert "Asked about anew: works. 3 submissions, 3 jobs, 3 questions" in said
    assert f"the rulings on works share words with the evidence of {next(iter(evidence))} (join)" in said


def test_what_becomes_of_peoples_decisions_is_told_before_anything_is_replaced(
    homework: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = load_graded(Path("out")).grades
    append_override(Path("out"), Override(first.item_id, "works", 1, None, "I ran it", "Ada"))
    append_override(Path("out"), replace(accept_grade(second, "Ada"), seen={"works": 0.5, "clear": 2}))
    edit(homework)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\n"))

    assert cli.run_command(["regrade", "out", "--quiet"]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert "Points that a person typed would stay: 1 about these criteria." in lines
    told = lines[lines.index("1 approval would lapse, and these submissions would need review again:") + 1]
    assert told.startswith(f"{second.submission}: Ada approved a total of 2.5; since then it has become ")


def _with_evidence(grade: Grade, evidence: str) -> Grade:
    return replace(grade, criteria=tuple(replace(one, evidence=evidence) for one in grade.criteria))


@pytest.mark.parametrize("answers", ["n\n", "y\nn\n", ""])
def test_a_no_leaves_the_grades_and_their_files_as_they_are(
    homework: Path, answers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    edit(homework)
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))

    assert cli.run_command(["regrade", "out", "--quiet"]) == 1

    assert "the grades stay as they are" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path("out").iterdir() if path.is_file()} == kept
    # What was asked before the second no is not asked again.
    assert cli.run_command(["regrade", "out", "--yes", "--quiet"]) == 0
    assert [path.name for path in Path("out/rounds").iterdir()] == ["1"]


def test_what_a_round_has_answered_is_said_and_compared_at_once(
    homework: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(homework)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\n"))
    assert cli.run_command(["regrade", "out", "--quiet"]) == 1
    asked, compared = len(journal(Path("out/rounds/1"))), capsys.readouterr().out

    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert cli.run_command(["regrade", "out", "--criterion", "works", "--quiet"]) == 1

    said = capsys.readouterr()
    assert "Asked about anew: works.\n3 jobs are answered already, in out/rounds/1.\n" in said.err
    assert "Ask?" not in said.err
    assert said.out == compared

    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert cli.run_command(["regrade", "out", "--quiet"]) == 0
    assert len(journal(Path("out/rounds/1"))) == asked
    assert len(list(Path("out/rounds").iterdir())) == 1
    assert cli.run_command(["regrade", "out"]) == 0
    assert "Nothing has changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "named", "sentence"),
    [
        ("It runs", ["nope"], "the rubric has no criterion 'nope'; it has works and clear"),
        ("It runs", ["clear"], "clear has not changed since it was graded"),
        ("title: It", ["works"], "other criteria have changed too: clear"),
    ],
)
def test_what_is_named_must_be_what_changed(
    homework: Path, old: str, named: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(homework, old, f"{old} really")
    assert cli.run_command(["regrade", "out", *(word for name in named for word in ("--criterion", name))]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("out/rounds").exists()


def test_a_removed_criterion_needs_no_job(homework: Path, capsys: pytest.CaptureFixture[str]) -> None:
    works = points("works")
    edit(homework, RUBRIC.splitlines(keepends=True)[-1], "")
    assert cli.run_command(["regrade", "out", "--yes", "--quiet", "--json"]) == 0
    said = capsys.readouterr()
    assert "No longer asked about: clear" in said.err
    found = json.loads(said.out)
    assert (found["cost"]["removed"], found["cost"]["jobs"]) == (["clear"], 0)
    assert points("works") == works == points("points")


def test_a_class_asked_all_at_once_is_regraded_whole(homework: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_command(["grade", *tiny(homework, Path("whole"), "--quiet")]) == 0
    edit(homework)
    assert cli.run_command(["regrade", "whole", "--criterion", "works"]) == 2
    assert "--ask criteria" in capsys.readouterr().err
    assert cli.run_command(["regrade", "whole", "--yes", "--quiet"]) == 0
    assert "Asked about anew: works and clear. 3 submissions, 6 jobs:" in capsys.readouterr().err
    assert len(journal(Path("whole"))) == 12


def test_python_compares_before_it_adopts(homework: Path) -> None:
    before = GRADES.read_bytes()
    edit(homework)
    again = kvasir.regrade("out", ["works"], quiet=True)
    assert again.cost.asked == ("works",)
    assert [one.submission[:8] for one in again.differences] == ["student0", "student1", "student2"]
    assert GRADES.read_bytes() == before
    rows = again.adopt().rows
    assert [row["points"] for row in rows] == [one.after for one in again.differences]
    with pytest.raises(kvasir.KvasirError, match="not finished"):
        kvasir.regrade("out", quiet=True).adopt()


def test_a_regrade_that_was_left_goes_on_and_what_failed_in_it_runs_again(homework: Path) -> None:
    before = GRADES.read_bytes()
    edit(homework)
    assert cli.run_command(["regrade", "out", "--yes", "--quiet", "--max-wait", "0"]) == 1
    assert GRADES.read_bytes() == before
    with Batch(Path("out/rounds/1")) as left:
        failed = JobError("decode", "InvalidPrompt", "not today")
        left.journal.record(
            JobResult(job, 1, left.batch_id, entry.item_id, entry.model, "failed", error=failed)
            for job, entry in list(left.open_jobs.items())
        )

    assert cli.run_command(["regrade", "out", "--yes", "--quiet"]) == 0
    assert [path.name for path in Path("out/rounds").iterdir()] == ["1"]
    assert len(list(Path("out/versions").iterdir())) == 1  # adopted; the new points may be those that there were
    with Batch(Path("out")) as batch:
        assert set(batch.states.values()) == {"succeeded"}
