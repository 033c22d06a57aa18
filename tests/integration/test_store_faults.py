"""A store that fails in the middle of a put or a get costs time, and never an answer. What a batch leaves in it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from kvstore.base import TTL_S
from kvstore.blocks import BlockRef
from kvstore.cache import CachedKVStore
from kvstore.redis.store import RedisKVStore
from messages.jobs import PrefillJob
from messages.kv import Block, KVLayout
from tests.support.pipeline import WatchedEngine
from tests.support.redis_pipeline import InterruptedStore, RedisPipeline, SpoilingProxy
from tests.support.servers import HOST, RedisServer
from tests.support.waiting import wait_until

IN_THE_PREFIX, IN_THE_SUFFIX = 3, 8  # records put: six blocks are shared, three the job's own


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def kill(server: RedisServer, _pipeline: RedisPipeline) -> None:
    server.kill()


def flush(_server: RedisServer, pipeline: RedisPipeline) -> None:
    pipeline.redis.flushall()


def fill(_server: RedisServer, pipeline: RedisPipeline) -> None:
    pipeline.redis.config_set("maxmemory", 1)


def fix(server: RedisServer, pipeline: RedisPipeline) -> None:
    """All is well with the store again."""
    if not server.alive:
        server.start()
    pipeline.redis.config_set("maxmemory", 0)


Harm = Callable[[RedisServer, RedisPipeline], None]


@pytest.mark.parametrize("harm", [kill, flush, fill])
@pytest.mark.parametrize(
    ("during", "records"), [("put", IN_THE_PREFIX), ("put", IN_THE_SUFFIX), ("get", 0)], ids=["prefix", "own", "get"]
)
def test_a_store_that_fails_in_the_middle_costs_no_answer(
    server: RedisServer, harm: Harm, during: str, records: int
) -> None:
    # Given a store to which something happens in the middle of a job's put, or of its get
    kv = InterruptedStore(server.url, lambda: harm(server, pipeline), during, records)
    with RedisPipeline(server.url, kv) as pipeline:
        pipeline.start()
        job = pipeline.job()

        # When the job is run
        (result,) = pipeline.run_all([job])

        # Then it ends as undisturbed
        assert kv.has_fired
        assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(job))

        # and once the store is well again, so is the KV transfer
        fix(server, pipeline)
        assert_transferred(pipeline, pipeline.job("the next one wrote " * 20))


@pytest.mark.parametrize(("command", "let_pass"), [("SET", 0), ("SET", 3), ("GETEX", 0), ("GETEX", 3), ("GETEX", 1000)])
def test_a_store_that_answers_garbage_costs_no_answer(server: RedisServer, command: str, let_pass: int) -> None:
    # Given a store that answers one put, or one get, with some bytes of the truth and then with garbage
    with SpoilingProxy(HOST, server.port) as proxy:
        kv = RedisKVStore(server.url.replace(f":{server.port}", f":{proxy.port}"), timeout_s=2)
        with RedisPipeline(server.url, kv) as pipeline:
            pipeline.start()
            proxy.spoil(command, let_pass)
            job = pipeline.job()

            # When a job is run
            (result,) = pipeline.run_all([job])

            # Then it ends as undisturbed, and the next one is transferred: no reply was taken for another one's
            assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(job))
            assert proxy.reply_spoilt.is_set()
            assert_transferred(pipeline, pipeline.job("the next one wrote " * 20))


def assert_transferred(pipeline: RedisPipeline, job: PrefillJob) -> None:
    (result,) = pipeline.run_all([job])
    assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(job))
    assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)


class CountingStore(RedisKVStore):
    """Counts how often each block crosses the network to a reader."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fetched: Counter[BlockRef] = Counter()

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        self.fetched.update(refs)
        return super().get(fingerprint, layout, refs)


def test_a_rubric_crosses_the_network_once_per_decode_worker(server: RedisServer) -> None:
    networks = CountingStore(server.url), CountingStore(server.url)
    caches = [CachedKVStore(network, 1 << 30) for network in networks]
    with closing(caches[0]), closing(caches[1]), RedisPipeline(server.url) as pipeline:
        # Given two decode workers that remember shared blocks
        pipeline.start_prefill()
        decoders = [pipeline.start_decode(WatchedEngine(slots=1), kv=cache) for cache in caches]

        # When they have decoded a class together
        jobs = [pipeline.job(f"student {number} wrote " * 10) for number in range(12)]
        results = pipeline.run_all(jobs)

        # Then each got the class's blocks once, and every job's own blocks went to one of them
        assert [result.decode.kv_transfer for result in results] == ["verified"] * len(jobs)
        assert all(decoder.engine.decode_calls for decoder in decoders)
        shared = [ref for ref in pipeline.refs(jobs[0]) if ref.is_shared]
        own = [ref for job in jobs for ref in pipeline.refs(job) if not ref.is_shared]
        for network in networks:
            assert {network.fetched[ref] for ref in shared} == {1}
        assert {sum(network.fetched[ref] for network in networks) for ref in own} == {1}


def test_after_a_batch_every_key_has_a_ttl_own_blocks_are_gone_and_shared_ones_live(server: RedisServer) -> None:
    with RedisPipeline(server.url) as pipeline:
        # Given a batch that is done, and a worker of each kind that has left
        workers = pipeline.start()
        jobs = [pipeline.job(f"student {number} wrote " * 10) for number in range(10)]
        pipeline.run_all(jobs)
        pipeline.nothing_is_left()
        for worker in workers:
            pipeline.leave(worker)

        # Then no key would stay for ever
        keys = pipeline.keys()
        assert [key for key in keys if pipeline.redis.ttl(key) <= 0] == []

        # and of all KV the class's part is there, for as long as nothing asks for it in a day
        shared = [ref.key for ref in pipeline.refs(jobs[0]) if ref.is_shared]
        assert [key for key in keys if key.startswith("kv")] == sorted(shared)
        assert all(TTL_S - 120 < pipeline.redis.ttl(key) <= TTL_S for key in shared)


def test_a_cancelled_batch_leaves_no_blocks_of_its_own(server: RedisServer) -> None:
    with RedisPipeline(server.url) as pipeline:
        # Given jobs whose KV lies in the store, waiting for decode
        pipeline.start_prefill()
        jobs = [pipeline.job(f"student {number} wrote " * 10) for number in range(3)]
        pipeline.submit(*jobs)
        wait_for_own_keys(pipeline, jobs)

        # When their batch is cancelled and a decode worker comes
        pipeline.client.cancel(jobs[0].batch_id)
        pipeline.start_decode()

        # Then their blocks go
        pipeline.nothing_is_left()
        wait_until(lambda: not pipeline.own_keys(), "the blocks are deleted, after the ack")
        assert pipeline.shared_keys()


def wait_for_own_keys(pipeline: RedisPipeline, jobs: list[PrefillJob]) -> None:
    count = sum(not ref.is_shared for job in jobs for ref in pipeline.refs(job))
    wait_until(lambda: len(pipeline.own_keys()) == count, "all are stored")
