"""Shows an evaluation: table rows, sentences, charts, and a self-contained page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from grading.charts.drawing import Bar, Picture, columns, points
from grading.evaluation.agreement import MIN_UNITS, Agreement, Estimate, GradePair
from grading.evaluation.evaluate import BANDS, EVERY_CRITERION, Evaluation, band_of, by_name, finest
from grading.report.page import render_template

_COLUMNS = {
    "qwk": ("kappa", "z.2f"),
    "mae": ("off by", "z.2f"),
    "bias": ("bias", "+z.2f"),
    "exact": ("same", "z.0%"),
    "within_step": ("in a step", "z.0%"),
}


def rows(evaluation: Evaluation, gains: Iterable[Agreement] = ()) -> list[dict[str, str]]:
    """Return everything that was measured as table rows. Each interval has its own line."""
    return [
        {"grades": f"{part}: {measured.name}", "n": str(measured.pairs)}
        | {title: _shown(measured.measures[name], form) for name, (title, form) in _COLUMNS.items()}
        for part, agreements in [*evaluation.agreements.items(), ("gain", gains)]
        for measured in agreements
    ]


def _shown(estimate: Estimate, form: str) -> str:
    interval = "\n" + "…".join(format(end, form) for end in estimate.interval) if estimate.interval else ""
    return "–" if estimate.value is None else f"{estimate.value:{form}}{interval}"


def sentences(evaluation: Evaluation) -> list[str]:
    """Return notes on the numbers, and sentences on what the doubts were worth."""
    remarks = {
        f"Fewer than {MIN_UNITS} submissions: no intervals.": evaluation.submissions < MIN_UNITS,
        "One person graded: how far two would agree is not known.": not evaluation.agreements["people"],
        "No floor: that takes the class's work, and nine hand grades of a criterion.": not evaluation.agreements[
            "floor"
        ],
    }
    record_text = (
        "{kind}: of {flagged} flagged, {flagged_wrong} were wrong; of {unflagged} not flagged, {unflagged_wrong}"
    )
    return [
        *(sentence for sentence, is_true in remarks.items() if is_true),
        *(record_text.format_map(record) for record in evaluation.doubts),
    ]


def pictures(evaluation: Evaluation) -> list[Picture]:
    """Draw bands, reliability, and the points of the total and of each criterion, by person and by model."""
    bands = Counter((band_of(pair), (pair.difference > 0) - (pair.difference < 0)) for pair in finest(evaluation.pairs))
    series = {
        title: [Bar(band, bands[band, sign]) for band in BANDS]
        for title, sign in {"the same": 0, "too many points": 1, "too few": -1}.items()
    }
    reliability = Counter((likelihood, share) for share, likelihood in evaluation.reliability)
    return [
        columns("By what the person gave", "points by the person", "times", series),
        *(
            [points("How sure, how right", "likelihood", "a person gave the same", reliability, 1.0)]
            if reliability
            else []
        ),
        *(
            points(
                f"Model and person: {name}",
                "by the person",
                "by the model",
                _places(pairs),
                pairs[0].max_points - pairs[0].min_points,
            )
            for name, pairs in by_name(evaluation.pairs).items()
            if name != EVERY_CRITERION
        ),
    ]


def _places(pairs: Sequence[GradePair]) -> Counter[tuple[float, float]]:
    """Return points as a number of steps above the fewest possible points."""
    return Counter((float(pair.second - pair.min_points), float(pair.first - pair.min_points)) for pair in pairs)


def render_evaluation(evaluation: Evaluation, facts: Mapping[str, str], gains: Iterable[Agreement] = ()) -> str:
    """Render the page as HTML. `facts` describe the run. `gains` are the differences from another batch."""
    return render_template(
        "evaluation_page.html.j2",
        title=evaluation.title,
        rows=rows(evaluation, gains),
        sentences=sentences(evaluation),
        facts=tuple(facts.items()),
        pictures=pictures(evaluation),
    )
