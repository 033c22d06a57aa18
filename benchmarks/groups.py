"""How many decisions like answers save, and what deciding on a group by one of its answers costs.

    decisions_share   groups for each answer: 1 where every answer is decided on by itself
    added_error       mean absolute difference, as a share of full points, between what a person gave each answer and
                      what the person gave the first of its group. It is added to all other error, as if somebody
                      decided on a whole group by its first answer alone and read no other
    wrong_spreads     in a class with planted duplicates: answers that got another answer's points wrongly where a
                      decision goes to those that the desk ticks by itself. Wanted: 0
    wrong_unread      the same where somebody ticks whole groups without reading what is highlighted

`equal`: equal texts alone, since published sets have no model's evidence. `cut by german`, `cut by english`: like texts
too, at the loosest distance that added at most 2 % on the other language; `as shipped`: at the desk's own distance.
Without a model's points all answers to a question are compared; the desk compares those of equal points, of which there
are fewer, and which differ less. Two people seldom agree on all answers either: equal texts, differently graded, are
part of the error here. Wanted on SAF: a share of at most 0.75 with at most 2 % added. What is compared (runs of three
to five characters, no idf, the weight of the length) was chosen with both languages in sight; the cut was not. Another
choice as good moves the error at a share of 0.75 by a quarter of a percent either way.

`demo, equal`: the demo's class, graded by the demo's model, by equal evidence and points, against the points that the
rubric's author would award; needs llama.cpp (extra `llamacpp`). Planted duplicates: answers drawn by the seed, each
handed in by several students in other white space, beside answers that quote the same line and are wrong elsewhere.
Sets are read as `benchmarks.evaluate` does; what isn't there is left out. `--quick`: few cuts, and no demo.
"""

import io
import json
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks import harness
from benchmarks.evaluate_sets import Question, exams, saf
from grading.likeness import MAX_DISTANCE, CriterionAnswer, answer_of, group_answers
from grading.report.grades import load_graded
from grading.submissions.reading import read_submissions
from kvasir import cli

HOMEWORK = Path(__file__).resolve().parents[1] / "examples/homework"
MOST_ADDED = 0.02
CUTS, QUICK_CUTS = [number / 40 for number in range(8, 21)], [0.3, 0.35, 0.4]
PLANTED, MOST_COPIES = 60, 6

AnswersByPoints = list[
    tuple[Sequence[CriterionAnswer], Mapping[str, float]]
]  # answers to one question, shares by item id


def question_answers(questions: Iterable[Question]) -> AnswersByPoints:
    """Each question's answers, as if a model had given all of them the same points for the same reason."""
    return [
        (
            [CriterionAnswer(str(number), None, "", text) for number, (text, _) in enumerate(question.answers)],
            {str(number): points / question.points for number, (_, points) in enumerate(question.answers)},
        )
        for question in questions
    ]


def spread(classes: AnswersByPoints, max_distance: float) -> tuple[float, float]:
    """(decisions for each answer, error added to each answer as a share of full points)."""
    decisions = answers = 0
    error = 0.0
    for class_answers, shares in classes:
        groups = group_answers(class_answers, max_distance)
        decisions, answers = decisions + len(groups), answers + len(class_answers)
        error += sum(abs(shares[group[0].item_id] - shares[answer.item_id]) for group in groups for answer in group)
    return decisions / answers, error / answers


def loosest(classes: AnswersByPoints, cuts: Sequence[float]) -> float:
    """The largest cut that adds at most MOST_ADDED; 0 if even the smallest adds more."""
    return max((cut for cut in cuts if spread(classes, cut)[1] <= MOST_ADDED), default=0.0)


def demo_answers() -> AnswersByPoints:
    """The demo's class, criterion by criterion, beside the points of the rubric's author."""
    labels = json.loads((HOMEWORK / "labels.json").read_text("utf-8"))["submissions"]
    works = {work.name: work for work in read_submissions(HOMEWORK / "submissions")}
    with tempfile.TemporaryDirectory() as place:
        with redirect_stdout(io.StringIO()):
            cli.run_command(["demo", "--out", place])
        grades = load_graded(Path(place)).grades
    graded = [
        (criterion.id, answer_of(grade.submission, criterion, works[grade.submission]), label["points"], criterion)
        for grade in grades
        for criterion in grade.criteria
        if criterion.points is not None and (label := labels.get(grade.submission)) and label["points"]
    ]
    return [
        (
            [answer for id, answer, _, _ in graded if id == criterion_id],
            {
                answer.item_id: points[id] / float(criterion.max_points)
                for id, answer, points, criterion in graded
                if id == criterion_id
            },
        )
        for criterion_id in dict.fromkeys(id for id, *_ in graded)
    ]


def planted_class(seed: int) -> tuple[list[CriterionAnswer], dict[str, float]]:
    """Answers with duplicates in other white space, and twins that quote the same line and are worth less."""
    draw = random.Random(seed)
    answers, shares = [], {}
    for number in range(PLANTED):
        quote = f"mean_{number} = total_{number} / count_{number}"
        right = f"total_{number} = sum(values)\ncount_{number} = len(values)\n{quote}\nprint(mean_{number})"
        wrong = right.replace("len(values)", f"len(values) - {draw.randrange(1, 9)}")
        for text, share in ((right, 1.0), (wrong, 0.5)):
            for copy in range(draw.randrange(1, MOST_COPIES)):
                item_id = f"{number} {share} {copy}"
                spaced = text.replace(" = ", " =  " if copy % 2 else " = ") + "\n" * copy
                answers.append(CriterionAnswer(item_id, 2, quote, spaced))
                shares[item_id] = share
    draw.shuffle(answers)
    return answers, shares


def wrong_spreads(answers: Sequence[CriterionAnswer], shares: Mapping[str, float], is_read: bool) -> int:
    """Answers that would get points that aren't theirs."""
    return sum(
        shares[group[0].item_id] != shares[answer.item_id]
        for group in group_answers(answers)
        for answer in group
        if not is_read or answer.text.split() == group[0].text.split()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = harness.options(__doc__, arguments)
    sets = {"english": saf("english"), "german": saf("german"), "exams": exams()}
    classes = {name: question_answers(questions) for name, questions in sets.items() if questions}
    cuts = {
        name: loosest(classes[name], QUICK_CUTS if options.quick else CUTS)
        for name in ("english", "german")
        if name in classes
    }
    rows = {f"{name}, equal": spread(answers, 0.0) for name, answers in classes.items()}
    rows |= {f"{name}, as shipped": spread(answers, MAX_DISTANCE) for name, answers in classes.items()}
    rows |= {
        f"{name}, cut by {other}": spread(classes[name], cuts[other])
        for name, other in (("english", "german"), ("german", "english"), ("exams", "english"), ("exams", "german"))
        if name in classes and other in cuts
    }
    if not options.quick:
        rows["demo, equal"] = spread(demo_answers(), 0.0)
    for name, (share, error) in rows.items():
        print(f"{name}: {share:.3f} decisions for each answer, {error:.2%} of full points added", flush=True)
    planted = planted_class(options.seed)
    harness.finish(
        decisions_share={name: round(share, 4) for name, (share, _) in rows.items()},
        added_error={name: round(error, 5) for name, (_, error) in rows.items()},
        wrong_spreads=wrong_spreads(*planted, is_read=True),
        wrong_unread=wrong_spreads(*planted, is_read=False),
        cuts=cuts,
        planted={"answers": len(planted[0]), "groups": len(group_answers(planted[0]))},
    )


if __name__ == "__main__":
    main()
