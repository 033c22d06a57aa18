"""One row of the table: a fault, a thousand jobs, and what came of them."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.broker import topology
from tests.acceptance.faults import load
from tests.acceptance.faults.catalogue import Fault
from tests.acceptance.faults.services import Services
from tests.acceptance.faults.stage import Over, Plan, Program, Stage

Line = dict[str, Any]

_WORK = ("prefill_started", "passed_on", "decode_started", "answered", "replied", "submitted", "journaled")


@dataclass(frozen=True, slots=True)
class Row:
    """See docs/measurements/2026-11-27-faults.md for what each column means."""

    fault: str
    attempted: int
    confirmed: int
    succeeded: int
    failed: int
    lost: int
    lost_before_rerun: int
    unexpected: int
    executed_twice: int
    journal_duplicates: int
    dead_lettered: int
    recovery_s: float | None
    resumed: int = 0  # jobs with several answers that somebody went on with, some of theirs noted
    answers_redone: int = 0  # answers that were noted, and given again

    def is_clean(self) -> bool:
        """Nothing lost, nothing that nobody asked for, nothing twice."""
        return not (self.lost or self.unexpected or self.journal_duplicates or self.answers_redone)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        return asdict(self)


def run_row(services: Services, fault: Fault, plan: Plan, folder: Path) -> Row:
    """Start a stage, inject the fault while its batch runs, and collect."""
    with Stage(services, plan, folder) as stage:
        if fault.owner_starts:
            stage.start_owner()
        fault.inject(stage)
        stage.finish()
        return collect(fault.name, stage)


def collect(fault: str, stage: Stage) -> Row:
    """Read the owner's three files, the logs of all processes, and the graveyard."""
    manifest = json.loads((stage.out / "batch.json").read_text("utf-8"))
    plan = stage.plan
    made = load.tasks(manifest["batch_id"], stage.model, plan.jobs, plan.seed, plan.long_jobs, plan.long_s)
    return count(
        fault,
        wanted=[entry["job_id"] for entry in manifest["jobs"]],
        submitted=_lines(stage.out / "submitted.jsonl"),
        results=_lines(stage.out / "results.jsonl"),
        texts=dict(load.expected_texts(made, plan.questions)),
        steps=[line for program in stage.programs for line in program.lines()],
        dead_lettered=len(stage.services.take_all(topology.DEAD_LETTERS)),
        recovery_s=recovery(stage.overs, stage.programs),
    )


def count(
    fault: str,
    wanted: list[str],
    submitted: list[Line],
    results: list[Line],
    texts: dict[str, str],
    steps: list[Line],
    dead_lettered: int,
    recovery_s: float | None,
) -> Row:
    """The figures: `wanted` from the manifest, `texts` from an undisturbed engine, `steps` from the workers' logs."""
    confirmed = [(line["job_id"], line["run"]) for line in submitted]
    states = {result["job_id"]: result["state"] for result in reversed(results)}  # the first line counts
    by_state = Counter(states[job] for job in wanted if job in states)
    noted = Counter(step["event"] for step in steps if step["event"].endswith(" is noted"))
    starts = Counter(step["job"] for step in steps if step["event"] == "decode_started")
    return Row(
        fault=fault,
        attempted=len(wanted),
        confirmed=len(set(confirmed)),
        succeeded=by_state["succeeded"],
        failed=by_state.total() - by_state["succeeded"],
        lost=sum(job not in states for job in wanted),
        lost_before_rerun=len(confirmed) - len(set(confirmed)),
        unexpected=sum(_is_unexpected(result, texts) for result in results),
        executed_twice=sum(number > 1 for number in starts.values()),
        journal_duplicates=len(results) - len({(result["job_id"], result["run"]) for result in results}),
        dead_lettered=dead_lettered,
        recovery_s=recovery_s,
        resumed=sum(" answers are noted, " in step["event"] for step in steps),
        answers_redone=noted.total() - len(noted),
    )


def _is_unexpected(result: Line, texts: dict[str, str]) -> bool:
    """Of a job that is not of this batch, or with another answer than an undisturbed engine's."""
    job = result["job_id"]
    said = "\n".join(answer["text"] for answer in result["answers"]) if result.get("answers") else result["text"]
    return job not in texts or (result["state"] == "succeeded" and said != texts[job])


def recovery(overs: list[Over], programs: list[Program]) -> float | None:
    """The longest time from a fault's end until those that it hit worked again, or None if nothing was hit."""
    moments = {program.name: _moments(program) for program in programs}
    found = [seconds for over in overs if (seconds := _recovered(over, moments)) is not None]
    return max(found, default=None)


def _recovered(over: Over, moments: dict[str, list[tuple[float, str]]]) -> float | None:
    """Seconds until each job was begun (or ended) again, or each process took its next step."""
    everybody = [moment for each in moments.values() for moment in each]
    firsts = [[at for at, job in everybody if job == wanted and at > over.at] for wanted in over.jobs]
    firsts += [[at for at, _ in moments[name] if at > over.at + over.in_hand_s] for name in over.programs]
    return max((min(each) - over.at for each in firsts if each), default=None)


def _moments(program: Program) -> list[tuple[float, str]]:
    return [
        (datetime.fromisoformat(line["time"]).timestamp(), line["job"])
        for line in program.lines()
        if line["event"] in _WORK
    ]


def _lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
