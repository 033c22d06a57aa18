"""What a hand-graded sample says: agreement, the bound as a sentence, and what the bound does not cover."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grading.error_bound import (
    SIGNALS,
    SIGNIFICANCE_LEVEL,
    SIZES,
    BoundError,
    PointComparison,
    Release,
    SamplingUnit,
    best_release,
    compare,
    no_promise,
    percent,
    percent_without_error,
    promise,
    releases,
    same_distribution_p,
)
from grading.export.final import apply_decisions, earlier_grades
from grading.hand_sample.draw import (
    Draw,
    HandGrade,
    Stratum,
    changed_submissions,
    counts,
    limits,
    load_draw,
    read_sheet_of,
    undecided_members,
)
from grading.points import Grade, criterion_points
from grading.report.grades import GradedClass, load_graded, one_line
from grading.reviews import AFTER_A_LOOK, current_decisions, read_overrides
from grading.rubric.rubric import exact
from infra.config.next_command import next_command
from producers.words import plural


@dataclass(frozen=True, slots=True)
class SamplePart:
    """The class, or a part of it with its own sample. `name` is "" for the whole class."""

    name: str
    members: int
    drawn: int
    agreement: tuple[PointComparison, ...]  # one for each criterion, and the last for the total
    found: tuple[Release, ...]  # one for each threshold
    choice: Release | None  # the bound that is promised; None if there is no promise
    sentence: str


@dataclass(frozen=True, slots=True)
class Bound:
    """Everything to show about a bound. `warnings` belong above the sentence."""

    title: str
    draw: Draw
    parts: tuple[SamplePart, ...]
    blind: bool  # whether the person graded without seeing the model's points
    warnings: tuple[str, ...]

    @property
    def is_promised(self) -> bool:
        """Whether every part has a promise."""
        return all(part.choice for part in self.parts)


def bound_of(folder: Path, sheet: Path | None = None, from_reviews: bool = False) -> Bound:
    """Compute the bound from the graded sample of the class in `folder`.

    Args:
        sheet: path of the hand grades; None: the folder's hand-grades.csv.
        from_reviews: use the decisions made on the desk since the draw instead. These were not made blind.

    Raises BoundError if no sample is drawn, if it is not completely graded, or if the grades were changed since;
    BatchError.
    """
    draw, graded_class = load_draw(folder), load_graded(folder)
    if changed_names := changed_submissions(draw, graded_class):
        raise BoundError(
            f"{plural(len(changed_names), 'grade')} changed since the sample was drawn (the first is that of "
            f"{changed_names[0]!r}), so the sample says nothing about these grades. Draw again: "
            f"{next_command('bound', folder, '--draw', draw.size)}"
        )
    by_hand = (
        _grades_from_reviews(folder, draw, graded_class)
        if from_reviews
        else read_sheet_of(folder, draw, graded_class, sheet)
    )
    grades = {grade.id: grade for grade in graded_class.grades}
    parts = tuple(_part(stratum, draw, grades, by_hand) for stratum in draw.strata)
    return Bound(
        graded_class.title, draw, parts, not from_reviews, tuple(_warnings(folder, draw, graded_class, from_reviews))
    )


def _part(stratum: Stratum, draw: Draw, grades: Mapping[str, Grade], by_hand: Mapping[str, HandGrade]) -> SamplePart:
    plan, ids = draw.plan, draw.sample(stratum)
    differences = {id: abs(exact(by_hand[id].total) - exact(grades[id].points or 0)) for id in ids}
    off = {id: difference > exact(plan.tolerance) for id, difference in differences.items()}
    units = [SamplingUnit(member.doubt, off.get(member.item_id)) for member in stratum.members]
    part_releases = tuple(releases(units, plan.thresholds, draw.confidence))
    choice = best_release(part_releases, plan.at_most)
    if choice:
        sentence = promise(choice, plan.tolerance, plan.confidence)
    elif len(ids) == len(units):
        sentence = f"All {len(units)} are graded by hand: there is nothing to promise."
    else:
        goal = f"At most {percent(plan.at_most)} that differ by more than {plan.tolerance}: "
        sentence = goal + no_promise(part_releases, len(ids), plan.at_most, draw.confidence)
    pairs = [(grades[id], by_hand[id]) for id in ids]
    return SamplePart(
        stratum.name, len(units), len(ids), tuple(_agreement(pairs, draw)), part_releases, choice, sentence
    )


def _agreement(pairs: Sequence[tuple[Grade, HandGrade]], draw: Draw) -> list[PointComparison]:
    confidence = draw.plan.confidence
    columns = [
        compare(
            item.id,
            item.title,
            [(criterion_points(grade.criteria, item.id) or 0, hand.criteria[item.id]) for grade, hand in pairs],
            confidence,
        )
        for item in pairs[0][0].criteria
    ]
    return [*columns, compare("", "total", [(grade.points or 0, hand.total) for grade, hand in pairs], confidence)]


# --- hand grades from the desk


def _grades_from_reviews(folder: Path, draw: Draw, graded_class: GradedClass) -> dict[str, HandGrade]:
    """Read the decisions made on the desk since the draw. Raises BoundError if a submission's review is incomplete."""
    since = [override for override in read_overrides(folder) if override.time >= draw.at]
    by_id = {grade.id: grade for grade in graded_class.grades}
    hand_grades, unreviewed_names = {}, []
    for id, member in draw.sampled_members().items():
        decisions = current_decisions(since, id, member.submission)
        final = apply_decisions(by_id[id], decisions, include_unreviewed=True, earlier=earlier_grades(folder, since))
        if (None in decisions and final.is_reviewed) or decisions.keys() >= limits(graded_class).keys():
            hand_grades[id] = HandGrade({item.id: item.points or 0 for item in final.criteria}, final.points or 0)
        else:
            unreviewed_names.append(member.submission)
    if unreviewed_names:
        raise BoundError(
            f"{len(unreviewed_names)} of {len(draw.sampled_members())} drawn submissions have no review since "
            f"the draw (the first is {unreviewed_names[0]!r}): save a review of each on the desk, even if you "
            "change nothing"
        )
    return hand_grades


# --- warnings about the limits of the bound


def _warnings(folder: Path, draw: Draw, graded_class: GradedClass, from_reviews: bool) -> list[str]:
    members = {member.item_id for stratum in draw.strata for member in stratum.members}
    member_grades = [grade for grade in graded_class.grades if grade.id in members]
    undecided_ids = {member.item_id for member in undecided_members(folder, graded_class, draw.plan.signal)}
    new = [grade for grade in graded_class.grades if grade.id in undecided_ids - members]
    sampled_grades = [grade for grade in member_grades if grade.id in draw.sampled_members()]
    warnings = []
    if from_reviews:
        warnings.append(AFTER_A_LOOK)
    if draw.reviewed_before:
        warnings.append(
            f"{plural(draw.reviewed_before, 'grade', 'was', 'were')} decided on by a person before the draw; neither "
            "the table nor the sentence is about them."
        )
    if new:
        warnings.append(
            f"{plural(len(new), 'grade', 'was', 'were')} added since the draw, and the sentence is not about "
            f"them{_difference(new, member_grades, draw)}."
        )
    if len(sampled_grades) < len(member_grades) and (difference := _difference(sampled_grades, member_grades, draw)):
        warnings.append(
            f"By chance the sample isn't like the class{difference}. The bound allows for that; agreement doesn't."
        )
    return warnings


def sections(folder: Path, other_folders: Sequence[Path]) -> list[str]:
    """Return a warning for each other class.

    It says that nothing is promised about that class, and how it differs from the sampled one.
    """
    draw, graded_class = load_draw(folder), load_graded(folder)
    class_grades = [grade for grade in graded_class.grades if counts(grade)]
    warnings = []
    for place in other_folders:
        other_class = load_graded(place)
        grades = [grade for grade in other_class.grades if counts(grade)]
        versions = (
            ""
            if other_class.versions == graded_class.versions
            else "; its rubric, solution, template or prompt is another"
        )
        difference = (
            _difference(grades, class_grades, draw) or "; its doubts and points look the same, which proves nothing"
        )
        warnings.append(f"Nothing is promised of {place}: no sample was drawn from it{difference}{versions}.")
    return warnings


def _difference(grades: Sequence[Grade], reference_grades: Sequence[Grade], draw: Draw) -> str:
    """Return how two groups of grades differ, as the end of a sentence, or "" if no difference is found."""
    signal = SIGNALS[draw.plan.signal].of
    sides = {
        "doubts": ([signal(grade) for grade in grades], [signal(grade) for grade in reference_grades]),
        "model's points": ([_share(grade) for grade in grades], [_share(grade) for grade in reference_grades]),
    }
    # The significance level is divided by the number of comparisons. Otherwise two comparisons would raise more false
    # alarms than one.
    differing_sides = [
        name
        for name, (first, second) in sides.items()
        if same_distribution_p(first, second) < SIGNIFICANCE_LEVEL / len(sides)
    ]
    return f"; their {' and '.join(differing_sides)} are distributed differently" if differing_sides else ""


def _share(grade: Grade) -> float:
    return float(exact(grade.points or 0) / exact(grade.max_points))


# --- texts about the bound


def words(bound: Bound) -> list[str]:
    """Return the sentences in reading order."""
    return [
        *bound.warnings,
        *(sentence for part in bound.parts for sentence in words_of(bound, part)),
        f"No error in {SIZES[1]} still allows {percent_without_error(SIZES[1])}, "
        f"in {SIZES[0]} {percent_without_error(SIZES[0])}.",
    ]


def words_of(bound: Bound, part: SamplePart) -> list[str]:
    """Return the promise for one part, or that there is none, and then which grades it covers."""
    sentences = [f"{part.name}: {part.sentence}" if part.name else part.sentence]
    if part.choice:
        about = plural(part.choice.unseen_count, "grade")
        sentences.append(
            f"That is about {about} of {part.members}: {_grades_in_words(bound, part.choice)}, and not among the "
            f"{part.drawn} graded by hand. Of those, {part.choice.off} of {part.choice.sampled} differed by more."
        )
    return sentences


def _grades_in_words(bound: Bound, choice: Release) -> str:
    if bound.draw.plan.signal == "reasons":
        return (
            "those without a reason for review" if not choice.threshold else f"those with at most {choice.threshold:g}"
        )
    return f"those whose answers are at most {percent(choice.threshold)} of a criterion's points apart"


def prospect(draw: Draw, stratum: Stratum) -> str:
    """Return what this sample can promise at best.

    This is known in advance, because doubt does not depend on hand grades.
    """
    name = f"{stratum.name}: " if stratum.name else ""
    ids = {*draw.sample(stratum)}
    if len(ids) == len(stratum.members):
        return f"{name}That is all of them: nothing stays unseen."
    units = [SamplingUnit(member.doubt, False if member.item_id in ids else None) for member in stratum.members]
    best = min(releases(units, draw.plan.thresholds, draw.confidence), key=lambda release: release.at_most)
    if not best.unseen_count:
        return f"{name}Every grade has its doubts, so a person looks at all of them."
    is_enough = best.at_most <= draw.plan.at_most
    return (
        f"{name}{best.sampled} of these {len(ids)} have so little doubt that they stand for others, "
        f"{best.unseen_count} in all. If they all agree with you, at most {percent(best.at_most)} of those differ. "
        f"That is {'enough' if is_enough else 'too few: draw more, before you fill in the sheet'}."
    )


def agreement_row(comparison: PointComparison) -> dict[str, str]:
    """Return a table row for a criterion or the total."""
    return {
        "criterion": comparison.criterion or "total",
        "title": one_line(comparison.title) if comparison.criterion else "",
        "same": f"{comparison.same} of {comparison.compared}",
        "kappa": "–" if comparison.kappa is None else f"{round(comparison.kappa, 2) + 0:.2f}",
        "bias": f"{comparison.bias:+.2f}",
        "interval": "–"
        if comparison.interval is None
        else f"{comparison.interval[0]:+.2f} to {comparison.interval[1]:+.2f}",
        "largest": f"{comparison.largest:g}",
    }


def as_json(bound: Bound) -> dict[str, Any]:
    """Return what `kvasir bound --json` prints. It contains no names of submissions."""
    plan = bound.draw.plan
    return {
        "title": bound.title,
        "drawn_by": bound.draw.by,
        "drawn_at": bound.draw.at,
        "seed": bound.draw.seed,
        "plan": asdict(plan),
        "confidence_of_each_bound": bound.draw.confidence,
        "blind": bound.blind,
        "promised": bound.is_promised,
        "warnings": list(bound.warnings),
        "parts": [asdict(part) | {"promised": part.choice is not None} for part in bound.parts],
    }
