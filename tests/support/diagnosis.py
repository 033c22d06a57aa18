"""What the dashboard says, in a word: one of six situations, from panel titles and values alone.

The order is that of the runbook: what stops the flow comes before what slows it, and what is only slow comes last.
"""

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
PanelMeans = Mapping[str, Mapping[str, float]]  # panel title: legend: value

FULL = 0.85  # of the store: prefill takes nothing from here on
MIN_REUSE = 0.8  # of the answers
BUSY = 0.75  # of the slots, on average
# Seconds of waiting from which a stage is behind; a wait of one job's own length is how slots stay busy.
BEHIND_S = 2.0
_AGE = "Age of the oldest job waiting, at most"


def diagnose(panels: PanelMeans) -> Situation:
    """The situation that these panels show."""
    if max(panels["Store in use, share"].values(), default=0.0) >= FULL and _waits(panels, "prefill"):
        return "store full"
    if any(not panels["Workers, by model and stage"].get(queue) for queue in _queues_that_wait(panels)):
        return "model unserved"
    if min(panels["Answers from a transferred KV cache, share"].values(), default=1.0) < MIN_REUSE:
        return "KV transfer not reusing"
    if _waits(panels, "decode") and _busiest(panels, "Decode slots busy, share") >= BUSY:
        return "decode-bound"
    if _waits(panels, "prefill") and _busiest(panels, "Prefill workers busy, share") >= BUSY:
        return "prefill-bound"
    return "healthy"


def _queues_that_wait(panels: PanelMeans) -> set[str]:
    """`model stage` of the queues with jobs that wait; below one on average it is a job on its way."""
    waiting_jobs = panels["Jobs waiting, by model, stage and lane"]
    return {legend.rpartition(" ")[0] for legend, jobs in waiting_jobs.items() if jobs >= 1}


def _waits(panels: PanelMeans, stage: str) -> bool:
    ages = [age for legend, age in panels[_AGE].items() if f" {stage} " in legend]
    return max(ages, default=0.0) >= BEHIND_S


def _busiest(panels: PanelMeans, title: str) -> float:
    return max(panels[title].values(), default=0.0)
