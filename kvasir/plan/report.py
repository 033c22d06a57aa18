"""The prediction as text, as JSON, and as a chart."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from desk.estimate import duration
from grading.charts.drawing import Span, spans
from kvasir.plan.prediction import Prediction
from kvasir.plan.simulate import SimulatedRun
from kvasir.plan.targets import Target
from kvasir.terminal import print_table, say
from messages.errors import UsageError
from producers.words import plural

ASSUMPTIONS = (
    "A slot with a single rate is taken to decode at it whoever sits beside it: `kvasir measure` gives curves.",
    "While a machine prefills it is taken to decode nothing, and models that it decodes side by side to take turns.",
    "How long answers are is assumed, not known: --code-answer and --feedback-answer set their means.",
)


def as_json(prediction: Prediction, goals: Sequence[Target]) -> dict[str, Any]:
    """Return the prediction as plain data: seconds, tokens, kWh, and the currency of [costs]."""
    derived_figures = {
        "students_per_hour": prediction.students_per_hour,
        "utilisation": prediction.utilisation,
        "requests_per_s": prediction.jobs / prediction.makespan_s,
        "energy_wh_per_submission": _per_submission(prediction, prediction.energy_kwh, 1000.0),
        "cost_per_submission": _per_submission(prediction, prediction.cost),
        "cost_per_request": prediction.cost / prediction.jobs if prediction.cost is not None else None,
    }
    return (
        asdict(prediction)
        | derived_figures
        | {"targets": [asdict(goal) for goal in goals], "assumptions": list(ASSUMPTIONS)}
    )


def print_prediction(prediction: Prediction, goals: Sequence[Target]) -> None:
    """Print tables and sentences on stdout; the targets come last."""
    say(
        f"{plural(prediction.submissions, 'submission')}, {plural(prediction.jobs, 'request')}: "
        f"{duration(prediction.makespan_s)}, "
        f"{prediction.students_per_hour:.0f} students an hour"
    )
    say(
        f"without stealing {duration(prediction.without_stealing_s)}; "
        f"{_bound_words(prediction)}; "
        f"{plural(prediction.steals, 'request')} decoded by another model's worker"
    )
    say(f"limited by {prediction.limit}")
    watt_hours = _per_submission(prediction, prediction.energy_kwh, 1000.0)
    cost = _per_submission(prediction, prediction.cost)
    energy_words = (
        f"{watt_hours:.1f} Wh a submission" if watt_hours is not None else "watts not known for every machine"
    )
    cost_words = f"${cost:.4f} a submission" if cost is not None else "price_per_kwh in [costs] not known"
    say(f"energy and cost: {energy_words}, {cost_words}")
    say("")
    print_table(
        ("machine", "stage", "busy"), [(b.machine, b.stage, f"{b.share:.0%}") for b in prediction.busy], right=("busy",)
    )
    say("")
    rows = [
        (w.machine, w.stages, duration(w.makespan_s), f"{w.saves_s / prediction.makespan_s:.0%}")
        for w in prediction.what_if
    ]
    print_table(
        ("one more like", "which does", "then it takes", "sooner by"), rows, right=("then it takes", "sooner by")
    )
    say("")
    for sentence in ASSUMPTIONS:
        say(sentence)
    say("")
    print_table(("target", "goal", "predicted", "", "why"), map(_row, goals))


def _bound_words(prediction: Prediction) -> str:
    if prediction.bound_s is None:
        return "for what no schedule can beat, pip install 'kvasir-inference[plan]'"
    rate = prediction.submissions * 3600 / prediction.bound_s
    return f"no schedule can beat {duration(prediction.bound_s)}, {rate:.0f} students an hour"


def write_chart(path: Path, run: SimulatedRun) -> None:
    """Write an SVG chart of who works when, like that of a real run. Raises UsageError."""
    prefills = [Span(f"{p.machine} · prefill", p.job.model, p.started_s, p.ended_s) for p in run.prefills]
    answers = [Span(f"{t.machine} · decode", t.job.model, t.started_s, t.ended_s) for t in run.timings]
    bars = [*sorted(prefills, key=lambda bar: bar.row), *sorted(answers, key=lambda bar: bar.row)]
    try:
        path.write_text(spans("Who works when, as predicted", bars).file(), "utf-8")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}; choose another file with --chart") from None


def _row(goal: Target) -> list[str]:
    verdict = "not known" if goal.met is None else "met" if goal.met else "missed"
    return [goal.name, goal.goal, goal.predicted, verdict, goal.why]


def _per_submission(prediction: Prediction, total: float | None, factor: float = 1.0) -> float | None:
    return total * factor / prediction.submissions if total is not None else None
