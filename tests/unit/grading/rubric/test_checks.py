"""A check that a format can't answer says nothing; one that it can raises no false alarm."""

import json
from pathlib import Path

import pytest

from grading.planning import prepare
from grading.request import AspectModel, GradeRequest
from grading.rubric.checks import Check

RATE = Check("variables", ("rate",))
GROUPED = Check("functions", ("group_by|aggregate|groupby",))
COUNT = Check("functions", ("COUNT",))
REGION = Check("columns", ("region",))
SHOWN = Check("output", ("present",))
SAME = Check("output", ("as solution",))
QUERY = "SELECT Region, count(*) AS rate -- of all\nFROM orders\nGROUP BY Region;\n"
IN_PYTHON = f'import pandas as pd\ntable = pd.read_sql("""\n{QUERY}""", connection)  # the table\n'


def said(folder: Path, name: str, text: str, check: Check) -> list[bool]:
    """What the check says of a file: whether it passed, or nothing."""
    wanted = check.names[0] if check.kind == "output" else json.dumps(check.names)
    criteria = "title: T\ncriteria:\n  - {id: a, title: A, points: 2, model: code}\n"
    (folder / "rubric.yaml").write_text(f"{criteria}checks:\n  - {{{check.kind}: {wanted}}}\n", "utf-8")
    (folder / "work").mkdir()
    (folder / "work" / name).write_text(text, "utf-8")
    models = {"code": AspectModel("coder", 32_768)}
    request = GradeRequest(folder / "work", folder / "rubric.yaml", models)  # type: ignore[arg-type]
    return [finding.has_passed for item in prepare(request, "batch", b"secret").items for finding in item.findings]


@pytest.mark.parametrize("name", ["w.sql", "w.py", "w.R", "w.Rmd", "w.qmd", "w.md", "w.txt"])
@pytest.mark.parametrize("check", [SHOWN, SAME])
def test_only_notebooks_are_asked_for_outputs(tmp_path: Path, name: str, check: Check) -> None:
    assert said(tmp_path, name, "Some work: 1234\n", check) == []


@pytest.mark.parametrize("name", ["w.md", "w.txt", "w.html"])
@pytest.mark.parametrize("check", [RATE, GROUPED, REGION])
def test_prose_is_not_asked_for_code(tmp_path: Path, name: str, check: Check) -> None:
    assert said(tmp_path, name, "I took the mean of each area.\n", check) == []


@pytest.mark.parametrize(("name", "text"), [("w.sql", QUERY), ("w.py", IN_PYTHON)])
@pytest.mark.parametrize(("check", "expected"), [(RATE, [True]), (GROUPED, []), (COUNT, [True]), (REGION, [True])])
def test_sql_is_read_as_sql_in_a_python_string_too(
    tmp_path: Path, name: str, text: str, check: Check, expected: list[bool]
) -> None:
    assert said(tmp_path, name, text, check) == expected


@pytest.mark.parametrize(
    ("name", "text", "check"),
    [
        ("w.sql", "SELECT * FROM orders;\n", COUNT),
        ("w.sql", "-- count(*)\nSELECT 1 FROM orders;\n", COUNT),
        ("w.sql", "SELECT amount FROM orders;\n", REGION),
        ("w.py", "x = 1\n", RATE),
        ("w.py", "rate == 1\n# rate = 1\n", RATE),
        ("w.R", "my_rate <- 1\nd$rate <- 1\nprint(rate)\n", RATE),
        ("w.py", "x = 1\n", GROUPED),
        ("w.Rmd", "```{r}\nx <- 1\n```\n", GROUPED),
        ("w.R", "x <- 1 # region\n", REGION),
    ],
)
def test_what_a_format_can_answer_still_fails(tmp_path: Path, name: str, text: str, check: Check) -> None:
    assert said(tmp_path, name, text, check) == [False]


@pytest.mark.parametrize(
    ("name", "text", "check"),
    [
        ("w.py", 'color = "#ff0000"; rate = 2\n', RATE),
        ("w.py", "print('a # b'); rate = 2\n", RATE),
        ("w.R", 'cat("orders -- by region\\n"); rate <- 2\n', RATE),
        ("w.R", "1 -> rate\n", RATE),
        ("w.R", "rate<<-1\n", RATE),
        ("w.py", "rate, total = f()\n", RATE),
        ("w.py", "total, rate = f()\n", RATE),
        ("w.py", "rate: float = 2\n", RATE),
        ("w.py", "if (rate := f()) > 2:\n    pass\n", RATE),
        ("w.py", "for rate in rates:\n    pass\n", RATE),
        ("w.R", "for (rate in rates) print(1)\n", RATE),
        ("w.sql", "CREATE TABLE IF NOT EXISTS rate AS SELECT 1 FROM t;\n", RATE),
        ("w.sql", "WITH rate AS (SELECT 1 FROM t) SELECT * FROM rate;\n", RATE),
        ("w.sql", 'SELECT "region" FROM orders;\n', REGION),
    ],
)
def test_what_is_there_is_found(tmp_path: Path, name: str, text: str, check: Check) -> None:
    assert said(tmp_path, name, text, check) == [True]


def test_a_notebook_without_outputs_is_told_so(tmp_path: Path) -> None:
    cell = '{"cell_type": "code", "source": "x = 1", "outputs": [], "metadata": {}, "execution_count": null}'

    assert said(tmp_path, "w.ipynb", f'{{"nbformat": 4, "metadata": {{}}, "cells": [{cell}]}}', SHOWN) == [False]
