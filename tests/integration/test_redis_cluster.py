"""A Redis Cluster as the store: keys that move, nodes that go, primaries that fill."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from redis.crc import key_slot

from infra.deploy.permissions import STORE_RULES
from kvstore.base import KVStore
from kvstore.blocks import BlockRef
from kvstore.connect import Stores, connect
from kvstore.redis.cluster_bulk import ClusterBulk
from kvstore.redis.store import RedisKVStore
from messages.errors import ConfigError, StoreUnavailable
from messages.kv import Block
from tests.support.kv_samples import layout, records_of, refs_of, same_bits
from tests.support.servers import HOST, RedisCluster, RedisServer, free_port
from tests.support.waiting import wait_until

LAYOUT = layout()
TOKENS = 60 * 32


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three primaries; no test of this file takes one away."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def replicated() -> Iterator[RedisCluster]:
    with RedisCluster(replicas=1) as cluster:
        yield cluster


@pytest.fixture(params=[True, False], ids=["sockets", "redis-py"])
def store(request: pytest.FixtureRequest, cluster: RedisCluster) -> Iterator[RedisKVStore]:
    with closing(RedisKVStore(cluster.url, bulk=request.param)) as store:
        yield store


def _records(job: str) -> list[tuple[BlockRef, Block]]:
    return records_of(LAYOUT, refs_of(LAYOUT, TOKENS, job=job))


def _assert_there(store: KVStore, records: list[tuple[BlockRef, Block]]) -> None:
    refs = [ref for ref, _ in records]
    assert store.find_missing(refs) == []
    got = store.get("tiny-qwen3-0123abcd", LAYOUT, refs)
    assert all(same_bits(block.data, put.data) for block, (_, put) in zip(got, records, strict=True))


def _put(store: KVStore, records: list[tuple[BlockRef, Block]]) -> int:
    return store.put("tiny-qwen3-0123abcd", LAYOUT, iter(records))


def test_a_prompts_blocks_lie_on_every_primary(store: RedisKVStore, cluster: RedisCluster) -> None:
    records = _records("spread")
    _put(store, records)

    shares = [sum(_holds(cluster, node, ref) for ref, _ in records) for node in cluster.nodes]
    assert sum(shares) == len(records)
    assert min(shares) > 0


def _holds(cluster: RedisCluster, node: RedisServer, ref: BlockRef) -> bool:
    slot = key_slot(ref.key.encode())
    return ref.key in cluster.ask(node, "GETKEYSINSLOT", slot, 100)


def test_records_are_found_while_their_slots_move_and_after(store: RedisKVStore, cluster: RedisCluster) -> None:
    # Given a prompt's records, and a slot of which some are, on its way
    before, meanwhile = _records(f"before-{id(store)}"), _records(f"meanwhile-{id(store)}")
    _put(store, before)
    slot = key_slot(before[0][0].key.encode())
    source = next(node for node in cluster.nodes if _holds(cluster, node, before[0][0]))
    target = next(node for node in cluster.nodes if node is not source)
    cluster.begin_move(slot, source, target)
    cluster.move_keys(slot, source, target)

    # Then they are found, and others are put
    _assert_there(store, before)
    _put(store, meanwhile)
    _assert_there(store, meanwhile)

    # and so they are when the slot has gone, be it from where this process thinks that it is
    cluster.move_keys(slot, source, target)
    cluster.end_move(slot, target)
    _assert_there(store, before)
    _put(store, before)
    _assert_there(store, [*before, *meanwhile])
    store.delete([ref for ref, _ in before])
    assert len(store.find_missing([ref for ref, _ in before])) == len(before)


def test_slots_move_under_load_and_nothing_is_lost(cluster: RedisCluster) -> None:
    first = _records("under-load")
    source, target = cluster.nodes[:2]
    ended = threading.Event()

    def reshard() -> None:
        for slot in {key_slot(ref.key.encode()) for ref, _ in first if _holds(cluster, source, ref)}:
            cluster.begin_move(slot, source, target)
            cluster.move_keys(slot, source, target)
            cluster.move_keys(slot, source, target)
            cluster.end_move(slot, target)
        ended.set()

    with closing(RedisKVStore(cluster.url)) as store, closing(RedisKVStore(cluster.url)) as reader:
        _put(store, first)
        resharding = threading.Thread(target=reshard)
        resharding.start()
        rounds = 0
        while not ended.is_set() or rounds < 3:
            records = _records(f"load-{rounds}")
            _put(store, records)
            _assert_there(reader, [*first, *records])
            store.delete([ref for ref, _ in records])
            rounds += 1
        resharding.join()


def test_a_full_primary_is_what_counts(cluster: RedisCluster) -> None:
    with closing(RedisKVStore(cluster.url)) as store:
        try:
            cluster.configure(cluster.nodes[1], "maxmemory", 1)
            assert store.usage().max_bytes == 3
            assert store.usage().used_bytes > 3 * 500_000
            with pytest.raises(StoreUnavailable, match=f"the store at {HOST}:.* is full"):
                _put(store, _records("full"))
        finally:
            cluster.configure(cluster.nodes[1], "maxmemory", 0)
        _put(store, _records("full"))


@pytest.mark.parametrize(
    "how",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.system)],
)
def test_a_primarys_replica_takes_over(replicated: RedisCluster, how: signal.Signals) -> None:
    # Given stores that have worked
    records = _records("replica")
    with closing(connect(replicated.url)) as stores:
        _put(stores.kv, records)
        _assert_there(stores.kv, records)
        wait_until(lambda: _replicated(replicated), "the replicas have it all")
        lost = replicated.nodes[1]
        pid = lost.pid

        # When a primary goes
        os.kill(pid, how)

        # Then all goes on, with what the replica has
        wait_until(lambda: _works(stores, records), "the replica has taken over", 20, poll_s=0.1)
        _assert_there(stores.kv, records)
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            replicated.wait_until_whole()
            assert _works(stores, records)


def _replicated(cluster: RedisCluster) -> bool:
    counts = [_keys(node) for node in cluster.nodes]
    return counts[:3] == counts[3:]


def _keys(node: RedisServer) -> int:
    with closing(RedisKVStore(node.url)._client) as client:
        return int(client.dbsize())


def _works(stores: Stores, records: list[tuple[BlockRef, Block]]) -> bool:
    try:
        _put(stores.kv, records)
        stores.kv.get("tiny-qwen3-0123abcd", LAYOUT, [ref for ref, _ in records])
        stores.cluster_state.finish("me", [("job", 1, b"answer")])
        return all(stores.cluster_state.claim(f"job-{number}", 1, "me", 5) for number in range(12))
    except StoreUnavailable:
        return False


def test_without_a_replica_what_lay_there_is_away_and_then_lost() -> None:
    with RedisCluster() as cluster, closing(connect(cluster.url)) as stores:
        records = _records("lost")
        _put(stores.kv, records)
        lost = cluster.nodes[2]
        lost.kill()
        with pytest.raises(StoreUnavailable) as refused:
            stores.kv.get("tiny-qwen3-0123abcd", LAYOUT, [ref for ref, _ in records])
        assert cluster.nodes[0].password not in str(refused.value)

        # Records of the other two are as good as before
        there = [pair for pair in records if any(_holds(cluster, node, pair[0]) for node in cluster.nodes[:2])]
        assert 0 < len(there) < len(records)
        _assert_there(stores.kv, there)

        lost.start()
        cluster.wait_until_whole()
        wait_until(lambda: _works(stores, records), "it works again", 10)


def test_a_store_that_was_opened_while_slots_were_nobodys_learns_whose_they_are(
    store: RedisKVStore, cluster: RedisCluster
) -> None:
    # Given slots of a primary that nobody serves, and a store that is opened meanwhile
    records = _records(f"nobody's-{id(store)}")
    _put(store, records)
    slot = key_slot(records[0][0].key.encode())
    holder = next(node for node in cluster.nodes if _holds(cluster, node, records[0][0]))
    for node in cluster.nodes:
        cluster.ask(node, "DELSLOTS", slot)
    try:
        with closing(RedisKVStore(cluster.url, bulk=isinstance(store.transport, ClusterBulk))) as late:
            with pytest.raises(StoreUnavailable, match=r"no node of the store at .* serves a slot that is needed"):
                _put(late, records)

            # When they are somebody's again
            cluster.ask(holder, "ADDSLOTS", slot)

            # Then it finds them
            wait_until(lambda: _served(late, records), "it knows whose the slot is", 10)
    finally:
        cluster.wait_until_whole()


def _served(store: KVStore, records: list[tuple[BlockRef, Block]]) -> bool:
    try:
        return _put(store, records) > 0
    except StoreUnavailable:
        return False


def test_a_url_says_whether_it_is_a_cluster(cluster: RedisCluster, store_url: str) -> None:
    with pytest.raises(ConfigError, match=r"is a node of a Redis Cluster: begin its URL with redis\+cluster://"):
        connect(cluster.nodes[0].url)
    with pytest.raises(ConfigError, match="is not a Redis Cluster: begin its URL with redis://"):
        connect(store_url.replace("redis://", "redis+cluster://"))
    with pytest.raises(StoreUnavailable, match=f"the store at {HOST}:.*, {HOST}:.* can't be reached: .*refused"):
        connect(f"redis+cluster://{HOST}:{free_port()},{HOST}:{free_port()}")
    with pytest.raises(StoreUnavailable, match="refused the login"):
        connect(cluster.url.replace(cluster.nodes[0].password, "wrong"))


def test_one_address_is_enough_to_find_the_others(cluster: RedisCluster) -> None:
    only = cluster.nodes[1].url.replace("redis://", "redis+cluster://")
    with closing(RedisKVStore(only)) as store:
        records = _records("one address")
        _put(store, records)
        _assert_there(store, records)


def test_the_roles_rights_are_enough_on_a_cluster(cluster: RedisCluster) -> None:
    """The rights of docs/reference/rights.md, on every node; a login of a role does what it does on one Redis."""
    for node in cluster.nodes:
        with closing(redis.Redis.from_url(node.url)) as client:
            client.execute_command("ACL LOG", "RESET")
            client.execute_command("SCRIPT FLUSH")
            for role, rules in STORE_RULES.items():
                words = re.findall(r"\([^)]*\)|\S+", rules)
                client.execute_command("ACL SETUSER", role, "reset", "on", ">secret", *words)
    host = cluster.url.rpartition("@")[2]
    with (
        closing(connect(f"redis+cluster://prefill:secret@{host}")) as prefill,
        closing(connect(f"redis+cluster://decode:secret@{host}")) as decode,
        closing(connect(f"redis+cluster://producer:secret@{host}")) as producer,
    ):
        records = _records("rights")
        _put(prefill.kv, records)
        _assert_there(decode.kv, records)
        assert prefill.kv.usage().used_bytes > 0
        prefill.kv.free_shared(1)
        assert prefill.cluster_state.reserve("me", 10, 1 << 30, 30)
        assert prefill.cluster_state.claim("prefix-1", 0, "me", 5)
        prefill.cluster_state.release("prefix-1", 0, "me")
        prefill.cluster_state.put_sketch("5e7c", b"numbers")
        assert decode.cluster_state.take_up("me", [("a", 1), ("b", 1)], 5) == [(None, True), (None, True)]
        decode.cluster_state.finish("me", [("a", 1, b"an answer"), ("b", 1, b"another")])
        assert decode.cluster_state.take_up("me", [("a", 1)], 5) == [(b"an answer", False)]
        decode.cluster_state.note_answer("c", 1, 0, b"one of several")
        assert decode.cluster_state.noted_answers("c", 1) == {0: b"one of several"}
        assert decode.cluster_state.count_crashes("decode", "a", 1, 1) == 1
        decode.kv.delete([ref for ref, _ in records])
        producer.cluster_state.cancel("batch")
        assert decode.cluster_state.is_cancelled("batch")
        assert abs(producer.cluster_state.now() - time.time()) < 5
        assert producer.cluster_state.registrations() == []
        assert producer.cluster_state.reserved_bytes() == 10
        prefill.cluster_state.unreserve("me")
        with pytest.raises(StoreUnavailable, match="refused a command"):
            _put(decode.kv, records)
    for node in cluster.nodes:
        with closing(redis.Redis.from_url(node.url)) as client:
            assert {(entry["username"], entry["object"][:3]) for entry in client.acl_log()} <= {("decode", "kv:")}
