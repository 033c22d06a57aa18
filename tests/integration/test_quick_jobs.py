"""The workers over a real RabbitMQ, with their quick jobs in larger steps and one by one: complete either way."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from infra.broker import topology
from infra.broker.rabbitmq import RabbitMQBroker
from infra.quick_jobs import QuickJobs
from infra.worker_loop import OneByOne
from kvstore.memory import MemoryClusterState, MemoryKVStore
from messages.jobs import PrefillJob, Sampling, user_prompt
from messages.lifecycle import Event
from prefill_worker.worker import PrefillWorker
from producers.client import Client
from tests.support.path_checker import PathChecker
from tests.support.pipeline import WatchedEngine
from tests.support.waiting import wait_until

JOBS = 120


class Site:
    """One worker of each stage over the broker, each with a connection of its own; and a client."""

    def __init__(self, broker_url: str, steps: type[OneByOne[Any]]) -> None:
        self.model = f"quick.{secrets.token_hex(3)}"
        self.checker = PathChecker(unseen_copies=True)
        self._broker_url = broker_url
        self._steps = steps
        self.kv, self.cluster_state = MemoryKVStore(), MemoryClusterState()
        self.broker = RabbitMQBroker(broker_url)
        self.broker.declare([self.model])
        self.client = Client(self.broker, self.cluster_state, [self.model], self.observe)
        self._closing: list[Callable[[], None]] = []

    def observe(self, event: Event) -> None:
        self.checker(event)

    def start_prefill(self) -> PrefillWorker:
        return self._start(
            lambda *args: PrefillWorker(self.model, LoadedEngine(WatchedEngine()), *args, 0, self._steps)
        )

    def start_decode(self) -> DecodeWorker:
        home = CachedModel(self.model, 0, LoadedEngine(WatchedEngine(slots=2)))
        return self._start(lambda *args: DecodeWorker(ModelCache(home), *args, 0, self._steps))

    def _start(self, make: Callable[..., Any]) -> Any:
        broker = RabbitMQBroker(self._broker_url)
        worker = make(broker, self.kv, self.cluster_state, self.observe)
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()

        def end() -> None:
            worker.stop(abort=True)
            thread.join(30)
            assert not thread.is_alive()
            broker.close()

        self._closing.append(end)
        return worker

    def leave(self) -> None:
        """All workers hand back what they hold, and leave."""
        while self._closing:
            self._closing.pop()()

    def jobs(self) -> list[PrefillJob]:
        prompts = [user_prompt("", f"student {number} wrote this") for number in range(JOBS)]
        sampling = Sampling(max_tokens=16)
        return [
            self.client.new_job("a-batch", str(number), self.model, prompt, sampling)
            for number, prompt in enumerate(prompts)
        ]

    def work_left(self) -> int:
        queues = [topology.work_queue(stage, self.model, "bulk") for stage in ("prefill", "decode")]
        return sum(depth.ready for queue in queues if (depth := self.broker.depth(queue)))


@pytest.fixture(params=[OneByOne, QuickJobs])
def site(broker_url: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(broker_url, request.param)
    with closing(site.broker):
        yield site
        site.leave()


def test_every_job_is_answered_and_none_is_left(site: Site) -> None:
    site.start_prefill()
    site.start_decode()
    jobs = site.jobs()
    site.broker.open_reply_queue("a-batch")
    site.client.submit(jobs)
    results = list(site.client.gather("a-batch", [job.job_id for job in jobs], 60))
    assert sorted(result.job_id for result in results) == sorted(job.job_id for job in jobs)
    assert {(result.state, result.decode.kv_transfer) for result in results} == {("succeeded", "verified")}
    wait_until(lambda: not site.work_left(), "the queues are empty")
    site.leave()
    assert (site.work_left(), site.checker.illegal()) == (0, [])


def test_jobs_of_workers_that_leave_in_the_middle_are_answered_by_those_that_come(site: Site) -> None:
    jobs = site.jobs()
    site.broker.open_reply_queue("a-batch")
    site.client.submit(jobs)
    answers = site.client.gather("a-batch", [job.job_id for job in jobs], 60)
    site.start_prefill()
    site.start_decode()
    results = [next(answers) for _ in range(JOBS // 4)]
    site.leave()
    site.start_prefill()
    site.start_decode()
    results += answers
    assert sorted(result.job_id for result in results) == sorted(job.job_id for job in jobs)
    assert {result.state for result in results} == {"succeeded"}
    assert site.checker.illegal() == []
