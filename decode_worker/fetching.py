"""KV caches from the store: where a job's records lie, and fetching them before a slot is free."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engines.base import DecodeEngine, Loaded
from engines.sketch import Agreement
from infra.broker.base import Delivery
from kvstore.base import KVStore
from kvstore.blocks import BlockRef, block_refs, snapshot_refs
from messages import codec
from messages.errors import KVTransferFailed
from messages.jobs import DecodeJob, StoredKV
from messages.kv import KVCache, KVLayout, Record, State, is_finite


@dataclass(frozen=True, slots=True)
class Fetched:
    """A KV cache in memory, and how long it took to come."""

    cache: KVCache
    seconds: float


def stored_refs(job: DecodeJob, kv: StoredKV) -> list[BlockRef]:
    """References to the blocks of the job's KV cache."""
    one = job.job
    return block_refs(
        kv.fingerprint, kv.layout, one.tokens, kv.num_tokens, kv.shared_tokens, one.job_id, kv.sketch, one.tag
    )


def own_refs(job: DecodeJob) -> list[BlockRef]:
    """References to what this job alone uses: to be deleted once it is done."""
    if job.kv is None:
        return []
    refs = [ref for ref in stored_refs(job, job.kv) if not ref.shared]
    return [*refs, *snapshot_refs(job.kv.layout, refs[-1])] if refs and job.kv.layout.snapshots else refs


def agreement(stored: StoredKV, loaded: Loaded[DecodeEngine]) -> Agreement:
    """Whether an engine takes this KV cache: its producer computes what it would compute itself, as was measured."""
    info = loaded.engine.info
    if not info.capabilities.imports_kv or info.layout is None:
        return Agreement(f"engine {info.engine} takes no KV cache")
    if stored.fingerprint != info.fingerprint:
        return Agreement(f"the KV cache is of {stored.fingerprint:.12}, this worker's model is {info.fingerprint:.12}")
    if why := stored.layout.why_unsupported:
        return Agreement(why)
    return loaded.sketches.agreement(stored.sketch)


def fetch(kv: KVStore, job: DecodeJob, stored: StoredKV) -> Fetched:
    """Load a job's KV cache. Raises KVTransferFailed, StoreUnavailable."""
    started = time.monotonic()
    cache = kv.get_cache(stored.fingerprint, stored.layout, stored_refs(job, stored))
    for record in cache.records:
        check_finite(record, stored.layout)
    return Fetched(cache, time.monotonic() - started)


def check_finite(record: Record, layout: KVLayout) -> None:
    """Raises KVTransferFailed for inf or nan, whoever computed it: every answer from it would be nonsense."""
    if not is_finite(record.data, "f32" if isinstance(record, State) else layout.dtype):
        raise KVTransferFailed("the stored KV cache holds inf or nan")


def fetch_ahead(kv: KVStore, delivery: Delivery, loaded: Loaded[DecodeEngine]) -> Fetched | None:
    """The KV cache of a delivery that has no slot yet; None if the job has none that this engine takes.

    Raises as `fetch`, and InvalidMessage.
    """
    job = codec.decode(delivery.message.body, DecodeJob)
    if job.kv is None or agreement(job.kv, loaded).why:
        return None
    return fetch(kv, job, job.kv)
