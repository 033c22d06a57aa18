"""`kvasir assign`: a question about whose work it is, answered once, from the run to the export."""

import csv
import json
from pathlib import Path

import pytest

from kvasir import cli

# `GradebookExporter#csv_data`, instructure/canvas-lms, `lib/gradebook_exporter.rb`
GRADEBOOK = """Student,ID,SIS Login ID,Section,Homework 5 (5502)
    Points Possible,,,,4.00
"Aldertree, Ada",71001,u1,BA-101 01,
"Birkenau, Bo",71002,u2,BA-101 01,
"""
RUBRIC = """title: Homework 5
criteria: [{id: works, title: It works, points: 4, model: code}]
"""
RENAMED = "newlywedbo_71002_9_hw5.R"


@pytest.fixture
def folder(configured_folder: Path) -> Path:
    place = configured_folder / "class"
    place.mkdir()
    (place / "aldertreeada_71001_8_hw5.R").write_text("mean(c(1, 2))\n", "utf-8")
    (place / RENAMED).write_text("# by Bo Birkenau\nmean(c(3, 4))\n", "utf-8")
    (configured_folder / "gradebook.csv").write_text(GRADEBOOK, "utf-8")
    (configured_folder / "rubric.yaml").write_text(RUBRIC, "utf-8")
    words = ["grade", "class", "--rubric", "rubric.yaml", "--roster", "gradebook.csv", "--out", "out", "--quiet"]
    assert cli.run_command(words) == 1, "a grade stays blank until somebody has said whose it is"
    return configured_folder


def remarks(capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    cli.run_command(["results", "out", "--json"])
    rows = json.loads(capsys.readouterr().out)["submissions"]
    return [remark for row in rows for remark in row["remarks"]]


def test_an_answer_ends_the_question_and_gives_the_grade_its_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    cli.run_command(["results", "out"])
    said = capsys.readouterr().out
    assert "1 asked about:" in said
    assert "newlywedbo?" in said
    assert [remark.partition("?")[0] for remark in remarks(capsys)] == ["whose is it"]
    assert cli.run_command(["assign", "out"]) == 1
    assert RENAMED in capsys.readouterr().out

    assert cli.run_command(["assign", "out", RENAMED, "Bo Birkenau"]) == 0

    assert cli.run_command(["assign", "out"]) == 0
    assert not any("whose is it" in remark for remark in remarks(capsys))
    assert cli.run_command(["results", "out"]) == 0
    words = ["export", "out", "--format", "canvas", "--gradebook", "gradebook.csv", "--include-unreviewed", "--yes"]
    assert cli.run_command(words) == 0
    text = (folder / "out" / "canvas-gradebook.csv").read_text("utf-8")
    rows = list(csv.reader(text.splitlines()))
    assert [row[0] for row in rows[2:] if row[-1]] == ["Aldertree, Ada", "Birkenau, Bo"]
