"""A rubric is read exactly, or refused with one sentence that a course team can act on."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grading.rubric.rubric import MAX_STEPS, Criterion, Rubric, add_points, load_rubric, total_points
from messages.errors import RubricError

LOOPS = {"id": "loops", "title": "Uses loops", "points": 6, "step": 0.5, "model": "code", "guidance": "while is fine"}
WORDS = {"id": "words", "title": "Explains", "points": 4, "model": "feedback"}


def rubric_data(**changes: Any) -> dict[str, Any]:
    return {"title": "Homework 3", "instructions": "A first course.", "criteria": [LOOPS, WORDS], **changes}


def load(tmp_path: Path, data: Any, name: str = "rubric.json") -> Rubric:
    path = tmp_path / name
    path.write_bytes(
        data if isinstance(data, bytes) else (data if isinstance(data, str) else json.dumps(data)).encode()
    )
    return load_rubric(path)


def refusal(tmp_path: Path, data: Any, name: str = "rubric.json") -> str:
    with pytest.raises(RubricError) as caught:
        load(tmp_path, data, name)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / name))
    assert "\n" not in message
    return message


def test_a_rubric_is_read_in_its_order_with_defaults(tmp_path: Path) -> None:
    rubric = load(tmp_path, rubric_data(total=10))

    assert (rubric.title, rubric.instructions, rubric.total) == ("Homework 3", "A first course.", 10)
    assert [criterion.id for criterion in rubric.criteria] == ["loops", "words"]
    assert rubric.criteria[1] == Criterion("words", "Explains", 4, "", "feedback", 1)
    assert rubric.for_model("code") == rubric.criteria[:1]
    assert rubric.for_model("feedback") == rubric.criteria[1:]


def test_rulings_end_the_guidance_and_a_rubric_without_them_stays_what_it_was(tmp_path: Path) -> None:
    plain = load(tmp_path, rubric_data())
    data = deepcopy(rubric_data())
    data["criteria"][0]["rulings"] = ["Half the points where it never ends.", " A map is a loop. "]
    ruled = load(tmp_path, data)

    assert ruled.criteria[0].guidance.endswith("Ruling: Half the points where it never ends.\nRuling: A map is a loop.")
    assert ruled.criteria[0].guidance.startswith(plain.criteria[0].guidance)
    assert ruled.digest != plain.digest
    data["criteria"][0]["rulings"] = []
    assert load(tmp_path, data) == plain


@pytest.mark.parametrize("rulings", ["one", [1], [""], ["two\nlines"], ["x" * 401], ["x"] * 21])
def test_rulings_are_a_list_of_sentences(tmp_path: Path, rulings: object) -> None:
    data = deepcopy(rubric_data())
    data["criteria"][0]["rulings"] = rulings

    assert "'rulings'" in refusal(tmp_path, data)


def test_yaml_and_json_of_the_same_content_have_one_digest(tmp_path: Path) -> None:
    yaml_text = """
title: Homework 3
instructions: A first course.
criteria:
  - {id: loops, title: Uses loops, points: 6, step: 0.5, model: code, guidance: while is fine}
  - {id: words, title: Explains, points: 4, model: feedback}
"""
    from_yaml = load(tmp_path, yaml_text, "rubric.yaml")

    assert from_yaml == load(tmp_path, rubric_data())
    assert from_yaml.digest != load(tmp_path, rubric_data(title="Homework 4")).digest


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + json.dumps(rubric_data()).encode()).total == 10


def test_the_grid_holds_every_step_and_nothing_else() -> None:
    assert Criterion("a", "A", 1.5, "", "code", 0.5).grid == (0, 0.5, 1, 1.5)
    assert Criterion("a", "A", 0.3, "", "code", 0.1).grid == (0, 0.1, 0.2, 0.3)


def test_a_criterion_may_cost_points_where_the_rubric_says_so(tmp_path: Path) -> None:
    style = {"id": "style", "title": "Style", "points": 0, "deduction": 2, "model": "code"}

    read = load(tmp_path, rubric_data(criteria=[LOOPS, WORDS, style]))

    assert read.criteria[-1].grid == (-2, -1, 0)
    assert read.total == load(tmp_path, rubric_data()).total
    assert read.digest != load(tmp_path, rubric_data()).digest
    assert total_points([3, -2]) == 1
    assert total_points([1, -2]) == 0, "nobody loses more than was earned"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"deduction": -2}, "'deduction' must be a number above 0"),
        ({"deduction": 1.25}, "deduction 1.25 is not a multiple of step 0.5"),
        ({"deduction": 500}, "more than 201 values"),
    ],
)
def test_a_deduction_that_is_none_is_named(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    assert expected in refusal(tmp_path, rubric_data(criteria=[{**LOOPS, **change}, WORDS]))


def test_a_rubric_in_which_nothing_earns_points_is_refused(tmp_path: Path) -> None:
    criterion = {"id": "style", "title": "Style", "points": 0, "deduction": 2, "model": "code"}
    assert "no criterion earns points" in refusal(tmp_path, {"title": "Loops", "criteria": [criterion]})


def test_points_add_up_without_binary_rounding() -> None:
    assert add_points([0.1] * 3) == 0.3
    assert isinstance(add_points([0.5, 0.5]), int)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"pionts": 3}, "criterion 1 ('loops'): unknown key 'pionts'; did you mean 'points'?"),
        ({"colour": 3}, "unknown key 'colour'; the keys are id, title, points"),
        ({"points": -3}, "'points' must be a number above 0, not -3"),
        ({"points": 0}, "'points' must be a number above 0, not 0"),
        ({"points": math.nan}, "'points' must be a number above 0, not nan"),
        ({"points": math.inf}, "'points' must be a number above 0, not inf"),
        ({"points": 1e9}, "'points' must be at most 10,000"),
        ({"points": "6"}, "'points' must be a number, not '6'; write it without quotes or a unit"),
        ({"points": True}, "'points' must be a number, not True"),
        ({"points": 6.25}, "points 6.25 is not a multiple of step 0.5"),
        ({"step": 1e-9}, "'step' must be at least 0.001"),
        ({"step": 0.01}, f"0 to 6 in steps of 0.01 is more than {MAX_STEPS} values"),
        ({"id": "two words"}, "'id' must be a letter and up to 39"),
        ({"id": 7}, "'id' must be text, not 7"),
        ({"id": "Summary"}, "the id 'Summary' has another meaning in the results"),
        ({"id": "WORDS"}, "criteria 1 and 2 both have the id 'words'; change one of the ids"),
        ({"title": " "}, "'title' must be one line of text"),
        ({"title": ["x"]}, "'title' must be text, not a list"),
        ({"title": "x" * 201}, "'title' is 201 characters long; at most 200"),
        ({"guidance": "bell \x07"}, "'guidance' contains a control character"),
        ({"guidance": "\ud800"}, "'guidance' contains a control character"),
        ({"model": "gpt-oss:120b"}, "'model' must be 'code' or 'feedback', not 'gpt-oss:120b'"),
        ({"model": ["code"]}, "'model' must be 'code' or 'feedback', not a list"),
    ],
)
def test_a_mistake_in_a_criterion_is_named_with_its_place(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, rubric_data(criteria=[{**LOOPS, **change}, WORDS]))


@pytest.mark.parametrize("key", ["id", "title", "points", "model"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    partial = {name: value for name, value in LOOPS.items() if name != key}

    assert f"'{key}' is missing" in refusal(tmp_path, rubric_data(criteria=[partial]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (rubric_data(criteria=[]), "'criteria' is empty"),
        (rubric_data(criteria={"a": 1}), "'criteria' must be a list of criteria"),
        (rubric_data(criteria=["loops"]), "criterion 1 must contain keys and values"),
        (rubric_data(criteria=[LOOPS] * 61), "61 criteria, but at most 60"),
        (rubric_data(total=11), "'total' is 11, but the criteria add up to 10; correct one of them"),
        (rubric_data(total="10"), "'total' must be a number"),
        (rubric_data(criterions=[]), "unknown key 'criterions'; did you mean 'criteria'?"),
        ([1], "the rubric must contain keys and values"),
        ('{"title": "a",\n "title": "b"}', "the key 'title' occurs twice"),
        ('{"title": "a",\n oops}', "line 2, column 2 is not JSON"),
        ("[" * 100_000, "the file is JSON, but it can't be read"),
        (b'{"title": \n "\xff"}', "line 2 is not UTF-8; save the file as UTF-8"),
        (b" " * ((1 << 20) + 1), "larger than 1 MiB"),
    ],
)
def test_a_mistake_in_the_whole_is_named(tmp_path: Path, data: Any, expected: str) -> None:
    assert expected in refusal(tmp_path, data)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("title: [a\ncriteria: b", "line 2, column 9: not YAML"),
        (
            "title: !!python/object/apply:os.system [id]",
            "line 1, column 8: not YAML: could not determine",
        ),
        (
            "title: a\nguidance: Full points: the mean is 20.",
            "line 2, column 22: not YAML: mapping values are not allowed here; put a text with a colon in it in quotes",
        ),
        ("title: a\ntitle: b", "line 1: the key 'title' occurs twice"),
        ("title: !!timestamp never", "the file is YAML, but it can't be read"),
        ("? [a]\n: b", "line 1, column 3: not YAML"),
        ("", "contain keys and values (title, instructions, criteria, total, checks, feedback, late), not nothing"),
        ("a: &a [x]\nb: [" + "*a, " * 11 + "]", "11 YAML aliases (*name); at most 10 are read"),
    ],
)
def test_yaml_that_is_broken_or_dangerous_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text, "rubric.yaml")


def test_a_file_that_is_missing_or_of_another_kind_is_named(tmp_path: Path) -> None:
    assert "must end in .yaml, .yml, .json or .csv" in refusal(tmp_path, "x", "rubric.txt")
    with pytest.raises(RubricError, match=r"none\.yaml: the rubric can't be read: No such file"):
        load_rubric(tmp_path / "none.yaml")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="ab:-[]{}!&*?|>'\"#% \n\t0.1~<,@\\u", max_size=60))
def test_no_yaml_raises_anything_but_a_refusal(tmp_path: Path, text: str) -> None:
    with pytest.raises(RubricError):
        load(tmp_path, text, "rubric.yaml")
