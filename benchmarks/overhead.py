"""What the path costs when the engines take no time: prompts of 1 KiB, a prefill and a decode process, real services.

    p50_ms, p99_ms        from publishing a job to its result in the producer's hands, one job at a time, `bulk` lane
    now_p50_ms, now_p99_ms    the same for the lane of people who wait
    jobs_per_s            with all jobs queued beforehand: the rate between the first and the last tenth of the answers
    dramatiq_jobs_per_s   of a two-stage Dramatiq pipeline on the same broker and store: publisher confirms, a result
                          back end in Redis, the same processes and threads, measured alike
    ratio                 jobs_per_s / dramatiq_jobs_per_s
    submit_per_s          jobs that one producer publishes, each confirmed
    cpu_ms, dramatiq_cpu_ms   processor time of the two worker processes for each job, over the same stretch (Linux
                          only). On a machine that others use this is the one to read: neighbours change it little.

    kv_jobs_per_s, kv_ratio, kv_cpu_ms    the same jobs with `short_prompt_tokens = 0`: through the store
    in_process_jobs_per_s, in_process_short_jobs_per_s    with no services: workers, broker and store in one process,
                          prompts of 4 KiB and of 256 bytes, all through the store (benchmarks.overhead_in_process)

A prompt of 1 KiB is short: it is tokenized, and goes on to decode without a KV cache. With `kv_` its KV cache (256
tokens, 16 KiB) is stored block by block and read back. Both stages' messages are confirmed, and the result is stored
before it is published; quorum queues hold the work. Dramatiq's messages carry the prompt alone, through classic queues.
So the ratio is of the service, not of equal work.

A rate is taken over at least a second, and refused otherwise: a stretch of some milliseconds lies between two groups of
answers, and says nothing. A run that was too short is repeated with more jobs.

What the figures do not show: a network, and larger KV caches (benchmarks.kvstore).
"""

import contextlib
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import harness
from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import SHORT_PROMPT_TOKENS, KVTransfer, Lane, PrefillJob, Sampling, user_prompt
from producers.client import Client, Replies
from tests.support import services
from tests.support.processes import ROOT, Cluster, ModelEntry
from tests.support.servers import Process
from tests.support.services import Pair

T = TypeVar("T")
LATENCY_JOBS, QUICK_LATENCY_JOBS = 400, 60
JOBS, QUICK_JOBS = 10_000, 4000
PEER_JOBS, QUICK_PEER_JOBS = 3000, 1000
IN_PROCESS_JOBS, QUICK_IN_PROCESS_JOBS = 2000, 600
SHORT_PER_LONG = 4  # jobs in process with short prompts, for each with long ones
LONG_BYTES, SHORT_BYTES = 4096, 256  # of their prompts
MIN_STRETCH_S = 1.0  # shorter ones say nothing
MOST_JOBS = 100_000
ROUNDS, QUICK_ROUNDS = 5, 1
SLOTS = 4  # decode threads; prefill has one
PROMPT_BYTES = 1024
SAMPLING = Sampling(max_tokens=16)
ENGINE = "sim:scale=0,answer=1,layers=2,kv_heads=1,head_dim=16"
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class JobRates:
    """Jobs a second, submitted and answered."""

    submit: float
    answer: float
    cpu_ms: float | None  # of the workers, for each job


class Stretch:
    """What the workers cost between the first and the last tenth of the answers."""

    def __init__(self, count: int, sessions: Sequence[int]) -> None:
        self._count = count
        self._sessions = set(sessions)
        self._marks = {count // 10, count - 1 - count // 10}
        self._cpu_s: list[float] = []

    def answered(self, number: int) -> None:
        """The answer of this number, from 0, has come."""
        if number in self._marks and sys.platform == "linux":
            self._cpu_s.append(_cpu_s(self._sessions))

    @property
    def cpu_ms(self) -> float | None:
        """Milliseconds a job; None where that can't be read."""
        if len(self._cpu_s) < 2:
            return None
        first, last = self._cpu_s
        return 1000 * (last - first) / (max(self._marks) - min(self._marks))


def _cpu_s(sessions: Collection[int]) -> float:
    """Processor seconds of all processes of these sessions."""
    return sum(process.cpu_s for process in harness.processes() if process.session in sessions)


class OurPair:
    """One prefill and one decode worker process, and a producer. `kv_transfer`: also of prompts this short."""

    def __init__(self, pair: Pair, folder: Path, stack: contextlib.ExitStack, kv_transfer: bool = False) -> None:
        short = 0 if kv_transfer else SHORT_PROMPT_TOKENS
        self._kv_transfer: KVTransfer = "verified" if kv_transfer else "none"
        self._model = f"overhead.{secrets.token_hex(3)}"
        models = {self._model: ModelEntry("simulated", ENGINE, slots=SLOTS, short_prompt_tokens=short)}
        self._cluster = stack.enter_context(Cluster(folder, pair.broker_url, pair.store_url, models))
        urls = {"KVASIR_BROKER_URL": pair.broker_url, "KVASIR_STORE_URL": pair.store_url}
        settings = load_settings(config=self._cluster.config, environ=urls)
        self._client: Client = stack.enter_context(connect(settings, name="overhead"))

    def start(self) -> None:
        """Both workers, ready."""
        workers = [self._cluster.launch("prefill", self._model), self._cluster.launch("decode", self._model)]
        for worker in workers:
            worker.wait_until_registered()
        self._workers = workers

    def stop(self) -> None:
        """Both workers, gone."""
        for worker in self._workers:
            worker.terminate()

    def latencies(self, count: int, lane: Lane) -> list[float]:
        """Seconds from publish to result, one job after the other."""
        batch_id = f"latency-{secrets.token_hex(4)}"
        replies = Replies(self._client.broker, batch_id)
        try:
            return [self._latency(replies, job) for job in self._jobs(batch_id, count, lane)]
        finally:
            replies.close(delete=True)

    def _latency(self, replies: Any, job: PrefillJob) -> float:
        started = time.perf_counter()
        self._client.submit([job])
        (reply,) = replies.receive(PATIENCE_S)
        took = time.perf_counter() - started
        reply.delivery.ack()
        _check(reply.result, self._kv_transfer)
        return took

    def rates(self, count: int) -> JobRates:
        """Submit all, then start the workers and wait for all answers."""
        batch_id = f"load-{secrets.token_hex(4)}"
        self._client.broker.open_reply_queue(batch_id)
        jobs = list(self._jobs(batch_id, count, "bulk"))
        started = time.perf_counter()
        self._client.submit(jobs)
        submitted = time.perf_counter() - started
        self.start()
        answered: list[float] = []
        stretch = Stretch(count, [worker.pid for worker in self._workers])
        for result in self._client.gather(batch_id, [job.job_id for job in jobs], PATIENCE_S):
            stretch.answered(len(answered))
            answered.append(time.time())
            _check(result, self._kv_transfer)
        self.stop()
        return JobRates(count / submitted, steady_rate(answered, count), stretch.cpu_ms)

    def _jobs(self, batch_id: str, count: int, lane: Lane) -> Iterator[PrefillJob]:
        for number in range(count):
            yield self._client.new_job(
                batch_id, str(number), self._model, user_prompt("", _prompt()), SAMPLING, lane=lane
            )


class ComparedPeer:
    """The same with Dramatiq: a process with one thread for the first stage, one with SLOTS for the second."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        own = f"kvasir-bench-{secrets.token_hex(3)}"
        self._folder = folder
        self._environment = {services.BROKER_VARIABLE: pair.broker_url, services.STORE_VARIABLE: pair.store_url}
        self._environment["KVASIR_BENCH_PEER"] = own
        os.environ.update(self._environment)
        # Imported here: an extra, and it reads where the services are as it is loaded.
        from benchmarks import overhead_peer

        self._module = overhead_peer

    def rates(self, count: int) -> JobRates:
        """As those of `OurPair`."""
        for queue in (self._module.PREFILL, self._module.DECODE):
            self._module.broker.declare_queue(queue, ensure=True)
        jobs = [self._module.pipeline(_prompt()) for _ in range(count)]
        started = time.perf_counter()
        for job in jobs:
            job.run()
        submitted = time.perf_counter() - started
        answered: list[float] = []
        with self._worker(self._module.PREFILL, 1) as first, self._worker(self._module.DECODE, SLOTS) as second:
            stretch = Stretch(count, [first.pid, second.pid])
            for job in jobs:
                answered.append(job.get_result(block=True, timeout=int(PATIENCE_S * 1000))["at"])
                stretch.answered(len(answered) - 1)
        return JobRates(count / submitted, steady_rate(answered, count), stretch.cpu_ms)

    @contextlib.contextmanager
    def _worker(self, queue: str, threads: int) -> Iterator[Process]:
        command = [sys.executable, "-m", "dramatiq", "benchmarks.overhead_peer", "--queues", queue]
        process = Process(
            [*command, "--processes", "1", "--threads", str(threads)],
            os.environ | {"PYTHONPATH": str(ROOT)},
            self._folder,
            self._folder / f"{queue}.log",
        )
        try:
            yield process
        finally:
            process.end(signal.SIGTERM, 10.0)

    def close(self) -> None:
        """Delete its queues and results."""
        for queue in (self._module.PREFILL, self._module.DECODE):
            for name in (queue, f"{queue}.DQ", f"{queue}.XQ"):
                self._module.broker.channel.queue_delete(name)
        self._module.broker.close()


class TooShort(RuntimeError):
    """What was measured took no time to speak of."""


def steady_rate(moments: Sequence[float], count: int) -> float:
    """Answers a second between the first and the last tenth: neither starting nor running dry counts.

    Raises TooShort.
    """
    ordered = sorted(moments)
    first, last = count // 10, count - 1 - count // 10
    return _rate(last - first, ordered[last] - ordered[first])


def _rate(jobs: int, seconds: float) -> float:
    if seconds < MIN_STRETCH_S:
        raise TooShort(
            f"{jobs} answers in {seconds:.2f} s: a rate over less than {MIN_STRETCH_S:.0f} s says nothing; measure more"
        )
    return jobs / seconds


def long_enough(measure: Callable[[int], T], jobs: int) -> T:
    """What is measured with so many jobs, or with more if these take no time. Raises TooShort if that doesn't help."""
    while True:
        try:
            return measure(jobs)
        except TooShort:
            if 3 * jobs > MOST_JOBS:
                raise
            jobs *= 3


def in_process_rate(prompt_bytes: int, jobs: int) -> float:
    """Jobs a second in one process that has no services. Raises TooShort."""
    found = harness.fresh_process("benchmarks.overhead_in_process", str(prompt_bytes), str(jobs))
    return _rate(round(found["jobs_per_s"] * found["stretch_s"]), found["stretch_s"])


def _prompt() -> str:
    """1 KiB that no job has in common with another."""
    return secrets.token_hex(PROMPT_BYTES // 2)


def _check(result: Any, kv_transfer: KVTransfer) -> None:
    if result.state != "succeeded" or result.decode.kv_transfer != kv_transfer:
        raise RuntimeError(f"a job was not answered as meant: {result.state}, {result.error or result.decode.why_none}")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    """Measure, explain, and end with the line of JSON."""
    options = harness.options(__doc__)
    print(harness.machine())
    singles, jobs, peer_jobs, in_process_jobs, rounds = (
        (QUICK_LATENCY_JOBS, QUICK_JOBS, QUICK_PEER_JOBS, QUICK_IN_PROCESS_JOBS, QUICK_ROUNDS)
        if options.quick
        else (LATENCY_JOBS, JOBS, PEER_JOBS, IN_PROCESS_JOBS, ROUNDS)
    )
    in_process = {
        "in_process_jobs_per_s": (LONG_BYTES, in_process_jobs),
        "in_process_short_jobs_per_s": (SHORT_BYTES, SHORT_PER_LONG * in_process_jobs),
    }
    in_process_rates = {
        name: statistics.median(long_enough(partial(in_process_rate, size), count) for _ in range(rounds))
        for name, (size, count) in in_process.items()
    }
    print(", ".join(f"{name} {value:.0f}" for name, value in in_process_rates.items()), flush=True)
    with harness.pair() as pair, tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        bulk, now = _latencies(pair, folder / "latency", singles)
        peer = ComparedPeer(pair, folder)
        stack.callback(peer.close)
        ours, transferred, theirs = [], [], []
        for number in range(rounds):
            with contextlib.ExitStack() as round_:
                our_pair = OurPair(pair, folder / str(number), round_)
                ours.append(long_enough(our_pair.rates, jobs))
                our_kv_pair = OurPair(pair, folder / f"{number}-kv", round_, kv_transfer=True)
                transferred.append(long_enough(our_kv_pair.rates, jobs))
            theirs.append(long_enough(peer.rates, peer_jobs))
            print(
                f"ours {ours[-1].answer:.0f}/s, with KV {transferred[-1].answer:.0f}/s,"
                f" Dramatiq {theirs[-1].answer:.0f}/s; submitted at {ours[-1].submit:.0f}/s and"
                f" {theirs[-1].submit:.0f}/s",
                flush=True,
            )
    report(bulk, now, ours, transferred, theirs, in_process_rates, options)
    return 0


def _latencies(pair: Pair, folder: Path, count: int) -> tuple[list[float], list[float]]:
    with contextlib.ExitStack() as stack:
        ours = OurPair(pair, folder, stack)
        ours.start()
        ours.latencies(20, "bulk")  # connections, caches
        return ours.latencies(count, "bulk"), ours.latencies(count, "now")


def _ratio(ours: list[JobRates], theirs: list[JobRates]) -> float:
    return statistics.median(our.answer / their.answer for our, their in zip(ours, theirs, strict=True))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def report(
    bulk: list[float],
    now: list[float],
    ours: list[JobRates],
    transferred: list[JobRates],
    theirs: list[JobRates],
    in_process_rates: dict[str, float],
    options: harness.BenchmarkOptions,
) -> None:
    """The figures, for people and as JSON."""
    milliseconds = {
        f"{lane}p{share:.0f}_ms": 1000 * percentile(values, share / 100)
        for lane, values in (("", bulk), ("now_", now))
        for share in (50, 99)
    }
    print(", ".join(f"{name} {value:.1f}" for name, value in milliseconds.items()))
    harness.finish(
        **milliseconds,
        **in_process_rates,
        jobs_per_s=statistics.median(each.answer for each in ours),
        dramatiq_jobs_per_s=statistics.median(each.answer for each in theirs),
        ratio=_ratio(ours, theirs),
        kv_jobs_per_s=statistics.median(each.answer for each in transferred),
        kv_ratio=_ratio(transferred, theirs),
        kv_cpu_ms=_median(each.cpu_ms for each in transferred),
        submit_per_s=statistics.median(each.submit for each in ours),
        cpu_ms=_median(each.cpu_ms for each in ours),
        dramatiq_cpu_ms=_median(each.cpu_ms for each in theirs),
        dramatiq_submit_per_s=statistics.median(each.submit for each in theirs),
        rounds=len(ours),
        seed=options.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
