"""The team's targets beside the prediction: each met or missed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir.plan.fleet import Fleet
from kvasir.plan.forecast import Forecast, Lone

LATENCY_S = 15.0
REQUESTS_PER_S = 10.0
PARALLEL_EFFICIENCY = 1.5
UTILISATION = 0.6
REQUESTS_PER_KWH = 50.0
COST = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """`met` is None where the configuration lacks what the prediction follows from."""

    name: str
    goal: str
    predicted: str
    met: bool | None
    why: str


def targets(made: Forecast, fleet: Fleet) -> Iterator[Target]:
    """All eight, in the team's order."""
    slowest = max(made.lone, key=lambda lone: lone.latency_s)
    yield Target(
        "latency",
        "< 15 s",
        f"{beside_goal(LATENCY_S, slowest.latency_s, 1)} s",
        slowest.latency_s < LATENCY_S,
        _why_latency(made.lone),
    )
    rate = made.jobs / made.makespan_s
    yield Target(
        "throughput",
        "> 10 requests/s",
        f"{beside_goal(REQUESTS_PER_S, rate, 2)}/s",
        rate > REQUESTS_PER_S,
        _why_rate(made, fleet),
    )
    efficiency = made.one_by_one_s / made.makespan_s
    yield Target(
        "parallel efficiency",
        "> 1.5",
        beside_goal(PARALLEL_EFFICIENCY, efficiency, 1),
        efficiency > PARALLEL_EFFICIENCY,
        _why_parallel(made),
    )
    yield Target(
        "utilisation",
        "> 60%",
        f"{beside_goal(100 * UTILISATION, 100 * made.utilisation, 0)}%",
        made.utilisation > UTILISATION,
        _why_utilisation(made),
    )
    for name, goal, panel in (
        ("uptime", "> 99.9%", "Uptime of the last day"),
        ("error rate", "< 0.1%", "Jobs failed in the last day, share"),
    ):
        why = f"a simulation knows no faults; it is measured: the dashboard's panel '{panel}'"
        yield Target(name, goal, "not predicted", None, why)
    yield _energy(made)
    yield _cost(made)


def beside_goal(goal: float, value: float, digits: int) -> str:
    """`value` with so many decimals, or as many more as tell it from the goal: "60% > 60%, missed" helps nobody."""
    for more in range(digits, digits + 4):
        text = f"{value:,.{more}f}"
        if text != f"{goal:,.{more}f}":
            break
    return text


def _why_latency(lone: Sequence[Lone]) -> str:
    each = [
        f"{one.model}: prefill {one.prefill_s:.1f} s, KV cache {one.kv_transfer_s:.1f} s, decode {one.decode_s:.1f} s"
        for one in lone
    ]
    return "one request on an idle cluster, the median; " + "; ".join(each)


def _why_rate(made: Forecast, fleet: Fleet) -> str:
    """The arithmetic: what 10 requests a second need, and what all slots at their best can do."""
    answer, computed = made.answer_tokens / made.jobs, made.computed_tokens / made.jobs
    decode = sum(worker.slots * max(worker.tokens_per_s.values()) for worker in fleet.decoders)
    prefill = sum(worker.tokens_per_s for worker in fleet.prefillers)
    wanted, wanted_prompt = REQUESTS_PER_S * answer, REQUESTS_PER_S * computed
    return (
        f"10 requests/s of {answer:,.0f} answer tokens are {wanted:,.0f} tokens/s, {wanted / decode:.0f} times the "
        f"{decode:,.0f} that all slots decode at best; their {computed:,.0f} computed prompt tokens are "
        f"{wanted_prompt:,.0f}/s, {wanted_prompt / prefill:.0f} times the {prefill:,.0f} of prefill"
    )


def _why_parallel(made: Forecast) -> str:
    total, longest = sum(lone.latency_s for lone in made.lone), max(lone.latency_s for lone in made.lone)
    return (
        f"one request after the other would take {made.one_by_one_s / 3600:.1f} h; for a single submission, both "
        f"models at once instead of in turn gain {total / longest:.2f}"
    )


def _why_utilisation(made: Forecast) -> str:
    return ", ".join(f"{busy.machine} {busy.share:.0%}" for busy in made.busy) + f"; {made.limit}"


def _energy(made: Forecast) -> Target:
    name, goal = "energy", "> 50 requests/kWh"
    if not made.energy_kwh:
        return Target(name, goal, "not known", None, "set watts for each machine in kvasir.toml")
    rate = made.jobs / made.energy_kwh
    why = f"{made.energy_kwh:.3f} kWh with every machine at its full watts for the whole time, idle or not"
    return Target(name, goal, f"{beside_goal(REQUESTS_PER_KWH, rate, 0)}/kWh", rate > REQUESTS_PER_KWH, why)


def _cost(made: Forecast) -> Target:
    name, goal = "cost", "< $0.01 a request"
    if made.electricity is None or made.cost is None:
        return Target(name, goal, "not known", None, "set price_per_kwh in [costs], and watts for each machine")
    cost, electricity = made.cost / made.jobs, made.electricity / made.jobs
    machines = "machines not counted" if made.hardware is None else f"${made.hardware / made.jobs:.4f} for the machines"
    why = f"${electricity:.5f} of electricity, {machines}; ${made.cost / made.submissions:.4f} a submission"
    return Target(name, goal, f"${beside_goal(COST, cost, 4)}", cost < COST, why)
