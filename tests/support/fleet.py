"""Several models and workers over a real RabbitMQ and Redis, as threads of the test's process.

with Fleet(broker_url, store_url, [home, other]) as fleet:
    fleet.start_decode(home, stealable_models=[fleet.stealable(other)])
    results = fleet.run([fleet.job(other, "text") for …])
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from decode_worker.stealing.models import CachedModel, ModelCache, Stealable
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from engines.registry import EngineOptions
from engines.simulated.engine import SimulatedEngine, parse_weights
from infra.broker import topology
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.rabbitmq.fast import FastWire
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from messages.lifecycle import Event, Step
from messages.workers import WorkerInfo
from prefill_worker.worker import PrefillWorker
from producers.client import Client
from tests.support.path_checker import PathChecker
from tests.support.waiting import wait_until

PREFILL = "sim:scale=0"
SHARED_TEXT = "Grade by this rubric. " * 40


def weights(seconds: float, seed: int = 1, tokens: int = 20) -> str:
    """A simulated engine whose answers have up to `tokens` tokens, and take `seconds` each at that length."""
    return f"sim:scale=1,prefill=1000000,decode={tokens / seconds},answer=200,seed={seed}"


def engine(text: str, slots: int = 1) -> SimulatedEngine:
    """The simulated engine of these weights."""
    return SimulatedEngine(parse_weights(text), EngineOptions(text, 4096, slots))


@dataclass(eq=False)
class Member:
    """A worker in its thread, with broker connections of its own."""

    worker: Any
    broker: RabbitMQBroker
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    @property
    def worker_id(self) -> str:
        return str(self.worker.worker_id)

    @property
    def registration(self) -> WorkerInfo:
        """What it says of itself, now."""
        registration: WorkerInfo = self.worker.registration()
        return registration

    def crash(self) -> None:
        """Its connections are cut and it does nothing more: what it holds goes back to the broker."""
        self.broker.close()
        self.worker.stop(abort=True)

    def leave(self) -> None:
        """It leaves in good order."""
        self.worker.stop(abort=True)
        self.thread.join(20)
        assert not self.thread.is_alive(), "a worker did not leave"
        self.broker.close()


class WorkerFleet:
    """Workers, a client, and what was observed."""

    def __init__(self, broker_url: str, store_url: str, models: Sequence[str]) -> None:
        self._broker_url = broker_url
        self._store_url = store_url
        self.models = list(models)
        self.kv = RedisKVStore(store_url)
        self.cluster_state = RedisClusterState(store_url)
        self.events: list[Event] = []
        self.checker = PathChecker(unseen_copies=True)
        self.members: list[Member] = []
        self.broker = RabbitMQBroker(broker_url, "fleet", make_wire=FastWire)
        self.client = Client(self.broker, self.cluster_state, self.models, self.observe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for member in self.members:
            member.worker.stop(abort=True)
        for member in self.members:
            member.leave()
        self.broker.close()
        self.kv.close()
        self.cluster_state.close()
        if error is None:
            assert self.checker.illegal() == []

    def observe(self, event: Event) -> None:
        self.events.append(event)
        self.checker(event)

    def stealable(self, model: str, text: str = PREFILL, slots: int = 1, size_bytes: int = 0) -> Stealable:
        """A model that a decode worker may load."""
        return Stealable(model, size_bytes, lambda: LoadedEngine(engine(text, slots)))

    def start_prefill(self, model: str, text: str = PREFILL) -> Member:
        return self._start(partial(PrefillWorker, model, LoadedEngine(engine(text))))

    def start_decode(
        self, model: str, text: str = PREFILL, slots: int = 1, stealable_models: Sequence[Stealable] = ()
    ) -> Member:
        return self._start(
            partial(
                DecodeWorker, ModelCache(CachedModel(model, 0, LoadedEngine(engine(text, slots))), stealable_models)
            )
        )

    def job(self, model: str, own_text: str, tokens: int = 20, **fields: Any) -> PrefillJob:
        """A job whose answer has `tokens` tokens at most; the batch is the model's."""
        batch = "batch-" + model.replace(":", "-")
        return self.client.new_job(
            batch, f"item-{len(own_text)}", model, user_prompt(SHARED_TEXT, own_text), Sampling(tokens), **fields
        )

    def jobs(self, model: str, count: int, **fields: Any) -> list[PrefillJob]:
        return [self.job(model, f"student {number} wrote " * (number + 1), **fields) for number in range(count)]

    def prefill(self, jobs: Sequence[PrefillJob]) -> None:
        """Submit jobs and have them prefilled; they wait to be decoded."""
        waiting_before = self.jobs_waiting(jobs[0].model)
        self.client.submit(jobs)
        wait_until(lambda: self.jobs_waiting(jobs[0].model) == waiting_before + len(jobs), "all wait for decode", 30)

    def jobs_waiting(self, model: str) -> int:
        """Jobs ready in a model's decode queue."""
        depth = self.broker.depth(topology.work_queue("decode", model, "bulk"))
        return depth.ready if depth else 0

    def results(self, jobs: Sequence[PrefillJob], timeout_s: float = 30.0) -> dict[str, JobResult]:
        """Every job's result, by job id."""
        batch = jobs[0].batch_id
        results = {
            result.job_id: result for result in self.client.gather(batch, [job.job_id for job in jobs], timeout_s)
        }
        assert len(results) == len(jobs), f"{len(jobs) - len(results)} of {len(jobs)} results did not come"
        return results

    def events_of(self, step: Step, model: str) -> list[Event]:
        return [event for event in self.events if event.step is step and event.model == model]

    def _start(self, worker: Callable[..., PrefillWorker | DecodeWorker]) -> Member:
        broker = RabbitMQBroker(self._broker_url, "member", make_wire=FastWire)
        member = Member(worker(broker, self.kv, self.cluster_state, self.observe), broker)
        self.members.append(member)
        wait_until(
            lambda: member.worker_id in [registration.worker_id for registration in self.cluster_state.registrations()],
            "its registration is up",
        )
        return member


def makespan_s(run: Any) -> float:
    """Seconds that a call takes."""
    start = time.monotonic()
    run()
    return time.monotonic() - start
