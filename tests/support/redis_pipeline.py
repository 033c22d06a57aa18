"""The pipeline of the tests over a real Redis, and what makes that Redis fail in the middle of something.

with RedisServer(max_memory="24mb") as server, RedisPipeline(server.url) as pipeline:
    pipeline.start(WEIGHTS)
    results = pipeline.run_all(jobs)
"""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import redis

from kvstore.blocks import BlockRef
from kvstore.cluster_state import BestEffortClusterState
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore
from messages.jobs import JobResult, PrefillJob
from messages.kv import Block, KVLayout, Record
from producers.client import Client
from tests.support.pipeline import MODEL, Pipeline, SupervisedWorker, WatchedEngine
from tests.support.waiting import wait_until

# 4 KiB of KV a token.
WEIGHTS = "sim:scale=0,answer=8,layers=8,kv_heads=4,head_dim=32"


class RedisPipeline(Pipeline):
    """Workers as threads and an in-process broker, over the Redis at `store_url`."""

    def __init__(self, store_url: str, kv: Any = None, unseen_copies: bool = False) -> None:
        super().__init__(unseen_copies=unseen_copies)
        self.kv = kv or RedisKVStore(store_url)
        self.cluster_state = BestEffortClusterState(RedisClusterState(store_url))
        self.client = Client(self.broker, self.cluster_state, [MODEL], self.observe)
        self.redis = redis.Redis.from_url(store_url, retry=None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            super().__exit__(kind, error, tb)
        finally:
            self.kv.close()
            self.cluster_state.close()
            self.redis.close()

    def start_decode(
        self, engine: WatchedEngine | None = None, why_no_kv: str = "", kv: Any = None
    ) -> SupervisedWorker:
        """A decode worker, its registration up; `kv`: a store of its own, which the caller closes."""
        everybodys, self.kv = self.kv, kv or self.kv
        try:
            return super().start_decode(engine, why_no_kv)
        finally:
            self.kv = everybodys

    def run_all(self, jobs: Sequence[PrefillJob], timeout_s: float = 30.0) -> list[JobResult]:
        """Submit jobs; their results in the same order."""
        self.submit(*jobs)
        return self.all_results(jobs, timeout_s)

    def all_results(self, jobs: Sequence[PrefillJob], timeout_s: float = 30.0) -> list[JobResult]:
        """The result of each job, once all are there."""
        wait_until(lambda: all(map(self.results_so_far, jobs)), f"{len(jobs)} jobs have ended", timeout_s)
        return [self.results_so_far(job)[0] for job in jobs]

    def keys(self, pattern: str = "*") -> list[str]:
        """Keys in Redis."""
        return sorted(key.decode() for key in self.redis.scan_iter(pattern, 1000))

    def own_keys(self) -> list[str]:
        """Keys of records that one job owns."""
        return [key for key in self.keys("kv*") if key.count(":") == 3]

    def shared_keys(self) -> list[str]:
        """Keys of records that a class shares."""
        return [key for key in self.keys("kv*") if key.count(":") == 2]


class InterruptedStore(RedisKVStore):
    """Calls `interrupt` once, when the given number of records was put, or in the middle of the first get."""

    def __init__(self, url: str, interrupt: Callable[[], object], during: str, after_records: int = 1) -> None:
        super().__init__(url, timeout_s=3)
        self._interrupt = interrupt
        self._during = during
        self._records_to_pass = after_records
        self.has_fired = False

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        return super().put(fingerprint, layout, self._count_records(records) if self._during == "put" else records)

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        if self._during != "get" or self.has_fired or len(refs) < 2:
            return super().get(fingerprint, layout, refs)
        half = super().get(fingerprint, layout, refs[: len(refs) // 2])
        self._fire()
        return half + super().get(fingerprint, layout, refs[len(refs) // 2 :])

    def _count_records(self, records: Iterable[Any]) -> Iterator[Any]:
        for record in records:
            yield record
            self._records_to_pass -= 1
            if not self._records_to_pass:
                self._fire()

    def _fire(self) -> None:
        self.has_fired = True
        self._interrupt()


class SpoilingProxy:
    """Stands between a client and Redis, and answers one command with garbage: whatever Redis says to it."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server((host, 0))
        self._open: list[socket.socket] = []
        self._command = b""
        self._let_pass = 0
        self.reply_spoilt = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def spoil(self, command: str, let_pass: int) -> None:
        """The next connection that sends this command gets so many bytes of the answer, and then garbage."""
        self._let_pass = let_pass
        self._command = f"\r\n{command}\r\n".encode()

    def close(self) -> None:
        """Close everything."""
        for link in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
                self._open += [client, server]
                has_command = threading.Event()
                threading.Thread(target=self._to_server, args=(client, server, has_command), daemon=True).start()
                threading.Thread(target=self._to_client, args=(client, server, has_command), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, has_command: threading.Event) -> None:
        recent_bytes = b""
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._command and self._command in (recent_bytes := recent_bytes[-64:] + data):
                    self._command = b""
                    has_command.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _to_client(self, client: socket.socket, server: socket.socket, has_command: threading.Event) -> None:
        bytes_to_pass = None
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if has_command.is_set():
                    bytes_to_pass = self._let_pass if bytes_to_pass is None else bytes_to_pass
                    data, bytes_to_pass = (
                        data[:bytes_to_pass] + random.Random(1).randbytes(len(data[bytes_to_pass:])),
                        max(0, bytes_to_pass - len(data)),
                    )
                    if not bytes_to_pass:
                        self.reply_spoilt.set()
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
