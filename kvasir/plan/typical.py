"""The plan's simulation: of several that differ by a hair, the one in the middle.

Who takes which job hangs on milliseconds, and with it which long job comes last: change the last digit of a rate, and
the makespan jumps by several percent. A single simulation is one throw of these dice, and so is the real night.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvasir.plan.fleet import Fleet, PlannedJob
from kvasir.plan.simulate import Policy, SimulatedRun, simulate

RUNS = 15  # odd, so that there is a middle
HAIR = 0.01  # no machine keeps its rate more exactly than that


def typical(fleet: Fleet, jobs: Sequence[PlannedJob], policy: Callable[[], Policy] = Policy) -> SimulatedRun:
    """Of RUNS simulations in which each rate is up to HAIR off, the one of median makespan. Always the same one."""
    source = random.Random(0)
    runs = [simulate(_off_by_a_hair(fleet, source), jobs, policy()) for _ in range(RUNS)]
    return sorted(runs, key=lambda run: run.makespan_s)[RUNS // 2]


def _off_by_a_hair(fleet: Fleet, source: random.Random) -> Fleet:
    def off(rate: float) -> float:
        return rate * source.uniform(1 - HAIR, 1 + HAIR)

    prefillers = [replace(prefiller, tokens_per_s=off(prefiller.tokens_per_s)) for prefiller in fleet.prefillers]
    decoders = [
        replace(decoder, tokens_per_s={model: off(rate) for model, rate in decoder.tokens_per_s.items()})
        for decoder in fleet.decoders
    ]
    return replace(fleet, prefillers=tuple(prefillers), decoders=tuple(decoders))
