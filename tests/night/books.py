"""Whether the books of a night agree: every job one result, and the same numbers wherever somebody looks."""

import csv
import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grading.cells import plain_cell
from infra.broker.topology import RESULTS_PARKED
from monitoring.dashboards.panels import PANELS
from tests.night.courses import ASSIGNMENT, Course
from tests.night.record import Record
from tests.night.site import FINISHES, Site, journal_lines
from tests.support.homework import same_batch
from tests.support.lms import canvas_import, moodle_worksheet
from tests.support.observation import expression
from tests.support.processes import CompletedCommand, environment, run
from tests.support.waiting import wait_until

_SETTLED_S = 60.0  # until what was under way at the end is done, seen and counted
_QUIET_S = 900.0  # for a class in one process, on cores that others use too
_ANSWERS = re.compile(r"Answers\D{0,40}?([\d,]+), of which")


def planned(course: Course) -> list[dict[str, Any]]:
    """The batch's jobs, as its manifest has them."""
    jobs: list[dict[str, Any]] = json.loads((course.out / "batch.json").read_text("utf-8"))["jobs"]
    return jobs


def planned_jobs(course: Course) -> list[str]:
    """Ids of the batch's jobs, by its manifest."""
    return [job["job_id"] for job in planned(course)]


def every_job(course: Course) -> set[str]:
    """Those of its regrades, too."""
    manifests = [path.read_text("utf-8") for path in course.out.rglob("batch.json")]
    return {job["job_id"] for text in manifests for job in json.loads(text)["jobs"]}


def last_states(course: Course) -> dict[str, str]:
    """How each job ended, by the first line of its last run."""
    states: dict[str, tuple[int, str]] = {}
    for line in journal_lines([course.out]):
        if line["run"] > states.get(line["job_id"], (0, ""))[0]:
            states[line["job_id"]] = line["run"], line["state"]
    return {job: state for job, (_, state) in states.items()}


def count_jobs(record: Record, courses: Sequence[Course]) -> None:
    """Every job one result, in each run of it."""
    record.jobs = record.lost = record.doubled = 0
    for course in courses:
        planned = planned_jobs(course)
        lines = Counter((line["job_id"], line["run"]) for line in journal_lines([course.out]))
        record.jobs += len(planned)
        record.lost += len(set(planned) - {job for job, _ in lines})
        record.doubled += sum(lines.values()) - len(lines) + len(planned) - len(set(planned))


def compare_counts(site: Site, record: Record, course: Course) -> None:
    """Terminal, report, grades.csv and journal of one course."""
    shown = site.command("producer", "results", str(course.out), "--json").json()
    states = Counter(last_states(course).values())
    jobs = {name: states[name] for name in ("succeeded", "failed", "cancelled", "expired")}
    rows = list(csv.DictReader(io.StringIO((course.out / "grades.csv").read_text("utf-8"))))
    report = re.sub(r"<[^>]+>", " ", (course.out / "report.html").read_text("utf-8"))
    answers = _ANSWERS.search(report)
    expect(record, f"{course.title}: jobs by state", {"journal": jobs | {"total": len(planned_jobs(course))},
                                                      "kvasir results": shown["jobs"]})  # fmt: skip
    expect(
        record,
        f"{course.title}: submissions",
        {
            "kvasir results": sorted((row["submission"], _as_text(row["points"])) for row in shown["submissions"]),
            "grades.csv": sorted((plain_cell(row["submission"], number=False), row["points"]) for row in rows),
        },
    )
    said = int(answers[1].replace(",", "")) if answers else 0
    expect(record, f"{course.title}: answers", {"journal": states["succeeded"], "report.html": said})


def _as_text(points: Any) -> str:
    return "" if points is None else f"{points:g}"


def compare_workers(site: Site, record: Record) -> None:
    """What workers logged, what they say of themselves, and what Prometheus saw of them, once all of it has come.

    A copy of a job that is answered may still be under way: it came back after a restart of the broker, and the store
    that came back empty had no result for it. Heartbeats and scrapes come later than what they tell of.
    """
    books: dict[str, dict[str, Any]] = {}

    def all_agree() -> bool:
        nonlocal books
        books = _worker_books(site)
        return all(len(set(each.values())) == 1 for each in books.values())

    with suppress(AssertionError):
        wait_until(all_agree, "the workers' books agree", _SETTLED_S, poll_s=1.0)
    for what, each in books.items():
        expect(record, what, each)


def _worker_books(site: Site) -> dict[str, dict[str, Any]]:
    status = site.command("monitor", "status", "--json").json()
    done_counts = {worker["worker_id"]: worker["done"] for worker in status["workers"]}
    # A copy of a job may come back after its owner has gone. Its result is parked, and Grafana counts jobs only.
    waiting = [count for name, count in status["queues"].items() if not name.startswith(RESULTS_PARKED)]
    books: dict[str, dict[str, Any]] = {"messages in queues": {"kvasir status": sum(waiting), "none": 0}}
    for title in ("Jobs waiting", "Jobs in hand", "Jobs left"):  # on the dashboard
        (panel,) = (panel for panel in PANELS if panel.title.startswith(title))
        count = sum(int(site.prometheus.value(expression(query)) or 0) for query in panel.queries)
        books["messages in queues"][f"Grafana: {title}"] = count
    for hand in site.hands:
        labels = f'{{instance="127.0.0.1:{hand.port}", stage="decode"}}'
        counted = int(site.prometheus.value(f"kvasir_jobs_total{labels}") or 0)
        finished = [line for line in hand.lines() if line["event"] in FINISHES and line["stage"] == "decode"]
        each = books[f"jobs of the {hand.name}, {hand.process.pid}"] = {"log": len(finished), "Prometheus": counted}
        ids = {worker_id for worker_id in done_counts if str(hand.process.pid) in worker_id}
        if hand.role != "prefill" and len(ids) == 1:
            each["kvasir status"] = done_counts[ids.pop()]
    return books


def compare_journal_and_logs(site: Site, record: Record, courses: Sequence[Course]) -> None:
    """Whoever a result names did reply with it, by his own log; a SIGKILL may have cut that line off."""
    replied: set[tuple[str, str]] = set()
    for hand in site.everyone():
        replied |= {(line["job"], line["event"]) for line in hand.lines() if line["event"] in ("replied", "answered")}
    names = {job for job, _ in replied}
    for course in courses:
        unknown = [line["job_id"] for line in journal_lines([course.out])
                   if line["state"] == "succeeded" and line["job_id"] not in names]  # fmt: skip
        expect(record, f"{course.title}: results that no worker logged", {"journal": len(unknown), "none": 0})


def expect(record: Record, what: str, books: dict[str, Any]) -> None:
    """That all of these say the same."""
    values = list(books.values())
    if any(value != values[0] for value in values):
        words = ", ".join(f"{name} {_shortened(value)}" for name, value in books.items())
        record.unequal.append(f"{what}: {words}")


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]}…"


# --- wrong


def quiet_night(site: Site, course: Course, folder: Path) -> Path:
    """The same batch, the same jobs, once more from the start: in one process, and nobody disturbs it."""
    out = same_batch(course.out, folder / course.title.replace(" ", "-"))
    config = folder / "kvasir.toml"
    config.write_text(site.config(site.models(quiet=True)), "utf-8")
    words = [word if word != str(course.out) else str(out) for word in course.words("--quiet")]
    graded = _alone(folder, config, "grade", *words)
    assert graded.code in (0, 1), graded.stderr
    return out


def _alone(folder: Path, config: Path, *words: str) -> CompletedCommand:
    return run("--config", str(config), *words, env=environment(folder), cwd=folder, timeout_s=_QUIET_S)


def count_wrong_answers(record: Record, course: Course, quiet: Path) -> None:
    """Answers of the night that a quiet one does not give.

    A criterion that was asked about again, with another text, is another job in a quiet night, which asks only once.
    """
    wanted = _answers(journal_lines([quiet]))
    jobs = {job_id for job_id, _ in wanted}
    given = {(job_id, digest) for job_id, digest in _answers(journal_lines([course.out])) if job_id in jobs}
    assert len(given) > len(wanted) / 2, f"of the quiet night of {course.title} hardly a job was in the other one"
    record.wrong += len(given - wanted)


def _answers(lines: Iterable[dict[str, Any]]) -> set[tuple[str, str]]:
    succeeded = (line for line in lines if line["state"] == "succeeded")
    return {(line["job_id"], hashlib.sha256(_all_texts(line).encode()).hexdigest()) for line in succeeded}


def _all_texts(line: dict[str, Any]) -> str:
    return "\n".join([line["text"], *(str(answer.get("text")) for answer in line.get("answers", ()))])


def count_wrong_cells(record: Record, course: Course, data: bytes) -> int:
    """Cells of the file for the LMS, as it reads them, beside the truth; how many grades it takes."""
    assert course.truth
    people = {str(person.number): person.number for person in course.truth.people}
    if course.truth.product == "canvas":
        users = {*people, str(course.truth.people[-1].number + 900_000)}  # with the test student
        cells = canvas_import(data, {ASSIGNMENT}, users).grades.get(ASSIGNMENT, {})
    else:
        cells = moodle_worksheet(data, dict.fromkeys(people, "-"), 20.0).grades
    for text, number in people.items():
        cell = cells.get(text)
        truth = course.truth.points.get(number)
        record.wrong += (None if cell is None else math.floor(cell)) != truth
    return len(cells)


# --- names


def count_names(record: Record, names: Sequence[str], places: dict[str, Iterator[bytes]]) -> None:
    """Names of people, files and folders in what left their instructors' machines, in whatever letters."""
    forms = {name.casefold(): _written_forms(name) for name in names}
    for place, texts in places.items():
        leaked_names = set()
        for data in texts:
            text = data.decode("utf-8", "replace").casefold()
            leaked_names |= {name for name, written in forms.items() if any(form in text for form in written)}
        record.leaked += len(leaked_names)
        record.unequal += [f"{place} holds {name!r}" for name in sorted(leaked_names)[:3]]


def _written_forms(name: str) -> set[str]:
    """In small letters: as it is, and as JSON in ASCII writes it."""
    return {name.casefold(), *(json.dumps(text)[1:-1].casefold() for text in (name, name.casefold()))}


# --- what is left


def count_left(site: Site, record: Record, jobs: set[str]) -> None:
    """Messages in queues, reply queues, and keys of these jobs in the store, when all batches are forgotten."""
    depths = site.depths()
    queues = [f"{name} ({count})" for name, count in depths.items() if count or name.startswith("reply.")]
    wanted = {job.encode() for job in jobs}
    keys = [value.split(b" ")[0] for value in site.store_values()
            if wanted & set(re.split(rb"[:{} ]", value.split(b" ")[0]))]  # fmt: skip
    record.left += len(queues) + len(keys)
    record.unequal += [f"left: {', '.join(queues)}"] if queues else []
    record.unequal += [f"left in the store: {keys[0].decode()} and {len(keys) - 1} more"] if keys else []
