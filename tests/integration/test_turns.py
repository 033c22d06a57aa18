"""Batches take turns at a real RabbitMQ: a class of 20 behind one of 500 is not the last to be graded."""

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from infra.broker import topology
from infra.broker.rabbitmq import RabbitMQBroker
from infra.turns import Turns
from kvstore.memory import MemoryClusterState, MemoryKVStore
from messages.jobs import PrefillJob, Sampling, user_prompt
from messages.lifecycle import Event, Step
from messages.workers import WorkerStage
from prefill_worker.worker import PrefillWorker
from producers.client import Client
from tests.support.path_checker import PathChecker
from tests.support.pipeline import WatchedEngine
from tests.support.waiting import wait_until

LARGE, SMALL = 500, 20


class Site:
    """Workers over the broker, each with a connection of its own, and a client that submits classes."""

    def __init__(self, broker_url: str) -> None:
        self.model = f"turns.{secrets.token_hex(3)}"
        # The class of each job, in the order in which they were done
        self.order: dict[Step, list[str]] = {Step.PASSED_ON: [], Step.REPLIED: []}
        self.checker = PathChecker()
        self.broker = RabbitMQBroker(broker_url)
        self._broker_url = broker_url
        self._kv, self.cluster_state = MemoryKVStore(), MemoryClusterState()
        self.client = Client(self.broker, self.cluster_state, [self.model], self._observe)
        self._closing: list[Callable[[], None]] = []

    def _observe(self, event: Event) -> None:
        self.checker(event)
        if event.step in self.order:
            self.order[event.step].append(event.facts["batch_id"])

    def start(self, *stages: WorkerStage) -> None:
        """A worker of each, which is seen."""
        for stage in stages:
            loaded_engine = LoadedEngine(WatchedEngine(slots=2))
            shared: list[Any] = [RabbitMQBroker(self._broker_url), self._kv, self.cluster_state, self._observe]
            cache = ModelCache(CachedModel(self.model, 0, loaded_engine))
            is_prefill = stage == "prefill"
            worker = PrefillWorker(self.model, loaded_engine, *shared) if is_prefill else DecodeWorker(cache, *shared)
            thread = threading.Thread(target=worker.run, daemon=True)
            thread.start()

            def end(worker: Any = worker, thread: threading.Thread = thread, broker: Any = shared[0]) -> None:
                worker.stop(abort=True)
                thread.join(30)
                assert not thread.is_alive()
                broker.close()

            self._closing.append(end)
        wait_until(lambda: {one.role for one in self.client.workers()}.issuperset(stages), "they are seen")

    def leave(self) -> None:
        """All workers leave."""
        while self._closing:
            self._closing.pop()()

    def submit(self, name: str, size: int) -> int:
        """A class, as its owner publishes it; the turn that it took."""
        prompts = [user_prompt("", f"student {number} of {name}") for number in range(size)]
        jobs: list[PrefillJob] = [
            self.client.new_job(name, str(number), self.model, prompt, Sampling(max_tokens=8))
            for number, prompt in enumerate(prompts)
        ]
        self.broker.open_reply_queue(name)
        turns = self.client.turns([self.model])
        assert self.client.submit(jobs, turns=turns) == size
        return turns[self.model]

    def waiting(self, stage: WorkerStage) -> int:
        return topology.jobs_waiting(self.broker, stage, self.model)


@pytest.fixture
def site(broker_url: str) -> Iterator[Site]:
    site = Site(broker_url)
    with closing(site.broker):
        yield site
        site.leave()
        assert site.checker.illegal() == []


def test_a_class_of_20_behind_one_of_500_gets_its_turn_in_both_stages(site: Site) -> None:
    # Given a class of 500 that waits for prefill when one of 20 is submitted
    site.start("prefill")
    turns = [site.submit("large", LARGE), site.submit("small", SMALL)]
    wait_until(lambda: len(site.order[Step.PASSED_ON]) == LARGE + SMALL, "all are prefilled", 120)

    # When all are decoded, of which none was before
    site.start("decode")
    wait_until(lambda: len(site.order[Step.REPLIED]) == LARGE + SMALL, "all are answered", 120)

    # Then once the small one is seen every other job is one of it, in both stages, and nothing is left
    assert turns == [0, 1]
    for order in site.order.values():
        assert Counter(order) == {"large": LARGE, "small": SMALL}
        first = order.index("small")
        last = len(order) - order[::-1].index("small")
        assert last - first <= 2 * SMALL + 4  # two slots of decode may swap two neighbours
        assert last < LARGE
    wait_until(lambda: not site.waiting("prefill") + site.waiting("decode"), "nothing is left")


def test_turns_nobody_needs_are_lent_and_a_queue_of_the_release_before_is_one_of_them(site: Site) -> None:
    queues = topology.lane_queues("prefill", site.model, "bulk")
    assert queues[0] == f"prefill.{site.model}.bulk"
    for turn, count in ((0, 3), (2, 2), (3, 1)):
        jobs = [
            site.client.new_job(f"b{turn}", str(number), site.model, user_prompt("", f"{turn} {number}"), Sampling(8))
            for number in range(count)
        ]
        site.client.submit(jobs, turns={site.model: turn})

    turns, taken = Turns(site.broker, "prefill", site.model), []
    while delivery := turns.pull():
        taken.append(queues.index(delivery.queue))
        delivery.ack()

    assert taken == [0, 2, 3, 0, 2, 0]
