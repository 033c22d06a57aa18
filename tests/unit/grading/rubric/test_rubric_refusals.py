"""Whatever a rubric's file holds, it is read, or refused in one sentence with the file, soon."""

import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grading.rubric.rubric import parse_rubric
from messages.errors import RubricError

OURS: dict[str, Any] = {
    "title": "Homework",
    "instructions": "A first course.",
    "total": 10,
    "criteria": [
        {"id": "loops", "title": "Uses loops", "points": 6, "step": 0.5, "model": "code", "guidance": "while is fine"},
        {"id": "words", "title": "Explains", "points": 4, "model": "feedback"},
    ],
    "checks": [{"criterion": "loops", "functions": ["sum|mean"]}, {"output": "present"}],
}
EARLIER: dict[str, Any] = {
    "assignment_info": {"title": "Homework", "total_points": 10, "description": "x"},
    "rubric_elements": {
        "code": {"max_points": 6, "description": "d", "criteria": ["a"], "deductions": {"late": 1}},
        "text": {"weight": 0.4, "description": "d"},
    },
    "autograder_checks": {
        "required_variables": ["x"],
        "sections": {"one": {"functions": ["sum"], "function_equivalents": {"sum": ["fsum"]}, "variables": ["y"]}},
    },
}
WRONG: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**40, 10**400, float("nan"), float("inf")),
    *("", "x" * 100_000, "\ud800", "\0"),
    *([], [[]], {}, {"a": []}, {"points": 1}, json.loads("[" * 900 + "]" * 900)),
]
CANVAS = (
    "Rubric Name,Criteria Name,Criteria Description,Criteria Enable Range,Rating Name,Rating Description,"
    "Rating Points\n"
    "R,C,d,{range},full,,{points},half,,{points},none,,0.000001\n"
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def with_wrong(value: Any, at: tuple[Any, ...], wrong: Any) -> Any:
    if not at:
        return wrong
    made = copy.deepcopy(value)
    inner = made
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = wrong
    return made


def refusal(text: str, suffix: str) -> str:
    """The sentence, or "" where it is read."""
    try:
        parse_rubric("FILE", text, suffix)
    except RubricError as error:
        said = str(error)
    else:
        return ""
    assert said.startswith("FILE: ")
    assert "\n" not in said
    assert len(said) < 600
    return said


@pytest.mark.parametrize("rubric", [OURS, EARLIER], ids=["ours", "the earlier grader's"])
def test_a_wrong_type_anywhere_is_a_sentence(rubric: dict[str, Any]) -> None:
    assert refusal(json.dumps(rubric), ".json") == ""

    for at in places(rubric):
        for wrong in WRONG:
            refusal(json.dumps(with_wrong(rubric, at, wrong)), ".json")


@pytest.mark.parametrize("criterion", ["[]", "{}", "{a: []}", "5", "[[1]]", "no", "null"])
def test_a_check_of_a_criterion_that_is_no_text_is_refused(criterion: str) -> None:
    rubric = "title: a\ncriteria: [{id: l, title: t, points: 2, model: code}]\n"

    assert "check 1" in refusal(f"{rubric}checks: [{{criterion: {criterion}, columns: [a]}}]", ".yaml")


@pytest.mark.parametrize(
    "points", ["1" + "0" * 40, "1e40", "1e400", "1e999999999", "NaN", "sNaN", "inf", "-1", "9" * 5000, ""]
)
@pytest.mark.parametrize("ranges", ["true", "false"])
def test_points_from_canvas_that_cannot_be_are_refused(points: str, ranges: str) -> None:
    assert "points" in refusal(CANVAS.format(range=ranges, points=points), ".csv")


DEEP = {
    "brackets": "[" * 5000,
    "brackets in a key": "criteria: " + "[" * 5000,
    "braces": "{" * 5000,
    "dashes": "- " * 5000,
    "question marks": "? " * 5000,
    "closed brackets": "[" * 300 + "]" * 300,
    "a list in itself": "title: t\ncriteria: &a [*a]",
    "a map in itself": "&a {title: t, criteria: *a}",
    "doubling aliases": "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]),
    "many parts": "[" + "a," * 30_000 + "]",
    "a number of 100,000 digits": "title: " + "9" * 100_000,
    "a number of hexadecimal digits": "title: 0x" + "f" * 10_000,
    "hours and minutes": "title: 1" + ":1" * 100_000,
    "integer keys": "1: {points: 2}",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_yaml_that_would_take_long_is_refused_before_it_does(text: str) -> None:
    started = time.monotonic()

    assert refusal(text, ".yaml")

    assert time.monotonic() - started < 10  # PyYAML takes 15 s for 5,000 brackets; this, some tenths


@pytest.mark.parametrize("depth", [30, 300, 900, 5_000, 100_000])
def test_json_of_any_depth_is_refused(depth: int) -> None:
    assert refusal('{"title": ' + "[" * depth + "]" * depth + "}", ".json")
    assert refusal('{"a":' * depth + "1" + "}" * depth, ".json")
