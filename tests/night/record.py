"""What a night leaves behind: its table, as JSON and as Markdown, and its pictures, drawn as the report draws its."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from grading.charts.drawing import Picture, Span, lines, spans
from tests.night.site import BEGINNINGS, ENDINGS, Hand, Site, seconds_of

_WIDTH = 860  # pixels of the picture for a page
_BETWEEN = 16  # pixels between its parts
_PARTS = 150  # of a night: what is shorter nobody sees in it


@dataclass(slots=True)
class Row:
    """One event of the night."""

    at_s: float  # since the night began
    event: str
    seen: str  # by the operator: what `kvasir status` said, and the alerts that fired
    # From the event until work went on; of what lasts for a while (a slow link, a full disk) from its end.
    went_on_s: float | None = None  # None: nothing stood still
    took_s: float = 0.0  # from the event until work went on, whatever lasted


@dataclass(slots=True)
class Record:
    """The whole night. All but `seed`, `jobs`, `rows` and the seconds are to be 0, and `unequal` empty."""

    seed: int
    started: float = field(default_factory=time.time)
    rows: list[Row] = field(default_factory=list)
    jobs: int = 0
    lost: int = 0  # jobs without a result
    doubled: int = 0  # results beyond a run's first
    wrong: int = 0  # answers unlike a quiet night's, and cells unlike the truth
    leaked: int = 0  # names in a queue, the store or a log
    left: int = 0  # messages, queues and keys of a batch that was forgotten
    unequal: list[str] = field(default_factory=list)  # books that don't agree
    retried: int = 0  # jobs that ran again in the morning
    # Of a batch that nobody disturbs: the interval until its end as `kvasir status` gave it, and the truth, in seconds.
    finish: list[tuple[float, float, float]] = field(default_factory=list)
    night_s: float = 0.0
    morning_s: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing tore."""
        return not (self.lost or self.doubled or self.wrong or self.leaked or self.left or self.unequal)

    def add(self, event: str, seen: str = "", at: float | None = None, went_on_s: float | None = None) -> Row:
        """One more row, printed as it comes; `at`: when it began, since the epoch."""
        now = time.time()
        row = Row((at or now) - self.started, event, seen, went_on_s, now - (at or now))
        self.rows.append(row)
        click.echo(" | ".join(_cells(row)))
        return row

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def markdown(self) -> str:
        """The table of the night."""
        head = ["| time | event | what the operator saw | until work went on |", "|--:|---|---|--:|"]
        rows = [f"| {' | '.join(cell.replace('|', '/') for cell in _cells(row))} |" for row in self.rows]
        figures = f"lost {self.lost}, doubled {self.doubled}, wrong {self.wrong}, names {self.leaked}, left {self.left}"
        books = "the books agree" if not self.unequal else "; ".join(self.unequal)
        return "\n".join([*head, *rows, "", f"Seed {self.seed}, {self.jobs} jobs: {figures}; {books}.", ""])


def _cells(row: Row) -> list[str]:
    went_on = "" if row.went_on_s is None else f"{row.went_on_s:.1f} s"
    return [f"{int(row.at_s // 60)}:{row.at_s % 60:04.1f}", row.event, row.seen, went_on]


def write(folder: Path, record: Record, site: Site, ended: float) -> None:
    """night.json, night.md, and two pictures: who worked when, and how many jobs waited."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "night.json").write_text(json.dumps(record.as_dict(), indent=2), "utf-8")
    (folder / "night.md").write_text(record.markdown(), "utf-8")
    draw(folder, record, site, ended)


def draw(folder: Path, record: Record, site: Site, ended: float) -> None:
    """The pictures; Prometheus must still be there."""
    rows = [row for row in record.rows if row.went_on_s is not None]
    troubles = [Span("what happened", "trouble", row.at_s, row.at_s + row.took_s) for row in rows]
    work = [span for hand in site.everyone() for span in worked(hand, record.started, ended)]
    (folder / "night-work.svg").write_text(spans("Who worked when", [*troubles, *work]).file(), "utf-8")
    depths = depth_steps(site, record.started, ended)
    (folder / "night-queues.svg").write_text(lines("Jobs that waited", "jobs", depths).file(), "utf-8")
    (folder / "night.svg").write_text(_for_a_page(site, record, troubles, ended), "utf-8")


def _for_a_page(site: Site, record: Record, troubles: Sequence[Span], ended: float) -> str:
    length_s = ended - record.started
    hands = sorted(site.everyone(), key=lambda hand: seconds_of(hand.lines()[0]) if hand.lines() else ended)
    work: list[Span] = []
    for hand in hands:
        work += at_work(hand.name.replace("worker", "workers", 1), worked(hand, record.started, ended), length_s)
    return on_one_page([*troubles, *work], depth_steps(site, record.started, ended, "model"), length_s)


def on_one_page(work: Iterable[Span], depths: Mapping[str, Sequence[tuple[float, float]]], length_s: float) -> str:
    """Both pictures in one, without details: one lane for each worker at work, and one line for each model's jobs."""
    first = spans("Who worked when", work)
    second = lines("Jobs that waited", "jobs", {name: _thinned(steps, length_s) for name, steps in depths.items()})
    height = first.height + _BETWEEN + second.height
    # The lines begin at 8 percent, beside their scale: so both have one axis of time.
    body = f'<svg x="8%" width="92%">{first.body}</svg><svg y="{first.height + _BETWEEN}">{second.body}</svg>'
    picture = Picture("A night", f"{first.words}; {second.words}", height, body).file()
    return picture.replace('width="100%"', f'width="{_WIDTH}" viewBox="0 0 {_WIDTH} {height}"', 1)


def at_work(row: str, jobs: Iterable[Span], length_s: float) -> list[Span]:
    """When a process had any of its jobs in hand, and where a SIGKILL cut it off."""
    gap_s = length_s / _PARTS
    shown: list[Span] = []
    ordered = sorted((job for job in jobs if job.start_s < length_s), key=lambda job: job.start_s)
    for job in ordered:
        end_s = min(job.end_s, length_s)
        if shown and job.start_s - shown[-1].end_s <= gap_s:
            shown[-1] = Span(row, "at work", shown[-1].start_s, max(shown[-1].end_s, end_s))
        else:
            shown.append(Span(row, "at work", job.start_s, end_s))
    if any(job.kind == "cut off" for job in ordered):
        shown.append(Span(row, "killed", shown[-1].end_s, shown[-1].end_s + gap_s))
    return shown


def _thinned(steps: Sequence[tuple[float, float]], length_s: float) -> Sequence[tuple[float, float]]:
    """The largest value of each of `_PARTS` parts, where it changes."""
    largest: dict[int, float] = {}
    for at, value in steps:
        part = int(at / length_s * _PARTS)
        largest[part] = max(value, largest.get(part, 0.0))
    thinned: list[tuple[float, float]] = []
    for part, value in largest.items():
        if not thinned or value != thinned[-1][1]:
            thinned.append((part * length_s / _PARTS, value))
    return [*thinned, (length_s, thinned[-1][1])]


def worked(hand: Hand, start: float, end: float) -> Iterable[Span]:
    """What a worker did, by its own log; what a SIGKILL cut off ends with its last line."""
    row = f"{hand.model.partition(':')[0]} {hand.role} {hand.process.pid}"
    began: dict[str, tuple[str, float]] = {}
    log = hand.lines()
    for line in log:
        if line["event"] in BEGINNINGS:
            began[line["job"]] = line["event"].removesuffix("_started"), seconds_of(line)
        elif line["event"] in ENDINGS and line["job"] in began:
            stage, since = began.pop(line["job"])
            yield Span(row, stage, max(0.0, since - start), seconds_of(line) - start)
    last = seconds_of(log[-1]) if log else end
    for _, since in began.values():
        yield Span(row, "cut off", max(0.0, since - start), max(since, last) - start + 0.1)


def depth_steps(
    site: Site, start: float, end: float, by: str = "model, stage"
) -> dict[str, Sequence[tuple[float, float]]]:
    """How many jobs waited, by these labels, as Prometheus saw it each second."""
    series: dict[str, Sequence[tuple[float, float]]] = {}
    for labels, values in site.prometheus.values(f"sum by ({by}) (kvasir:queue_ready)", start, end):
        if values and max(value for _, value in values):
            name = " for ".join(labels.get(label, "?") for label in by.split(", "))
            series[name] = [(at - start, value) for at, value in values]
    return series or {"none": [(0.0, 0.0), (end - start, 0.0)]}
