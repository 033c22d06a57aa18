"""What the KV store costs: a KV cache from NumPy arrays to Redis, and from Redis to NumPy arrays.

The cache has the shape of Qwen3-30B-A3B: 48 layers, 4 KV heads of 128, bf16, 2,048 tokens, so 64 blocks of 3.1 MB,
201 MB in all. Four ways move it over loopback, each in a process of its own, one after the other, the order rotated
from round to round:

    kvstore    RedisKVStore.put and .get: headers, checksums made and verified, TTLs set and renewed
    raw        the least that Python can do with the same arrays: one plain socket, pipelined; `sendall` of memoryviews,
               `recv_into(MSG_WAITALL)` into one array, a receive buffer of 4 MiB, two requests ahead, nothing checked
    redis-py   SETs in pipelines of 8, MGET of 8; with hiredis
    json       one value, JSON around base64, through redis-py: what the system before this one sent

Timed is a put, then a get, of all blocks, each from the call to its return. A process does both three times, and the
best of each counts (of json, which takes thirty times as long, the only one). Before them come connecting, and an
untimed put and get: so Redis writes into memory that it has, raw sockets receive into the array that they received into
before, and the store into chunks of its own that nobody uses any more. Where the values arrive in fresh memory, getting
it from the kernel can cost more than the transfer: raw sockets' first get is into such memory, the store's into what
`prepare`, which a decode worker calls before its first job, has touched. `first_get_ratio` compares the two;
`first_get_to_best_ratio` the store's first get with raw sockets' best one of that round. What came is compared with
what was sent, outside the timing. A ratio is the median of the rounds' ratios, a rate the median of the rounds' rates,
in MB (10^6 bytes of KV) a second.

Extra memory is the growth of the process's peak (VmHWM) during one put or get of the whole cache, without the caller's
arrays and without the arrays returned. Linux only; elsewhere null.

`--lmcache` adds a fifth way, the C++ client of LMCache 0.5.6 with one worker, that is one connection, as ours has:
batches of all blocks from and into arrays that are there, through `submit_batch_set` and `submit_batch_get`. It sets no
TTL and checks nothing. Its environment (800 MB, PyTorch is in it) is made once, in the cache folder.

`--cluster` adds the store over a Redis Cluster of three primaries without replicas, all on this machine: what spreading
over nodes costs, and not what three machines give.

What the figures do not show: a real network, where the wire is slower and the ratios better; several clients at once;
new memory for Redis to store in; the time that an engine needs to fill the arrays. On a machine that is busy with other
work every way gets slower, the fast ones by more; a run in which raw sockets are less than 3.5 times as fast as
redis-py is void, and says so.
"""

import argparse
import base64
import importlib.util
import json
import os
import secrets
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import numpy as np
import redis

from benchmarks import harness
from kvstore.blocks import BlockRef, block_refs
from kvstore.redis.client import open_client
from kvstore.redis.store import RedisKVStore
from messages.kv import Array, Block, KVLayout
from tests.support import scratch_env, services
from tests.support.servers import RedisCluster

LAYOUT = KVLayout(48, 4, 128, "bf16")  # Qwen3-30B-A3B
TOKENS, QUICK_TOKENS = 2048, 512
ROUNDS, QUICK_ROUNDS = 9, 3
WORTH_COMPARING = 3.5  # raw over redis-py
AT_ONCE = 8
TTL_S = 600
MB = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """A KV cache of random bits, and where its blocks are stored."""

    fingerprint: str
    refs: list[BlockRef]
    blocks: list[Block]

    @property
    def payloads(self) -> list[memoryview]:
        """The bytes of each block, where they lie."""
        return [block.data.reshape(-1).view(np.uint8).data for block in self.blocks]

    @property
    def keys(self) -> list[str]:
        """Each block's key."""
        return [ref.key for ref in self.refs]

    @property
    def num_bytes(self) -> int:
        """Bytes of KV."""
        return sum(block.data.nbytes for block in self.blocks)


def sample(run: str, num_tokens: int, seed: int) -> Sample:
    """The cache of a run; another run's has other keys."""
    random = np.random.default_rng(seed)
    fingerprint = f"bench-{run}"
    refs = block_refs(fingerprint, LAYOUT, random.integers(0, 150_000, num_tokens).tolist(), num_tokens, 0, "bench")
    blocks = [Block(ref.start, _random_block(random, ref.end - ref.start)) for ref in refs]
    return Sample(fingerprint, refs, blocks)


def _random_block(random: np.random.Generator, num_tokens: int) -> Array:
    shape = LAYOUT.block_shape(num_tokens)
    return np.frombuffer(random.bytes(num_tokens * LAYOUT.token_bytes), LAYOUT.numpy_type).reshape(shape)


class Way(Protocol):
    """One way to move a sample."""

    tries: int

    def put(self, sample: Sample) -> None:
        """Store it; returns when Redis has confirmed all of it."""

    def get(self, sample: Sample) -> Sequence[Any]:
        """What lies under its keys, in order, as arrays."""


class Ours:
    """The store under test."""

    tries = 3

    def __init__(self, url: str) -> None:
        self._store = RedisKVStore(url)
        self.prepare = self._store.prepare

    def put(self, sample: Sample) -> None:
        """See Way."""
        self._store.put(sample.fingerprint, LAYOUT, zip(sample.refs, sample.blocks, strict=True))

    def get(self, sample: Sample) -> Sequence[Any]:
        """See Way."""
        return [block.data for block in self._store.get(sample.fingerprint, LAYOUT, sample.refs)]


class RawSockets:
    """The reference: the same bytes, nothing checked. All values must be of one size."""

    tries = 3
    ahead = 2

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._arrived = np.empty(0, np.uint8)
        self._socket = socket.create_connection((parts.hostname, parts.port or 6379))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        if parts.password:
            login = f"AUTH {unquote(parts.username or 'default')} {unquote(parts.password)}\r\n"
            self._socket.sendall(login.encode())
            self._expect(b"+OK\r\n")

    def put(self, sample: Sample) -> None:
        """See Way."""
        for key, payload in zip(sample.keys, sample.payloads, strict=True):
            self._socket.sendall(f"*5\r\n$3\r\nSET\r\n${len(key)}\r\n{key}\r\n${len(payload)}\r\n".encode())
            self._socket.sendall(payload)
            self._socket.sendall(f"\r\n$2\r\nEX\r\n${len(str(TTL_S))}\r\n{TTL_S}\r\n".encode())
        self._expect(b"+OK\r\n" * len(sample.keys))

    def get(self, sample: Sample) -> Sequence[Any]:
        """See Way."""
        size, keys = sample.num_bytes // len(sample.keys), sample.keys
        if self._arrived.size != sample.num_bytes:
            self._arrived = np.empty(sample.num_bytes, np.uint8)
        arrived = self._arrived.reshape(len(keys), size)
        for key in keys[: self.ahead]:
            self._ask(key)
        for index, row in enumerate(arrived):
            self._expect(b"$%d\r\n" % size)
            self._fill(row.data)
            self._expect(b"\r\n")
            if index + self.ahead < len(keys):
                self._ask(keys[index + self.ahead])
        return list(arrived)

    def _ask(self, key: str) -> None:
        self._socket.sendall(f"*2\r\n$3\r\nGET\r\n${len(key)}\r\n{key}\r\n".encode())

    def _fill(self, view: memoryview) -> None:
        if self._socket.recv_into(view, 0, socket.MSG_WAITALL) != len(view):
            raise ConnectionError("the connection was closed")

    def _expect(self, reply: bytes) -> None:
        found = self._socket.recv(len(reply), socket.MSG_WAITALL)
        if found != reply:
            raise ConnectionError(f"unexpected reply {found[:80]!r}")


class RedisPy:
    """What one writes first."""

    tries = 3

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2)

    def put(self, sample: Sample) -> None:
        """See Way."""
        for some in _eights(list(zip(sample.keys, sample.payloads, strict=True))):
            with self._client.pipeline(transaction=False) as pipeline:
                for key, payload in some:
                    pipeline.set(key, payload, ex=TTL_S)
                pipeline.execute()

    def get(self, sample: Sample) -> Sequence[Any]:
        """See Way."""
        values: list[Any] = [value for some in _eights(sample.keys) for value in self._client.mget(some)]
        return [np.frombuffer(value, np.uint8) for value in values]


class JsonBase64:
    """One value, as the system before this one sent it."""

    tries = 1

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, protocol=2)

    def put(self, sample: Sample) -> None:
        """See Way."""
        document = json.dumps({"kv_cache": [base64.b64encode(payload).decode() for payload in sample.payloads]})
        self._client.set(sample.keys[0], document, ex=TTL_S)

    def get(self, sample: Sample) -> Sequence[Any]:
        """See Way."""
        value: Any = self._client.get(sample.keys[0])
        return [np.frombuffer(base64.b64decode(text), np.uint8) for text in json.loads(value)["kv_cache"]]


class LMCache:
    """Somebody else's client for the same purpose, in C++; it keeps its results' memory, as raw sockets do here."""

    tries = 3
    workers = 1  # a connection each

    def __init__(self, url: str) -> None:
        sys.path.append(os.environ[_LMCACHE])  # last: ours come first
        importlib.import_module("torch")  # its libraries are looked for nowhere
        path = next(Path(os.environ[_LMCACHE]).glob("lmcache/lmcache_redis*.so"))
        spec = importlib.util.spec_from_file_location("lmcache.lmcache_redis", path)
        assert spec
        assert spec.loader
        module: Any = importlib.util.module_from_spec(spec)  # without the package, whose other parts need CUDA
        spec.loader.exec_module(module)
        parts = urlsplit(url)
        login = (unquote(parts.username or ""), unquote(parts.password or ""))
        self._client = module.LMCacheRedisClient(parts.hostname, parts.port or 6379, self.workers, *login)
        self._ended = select.poll()
        self._ended.register(self._client.event_fd(), select.POLLIN)
        self._arrived: list[Array] = []

    def put(self, sample: Sample) -> None:
        """See Way."""
        self._client.submit_batch_set(sample.keys, sample.payloads)
        self._wait()

    def get(self, sample: Sample) -> Sequence[Any]:
        """See Way."""
        if not self._arrived:
            self._arrived = [np.empty(len(payload), np.uint8) for payload in sample.payloads]
        self._client.submit_batch_get(sample.keys, [array.data for array in self._arrived])
        self._wait()
        return self._arrived

    def _wait(self) -> None:
        done: list[Any] = []
        while not done:
            self._ended.poll()
            done = self._client.drain_completions()
        [(_, well, error, _)] = done
        if not well:
            raise ConnectionError(str(error))


WAYS: dict[str, type[Ours] | type[RawSockets] | type[RedisPy] | type[JsonBase64] | type[LMCache]] = {
    "kvstore": Ours,
    "raw": RawSockets,
    "redis-py": RedisPy,
    "json": JsonBase64,
    "lmcache": LMCache,
    "cluster": Ours,
}
_LMCACHE = "KVASIR_LMCACHE"  # where its packages are


def _eights(items: list[Any]) -> list[list[Any]]:
    return [items[first : first + AT_ONCE] for first in range(0, len(items), AT_ONCE)]


def measure_speed(way: Way, moved: Sample) -> dict[str, float]:
    """Seconds of the best put and of the best get. Raises ValueError if what came is not what was sent."""
    way.put(moved)
    first_s = _seconds(lambda: way.get(moved))
    put_s, get_s = [], []
    for _ in range(way.tries):
        put_s.append(_seconds(lambda: way.put(moved)))
        arrived: list[Any] = []
        get_s.append(_seconds(lambda arrived=arrived: arrived.extend(way.get(moved))))
        _check(arrived, moved)
        del arrived  # its memory is for the next get
    return {"put_s": min(put_s), "get_s": min(get_s), "first_get_s": first_s}


def _check(arrived: Sequence[Any], moved: Sample) -> None:
    for got, sent in zip(arrived, moved.payloads, strict=True):
        if not np.array_equal(got.reshape(-1).view(np.uint8), np.frombuffer(sent, np.uint8)):
            raise ValueError("what came back is not what was stored")


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_memory(way: Way, moved: Sample, what: str) -> dict[str, float | None]:
    """Bytes by which the process's peak grows during a put, or during a get beyond the arrays that it returns."""
    if what == "put":
        return {"extra": harness.peak_growth(lambda: way.put(moved))}
    way.put(moved)
    growth = harness.peak_growth(lambda: way.get(moved))
    return {"extra": growth and growth - moved.num_bytes}


def measure(arguments: argparse.Namespace) -> None:
    """One measurement, in this process: what the child processes do."""
    url = os.environ[services.STORE_VARIABLE]
    moved = sample(arguments.run, arguments.tokens, arguments.seed)
    client: Any = open_client(url)
    way = WAYS[arguments.way](url)
    try:
        if arguments.memory:
            harness.finish(**measure_memory(way, moved, arguments.memory))
        else:
            if isinstance(way, Ours):
                way.prepare()
            harness.finish(**measure_speed(way, moved))
    finally:
        client.delete(*moved.keys)


Times = dict[str, list[dict[str, float]]]  # by way, one entry a round


class StoreRun:
    """The parent's side: which children run, in which order."""

    def __init__(self, url: str, options: harness.BenchmarkOptions, cluster_url: str = "") -> None:
        self._cluster_url = cluster_url
        self.tokens = QUICK_TOKENS if options.quick else TOKENS
        self.rounds = QUICK_ROUNDS if options.quick else ROUNDS
        asked = {"lmcache": _LMCACHE in os.environ, "cluster": bool(cluster_url)}
        self._ways = [name for name in WAYS if asked.get(name, True)]
        self._url = url
        self._seed = options.seed

    def times(self) -> Times:
        """All rounds, the first of which is another way each time."""
        times: Times = {name: [] for name in self._ways}
        names = self._ways
        for index in range(self.rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(self._child(name))
            print(f"round {index + 1} of {self.rounds}: {_line(times, index)}", flush=True)
        return times

    def memory(self, what: str) -> float | None:
        """MB beyond the caller's arrays and those returned."""
        extra = self._child("kvstore", "--memory", what)["extra"]
        return None if extra is None else extra / MB

    def _child(self, way: str, *more: str) -> dict[str, Any]:
        told = ["--way", way, "--run", secrets.token_hex(6), "--tokens", str(self.tokens), "--seed", str(self._seed)]
        url = self._cluster_url if way == "cluster" else self._url
        return harness.fresh_process("benchmarks.kvstore", *told, *more, store_url=url)


def _line(times: Times, index: int) -> str:
    put, get = (" ".join(f"{name} {times[name][index][which]:.3f}" for name in times) for which in ("put_s", "get_s"))
    return f"put s: {put}; get s: {get}"


def ratios(times: Times, which: str, other: str, way: str = "kvstore") -> list[float]:
    """How many times as fast as `other` a way was, in each round."""
    return [theirs[which] / ours[which] for ours, theirs in zip(times[way], times[other], strict=True)]


def figures(times: Times, num_bytes: int) -> dict[str, Any]:
    """The keys of the last line that follow from the times."""
    found: dict[str, Any] = {}
    for what in ("put", "get"):
        which = f"{what}_s"
        for prefix, way in (("", "kvstore"), ("raw_", "raw")):
            found[f"{prefix}{what}_MBps"] = statistics.median(num_bytes / MB / t[which] for t in times[way])
        found[f"{what}_ratio"] = statistics.median(ratios(times, which, "raw"))
        found[f"{what}_ratios"] = ratios(times, which, "raw")
        found[f"redis_py_{what}_ratio"] = statistics.median(ratios(times, which, "redis-py"))
        found[f"json_{what}_ratio"] = statistics.median(ratios(times, which, "json"))
        if "lmcache" in times:
            found[f"lmcache_{what}_ratio"] = statistics.median(ratios(times, which, "lmcache"))
            found[f"lmcache_{what}_ratios"] = ratios(times, which, "lmcache")
        if "cluster" in times:
            found[f"cluster_{what}_ratio"] = statistics.median(ratios(times, which, "kvstore", "cluster"))
        found[f"raw_over_redis_py_{what}"] = statistics.median(ratios(times, which, "redis-py", "raw"))
    found["first_get_ratio"] = statistics.median(ratios(times, "first_get_s", "raw"))
    found["first_get_to_best_ratio"] = statistics.median(
        raw["get_s"] / ours["first_get_s"] for raw, ours in zip(times["raw"], times["kvstore"], strict=True)
    )
    found["void"] = min(found["raw_over_redis_py_put"], found["raw_over_redis_py_get"]) < WORTH_COMPARING
    return found


def compare(options: harness.BenchmarkOptions, cluster: bool) -> None:
    """The whole benchmark."""
    print(harness.machine())
    with harness.store() as url, RedisCluster() if cluster else nullcontext() as nodes:
        run = StoreRun(url, options, nodes.url if nodes else "")
        times = run.times()
        found = figures(times, run.tokens * LAYOUT.token_bytes)
        extra = {f"extra_{what}_MB": run.memory(what) for what in ("put", "get")}
    explain(found, extra)
    harness.finish(**found, **extra, tokens=run.tokens, rounds=run.rounds, seed=options.seed)


def explain(found: dict[str, Any], extra: dict[str, float | None]) -> None:
    """The figures for people."""
    for what in ("put", "get"):
        print(
            f"{what}: {found[f'{what}_MBps']:,.0f} MB/s; raw sockets {found[f'raw_{what}_MBps']:,.0f}"
            f" (ratio {found[f'{what}_ratio']:.2f}); {found[f'redis_py_{what}_ratio']:.1f} times redis-py,"
            f" {found[f'json_{what}_ratio']:.1f} times JSON;{_more_ways(found, what)} extra memory"
            f" {extra[f'extra_{what}_MB']} MB"
        )
    if found["void"]:
        print(
            f"VOID: raw sockets are only {found['raw_over_redis_py_put']:.1f} (put) and"
            f" {found['raw_over_redis_py_get']:.1f} (get) times as fast as redis-py, and not {WORTH_COMPARING}:"
            " this machine is too busy, or too slow at getting memory, to tell"
        )


def _more_ways(found: dict[str, Any], what: str) -> str:
    beside, cluster = found.get(f"lmcache_{what}_ratio"), found.get(f"cluster_{what}_ratio")
    said = f" {beside:.2f} times LMCache's client;" if beside else ""
    return said + (f" over three nodes {cluster:.2f} times as fast;" if cluster else "")


def main() -> int:
    """Compare all ways, or as a child measure one."""
    parser = harness.parser(__doc__)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=("put", "get"), help=argparse.SUPPRESS)
    parser.add_argument("--lmcache", action="store_true", help="beside LMCache's client, too (800 MB, once)")
    parser.add_argument("--cluster", action="store_true", help="over a Redis Cluster of three primaries, too")
    arguments = parser.parse_args()
    if arguments.lmcache:
        os.environ[_LMCACHE] = str(scratch_env.packages("lmcache-0.5.6"))
    if arguments.way:
        measure(arguments)
    else:
        compare(harness.BenchmarkOptions(arguments.quick, arguments.seed), arguments.cluster)
    return 0


if __name__ == "__main__":
    sys.exit(main())
