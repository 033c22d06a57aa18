"""Stalls of a full store: each clears by itself, and every job ends with the right text."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis

from engines.base import LoadedEngine
from infra.broker.base import Depth
from infra.broker.embedded.broker import EmbeddedBroker
from infra.config.settings import load_settings
from kvasir.commands.status import store_line, store_state
from kvstore.blocks import block_refs
from kvstore.redis.cluster_state import RedisClusterState
from messages.jobs import JobResult, PrefillJob
from messages.lifecycle import Step
from prefill_worker.admission import high_water_mark
from prefill_worker.worker import PrefillWorker
from tests.support.kv_samples import records_of, tokens
from tests.support.pipeline import MODEL, Gate, SupervisedWorker, WatchedEngine, work
from tests.support.redis_pipeline import WEIGHTS, RedisPipeline
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

CLEARED_WITHIN_S = 30
RUBRIC = "Grade by this rubric. " * 60  # 330 tokens, 1.3 MB
LAYOUT = WatchedEngine(WEIGHTS).info.layout


@contextmanager
def pipeline_with(max_memory: str) -> Iterator[RedisPipeline]:
    with RedisServer(max_memory=max_memory) as server, RedisPipeline(server.url, unseen_copies=True) as pipeline:
        yield pipeline


def class_of(pipeline: RedisPipeline, size: int, shared: str = RUBRIC) -> list[PrefillJob]:
    return [pipeline.job(f"student {number} wrote " * 60, shared) for number in range(size)]


def assert_all_right(pipeline: RedisPipeline, jobs: list[PrefillJob], results: list[JobResult]) -> None:
    assert [result.state for result in results] == ["succeeded"] * len(jobs)
    assert [result.text for result in results] == [pipeline.undisturbed_text(job, WEIGHTS) for job in jobs]


def test_a_store_full_of_last_weeks_shared_blocks_makes_room_for_this_weeks() -> None:
    with pipeline_with("24mb") as pipeline:
        # Given a store that a class of last week filled to the mark, and nothing in decode
        refs = block_refs("last-week", LAYOUT, tokens(8192), 8192, 8192, "nobody")
        for record in records_of(LAYOUT, refs):
            pipeline.kv.put("last-week", LAYOUT, [record])
            if pipeline.kv.usage().used_bytes > high_water_mark(pipeline.kv.usage()):
                break
        before = len(pipeline.keys("kv:last-week:*"))
        pipeline.start(WEIGHTS)

        # When a class of this week comes
        jobs = class_of(pipeline, 6)
        results = pipeline.run_all(jobs, CLEARED_WITHIN_S)

        # Then all of it is transferred, and not all of last week's had to go for it
        assert_all_right(pipeline, jobs, results)
        assert [result.decode.kv_transfer for result in results] == ["verified"] * len(jobs)
        assert 0 < len(pipeline.keys("kv:last-week:*")) < before


def test_two_prefills_that_hold_half_their_kv_at_a_full_store_both_end() -> None:
    with pipeline_with("16mb") as pipeline:
        # Given two prefills that have stored the first half of their blocks
        gates = Gate(), Gate()
        for gate in gates:
            pipeline.start_prefill(HalfwayEngine(gate))
        pipeline.start_decode(WatchedEngine(WEIGHTS))
        jobs = [pipeline.job(f"student {number} wrote " * 200, shared_text="") for number in range(2)]
        pipeline.submit(*jobs)
        for gate in gates:
            gate.wait()
        halves = {job.job_id: lambda job=job: pipeline.keys(f"kv:*:{job.job_id}:*") for job in jobs}
        wait_until(lambda: all(keys() for keys in halves.values()), "both have stored something")

        # When somebody else fills the store to its last byte, and what the first of them gives up too
        fill_to_the_brim(pipeline.redis)
        gates[0].open()
        wait_until(lambda: not all(keys() for keys in halves.values()), "one has given up what it had stored")
        fill_to_the_brim(pipeline.redis)
        gates[1].open()

        # Then both go on without
        results = pipeline.all_results(jobs, CLEARED_WITHIN_S)
        assert_all_right(pipeline, jobs, results)
        assert ["is full" in result.decode.why_none for result in results] == [True, True]

        # and hold nothing any more
        assert pipeline.own_keys() == []


class HalfwayEngine(WatchedEngine):
    """Waits at its gate in the middle of a prompt."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(WEIGHTS)
        self._gate = gate

    def prefill(self, tokens: Any, emit: Any, first: int = 0, resume: Any = None, stop: Any = None) -> Any:
        def halfway(record: Any) -> None:
            if record.start * 2 > len(tokens):
                self._gate(tokens, stop)
            emit(record)

        return super().prefill(tokens, halfway, first, resume, stop)


def fill_to_the_brim(client: redis.Redis) -> None:
    for size in (1 << 20, 1 << 14, 1 << 8):
        number = 0
        try:
            while True:
                client.set(f"foreign:{size}:{number}", bytes(size), ex=600)
                number += 1
        except redis.exceptions.OutOfMemoryError:
            continue


def test_a_prompt_larger_than_the_whole_budget_goes_on_without_and_holds_nobody_up() -> None:
    with pipeline_with("8mb") as pipeline:
        # Given a prompt whose KV cache no empty store could hold, among small ones
        pipeline.start(WEIGHTS)
        small = class_of(pipeline, 2, shared="")
        giant = pipeline.job("student 7 wrote " * 600, shared_text="")
        jobs = [small[0], giant, small[1]]

        # When all are submitted
        results = pipeline.run_all(jobs, CLEARED_WITHIN_S)

        # Then all end well, and only the big one without a KV transfer
        assert_all_right(pipeline, jobs, results)
        assert [result.decode.kv_transfer for result in results] == ["verified", "none", "verified"]
        assert "all KV caches together are allowed only" in results[1].decode.why_none


@pytest.mark.system  # ten seconds
def test_a_decode_depth_wrongly_read_as_zero_costs_time_and_no_job() -> None:
    with pipeline_with("10mb") as pipeline:
        # Given a store full of KV caches that wait for decode, and a prefill that is told that nothing does
        start_blind_prefill(pipeline)
        jobs = class_of(pipeline, 8)
        pipeline.submit(*jobs)
        wait_until(lambda: Step.REDELIVERED in [event.step for event in pipeline.events], "a job found no room")
        assert pipeline.ready(work("decode")) >= 2

        # When it throws away a part of the class's prefix, which they all need
        wait_until(lambda: len(pipeline.shared_keys()) < 330 // 32, "some of the prefix is gone", CLEARED_WITHIN_S)

        # Then all of them are decoded all the same
        pipeline.start_decode(WatchedEngine(WEIGHTS))
        assert_all_right(pipeline, jobs, pipeline.all_results(jobs, CLEARED_WITHIN_S))


class BlindBroker(EmbeddedBroker):
    """Every queue looks empty to it, as quorum queues do now and then."""

    def depths(self, *queues: str) -> dict[str, Depth | None]:
        return dict.fromkeys(queues, Depth(ready=0, consumers=0))


def start_blind_prefill(pipeline: RedisPipeline) -> None:
    engine, broker = WatchedEngine(WEIGHTS), BlindBroker(pipeline.server)
    args = (MODEL, LoadedEngine(engine), broker, pipeline.kv, pipeline.cluster_state, pipeline.observe)
    pipeline.workers.append(SupervisedWorker(lambda: PrefillWorker(*args), engine, broker))


def test_status_tells_what_is_reserved_and_where_prefill_stops() -> None:
    with RedisServer(max_memory="100mb") as server, closing(RedisClusterState(server.url)) as cluster_state:
        # Given a prefill under way
        settings = load_settings(environ={"KVASIR_BROKER_URL": "amqp://localhost", "KVASIR_STORE_URL": server.url})
        cluster_state.reserve("worker-1", 30_000_000, 1 << 40, 60)

        # When status looks at the store, and says so in a sentence
        store = store_state(settings)
        line = store_line(store)

        # Then both show it
        assert (store["reserved_bytes"], store["mark_bytes"]) == (30_000_000, int(0.85 * 100 * 2**20))
        assert "of 0.1 GB in use, 0.03 GB reserved by prefills under way; prefill fills it up to 0.089 GB" in line


@pytest.fixture(autouse=True)
def _no_thread_of_ours_stays() -> Iterator[None]:
    yield
    names = {"reservation", "kv-upload", "PrefillWorker", "DecodeWorker"}
    assert not [thread for thread in threading.enumerate() if thread.name in names]
