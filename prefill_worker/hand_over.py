"""From tokens to stored KV. What is stored is not sent again, nor computed again where the engine can resume."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from engines.base import Prefilled, PrefillEngine
from kvstore.base import KVStore
from kvstore.blocks import BlockRef, block_refs, shared_boundary, window_ref
from kvstore.uploader import Uploader
from messages.errors import ContextExceeded, HandOverFailed, StoreUnavailable
from messages.jobs import PrefillJob, PrefillReport, StoredKV
from messages.kv import Block, KVCache, KVLayout, Window

log = logging.getLogger(__name__)

# Restoring costs a transfer and a slot write; below this many tokens computing is as quick.
MIN_RESUME_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Where the KV lies (or why it does not), and what it took."""

    kv: StoredKV | None
    report: PrefillReport
    why_no_kv: str = ""


def compute_and_store(
    engine: PrefillEngine, kv: KVStore, job: PrefillJob, stop: threading.Event, unproved: str = ""
) -> HandedOver:
    """Make sure that the KV cache of all prompt tokens but the last lies in the store.

    `unproved` says why the engine's hand-over can't be trusted, if it can't. A store that is away or full, or an engine
    that can't give its cache out, costs the hand-over, not the job: the decoder then does the prompt itself. Raises
    what else the engine raises.
    """
    _check_context(engine, job)
    layout = engine.info.layout
    why = _why_no_hand_over(engine, job, unproved)
    if not why and layout:
        try:
            return _HandOver(engine, layout, kv, job).run(stop)
        except StoreUnavailable as error:
            why = f"the store did not take it: {error}"
        except HandOverFailed as error:
            why = f"the engine did not give it out: {error}"
        log.warning("job %s goes on without its KV cache: %s", job.job_id, why)
    return HandedOver(None, PrefillReport(engine=engine.info.engine), why)


def _check_context(engine: PrefillEngine, job: PrefillJob) -> None:
    prompt, answer = len(job.tokens), job.sampling.max_tokens
    if prompt + answer > engine.info.context:
        raise ContextExceeded(
            f"the prompt has {prompt:,} tokens and the answer may have {answer:,}, "
            f"but {job.model} is loaded with a context of {engine.info.context:,}"
        )


def _why_no_hand_over(engine: PrefillEngine, job: PrefillJob, unproved: str) -> str:
    info = engine.info
    if not info.capabilities.exports_kv or info.layout is None:
        return f"engine {info.engine} exports no KV cache"
    if len(job.tokens) < 2:
        return "a prompt of one token has no KV cache to hand over"
    return unproved


class _HandOver:
    """One prompt's way into the store."""

    def __init__(self, engine: PrefillEngine, layout: KVLayout, kv: KVStore, job: PrefillJob) -> None:
        self._engine = engine
        self._layout = layout
        self._kv = kv
        self._job = job
        self._fingerprint = engine.info.fingerprint
        self._covered = len(job.tokens) - 1  # the last token is the decoder's
        self._shared = shared_boundary(layout, min(job.shared_tokens, self._covered))
        self._refs = block_refs(self._fingerprint, layout, job.tokens, self._covered, self._shared, job.job_id)

    def run(self, stop: threading.Event) -> HandedOver:
        """Compute what is absent, upload it meanwhile, and report when all lies in the store."""
        absent = self._kv.missing(self._refs)
        with Uploader(self._kv, self._fingerprint, self._layout) as uploader:
            done = self._compute(absent, uploader, stop) if absent else Prefilled(0, self._covered, 0.0)
            uploaded = uploader.finish()
        report = PrefillReport(
            engine=self._engine.info.engine,
            prefill_s=done.seconds,
            put_s=uploaded.exposed_s,
            computed_tokens=done.computed_tokens,
            restored_tokens=done.restored_tokens,
            put_bytes=uploaded.bytes,
        )
        size = self._covered * self._layout.token_bytes
        return HandedOver(StoredKV(self._fingerprint, self._layout, self._covered, self._shared, size), report)

    def _compute(self, absent: list[BlockRef], uploader: Uploader, stop: threading.Event) -> Prefilled:
        by_start = {ref.start: ref for ref in absent}
        by_end = {ref.end: ref for ref in self._refs}

        def emit(record: Block | Window) -> None:
            if isinstance(record, Window):
                uploader.put(window_ref(by_end[record.position]), record)
            elif record.start in by_start:
                uploader.put(by_start[record.start], record)

        tokens, first = self._job.tokens[:-1], absent[0].start
        resume = self._stored_prefix(first)
        try:
            return self._engine.prefill(tokens, emit, first=first, resume=resume, stop=stop)
        except HandOverFailed as error:
            if resume is None:
                raise
            log.info("job %s: computing the whole prompt, its stored start is of no use: %s", self._job.job_id, error)
            return self._engine.prefill(tokens, emit, first=first, stop=stop)

    def _stored_prefix(self, end: int) -> KVCache | None:
        """The stored start of the prompt as a cache, if the engine can go on from it and it is worth the transfer."""
        resumes = self._engine.info.capabilities.resumes and not self._layout.window_layers
        if not resumes or end < MIN_RESUME_TOKENS:
            return None
        try:
            blocks = self._kv.get(self._fingerprint, self._layout, [ref for ref in self._refs if ref.end <= end])
        except HandOverFailed:
            return None
        return KVCache(self._layout, tuple(blocks))
