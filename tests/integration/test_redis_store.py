"""Redis as it is in the field: killed, full, password-protected, behind a Unix socket, half-dead, not Redis at all."""

import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import redis
from redis import exceptions

from kvstore.blocks import block_refs
from kvstore.connect import Stores, connect
from kvstore.memory import MemoryClusterState, MemoryKVStore
from kvstore.redis.bulk import bulk_target
from kvstore.redis.client import errors_mapped, place
from kvstore.redis.forget import forget_named
from kvstore.redis.store import RedisKVStore
from messages.errors import ConfigError, KvasirError, StoreUnavailable
from messages.kv import KVLayout
from tests.support.kv_samples import FINGERPRINT, layout, raised_by, records_of, refs_of, same_bits, tokens
from tests.support.servers import RedisServer, free_port

LAYOUT = layout()
REFS = refs_of(LAYOUT, 75)
RECORDS = records_of(LAYOUT, REFS)
MIB = 1 << 20
REFUSED = exceptions.OutOfMemoryError


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def _works(stores: Stores) -> bool:
    stores.kv.put(FINGERPRINT, LAYOUT, RECORDS)
    got = stores.kv.get(FINGERPRINT, LAYOUT, REFS)
    same = all(same_bits(block.data, put.data) for block, (_, put) in zip(got, RECORDS, strict=True))
    return same and stores.cluster_state.claim("job", 1, "worker", 30)


def test_a_killed_redis_is_reported_and_used_again_when_it_is_back(server: RedisServer) -> None:
    stores = connect(server.url)
    plain = RedisKVStore(server.url, bulk=False)
    assert _works(stores)

    server.kill()
    for action in (
        lambda: stores.kv.put(FINGERPRINT, LAYOUT, RECORDS),
        lambda: stores.kv.get(FINGERPRINT, LAYOUT, REFS),
        lambda: stores.kv.find_missing(REFS),
        lambda: stores.kv.delete(REFS),
        lambda: stores.kv.usage(),
        lambda: plain.put(FINGERPRINT, LAYOUT, RECORDS),
        lambda: plain.get(FINGERPRINT, LAYOUT, REFS),
        lambda: stores.cluster_state.now(),
        lambda: stores.cluster_state.registrations(),
        lambda: stores.cluster_state.claim("job", 1, "worker", 30),
        lambda: stores.cluster_state.finish("worker", [("job", 1, b"body")]),
    ):
        sentence = raised_by(action, StoreUnavailable)
        assert f"127.0.0.1:{server.port}" in sentence
        assert server.password not in sentence

    server.start()
    assert stores.kv.find_missing(REFS) == REFS
    assert _works(stores)
    stores.close()
    plain.close()


def test_connections_that_died_while_idle_are_replaced_unnoticed(server: RedisServer) -> None:
    stores = connect(server.url)
    assert _works(stores)

    server.restart()

    assert _works(stores)
    stores.close()


def test_a_redis_killed_in_the_middle_of_a_put_is_reported(server: RedisServer) -> None:
    store = RedisKVStore(server.url)

    def records() -> Iterator[object]:
        yield RECORDS[0]
        server.kill()
        yield from RECORDS * 100

    with pytest.raises(StoreUnavailable):
        store.put(FINGERPRINT, LAYOUT, records())  # type: ignore[arg-type]
    store.close()


@pytest.mark.parametrize("bulk", [True, False])
def test_a_full_redis_refuses_blocks_with_a_clear_sentence_and_keeps_what_it_has(bulk: bool) -> None:
    lay = KVLayout(8, 8, 64, "f16")
    refs = refs_of(lay, 2048)  # 32 MiB
    with RedisServer(max_memory="16mb") as server:
        store = RedisKVStore(server.url, bulk=bulk)
        store.put(FINGERPRINT, lay, records_of(lay, refs[:2]))

        with pytest.raises(StoreUnavailable, match=r"is full \(Redis reached its maxmemory\)"):
            store.put(FINGERPRINT, lay, records_of(lay, refs[2:]))

        assert len(store.get(FINGERPRINT, lay, refs[:2])) == 2
        usage = store.usage()
        assert usage.max_bytes == 16 * MIB
        assert usage.used_bytes > 14 * MIB
        store.delete(refs)
        store.put(FINGERPRINT, lay, records_of(lay, refs[:2]))
        store.close()


def test_the_cluster_state_works_while_the_store_is_full() -> None:
    with RedisServer(max_memory="32mb") as server:
        stores = connect(server.url)
        client = redis.Redis.from_url(server.url)
        _fill(client)

        stores.cluster_state.finish("worker", [("job", 1, b"body")])
        stores.cluster_state.cancel("batch")

        assert stores.cluster_state.take_up("worker", [("job", 1)], 30) == [(b"body", False)]
        assert stores.cluster_state.is_cancelled("batch")
        assert stores.cluster_state.claim("job", 1, "worker", 30)
        assert not stores.cluster_state.claim("job", 1, "other", 30)
        assert raised_by(partial(client.set, "tiny", b"x", ex=60), REFUSED), "the store was full all the time"
        client.close()
        stores.close()


def test_a_conversations_blocks_are_deleted_by_their_tag_and_nobody_elses(server: RedisServer) -> None:
    stores = connect(server.url)
    kept = {tag: block_refs(FINGERPRINT, LAYOUT, tokens(75), 75, 32, "job", tag=tag) for tag in ("ada", "bob")}
    for refs in kept.values():
        stores.kv.put(FINGERPRINT, LAYOUT, records_of(LAYOUT, refs))

    assert forget_named(server.url, {"ada"}) == 1  # of 75 tokens 32 are the class's, and 11 no whole block

    assert [ref.end for ref in stores.kv.find_missing(kept["ada"])] == [64]
    assert stores.kv.find_missing(kept["bob"]) == []
    stores.close()


def _fill(client: redis.Redis) -> None:
    client.set("fill", bytes(4 * MIB), ex=3600)
    client.config_set("maxmemory", "2mb")  # below what is in use: not even a tiny value fits


def test_users_and_database_numbers_of_the_url_count() -> None:
    with RedisServer(options=["user grader on >pa:ss/w@rd ~* &* +@all"]) as server:
        stores = connect(f"redis://grader:pa%3Ass%2Fw%40rd@127.0.0.1:{server.port}/3")

        assert _works(stores)

        third = redis.Redis.from_url(f"redis://:{server.password}@127.0.0.1:{server.port}/3")
        assert third.exists(REFS[0].key)
        assert not redis.Redis.from_url(server.url).exists(REFS[0].key)
        third.close()
        stores.close()


def test_a_unix_socket_is_as_good_as_a_port(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with RedisServer(options=[f"unixsocket {path}"]) as server:
        stores = connect(f"unix://:{server.password}@{path}")

        assert _works(stores)
        stores.close()


def test_memory_needs_no_server_and_is_new_each_time() -> None:
    one, two = connect("memory://"), connect("memory://")

    assert _works(one)

    assert isinstance(one.kv, MemoryKVStore)
    assert isinstance(one.cluster_state, MemoryClusterState)
    assert two.kv.find_missing(REFS) == REFS
    one.close()
    two.close()


def test_an_unreachable_store_is_named_without_its_password() -> None:
    port = free_port()

    sentence = raised_by(lambda: connect(f"redis://:s3cret@127.0.0.1:{port}/0"), StoreUnavailable)

    assert f"127.0.0.1:{port}" in sentence
    assert "s3cret" not in sentence


def test_a_refused_login_says_what_to_check(server: RedisServer) -> None:
    for login in (":wr0ng@", "", "nobody:wr0ng@"):
        url = f"redis://{login}127.0.0.1:{server.port}/0"
        for action in (lambda url=url: connect(url), lambda url=url: RedisKVStore(url).get(FINGERPRINT, LAYOUT, REFS)):
            sentence = raised_by(action, StoreUnavailable)
            assert "refused the login: check user and password" in sentence
            assert "wr0ng" not in sentence


@pytest.mark.parametrize(
    "url",
    [
        "http://h/",
        "amqp://h",
        "",
        "host:6379",
        "redis://:s3/cret@h:6379",
        "redis://h:port",
        "redis://h?socket_timeout=x",
    ],
)
def test_a_url_that_cannot_be_used_is_a_configuration_error_that_tells_no_password(url: str) -> None:
    sentence = raised_by(lambda: connect(url), ConfigError)

    assert "store URL" in sentence
    assert "s3" not in sentence


def test_an_option_that_nobody_knows_is_a_configuration_error(server: RedisServer) -> None:
    assert "has an option" in raised_by(lambda: connect(f"{server.url}?colour=blue"), ConfigError)


def test_urls_that_only_redis_py_can_serve_are_left_to_it() -> None:
    assert bulk_target("redis://:p@h:1/2") is not None
    assert bulk_target("rediss://h") is None
    assert bulk_target("redis://h?socket_timeout=3") is None


def test_a_place_is_named_for_people() -> None:
    assert place("redis://u:p@store.local:7000/1") == "store.local:7000"
    assert place("rediss://store.local") == "store.local:6379"
    assert place("unix://:p@/run/redis.sock") == "/run/redis.sock"


_LIBRARY = {value for value in vars(exceptions).values() if isinstance(value, type) and issubclass(value, Exception)}
# A lock taken across fork(), and a cluster's routing table: redis-py's own bugs, not a state of the store.
_BUGS = {exceptions.ChildDeadlockedError, getattr(exceptions, "IncorrectPolicyType", exceptions.ChildDeadlockedError)}
_NETWORK = {ConnectionResetError, TimeoutError, BlockingIOError, socket.gaierror, OSError}


@pytest.mark.parametrize("kind", sorted((_LIBRARY - _BUGS) | _NETWORK, key=lambda kind: kind.__name__))
def test_every_exception_of_the_library_becomes_ours(kind: type[Exception]) -> None:
    def fail() -> None:
        with errors_mapped("h:1"):
            raise kind.__new__(kind)

    assert "h:1" in raised_by(fail, StoreUnavailable)


class Impostor:
    """A port where something answers every connection with the same bytes, then hangs up or falls silent."""

    def __init__(self, reply: bytes, hang_up: bool) -> None:
        self._reply, self._hang_up = reply, hang_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            link, _ = self._listener.accept()
            self._links.append(link)
            if not link.recv(1):  # `close` says good-bye
                return
            link.sendall(self._reply)
            if self._hang_up:
                link.close()

    def close(self) -> None:
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(10)
        for link in [*self._links, self._listener]:
            link.close()


@pytest.mark.parametrize(
    ("reply", "hang_up"),
    [
        (b"", False),
        (b"", True),
        (b"$100\r\nabc", False),
        (b"$100\r\nabc", True),
        (b"$3\r\nabcdef\r\n", False),
        (b"$-7\r\n", False),
        (b"$99999999999999\r\n", False),
        (b"$ 3\r\nabc\r\n", False),
        (b"+OK\r\n", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True),
        (b"-LOADING Redis is loading\r\n", False),
        (b"-WRONGTYPE a list\r\n", False),
        (b"-\xff\r\n", False),
        (b"x" * 10_000, False),
    ],
)
@pytest.mark.parametrize("bulk", [True, False])
def test_whatever_answers_the_worst_is_store_unavailable(reply: bytes, hang_up: bool, bulk: bool) -> None:
    impostor = Impostor(reply, hang_up)
    store = RedisKVStore(f"redis://127.0.0.1:{impostor.port}", timeout_s=0.2, bulk=bulk)
    try:
        assert raised_by(lambda: store.get(FINGERPRINT, LAYOUT, REFS), KvasirError)
    finally:
        store.close()
        impostor.close()
