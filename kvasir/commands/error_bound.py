"""`kvasir bound`: draws a sample to grade by hand, and says what it promises about the other grades."""

from dataclasses import dataclass, fields
from pathlib import Path

import click

from desk.decisions import account
from grading import hand_sample as bounds
from grading.error_bound import SIGNALS, Release, percent, plural_points
from grading.hand_sample import SHEET, Bound, BoundError, Draw, SamplePlan
from grading.rubric.rubric import exact, plain
from infra.config.next_command import next_command
from kvasir.commands.export import bytes_of
from kvasir.options import Number, group_options, json_option, path
from kvasir.terminal import print_table, say, say_json
from producers.words import plural


class _Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas."""

    name = "numbers"

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Convert `30,60` to (30, 60)."""
        try:
            return tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 30,60", param, ctx)


@dataclass(frozen=True, slots=True)
class _Drawing:
    """The options that are fixed at the draw. None means not given."""

    draw: tuple[int, ...] | None
    by: str | None
    within: float | None
    at_most: float | None
    confidence: float | None
    signal: str | None
    thresholds: tuple[float, ...] | None
    strata: Path | None

    def plan(self) -> SamplePlan:
        """Return the plan, with defaults for options that were not given."""
        usual = SamplePlan()
        return SamplePlan(
            self.draw or usual.sizes,
            usual.tolerance if self.within is None else plain(exact(self.within)),
            usual.at_most if self.at_most is None else self.at_most / 100,
            usual.confidence if self.confidence is None else self.confidence / 100,
            self.signal or usual.signal,
            self.thresholds or (),
        )


@click.command()
@click.argument("batch", type=path)
@click.option(
    "--draw",
    type=_Numbers(int),
    metavar="N[,N…]",
    help="Draw N submissions for you to grade by hand. With 40,80 you begin with 40, and --more goes on to 80.",
)
@click.option(
    "--within", type=Number(0), metavar="POINTS", help="Ignore differences of up to this many points [default: 1]."
)
@click.option(
    "--at-most",
    type=Number(),
    metavar="PERCENT",
    help="Set the bound: allow at most this percentage of the unchecked grades to differ from yours [default: 20].",
)
@click.option(
    "--confidence", type=Number(), metavar="PERCENT", help="Set the confidence of the bound, in percent [default: 90]."
)
@click.option(
    "--signal",
    type=click.Choice(list(SIGNALS)),
    help="Choose how to measure the doubt about a grade [default: reasons].",
)
@click.option(
    "--thresholds",
    type=_Numbers(float),
    metavar="X[,X…]",
    help="Compare up to 5 thresholds. A threshold means that people check each grade whose doubt is above it.",
)
@click.option(
    "--strata",
    type=path,
    help="Draw a sample from each part of the class. This CSV names the part of each submission (submission, part).",
)
@click.option("--by", metavar="NAME", help="Record who draws the sample [default: the login name].")
@click.option(
    "--more",
    is_flag=True,
    help="Enlarge the sample to the next size of --draw, and add rows to the sheet for you to fill in.",
)
@click.option(
    "--sheet", type=path, help=f"Read the hand grades from this sheet [default: {SHEET} in the folder BATCH]."
)
@click.option(
    "--reviews",
    is_flag=True,
    help="Use the desk's reviews since the draw as hand grades, although the reviewers saw the model's points.",
)
@click.option(
    "--section", "other_classes", type=path, multiple=True, help="Compare this class with the class in another folder."
)
@json_option
@group_options(drawing=_Drawing)
def bound(
    batch: Path,
    drawing: _Drawing,
    more: bool,
    sheet: Path | None,
    reviews: bool,
    other_classes: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Promise how many grades of the batch in folder BATCH differ from yours, from a sample that you grade by hand.

    First use --draw 30: it notes who was drawn and writes hand-grades.csv for you to fill in, without the model's
    points. Then leave it out to see agreement and bound. The exit code is 1 if nothing can be promised.
    """
    if drawing.draw:
        by = drawing.by or account()
        if not by:
            raise BoundError("the login name is unknown: use --by NAME to say who draws the sample")
        strata_table = bytes_of(drawing.strata)
        strata = bounds.strata_from(strata_table, f"file {drawing.strata}") if strata_table is not None else None
        return _print_draw(batch, bounds.draw_sample(batch, drawing.plan(), by, strata), as_json)
    _refuse_drawing(drawing)
    if more:
        return _print_draw(batch, bounds.draw_more(batch), as_json)
    result = bounds.bound_of(batch, sheet, reviews)
    warnings = bounds.sections(batch, other_classes)
    if as_json:
        say_json(bounds.as_json(result) | {"sections": warnings})
    else:
        _print_bound(result, warnings)
    return 0 if result.is_promised else 1


def _refuse_drawing(drawing: _Drawing) -> None:
    drawing_options = [
        f"--{field.name.replace('_', '-')}" for field in fields(drawing) if getattr(drawing, field.name) is not None
    ]
    if drawing_options:
        raise BoundError(f"{', '.join(drawing_options)} can be set only with --draw, before anybody grades by hand")


# --- output of --draw ---


def _print_draw(batch: Path, draw: Draw, as_json: bool) -> int:
    names = [member.submission for member in draw.sampled_members().values()]
    if as_json:
        say_json({"sample": names, "sheet": str(batch / SHEET), "seed": draw.seed, "by": draw.by, "at": draw.at})
        return 0
    members = sum(len(stratum.members) for stratum in draw.strata)
    say(f"{draw.by} drew {len(names)} of {plural(members, 'grade')}. It is written down.")
    say(f"Grade them by hand, before you look at what the model gave: {batch / SHEET}")
    plan = draw.plan
    say(
        f"To be promised, with {plan.confidence:.0%} confidence: at most {percent(plan.at_most)} of the grades that "
        f"nobody looks at differ by more than {plural_points(plan.tolerance)}."
    )
    for stratum in draw.strata:
        say(bounds.prospect(draw, stratum))
    say(f"Then: {next_command('bound', batch)}")
    return 0


# --- printing the bound ---


def _print_bound(result: Bound, warnings: list[str]) -> None:
    for part in result.parts:
        say(f"{part.name or result.title}: {part.drawn} of {plural(part.members, 'grade')} graded by hand")
        rows = [bounds.agreement_row(agreement) for agreement in part.agreement]
        print_table(tuple(rows[0]), [tuple(row.values()) for row in rows], right=tuple(rows[0])[2:])
        say("")
        if len(part.found) > 1 or not part.choice:
            print_table(_BOUNDS, [_bound_row(release) for release in part.found], right=_BOUNDS)
            say("")
    for sentence in (*warnings, *bounds.words(result)):
        say(sentence)


_BOUNDS = ("doubt up to", "grades", "by hand", "off", "unseen", "at most off")


def _bound_row(release: Release) -> list[str]:
    counts = (release.released, release.sampled, release.off, release.unseen_count)
    return [f"{release.threshold:g}", *map(str, counts), percent(release.at_most) if release.unseen_count else "–"]
