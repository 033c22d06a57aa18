"""How an evaluation is shown: rows of a table, sentences, pictures, and a page that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from grading.charts.drawing import Bar, Picture, columns, points
from grading.evaluation.agreement import MIN_UNITS, Agreement, Estimate
from grading.evaluation.evaluate import BANDS, EVERY_CRITERION, Evaluation, band_of, by_name, finest
from grading.report.page import render_template

COLUMNS = {"qwk": "kappa", "mae": "off by", "bias": "bias", "exact": "same", "within_step": "in a step"}
_FORMS = {"bias": "+.2f", "exact": ".0%", "within_step": ".0%"}


def row(measured: Agreement, title: str = "") -> dict[str, str]:
    """An agreement as a table shows it, each interval in a line of its own; `title`: who is compared."""
    cells = {COLUMNS[name]: _shown(measured.measures[name], _FORMS.get(name, ".2f")) for name in COLUMNS}
    return {"grades": f"{title}{measured.name}", "n": str(measured.pairs)} | cells


def _shown(estimate: Estimate, form: str) -> str:
    if estimate.value is None:
        return "–"
    interval = "\n" + "…".join(format(end, form) for end in estimate.interval) if estimate.interval else ""
    return f"{estimate.value:{form}}{interval}"


def rows(evaluation: Evaluation) -> list[dict[str, str]]:
    """All that was measured: the model against people, by band, people among themselves, and the floor."""
    parts = {"": evaluation.model, "band: ": evaluation.by_band}
    parts |= {"people: ": evaluation.people[:2], "floor: ": evaluation.floor[:2]}
    return [row(measured, title) for title, agreements in parts.items() for measured in agreements]


def sentences(evaluation: Evaluation) -> list[str]:
    """What to know of the figures, and what the doubts were worth."""
    missing_parts = {
        f"Fewer than {MIN_UNITS} submissions: no intervals.": evaluation.submissions >= MIN_UNITS,
        "One person graded: how far two would agree is not known.": evaluation.people,
        "No floor: that takes the class's work, and nine hand grades of a criterion.": evaluation.floor,
    }
    doubts = (
        "{kind}: of {flagged} flagged, {flagged_wrong} were wrong; of {unflagged} not flagged, "
        "{unflagged_wrong}".format_map(record)
        for record in evaluation.doubts
    )
    return [*(sentence for sentence, is_there in missing_parts.items() if not is_there), *doubts]


def pictures(evaluation: Evaluation) -> list[Picture]:
    """Bands, reliability, and the points of the total and of each criterion by person and by model."""
    bands = Counter((band_of(pair), (pair.difference > 0) - (pair.difference < 0)) for pair in finest(evaluation.pairs))
    series = {
        title: [Bar(band, bands[band, sign]) for band in BANDS]
        for title, sign in {"the same": 0, "too many points": 1, "too few": -1}.items()
    }
    drawn = [columns("By what the person gave", "points by the person", "times", series)]
    if evaluation.reliability:
        bins = dict.fromkeys(evaluation.reliability, 1)
        drawn.append(points("How sure, how right", "likelihood of the points", "a person gave the same", bins, 1.0))
    for name, pairs in by_name(evaluation.pairs).items():
        if name != EVERY_CRITERION:
            counts = Counter((float(pair.second), float(pair.first)) for pair in pairs)
            title = f"Model and person: {name}"
            drawn.append(points(title, "points by the person", "points by the model", counts, pairs[0].max_points))
    return drawn


def render_evaluation(evaluation: Evaluation, facts: Mapping[str, str], gains: Iterable[Agreement] = ()) -> str:
    """The page as HTML. `facts`: of the run; `gains`: over another batch."""
    table = [*rows(evaluation), *(row(measured, "gain: ") for measured in gains)]
    return render_template(
        "evaluation_page.html.j2",
        title=evaluation.title,
        rows=table,
        sentences=sentences(evaluation),
        facts=tuple(facts.items()),
        pictures=pictures(evaluation),
    )
