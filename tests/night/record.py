"""What a night leaves behind: its table, as JSON and as Markdown, and its pictures, drawn as the report draws its."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from grading.charts.drawing import Span, lines, spans
from tests.night.site import BEGINNINGS, ENDINGS, Hand, Site, seconds_of


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


def depth_steps(site: Site, start: float, end: float) -> dict[str, Sequence[tuple[float, float]]]:
    """How many jobs waited, by model and stage, as Prometheus saw it each second."""
    series: dict[str, Sequence[tuple[float, float]]] = {}
    query = "sum by (model, stage) (kvasir:queue_ready)"
    for labels, values in site.prometheus.values(query, start, end):
        if values and max(value for _, value in values):
            name = f"{labels.get('model', '?')} for {labels.get('stage', '?')}"
            series[name] = [(at - start, value) for at, value in values]
    return series or {"none": [(0.0, 0.0), (end - start, 0.0)]}
