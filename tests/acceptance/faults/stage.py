"""One row's cluster: two prefill and two decode workers, the batch's owner, and the services behind their proxies.

A fault is a function that is given the stage while the batch runs. It waits for `moments` (random places in the
batch), does something to the services or the processes, and says with `over` when it has undone it.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import pika

from infra.broker import failpoints, topology
from infra.broker.control import announce_pause
from infra.broker.rabbitmq import RabbitMQBroker
from kvstore.redis.cluster_state import RedisClusterState
from messages.errors import StoreUnavailable
from tests.acceptance.faults import load
from tests.acceptance.faults.owner import WAITING
from tests.acceptance.faults.services import Services, queues_of
from tests.support import programs
from tests.support.processes import ModelEntry, config_text, environment
from tests.support.servers import Process
from tests.support.waiting import wait_until

Role = Literal["prefill", "decode", "both"]

PATIENCE_S = 90.0  # until a process is up, or a moment comes
# Past the time in which a broker gives up a client that has gone silent (two heartbeats), and a little more.
QUIET_S = 12.0
STALLED_S = 150.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a row runs, besides its fault."""

    jobs: int = 1000
    seed: int = 0
    slots: int = 4
    prefill_workers: int = 2
    decode_workers: int = 2
    both_workers: int = 0  # with both roles
    long_jobs: int = 0  # the first so many
    long_s: float = 0.0  # take so long to decode
    copies: int = 1  # how often
    copied_jobs: int = 0  # the first so many are published
    deadline_s: float = 0.0
    questions: int = 0  # of each job, two answers to each
    weights: str = load.WEIGHTS
    environment: dict[str, str] = field(default_factory=dict)  # of every worker
    clocks_s: tuple[float, ...] = ()  # what the workers' clocks are ahead of this machine's, in turn


def clock_ahead(seconds: float) -> dict[str, str]:
    """What a program's environment holds so that its clock is so far ahead; the monotonic one is not.

    Of libfaketime, whose wrapper would be another process than the program. Raises ProgramMissing.
    """
    wrapper = [programs.require("faketime"), "--exclude-monotonic", "-m", "-f", f"{seconds:+g}s"]
    output = subprocess.run([*wrapper, "env", "-0"], check=True, capture_output=True, text=True).stdout
    variables = dict(line.partition("=")[::2] for line in output.split("\0"))
    return {name: variables[name] for name in ("LD_PRELOAD", "FAKETIME", "FAKETIME_DONT_FAKE_MONOTONIC")}


class Program:
    """A process of ours: a worker, or the owner. What it logs is read as JSON lines."""

    def __init__(self, command: Sequence[str], variables: dict[str, str], folder: Path) -> None:
        folder.mkdir(parents=True)
        self.name = folder.name
        self.log = folder / "log"
        self._process = Process(list(command), variables, folder, self.log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.alive

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exit_code

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; gone on return. Idempotent."""
        self._process.end(signal.SIGKILL, 10.0)

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        text = self.log.read_text("utf-8", errors="replace")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[0] == "{" and line.endswith("}\n")]


@dataclass(frozen=True, slots=True)
class Over:
    """A fault's end: from then on these jobs, or else these processes, must go on."""

    at: float
    jobs: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    in_hand_s: float = 0.0  # the processes' steps in this time were with what they had in hand


class Stage:
    """See the module. Leaving it ends every process and deletes the row's queues."""

    def __init__(self, services: Services, plan: Plan, folder: Path) -> None:
        self.services = services
        self.plan = plan
        self.folder = folder
        self.random = random.Random(plan.seed)
        self.model = f"fault-{os.urandom(4).hex()}:1b"
        self.out = folder / "out"
        self.programs: list[Program] = []
        self.workers: dict[str, list[Program]] = {"prefill": [], "decode": [], "both": []}
        self.overs: list[Over] = []
        self.owner: Program | None = None
        self.at_end = contextlib.ExitStack()  # what a fault leaves to be undone after the batch
        self._read_bytes = self._read_lines = 0  # of the journal
        self._numbers = itertools.count(1)
        self._cluster_state = RedisClusterState(services.direct_store_url)
        self._config = folder / "cluster.toml"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        model = ModelEntry("simulated", self.plan.weights, context=load.CONTEXT, slots=self.plan.slots)
        nodes = f"[services]\nbroker_nodes = {self.services.nodes}\n"
        self._config.write_text(config_text({self.model: model}) + nodes, "utf-8")
        broker = RabbitMQBroker(self.services.broker.url, name="stage", nodes=self.services.nodes)
        broker.declare([self.model])
        broker.close()
        counts = ("prefill", self.plan.prefill_workers), ("decode", self.plan.decode_workers)
        roles: tuple[tuple[Role, int], ...] = (*counts, ("both", self.plan.both_workers))
        for role, count in roles:
            for _ in range(count):
                self.start_worker(role)
        self.wait_for_registrations()
        self.services.broker.wait_until_on_disk(topology.work_queue("decode", self.model, "bulk"))
        return self

    def __exit__(self, *_exception: object) -> None:
        for program in self.programs:
            program.kill()
        self.at_end.close()
        self._cluster_state.close()
        self.services.fix()
        with self.services.connect() as connection:
            for queue in [spec.name for spec in topology.queues([self.model]) if spec.exchange == topology.WORK]:
                connection.channel().queue_delete(queue)

    # Processes.

    def start_worker(
        self, role: Role, *options: str, fault_point: str = "", instead_of: Program | None = None
    ) -> Program:
        """A worker, which may not be ready yet."""
        level = "debug" if self.plan.questions else "info"  # each answer that is noted
        arguments = ["--config", str(self._config), "--log-style", "json", "--log-level", level]
        arguments += ["worker" if role == "both" else f"{role}-worker", "--model", self.model]
        variables = self._environment() | self.plan.environment
        if fault_point:
            variables[failpoints.VARIABLE] = fault_point
        if self.plan.clocks_s:
            started = sum(map(len, self.workers.values()))
            variables |= clock_ahead(self.plan.clocks_s[started % len(self.plan.clocks_s)])
        worker = self._start("tests.acceptance.faults.process", [*arguments, *options], variables, role)
        if instead_of:
            self.workers[role].remove(instead_of)
        self.workers[role].append(worker)
        return worker

    def start_owner(self, *options: str) -> Program:
        """The batch's owner, for the first time or again."""
        arguments = ["--config", str(self._config), "--out", str(self.out), "--model", self.model]
        for name in ("jobs", "seed", "long_jobs", "long_s", "copies", "copied_jobs", "deadline_s", "questions"):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(self.plan, name))]
        self.owner = self._start("tests.acceptance.faults.owner", [*arguments, *options], self._environment(), "owner")
        return self.owner

    def wait_for_registrations(self) -> None:
        """Return when every worker that lives has its registration up."""
        wait_until(self._all_have_registrations, "the registrations of all workers are up", PATIENCE_S, poll_s=0.1)

    def everyone(self) -> list[Program]:
        """All workers, and the owner if there is one."""
        return [*self._all_workers(), *([self.owner] if self.owner else [])]

    def _all_workers(self) -> list[Program]:
        return [worker for workers in self.workers.values() for worker in workers]

    def held_by(self, worker: Program) -> tuple[str, ...]:
        """Jobs that it has begun and not passed on, by its log."""
        begun: dict[str, bool] = {}
        for line in worker.lines():
            if line["event"] in ("prefill_started", "decode_started"):
                begun[line["job"]] = True
            elif line["event"] in ("passed_on", "replied", "failed"):
                begun.pop(line["job"], None)
        return tuple(begun)

    # Time.

    def moments(self, count: int, last: float = 0.8) -> Iterator[int]:
        """Wait for `count` random places in the batch, one after the other. Ends early with the batch."""
        places = sorted(self.random.uniform(0.05, last) for _ in range(count))
        for number, place in enumerate(places):
            self.wait_for_results(int(place * self.plan.jobs))
            if self.done >= self.plan.jobs:
                return
            time.sleep(self.random.uniform(0, 0.2))
            yield number

    def wait_for_results(self, count: int) -> None:
        """Return when so many results are journaled (or it takes too long: a row goes on, its figures will tell)."""
        deadline = time.monotonic() + PATIENCE_S
        while self.done < count and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def done(self) -> int:
        """Lines in the journal."""
        path = self.out / "results.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
            self._read_bytes += len(new)
            self._read_lines += new.count(b"\n")
        return self._read_lines

    def results(self) -> list[dict[str, Any]]:
        """The journal."""
        return [json.loads(line) for line in (self.out / "results.jsonl").read_text("utf-8").splitlines()]

    def batch_id(self) -> str:
        """The batch's id, once the owner has written its manifest."""
        path = self.out / "batch.json"
        wait_until(path.exists, "the manifest is there", PATIENCE_S)
        return str(json.loads(path.read_text("utf-8"))["batch_id"])

    def over(
        self,
        jobs: Sequence[str] | None = None,
        programs: Sequence[Program] | None = None,
        in_hand_s: float = 0.0,
    ) -> None:
        """A fault ends now: recovery is counted from here, for these jobs, else for these processes (default: all)."""
        chosen = self.everyone() if programs is None and jobs is None else programs or []
        names = tuple(program.name for program in chosen)
        self.overs.append(Over(time.time(), tuple(jobs or ()), names, in_hand_s))

    def pause(self, role: Role, paused: bool) -> None:
        """Pause or resume every worker of a role, as `kvasir pause` does; on return all have heard it."""

        def heard() -> bool:
            registrations = [
                registration
                for registration in self._cluster_state.registrations()
                if (registration.model, registration.role) == (self.model, role)
            ]
            for registration in registrations:
                announce_pause(broker, registration.worker_id, paused)
            return all((registration.off == "paused") == paused for registration in registrations)

        with contextlib.closing(RabbitMQBroker(self.services.broker.url, name="pause")) as broker:
            wait_until(heard, f"every {role} worker has heard it", PATIENCE_S, poll_s=0.3)

    def kill(self, role: Role, replace: bool = True) -> None:
        """SIGKILL a random worker; another one starts in its place."""
        victim = self.random.choice(self.workers[role])
        victim.kill()
        self.over(jobs=self.held_by(victim))
        if replace:
            self.start_worker(role, instead_of=victim)

    # The end.

    def finish(self) -> None:
        """Wait until the owner is done, or nothing moves any more; then start it again, once."""
        assert self.owner
        if self._ends_well(self.owner):
            return
        self.owner.kill()
        self._ends_well(self.start_owner())

    def _ends_well(self, owner: Program) -> bool:
        """Whether it ended with every result there; False once it ended otherwise, or nothing moves any more."""
        still_since, seen = time.monotonic(), -1
        deadline = time.monotonic() + STALLED_S
        while time.monotonic() < deadline and time.monotonic() - still_since < QUIET_S:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: owner.exit_code == 0, "the owner is done", timeout_s=1, poll_s=0.05)
                return True
            # An owner that is only just starting, which takes long on a busy machine, has not had its say yet.
            if not self._waits(owner) or seen != self.done or self._somebody_works():
                still_since, seen = time.monotonic(), self.done
        return False

    def _waits(self, owner: Program) -> bool:
        return not owner.alive or any(line["event"] == WAITING for line in owner.lines())

    def _somebody_works(self) -> bool:
        with contextlib.suppress(StoreUnavailable):  # a cluster that has just lost a node
            registrations = self._cluster_state.registrations()
            if any(registration.busy for registration in registrations if registration.model == self.model):
                return True
        try:
            return self.services.ready(queues_of(self.model)) > 0
        except pika.exceptions.AMQPError:
            return False

    def _all_have_registrations(self) -> bool:
        pids = {
            registration.pid for registration in self._cluster_state.registrations() if registration.model == self.model
        }
        workers = self._all_workers()
        for worker in workers:
            if not worker.alive:
                raise AssertionError(f"{worker.name} ended while starting:\n{worker.log.read_text()[-2000:]}")
        return pids >= {worker.pid for worker in workers}

    def _environment(self) -> dict[str, str]:
        urls = {"KVASIR_BROKER_URL": self.services.broker_url, "KVASIR_STORE_URL": self.services.store_url}
        return environment(self.folder) | urls

    def _start(self, module: str, arguments: list[str], variables: dict[str, str], name: str) -> Program:
        command = [*self.services.prefix, sys.executable, "-m", module, *arguments]
        program = Program(command, variables, self.folder / f"{next(self._numbers)}-{name}")
        self.programs.append(program)
        return program
