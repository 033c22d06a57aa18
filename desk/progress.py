"""Shows which stage a running batch's jobs are in, from the steps that its process logs."""

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from desk.tail import LineTail
from desk.work import RESTART_EVENT
from messages.lifecycle import Step

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


# Beginning of the log line in which a run predicts how long it will take.
EXPECTED = "expected: "


class Stages:
    """The jobs of the process that writes the log `path`, by stage.

    On a cluster, it sees only submission and result.
    """

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path, strict=False)
        self._stage: dict[str, str] = {}
        self._since: dict[str, datetime] = {}  # when each running job entered its stage
        self.expected = ""  # how long the process predicts it will take; "" before its first prediction

    def refresh(self) -> dict[str, int]:
        """Return the number of jobs in each of STAGES since the process started. Only new lines are read."""
        rows, is_replaced = self._tail.read()
        if is_replaced:
            self._forget()
        for row in rows:
            event, job = str(row.get("event", "")), row.get("job")
            if event == RESTART_EVENT:
                self._forget()
            elif event.startswith(EXPECTED):
                self.expected = event.removeprefix(EXPECTED)
            elif isinstance(job, str) and event in _STAGE_AFTER and self._stage.get(job) != "done":
                self._move(job, _STAGE_AFTER[event], str(row.get("time", "")))
        counts = Counter(self._stage.values())
        return {stage: counts[stage] for stage in STAGES}

    def finish_words(self) -> str:
        """Return how long the process expects to take, in its own words."""
        self.refresh()
        return self.expected or "how long it takes is not known yet"

    def in_hand(self) -> list[tuple[str, str, datetime]]:
        """Return (job, stage, since when) of all jobs in prefill or decode, in the order in which they entered it."""
        self.refresh()
        entries = [(job, self._stage[job], since) for job, since in list(self._since.items())]
        return sorted(entries, key=lambda entry: entry[2])

    def _move(self, job: str, stage: str, at: str) -> None:
        if stage == self._stage.get(job):
            return
        self._stage[job] = stage
        self._since.pop(job, None)
        if stage in ("in prefill", "in decode"):
            self._since[job] = _time(at)

    def _forget(self) -> None:
        self._stage.clear()
        self._since.clear()
        self.expected = ""


def _time(timestamp: str) -> datetime:
    """Return when a line was logged, or the current time if the line has no valid time."""
    try:
        return datetime.fromisoformat(timestamp).astimezone(UTC)
    except (ValueError, OverflowError):
        return datetime.now(UTC)
