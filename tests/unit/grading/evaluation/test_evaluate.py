"""A class beside hand grades: what is compared, by criterion and band, how sure the model was, and what is left out."""

from dataclasses import replace

import pytest

from grading.evaluation.agreement import Agreement, EvaluationError
from grading.evaluation.evaluate import Evaluation, evaluate, kind_of
from grading.evaluation.page import pictures, rows, sentences
from grading.points import EXAMPLE_REMARK, Doubt, Grade
from grading.prompts.answers import CriterionGrade
from grading.report.grades import GradedClass

SIZE = 30


def grade_of(number: int, points: tuple[int, int], **fields: object) -> Grade:
    loops, total = CriterionGrade("loops", "Loops", 4, points[0]), CriterionGrade("total", "Sums", 2, points[1])
    grade = Grade(f"s{number:02d}", "graded", sum(points), 6, (loops, total), item_id=f"i{number}")
    return replace(grade, **fields)  # type: ignore[arg-type]


def class_of(*grades: Grade) -> GradedClass:
    return GradedClass("batch", "Homework", 6, grades)


def by_hand(*raters: str) -> dict[tuple[str, str, str], int]:
    """Everybody has number % 5 points for loops, and 2 for the other; a second rater gives a point less for loops."""
    return {
        (f"s{number:02d}", id, rater): points
        for number in range(SIZE)
        for place, rater in enumerate(raters)
        for id, points in (("loops", max(0, number % 5 - place)), ("total", 2))
    }


MODEL = class_of(*(grade_of(number, (min(4, number % 5 + 1), 2)) for number in range(SIZE)))


def names(agreements: object) -> list[str]:
    return [each.name for each in agreements]  # type: ignore[attr-defined]


def measured(evaluation: Evaluation, part: str, name: str) -> Agreement:
    (found,) = [each for each in evaluation.agreements[part] if each.name == name]
    return found


def test_a_class_is_measured_by_total_by_criterion_and_by_band_in_the_rubrics_order() -> None:
    evaluation = evaluate(MODEL, by_hand("Ada"))

    assert names(evaluation.agreements["model"]) == ["the total", "all criteria", "loops", "total"]
    assert measured(evaluation, "model", "loops").measures["bias"].value == pytest.approx(0.8)
    assert measured(evaluation, "model", "total").measures["exact"].value == 1
    assert [(each.name, each.pairs) for each in evaluation.agreements["band"]] == [
        ("none", SIZE // 5),
        ("partial", 3 * SIZE // 5),
        ("full", SIZE // 5 + SIZE),
    ]
    assert measured(evaluation, "band", "none").measures["bias"].value == 1
    assert all(each.measures["qwk"].value is None for each in evaluation.agreements["band"])
    assert evaluation.agreements["people"] == evaluation.agreements["floor"] == []
    assert "One person graded" in " ".join(sentences(evaluation))


def test_two_people_are_compared_with_each_other_and_the_model_with_both() -> None:
    evaluation = evaluate(MODEL, by_hand("Ada", "Bo"))

    assert measured(evaluation, "people", "loops").pairs == SIZE
    assert measured(evaluation, "people", "loops").measures["bias"].value == pytest.approx(0.8)
    assert measured(evaluation, "model", "loops").pairs == 2 * SIZE
    assert measured(evaluation, "model", "loops").submissions == SIZE


def test_what_no_model_gave_points_to_and_what_was_an_example_is_left_out() -> None:
    odd = {
        0: {"remarks": (EXAMPLE_REMARK,)},
        1: {"state": "empty"},
        2: {"state": "waiting", "points": None},
        3: {"state": "failed", "points": None},
    }
    grades = [replace(grade, **odd.get(number, {})) for number, grade in enumerate(MODEL.grades)]  # type: ignore[arg-type]

    assert evaluate(class_of(*grades), by_hand("Ada")).submissions == SIZE - len(odd)
    with pytest.raises(EvaluationError, match="no submission has both a hand grade"):
        evaluate(class_of(*grades[:4]), by_hand("Ada"))


def test_a_doubt_has_its_record_whatever_figures_and_names_stand_in_it() -> None:
    why = "loops: 3 answers disagree: 1, 2, 3 points"
    doubts = {0: (Doubt("loops", why),), 4: (Doubt("loops", why.replace("3", "5")), Doubt("", "truncated: 7 lines"))}
    grades = [grade_of(n, (n % 5 + (3 if n == 0 else 0), 2), doubts=doubts.get(n, ())) for n in range(SIZE)]

    records = {record["kind"]: record for record in evaluate(class_of(*grades), by_hand("Ada")).doubts}

    assert list(records) == ["any reason for review", "… answers disagree", "truncated"]
    assert records["… answers disagree"] == {
        **{"kind": "… answers disagree", "flagged": 2, "flagged_wrong": 1},
        **{"unflagged": SIZE - 2, "unflagged_wrong": 0},
    }
    assert kind_of(Doubt("", "speaks to the grader (cell 3, score 0.86): “full marks”")) == "speaks to the grader"


def test_how_sure_the_model_was_is_compared_with_how_often_it_was_right() -> None:
    def sure(number: int) -> Grade:
        share = 0.9 if number % 2 else 0.5
        loops = CriterionGrade("loops", "Loops", 4, 2, likelihoods={"2": share, "1": 1 - share})
        return replace(grade_of(number, (2, 2)), criteria=(loops,))

    hand = {(f"s{number:02d}", "loops", ""): 2 if number % 2 else 1 for number in range(SIZE)}
    evaluation = evaluate(class_of(*map(sure, range(SIZE))), hand)

    assert sorted(evaluation.reliability) == [pytest.approx([0.0, 0.5]), pytest.approx([1.0, 0.9])]
    assert [picture.title for picture in pictures(evaluation)][:2] == ["By what the person gave", "How sure, how right"]


def test_what_is_shown_has_an_interval_below_each_figure() -> None:
    shown = {row["grades"]: row for row in rows(evaluate(MODEL, by_hand("Ada", "Bo")))}

    figure, interval = shown["model: loops"]["off by"].split("\n")
    low, high = interval.split("…")
    assert float(low) < float(figure) < float(high)
    assert shown["band: full"]["kappa"] == "–"
