"""The KV path over a network that is not loopback: real sockets, a round trip, a rate, loss.

Two hosts are network namespaces of this machine; between them a router in userspace (tests/support/network.py) carries
packets of 1,500 bytes at 1 Gb/s with half of the round trip as delay each way, and drops the given share of them. On
one host runs Redis, on the other a process with RedisKVStore, one connection. `net.core.rmem_max` is that of a stock
Linux kernel (212,992) for the length of the run, and is restored.

A row moves the same bytes in blocks of one size: an untimed put and get, then pairs of ours and iperf3's, alternating,
iperf3 on one connection for 2 s of which it leaves out the first half second. `get_ratio` and `put_ratio` are the
medians of the pairs' ratios; rates are medians, in MB (10^6 bytes of KV) a second.

What the figures do not show: a network card. The router needs most of a core, Redis, the client and the kernel share
the others, so on a small or busy machine both sides of a pair are slower than 1 Gb/s, and 0.2 ms is more. Linux, root,
gcc, iproute2, iperf3; elsewhere it says what is missing and ends with status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks import harness
from kvstore.blocks import block_refs
from kvstore.redis.store import RedisKVStore
from messages.kv import Block, KVLayout
from tests.support import programs, services
from tests.support.network import GIGABIT, Link, Network, kernel_setting, network, reason_against

PORT, IPERF_PORT = 6379, 5201
STOCK_RMEM_MAX = "212992"
LAYOUTS = {  # by the size of a block of 32 tokens, in KB
    16: KVLayout(2, 1, 64, "bf16"),
    64: KVLayout(4, 2, 64, "bf16"),
    256: KVLayout(8, 4, 64, "bf16"),
    3072: KVLayout(48, 4, 128, "bf16"),
}
MOVED_BYTES = 48 << 20
MB = 1e6


@dataclass(frozen=True, slots=True)
class Condition:
    """One row: what the network does, and how large the blocks are."""

    rtt_ms: float
    loss: float
    block_kb: int

    @property
    def link(self) -> Link:
        """Each direction between the hosts."""
        return Link(delay_ms=self.rtt_ms / 2, rate_bits=GIGABIT, loss=self.loss)


ROWS = [
    *(Condition(rtt_ms, 0.0, block_kb) for rtt_ms in (0.2, 2.0, 20.0) for block_kb in LAYOUTS),
    Condition(2.0, 0.001, 3072),
    Condition(20.0, 0.001, 3072),
]
QUICK_ROWS = [Condition(20.0, 0.0, 16), Condition(2.0, 0.0, 3072)]


def main() -> None:
    """See the module's docstring."""
    parser = harness.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="of each row (default: %(default)s)")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.client:
        serve_client(parsed.client, parsed.seed)
        return
    if reason := reason_against():
        print(f"no figures: {reason}", file=sys.stderr)
        sys.exit(2)
    print(f"{harness.machine()}; rmem_max {STOCK_RMEM_MAX}")
    pairs = 1 if parsed.quick else parsed.pairs
    with ExitStack() as stack:
        bench = stack.enter_context(network(["client", "store"], seed=parsed.seed))
        stack.enter_context(kernel_setting("net/core/rmem_max", STOCK_RMEM_MAX))
        url = stack.enter_context(_services(bench))
        rows = [_row(bench, url, condition, pairs) for condition in (QUICK_ROWS if parsed.quick else ROWS)]
    harness.finish(rows=rows)


def serve_client(block_kb: int, seed: int) -> None:
    """Put or get as each line of standard input says; answer with the seconds that it took."""
    layout = LAYOUTS[block_kb]
    num_tokens = MOVED_BYTES // layout.token_bytes // 32 * 32
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 150_000, num_tokens).tolist()
    refs = block_refs("bench-network", layout, tokens, num_tokens, 0, "bench")
    data = random.integers(0, 1 << 16, layout.block_shape(32), np.uint16)
    records = [(ref, Block(ref.start, data.copy())) for ref in refs]
    store = RedisKVStore(os.environ[services.STORE_VARIABLE], timeout_s=60)
    store.prepare()
    for line in sys.stdin:
        started = time.perf_counter()
        if line.strip() == "put":
            store.put("bench-network", layout, records)
        else:
            blocks = store.get("bench-network", layout, refs)
            assert np.array_equal(blocks[-1].data, data), "what came back is not what was stored"
        print(json.dumps({"seconds": time.perf_counter() - started, "bytes": len(refs) * data.nbytes}), flush=True)


@contextmanager
def _services(bench: Network) -> Iterator[str]:
    """Redis and iperf3 on the host `store`; yields the URL."""
    lines = [f"port {PORT}", f"bind {bench.address('store')}", "protected-mode no", 'save ""', "appendonly no"]
    redis = [programs.require("redis"), "-"]
    iperf = [programs.require("iperf3"), "--server", "--port", str(IPERF_PORT)]
    with ExitStack() as stack:
        for command, configuration in ((redis, "\n".join(lines)), (iperf, "")):
            child = subprocess.Popen(
                bench.command("store", command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            assert child.stdin
            child.stdin.write(configuration)
            child.stdin.close()
        time.sleep(0.5)
        yield f"redis://{bench.address('store')}:{PORT}"


def _row(bench: Network, url: str, condition: Condition, pairs: int) -> dict[str, float]:
    bench.set_link(condition.link)
    command = [sys.executable, "-m", "benchmarks.network", "--client", str(condition.block_kb)]
    rates: dict[str, list[float]] = {name: [] for name in ("put", "get", "iperf_put", "iperf_get")}
    with subprocess.Popen(
        bench.command("client", command),
        env=os.environ | {services.STORE_VARIABLE: url},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        for number in range(pairs + 1):
            for name in ("put", "get"):
                ours = _ours(client, name)
                if number:  # the first warms up
                    rates[name].append(ours)
                    rates[f"iperf_{name}"].append(_iperf(bench, ["--reverse"] if name == "get" else []))
    figures = {f"{name}_MBps": statistics.median(values) for name, values in rates.items()}
    for name in ("put", "get"):
        ratios = [ours / theirs for ours, theirs in zip(rates[name], rates[f"iperf_{name}"], strict=True)]
        figures |= {f"{name}_ratio": statistics.median(ratios)}
        figures |= {f"{name}_ratio_low": min(ratios), f"{name}_ratio_high": max(ratios)}
    row = {"rtt_ms": condition.rtt_ms, "loss": condition.loss, "block_KB": condition.block_kb} | figures
    print("  ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    return row


def _ours(client: subprocess.Popen[str], name: str) -> float:
    assert client.stdin
    assert client.stdout
    client.stdin.write(f"{name}\n")
    client.stdin.flush()
    answer = json.loads(client.stdout.readline())
    return float(answer["bytes"] / answer["seconds"] / MB)


def _iperf(bench: Network, options: Sequence[str]) -> float:
    command = ["iperf3", "--client", bench.address("store"), "--time", "2", "--omit", "0.5", "--json", *options]
    finished = subprocess.run(bench.command("client", command), capture_output=True, text=True, check=True)
    return float(json.loads(finished.stdout)["end"]["sum_received"]["bits_per_second"] / 8 / MB)


if __name__ == "__main__":
    main()
