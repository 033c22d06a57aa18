"""What a class's prefix costs: 50 jobs that share 6,000 of 7,500 tokens, with two prefill workers.

The ideal is `shared + Σ unique` tokens computed, and their KV bytes stored. The same batch is then run without sharing
(all of each prompt is a job's own), for comparison. Two engines: the simulated one, at 5,000 tokens/s a worker, and
llama.cpp with the demo model, a thread a worker; and llama.cpp with a tiny hybrid model of random weights, three layers
in four of which keep a recurrent state. Its ideal has a state for the class and one for each job, since none can be
cut out of a longer prompt's.

All in one process: an in-process broker, a real Redis over loopback, two prefill workers with an engine each, and a
decode worker that answers 4 tokens a job. Tokens are those that the engines say they evaluated, bytes those that were
put into the store, headers included. Seconds go from the submission of the batch to its last result, so decoding from
the stored KV is in them, and proves that it is of use: a job without a KV transfer ends the benchmark. The decode
worker's check of KV caches is off: it does each producer's first prompt again, which of so few jobs would be a third of
the time, in the batch with sharing alone.

Two losses are in the ratios: the prefix is rounded down to whole blocks of 32 tokens, so each job computes up to
31 tokens more; and each record has a header. The figures don't show a network, nor what several classes at once would
do to one another. The demo model is so small that moving a token's KV costs more, next to computing it, than with a
model of real size; and two workers on one machine share its cores.

`--quick` has fewer jobs, which cost and ideal follow. The keys at the top are those of llama.cpp with the demo model;
`rows` has all.
"""

import bisect
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import redis

from benchmarks import harness, matrix_models
from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from engines.registry import Engine, EngineOptions, open_engine
from examples.model.corpus import ADJECTIVES, NOUNS, VERBS
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from kvstore.blocks import block_refs, shared_boundary, snapshot_refs
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from messages.workers import WorkerStage
from prefill_worker.worker import PrefillWorker
from producers.client import Client, Replies

MODEL = "prefix-benchmark:1b"
SHARED_TOKENS, PROMPT_TOKENS = 6000, 7500
JOBS = 50
QUICK_JOBS = {"simulated": 8, "hybrid": 2, "llamacpp": 4}
CONTEXT = 8192
ALLOWED = 1.03  # times the ideal
PATIENCE_S = 1800.0  # on a busy machine the batch without sharing takes long
DEMO_MODEL = Path(__file__).parents[1] / "examples" / "model" / "kvasir-demo.gguf"
WEIGHTS = {
    "simulated": "sim:prefill=5000,decode=1000,scale=1,layers=8,kv_heads=2,head_dim=32",  # 2 KiB of KV a token
    "hybrid": "",  # written when it is wanted
    "llamacpp": str(DEMO_MODEL),
}
ENGINES = {"hybrid": "llamacpp"}  # where it is not the row's name
SAMPLING = Sampling(max_tokens=4, temperature=0)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """What a batch took. `tokens`: computed by prefill workers; `evaluated`: by decoders, for all answers."""

    tokens: int
    stored_bytes: int
    seconds: float
    evaluated: int = 0


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One engine's batch, with sharing and without."""

    engine: str
    jobs: int
    computed_tokens: int
    ideal_tokens: int
    tokens_ratio: float
    stored_bytes: int
    ideal_bytes: int
    bytes_ratio: float
    seconds: float
    tokens_without_sharing: int
    bytes_without_sharing: int
    seconds_without_sharing: float


class PrefixFleet:
    """Two prefill workers and a decode worker, each with an engine of its own, over a Redis."""

    def __init__(self, engine: str, store_url: str, weights: str = "", slots: int = 1) -> None:
        self._engine_name = engine
        self._weights, self._slots = weights or WEIGHTS[engine], slots
        self._stack = ExitStack()
        self._server = EmbeddedServer()
        self._kv = RedisKVStore(store_url)
        self._cluster_state = RedisClusterState(store_url)
        self._redis = redis.Redis.from_url(store_url)
        for opened in (self._kv, self._cluster_state, self._redis):
            self._stack.callback(opened.close)
        self._client = Client(self._broker(), self._cluster_state, [MODEL])
        self.engine = self._start("prefill")
        self._start("prefill")
        self._start("decode")

    def close(self) -> None:
        """Stop the workers."""
        self._stack.close()

    def jobs(self, texts: Sequence[tuple[str, str]]) -> list[PrefillJob]:
        """A batch of (shared, own) texts."""
        batch = f"prefix-{secrets.token_hex(6)}"
        return [
            self._client.new_job(batch, f"item-{number}", MODEL, user_prompt(shared, own), SAMPLING)
            for number, (shared, own) in enumerate(texts)
        ]

    def run(self, jobs: Sequence[PrefillJob]) -> PrefillCost:
        """Submit a batch, wait for its last result, and take its keys out of the store."""
        replies = Replies(self._client.broker, jobs[0].batch_id)
        started = time.monotonic()
        self._client.submit(jobs)
        results: list[JobResult] = []
        while len(results) < len(jobs):
            for reply in replies.receive(1.0):
                results.append(_checked(reply.result))
                reply.delivery.ack()
            if time.monotonic() - started > PATIENCE_S:
                raise SystemExit(f"{len(results)} of {len(jobs)} results after {PATIENCE_S:.0f} s")
        seconds = time.monotonic() - started
        replies.close(delete=True)
        self._forget(jobs)
        return PrefillCost(
            sum(result.prefill.computed_tokens for result in results),
            sum(result.prefill.put_bytes for result in results),
            seconds,
            sum(one.evaluated_tokens for result in results for one in (result.answers or (result.decode,))),
        )

    def _forget(self, jobs: Sequence[PrefillJob]) -> None:
        info = self.engine.info
        assert info.layout is not None
        for job in jobs:
            prompt = self.engine.tokenize(job.prompt, job.submitted_at)
            shared = shared_boundary(info.layout, prompt.shared_tokens)
            refs = block_refs(info.fingerprint, info.layout, prompt.ids, shared, shared, job.job_id)
            self._kv.delete([*refs, *(one for last in refs[-1:] for one in snapshot_refs(info.layout, last))])
            self._redis.delete(f"result:{{{job.job_id}:{job.run}}}")

    def _start(self, role: WorkerStage) -> Engine:
        slots = self._slots if role == "decode" else 1
        options = EngineOptions(self._weights, context=CONTEXT, slots=slots, threads=1)
        engine = open_engine(self._engine_name, options)
        self._stack.callback(engine.close)
        services = (self._broker(), self._kv, self._cluster_state, lambda _moment: None)
        worker: PrefillWorker | DecodeWorker
        if role == "prefill":
            worker = PrefillWorker(MODEL, LoadedEngine(engine), *services)
        else:
            worker = DecodeWorker(ModelCache(CachedModel(MODEL, 0, LoadedEngine(engine))), *services, kv_check_every=0)
        thread = threading.Thread(target=worker.run, name=role, daemon=True)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(worker.stop, abort=True)
        return engine

    def _broker(self) -> EmbeddedBroker:
        broker = EmbeddedBroker(self._server)
        self._stack.callback(broker.close)
        return broker


@contextmanager
def fleet(engine: str, store_url: str, weights: str = "", slots: int = 1) -> Iterator[PrefixFleet]:
    """A fleet for the length of the block."""
    opened = PrefixFleet(engine, store_url, weights, slots)
    try:
        yield opened
    finally:
        opened.close()


def measure(engine: str, store_url: str, jobs: int, seed: int, weights: str = "") -> PrefixRow:
    """One row's batch, with sharing and without."""
    with fleet(ENGINES.get(engine, engine), store_url, weights or WEIGHTS[engine]) as running:
        texts = class_texts(running.engine, jobs, seed)
        ideal_tokens = _ideal(running.engine, texts)
        cost = running.run(running.jobs(texts))
        alone = running.run(running.jobs([("", shared + own) for shared, own in texts]))
        layout = running.engine.info.layout
    assert layout is not None
    ideal_bytes = ideal_tokens * layout.token_bytes + (jobs + 1) * layout.state_bytes
    return PrefixRow(
        engine,
        jobs,
        cost.tokens,
        ideal_tokens,
        cost.tokens / ideal_tokens,
        cost.stored_bytes,
        ideal_bytes,
        cost.stored_bytes / ideal_bytes,
        cost.seconds,
        alone.tokens,
        alone.stored_bytes,
        alone.seconds,
    )


def class_texts(engine: Engine, jobs: int, seed: int) -> list[tuple[str, str]]:
    """The (shared, own) texts of a class. They differ from run to run: what another run stored must not help."""
    source = random.Random(seed)
    shared = text(engine, SHARED_TOKENS, source, f"Class {secrets.token_hex(8)}.")
    return [
        (shared, text(engine, PROMPT_TOKENS - SHARED_TOKENS, source, f" Student {number}.")) for number in range(jobs)
    ]


def text(engine: Engine, tokens: int, source: random.Random, beginning: str) -> str:
    """Words, as many as make about this many tokens."""
    words = [beginning, *source.choices(ADJECTIVES + NOUNS + VERBS, k=tokens)]
    count = bisect.bisect_left(range(tokens), tokens, key=lambda n: engine.count_tokens(" ".join(words[:n])))
    return " ".join(words[:count])


def _ideal(engine: Engine, texts: Sequence[tuple[str, str]]) -> int:
    """shared + Σ unique, in tokens."""
    prompts = [engine.tokenize(user_prompt(shared, own), 0.0) for shared, own in texts]
    return prompts[0].shared_tokens + sum(len(prompt.ids) - prompt.shared_tokens for prompt in prompts)


def _checked(result: JobResult) -> JobResult:
    if result.state != "succeeded" or result.decode.kv_transfer != "verified":
        why = result.error.message if result.error else result.decode.why_none
        raise SystemExit(f"job {result.item_id} {result.state}, KV transfer {result.decode.kv_transfer}: {why}")
    return result


def report(row: PrefixRow) -> str:
    """One engine's row, for people."""
    lines = [
        f"{row.engine}, {row.jobs} jobs, two prefill workers",
        f"{'':24}{'shared':>14}{'ideal':>14}{'ratio':>8}{'not shared':>14}",
        f"{'tokens computed':24}{row.computed_tokens:14,}{row.ideal_tokens:14,}{row.tokens_ratio:8.3f}"
        f"{row.tokens_without_sharing:14,}",
        f"{'bytes stored':24}{row.stored_bytes:14,}{row.ideal_bytes:14,}{row.bytes_ratio:8.3f}"
        f"{row.bytes_without_sharing:14,}",
        f"{'seconds':24}{row.seconds:14.1f}{'':22}{row.seconds_without_sharing:14.1f}",
    ]
    if max(row.tokens_ratio, row.bytes_ratio) > ALLOWED:
        lines.append(f"more than {ALLOWED - 1:.0%} above the ideal")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = harness.options(__doc__, arguments)
    print(f"jobs that share about {SHARED_TOKENS:,} of {PROMPT_TOKENS:,} tokens; {harness.machine()}\n", flush=True)
    rows = []
    with harness.store() as store_url, tempfile.TemporaryDirectory(prefix="kvasir-prefix-") as folder:
        matrix_models.write(Path(folder), matrix_models.WIDE.name, options.seed)
        hybrid = str(matrix_models.weights_for("llamacpp", Path(folder), matrix_models.WIDE.name))
        for engine, weights in (WEIGHTS | {"hybrid": hybrid}).items():
            jobs = QUICK_JOBS[engine] if options.quick else JOBS
            rows.append(measure(engine, store_url, jobs, options.seed, weights))
            print(report(rows[-1]), flush=True)
    real = asdict(rows[-1])
    harness.finish(
        **{name: real[name] for name in real if name not in ("engine", "jobs")}, rows=list(map(asdict, rows))
    )


if __name__ == "__main__":
    main()
