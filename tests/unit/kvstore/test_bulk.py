"""Memory for values, used again when nobody uses it; and how much may be under way on a connection."""

import contextlib
import gc
import socket
import threading
from typing import Self

import numpy as np
import pytest

from kvstore.redis.bulk import (
    ALIGNMENT,
    CHUNK_BYTES,
    GETS_AHEAD,
    IDLE_CHUNKS,
    MAX_AHEAD,
    Arena,
    Bulk,
    ConnectionPool,
    Values,
    bulk_target,
)
from kvstore.redis.links import Links

VALUE_BYTES = (3 << 20) + 352


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_chunk_is_used_again_when_the_last_array_over_it_is_gone() -> None:
    arena = Arena()
    values = Values(arena)
    array = np.frombuffer(values.place(VALUE_BYTES, 5)[352:].toreadonly(), np.uint16).reshape(48, 2, 32, 4, 128)
    address = array.ctypes.data
    del values

    while_alive = _address(arena.chunk(CHUNK_BYTES))
    del array
    gc.collect()

    assert while_alive != address - 352
    assert address - 352 in {_address(kept) for kept in [arena.chunk(CHUNK_BYTES) for _ in range(2)]}


def test_values_of_one_get_never_overlap() -> None:
    values = Values(Arena())
    places = [values.place(VALUE_BYTES, 12 - index) for index in range(12)]

    for index, place in enumerate(places):
        place[:] = bytes([index]) * VALUE_BYTES

    assert all(place == bytes([index]) * VALUE_BYTES for index, place in enumerate(places))


@pytest.mark.parametrize("size", [1, 100, VALUE_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_places_have_the_size_asked_for_and_are_aligned(size: int) -> None:
    values = Values(Arena())
    places = [values.place(size, 3 - index) for index in range(3)]

    assert [len(place) for place in places] == [size] * 3
    assert len({_address(place) % min(16, ALIGNMENT) for place in places}) == 1


def test_no_more_than_some_chunks_are_kept() -> None:
    arena = Arena()
    lent = [arena.chunk(CHUNK_BYTES) for _ in range(IDLE_CHUNKS + 3)]

    del lent
    gc.collect()

    assert len(arena._idle) == IDLE_CHUNKS


def test_prepared_chunks_are_lent_first_and_no_more_than_are_kept() -> None:
    arena = Arena()

    arena.fill()
    arena.fill()

    ready = [np.frombuffer(chunk, np.uint8).ctypes.data for chunk in arena._idle]
    assert len(ready) == IDLE_CHUNKS
    lent = arena.chunk(CHUNK_BYTES)
    assert _address(lent) in ready
    assert len(arena._idle) == IDLE_CHUNKS - 1


def test_a_small_get_takes_no_chunk() -> None:
    arena = Arena()

    Values(arena).place(1000, 8)
    gc.collect()

    assert not arena._idle


def test_threads_are_never_lent_the_same_chunk() -> None:
    arena, held, lock = Arena(), set[int](), threading.Lock()
    twice: list[int] = []

    def use() -> None:
        for _ in range(500):
            chunk = arena.chunk(CHUNK_BYTES)
            address = _address(chunk)
            with lock:
                twice.extend({address} & held)
                held.add(address)
            with lock:
                held.discard(address)
            del chunk

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert not twice
    assert len(arena._idle) <= 4


def test_an_ipv6_address_and_a_socket_path_are_targets() -> None:
    six, path = bulk_target("redis://:p@[::1]:7000/2"), bulk_target("unix://u:p@/run/redis.sock?db=4")

    assert six is not None
    assert (six.host, six.port, six.db, six.password) == ("::1", 7000, 2, "p")
    assert path is not None
    assert (path.path, path.db, path.username) == ("/run/redis.sock", 4, "u")


class SlowRedis:
    """Counts commands; answers only when told, as over a wire with a long round trip."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.url = f"redis://127.0.0.1:{self.address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.connection.close()

    def accept(self) -> None:
        self.connection, _ = self._listener.accept()
        self.connection.settimeout(5)

    def commands(self, name: bytes, count: int) -> bytes:
        """What came, once `count` commands have, and nothing more within a moment."""
        received = b""
        while received.count(name) < count:
            received += self.connection.recv(1 << 20)
        self.connection.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            received += self.connection.recv(1 << 20)
        self.connection.settimeout(5)
        return received


@pytest.mark.parametrize(("size", "expected"), [(16 << 10, MAX_AHEAD), (64 << 10, 128), (3 << 20, GETS_AHEAD)])
def test_as_many_values_are_asked_for_as_fit_into_what_may_be_under_way(size: int, expected: int) -> None:
    counts: list[int] = []

    def serve() -> None:
        server.accept()
        counts.append(server.commands(b"GETEX", GETS_AHEAD).count(b"GETEX"))
        server.connection.sendall(b"$%d\r\n%s\r\n" % (size, bytes(size)))
        counts.append(server.commands(b"GETEX", expected - 1).count(b"GETEX"))

    with SlowRedis() as server:
        values = Bulk(Links(server.url), 5).get([f"key-{number}" for number in range(1000)], 60)
        thread = threading.Thread(target=serve)
        thread.start()
        next(values)
        thread.join(10)
        values.close()

    assert counts == [GETS_AHEAD, expected - 1]  # one of the first is still to come


def test_the_kernel_tunes_the_receive_buffer() -> None:
    with SlowRedis() as server:
        pool = ConnectionPool(Links(server.url), 5)
        with pool.connection() as connection:
            size = connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        server.accept()
        pool.close()
    with SlowRedis() as server, socket.create_connection(server.address) as untouched:
        server.accept()
        expected = untouched.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    assert size == expected
