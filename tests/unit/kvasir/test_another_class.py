"""A class's folder takes no other class's grades, unless that is said; and nothing is deleted then."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from kvasir import cli
from tests.support.homework import RUBRIC


@pytest.fixture
def course(configured_folder: Path) -> Path:
    """Two assignments of two students; the files are called the same in both."""
    for number in (4, 5):
        handed_in = Path(f"homework{number}/submissions")
        handed_in.mkdir(parents=True)
        Path(f"homework{number}/rubric.yaml").write_text(RUBRIC.replace("Means", f"Homework {number}"), "utf-8")
        for student in ("ann", "ben"):
            (handed_in / f"{student}.py").write_text(f"# {student}\nx = sum(range({number}))\n", "utf-8")
    return configured_folder


def grade(homework: str, *more: str) -> int:
    return cli.run_command(
        ["grade", f"{homework}/submissions", "--rubric", f"{homework}/rubric.yaml", "--quiet", *more]
    )


def title(out: str) -> str:
    return str(json.loads(Path(out, "grades.json").read_text("utf-8"))["title"])


def test_two_assignments_have_two_folders_by_default(course: Path) -> None:
    assert (grade("homework4"), grade("homework5")) == (0, 0)

    folders = sorted(path.name for path in Path("results").iterdir())
    assert folders == ["homework-4-submissions", "homework-5-submissions"]


@pytest.mark.system
def test_two_sections_with_one_rubric_and_one_folder_name_have_two_folders_by_default(course: Path) -> None:
    shutil.copy("homework4/rubric.yaml", "homework5/rubric.yaml")

    assert (grade("homework4"), grade("homework5"), grade("homework4"), grade("homework5")) == (0, 0, 0, 0)

    folders = sorted(path.name for path in Path("results").iterdir())
    assert folders == ["homework-4-submissions", "homework-4-submissions-2"]


def test_a_folder_with_another_class_is_refused_in_one_sentence(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grade("homework4", "--out", "out")
    before = Path("out/grades.csv").read_bytes()
    capsys.readouterr()

    assert grade("homework5", "--out", "out") == cli.EXIT_USAGE

    said = capsys.readouterr().err
    assert said.strip().count("\n") == 0
    assert "homework4/submissions" in said
    assert "--replace" in said
    assert Path("out/grades.csv").read_bytes() == before
    assert title("out") == "Homework 4"


def test_replace_moves_the_other_class_aside(course: Path) -> None:
    grade("homework4", "--out", "out")
    before = Path("out/grades.csv").read_bytes()

    assert grade("homework5", "--out", "out", "--replace") == 0

    [aside] = course.glob("out.before-*")
    assert (aside / "grades.csv").read_bytes() == before
    assert (title("out"), title(str(aside))) == ("Homework 5", "Homework 4")
    assert cli.run_command(["results", str(aside)]) == 0


@pytest.mark.system
def test_an_edited_rubric_is_no_other_class(course: Path) -> None:
    grade("homework4", "--out", "out")
    rubric = Path("homework4/rubric.yaml")
    rubric.write_text(
        rubric.read_text("utf-8").replace("Homework 4", "Homework 4, means").replace("points: 2", "points: 4")
    )

    assert grade("homework4", "--out", "out", "--replace") == 0

    assert not list(course.glob("out.before-*"))
    assert title("out") == "Homework 4, means"


@pytest.mark.system
@pytest.mark.parametrize("how", [shutil.move, shutil.copytree])
def test_a_course_that_was_moved_or_copied_goes_on(
    course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: object
) -> None:
    grade("homework4", "--out", "homework4/out")
    how("homework4", "elsewhere")  # type: ignore[operator]
    capsys.readouterr()

    assert grade("elsewhere", "--out", "elsewhere/out") == 0

    assert "Everything is already graded" in capsys.readouterr().out


@pytest.mark.system
def test_a_download_with_late_submissions_goes_on(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grade("homework4", "--out", "out")
    shutil.copytree("homework4/submissions", "again")
    Path("again/cleo.py").write_text("x = 7\n", "utf-8")

    assert cli.run_command(["grade", "again", "--rubric", "homework4/rubric.yaml", "--out", "out", "--quiet"]) == 0

    with Path("out/grades.csv").open(encoding="utf-8") as file:
        assert [row["submission"] for row in csv.DictReader(file)] == ["ann.py", "ben.py", "cleo.py"]


@pytest.mark.system
def test_a_folder_that_is_used_again_for_the_next_homework_is_another_class(course: Path) -> None:
    grade("homework4", "--out", "out")
    shutil.rmtree("homework4")
    shutil.move("homework5", "homework4")

    assert grade("homework4", "--out", "out") == cli.EXIT_USAGE

    assert title("out") == "Homework 4"


@pytest.mark.system
def test_prompts_do_not_replace_a_class(course: Path) -> None:
    grade("homework4", "--out", "out")
    Path("prompts.jsonl").write_text('{"id": "1", "prompt": "Hello"}\n', "utf-8")

    assert cli.run_command(["run", "prompts.jsonl", "--model", "tiny:1b", "--out", "out", "--quiet"]) == cli.EXIT_USAGE
    assert cli.run_command(["results", "out"]) == 0
