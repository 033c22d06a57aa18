"""Transfers values to and from Redis without copies, over one plain socket with pipelining.

redis-py copies each value into a command, and each reply out of its parser. Here a payload is sent from its own memory
and received into its final place, which is several times faster (RESP2 protocol:
redis.io/docs/latest/develop/reference/protocol-spec). After any error, or if it was left in the middle of a reply, a
connection is closed and never reused.
"""

import contextlib
import mmap
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from redis import exceptions
from redis.connection import parse_url

from kvstore.redis.client import CONNECT_TIMEOUT_S
from kvstore.redis.links import GLANCE_S, Links, greet

LINE_BYTES = 4096
MAX_VALUE_BYTES = 512 << 20  # Redis's own limit

# Maximum number of bytes in flight on a connection. It is enough for 400 MB/s at a round trip of 20 ms, but so small
# that a full store is noticed soon. The limit counts bytes and not values, because a fixed number of small blocks would
# leave the connection idle.
IN_FLIGHT_BYTES = 8 << 20
MAX_AHEAD = 512
SETS_AHEAD = 4  # minimum number of SETs in flight

# Values are received into chunks of memory of this size, which is a multiple of any huge page size. The chunks are
# small, because one kept block keeps its whole chunk in memory.
#
# Allocating memory takes as much time as the transfer itself. So up to IDLE_CHUNKS chunks are kept for the next `get`,
# and `prepare` allocates them before the first `get`.
CHUNK_BYTES = 16 << 20
IDLE_CHUNKS = 16
ALIGNMENT = 64
RENEWALS_AHEAD = 256
GETS_AHEAD = 2  # minimum number of GETs in flight, so that the server sends the next value while one is checked here

Item = tuple[str, bytes, memoryview]  # key, and the two parts of its value
Node = tuple[str, int]  # host and port of a server in a cluster

_YES, _NO = b":1\r\n", b":0\r\n"


class RedirectError(exceptions.ResponseError):
    """A node of a cluster says that a key is on another node, or will be."""


_ERRORS: dict[str, type[exceptions.RedisError]] = {
    "OOM": exceptions.OutOfMemoryError,
    "NOAUTH": exceptions.AuthenticationError,
    "WRONGPASS": exceptions.AuthenticationError,
    "NOPERM": exceptions.NoPermissionError,
    "LOADING": exceptions.BusyLoadingError,
    "READONLY": exceptions.ReadOnlyError,
    "MOVED": RedirectError,
    "ASK": RedirectError,
    "TRYAGAIN": RedirectError,
}


@dataclass(frozen=True, slots=True)
class BulkTarget:
    """A Redis that is reached over TCP, or over a Unix socket if `path` is set."""

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    username: str = ""
    password: str = ""
    db: int = 0


def bulk_target(url: str) -> BulkTarget | None:
    """Return the target that `url` names, or None if only redis-py can reach it: for TLS, and for URLs with options."""
    options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    options.pop("connection_class", None)
    if url.startswith("rediss:") or not set(options) <= {"host", "port", "path", "username", "password", "db"}:
        return None
    return BulkTarget(**options)


class Bulk:
    """A `Transport` over plain sockets. It keeps idle connections, which any thread may use."""

    _client: Any = None  # redis-py's client, only for a cluster; it finds keys that have moved to another node

    def __init__(self, links: Links, timeout_s: float) -> None:
        self._pool = ConnectionPool(links, timeout_s)
        self._arena = Arena()

    def put(self, items: Iterable[Item], ttl_s: int) -> int:
        """Set each key to the joined parts of its value, with a TTL. Returns the bytes stored."""
        total = 0
        with self._open_pipelines() as pipelines:
            for item in items:
                pipeline = pipelines[self._node(item[0])]
                total += pipeline.send_set(item, ttl_s)
                while pipeline.is_full:
                    self._end_set(pipeline, ttl_s)
            for pipeline in pipelines.values():
                while pipeline.pending_items:
                    self._end_set(pipeline, ttl_s)
        return total

    def get(self, keys: Sequence[str], ttl_s: int) -> Generator[bytes | memoryview | None]:
        """Yield the value of each key, in order, or None. TTLs are renewed."""
        values = Values(self._arena)
        with self._open_pipelines() as pipelines:
            by_key = [pipelines[self._node(key)] for key in keys]
            for key, pipeline in zip(keys, by_key, strict=True):
                pipeline.keys.append(key)
            for pipeline in pipelines.values():
                pipeline.ask(ttl_s)
            for index, (key, pipeline) in enumerate(zip(keys, by_key, strict=True)):
                value: bytes | memoryview | None
                try:
                    value = pipeline.read_value(values, len(keys) - index)
                except RedirectError:
                    if self._client is None:
                        raise
                    value = self._client.getex(key, ex=ttl_s)
                pipeline.ask(ttl_s)
                yield value

    def renew(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """Renew the TTL of each key, and return for each whether it exists."""
        is_stored: dict[str, bool] = {}
        with self._open_pipelines() as pipelines:
            for key in keys:
                pipelines[self._node(key)].keys.append(key)
            while any(pipeline.keys for pipeline in pipelines.values()):
                requests = [(pipeline, pipeline.ask_to_renew(ttl_s)) for pipeline in pipelines.values()]
                for pipeline, asked_keys in requests:
                    is_stored.update(zip(asked_keys, pipeline.connection.read_flags(len(asked_keys)), strict=True))
        return [is_stored[key] for key in keys]

    def prepare(self) -> None:
        """Allocate IDLE_CHUNKS chunks of memory for the first `get`, and return when they are ready."""
        self._arena.fill()

    def close(self) -> None:
        """Close idle connections."""
        self._pool.close()

    def _node(self, key: str) -> Node:
        """The server that holds `key`. Here there is only one."""
        return "", 0

    def _pool_of(self, node: Node) -> "ConnectionPool":
        return self._pool

    @contextlib.contextmanager
    def _open_pipelines(self) -> "Iterator[NodePipelines]":
        """The pipelines of one call. Each node's pipeline is opened when it is first needed."""
        with contextlib.ExitStack() as stack:
            yield NodePipelines(lambda node: stack.enter_context(self._pool_of(node).connection()))

    def _end_set(self, pipeline: "Pipeline", ttl_s: int) -> None:
        key, prefix, payload = pipeline.pending_items[0]
        try:
            pipeline.end_set()
        except RedirectError:
            if self._client is None:
                raise
            self._client.set(key, b"".join((prefix, payload)), ex=ttl_s)


class ConnectionPool:
    """Connections to one Redis. It keeps idle connections, which any thread may use."""

    def __init__(self, links: Links, timeout_s: float) -> None:
        self._links = links
        self._timeout_s = links.timeout_s(timeout_s)
        self._lock = threading.Lock()
        self._idle: list[BulkConnection] = []

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def connection(self) -> "Iterator[BulkConnection]":
        """A connection for exclusive use. It is closed after a failure, and kept otherwise."""
        connection = self._take_idle() or self._links.first(self._open)
        try:
            yield connection
        except BaseException:  # a reader that stops early raises GeneratorExit here, with replies still outstanding
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def _open(self, index: int) -> "BulkConnection":
        target = bulk_target(self._links.urls[index])
        # `RedisKVStore` uses this class only if the first address has a target, and all addresses of a URL have the
        # same options.
        assert target is not None
        return BulkConnection(target, self._timeout_s, index, self._links.has_choice)

    def _take_idle(self) -> "BulkConnection | None":
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.index == self._links.current and connection.is_quiet():
                return connection
            connection.close()


def command(*words: str) -> bytes:
    """Return a command in Redis's protocol."""
    arguments = [word.encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in arguments)


class BulkConnection:
    """One socket, logged in.

    Methods raise redis-py's errors or OSError. Only after RedirectError can it still be used.
    """

    def __init__(self, target: BulkTarget, timeout_s: float, index: int, glance: bool) -> None:
        self.index = index
        self._socket = _connect(target, timeout_s, glance)
        try:
            if target.password:
                self.send(command("AUTH", *([target.username] if target.username else []), target.password))
                self.read_ok()
            if target.db:
                self.send(command("SELECT", str(target.db)))
                self.read_ok()
        except BaseException:
            self.close()
            raise

    def is_quiet(self) -> bool:
        """Whether nothing has arrived since the last reply.

        On a closed connection, the end of the stream has arrived.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def send(self, *commands: bytes) -> None:
        """Send commands, without reading replies."""
        self._socket.sendall(b"".join(commands))

    def send_set(self, key: str, prefix: bytes, payload: memoryview, ttl_s: int) -> None:
        """Send a SET whose value is `prefix` and `payload` joined.

        This is usually a single system call: with several threads, each call costs a wait for the interpreter lock.
        """
        name, ttl = key.encode(), b"%d" % ttl_s
        size = len(prefix) + len(payload)
        head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (len(name), name, size, prefix)
        tail = b"\r\n$2\r\nEX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl)
        buffers = [memoryview(head), payload, memoryview(tail)]
        while buffers:
            sent_bytes = self._socket.sendmsg(buffers)
            while buffers and sent_bytes >= len(buffers[0]):
                sent_bytes -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][sent_bytes:]

    def read_ok(self) -> None:
        """Read a reply that must be +OK."""
        if (line := self._line()) != b"+OK":
            raise exceptions.InvalidResponse(f"unexpected reply {line[:40]!r}")

    def read_flags(self, count: int) -> list[bool]:
        """Read `count` replies that are :0 or :1, in one system call."""
        replies = bytearray(count * len(_YES))
        # Even if some replies are errors, enough bytes arrive, because an error reply is longer than a flag.
        self._fill(memoryview(replies))
        flags = [bytes(replies[at : at + len(_YES)]) for at in range(0, len(replies), len(_YES))]
        if not {*flags} <= {_YES, _NO}:
            _, error, rest = bytes(replies).partition(b"-")
            line, end, _ = rest.partition(b"\r\n")
            raise exceptions.InvalidResponse(f"unexpected reply {self._line(error + line + end)[:40]!r}")
        return [flag == _YES for flag in flags]

    def read_value(self, values: "Values", values_left: int) -> memoryview | None:
        """Read a reply that is a value, or None if the key doesn't exist.

        `values_left` counts this value and those to come.
        """
        line = self._line()
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or int(line[1:]) > MAX_VALUE_BYTES:
            raise exceptions.InvalidResponse(f"unexpected reply {line[:40]!r}")
        size = int(line[1:])
        value = values.place(size + 2, values_left)  # including the line end
        self._fill(value)
        if bytes(value[size:]) != b"\r\n":
            raise exceptions.InvalidResponse("a value from the store is longer than announced")
        return value[:size]

    def _line(self, beginning: bytes = b"") -> bytes:
        """Read one line of a reply and no byte beyond it: the value after it goes directly into aligned memory."""
        line = beginning
        while not line.endswith(b"\r\n"):
            peeked_bytes = self._socket.recv(LINE_BYTES, socket.MSG_PEEK)
            if not peeked_bytes or len(line) > LINE_BYTES:
                raise exceptions.ConnectionError("the store closed the connection")
            line += self._socket.recv(peeked_bytes.find(b"\n") + 1 or len(peeked_bytes))
        if line[:1] == b"-":
            code = line[1:].split(b" ", 1)[0].decode("ascii", "replace")
            raise _ERRORS.get(code, exceptions.ResponseError)(line[1:].decode("utf-8", "replace"))
        return line[:-2]

    def _fill(self, value: memoryview) -> None:
        filled_bytes = 0
        while filled_bytes < len(value):
            received_bytes = self._socket.recv_into(value[filled_bytes:], 0, socket.MSG_WAITALL)
            if not received_bytes:
                raise exceptions.ConnectionError("the store closed the connection in the middle of a value")
            filled_bytes += received_bytes

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@dataclass(slots=True)
class Pipeline:
    """The values that are in flight on one connection during one call."""

    connection: BulkConnection
    keys: deque[str] = field(default_factory=deque)  # not yet requested
    pending_items: deque[Item] = field(default_factory=deque)  # sent but not yet confirmed
    _pending_gets: int = 0
    _largest_bytes: int = 0  # size of the largest value so far

    def send_set(self, item: Item, ttl_s: int) -> int:
        """Send a SET, and return the size of its value in bytes."""
        key, prefix, payload = item
        self.connection.send_set(key, prefix, payload, ttl_s)
        self.pending_items.append(item)
        size = len(prefix) + len(payload)
        self._largest_bytes = max(self._largest_bytes, size)
        return size

    @property
    def is_full(self) -> bool:
        """Whether a confirmation must be read before the next SET."""
        return len(self.pending_items) > self._values_ahead(SETS_AHEAD)

    def end_set(self) -> None:
        """Wait until the oldest item is confirmed. After RedirectError it is no longer pending, but was not stored."""
        self.pending_items.popleft()
        self.connection.read_ok()

    def ask(self, ttl_s: int) -> None:
        """Request more values once half of the allowed number has arrived.

        Requesting many at once saves system calls.
        """
        ahead = self._values_ahead(GETS_AHEAD)
        if self._pending_gets <= ahead // 2 and self.keys:
            keys = [self.keys.popleft() for _ in range(min(len(self.keys), ahead - self._pending_gets))]
            self.connection.send(*(command("GETEX", key, "EX", str(ttl_s)) for key in keys))
            self._pending_gets += len(keys)

    def read_value(self, values: "Values", values_left: int) -> memoryview | None:
        """See `BulkConnection`."""
        self._pending_gets -= 1
        value = self.connection.read_value(values, values_left)
        self._largest_bytes = max(self._largest_bytes, len(value or b""))
        return value

    def ask_to_renew(self, ttl_s: int) -> list[str]:
        """Send EXPIRE for some of the remaining keys, and return those keys."""
        keys = [self.keys.popleft() for _ in range(min(len(self.keys), RENEWALS_AHEAD))]
        self.connection.send(*(command("EXPIRE", key, str(ttl_s)) for key in keys))
        return keys

    def _values_ahead(self, at_least: int) -> int:
        fitting = IN_FLIGHT_BYTES // self._largest_bytes if self._largest_bytes else 0
        return max(at_least, min(fitting, MAX_AHEAD))


class NodePipelines(dict[Node, Pipeline]):
    """The pipelines of one call, by node. A node's pipeline is opened when it is first needed."""

    def __init__(self, connect: Callable[[Node], BulkConnection]) -> None:
        super().__init__()
        self._connect = connect

    def __missing__(self, node: Node) -> Pipeline:
        self[node] = Pipeline(self._connect(node))
        return self[node]


class Arena:
    """Chunks of memory for values. A chunk is used again, without page faults, as soon as no block in it is alive."""

    def __init__(self) -> None:
        # Finalizers append to this deque, from any thread and at any moment. A structure with a lock could deadlock,
        # because a finalizer can interrupt the code that has the lock.
        self._idle: deque[mmap.mmap] = deque(maxlen=IDLE_CHUNKS)

    def chunk(self, size: int) -> memoryview:
        """Return at least `size` bytes."""
        if not CHUNK_BYTES // 2 <= size <= CHUNK_BYTES:
            return np.empty(size, np.uint8).data  # unlike a bytearray, this is not filled with zeros
        try:
            chunk = self._idle.pop()
        except IndexError:
            chunk = _fresh_chunk()
        # The chunk becomes idle when this array, all views of it, and all arrays over these views are gone.
        array = np.frombuffer(chunk, np.uint8)
        weakref.finalize(array, self._idle.append, chunk).atexit = False
        return array.data

    def fill(self) -> None:
        """Allocate as many chunks as are kept, and touch their pages."""
        for _ in range(IDLE_CHUNKS - len(self._idle)):
            chunk = _fresh_chunk()
            np.frombuffer(chunk, np.uint8)[:: mmap.PAGESIZE] = 0
            self._idle.append(chunk)


def _fresh_chunk() -> mmap.mmap:
    chunk = mmap.mmap(-1, CHUNK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc would not align the memory
    with contextlib.suppress(AttributeError, OSError):  # for systems without huge pages
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


class Values:
    """Provides memory for the values of one `get`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = memoryview(b"")

    def place(self, size: int, values_left: int) -> memoryview:
        """Return `size` aligned bytes. `values_left`, which counts this value too, limits how much is allocated."""
        step = -(-size // ALIGNMENT) * ALIGNMENT
        if step > len(self._free):
            self._free = self._arena.chunk(max(step, min(CHUNK_BYTES, step * values_left)))
        view, self._free = self._free[:size], self._free[step:]
        return view


def _connect(target: BulkTarget, timeout_s: float, glance: bool) -> socket.socket:
    """Return a socket. With `glance`, which is for one of several addresses, the server must answer at once."""
    if target.path:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(target.path)
    else:
        link = socket.create_connection((target.host, target.port), GLANCE_S if glance else CONNECT_TIMEOUT_S)
        link = greet(link) if glance else link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # SO_RCVBUF is not set, because setting it turns off the kernel's autotuning, which can grow the buffer beyond
    # net.core.rmem_max. A buffer of that size (208 KiB on a stock Linux kernel) would give only a tenth of the possible
    # rate at a round trip of 20 ms.
    #
    # The kernel's time-outs are used, because Python's time-outs would make the socket non-blocking, and MSG_WAITALL
    # would then have no effect.
    link.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return link
