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

What the figures do not show: a wire slower than the prefill (786 MB in 4 s are 1.6 Gbit/s), where the queue fills and
prefill waits; an engine that transfers KV only at its end (llama.cpp), where nothing hides; the cost of copying blocks
out of an accelerator.
"""

from __future__ import annotations

import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks import harness
from engines.registry import EngineOptions
from engines.simulated.engine import SimulatedEngine, open_engine
from kvstore.blocks import BlockRef, block_refs
from kvstore.redis.store import RedisKVStore
from kvstore.uploader import Uploader
from messages.kv import Block, KVLayout, Record

WEIGHTS = "sim:prefill=2000,scale=1,layers=48,kv_heads=4,head_dim=128,dtype=bf16,context=65536"
TOKENS, QUICK_TOKENS = 8000, 2000
ROUNDS, QUICK_ROUNDS = 3, 1


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
            if absent := store.missing(refs):
                raise ValueError(f"{len(absent)} of {len(refs)} blocks were not stored")
        finally:
            store.delete(refs)
            store.close()
        exposed_s = max(0.0, transferred_s[0] - prefill_s)
        return Round(prefill_s, transferred_s[0], store.put_s, exposed_s, extra)

    def _kv_transfer(self, store: TimedStore, refs: list[BlockRef]) -> None:
        by_start = {ref.start: ref for ref in refs}
        with Uploader(store, self._engine.info.fingerprint, self._layout) as uploader:
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


def main() -> int:
    """Measure, explain, and end with the line of JSON."""
    options = harness.options(__doc__)
    print(harness.machine())
    num_tokens = QUICK_TOKENS if options.quick else TOKENS
    engine = open_engine(EngineOptions(WEIGHTS))
    with harness.store() as url:
        overlap = Overlap(engine, url, num_tokens, options.seed)
        rounds = [overlap.round() for _ in range(QUICK_ROUNDS if options.quick else ROUNDS)]
    engine.close()
    report(rounds, num_tokens, options)
    return 0


def report(rounds: list[Round], num_tokens: int, options: harness.Options) -> None:
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
        seed=options.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
