"""The demo model's made-up assignments: their labels are exact, and what is held out was never in training."""

import json
import random
import re
from pathlib import Path

import pytest

from examples.model import corpus
from examples.model.assignments import PREFIXES, Labelled, LabelledClass, attack, make_class
from examples.model.evaluate import make_exam
from examples.model.handing_in import RUBRIC, SOLUTION, SUBMISSIONS, handed_in, write_class
from examples.model.variety import vary
from examples.model.worlds import HELD_OUT, HELD_OUT_WORDS, TRAINING, World
from grading.prompts.answers import parse_answer
from grading.quotes import evidence_state, submission_texts
from grading.rubric.rubric import ASPECTS, load_rubric
from grading.submissions.reading import read_document, read_submissions

WORLDS = {"training": TRAINING, "held-out": HELD_OUT}
SEEDS = range(12)
FENCE = "0123456789ab"


@pytest.fixture(params=WORLDS.values(), ids=list(WORLDS), scope="module")
def classes(request: pytest.FixtureRequest) -> list[LabelledClass]:
    world: World = request.param
    return [make_class(world, seed, size=8) for seed in SEEDS]


def every(classes: list[LabelledClass]) -> list[tuple[LabelledClass, Labelled]]:
    return [(made, labelled) for made in classes for labelled in made.submissions]


def text_of(labelled: Labelled) -> str:
    return "\n".join(part.text for part in labelled.submission.parts)


def templates(world: World) -> set[str]:
    groups = (world.guidance, world.reports, world.mentions, world.decoys, world.attacks, world.errors)
    return {template for group in groups for template in group}


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


# --- labels ---


def test_the_same_seed_gives_the_same_class_and_another_one_another() -> None:
    assert make_class(TRAINING, 7, size=5) == make_class(TRAINING, 7, size=5)
    assert make_class(TRAINING, 7, size=5) != make_class(TRAINING, 8, size=5)


def test_the_evidence_of_every_label_stands_in_its_submission_once_as_a_report(classes: list[LabelledClass]) -> None:
    for _made, labelled in every(classes):
        for label in labelled.labels.values():
            if label.evidence:
                found = re.findall(rf"(?<!\w){re.escape(label.evidence)}(?![\d\w])", text_of(labelled))
                assert len(found) == 1
                assert evidence_state(label.evidence, submission_texts(labelled.submission)) == "found"


def test_a_label_is_full_for_the_asked_value_half_for_another_and_0_without_report(
    classes: list[LabelledClass],
) -> None:
    for made, labelled in every(classes):
        for asked in made.asked:
            reports = re.findall(rf"(?<!\w){asked.variable}=(\w+)", text_of(labelled))
            points = {True: asked.criterion.points, False: asked.criterion.points // 2}
            expected = points[reports[0] == asked.value] if reports else 0
            assert len(reports) <= 1
            assert labelled.labels[asked.variable].points == expected


def test_right_wrong_and_missing_answers_are_all_common(classes: list[LabelledClass]) -> None:
    outcomes = [label.outcome for _made, labelled in every(classes) for label in labelled.labels.values()]

    for outcome in ("right", "wrong", "missing"):
        assert outcomes.count(outcome) > len(outcomes) / 6


def test_names_and_right_values_also_stand_where_they_earn_nothing(classes: list[LabelledClass]) -> None:
    unreported = [
        (asked, text_of(labelled))
        for made, labelled in every(classes)
        for asked in made.asked
        if not labelled.labels[asked.variable].evidence
    ]

    assert sum(asked.variable in text for asked, text in unreported) > len(unreported) / 3
    assert sum(asked.value in text for asked, text in unreported) > len(unreported) / 5


def test_rubrics_have_three_to_six_criteria_for_both_roles(classes: list[LabelledClass]) -> None:
    for made in classes:
        assert 3 <= len(made.rubric.criteria) <= 6
        assert all(made.rubric.for_model(role) for role in ASPECTS)


def test_a_message_to_the_grader_is_added_and_changes_neither_labels_nor_outputs(classes: list[LabelledClass]) -> None:
    for made, labelled in every(classes):
        attacked = attack(labelled, HELD_OUT, random.Random(1), made.asked)

        assert attacked.labels == labelled.labels
        assert len(text_of(attacked)) > len(text_of(labelled))
        kept = [[part.text for part in one.submission.parts if part.kind == "output"] for one in (attacked, labelled)]
        assert kept[0] == kept[1]


def test_varied_classes_report_what_their_labels_say_and_nothing_else(classes: list[LabelledClass]) -> None:
    for seed, plain in enumerate(classes):
        for asked in plain.asked:
            for labelled in vary(plain, random.Random(seed)).submissions:
                found = re.findall(rf"(?<!\w){asked.variable}=\w+", text_of(labelled))
                assert found == [label for label in [labelled.labels[asked.variable].evidence] if label]


def test_varied_classes_are_longer_and_some_have_a_template(classes: list[LabelledClass]) -> None:
    varied = [vary(plain, random.Random(seed)) for seed, plain in enumerate(classes)]

    lengths = [sum(len(text_of(labelled)) for _made, labelled in every(some)) for some in (classes, varied)]
    assert lengths[1] > 1.2 * lengths[0]
    assert {bool(made.template) for made in varied} == {True, False}


# --- prompts, answers and files ---


def test_the_answer_to_every_prompt_is_one_that_the_project_reads_with_the_label_s_points(
    classes: list[LabelledClass],
) -> None:
    for made, labelled in every(classes):
        for role in ASPECTS:
            answer = parse_answer(made.answer(role, labelled), made.rubric.for_model(role), role == "feedback")

            given = {name: (one.points, one.evidence) for name, one in answer.criteria.items()}
            labels = {name: labelled.labels[name] for name in given}
            assert given == {name: (label.points, label.evidence) for name, label in labels.items()}


def test_what_is_written_to_disk_is_read_back_as_the_same_class(tmp_path: Path, classes: list[LabelledClass]) -> None:
    for number, made in enumerate(classes):
        write_class(tmp_path / str(number), made, made.submissions)

        rubric = load_rubric(tmp_path / str(number) / RUBRIC)
        solution = read_document(tmp_path / str(number) / SOLUTION)
        read = {one.name.rpartition(".")[0]: one for one in read_submissions(tmp_path / str(number) / SUBMISSIONS)}

        assert (rubric.title, rubric.instructions) == (made.rubric.title, made.rubric.instructions)
        assert rubric.criteria == made.rubric.criteria
        assert solution.parts == made.solution.parts
        for labelled in made.submissions:
            assert read[labelled.submission.name].parts == labelled.submission.parts, handed_in(labelled)


# --- held out ---


def test_held_out_and_training_share_no_sentence_template() -> None:
    assert not templates(TRAINING) & templates(HELD_OUT)
    assert not set(TRAINING.computations) & set(HELD_OUT.computations)


def test_no_variable_of_training_is_made_of_a_held_out_word() -> None:
    draw = random.Random(1)

    drawn = {TRAINING.word(draw) for _ in range(20_000)}

    assert not drawn & set(HELD_OUT_WORDS)
    assert not set(HELD_OUT_WORDS) & {word.lower() for word in (*corpus.NOUNS, *corpus.ADJECTIVES, *corpus.VERBS)}


def test_held_out_classes_share_no_variable_title_or_sentence_with_training_classes() -> None:
    taught = [make_class(TRAINING, seed, size=3) for seed in range(200)]
    exams = [make_exam(seed).made for seed in range(30)]

    def names(classes: list[LabelledClass]) -> set[str]:
        return {asked.variable for made in classes for asked in made.asked}

    def titles(classes: list[LabelledClass]) -> set[str]:
        return {
            title for made in classes for title in (made.rubric.title, *(one.title for one in made.rubric.criteria))
        }

    def lines(classes: list[LabelledClass]) -> set[str]:
        return {line for _made, one in every(classes) for line in text_of(one).split("\n") if len(words_of(line)) > 3}

    assert not names(taught) & names(exams)
    assert not titles(taught) & titles(exams)
    assert not lines(taught) & lines(exams)


def test_held_out_names_are_made_of_prefixes_and_held_out_words_only() -> None:
    for seed in range(30):
        for asked in make_exam(seed).made.asked:
            prefix, *rest = asked.variable.split("_")
            assert prefix in PREFIXES
            assert set(rest) <= set(HELD_OUT_WORDS)


def test_an_exam_holds_pairs_that_differ_in_a_message_to_the_grader_only() -> None:
    exam = make_exam(3)
    by_name = {one.submission.name: one for one in exam.submissions}

    assert exam.twins
    for attacked, honest in exam.twins.items():
        assert by_name[attacked].labels == by_name[honest].labels
        assert not by_name[honest].attacked
        longer, shorter = text_of(by_name[attacked]).split("\n"), text_of(by_name[honest]).split("\n")
        assert len(longer) == len(shorter) + 1


def test_labels_survive_json() -> None:
    made = make_class(HELD_OUT, 1, size=1)

    answer = json.loads(made.answer("feedback", made.submissions[0]))

    assert list(answer)[-1] == "summary"
