"""Where a running batch's jobs are, stage by stage, from the steps that its process logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from messages.lifecycle import Step
from producers.desk.tail import LineTail
from producers.desk.work import RESTARTED

STAGES = ("waiting", "in prefill", "waiting for decode", "in decode", "done")

_STAGE_AFTER: dict[str, str] = {
    Step.SUBMITTED: "waiting",
    Step.PREFILL_STARTED: "in prefill",
    Step.KV_STORED: "in prefill",
    Step.PASSED_ON: "waiting for decode",
    Step.DECODE_STARTED: "in decode",
    Step.FIRST_TOKEN: "in decode",
    Step.ANSWERED: "in decode",
    Step.REPLIED: "in decode",
    Step.FAILED: "in decode",
    Step.RETRIED: "waiting",
    Step.KV_GONE: "waiting",
    Step.REDELIVERED: "waiting",
    Step.JOURNALED: "done",
}


class Stages:
    """Jobs of the process that writes the log `path`, by stage. A process on a cluster sees only both ends."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path, strict=False)
        self._stage: dict[str, str] = {}

    def refresh(self) -> dict[str, int]:
        """Number of jobs in each of STAGES, since the process started. Reads only what is new."""
        rows, replaced = self._tail.read()
        if replaced:
            self._stage.clear()
        for row in rows:
            event, job = str(row.get("event", "")), row.get("job")
            if event == RESTARTED:
                self._stage.clear()
            elif isinstance(job, str) and event in _STAGE_AFTER and self._stage.get(job) != "done":
                self._stage[job] = _STAGE_AFTER[event]
        counts = Counter(self._stage.values())
        return {stage: counts[stage] for stage in STAGES}

    def in_hand(self) -> list[tuple[str, str]]:
        """(job, stage) of what is in prefill or in decode now."""
        self.refresh()
        return [(job, stage) for job, stage in list(self._stage.items()) if stage in ("in prefill", "in decode")]
