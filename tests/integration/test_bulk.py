"""The bulk path against servers that break off, mix up, stall or vanish: a typed error, and the next reply is right."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from kvstore.blocks import BlockRef
from kvstore.connect import connect
from kvstore.redis.store import RedisKVStore
from messages.errors import KvasirError, KVTransferFailed, StoreUnavailable
from messages.kv import Block, KVLayout
from tests.support.kv_samples import FINGERPRINT, raised_by, records_of, refs_of, same_bits
from tests.support.servers import HOST, RedisServer, free_port
from tests.support.waiting import wait_until

LAYOUT = KVLayout(8, 8, 64, "f16")  # blocks of 512 KiB
REFS = refs_of(LAYOUT, 20 * 32)
RECORDS = records_of(LAYOUT, REFS)
TIMEOUT_S = 0.5

Disturb = Callable[[bytes], bytes | None]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def _put(store: RedisKVStore) -> None:
    store.put(FINGERPRINT, LAYOUT, RECORDS)


def _get(store: RedisKVStore) -> list[Block]:
    return store.get(FINGERPRINT, LAYOUT, REFS)


def _right(blocks: list[Block]) -> bool:
    return all(same_bits(block.data, put.data) for block, (_, put) in zip(blocks, RECORDS, strict=True))


class Relay:
    """Between clients and a Redis. The replies on its first connection are disturbed from some byte on."""

    def __init__(self, server: RedisServer, first: int, disturb: Disturb) -> None:
        self._server, self._first, self._disturb = server, first, disturb
        self._listener = socket.create_server((HOST, 0))
        self._links: list[socket.socket] = []
        self.connections = 0
        self.url = f"redis://:{server.password}@{HOST}:{self._listener.getsockname()[1]}/0"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                upstream = socket.create_connection((HOST, self._server.port))
                self._links += [client, upstream]
                first = self._first if self.connections == 1 else None
                for ends in ((client, upstream, None), (upstream, client, first)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, first: int | None) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen += len(data)
                passed = data if first is None or seen < first else self._disturb(data)
                if passed is None:
                    break
                target.sendall(passed)
        for link in (source, target):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for link in [*self._links, self._listener]:
            link.close()


DISTURBANCES: dict[str, Disturb] = {
    "falls silent": lambda data: b"",
    "hangs up": lambda data: None,
    "sends garbage": lambda data: bytes(len(data)),
    "loses bytes": lambda data: data[1:],
    "reports an error": lambda data: b"-ERR in the middle\r\n" + data,
}
IN_THE_MIDDLE = 3_000_000  # bytes into the replies: in the sixth block
AFTER_LOGIN = 6


@pytest.mark.parametrize("kind", [*DISTURBANCES])
def test_a_get_that_is_disturbed_fails_and_the_next_one_is_right(server: RedisServer, kind: str) -> None:
    with Relay(server, IN_THE_MIDDLE, DISTURBANCES[kind]) as relay:
        _put(direct := RedisKVStore(server.url))
        store = RedisKVStore(relay.url, TIMEOUT_S)

        assert raised_by(lambda: _get(store), KvasirError)

        assert _right(_get(store))
        assert relay.connections == 2, "the first connection was used again"
        direct.close()
        store.close()


@pytest.mark.parametrize("kind", [*DISTURBANCES])
def test_a_put_that_is_disturbed_fails_and_the_next_one_is_right(server: RedisServer, kind: str) -> None:
    with Relay(server, AFTER_LOGIN, DISTURBANCES[kind]) as relay:
        store = RedisKVStore(relay.url, TIMEOUT_S)

        assert raised_by(lambda: _put(store), StoreUnavailable)

        _put(store)
        assert _right(_get(store))
        store.close()


@pytest.mark.parametrize("kind", [*DISTURBANCES])
def test_a_look_that_is_disturbed_fails_and_the_next_one_is_right(server: RedisServer, kind: str) -> None:
    absent = refs_of(LAYOUT, 20 * 32, fingerprint="another")
    refs = [ref for pair in zip(REFS, absent, strict=True) for ref in pair]
    with Relay(server, AFTER_LOGIN, DISTURBANCES[kind]) as relay:
        _put(direct := RedisKVStore(server.url))
        store = RedisKVStore(relay.url, TIMEOUT_S)

        assert raised_by(lambda: store.find_missing(refs), StoreUnavailable)

        assert store.find_missing(refs) == absent == direct.find_missing(refs)
        direct.close()
        store.close()


def test_hundreds_of_records_are_looked_for_at_once(server: RedisServer) -> None:
    refs = refs_of(LAYOUT, 700 * 32)
    store = RedisKVStore(server.url)
    store.put(FINGERPRINT, LAYOUT, records_of(LAYOUT, refs[:1]))

    assert store.find_missing(refs) == refs[1:]
    assert store.find_missing([]) == []
    store.close()


def test_an_answer_to_nothing_is_not_taken_for_the_next_reply(server: RedisServer) -> None:
    all_confirmed = len("+OK\r\n") * (1 + len(REFS))
    with Relay(server, all_confirmed, lambda data: data + b"$-1\r\n") as relay:
        store = RedisKVStore(relay.url, TIMEOUT_S)
        _put(store)

        assert _right(_get(store))
        assert relay.connections == 2
        store.close()


def test_a_get_given_up_halfway_leaves_no_replies_to_the_next(server: RedisServer) -> None:
    store = RedisKVStore(server.url)
    _put(store)
    store.delete(REFS[:1])

    assert "is not in the store" in raised_by(lambda: _get(store), KVTransferFailed)  # with others' values on their way

    assert len(store.get(FINGERPRINT, LAYOUT, REFS[1:])) == len(REFS) - 1
    store.close()


def test_blocks_in_use_are_never_written_to_by_later_gets(server: RedisServer) -> None:
    store = RedisKVStore(server.url)
    _put(store)
    kept = _get(store)[7]

    for _ in range(5):
        assert _right(_get(store))

    assert same_bits(kept.data, RECORDS[7][1].data)
    store.close()


def test_a_redis_killed_in_the_middle_of_a_get_is_reported(server: RedisServer) -> None:
    def kill(data: bytes) -> bytes:
        server.kill()
        return data

    with Relay(server, IN_THE_MIDDLE, kill) as relay:
        _put(direct := RedisKVStore(server.url))
        store = RedisKVStore(relay.url, TIMEOUT_S)

        assert raised_by(lambda: _get(store), StoreUnavailable)
        direct.close()
        store.close()


def test_a_redis_flushed_in_the_middle_of_a_put_or_a_get_is_a_miss(server: RedisServer) -> None:
    store, client = RedisKVStore(server.url), redis.Redis.from_url(server.url)

    def records() -> Iterator[tuple[BlockRef, Block]]:
        yield from RECORDS[:15]
        wait_until(lambda: client.exists(REFS[0].key), "the first block is stored")
        client.flushall()
        yield from RECORDS[15:]

    store.put(FINGERPRINT, LAYOUT, records())

    assert store.find_missing(REFS)[0] == REFS[0]
    assert "is not in the store" in raised_by(lambda: _get(store), KVTransferFailed)
    client.close()
    store.close()


def test_an_ipv6_address_is_as_good_as_another() -> None:
    with RedisServer(options=[f"bind {HOST} ::1"]) as server:
        stores = connect(f"redis://:{server.password}@[::1]:{server.port}/5")
        stores.kv.put(FINGERPRINT, LAYOUT, RECORDS)

        assert _right(stores.kv.get(FINGERPRINT, LAYOUT, REFS))
        stores.close()


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=kvasir-test", "-addext", f"subjectAltName=IP:{HOST}", "-days", "2"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*new, *subject, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return key, certificate


def test_tls_goes_through_redis_py_and_checks_the_certificate(tmp_path: Path) -> None:
    key, certificate = _certificate(tmp_path)
    port = free_port()
    files = [f"tls-cert-file {certificate}", f"tls-key-file {key}", f"tls-ca-cert-file {certificate}"]
    with RedisServer(options=[f"tls-port {port}", "tls-auth-clients no", *files]) as server:
        url = f"rediss://:{server.password}@{HOST}:{port}/0"
        stores = connect(f"{url}?ssl_ca_certs={certificate}")
        stores.kv.put(FINGERPRINT, LAYOUT, RECORDS)

        assert _right(stores.kv.get(FINGERPRINT, LAYOUT, REFS))
        assert raised_by(lambda: connect(url), StoreUnavailable), "a certificate that nobody vouches for was accepted"
        stores.close()
