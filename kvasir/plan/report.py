"""The forecast for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvasir.plan.forecast import Forecast
from kvasir.plan.targets import Target
from kvasir.terminal import duration, say, table
from producers.words import plural

ASSUMPTIONS = (
    "Each slot is taken to decode at its rate whoever sits beside it: measure rates with all slots busy.",
    "How long answers are is assumed, not known: --code-answer and --feedback-answer set their means.",
)


def as_json(made: Forecast, goals: Sequence[Target]) -> dict[str, Any]:
    """Plain data: seconds, tokens, kWh, and the currency of [costs]."""
    derived = {
        "students_per_hour": made.students_per_hour,
        "utilisation": made.utilisation,
        "requests_per_s": made.jobs / made.makespan_s,
        "energy_wh_per_submission": _each(made, made.energy_kwh, 1000.0),
        "cost_per_submission": _each(made, made.cost),
        "cost_per_request": made.cost / made.jobs if made.cost is not None else None,
    }
    return asdict(made) | derived | {"targets": [asdict(goal) for goal in goals], "assumptions": list(ASSUMPTIONS)}


def show(made: Forecast, goals: Sequence[Target]) -> None:
    """Tables and sentences on stdout; the targets last."""
    say(
        f"{plural(made.submissions, 'submission')}, {plural(made.jobs, 'request')}: {duration(made.makespan_s)}, "
        f"{made.students_per_hour:.0f} students an hour"
    )
    say(
        f"without stealing {duration(made.without_stealing_s)}; no schedule can beat {duration(made.bound_s)}; "
        f"{plural(made.steals, 'request')} decoded by another model's worker"
    )
    say(f"limited by {made.limit}")
    say(f"energy and cost: {_energy(made)}")
    say("")
    table(("machine", "stage", "busy"), [(b.machine, b.stage, f"{b.share:.0%}") for b in made.busy], right=("busy",))
    say("")
    rows = [(w.machine, w.stages, duration(w.makespan_s), f"{w.saves_s / made.makespan_s:.0%}") for w in made.what_if]
    table(("one more like", "which does", "then it takes", "sooner by"), rows, right=("then it takes", "sooner by"))
    say("")
    for sentence in ASSUMPTIONS:
        say(sentence)
    say("")
    table(("target", "goal", "predicted", "", "why"), map(_row, goals))


def _row(goal: Target) -> list[str]:
    verdict = "not known" if goal.met is None else "met" if goal.met else "missed"
    return [goal.name, goal.goal, goal.predicted, verdict, goal.why]


def _energy(made: Forecast) -> str:
    watt_hours, cost = _each(made, made.energy_kwh, 1000.0), _each(made, made.cost)
    parts = [
        f"{watt_hours:.1f} Wh a submission" if watt_hours is not None else "watts not known for every machine",
        f"${cost:.4f} a submission" if cost is not None else "price_per_kwh in [costs] not known",
    ]
    return ", ".join(parts)


def _each(made: Forecast, total: float | None, factor: float = 1.0) -> float | None:
    return total * factor / made.submissions if total is not None else None
