"""The forecast for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvasir.plan.forecast import Forecast
from kvasir.plan.targets import Target
from kvasir.terminal import duration, print_table, say
from producers.words import plural

ASSUMPTIONS = (
    "Each slot is taken to decode at its rate whoever sits beside it: measure rates with all slots busy.",
    "How long answers are is assumed, not known: --code-answer and --feedback-answer set their means.",
)


def as_json(forecast: Forecast, goals: Sequence[Target]) -> dict[str, Any]:
    """Plain data: seconds, tokens, kWh, and the currency of [costs]."""
    derived_figures = {
        "students_per_hour": forecast.students_per_hour,
        "utilisation": forecast.utilisation,
        "requests_per_s": forecast.jobs / forecast.makespan_s,
        "energy_wh_per_submission": _per_submission(forecast, forecast.energy_kwh, 1000.0),
        "cost_per_submission": _per_submission(forecast, forecast.cost),
        "cost_per_request": forecast.cost / forecast.jobs if forecast.cost is not None else None,
    }
    return (
        asdict(forecast)
        | derived_figures
        | {"targets": [asdict(goal) for goal in goals], "assumptions": list(ASSUMPTIONS)}
    )


def print_forecast(forecast: Forecast, goals: Sequence[Target]) -> None:
    """Tables and sentences on stdout; the targets last."""
    say(
        f"{plural(forecast.submissions, 'submission')}, {plural(forecast.jobs, 'request')}: "
        f"{duration(forecast.makespan_s)}, "
        f"{forecast.students_per_hour:.0f} students an hour"
    )
    say(
        f"without stealing {duration(forecast.without_stealing_s)}; no schedule can beat {duration(forecast.bound_s)}; "
        f"{plural(forecast.steals, 'request')} decoded by another model's worker"
    )
    say(f"limited by {forecast.limit}")
    say(f"energy and cost: {_energy(forecast)}")
    say("")
    print_table(
        ("machine", "stage", "busy"), [(b.machine, b.stage, f"{b.share:.0%}") for b in forecast.busy], right=("busy",)
    )
    say("")
    rows = [
        (w.machine, w.stages, duration(w.makespan_s), f"{w.saves_s / forecast.makespan_s:.0%}")
        for w in forecast.what_if
    ]
    print_table(
        ("one more like", "which does", "then it takes", "sooner by"), rows, right=("then it takes", "sooner by")
    )
    say("")
    for sentence in ASSUMPTIONS:
        say(sentence)
    say("")
    print_table(("target", "goal", "predicted", "", "why"), map(_row, goals))


def _row(goal: Target) -> list[str]:
    verdict = "not known" if goal.met is None else "met" if goal.met else "missed"
    return [goal.name, goal.goal, goal.predicted, verdict, goal.why]


def _energy(forecast: Forecast) -> str:
    watt_hours, cost = _per_submission(forecast, forecast.energy_kwh, 1000.0), _per_submission(forecast, forecast.cost)
    parts = [
        f"{watt_hours:.1f} Wh a submission" if watt_hours is not None else "watts not known for every machine",
        f"${cost:.4f} a submission" if cost is not None else "price_per_kwh in [costs] not known",
    ]
    return ", ".join(parts)


def _per_submission(forecast: Forecast, total: float | None, factor: float = 1.0) -> float | None:
    return total * factor / forecast.submissions if total is not None else None
