"""Checks the broker, the store, this machine's disks, and the speed of the link to the store."""

import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from timeit import repeat
from typing import Any

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from engines.program import SHARED_MEMORY
from kvasir.doctor.findings import Finding, error, ok, warn
from kvasir.doctor.steps import CAUSES, SIZES, ServiceCheck, diagnose, host_and_port
from kvstore.blocks import BlockRef
from kvstore.redis.client import errors_mapped, is_cluster, open_client, place, product
from kvstore.redis.store import RedisKVStore
from messages.errors import StoreUnavailable
from messages.workers import Link
from producers.words import plural

OLDEST_RABBITMQ = (3, 10)
_REQUIRED_CAPABILITIES = ("publisher_confirms", "consumer_cancel_notify", "connection.blocked")

CLOCKS_DIFFER_S = 2.0

_CONNECTIONS = 4
_LINK_KEY_TTL_S = 60
_RATES = ("put_mb_per_s", "mb_per_s", "parallel_mb_per_s")  # fields of a Link, in the order of measurement
_SLOW_LINK_MB_PER_S, _GIGABIT_MB_PER_S, _LONG_PROMPT_MB = 100, 125, 2_000
_CARDS = Path("/sys/class/net")

_SLOTS = 16384
_SLOW_FAILOVER_S = 5.0

_JOURNAL_BYTES = 1e9
_SLOT_BYTES = 4e9


def check_broker_itself(server: Mapping[str, Any]) -> Iterator[Finding]:
    """Check a RabbitMQ by the properties that it sends when a connection opens."""
    product, version = str(server.get("product", "an unknown broker")), str(server.get("version", "?"))
    can = server.get("capabilities") or {}
    absent = [name for name in _REQUIRED_CAPABILITIES if not can.get(name)]
    cluster = str(server.get("cluster_name", ""))
    broker_name = f"{product} {version}" + (f", cluster {cluster}" if cluster else "")
    if absent:
        yield error("broker", f"{broker_name}: it lacks {', '.join(absent)}", "put a RabbitMQ of 3.10 or newer there")
    elif _numbers(version) < OLDEST_RABBITMQ:
        yield error("broker", f"{broker_name} is older than what this was tested with", "upgrade it to 3.10 or newer")
    else:
        yield Finding(
            "ok",
            "broker",
            f"{broker_name}, with confirms; AMQP does not tell which feature flags are on",
            "before an upgrade of the broker: rabbitmqctl list_feature_flags, and enable_feature_flag all",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Convert `3.10.8-rc.1` to (3, 10, 8). Anything else gives (), which counts as too old."""
    parts = version.partition("-")[0].split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def check_clock(difference_s: float) -> Finding:
    """Judge the difference between the store's clock and this machine's."""
    if abs(difference_s) < CLOCKS_DIFFER_S:
        return ok("clocks", f"the store's is this machine's ({difference_s:+.1f} s)")
    return warn(
        "clocks",
        f"the store's differs from this machine's by {difference_s:+,.0f} s: deadlines go by the store's",
        "let all machines keep time by NTP",
        "clock",
    )


def check_other_clocks() -> Finding:
    """Say which clocks can't be checked from here."""
    return Finding(
        "ok",
        "clocks",
        "those of the workers' machines can't be read from here: registrations go by the store's clock. Only hours and "
        "the times in logs go by a machine's own",
        "on each machine: timedatectl (Linux), sntp time.apple.com (macOS)",
    )


def clock_difference_s(store_now: Any) -> float:
    """Return `store_now()` minus this machine's clock at the middle of the call. The shortest of three calls counts."""
    calls = [(time.time(), float(store_now()), time.time()) for _ in range(3)]
    before, store_time, after = min(calls, key=lambda call: call[2] - call[0])
    return store_time - (before + after) / 2


def check_redis(info: Mapping[str, Any], saves: str) -> Iterator[Finding]:
    """Check how Redis treats a full memory, and whether it writes to disk, by `INFO` and the setting `save`."""
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", ""))
    if not limit:
        yield warn(
            "store",
            "maxmemory is not set: prefill can't tell when it is full",
            f"redis-cli CONFIG SET maxmemory {int(info.get('total_system_memory', 1 << 33)) >> 21}mb (half of its "
            "memory), and the same in redis.conf",
        )
    if policy != "noeviction":
        yield error(
            "store",
            f"maxmemory-policy is {policy}: it throws away KV caches that waiting jobs need, and registrations",
            "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
        )
    if saves or info.get("aof_enabled"):
        yield warn(
            "store",
            f"it writes KV caches to disk ({'appendonly yes' if info.get('aof_enabled') else f'save {saves}'}), "
            "and may need twice the memory meanwhile",
            'redis.conf: save "" and appendonly no: everything in it can be computed again',
        )
    if limit and policy == "noeviction" and not saves and not info.get("aof_enabled"):
        yield ok(
            "store", f"{int(info['used_memory']) / 1e9:.2f} of {limit / 1e9:.1f} GB used; noeviction, no persistence"
        )


def check_store_servers(url: str) -> Iterator[Finding]:
    """Check the Redis at `url`, or each primary of a Redis Cluster and the cluster as a whole.

    Raises StoreUnavailable.
    """
    client: Any = open_client(url)
    with closing(client), errors_mapped(place(url)):
        if is_cluster(url):
            yield from _check_redis_cluster(client)
            return
        info = client.info()
        yield ok("store", f"reached; {product(info)}")
        yield from check_redis(info, _setting(client, "save"))


def _check_redis_cluster(client: Any) -> Iterator[Finding]:
    nodes = client.execute_command("CLUSTER NODES")
    unreachable_nodes = {name: "the other nodes" for name, node in nodes.items() if "fail" in node["flags"]}
    infos = {}
    for primary in client.get_primaries():
        try:
            infos[primary] = {} if primary.name in unreachable_nodes else client.info(target_nodes=primary)
        # either the node has just failed and the other nodes don't know that yet, or the network is the problem
        except (ConnectionError, TimeoutError):
            unreachable_nodes[primary.name] = "this machine"
    infos = {primary: info for primary, info in infos.items() if info}
    have_replicas = {
        node["master_id"] for name, node in nodes.items() if name not in unreachable_nodes and "slave" in node["flags"]
    }
    products = " and ".join(sorted(set(map(product, infos.values()))))
    size = f"{plural(len(nodes), 'node')}, {len(infos)} of them primaries that answer"
    yield ok("store", f"reached; a cluster of {products}: {size}")
    for primary, info in infos.items():
        for finding in check_redis(info, _setting(client, "save", target_nodes=primary)):
            yield replace(finding, what=f"{primary.name}: {finding.what}")
    # the other questions go to one node that is known to answer
    node_options = {"target_nodes": next(iter(infos))} if infos else {}
    yield from _check_slots(int(client.cluster_info(**node_options)["cluster_slots_ok"]), unreachable_nodes)
    if single_nodes := sorted(
        name for name, node in nodes.items() if node["slots"] and node["node_id"] not in have_replicas
    ):
        yield warn(
            "store",
            f"without a replica: {', '.join(single_nodes)}; "
            "while one of them is away, most jobs go without KV transfer",
            "give each one: redis-cli --cluster add-node NEW ANY --cluster-slave",
        )
    if _setting(client, "cluster-require-full-coverage", **node_options) == "yes":
        yield warn(
            "store",
            "cluster-require-full-coverage is yes: if one primary fails, the whole cluster is down",
            "on each node: redis-cli CONFIG SET cluster-require-full-coverage no, and the same in redis.conf",
        )
    timeout_s = int(_setting(client, "cluster-node-timeout", **node_options) or 0) / 1000
    if timeout_s > _SLOW_FAILOVER_S:
        yield warn(
            "store",
            f"a node that does not answer is given up after {timeout_s:g} s (cluster-node-timeout)",
            "on each node: redis-cli CONFIG SET cluster-node-timeout 2000, and the same in redis.conf",
        )


def _check_slots(served_slots: int, unreachable_nodes: Mapping[str, str]) -> Iterator[Finding]:
    """Check that all slots are served. `unreachable_nodes` maps a node's name to who can't reach it."""
    if served_slots < _SLOTS:
        message = f"{_SLOTS - served_slots:,} of {_SLOTS:,} slots are served by no node: jobs go without KV transfer"
        yield error("store", message, "start the node that had them, or: redis-cli --cluster fix HOST:PORT")
    for name, observer in sorted(unreachable_nodes.items()):
        yield warn(
            "store", f"{name} does not answer {observer}", "start it, or take it out: redis-cli --cluster del-node"
        )


def _setting(client: Any, name: str, **node_options: Any) -> str:
    """Return a setting of a Redis node, or "" if reading it is forbidden, as with managed services."""
    with suppress(ResponseError):
        return str(client.config_get(name, **node_options).get(name, ""))
    return ""


def check_link(url: str, steps: Finding) -> Finding:
    """Measure how fast the link to a store is. `steps`: the finding about this store; all its steps succeeded."""
    try:
        link = measured_link(url, steps, most_mb=16, within_s=3.0)
    except StoreUnavailable as refusal:
        return diagnose(ServiceCheck("store", url, stopped_at="1 MB", failure=refusal))
    slower_way = min(link.put_mb_per_s, link.mb_per_s)
    return link_finding("this machine", link, slower_way, _LONG_PROMPT_MB, "the KV cache of a long prompt")


def measured_link(url: str, steps: Finding, most_mb: int, within_s: float) -> Link:
    """Return what `steps` found about the link to an address. For a store, also measure its rates.

    The rates are measured with up to `most_mb` megabytes, fewer if the "1 MB" step predicts more than `within_s`. A
    link that is too slow for that gets the rate of the step. Raises StoreUnavailable.
    """
    # seconds for 1 MB in one direction; the step sends 1 MB there and back, so its time is halved
    megabyte_s = steps.steps.get("1 MB", math.inf) / 2 if steps.subject == "store" else math.inf
    megabytes = min(most_mb, int(within_s / (2 * len(_RATES)) / max(1e-6, megabyte_s)))
    return Link(
        host_and_port(url)[0],
        rtt_ms=round(1000 * steps.steps.get("connect", 0.0), 2),
        card_mb_per_s=max([0, *(_number_in(card.with_name("speed")) for card in _CARDS.glob("*/device"))]) / 8,
        stalls_at=SIZES.get(steps.stopped_at, 0) if steps.cause in ("mtu", "slow_link") else 0,
        rmem_max=_number_in(Path("/proc/sys/net/core/rmem_max")),
        **_rates(url, megabytes) if megabytes >= _CONNECTIONS else dict.fromkeys(_RATES, round(1 / megabyte_s, 2)),
    )


def _rates(url: str, megabytes: int) -> dict[str, float]:
    """Measure the MB/s to and from a store, with the code that moves a worker's KV caches.

    Both directions use one connection; the way back is also measured on several. The better of two rounds counts,
    because the first one opens the connections. The keys have a TTL, in case the connection is lost before they are
    deleted. Raises StoreUnavailable.
    """
    megabyte = memoryview(os.urandom(1_000_000))
    keys = [f"doctor:{secrets.token_hex(8)}:{number}" for number in range(megabytes)]
    with closing(RedisKVStore(url)) as kv, ThreadPoolExecutor(_CONNECTIONS) as pool, errors_mapped(place(url)):
        moves: Sequence[Callable[[], object]] = (
            lambda: kv.transport.put([(key, b"", megabyte) for key in keys], _LINK_KEY_TTL_S),
            lambda: list(kv.transport.get(keys, _LINK_KEY_TTL_S)),
            lambda: list(
                pool.map(
                    lambda first: list(kv.transport.get(keys[first::_CONNECTIONS], _LINK_KEY_TTL_S)),
                    range(_CONNECTIONS),
                )
            ),
        )
        try:
            best_s = [min(repeat(move, number=1, repeat=2)) for move in moves]
        finally:
            # If deleting fails, the keys expire. The error is ignored, because it would hide an earlier, clearer error.
            with suppress(StoreUnavailable):
                kv.delete([BlockRef(key, "", 0, 0, is_shared=False) for key in keys])
    return {name: round(megabytes / seconds, 1) for name, seconds in zip(_RATES, best_s, strict=True)}


def link_text(link: Link) -> str:
    """Return a link's other end and its figures, in words."""
    facts = (
        (f"{link.peer}: round trip {link.rtt_ms:g} ms", True),
        (f"messages of {link.stalls_at:,} bytes do not pass", link.stalls_at),
        (f"put {link.put_mb_per_s:,.0f} MB/s, get {link.mb_per_s:,.0f}", link.mb_per_s),
        (f"get {link.parallel_mb_per_s:,.0f} on {_CONNECTIONS} connections", link.parallel_mb_per_s),
        (f"the fastest network card has {link.card_mb_per_s:,.0f}", link.card_mb_per_s),
        (f"rmem_max {link.rmem_max:,}", link.rmem_max),
    )
    return ", ".join(fact for fact, is_known in facts if is_known)


def _number_in(path: Path) -> int:
    """Return the number in a file of the kernel; 0 if the file is missing (macOS) or empty (a card without a cable)."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def link_finding(host: str, link: Link, mb_per_s: float, size_mb: float, what_is_sent: str) -> Finding:
    """Describe a link of `host`, and how long it needs for `size_mb` at `mb_per_s` (0: not known).

    The finding is an error if a message does not pass, and a warning below 100 MB/s or below half of the rate that the
    network card negotiated.
    """
    message = f"link of {host} to {link_text(link)}" + (
        f": {what_is_sent}, {size_mb / 1e3:,.1f} GB, takes {size_mb / mb_per_s / 60:,.1f} minutes; at 1 Gb/s "
        f"{size_mb / _GIGABIT_MB_PER_S / 60:,.1f}"
        if mb_per_s and size_mb
        else ""
    )
    if link.stalls_at:
        cause = "mtu" if link.stalls_at < SIZES["1 MB"] else "slow_link"
        return error("links", message, CAUSES[cause][2].format(host=link.peer), cause)
    if 0 < mb_per_s < max(_SLOW_LINK_MB_PER_S, link.card_mb_per_s / 2):
        return warn(
            "links",
            message,
            "see that nothing else uses the link, and that the URL names the fastest address; iperf3 between both",
        )
    return ok("links", message)


def check_journal_disk(results: Path) -> Finding:
    """Check the space for journals and reports in `results`, or in its nearest parent folder that exists."""
    folder = next(path for path in (results.absolute(), *results.absolute().parents) if path.exists())
    return disk_finding("journals and reports", folder, shutil.disk_usage(folder).free, _JOURNAL_BYTES)


def check_slot_disk() -> Finding:
    """Check the space for llama.cpp's slot files on this machine, in shared memory or in the temporary folder."""
    folders = [path for path in (SHARED_MEMORY, Path(tempfile.gettempdir())) if path.is_dir()]
    free, folder = max((shutil.disk_usage(path).free, path) for path in folders)
    return disk_finding("slot files of llama.cpp, each as large as a prompt's KV cache", folder, free, _SLOT_BYTES)


def disk_finding(use: str, folder: Path, free_bytes: float, wanted_bytes: float) -> Finding:
    """Judge the free space. Less than a tenth of the wanted space is an error."""
    message = f"{free_bytes / 1e9:,.1f} GB free in {folder} for {use}"
    if free_bytes >= wanted_bytes:
        return ok("disk", message)
    level = error if free_bytes < wanted_bytes / 10 else warn
    return level("disk", f"{message}; {wanted_bytes / 1e9:,.0f} GB would be enough", f"free some: df -h {folder}")
