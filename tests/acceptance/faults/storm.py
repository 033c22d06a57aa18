"""Faults on faults: one to three at once, every half to three seconds, while a batch of ten minutes runs.

Whatever a supervisor or a person would start again is started again: workers that died, also while they were starting,
and an owner that gave up. A service that is still coming back isn't drawn, nor is a process that is stopped.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tests.acceptance.faults.services import HEARTBEAT_S
from tests.acceptance.faults.stage import Program, Role, Stage
from tests.support.servers import RabbitMQServer, RedisServer

JOB_S = 0.45  # in a slot; each decode worker has one
# For each job of the plan, so that a thousand jobs meet two hundred faults in ten minutes.
FAULTS_A_JOB, SECONDS_A_JOB = 0.2, 0.6
UNTIL = 0.95  # of the jobs: the last of them are left in peace
LONGEST_S = 45 * 60


class Storm:
    """What has been done to a stage so far, and what is still being done."""

    def __init__(self, stage: Stage, pool: ThreadPoolExecutor) -> None:
        self._stage = stage
        self._pool = pool
        self._coming_back: dict[str, Future[None]] = {}
        self._stopped: list[tuple[float, Program]] = []  # until when
        self.faults = 0

    def strike(self) -> None:
        """One to three faults of those that are possible now."""
        source = self._stage.random
        for name in source.sample(sorted(_FAULTS), source.randint(1, 3)):
            if _FAULTS[name](self):
                self.faults += 1

    def tend(self) -> None:
        """Wake who has slept enough; start again who is gone."""
        now = time.monotonic()
        for until, program in list(self._stopped):
            if now > until or not program.alive:
                self._stopped.remove((until, program))
                self._wake(program)
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            for worker in list(self._stage.workers[role]):
                if not worker.alive:
                    self._stage.start_worker(role, instead_of=worker)
        owner = self._stage.owner
        if owner and owner.exit_code not in (None, 0):
            self._stage.start_owner()

    def calm(self) -> None:
        """Everything is back, and everybody awake."""
        for _, program in self._stopped:
            self._wake(program)
        for service in self._coming_back.values():
            service.result()
        self._stage.services.to_broker.heal()
        self._stage.services.to_store.heal()
        self.tend()
        self._stage.over()

    # The faults. Each says whether it was possible.

    def kill_worker(self, role: Role) -> bool:
        """SIGKILL, in whatever it is doing, starting included."""
        self._stage.kill(role)
        return True

    def kill_owner(self) -> bool:
        """SIGKILL; another one takes over its batch."""
        if not self._stage.owner or self._stage.owner.exit_code is not None:
            return False
        self._stage.owner.kill()
        self._stage.start_owner()
        return True

    def stop_worker(self, role: Role) -> bool:
        """SIGSTOP for up to three heartbeats."""
        asleep = [program for _, program in self._stopped]
        awake = [worker for worker in self._stage.workers[role] if worker.alive and worker not in asleep]
        if len(awake) < 2:  # one goes on, or nothing would move that a fault could hit
            return False
        worker = self._stage.random.choice(awake)
        worker.send(signal.SIGSTOP)
        self._stopped.append((time.monotonic() + self._stage.random.uniform(0.5, 3 * HEARTBEAT_S), worker))
        return True

    def restart(self, name: str, server: RabbitMQServer | RedisServer) -> bool:
        """SIGKILL of a service, which then starts again."""

        def come_back() -> None:
            server.kill()
            server.start()

        return self._begin(name, come_back)

    def cut(self, name: str, seconds: float) -> bool:
        """A service out of reach for so long."""
        services = self._stage.services
        proxy = services.to_broker if name == "broker" else services.to_store

        def come_back() -> None:
            proxy.cut()
            time.sleep(seconds)
            proxy.heal()

        return self._begin(name, come_back)

    def flush(self) -> bool:
        """FLUSHALL."""
        if self._is_coming_back("store"):
            return False
        with contextlib.closing(self._stage.services.redis()) as client:
            client.flushall()
        return True

    def reset(self, name: str) -> bool:
        """Every connection to a service reset."""
        if self._is_coming_back(name):
            return False
        services = self._stage.services
        (services.to_broker if name == "broker" else services.to_store).reset()
        return True

    def _begin(self, name: str, come_back: Callable[[], None]) -> bool:
        if self._is_coming_back(name):
            return False
        self._coming_back[name] = self._pool.submit(come_back)
        return True

    def _is_coming_back(self, name: str) -> bool:
        future = self._coming_back.get(name)
        if future and future.done():
            future.result()  # raises what kept it from coming back
        return bool(future and not future.done())

    def _wake(self, program: Program) -> None:
        if program.alive:
            program.send(signal.SIGCONT)


_FAULTS: dict[str, Callable[[Storm], bool]] = {
    "prefill worker killed": lambda storm: storm.kill_worker("prefill"),
    "decode worker killed": lambda storm: storm.kill_worker("decode"),
    "prefill worker stopped": lambda storm: storm.stop_worker("prefill"),
    "decode worker stopped": lambda storm: storm.stop_worker("decode"),
    "owner killed": Storm.kill_owner,
    "broker killed": lambda storm: storm.restart("broker", storm._stage.services.broker),
    "broker cut": lambda storm: storm.cut("broker", storm._stage.random.uniform(0.5, 3)),
    "broker reset": lambda storm: storm.reset("broker"),
    "store killed": lambda storm: storm.restart("store", storm._stage.services.store),
    "store cut": lambda storm: storm.cut("store", storm._stage.random.uniform(0.5, 3)),
    "store reset": lambda storm: storm.reset("store"),
    "store flushed": Storm.flush,
}


def storm(stage: Stage) -> None:
    """See the module."""
    jobs, began = stage.plan.jobs, time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        weather = Storm(stage, pool)
        try:
            next_strike = began + 1
            while stage.done < UNTIL * jobs and time.monotonic() - began < LONGEST_S:
                if time.monotonic() > next_strike:
                    weather.strike()
                    next_strike = time.monotonic() + stage.random.uniform(0.5, 3)
                weather.tend()
                time.sleep(0.05)
        finally:
            weather.calm()
    took = time.monotonic() - began
    sys.stdout.write(f"storm: {weather.faults} faults in {took:.0f} s, {stage.done} of {jobs} jobs done\n")
    assert weather.faults >= FAULTS_A_JOB * jobs, f"only {weather.faults} faults"
    assert took >= SECONDS_A_JOB * jobs, f"only {took:.0f} s"
