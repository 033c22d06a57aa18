"""How much of an upload hides behind the prefill that makes it: simulated engine, Uploader, a real Redis on loopback.

The engine computes 8,000 tokens at 2,000 tokens a second and hands out each block when its last token is computed; the
KV cache has the size of Qwen3-30B-A3B's, 98,304 bytes a token, 786 MB in all. Every block goes to the Uploader, as in a
prefill worker.

    upload_seconds    in which a put was under way, in the Uploader's thread
    exposed_seconds   by which the KV transfer ends later than the same prefill with nobody taking its blocks: waiting
    for
                      the last put, for a full queue, and computing that the upload slowed down
    hidden            1 - exposed_seconds / upload_seconds
    extra_MB          by which the process's peak memory grew meanwhile (VmHWM; Linux only): so much of a second copy of
                      the cache was ever there

Each is the median of the rounds. Both prefills are paced by the clock, so their difference is what uploading costs.

With --engine vllm (1 GB, `kvasir engines install vllm`) another measurement takes its place: 8 prompts of about 2,000
tokens and a model of 12 million random weights (--quick: of one million), in three ways in turns, on warm engines:

    bare       vLLM's own offline class, in a process of its own, is given the 8 prompts and makes one token of each
    prefill    8 threads call the engine's prefill(), and nobody takes its blocks
    upload     the same, and every prompt's blocks go to an Uploader of its own, and so to Redis

`ratio`: the median of the rounds' bare seconds by prefill seconds; `upload_ratio`: by those with the upload;
`cpu_ratio` and `upload_cpu_ratio`: the same of the processor time of vLLM's processes and, on the engine's side, of
this one, which is what to read on a machine that others use. `hidden`: 1 - waited_seconds / upload_seconds, where
waited_seconds is what the prefills' threads waited for a put or a full queue, by the Uploader's own clock: a difference
of two runs would say more about the neighbours. Interval: the least and the most of the rounds. Both sides are started
again after 3 rounds: two processes of one program differ by up to a tenth for as long as they live.

What the figures do not show: a wire slower than the prefill (786 MB in 4 s are 1.6 Gbit/s), where the queue fills and
prefill waits; an engine that transfers KV only at its end (llama.cpp), where nothing hides; the cost of copying blocks
out of an accelerator.
"""

import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks import harness
from benchmarks.decode_models import models
from benchmarks.vllm_sides import Both
from engines.registry import EngineOptions
from engines.simulated.engine import SimulatedEngine, open_engine
from kvstore.blocks import BlockRef, block_refs
from kvstore.redis.store import RedisKVStore
from kvstore.uploader import Uploader
from messages.kv import Block, KVLayout, Record

WEIGHTS = "sim:prefill=2000,scale=1,layers=48,kv_heads=4,head_dim=128,dtype=bf16,context=65536"
TOKENS, QUICK_TOKENS = 8000, 2000
ROUNDS, QUICK_ROUNDS = 3, 1
VLLM_PAIRS, VLLM_ROUNDS, PROMPTS, CONTEXT = 4, 3, 8, 4096


class TimedStore(RedisKVStore):
    """The store under test, with a clock around `put`."""

    put_s = 0.0

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """See KVStore."""
        started = time.perf_counter()
        try:
            return super().put(fingerprint, layout, records)
        finally:
            self.put_s += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Round:
    """One prefill without and one with an upload."""

    prefill_s: float
    transferred_s: float
    upload_s: float
    exposed_s: float
    extra_bytes: int | None


class Overlap:
    """One engine, one store, one prompt."""

    def __init__(self, engine: SimulatedEngine, url: str, num_tokens: int, seed: int) -> None:
        assert engine.info.layout is not None
        self._engine = engine
        self._url = url
        self._layout = engine.info.layout
        self._tokens = [(seed + i) % 100_000 + 16 for i in range(num_tokens)]

    def round(self) -> Round:
        """Prefill, then prefill and upload; what was stored is deleted."""
        store = TimedStore(self._url)
        job = f"bench-{secrets.token_hex(6)}"
        refs = block_refs(self._engine.info.fingerprint, self._layout, self._tokens, len(self._tokens), 0, job)
        try:
            prefill_s = _seconds(lambda: self._engine.prefill(self._tokens, _drop))
            transferred_s: list[float] = []
            extra = harness.peak_growth(lambda: transferred_s.append(_seconds(lambda: self._kv_transfer(store, refs))))
            if absent := store.find_missing(refs):
                raise ValueError(f"{len(absent)} of {len(refs)} blocks were not stored")
        finally:
            store.delete(refs)
            store.close()
        exposed_s = max(0.0, transferred_s[0] - prefill_s)
        return Round(prefill_s, transferred_s[0], store.put_s, exposed_s, extra)

    def _kv_transfer(self, store: TimedStore, refs: list[BlockRef]) -> None:
        by_start = {ref.start: ref for ref in refs}
        uploader = Uploader(store, self._engine.info.fingerprint, self._layout)
        self._engine.prefill(self._tokens, lambda record: uploader.put(_ref(by_start, record), record))
        uploader.finish()


def _ref(by_start: dict[int, BlockRef], record: Record) -> BlockRef:
    assert isinstance(record, Block), "this model has no sliding-window layers"
    return by_start[record.start]


def _drop(record: Record) -> None:
    """Nobody takes it."""


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class BatchRound:
    """8 prompts through bare vLLM, through the engine, and with their upload: (seconds, processor seconds) of each."""

    bare: tuple[float, float]
    prefill: tuple[float, float]
    upload: tuple[float, float]
    put_s: float
    waited_s: float


class VLLMBatch:
    """The vllm engine and bare vLLM, a store, and the prompts."""

    def __init__(self, both: Both, url: str, seed: int) -> None:
        assert both.engine.info.layout is not None
        self._both, self._url, self._layout = both, url, both.engine.info.layout
        chosen = random.Random(seed)
        ids = range(100, both.engine.info.vocabulary)
        self.prompts = [tuple(chosen.choices(ids, k=chosen.randint(1800, 2200))) for _ in range(PROMPTS)]

    def round(self, number: int) -> BatchRound:
        """All three ways; which one is first changes from round to round."""
        found: dict[str, tuple[float, float]] = {}
        stores = [TimedStore(self._url) for _ in self.prompts]
        waited: list[float] = []
        refs = [self._refs(tokens) for tokens in self.prompts]

        def upload(place: int) -> float:
            return self._upload(place, stores[place], refs[place])

        engine_cpu_s = self._both.engine_cpu_s
        ways: list[tuple[str, Callable[[], object], Callable[[], float]]] = [
            ("bare", lambda: self._both.bare(self.prompts, 1, []), self._both.bare_cpu_s),
            ("prefill", lambda: self._all(self._drop), engine_cpu_s),
            ("upload", lambda: waited.extend(self._all(upload)), engine_cpu_s),
        ]
        try:
            for name, way, cpu_s in ways[number % 3 :] + ways[: number % 3]:
                self._both.rest()
                before = cpu_s()
                seconds = _seconds(way)
                found[name] = seconds, cpu_s() - before
            absent = sum(len(store.find_missing(wanted)) for store, wanted in zip(stores, refs, strict=True))
            if absent:
                raise ValueError(f"{absent} blocks were not stored")
        finally:
            for store, wanted in zip(stores, refs, strict=True):
                store.delete(wanted)
                store.close()
        return BatchRound(**found, put_s=sum(store.put_s for store in stores), waited_s=sum(waited))

    def _refs(self, tokens: Sequence[int]) -> list[BlockRef]:
        job = f"bench-{secrets.token_hex(6)}"
        return block_refs(self._both.engine.info.fingerprint, self._layout, tokens, len(tokens), 0, job)

    def _all(self, work: Callable[[int], float]) -> list[float]:
        with ThreadPoolExecutor(len(self.prompts)) as threads:
            return list(threads.map(work, range(len(self.prompts))))

    def _drop(self, place: int) -> float:
        self._both.engine.prefill(self.prompts[place], _drop)
        return 0.0

    def _upload(self, place: int, store: TimedStore, refs: list[BlockRef]) -> float:
        by_start = {ref.start: ref for ref in refs}
        uploader = Uploader(store, self._both.engine.info.fingerprint, self._layout)
        self._both.engine.prefill(self.prompts[place], lambda record: uploader.put(_ref(by_start, record), record))
        return uploader.finish().exposed_s


def main() -> int:
    """Measure, explain, and end with the line of JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated")
    options = parser.parse_args()
    print(harness.machine())
    if options.engine == "vllm":
        return vllm(options.quick, options.seed)
    num_tokens = QUICK_TOKENS if options.quick else TOKENS
    engine = open_engine(EngineOptions(WEIGHTS))
    with harness.store() as url:
        overlap = Overlap(engine, url, num_tokens, options.seed)
        rounds = [overlap.round() for _ in range(QUICK_ROUNDS if options.quick else ROUNDS)]
    engine.close()
    report(rounds, num_tokens, options.seed)
    return 0


def vllm(quick: bool, seed: int) -> int:
    """The vllm engine beside vLLM."""
    rounds: list[BatchRound] = []
    with models(seed, quick) as made, harness.store() as url:
        for _ in range(1 if quick else VLLM_PAIRS):
            both = Both(f"{made[-1].folder}?dtype=float32", CONTEXT, PROMPTS, prefix_caching=False)
            try:
                batch = VLLMBatch(both, url, seed)
                batch.round(0)  # warms up
                rounds += [batch.round(number) for number in range(VLLM_ROUNDS)]
            finally:
                both.close()
    for each in rounds:
        print(
            f"bare {each.bare[0]:.2f} s, prefill {each.prefill[0]:.2f} s, with upload {each.upload[0]:.2f} s"
            f" (processor: {each.bare[1]:.2f}, {each.prefill[1]:.2f}, {each.upload[1]:.2f} s);"
            f" uploading took {each.put_s:.3f} s, of which prefills waited {each.waited_s:.3f} s"
        )
    figures = {
        "ratio": [each.bare[0] / each.prefill[0] for each in rounds],
        "upload_ratio": [each.bare[0] / each.upload[0] for each in rounds],
        "cpu_ratio": [each.bare[1] / each.prefill[1] for each in rounds],
        "upload_cpu_ratio": [each.bare[1] / each.upload[1] for each in rounds],
        "hidden": [1 - each.waited_s / each.put_s for each in rounds],
    }
    harness.finish(
        engine="vllm",
        model=made[-1].name,
        **{name: statistics.median(values) for name, values in figures.items()},
        **{f"{name}_interval": [min(values), max(values)] for name, values in figures.items()},
        upload_seconds=statistics.median(each.put_s for each in rounds),
        waited_seconds=statistics.median(each.waited_s for each in rounds),
        tokens=sum(map(len, batch.prompts)),
        rounds=len(rounds),
        seed=seed,
    )
    return 0


def report(rounds: list[Round], num_tokens: int, seed: int) -> None:
    """The figures, for people and as JSON."""
    for each in rounds:
        print(
            f"prefill {each.prefill_s:.3f} s, with upload {each.transferred_s:.3f} s;"
            f" uploading took {each.upload_s:.3f} s, of which {each.exposed_s:.3f} s were exposed"
        )
    extra = [each.extra_bytes for each in rounds if each.extra_bytes is not None]
    harness.finish(
        upload_seconds=statistics.median(each.upload_s for each in rounds),
        exposed_seconds=statistics.median(each.exposed_s for each in rounds),
        hidden=statistics.median(1 - each.exposed_s / each.upload_s for each in rounds),
        hidden_rounds=[1 - each.exposed_s / each.upload_s for each in rounds],
        extra_MB=statistics.median(extra) / 1e6 if extra else None,
        tokens=num_tokens,
        rounds=len(rounds),
        seed=seed,
    )


if __name__ == "__main__":
    sys.exit(main())
