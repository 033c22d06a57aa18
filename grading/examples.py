"""Graded examples: of the work that a person graded, what the models are shown before the class's, one set a batch.

They are chosen once and kept with the batch's other inputs, texts included: what is in every prompt must not change
with one student's file. Chosen is for each criterion the work on both sides of a boundary between two numbers of
points, boundaries in the middle of the scale first, the shortest work at each; only work that was graded in every
criterion, that nothing is doubtful about, and that no bound's sample holds; at most half of it, so that the rest tells
what the examples are worth. No KV cache but the class's prefix grows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Sequence

from grading.attacks.detection import instruction_flags
from grading.evaluation.agreement import EvaluationError
from grading.evaluation.hand_grades import in_class, read_hand_grades
from grading.inputs import content
from grading.prompts.prompt import Example, ExampleSet, example_text, fence_for, text_of
from grading.request import GradeRequest
from grading.rubric.rubric import Criterion, Points, Rubric
from grading.submissions.submission import Submission
from grading.submissions.tokens import estimate_tokens
from messages.errors import BatchError
from producers.storage.shapes import from_json, parse_as

PER_CRITERION = 4
_CONTEXT_SHARE = 0.25  # of the smallest context, for all examples together


def read_examples(
    request: GradeRequest,
    rubric: Rubric,
    submissions: Sequence[Submission],
    excluded_names: Collection[str],
    secret: bytes,
) -> ExampleSet | None:
    """The batch's set, or a new one where there is none yet or other hand grades are named; None: none is wanted.

    Texts are as they were handed in, with the names in them. Raises EvaluationError where no work can be an example,
    ExportError, BatchError.
    """
    if not request.examples:
        return None
    data = content(request.examples)
    source, kept_file = hashlib.sha256(data).hexdigest(), request.copies.get("examples")
    try:
        kept_set = parse_as(ExampleSet, from_json(content(kept_file)), "the examples") if kept_file else None
    except ValueError as error:
        raise BatchError(f"{kept_file} can't be read ({error}); restore it") from None
    if isinstance(kept_set, ExampleSet) and (request.selection.from_manifest or kept_set.source == source):
        return kept_set
    by_hand = in_class(read_hand_grades(data, str(request.examples)), [work.name for work in submissions], ())
    points_by_name: dict[str, dict[str, Points]] = {}
    for (name, id, _), points in sorted(by_hand.items(), reverse=True):  # of several people's the first
        points_by_name.setdefault(name, {})[id] = points
    graded = [
        Example(Submission(work.name, work.language, work.parts), points_by_name[work.name])
        for work in submissions
        if work.name in points_by_name.keys() - excluded_names and work.is_gradable
        if all(points_by_name[work.name].get(criterion.id) in criterion.grid for criterion in rubric.criteria)
        if not work.doubtful_notes and not instruction_flags(work)
    ]
    chosen = _choose(graded, rubric, _CONTEXT_SHARE * min(model.context for model in request.models.values()))
    if not chosen:
        raise EvaluationError(
            f"no work in {request.examples} can be an example: that takes two submissions or more with points for each "
            "criterion, nothing doubtful about them, none of them in a bound's sample, and short enough for the model"
        )
    return ExampleSet(source, fence_for(secret, "\n".join(text_of(example.work) for example in chosen)), tuple(chosen))


def _choose(graded: Sequence[Example], rubric: Rubric, room: float) -> list[Example]:
    """In turn for each criterion, while there is room (tokens)."""
    boundaries = (_beside_boundaries(criterion, graded) for criterion in rubric.criteria)
    chosen: list[Example] = []
    for example in itertools.chain.from_iterable(itertools.zip_longest(*boundaries)):
        size = estimate_tokens(example_text(example, "")) if example else 0
        if example and example not in chosen and size <= room and len(chosen) < len(graded) // 2:
            chosen.append(example)
            room -= size
    return chosen


def _beside_boundaries(criterion: Criterion, graded: Sequence[Example]) -> list[Example]:
    by_length = sorted(graded, key=lambda example: -len(text_of(example.work)))
    shortest = {example.points[criterion.id]: example for example in by_length}  # the last of each
    boundaries = sorted(itertools.pairwise(sorted(shortest)), key=lambda pair: abs(sum(pair) - criterion.points))
    steps = dict.fromkeys(points for pair in boundaries for points in pair) or shortest
    return [shortest[points] for points in steps][:PER_CRITERION]
