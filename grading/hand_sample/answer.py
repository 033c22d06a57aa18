"""What a sample graded by hand says: agreement, the sentence, and what it is not about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grading.error_bound import (
    SIGNALS,
    SIZES,
    UNLIKE,
    BoundError,
    Compared,
    Release,
    SamplingUnit,
    allowed,
    chosen,
    compare,
    no_promise,
    percent,
    promise,
    releases,
    unlike,
)
from grading.export.final import apply
from grading.hand_sample.draw import Draw, Stratum, changed, counts, drawn, limits, undecided
from grading.hand_sample.sheet import HandGrade, read_sheet_of
from grading.points import Grade
from grading.report.graded import GradedClass, load_graded
from grading.report.grades import one_line
from grading.reviews import current, read_overrides
from grading.rubric.rubric import exact
from infra.config.next_command import next_command
from producers.words import plural


@dataclass(frozen=True, slots=True)
class SamplePart:
    """The class, or one of the parts that have a sample each. `name` is "" for the class."""

    name: str
    members: int
    drawn: int
    agreement: tuple[Compared, ...]  # each criterion, then the total
    found: tuple[Release, ...]  # one a threshold
    choice: Release | None  # what is promised; None: nothing
    sentence: str


@dataclass(frozen=True, slots=True)
class Bound:
    """All there is to show. `warnings` belong above the sentence, where there are some."""

    title: str
    drawn: Draw
    parts: tuple[SamplePart, ...]
    blind: bool  # whether the hand grades were given without the model's points in sight
    warnings: tuple[str, ...]

    @property
    def promised(self) -> bool:
        """Whether every part has its promise."""
        return all(part.choice for part in self.parts)


def bound_of(folder: Path, sheet: Path | None = None, from_reviews: bool = False) -> Bound:
    """What the sample of the class in `folder` says.

    Args:
        sheet: where the hand grades are; None: the folder's hand-grades.csv.
        from_reviews: take the decisions made in the desk since the draw instead, which were not blind.

    Raises BoundError where no sample is drawn, it is not wholly graded, or the grades were changed since; BatchError.
    """
    made, graded = drawn(folder), load_graded(folder)
    if gone := changed(made, graded):
        raise BoundError(
            f"{plural(len(gone), 'grade')} changed since the sample was drawn, the first that of {gone[0]!r}: what was "
            f"drawn says nothing of them. Draw again: {next_command('bound', folder, '--draw', made.size)}"
        )
    by_hand = _reviewed(folder, made, graded) if from_reviews else read_sheet_of(folder, made, graded, sheet)
    grades = {grade.id: grade for grade in graded.grades}
    parts = tuple(_part(stratum, made, grades, by_hand) for stratum in made.strata)
    return Bound(graded.title, made, parts, not from_reviews, tuple(_warnings(folder, made, graded, from_reviews)))


def _part(stratum: Stratum, made: Draw, grades: Mapping[str, Grade], by_hand: Mapping[str, HandGrade]) -> SamplePart:
    plan, ids = made.plan, made.sample(stratum)
    off = {id: _is_off(grades[id], by_hand[id], made) for id in ids}
    units = [SamplingUnit(one.doubt, off.get(one.item_id)) for one in stratum.members]
    found = tuple(releases(units, plan.thresholds, made.confidence))
    choice = chosen(found, plan.at_most)
    if choice:
        sentence = promise(choice, plan.tolerance, plan.confidence)
    elif len(ids) == len(units):
        sentence = f"All {len(units)} are graded by hand: there is nothing to promise."
    else:
        wanted = f"At most {percent(plan.at_most)} that differ by more than {plan.tolerance}: "
        sentence = wanted + no_promise(found, len(ids), plan.at_most, made.confidence)
    pairs = [(grades[id], by_hand[id]) for id in ids]
    return SamplePart(stratum.name, len(units), len(ids), tuple(_agreement(pairs, made)), found, choice, sentence)


def _is_off(grade: Grade, by_hand: HandGrade, made: Draw) -> bool:
    return abs(exact(by_hand.total) - exact(grade.points or 0)) > exact(made.plan.tolerance)


def _agreement(pairs: Sequence[tuple[Grade, HandGrade]], made: Draw) -> list[Compared]:
    confidence = made.plan.confidence
    columns = [
        compare(
            item.id, item.title, [(_of(grade, item.id), hand.criteria[item.id]) for grade, hand in pairs], confidence
        )
        for item in pairs[0][0].criteria
    ]
    return [*columns, compare("", "total", [(grade.points or 0, hand.total) for grade, hand in pairs], confidence)]


def _of(grade: Grade, criterion: str) -> Any:
    return next(item.points for item in grade.criteria if item.id == criterion)


# --- hand grades from the desk ---


def _reviewed(folder: Path, made: Draw, graded: GradedClass) -> dict[str, HandGrade]:
    """What was decided in the desk since the draw. Raises BoundError where a submission's review is not whole."""
    since = [override for override in read_overrides(folder) if override.time >= made.at]
    by_id = {grade.id: grade for grade in graded.grades}
    found, lacking = {}, []
    for id, one in made.sampled().items():
        decided = current(since, id, one.submission)
        final = apply(by_id[id], decided, include_unreviewed=True)
        if None in decided or decided.keys() >= limits(graded).keys():
            found[id] = HandGrade({item.id: item.points or 0 for item in final.criteria}, final.points or 0)
        else:
            lacking.append(one.submission)
    if lacking:
        raise BoundError(
            f"{len(lacking)} of {len(made.sampled())} submissions drawn have no review since the draw, the first "
            f"{lacking[0]!r}: save each in the desk, also where nothing is to be changed"
        )
    return found


# --- what the sentence is not about ---


def _warnings(folder: Path, made: Draw, graded: GradedClass, from_reviews: bool) -> list[str]:
    members = {one.item_id for stratum in made.strata for one in stratum.members}
    ours = [grade for grade in graded.grades if grade.id in members]
    unseen = {one.item_id for one in undecided(folder, graded, made.plan.signal)}
    new = [grade for grade in graded.grades if grade.id in unseen - members]
    sampled = [grade for grade in ours if grade.id in made.sampled()]
    found = []
    if from_reviews:
        found.append(
            "These hand grades were given with the model's points in sight, which makes people agree with them."
        )
    if made.reviewed_before:
        were = plural(made.reviewed_before, "grade", "was", "were")
        found.append(
            f"{were} decided on by a person before the draw; neither the table nor the sentence is about them."
        )
    if new:
        came = plural(len(new), "grade", "was", "were")
        found.append(f"{came} added since the draw, and the sentence is not about them{_differs(new, ours, made)}.")
    if len(sampled) < len(ours) and (how := _differs(sampled, ours, made)):
        found.append(f"By chance the sample isn't like the class{how}. The bound allows for that; agreement doesn't.")
    return found


def sections(folder: Path, others: Sequence[Path]) -> list[str]:
    """A warning for each other class: that nothing is promised of it, and how it differs from the one drawn from."""
    made, graded = drawn(folder), load_graded(folder)
    ours = [grade for grade in graded.grades if counts(grade)]
    found = []
    for place in others:
        theirs = load_graded(place)
        grades = [grade for grade in theirs.grades if counts(grade)]
        versions = "" if theirs.versions == graded.versions else "; its rubric, solution, template or prompt is another"
        how = _differs(grades, ours, made) or "; its doubts and points look the same, which proves nothing"
        found.append(f"Nothing is promised of {place}: no sample was drawn from it{how}{versions}.")
    return found


def _differs(some: Sequence[Grade], ours: Sequence[Grade], made: Draw) -> str:
    """What tells two groups of grades apart, as the end of a sentence; "" if nothing does."""
    signal = SIGNALS[made.plan.signal].of
    sides = {
        "doubts": ([signal(grade) for grade in some], [signal(grade) for grade in ours]),
        "model's points": ([_share(grade) for grade in some], [_share(grade) for grade in ours]),
    }
    # Two comparisons: each gets half of the risk of a false alarm.
    apart = [name for name, (one, other) in sides.items() if unlike(one, other) < UNLIKE / len(sides)]
    return f"; their {' and '.join(apart)} are distributed differently" if apart else ""


def _share(grade: Grade) -> float:
    return float(exact(grade.points or 0) / exact(grade.max_points))


# --- how it is shown ---


def words(found: Bound) -> list[str]:
    """The sentences, in the order in which they are to be read."""
    said = [*found.warnings, *(sentence for part in found.parts for sentence in words_of(found, part))]
    return [*said, f"No error in {SIZES[1]} still allows {allowed(SIZES[1])}, in {SIZES[0]} {allowed(SIZES[0])}."]


def words_of(found: Bound, part: SamplePart) -> list[str]:
    """What is promised of one part, or that nothing is; then which grades that is about."""
    said = [f"{part.name}: {part.sentence}" if part.name else part.sentence]
    if part.choice:
        about = plural(part.choice.unseen, "grade")
        said.append(
            f"That is about {about} of {part.members}: {_which(found, part.choice)}, and not among the "
            f"{part.drawn} graded by hand. Of those, {part.choice.off} of {part.choice.sampled} differed by more."
        )
    return said


def _which(found: Bound, choice: Release) -> str:
    if found.drawn.plan.signal == "reasons":
        return (
            "those without a reason for review" if not choice.threshold else f"those with at most {choice.threshold:g}"
        )
    return f"those whose answers are at most {percent(choice.threshold)} of a criterion's points apart"


def prospect(made: Draw, stratum: Stratum) -> str:
    """What this sample can promise at best: how doubtful the grades are is known before anybody grades."""
    name = f"{stratum.name}: " if stratum.name else ""
    ids = {*made.sample(stratum)}
    if len(ids) == len(stratum.members):
        return f"{name}That is all of them: nothing stays unseen."
    units = [SamplingUnit(one.doubt, False if one.item_id in ids else None) for one in stratum.members]
    best = min(releases(units, made.plan.thresholds, made.confidence), key=lambda one: one.at_most)
    if not best.unseen:
        return f"{name}Every grade has its doubts, so a person looks at all of them."
    enough = best.at_most <= made.plan.at_most
    able = "enough" if enough else "too few: draw more, before you fill in the sheet"
    return (
        f"{name}{best.sampled} of these {len(ids)} have so little doubt that they stand for others, {best.unseen} in "
        f"all. If they all agree with you, at most {percent(best.at_most)} of those differ. That is {able}."
    )


def agreement_row(one: Compared) -> dict[str, str]:
    """A criterion, or the total, as a table shows it."""
    return {
        "criterion": one.criterion or "total",
        "title": one_line(one.title) if one.criterion else "",
        "same": f"{one.same} of {one.compared}",
        "kappa": "–" if one.kappa is None else f"{round(one.kappa, 2) + 0:.2f}",
        "bias": f"{one.bias:+.2f}",
        "interval": "–" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}",
        "largest": f"{one.largest:g}",
    }


def as_json(found: Bound) -> dict[str, Any]:
    """What `kvasir bound --json` prints: no submission's name is in it."""
    plan = found.drawn.plan
    return {
        "title": found.title,
        "drawn_by": found.drawn.by,
        "drawn_at": found.drawn.at,
        "seed": found.drawn.seed,
        "plan": asdict(plan),
        "confidence_of_each_bound": found.drawn.confidence,
        "blind": found.blind,
        "promised": found.promised,
        "warnings": list(found.warnings),
        "parts": [asdict(part) | {"promised": part.choice is not None} for part in found.parts],
    }
