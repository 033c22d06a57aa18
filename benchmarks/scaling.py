"""50,000 jobs of 10,000 students: what a campus asks of one broker, one Redis and one owner.

Five questions to each student, each with a class prefix of its own; a private RabbitMQ and Redis; an owner in a process
of its own (batch folder, journal), one prefill worker, and as many decode workers as two cores bear beside everything
else: eight of eight slots. The engines are simulated: they wait as long as a model would compute, and their KV caches
of true form but few bytes go through the store.

    makespan_s        from the first publish to the last result on disk
    ideal_s           the answers' tokens at the slots' rate, shared equally by all slots: no schedule is shorter
    ratio_to_ideal    makespan_s / ideal_s
    peak_MB, grown_MB by process: the most memory, and by how much of it it grew after a fifth of the jobs was done
    cpu_ms            by process: processor milliseconds for each job; of several workers of a role all together
    cpu_share         of all cores, in all

What the figures do not show: other machines and a network, KV caches of true size (`benchmarks.kvstore`), and a broker
with several nodes. A busy machine makes the ratio worse and leaves `cpu_ms` nearly as it is.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import harness
from benchmarks.batch import MODEL, ProducerProcess, Tasks, produce, status_mb
from messages.jobs import PrefillJob, Sampling, job_id, user_prompt
from tests.support.processes import Cluster, ModelEntry
from tests.support.services import Pair

STUDENTS, QUICK_STUDENTS = 10_000, 60
QUESTIONS = 5
DECODERS, SLOTS = 8, 8
PREFILL_TOKENS_PER_S, DECODE_TOKENS_PER_S = 1_000_000, 50
ANSWER_TOKENS = 56  # in the mean: 1.1 s, so that the slots together ask for 57 jobs a second
ENGINE = ModelEntry(
    "simulated",
    f"sim:scale=1,prefill={PREFILL_TOKENS_PER_S},decode={DECODE_TOKENS_PER_S},answer={ANSWER_TOKENS},layers=2",
    context=32768,
)
SAMPLING = Sampling(max_tokens=2 * ANSWER_TOKENS)
SETTLED = 0.2  # of the jobs: what memory is compared with at the end


class Questions(Tasks):
    """Five prompts to each student, made one at a time as they are read."""

    def __iter__(self) -> Iterator[PrefillJob]:
        for number in range(self.count):
            student, question = divmod(number, QUESTIONS)
            shared = f"Question {question}: grade it by this rubric. ".ljust(2048, "r")
            own = f"student {student} on question {question}: ".ljust(1024, "x")
            item, parts = f"student-{student}", user_prompt(shared, own)
            name = job_id(self.batch_id, item, MODEL, parts, SAMPLING)
            yield PrefillJob(name, self.batch_id, item, MODEL, parts, SAMPLING)


class Processes:
    """Memory and processor time of everybody who takes part, from /proc."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.pids = pids
        self._first = {name: self._cpu_s(pid) for name, pid in pids.items()}
        self._last = dict(self._first)
        self._settled: dict[str, float] = {}
        self.peak: dict[str, float] = dict.fromkeys(pids, 0.0)

    def look(self, settled: bool) -> None:
        """Note what they use now; a process that has ended keeps its last figures."""
        for name, pid in self.pids.items():
            try:
                held, self._last[name] = status_mb(str(pid), "VmRSS"), self._cpu_s(pid)
            except (OSError, StopIteration):
                continue
            self.peak[name] = max(self.peak[name], held)
            if settled:
                self._settled.setdefault(name, held)

    def grown(self) -> dict[str, float]:
        """MB since a fifth of the jobs was done."""
        return {name: self.peak[name] - held for name, held in self._settled.items()}

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds since the first look."""
        return {name: self._last[name] - self._first[name] for name in self.pids}

    @staticmethod
    def _cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class JournalProgress:
    """What the journal holds so far; each line is read once."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._at = 0
        self.jobs = 0
        self.answer_tokens = 0

    def look(self) -> None:
        """Read on."""
        if not self._journal.exists():
            return
        with self._journal.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                self.jobs += 1
                self.answer_tokens += json.loads(line)["decode"]["completion_tokens"]


def measure(students: int, pair: Pair) -> dict[str, Any]:
    """One batch of so many students, to its last result."""
    jobs = students * QUESTIONS
    with (
        tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder,
        Cluster(Path(folder) / "cluster", pair.broker_url, pair.store_url, {MODEL: ENGINE}) as cluster,
    ):
        workers = {"prefill": cluster.launch("prefill", MODEL)}
        workers |= {f"decode {n}": cluster.launch("decode", MODEL, "--slots", str(SLOTS)) for n in range(DECODERS)}
        for worker in workers.values():
            worker.wait_until_registered()
        out = Path(folder) / "batch"
        producer = ProducerProcess(cluster, "benchmarks.scaling", out, jobs)
        pids = {name: worker.pid for name, worker in workers.items()}
        processes = Processes({"owner": producer.pid, **pids, **_services(pair)})
        progress = JournalProgress(out / "results.jsonl")
        while producer.alive:
            time.sleep(1.0)
            progress.look()
            processes.look(settled=progress.jobs >= SETTLED * jobs)
        done = producer.result()
        progress.look()
    makespan_s = done["submit_s"] + done["gather_s"]
    ideal_s = progress.answer_tokens / DECODE_TOKENS_PER_S / (DECODERS * SLOTS)
    cpu = _by_role(processes.cpu_s(), sum)
    return {
        "jobs": jobs,
        "decode_workers": DECODERS,
        "slots": DECODERS * SLOTS,
        "makespan_s": makespan_s,
        "ideal_s": ideal_s,
        "ratio_to_ideal": makespan_s / ideal_s,
        "jobs_per_s": jobs / makespan_s,
        "peak_MB": _by_role(processes.peak, max),
        "grown_MB": _by_role(processes.grown(), max),
        "cpu_ms": {name: 1000 * seconds / jobs for name, seconds in cpu.items()},
        "cpu_share": sum(cpu.values()) / makespan_s / (os.cpu_count() or 1),
    }


def _by_role(figures: Mapping[str, float], of: Callable[[list[float]], float]) -> dict[str, float]:
    roles = dict.fromkeys(name.split()[0] for name in figures)
    return {role: of([figure for name, figure in figures.items() if name.split()[0] == role]) for role in roles}


def _services(pair: Pair) -> dict[str, int]:
    """The processes of the broker and the store, where they run on this machine and are ours to look at."""
    ports = {"broker": urlsplit(pair.broker_url).port, "store": urlsplit(pair.store_url).port}
    found = {name: _listener(port) for name, port in ports.items() if port}
    return {name: pid for name, pid in found.items() if pid}


def _listener(port: int) -> int:
    """The process that listens on this port; 0: none that we may see."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(descriptor) in inodes:
                return int(descriptor.parts[2])
    return 0


def main() -> int:
    """Print the row."""
    parser = harness.parser(__doc__)
    parser.add_argument("--students", type=int, help=f"so many [default: {STUDENTS}]")
    parser.add_argument("--produce", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce:
        print(json.dumps(produce(given.out, given.produce, Questions)))
        return 0
    if not os.path.isdir("/proc/self"):
        print("this benchmark reads memory from /proc, which this system does not have", file=sys.stderr)
        return 1
    with harness.pair() as pair:
        row = measure(given.students or (QUICK_STUDENTS if given.quick else STUDENTS), pair)
    for name, value in row.items():
        print(f"{name:<16}", {key: round(each, 1) for key, each in value.items()} if isinstance(value, dict) else value)
    print(harness.machine())
    harness.finish(**row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
