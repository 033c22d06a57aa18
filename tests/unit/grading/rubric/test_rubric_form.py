"""A rubric as the fields of a form: what changes nothing makes the same rubric, and edits make what they say."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.rubric.form import (
    RubricFields,
    has_comments,
    move_criterion,
    read_fields,
    rubric_differences,
    to_yaml,
    with_criterion,
)
from grading.rubric.rubric import Rubric, parse_rubric
from messages.errors import RubricError
from tests.support.homework import EXAMPLE

FULL = """\
title: "Loops: and # functions"
instructions: |
  Grade the third homework.

    An indented line.
feedback: Write it in German.
total: 10
criteria:
  - {id: loops, title: A loop where one belongs, points: 6, step: 0.5, model: code, guidance: "yes",
     rulings: [Half the points where it never ends., "None: if it is copied."]}
  - {id: names, title: "2026-11-03", points: 4, model: feedback}
late: {due: 2026-11-03T23:59:00+01:00, percent: 10, grace_minutes: 15}
checks:
  - {criterion: loops, functions: [map|lapply]}
  - {output: present}
"""
EARLIER = '{"loops": {"points": 6, "description": "A loop"}, "names": {"points": 4, "description": "Names"}}'
CANVAS = (
    "Rubric Name,Criteria Name,Criteria Description,Criteria Enable Range,"
    "Rating Name,Rating Description,Rating Points\n"
    "Loops,Uses a loop,Where it belongs,false,Full,,2,None,,0\n"
)


def parsed(form: RubricFields) -> Rubric:
    return parse_rubric("rubric.yaml", to_yaml(form), ".yaml")


def edited(form: RubricFields, at: int, **changes: Any) -> RubricFields:
    criteria = [*form.criteria]
    criteria[at] = replace(criteria[at], **changes)
    return replace(form, criteria=tuple(criteria))


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".yaml", FULL),
        (".yaml", (EXAMPLE / "rubric.yaml").read_text("utf-8")),
        (".json", EARLIER),
        (".csv", CANVAS),
    ],
)
def test_a_form_that_changes_nothing_makes_the_same_rubric(suffix: str, text: str) -> None:
    before = parse_rubric("r", text, suffix)
    form = read_fields("r", text, suffix)
    assert parsed(form) == before
    assert read_fields("r", to_yaml(form), ".yaml") == form


_text = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t#:-'\"|>&*%@`{}[]")
)
_line = _text.map(lambda text: " ".join(text.split())).filter(lambda text: 0 < len(text) <= 200)


@settings(max_examples=150, deadline=None)
@given(
    title=_line, instructions=_text, guidance=_text, rulings=st.lists(_line, max_size=3), step=st.sampled_from([1, 0.5])
)
def test_whatever_people_write_reads_the_same_from_the_file_that_a_form_makes(
    title: str, instructions: str, guidance: str, rulings: list[str], step: float
) -> None:
    item: dict[str, Any] = {"id": "a", "title": title, "points": 2, "step": step, "model": "code"}
    data = {
        "title": title,
        "instructions": instructions,
        "criteria": [item | {"guidance": guidance, "rulings": rulings}],
    }
    text = yaml.safe_dump(data, allow_unicode=True)
    try:
        before = parse_rubric("r", text, ".yaml")
    except RubricError:
        return
    assert parsed(read_fields("r", text, ".yaml")) == before


def test_edits_make_what_they_say_and_take_checks_along() -> None:
    before = parse_rubric("r", FULL, ".yaml")
    form = read_fields("r", FULL, ".yaml")

    renamed = parsed(edited(form, 0, id="iteration", points=7))
    assert renamed.total == 11, "a total that is written is the sum"
    assert [check.criterion for check in renamed.checks] == ["iteration", ""]
    assert rubric_differences(before, renamed) == ["iteration (new)", "loops (removed)", "checks"]

    fewer = parsed(move_criterion(form, 0, None))
    assert [each.id for each in fewer.criteria] == ["names"]
    assert [check.criterion for check in fewer.checks] == [""]

    swapped = parsed(move_criterion(form, 1, 0))
    assert [each.id for each in swapped.criteria] == ["names", "loops"]
    assert rubric_differences(before, swapped) == ["the order of the criteria"]

    more = edited(edited(with_criterion(with_criterion(form)), 2, title="One"), 3, title="Two")
    assert [each.id for each in parsed(more).criteria[2:]] == ["criterion_1", "criterion_2"]

    ruled = parsed(edited(form, 1, rulings="First.\n\n  Second. \n"))
    assert ruled.criteria[1].rulings == ("First.", "Second.")
    assert rubric_differences(before, ruled) == ["names"]


def test_another_due_time_is_no_other_rubric_and_no_time_is_no_rule() -> None:
    before = parse_rubric("r", FULL, ".yaml")
    form = read_fields("r", FULL, ".yaml")
    later = parsed(replace(form, late=replace(form.late, due="2026-11-04T12:00")))
    assert (later.digest, later.late.due if later.late else "") == (before.digest, "2026-11-04T12:00:00")
    assert parsed(replace(form, late=replace(form.late, due=""))).late is None
    with pytest.raises(RubricError, match="'due' must be a date and a time"):
        parsed(replace(form, late=replace(form.late, due="Monday")))


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("# a rubric\ntitle: x\n", True),
        ("title: x # said\n", True),
        ("title: x\n# at the end", True),
        ('title: "x # y"\n', False),
        ("title: |\n  # a heading\n", False),
        ("title: x#y\n", False),
        ("title: [", False),
    ],
)
def test_comments_are_told_from_text(text: str, has: bool) -> None:
    assert has_comments(text) is has
