"""KV caches from the store: where a job's records lie, and fetching them before a slot is free."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from engines.base import EngineInfo
from infra.broker import Delivery
from infra.envelope import read_job
from kvstore.base import KVStore
from kvstore.blocks import BlockRef, block_refs, window_ref
from messages.jobs import DecodeJob, StoredKV
from messages.kv import KVCache


@dataclass(frozen=True, slots=True)
class Fetched:
    """A KV cache in memory, and how long it took to come."""

    cache: KVCache
    seconds: float


def stored_refs(job: DecodeJob, kv: StoredKV) -> list[BlockRef]:
    """References to the blocks of the job's KV cache."""
    return block_refs(kv.fingerprint, kv.layout, job.job.tokens, kv.num_tokens, kv.shared_tokens, job.job.job_id)


def own_refs(job: DecodeJob) -> list[BlockRef]:
    """References to what this job alone uses: to be deleted once it is done."""
    if job.kv is None:
        return []
    refs = [ref for ref in stored_refs(job, job.kv) if not ref.shared]
    return refs + [window_ref(ref) for ref in refs[-1:] if job.kv.layout.window_layers]


def why_foreign(stored: StoredKV, info: EngineInfo) -> str:
    """Why an engine can't take this KV cache; "": it can."""
    if not info.capabilities.imports_kv or info.layout is None:
        return f"engine {info.engine} takes no KV cache"
    if stored.fingerprint != info.fingerprint:
        return f"the KV cache is of {stored.fingerprint:.12}, this worker's model is {info.fingerprint:.12}"
    return ""


def fetch(kv: KVStore, job: DecodeJob, stored: StoredKV) -> Fetched:
    """Load a job's KV cache. Raises HandOverFailed, StoreUnavailable."""
    started = time.monotonic()
    refs = stored_refs(job, stored)
    blocks = kv.get(stored.fingerprint, stored.layout, refs)
    window = None
    if stored.layout.window_layers:
        window = kv.get_window(stored.fingerprint, stored.layout, window_ref(refs[-1]))
    return Fetched(KVCache(stored.layout, tuple(blocks), window), time.monotonic() - started)


class AheadFetch:
    """The KV cache of one delivery, on its way while its slot is not free yet. Problems wait until it is asked for."""

    def __init__(self, kv: KVStore, delivery: Delivery, info: EngineInfo, pool: ThreadPoolExecutor) -> None:
        self._kv = kv
        self._delivery = delivery
        self._info = info
        self._future: Future[Fetched | None] = pool.submit(self._fetch)

    def result(self) -> Fetched | None:
        """What came; None if the job has no KV cache that this engine takes. Raises as `fetch`, and InvalidMessage."""
        return self._future.result()

    def _fetch(self) -> Fetched | None:
        job = read_job(self._delivery, DecodeJob)
        if job.kv is None or why_foreign(job.kv, self._info):
            return None
        return fetch(self._kv, job, job.kv)
