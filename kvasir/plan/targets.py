"""Compares the prediction with the team's targets: which are met or missed, and why."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir.plan.fleet import Fleet
from kvasir.plan.prediction import Prediction

LATENCY_S = 15.0
REQUESTS_PER_S = 10.0
PARALLEL_EFFICIENCY = 1.5
UTILISATION = 0.6
REQUESTS_PER_KWH = 50.0
COST = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """A target. `met` is None if the configuration lacks what the prediction depends on."""

    name: str
    goal: str
    predicted: str
    met: bool | None
    why: str


def targets(prediction: Prediction, fleet: Fleet) -> Iterator[Target]:
    """Yield all eight targets, in the team's order."""
    slowest = max(prediction.lone, key=lambda lone: lone.latency_s)
    latencies = [
        f"{lone.model}: prefill {lone.prefill_s:.1f} s, KV cache {lone.kv_transfer_s:.1f} s, "
        f"decode {lone.decode_s:.1f} s"
        for lone in prediction.lone
    ]
    yield Target(
        "latency",
        "< 15 s",
        f"{beside_goal(LATENCY_S, slowest.latency_s, 1)} s",
        slowest.latency_s < LATENCY_S,
        "one request on an idle cluster, the median; " + "; ".join(latencies),
    )
    rate = prediction.jobs / prediction.makespan_s
    yield Target(
        "throughput",
        "> 10 requests/s",
        f"{beside_goal(REQUESTS_PER_S, rate, 2)}/s",
        rate > REQUESTS_PER_S,
        _why_rate(prediction, fleet),
    )
    total_s = sum(lone.latency_s for lone in prediction.lone)
    efficiency = prediction.one_by_one_s / prediction.makespan_s
    yield Target(
        "parallel efficiency",
        "> 1.5",
        beside_goal(PARALLEL_EFFICIENCY, efficiency, 1),
        efficiency > PARALLEL_EFFICIENCY,
        f"one request after the other would take {prediction.one_by_one_s / 3600:.1f} h; for a single submission, both "
        f"models at once instead of in turn gain {total_s / slowest.latency_s:.2f}",
    )
    yield Target(
        "utilisation",
        "> 60%",
        f"{beside_goal(100 * UTILISATION, 100 * prediction.utilisation, 0)}%",
        prediction.utilisation > UTILISATION,
        ", ".join(f"{name} {share:.0%}" for name, share in prediction.machine_shares.items()) + f"; {prediction.limit}",
    )
    for name, goal, panel in (
        ("uptime", "> 99.9%", "Uptime of the last day"),
        ("error rate", "< 0.1%", "Jobs failed in the last day, share"),
    ):
        reason = f"a simulation knows no faults; it is measured: the dashboard's panel '{panel}'"
        yield Target(name, goal, "not predicted", None, reason)
    yield _energy(prediction)
    yield _cost(prediction)


def beside_goal(goal: float, value: float, digits: int) -> str:
    """Format `value` with enough decimals to differ from the goal: "60% > 60%, missed" would help nobody."""
    for decimals in range(digits, digits + 4):
        text = f"{value:,.{decimals}f}"
        if text != f"{goal:,.{decimals}f}":
            break
    return text


def _why_rate(prediction: Prediction, fleet: Fleet) -> str:
    """Explain the numbers: what 10 requests per second need, and what all slots can do at best."""
    answer_tokens_per_job, computed_tokens = (
        prediction.answer_tokens / prediction.jobs,
        prediction.computed_tokens / prediction.jobs,
    )
    decode = sum(max(map(worker.full_rate, worker.tokens_per_s)) for worker in fleet.decoders)
    machines = {worker.machine for worker in fleet.prefillers}
    prefill = sum(max(w.best_rate for w in fleet.prefillers if w.machine == machine) for machine in machines)
    required_tokens, required_prompt_tokens = REQUESTS_PER_S * answer_tokens_per_job, REQUESTS_PER_S * computed_tokens
    return (
        f"10 requests/s of {answer_tokens_per_job:,.0f} answer tokens are {required_tokens:,.0f} tokens/s, "
        f"{required_tokens / decode:.0f} times the "
        f"{decode:,.0f} that all slots decode at best; their {computed_tokens:,.0f} computed prompt tokens are "
        f"{required_prompt_tokens:,.0f}/s, {required_prompt_tokens / prefill:.0f} times the {prefill:,.0f} of prefill"
    )


def _energy(prediction: Prediction) -> Target:
    name, goal = "energy", "> 50 requests/kWh"
    if not prediction.energy_kwh:
        return Target(name, goal, "not known", None, "set watts for each machine in kvasir.toml")
    rate = prediction.jobs / prediction.energy_kwh
    reason = f"{prediction.energy_kwh:.3f} kWh with every machine at its full watts for the whole time, idle or not"
    return Target(name, goal, f"{beside_goal(REQUESTS_PER_KWH, rate, 0)}/kWh", rate > REQUESTS_PER_KWH, reason)


def _cost(prediction: Prediction) -> Target:
    name, goal = "cost", "< $0.01 a request"
    if prediction.electricity is None or prediction.cost is None:
        return Target(name, goal, "not known", None, "set price_per_kwh in [costs], and watts for each machine")
    cost, electricity = prediction.cost / prediction.jobs, prediction.electricity / prediction.jobs
    machines = (
        "machines not counted"
        if prediction.hardware is None
        else f"${prediction.hardware / prediction.jobs:.4f} for the machines"
    )
    reason = (
        f"${electricity:.5f} of electricity, {machines}; ${prediction.cost / prediction.submissions:.4f} a submission"
    )
    return Target(name, goal, f"${beside_goal(COST, cost, 4)}", cost < COST, reason)
