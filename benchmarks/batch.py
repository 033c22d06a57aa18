"""One batch of 5,000 and one of 50,000 jobs of 1 KiB: how fast they are submitted, and what memory they take.

A producer in a process of its own (batch folder, Runner, Client: what `kvasir submit` and `kvasir watch` use), one
prefill and one decode worker process with the simulated engine at no cost a token, a private RabbitMQ and Redis.

    submitted_per_s     jobs a second, confirmed by the broker on a quorum queue, from the first publish to the last
                        confirm; job ids are in `batch.json` before that, and `submitted.jsonl` is written meanwhile.
                        The workers are up only after that.
    journaled_per_s     jobs a second from the workers' start to the last result on disk
    producer_peak_MB    most memory of the producer (VmHWM; Linux only), Python and libraries included
    producer_grown_MB   by how much of that the batch is to blame: above what it held before `batch.json`
    prefill_peak_MB, decode_peak_MB   most memory of the workers

What the figures do not show: prompts larger than 1 KiB; a network; the pace of real workers, since nothing is computed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import PrefillJob, Sampling, job_id, user_prompt
from producers.batch.batch import Batch, BatchEntry, Counts
from producers.batch.runner import Runner
from producers.client import Client
from tests.support.processes import SIMULATED_MODEL, Cluster, Worker
from tests.support.waiting import wait_until

MODEL = "bench-batch:1b"
SIZES, QUICK_SIZES = (5_000, 50_000), (200, 800)
JOB_BYTES = 1024
SHARED = "Grade by this rubric: correct, readable, tested. " * 4
SAMPLING = Sampling(max_tokens=8)
WAIT_S = 3600.0


class Tasks:
    """The prompts of a class, made one at a time as they are read."""

    def __init__(self, batch_id: str, count: int) -> None:
        self.batch_id = batch_id
        self.count = count

    def __iter__(self) -> Iterator[PrefillJob]:
        for number in range(self.count):
            own = f"submission {number}: ".ljust(JOB_BYTES - len(SHARED), "x")
            item, parts = f"item-{number}", user_prompt(SHARED, own)
            name = job_id(self.batch_id, item, MODEL, parts, SAMPLING)
            yield PrefillJob(name, self.batch_id, item, MODEL, parts, SAMPLING)

    def entries(self) -> Iterator[BatchEntry]:
        """Their lines in the manifest."""
        for number, task in enumerate(self):
            yield BatchEntry(task.job_id, task.item_id, MODEL, "code", f"student_{number}.R")


class Quiet:
    """Shows no progress."""

    def update(self, counts: Counts) -> None:
        """Nothing."""

    def say(self, sentence: str) -> None:
        """Nothing."""


def produce(folder: Path, jobs: int, made: Callable[[str, int], Tasks] = Tasks) -> dict[str, float]:
    """Plan, submit, say so, and gather: in a process of its own."""
    settings = load_settings()
    before = status_mb("self", "VmRSS")
    with Batch(folder) as batch, connect(settings, (), name="benchmark") as client:
        tasks = made(batch.batch_id, jobs)
        batch.plan(tasks.entries(), {"folder": "made up"})
        submit_s = _submit(batch, tasks, client)
        (folder / "submitted").touch()  # the workers may come now
        started = time.monotonic()
        counts = Runner(batch, tasks, client, Quiet()).run(WAIT_S)
    if counts.succeeded != jobs:
        raise RuntimeError(f"not all {jobs} jobs succeeded: {counts}")
    return {
        "submit_s": submit_s,
        "gather_s": time.monotonic() - started,
        "peak_MB": status_mb("self", "VmHWM"),
        "grown_MB": status_mb("self", "VmHWM") - before,
    }


def _submit(batch: Batch, tasks: Tasks, client: Client) -> float:
    client.broker.open_reply_queue(batch.batch_id)
    started = time.perf_counter()
    Runner(batch, tasks, client, Quiet()).submit()
    return time.perf_counter() - started


def measure(jobs: int, broker_url: str, store_url: str) -> dict[str, Any]:
    """One batch, with workers of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder,
        Cluster(Path(folder) / "cluster", broker_url, store_url, {MODEL: SIMULATED_MODEL}) as cluster,
    ):
        out = Path(folder) / "batch"
        producer = ProducerProcess(cluster, "benchmarks.batch", out, jobs)
        wait_until(lambda: (out / "submitted").exists() or not producer.alive, "all jobs are submitted", WAIT_S)
        workers = [cluster.worker(role, MODEL) for role in ("prefill", "decode")]
        peaks = _watch(producer, workers)
        done = producer.result()
    return {
        "jobs": jobs,
        "submitted_per_s": jobs / done["submit_s"],
        "journaled_per_s": jobs / done["gather_s"],
        "producer_peak_MB": done["peak_MB"],
        "producer_grown_MB": done["grown_MB"],
        **peaks,
    }


class ProducerProcess:
    """The producer's process."""

    def __init__(self, cluster: Cluster, module: str, out: Path, jobs: int) -> None:
        command = [sys.executable, "-m", module, "--produce", str(jobs), "--out", str(out)]
        environment = cluster.environment | {"KVASIR_CONFIG": str(cluster.config)}
        self._child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._child.poll() is None

    def result(self) -> dict[str, float]:
        """What it measured. Raises RuntimeError if it failed."""
        output, _ = self._child.communicate()
        if self._child.returncode:
            raise RuntimeError(f"the producer ended with {self._child.returncode}")
        return harness.last_object(output)


def _watch(producer: ProducerProcess, workers: list[Worker]) -> dict[str, float]:
    """The workers' peaks when the batch is done."""
    wait_until(lambda: not producer.alive, "the batch is done", WAIT_S, poll_s=0.2)
    if not all(worker.alive for worker in workers):
        raise RuntimeError("a worker ended")
    names = ("prefill_peak_MB", "decode_peak_MB")
    return {name: status_mb(str(worker.pid), "VmHWM") for name, worker in zip(names, workers, strict=True)}


def status_mb(process: str, field: str) -> float:
    """A figure of /proc/PROCESS/status, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> int:
    """Print a row for each size."""
    parser = harness.parser(__doc__)
    parser.add_argument("--jobs", type=int, action="append", help="a batch of so many [default: 5000 and 50000]")
    parser.add_argument("--produce", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.produce:
        print(json.dumps(produce(given.out, given.produce)))
        return 0
    if not os.path.isdir("/proc/self"):
        print("this benchmark reads memory from /proc, which this system does not have", file=sys.stderr)
        return 1
    sizes = given.jobs or (QUICK_SIZES if given.quick else SIZES)
    rows = []
    with harness.pair() as pair:
        for jobs in sizes:
            rows.append(measure(jobs, pair.broker_url, pair.store_url))
            print(", ".join(f"{name} {value:,.0f}" for name, value in rows[-1].items()), flush=True)
    print(harness.machine())
    harness.finish(batch=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
