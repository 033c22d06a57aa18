"""The KV path over a network that is not loopback: real sockets, a round trip, a rate, loss.

Redis and RabbitMQ run in a network namespace of this machine; a router in userspace (tests/support/network.py) carries
packets of 1,500 bytes between them and the rest at 1 Gb/s with half of the round trip as delay each way, and drops the
given share of them. `net.core.rmem_max` is that of a stock Linux kernel (212,992) for the length of the run, and is
restored.

A row moves the same bytes in blocks of one size: an untimed put and get, then pairs of ours and iperf3's, alternating,
iperf3 on one connection for 2 s of which it leaves out the first half second. `get_ratio` and `put_ratio` are the
medians of the pairs' ratios; rates are medians, in MB (10^6 bytes of KV) a second.

`makespan_ratio`: a class of 300 jobs of 2 MB of KV each, simulated engines in two prefill and two decode processes with
four slots each: its time at 20 ms divided by that at 0.2 ms, the median of the pairs. An answer takes 1.67 s, so that
the eight slots do 4.8 jobs a second, fewer than two prefill processes bring at 20 ms on two busy cores (7.2): decode is
the limit. `decode_shares` shows whether it was: the time that the slots need at least, as a share of each makespan at
0.2 ms. If the median is below 0.9, something else was the limit, and the ratio is null. `hidden`: the share of an
upload's time that a prefill of 400 tokens a second hides at 2 ms (98,304 bytes a token: a third of 1 Gb/s).

With --engines (SmolLM2-135M, 92 MB, downloaded once): `hidden_by_engine`, the share of the uploads at 2 ms that real
engines hide on the processor: after a warm-up, four prompts of 700 tokens, in as many threads as a prefill worker has
slots. 1 - the seconds until the last is computed in which, by the engine's own clock, none was computed / the seconds
in which a put was under way. So the end of the last upload, behind which nothing is computed, does not count. mlx and
transformers hand blocks out as they are computed, llamacpp at the end of each prompt; all three compute the next prompt
meanwhile. `exposed_by_engine`: the same seconds as a share of the whole. A small model on a processor is slower than
the link: a GPU's prefill leaves less time to hide in.

What the figures do not show: a network card. The router needs most of a core, Redis, the client and the kernel share
the others, so on a small or busy machine both sides of a pair are slower than 1 Gb/s, and 0.2 ms is more. Linux, root,
gcc, iproute2, iperf3; elsewhere it says what is missing and ends with status 2.
"""

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from benchmarks import harness
from benchmarks.overlap import Overlap, TimedStore
from engines.registry import Engine, EngineOptions
from engines.registry import open_engine as open_any_engine
from engines.simulated.engine import open_engine
from infra.config.settings import load_settings
from kvasir.connect import connect
from kvstore.blocks import BlockRef, block_refs
from kvstore.redis.store import RedisKVStore
from kvstore.uploader import Uploader
from messages.jobs import Sampling, user_prompt
from messages.kv import Block, KVLayout, Record
from tests.support import programs, services, smollm2, smollm2_folders
from tests.support.network import GIGABIT, HERE, Link, Network, kernel_setting, network, reason_against
from tests.support.processes import Cluster, ModelEntry
from tests.support.servers import RabbitMQServer, RedisServer
from tests.support.services import Pair

IPERF_PORT = 5201
STOCK_RMEM_MAX = "212992"
LAYOUTS = {  # by the size of a block of 32 tokens, in KB
    16: KVLayout(2, 1, 64, "bf16"),
    64: KVLayout(4, 2, 64, "bf16"),
    256: KVLayout(8, 4, 64, "bf16"),
    3072: KVLayout(48, 4, 128, "bf16"),
}
MOVED_BYTES = 48 << 20
MB = 1e6
PREFILL_TOKENS = 2000
ENGINE_TOKENS, ENGINE_PROMPTS = 700, 4
PREFILL_WEIGHTS = "sim:prefill=400,scale=1,layers=48,kv_heads=4,head_dim=128,dtype=bf16,context=65536"
JOBS, QUICK_JOBS, OWN_TOKENS, GIVE_UP_S = 300, 24, 1000, 300.0
DECODES, SLOTS, ANSWER_TOKENS, SLOT_TOKENS_PER_S = 2, 4, 100, 60
WEIGHTS = (
    f"sim:prefill=20000,decode={SLOT_TOKENS_PER_S},scale=1,answer={ANSWER_TOKENS},spread=1,"
    "layers=4,kv_heads=2,head_dim=64,context=8192"
)
DECODE_IS_LIMIT = 0.9  # of a makespan is the decode slots' own time


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
    parser.add_argument("--engines", action="store_true", help="measure also what real engines hide")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.client:
        serve_client(parsed.client, parsed.seed)
        return
    if reason := reason_against():
        print(f"no figures: {reason}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the kernel's setting is put back
    print(f"{harness.machine()}; rmem_max {STOCK_RMEM_MAX}")
    pairs = 1 if parsed.quick else parsed.pairs
    with ExitStack() as stack:
        bench = stack.enter_context(network([HERE, "services"], seed=parsed.seed))
        stack.enter_context(kernel_setting("net/core/rmem_max", STOCK_RMEM_MAX))
        machine = bench.machine("services")
        store = stack.enter_context(RedisServer(machine=machine))
        broker = stack.enter_context(RabbitMQServer(machine=machine))
        stack.enter_context(_iperf_server(bench))
        rows = [_row(bench, store.url, condition, pairs) for condition in (QUICK_ROWS if parsed.quick else ROWS)]
        hidden = _hidden(bench, store.url, parsed.seed)
        by_engine = _by_engine(bench, store.url, parsed.seed) if parsed.engines else {}
        makespans = _makespans(bench, Pair(broker.url, store.url), parsed.quick)
    figures = [{name: engine[number] for name, engine in by_engine.items()} for number in (0, 1)]
    harness.finish(rows=rows, hidden=hidden, hidden_by_engine=figures[0], exposed_by_engine=figures[1], **makespans)


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
def _iperf_server(bench: Network) -> Iterator[None]:
    command = [programs.require("iperf3"), "--server", "--port", str(IPERF_PORT)]
    with subprocess.Popen(bench.command("services", command), stdout=subprocess.DEVNULL) as server:
        try:
            time.sleep(0.5)
            yield
        finally:
            server.kill()


def _row(bench: Network, url: str, condition: Condition, pairs: int) -> dict[str, float]:
    bench.set_link(condition.link)
    command = [sys.executable, "-m", "benchmarks.network", "--client", str(condition.block_kb)]
    rates: dict[str, list[float]] = {name: [] for name in ("put", "get", "iperf_put", "iperf_get")}
    with subprocess.Popen(
        command,
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
    command = ["iperf3", "--client", bench.address("services"), "--time", "2", "--omit", "0.5", "--json", *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(finished.stdout)["end"]["sum_received"]["bits_per_second"] / 8 / MB)


def _hidden(bench: Network, url: str, seed: int) -> float:
    bench.set_link(Condition(2.0, 0.0, 0).link)
    engine = open_engine(EngineOptions(PREFILL_WEIGHTS))
    moved = Overlap(engine, url, PREFILL_TOKENS, seed).round()
    print(f"upload {moved.upload_s:.2f} s, prefill {moved.prefill_s:.2f} s, exposed {moved.exposed_s:.2f} s")
    return 1 - moved.exposed_s / moved.upload_s


def _by_engine(bench: Network, url: str, seed: int) -> dict[str, tuple[float, float]]:
    """The share of the uploads that each engine hides, and what is left as a share of the whole."""
    bench.set_link(Condition(2.0, 0.0, 0).link)
    folder = str(smollm2_folders.folder("f32"))
    weights = {"llamacpp": str(smollm2.weights()), "mlx": folder, "transformers": folder}
    shares = {}
    for name in sorted(weights):
        with closing(open_any_engine(name, EngineOptions(weights[name], context=2 * ENGINE_TOKENS))) as engine:
            shares[name] = _hidden_of(engine, url, seed)
    return shares


def _hidden_of(engine: Engine, url: str, seed: int) -> tuple[float, float]:
    random = Random(seed)
    prompts = [tuple(random.randrange(100, 40_000) for _ in range(ENGINE_TOKENS)) for _ in range(ENGINE_PROMPTS)]
    engine.prefill(prompts[0][:100], lambda _record: None)
    with ThreadPoolExecutor(engine.info.prefill_slots) as slots:
        started = time.perf_counter()
        spent = list(slots.map(partial(_prefill_and_store, engine, url), prompts))
    whole_s = max(end for _, _, end in spent) - started
    exposed_s, upload_s = whole_s - sum(prefill_s for prefill_s, _, _ in spent), sum(put_s for _, put_s, _ in spent)
    print(
        f"{engine.info.engine}: {ENGINE_PROMPTS} uploads of {upload_s:.2f} s, of which {exposed_s:.2f} s are left "
        f"({exposed_s / whole_s:.1%} of {whole_s:.2f} s)",
        flush=True,
    )
    return 1 - exposed_s / upload_s, exposed_s / whole_s


def _prefill_and_store(engine: Engine, url: str, tokens: tuple[int, ...]) -> tuple[float, float, float]:
    """Return the seconds of computing, without those in which the engine waited for the uploader, those of storing, and
    when the engine had computed the prompt."""
    layout, fingerprint = engine.info.layout, engine.info.fingerprint
    assert layout
    refs = block_refs(fingerprint, layout, tokens, len(tokens), 0, f"bench-{secrets.token_hex(6)}")
    with closing(TimedStore(url, timeout_s=60)) as store:
        uploader = WaitingUploader(store, fingerprint, layout)
        report = engine.prefill(tokens, partial(uploader.take, {ref.start: ref for ref in refs}))
        computed_at = time.perf_counter()
        uploader.finish()
        assert not store.find_missing(refs), "not all was stored"
        store.delete(refs)
        # The clock of transformers runs on while it hands out blocks between its chunks.
        waited_s = uploader.waited_s if engine.info.engine == "transformers" else 0.0
        return report.prefill_s - waited_s, store.put_s, computed_at


class WaitingUploader(Uploader):
    """The uploader under test, with a clock around `put`."""

    waited_s = 0.0

    def take(self, by_start: Mapping[int, BlockRef], record: Record) -> None:
        """Put a block."""
        assert isinstance(record, Block), "this model has no sliding-window layers"
        started = time.perf_counter()
        self.put(by_start[record.start], record)
        self.waited_s += time.perf_counter() - started


def _makespans(bench: Network, pair: Pair, quick: bool) -> dict[str, object]:
    jobs = QUICK_JOBS if quick else JOBS
    least_s = jobs / (DECODES * SLOTS) * ANSWER_TOKENS / SLOT_TOKENS_PER_S
    ratios, shares = [], []
    for number in range(1 if quick else 3):
        seconds = {}
        for rtt_ms in (0.2, 20.0) if number % 2 else (20.0, 0.2):
            bench.set_link(Condition(rtt_ms, 0.0, 0).link)
            seconds[rtt_ms] = _makespan(pair, jobs)
        print(
            "  ".join(f"a class at {rtt_ms} ms: {spent:.1f} s" for rtt_ms, spent in sorted(seconds.items()))
            + f"; the decode slots need {least_s:.1f}",
            flush=True,
        )
        ratios.append(seconds[20.0] / seconds[0.2])
        shares.append(least_s / seconds[0.2])
    is_limit = statistics.median(shares) >= DECODE_IS_LIMIT
    return {"makespan_ratio": statistics.median(ratios) if is_limit else None, "decode_shares": shares}


def _makespan(pair: Pair, jobs: int) -> float:
    """Seconds from the first publish to the last result."""
    model = f"network.{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = Cluster(
            Path(folder), pair.broker_url, pair.store_url, {model: ModelEntry("simulated", WEIGHTS, 8192)}
        )
        stack.callback(cluster.close)
        workers = [cluster.launch("prefill", model) for _ in range(2)]
        workers += [cluster.launch("decode", model, "--slots", str(SLOTS)) for _ in range(DECODES)]
        for worker in workers:
            worker.wait_until_registered()
        urls = {"KVASIR_BROKER_URL": pair.broker_url, "KVASIR_STORE_URL": pair.store_url}
        client = stack.enter_context(connect(load_settings(config=cluster.config, environ=urls), name="network"))
        random = Random(0)
        own = ["".join(f"{random.randrange(16**4):04x}" for _ in range(OWN_TOKENS)) for _ in range(jobs)]
        batch_id = model.replace(".", "-")
        made = [
            client.new_job(batch_id, f"job-{number}", model, user_prompt("", text), Sampling(max_tokens=400))
            for number, text in enumerate(own)
        ]
        client.broker.open_reply_queue(batch_id)
        started = time.monotonic()
        client.submit(made)
        results = list(client.gather(batch_id, [job.job_id for job in made], GIVE_UP_S))
        spent = time.monotonic() - started
        states = Counter((result.state, result.decode.kv_transfer) for result in results)
        assert states == {("succeeded", "verified"): jobs}, states
        return spent


if __name__ == "__main__":
    main()
