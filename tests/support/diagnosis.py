"""What the dashboard says, in a word: one of six situations, from panel titles and values alone.

The order is that of the runbook: what stops the flow comes before what slows it, and what is only slow comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Situation = Literal[
    "store full", "model unserved", "KV transfer not reusing", "decode-bound", "prefill-bound", "healthy"
]
SITUATIONS: tuple[Situation, ...] = (
    "store full",
    "model unserved",
    "KV transfer not reusing",
    "decode-bound",
    "prefill-bound",
    "healthy",
)
Seen = Mapping[str, Mapping[str, float]]  # panel title: legend: value

FULL = 0.85  # of the store: prefill takes nothing from here on
REUSED = 0.8  # of the answers
BUSY = 0.75  # of the slots, on average
# Seconds of waiting from which a stage is behind; a wait of one job's own length is how slots stay busy.
BEHIND_S = 2.0
_AGE = "Age of the oldest job waiting, at most"


def diagnose(seen: Seen) -> Situation:
    """The situation that these panels show."""
    if max(seen["Store in use, share"].values(), default=0.0) >= FULL and _waits(seen, "prefill"):
        return "store full"
    if any(not seen["Workers, by model and stage"].get(queue) for queue in _waiting(seen)):
        return "model unserved"
    if min(seen["Answers from a transferred KV cache, share"].values(), default=1.0) < REUSED:
        return "KV transfer not reusing"
    if _waits(seen, "decode") and _busiest(seen, "Decode slots busy, share") >= BUSY:
        return "decode-bound"
    if _waits(seen, "prefill") and _busiest(seen, "Prefill workers busy, share") >= BUSY:
        return "prefill-bound"
    return "healthy"


def _waiting(seen: Seen) -> set[str]:
    """`model stage` of the queues with jobs that wait; below one on average it is a job on its way."""
    waiting = seen["Jobs waiting, by model, stage and lane"]
    return {legend.rpartition(" ")[0] for legend, jobs in waiting.items() if jobs >= 1}


def _waits(seen: Seen, stage: str) -> bool:
    ages = [age for legend, age in seen[_AGE].items() if f" {stage} " in legend]
    return max(ages, default=0.0) >= BEHIND_S


def _busiest(seen: Seen, title: str) -> float:
    return max(seen[title].values(), default=0.0)
