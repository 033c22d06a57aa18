"""One run of a class through real worker processes, and the same run simulated without any overhead.

Machines are groups of processes with a configuration of their own, so that each has its own rates. All times are wall
seconds: a simulated second takes `scale` of them.
"""

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.fleet_draw import CONTEXT, SAMPLING, SHRINK, DrawnPrompt, PromptKind
from infra.config.settings import Settings, load_settings
from kvasir.connect import connect
from kvasir.plan.fleet import Decoder, Fleet, Prefiller
from messages.jobs import JobResult, PrefillJob, user_prompt
from producers.client import Client
from tests.support.processes import Cluster, ModelEntry, Worker
from tests.support.services import Pair
from tests.support.waiting import wait_until

GIVE_UP_S = 400.0
FAST = 1e6  # tokens a second, of a stage that a machine has no part in but when it proves its engine


@dataclass(frozen=True, slots=True)
class Mac:
    """A decode worker: where, for which role at home, and its simulated tokens/s by role. Times in wall seconds."""

    name: str
    home: str
    slots: int
    rates: Mapping[str, float]
    joins_s: float = 0.0
    dies_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part: models by role, the Sparks' prefill rates by role, and the Macs."""

    kinds: Mapping[str, PromptKind]
    sparks: Mapping[str, float]
    macs: tuple[Mac, ...]
    scale: float

    def fleet(self, joined_s: Mapping[str, float] | None = None) -> Fleet:
        """The same workers for the simulation, in wall seconds; `joined_s`: when late ones were really there."""
        joined = joined_s or {}
        prefillers = [
            Prefiller(f"spark {role}", self.kinds[role].model, rate / SHRINK / self.scale)
            for role, rate in self.sparks.items()
        ]
        decoders = [
            Decoder(
                mac.name,
                self.kinds[mac.home].model,
                mac.slots,
                {self.kinds[role].model: rate / self.scale for role, rate in mac.rates.items()},
                joins_s=joined.get(mac.name, mac.joins_s),
                dies_s=mac.dies_s,
            )
            for mac in self.macs
        ]
        return Fleet(tuple(prefillers), tuple(decoders))


@dataclass(frozen=True, slots=True)
class Measured:
    """A real run. `results` with the wall seconds at which they arrived, counted from the first publish."""

    makespan_s: float
    results: Sequence[tuple[float, JobResult]]
    stolen: int
    joined_s: Mapping[str, float] = field(default_factory=dict)


# Called after each result with the settings, the client, all jobs, and the results so far.
Watch = Callable[[Settings, Client, Sequence[PrefillJob], Sequence[tuple[float, JobResult]]], None]


def run(
    pair: Pair,
    folder: Path,
    cast: Cast,
    prompts: Sequence[DrawnPrompt],
    steal: bool,
    watch: Watch = lambda _settings, _client, _jobs, _results: None,
) -> Measured:
    """Start the workers, submit the class at once, and wait for its last answer. Raises if any job fails."""
    suffix = secrets.token_hex(3)
    named = _renamed(cast, suffix)
    with contextlib.ExitStack() as stack:
        machines = _Machines(pair, folder / suffix, named, steal)
        stack.callback(machines.close)
        machines.start()
        urls = {"KVASIR_BROKER_URL": pair.broker_url, "KVASIR_STORE_URL": pair.store_url}
        settings = load_settings(config=machines.config, environ=urls)
        client = stack.enter_context(connect(settings, name="fleet"))
        jobs = _jobs(client, prompts, suffix)
        return machines.serve(client, jobs, partial(watch, settings))


def _renamed(cast: Cast, suffix: str) -> Cast:
    """Models of this run's own: queues and what workers have learned are kept by model."""
    kinds = {role: replace(kind, model=f"{kind.model}.{suffix}") for role, kind in cast.kinds.items()}
    return replace(cast, kinds=kinds)


def _jobs(client: Client, prompts: Sequence[DrawnPrompt], suffix: str) -> list[tuple[str, str, DrawnPrompt]]:
    return [(f"fleet-{suffix}", f"{prompt.job.model}.{suffix}", prompt) for prompt in prompts]


class _Machines:
    """The processes of one run: a `Cluster` for each machine, since each has rates of its own."""

    def __init__(self, pair: Pair, folder: Path, cast: Cast, steal: bool) -> None:
        self._cast = cast
        self._steal = steal
        sparks = {role: {role: (rate, FAST)} for role, rate in cast.sparks.items()}
        macs = {mac.name: {role: (FAST, rate) for role, rate in mac.rates.items()} for mac in cast.macs}
        self._sparks = {role: self._cluster(pair, folder / f"spark-{role}", rates) for role, rates in sparks.items()}
        self._macs = {name: self._cluster(pair, folder / name, rates) for name, rates in macs.items()}
        self.config = next(iter(self._macs.values())).config

    def start(self) -> None:
        """Everybody who is there from the start, ready."""
        started = [self._sparks[role].launch("prefill", self._cast.kinds[role].model) for role in self._cast.sparks]
        self._workers = {mac.name: self._launch(mac) for mac in self._cast.macs if mac.joins_s <= 0}
        for worker in [*started, *self._workers.values()]:
            worker.wait_until_registered()
        # A quorum queue's members need a moment to agree; what is measured starts after that.
        client_models = [kind.model for kind in self._cast.kinds.values()]
        wait_until(lambda: all(self._has_queue(model) for model in client_models), "the queues are there", 30)

    def _has_queue(self, model: str) -> bool:
        return next(iter(self._macs.values())).has_queue(f"prefill.{model}.bulk")

    def serve(
        self, client: Client, jobs: Sequence[tuple[str, str, DrawnPrompt]], watch: Callable[..., None]
    ) -> Measured:
        """Submit, and gather every result."""
        batch_id = jobs[0][0]
        made = [
            client.new_job(batch_id, prompt.job.name, model, user_prompt(prompt.shared, prompt.own), SAMPLING)
            for batch_id, model, prompt in jobs
        ]
        client.broker.open_reply_queue(batch_id)
        started = time.monotonic()
        joined: dict[str, float] = {}
        fates = [threading.Thread(target=self._fate, args=(mac, started, joined)) for mac in self._cast.macs]
        for fate in fates:
            fate.start()
        client.submit(made)
        results = []
        for result in client.gather(batch_id, [job.job_id for job in made], GIVE_UP_S):
            results.append((time.monotonic() - started, result))
            watch(client, made, results)
        for fate in fates:
            fate.join()
        _check(results, len(made))
        return Measured(max(moment for moment, _ in results), results, self._stolen(results), joined)

    def _fate(self, mac: Mac, started: float, joined: dict[str, float]) -> None:
        """Join late, or die, at its time."""
        if mac.joins_s > 0:
            _sleep_until(started + mac.joins_s)
            worker = self._workers[mac.name] = self._launch(mac)
            worker.wait_until_registered()
            joined[mac.name] = time.monotonic() - started
        if mac.dies_s < math.inf:
            _sleep_until(started + mac.dies_s)
            self._workers[mac.name].kill()

    def _launch(self, mac: Mac) -> Worker:
        home = self._cast.kinds[mac.home].model
        others = [self._cast.kinds[role].model for role in mac.rates if role != mac.home]
        options = steal_options(others if self._steal else [])
        return self._macs[mac.name].launch("decode", home, "--slots", str(mac.slots), *options)

    def _cluster(self, pair: Pair, folder: Path, rates: Mapping[str, tuple[float, float]]) -> Cluster:
        models = {
            kind.model: ModelEntry("simulated", kind.weights(self._cast.scale, *rates.get(role, (FAST, FAST))), CONTEXT)
            for role, kind in self._cast.kinds.items()
        }
        return Cluster(folder, pair.broker_url, pair.store_url, models)

    def _stolen(self, results: Sequence[tuple[float, JobResult]]) -> int:
        """Answers that were decoded in a process whose home is another model."""
        homes = {worker.pid: self._cast.kinds[mac.home].model for mac, worker in self._processes()}
        return sum(homes[_pid(result)] != result.model for _, result in results)

    def _processes(self) -> list[tuple[Mac, Worker]]:
        return [(mac, self._workers[mac.name]) for mac in self._cast.macs if mac.name in self._workers]

    def close(self) -> None:
        """End every process, delete every queue."""
        for cluster in (*self._sparks.values(), *self._macs.values()):
            cluster.close()


def steal_options(models: Sequence[str]) -> list[str]:
    """What a decode worker is told about other models."""
    return ["--steal", ",".join(models)] if models else []


def _pid(result: JobResult) -> int:
    """A worker's id is host.pid.random."""
    return int(result.decode.worker_id.rsplit(".", 2)[1])


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _check(results: Sequence[tuple[float, JobResult]], expected: int) -> None:
    bad = [result for _, result in results if result.state != "succeeded" or result.decode.kv_transfer != "verified"]
    if bad or len(results) != expected:
        reasons = {result.error.message if result.error else result.decode.why_none for result in bad}
        raise RuntimeError(
            f"{len(results)} of {expected} jobs were answered, {len(bad)} of them not as meant: {reasons}"
        )
