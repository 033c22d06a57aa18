"""A folder of submissions in which more lies than submissions: results never do, rubric and solution are left out."""

import json
import shutil
from pathlib import Path

import pytest

from kvasir import cli
from tests.support.homework import tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two submissions; the rubric is beside them, and they are the present folder."""
    (tmp_path / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    work = tiny_class(tmp_path / "hw", 2)
    monkeypatch.chdir(work / "submissions")
    return work / "submissions"


def grade(*words: str) -> int:
    return cli.run_command(["--config", "../../kvasir.toml", "grade", *words, "--quiet"])


def graded(out: Path) -> list[str]:
    return [row["submission"] for row in json.loads((out / "grades.json").read_text("utf-8"))["grades"]]


@pytest.mark.parametrize("more", [["--out", "."], ["--out", "results"], ["--out", "../submissions/a/b"], []])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_results_among_the_submissions_are_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], dry: list[str]
) -> None:
    before = sorted(folder.iterdir())

    assert grade(".", "--rubric", "../rubric.yaml", *more, *dry) == cli.EXIT_USAGE

    said = capsys.readouterr().err
    assert "choose a folder elsewhere with --out" in said
    assert len(said.splitlines()) == 1
    assert sorted(folder.iterdir()) == before


def test_a_link_into_the_folder_leads_into_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("../elsewhere").symlink_to(folder)

    assert grade("../submissions", "--rubric", "../rubric.yaml", "--out", "../elsewhere/out") == cli.EXIT_USAGE
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["..", "../results", "../submissions-results"])
def test_results_above_and_beside_it_are_as_before(folder: Path, out: str) -> None:
    assert grade(".", "--rubric", "../rubric.yaml", "--out", out) == 0
    assert len(graded(folder / out)) == 2


def test_a_zip_and_one_file_may_lie_where_the_results_go(folder: Path) -> None:
    made = shutil.make_archive("../class", "zip", folder)
    assert grade(made, "--rubric", "../rubric.yaml", "--out", "../") == 0
    assert grade("student0_100_1_homework.py", "--rubric", "../rubric.yaml", "--out", "one") == 0


def test_what_was_given_as_rubric_solution_and_template_is_no_submission(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move("../rubric.yaml", "rubric.yaml")
    Path("given").mkdir()
    Path("given/solution.py").write_text("x = 1\n")
    Path("../start.py").write_text("# start here\n")
    Path("start.py").symlink_to("../start.py")
    files = ["--rubric", "rubric.yaml", "--solution", "given/solution.py", "--template", "start.py"]

    assert grade(".", *files, "--out", "../out") == 0

    assert graded(Path("../out")) == ["student0_100_1_homework.py", "student1_101_1_homework.py"]
    said = capsys.readouterr().err
    assert "left out: rubric.yaml (the rubric), given/solution.py (the solution), start.py (the template)" in said


def test_every_command_that_reads_the_folder_leaves_them_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move("../rubric.yaml", "rubric.yaml")
    command = ["--config", "../../kvasir.toml"]

    assert grade(".", "--rubric", "rubric.yaml", "--dry-run") == cli.EXIT_USAGE  # into ./results
    capsys.readouterr()
    assert grade(".", "--rubric", "rubric.yaml", "--out", "../out", "--dry-run") == 0
    assert "left out: rubric.yaml (the rubric)" in capsys.readouterr().out
    assert grade(".", "--rubric", "rubric.yaml", "--out", "../out", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["left_out"], len(found["submissions"])) == ({"rubric.yaml": "the rubric"}, 2)

    assert grade(".", "--rubric", "rubric.yaml", "--out", "../out") == 0
    for again in (["results"], ["watch"], ["retry", "--only", "student0_100_1_homework.py"]):
        assert cli.run_command([*command, again[0], "../out", *again[1:]]) == 0
        assert len(graded(Path("../out"))) == 2
    assert cli.run_command([*command, "retry", "../out", "--only", "rubric.yaml"]) == cli.EXIT_USAGE
    assert "holds no submission named 'rubric.yaml'" in capsys.readouterr().err


def test_a_solution_graded_as_the_one_submission_is_one(folder: Path) -> None:
    """A file that is named as the work is meant, whatever else it is."""
    work = "student0_100_1_homework.py"
    assert grade(work, "--rubric", "../rubric.yaml", "--solution", work, "--out", "../out") == 0
    assert graded(Path("../out")) == [work]


@pytest.mark.parametrize(
    "only",
    [
        ["--only", '"miller_900_9_work, final.py",student0_100_1_homework.py'],
        ["--only", '"miller_900_9_work, final.py"', "--only", "100"],
    ],
)
def test_only_takes_a_name_with_a_comma_and_may_be_repeated(folder: Path, only: list[str]) -> None:
    (folder / "miller_900_9_work, final.py").write_text("print(1)\n")
    chosen = ["miller_900_9_work, final.py", "student0_100_1_homework.py"]

    assert grade(".", "--rubric", "../rubric.yaml", "--out", "../out", *only) == 0
    assert graded(Path("../out")) == chosen
    assert cli.run_command(["--config", "../../kvasir.toml", "retry", "../out", *only]) == 0
