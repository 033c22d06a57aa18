"""Rubrics in other people's formats become ours, or are refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from grading.rubric.rubric import Rubric, load_rubric
from messages.errors import RubricError

EARLIER = {
    "assignment_info": {"name": "hw4", "title": "Homework 4", "total_points": 37.5, "description": "Sales."},
    "rubric_elements": {
        "technical_execution": {
            "weight": 0.4,
            "max_points": 15,
            "description": "The code runs.",
            "criteria": ["Loads the data", "Joins both tables"],
            "deductions": {"no_join": "-2"},
        },
        "business_thinking": {"weight": 0.3, "max_points": 11.25, "description": "Sees what it means."},
        "communication": {"weight": 0.3},
    },
    "autograder_checks": {
        "required_variables": ["orders"],
        "sections": {
            "2": {
                "name": "Revenue",
                "points": 5,
                "variables": ["revenue"],
                "functions": ["group_by"],
                "function_equivalents": {"group_by": ["aggregate", "tapply"]},
                "required_columns": ["region"],
            },
            "3": {"name": "Reflection", "check_type": "markdown", "reflection_questions": 3},
        },
    },
    "strict_scoring_rules": {},
}
CANVAS = """Rubric Name,Criteria Name,Criteria Description,Criteria Enable Range,Rating Name,Rating Description,\
Rating Points,Rating Name,Rating Description,Rating Points
Homework 4,Code quality,"Runs, and can be read",false,Full,All cells run,4,Half,Some run,2,None,,0
Homework 4,Interpretation,,true,Full,,3.5,None,,0
"""


def load(folder: Path, data: Any, name: str = "rubric.json") -> Rubric:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")
    return load_rubric(path)


def test_the_earlier_graders_rubric_is_read(tmp_path: Path) -> None:
    rubric = load(tmp_path, EARLIER)

    assert (rubric.title, rubric.total, rubric.instructions) == ("Homework 4", 37.5, "Sales.")
    assert [(item.id, item.points, item.model) for item in rubric.criteria] == [
        ("technical_execution", 15, "code"),
        ("business_thinking", 11.25, "feedback"),
        ("communication", 11.25, "feedback"),
    ]
    assert "Joins both tables" in rubric.criteria[0].guidance
    assert "Deduction: no_join: -2" in rubric.criteria[0].guidance
    assert [(check.kind, check.names) for check in rubric.checks] == [
        ("variables", ("orders",)),
        ("variables", ("revenue",)),
        ("functions", ("group_by|aggregate|tapply",)),
        ("columns", ("region",)),
    ]


def test_its_short_form_is_read(tmp_path: Path) -> None:
    rubric = load(tmp_path, {"Code quality": {"points": 6, "description": "It runs."}, "Insight": {"points": 0.5}})

    assert [(item.id, item.points, item.model) for item in rubric.criteria] == [
        ("code_quality", 6, "code"),
        ("insight", 0.5, "feedback"),
    ]


def test_a_title_that_names_something_else_in_the_results_gives_an_id_with_a_number(tmp_path: Path) -> None:
    rubric = load(tmp_path, {"Submission": {"points": 1}, "Max points": {"points": 2}, "State": {"points": 3}})

    assert [item.id for item in rubric.criteria] == ["submission_1", "max_points_2", "state_3"]


def test_canvass_rubric_is_read_with_its_ratings(tmp_path: Path) -> None:
    rubric = load(tmp_path, CANVAS, "rubric.csv")

    assert rubric.title == "Homework 4"
    code, words = rubric.criteria
    assert code.grid == (0, 2, 4)
    assert code.model == "code"
    assert "4 points: Full: All cells run" in code.guidance
    assert (words.points, words.step, words.model) == (3.5, 0.5, "feedback")


@pytest.mark.parametrize(
    ("data", "name", "why"),
    [
        ({**EARLIER, "assignment_info": {"total_points": 40}}, "r.json", "'total' is 40, but the criteria add up to"),
        ({"rubric_elements": {}}, "r.json", "a key for each criterion"),
        ({"rubric_elements": {"code": {"description": "x"}}}, "r.json", "has no points"),
        ({"rubric_elements": {"code": 3}}, "r.json", "must contain keys and values"),
        (CANVAS.replace("Criteria Name,", "Name,"), "r.csv", "needs the column 'Criteria Name'"),
        (CANVAS.replace("Homework 4,Inter", "Homework 5,Inter"), "r.csv", "the file has 2 rubrics"),
        (CANVAS.replace(",4,Half", ",four,Half"), "r.csv", "'four' is not a number of points"),
        (CANVAS + "Homework 4,Nothing,,false\n", "r.csv", "has no ratings"),
        ("", "r.csv", "needs the column 'Rubric Name'"),
        ('a,"b\n', "r.csv", "not valid CSV"),
    ],
)
def test_what_can_not_be_used_is_refused_in_a_sentence(tmp_path: Path, data: Any, name: str, why: str) -> None:
    with pytest.raises(RubricError, match=why):
        load(tmp_path, data, name)


CHECKED = "title: T\ncriteria:\n  - {id: a, title: A, points: 2, model: code}\nchecks:\n  - "


def test_checks_are_part_of_the_rubrics_version(tmp_path: Path) -> None:
    one = load(tmp_path, CHECKED + "{criterion: a, variables: [x]}", "r.yaml")
    other = load(tmp_path, CHECKED + "{criterion: a, variables: [y]}", "r.yaml")

    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("check", "why"),
    [
        ("{variables: [x], functions: [y]}", "must have exactly one of"),
        ("{variable: [x]}", "must have exactly one of"),
        ("{criterion: b, variables: [x]}", "is not the id of a criterion"),
        ("{variables: []}", "1 to 50 names"),
        ("{variables: ['a b']}", "is not a valid name"),
        ("{functions: ['f(']}", "is not a valid name"),
        ("{output: perfect}", "'present' or 'as solution'"),
        ("variables", "must have exactly one of"),
    ],
)
def test_a_check_that_is_none_is_refused(tmp_path: Path, check: str, why: str) -> None:
    with pytest.raises(RubricError, match=why):
        load(tmp_path, CHECKED + check, "r.yaml")
