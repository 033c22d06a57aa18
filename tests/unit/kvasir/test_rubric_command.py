"""`kvasir rubric from`: what nbgrader's and Otter-Grader's notebooks say of points."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvasir import cli


def cell(kind: str, source: str, **marks: Any) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {"nbgrader": marks} if marks else {}, "source": source, "outputs": []}


@pytest.fixture
def rubric_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def printed(*cells: dict[str, Any]) -> Any:
        file = tmp_path / "homework.ipynb"
        file.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
        assert cli.run_command(["rubric", "from", str(file)]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return printed


def test_each_graded_cell_of_nbgrader_is_a_criterion(rubric_of: Any) -> None:
    """nbgrader/utils.py: a graded cell has `points` and `grade_id`; a graded one that is no solution holds tests."""
    made = rubric_of(
        cell("markdown", "# Homework 4", locked=True),
        cell("markdown", "**Task 1** Write f.", locked=True),
        cell("code", "# YOUR CODE HERE", solution=True, grade=False, grade_id="f"),
        cell(
            "code",
            "assert f(1) == 2\n### BEGIN HIDDEN TESTS\nassert f(7) == 14\n### END HIDDEN TESTS",
            grade=True,
            grade_id="test-f",
            points=2,
        ),
        cell("markdown", "**Task 2** Why?", locked=True),
        cell("markdown", "YOUR ANSWER HERE", solution=True, grade=True, grade_id="why", points=1.5),
        cell("markdown", "No points.", solution=True, grade=True, grade_id="none", points=0),
    )
    assert made["title"] == "Homework 4"
    assert [(row["id"], row["title"], row["points"], row["model"]) for row in made["criteria"]] == [
        ("test_f", "Task 1 Write f.", 2, "code"),
        ("why", "Task 2 Why?", 1.5, "feedback"),
    ]
    assert made["criteria"][0]["guidance"] == "Tests that it should pass:\nassert f(1) == 2"


def test_each_question_of_otter_is_a_criterion(rubric_of: Any) -> None:
    """otter/assign/blocks.py, `is_block_boundary_cell` and `extract_fenced_otter_cell`; question_config.py."""
    made = rubric_of(
        cell("raw", "# BEGIN QUESTION\nname: q1\npoints: {each: 2}"),
        cell("markdown", "**Question 1.** Compute the mean."),
        cell("raw", "# BEGIN TESTS"),
        cell("code", "# TEST\nmean == 2"),
        cell("code", "# HIDDEN TEST\nmean == 3"),
        cell("raw", "# END TESTS"),
        cell("raw", "# END QUESTION"),
        cell("markdown", "```otter\n# BEGIN QUESTION\nname: q2\nmanual: true\npoints: 3\n```"),
        cell("markdown", "Explain."),
        cell("markdown", "```otter\n# END QUESTION\n```"),
    )
    assert [(row["id"], row["title"], row["points"], row["model"]) for row in made["criteria"]] == [
        ("q1", "Question 1. Compute the mean.", 4, "code"),
        ("q2", "Explain.", 3, "feedback"),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"cells": []}', "has no points"),
        ("{", "not valid JSON"),
        (json.dumps({"cells": [cell("raw", "# BEGIN QUESTION\nname: [")]}), "is not valid YAML"),
    ],
)
def test_a_notebook_without_points_is_said_in_a_sentence(
    text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "h.ipynb").write_text(text)
    assert cli.run_command(["rubric", "from", str(tmp_path / "h.ipynb")]) == 2
    assert sentence in capsys.readouterr().err
