"""`from kvasir import grade`, and what a notebook shows of the things that it gets."""

import csv
import importlib.metadata
import io
import json
import re
from pathlib import Path

import pytest

import kvasir
from grading.report.grades import load_graded
from kvasir import cli
from producers.batch.batch import Batch
from tests.support.homework import tiny, tiny_class


@pytest.fixture
def homework(configured_folder: Path) -> Path:
    made = tiny_class(configured_folder / "homework")
    (made / "submissions" / "<img src=x onerror=alert(1)>_300_1_h.ipynb").write_text("{", "utf-8")
    return made


def test_grade_does_what_the_command_does(homework: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvasir import grade

    graded = grade(str(homework / "submissions"), homework / "rubric.yaml", out=tmp_path / "api", quiet=True)
    cli.run_command(["grade", *tiny(homework, tmp_path / "command"), "--quiet", "--json"])
    rows = json.loads(capsys.readouterr().out)["submissions"]

    assert [row["submission"] for row in graded.rows] == [row["submission"] for row in rows]
    assert [row["state"] for row in graded.rows] == ["failed", "graded", "graded", "graded"]
    assert graded.rows[0].keys() == rows[0].keys()
    text = graded.to_csv(tmp_path / "mine.csv")
    assert text == (tmp_path / "mine.csv").read_text("utf-8") == (tmp_path / "api" / "grades.csv").read_text("utf-8")
    assert len(list(csv.DictReader(io.StringIO(text)))) == len(graded) == 4
    assert sorted(path.name for path in (tmp_path / "api").iterdir()) == sorted(
        path.name for path in (tmp_path / "command").iterdir()
    )


def test_grade_takes_names_and_the_folder_that_the_command_takes(homework: Path, tmp_path: Path) -> None:
    graded = kvasir.grade("homework/submissions", "homework/rubric.yaml", only="100, 102", quiet=True)
    assert [row["submission"][:8] for row in graded.rows] == ["student0", "student2"]
    cli.run_command(
        ["grade", "homework/submissions", "--rubric", "homework/rubric.yaml", "--only", "100,102", "--quiet"]
    )
    assert len(list((tmp_path / "results").iterdir())) == 1
    with pytest.raises(kvasir.KvasirError, match="'nobody'"):
        kvasir.grade("homework/submissions", "homework/rubric.yaml", only=["nobody"], out="elsewhere", quiet=True)


def test_grade_takes_who_is_in_the_class(homework: Path, tmp_path: Path) -> None:
    roster = tmp_path / "classroom_roster.csv"
    roster.write_text("identifier,github_username\nAda Aldertree,student0\n", "utf-8")
    work = tmp_path / "clones" / "homework-student0"
    work.mkdir(parents=True)
    (work / "hw.py").write_text("print(1)", "utf-8")

    graded = kvasir.grade(work.parent, homework / "rubric.yaml", rosters=[roster], quiet=True)

    assert [grade.person for grade in graded.grades] == ["Ada Aldertree"]


def test_a_notebook_shows_a_table_in_which_names_are_text(homework: Path) -> None:
    graded = kvasir.grade(homework / "submissions", homework / "rubric.yaml", quiet=True)
    page = graded._repr_html_()
    assert page.count("<tr>") == 5
    assert "<img" not in page
    assert "&lt;img src=x" in page
    assert "4 submissions: 3 graded, 1 unreadable" in page
    assert re.fullmatch(r"<4 submissions: 3 graded, 1 unreadable; .* review, in .*>", repr(graded))


def test_reprs_say_what_a_thing_is(homework: Path, tmp_path: Path) -> None:
    cli.run_command(["grade", *tiny(homework, tmp_path / "out"), "--quiet"])
    assert repr(load_graded(tmp_path / "out")).startswith("<GradedClass 'Means': 4 submissions: 3 graded")
    with Batch(tmp_path / "out") as batch:
        assert repr(batch) == f"<Batch {batch.batch_id} in {tmp_path / 'out'}: 7 of 7 jobs done>"
        assert batch.secret.hex() not in repr(batch)
    with kvasir.connect(kvasir.load_settings()) as client:
        assert repr(client) == "<Client of tiny:1b, over EmbeddedBroker>"


def test_the_version_is_that_of_the_distribution() -> None:
    assert kvasir.__version__ == importlib.metadata.version("kvasir-inference")
