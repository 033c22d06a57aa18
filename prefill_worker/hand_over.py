"""From tokens to stored KV. What is stored is not sent again, nor computed again where the engine can resume."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from engines.base import PrefillEngine
from infra.fault_points import reached
from kvstore.base import Board, KVStore
from kvstore.blocks import BlockRef, block_refs, shared_boundary, window_ref
from kvstore.uploader import Uploader
from messages.errors import ContextExceeded, HandOverFailed, KvasirError, StoreUnavailable
from messages.jobs import PrefillJob, PrefillReport, StoredKV
from messages.kv import Block, KVCache, KVLayout, Window
from prefill_worker.admission import Admission, NoRoom
from prefill_worker.prefix import PrefixLeases

__all__ = ["HandOvers", "HandedOver", "NoRoom"]

log = logging.getLogger(__name__)

# Restoring costs a transfer and a slot write; below this many tokens computing is as quick.
MIN_RESUME_TOKENS = 64
# How fast a worker is taken to compute before it has measured itself. Low: to wait for a neighbour who is alive costs
# less than to compute the same twice.
_FIRST_GUESS_TOKENS_PER_S = 100.0
# A neighbour's prefix is of use once it is stored, not once it is computed.
_STORING_TOO = 1.5

_HEADER_BYTES = 512  # of a record, and its key

_Records = list[tuple[type[Block] | type[Window], BlockRef]]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Where the KV lies (or why it does not), and what it took."""

    kv: StoredKV | None
    report: PrefillReport
    why_no_kv: str = ""


class HandOvers:
    """One prefill worker's way of getting KV caches into the store.

    `unproved` says why the engine's hand-over can't be trusted, if it can't. Prompts of up to `short_tokens` are left
    to decode.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        kv: KVStore,
        board: Board,
        worker_id: str,
        decode_waits: Callable[[], bool],
        unproved: str = "",
        short_tokens: int = 0,
    ) -> None:
        self.admission = Admission(kv, board, worker_id, decode_waits)
        self.leases = PrefixLeases(board, worker_id)
        self.tokens_per_s = 0.0  # moving average; 0: nothing computed yet
        self._engine = engine
        self._kv = kv
        self._unproved = unproved
        self._short_tokens = short_tokens

    def compute_and_store(self, job: PrefillJob, stop: threading.Event) -> HandedOver:
        """Make sure that the KV cache of all prompt tokens but the last lies in the store.

        A store that is away or too small, or an engine that can't give its cache out, costs the hand-over and not the
        job: the decoder then does the prompt itself. Raises NoRoom, and what else the engine raises.
        """
        _check_context(self._engine, job)
        layout = self._engine.info.layout
        why = self._why_none(job)
        if not why and layout:
            try:
                return self._hand_over(_HandOver(self, self._engine, layout, self._kv, job), stop)
            except StoreUnavailable as error:
                why = f"the store did not take it: {error}"
            except HandOverFailed as error:
                why = f"the engine did not give it out: {error}"
            log.warning("job %s goes on without its KV cache: %s", job.job_id, why)
        return HandedOver(None, PrefillReport(engine=self._engine.info.engine), why)

    def _hand_over(self, one: _HandOver, stop: threading.Event) -> HandedOver:
        try:
            return one.run(stop)
        except NoRoom:
            raise
        except Exception:  # whatever it is: no decode job will point at these blocks, so nobody else would delete them
            one.drop_own()
            raise

    def note_rate(self, tokens: int, seconds: float) -> None:
        """Learn how fast this worker is."""
        if tokens and seconds > 0:
            rate = tokens / seconds
            self.tokens_per_s = 0.8 * self.tokens_per_s + 0.2 * rate if self.tokens_per_s else rate

    def expected_s(self, tokens: int) -> float:
        """About how long computing and storing this many tokens takes here."""
        return _STORING_TOO * tokens / (self.tokens_per_s or _FIRST_GUESS_TOKENS_PER_S)

    def _why_none(self, job: PrefillJob) -> str:
        info = self._engine.info
        if not info.capabilities.exports_kv or info.layout is None:
            return f"engine {info.engine} exports no KV cache"
        if len(job.tokens) < 2:
            return "a prompt of one token has no KV cache to hand over"
        if len(job.tokens) <= self._short_tokens:
            return "a prompt this short is computed sooner than fetched"
        return self._unproved


def _check_context(engine: PrefillEngine, job: PrefillJob) -> None:
    prompt, answer = len(job.tokens), job.sampling.max_tokens
    if prompt + answer > engine.info.context:
        raise ContextExceeded(
            f"the prompt has {prompt:,} tokens and the answer may have {answer:,}, "
            f"but {job.model} is loaded with a context of {engine.info.context:,}"
        )


class _HandOver:
    """One prompt's way into the store."""

    def __init__(self, owner: HandOvers, engine: PrefillEngine, layout: KVLayout, kv: KVStore, job: PrefillJob) -> None:
        self._owner = owner
        self._engine = engine
        self._layout = layout
        self._kv = kv
        self._job = job
        self._fingerprint = engine.info.fingerprint
        self._covered = len(job.tokens) - 1  # the last token is the decoder's
        self._shared = shared_boundary(layout, min(job.shared_tokens, self._covered))
        self._refs = block_refs(self._fingerprint, layout, job.tokens, self._covered, self._shared, job.job_id)
        self._resumes = engine.info.capabilities.resumes
        self._look: _Records | None = None  # what was absent a moment ago, until somebody else may have stored some
        self._repaired = False  # a stored start was damaged: once, it is computed anew
        self._computed = self._put_bytes = 0
        self._prefill_s = self._put_s = 0.0

    def run(self, stop: threading.Event) -> HandedOver:
        """Compute what is absent, upload it meanwhile, and report when all lies in the store."""
        self._look = self._ask_absent(self._covered)
        with self._owner.admission.reserve(self._bytes_to_store):
            self._compute_in_parts(stop)
        self._owner.note_rate(self._computed, self._prefill_s)
        report = PrefillReport(
            engine=self._engine.info.engine,
            prefill_s=self._prefill_s,
            put_s=self._put_s,
            computed_tokens=self._computed,
            restored_tokens=max(0, self._covered - self._computed),
            put_bytes=self._put_bytes,
        )
        size = self._covered * self._layout.token_bytes
        return HandedOver(StoredKV(self._fingerprint, self._layout, self._covered, self._shared, size), report)

    def drop_own(self) -> None:
        """Delete what was stored for this job alone."""
        try:
            self._kv.delete([ref for _, ref in self._records(self._covered) if not ref.shared])
        except StoreUnavailable as error:  # their TTL ends them
            log.info("job %s: its blocks stay until their TTL: %s", self._job.job_id, error)

    def _bytes_to_store(self) -> int:
        """About what this job will still add to the store."""
        return sum(_stored_bytes(self._layout, type_, ref) for type_, ref in self._absent(self._covered))

    def _compute_in_parts(self, stop: threading.Event) -> None:
        if self._resumes and self._shared >= MIN_RESUME_TOKENS:
            self._compute_prefix(stop)
        self._compute(self._covered, stop)

    def _compute_prefix(self, stop: threading.Event) -> None:
        """The class-wide part by itself, by one worker: the others wait for it and resume from it."""
        if not self._absent(self._shared):
            return
        chain = next(ref.chain for ref in self._refs if ref.end == self._shared)
        patience_s = self._owner.expected_s(self._shared)
        self._look = None
        with self._owner.leases.turn(chain, lambda: not self._absent(self._shared), patience_s, stop) as ours:
            if ours:
                self._compute(self._shared, stop)

    def _compute(self, end: int, stop: threading.Event) -> None:
        """Run the engine up to position `end`, uploading each absent record as it comes."""
        absent = self._absent(end)
        self._look = None
        if not absent:
            return
        first = min([ref.start for type_, ref in absent if type_ is Block], default=end)
        try:
            resume = self._stored_start(min(first, end - 1))
        except HandOverFailed as error:
            if self._repaired:
                raise
            self._repaired = True
            log.warning("job %s: deleted its stored start, which can't be used: %s", self._job.job_id, error)
            return self._compute_in_parts(stop) if end > self._shared else self._compute(end, stop)
        uploader = Uploader(self._kv, self._fingerprint, self._layout)
        try:
            emit = _emit_to(uploader, absent, self._job.job_id)
            self._prefill(self._job.tokens[:end], emit, first, resume, stop)
        except BaseException:
            uploader.abandon()
            with suppress(KvasirError):
                uploader.finish()  # or its thread might store a block after all of them were deleted
            raise
        uploaded = uploader.finish()
        self._put_s += uploaded.exposed_s
        self._put_bytes += uploaded.bytes

    def _prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block | Window], None],
        first: int,
        resume: KVCache | None,
        stop: threading.Event,
    ) -> None:
        try:
            done = self._engine.prefill(tokens, emit, first=first, resume=resume, stop=stop)
        except HandOverFailed as error:
            if resume is None:
                raise
            log.info("job %s: the engine can't go on from the stored start: %s", self._job.job_id, error)
            done = self._engine.prefill(tokens, emit, first=first, stop=stop)
        self._computed += done.computed_tokens
        self._prefill_s += done.seconds

    def _records(self, end: int) -> _Records:
        """All records up to position `end`, the sliding-window layers' at `end` included."""
        records: _Records = [(Block, ref) for ref in self._refs if ref.end <= end]
        if self._layout.window_layers:
            records.append((Window, window_ref(records[-1][1])))
        return records

    def _absent(self, end: int) -> _Records:
        """Those of them that are not stored. Windows at other ends than the last were not looked for."""
        if self._look is not None and (end == self._covered or not self._layout.window_layers):
            return [(type_, ref) for type_, ref in self._look if ref.end <= end]
        return self._ask_absent(end)

    def _ask_absent(self, end: int) -> _Records:
        records = self._records(end)
        missing = set(self._kv.missing([ref for _, ref in records]))
        return [(type_, ref) for type_, ref in records if ref in missing]

    def _stored_start(self, end: int) -> KVCache | None:
        """The stored start of the prompt, at most up to `end`, if the engine can go on from it and it is worth it.

        Raises HandOverFailed if it is damaged, or has just gone: all of it has been deleted then, since what is there
        is not stored again.
        """
        start = self._resumable(end)
        if start < MIN_RESUME_TOKENS:
            return None
        *refs, last = [ref for _, ref in self._records(start)]
        windowed = bool(self._layout.window_layers)
        try:
            blocks = self._kv.get(self._fingerprint, self._layout, refs if windowed else [*refs, last])
            window = self._kv.get_window(self._fingerprint, self._layout, last) if windowed else None
            return KVCache(self._layout, tuple(blocks), window)
        except HandOverFailed:
            self._kv.delete([*refs, last])
            raise

    def _resumable(self, end: int) -> int:
        """The last position up to `end` at which the engine could resume; 0: none.

        Sliding layers keep no more than their window, so with them only the class-wide part's end will do.
        """
        if not self._resumes:
            return 0
        if self._layout.window_layers:
            return self._shared if self._shared <= end else 0
        return max([ref.end for ref in self._refs if ref.end <= end], default=0)


def _emit_to(uploader: Uploader, absent: _Records, job_id: str) -> Callable[[Block | Window], None]:
    """Upload those records that are not stored yet."""
    wanted = {(type_, ref.end): ref for type_, ref in absent}

    def emit(record: Block | Window) -> None:
        end = record.position if isinstance(record, Window) else record.end
        ref = wanted.get((type(record), end))
        if ref:
            uploader.put(ref, record)
            reached("prefill.storing", job_id)

    return emit


def _stored_bytes(layout: KVLayout, type_: type[Block] | type[Window], ref: BlockRef) -> int:
    """About what a record takes in the store."""
    payload = (ref.end - ref.start) * layout.token_bytes
    if type_ is Window:
        rows = min(ref.end, layout.window) * len(layout.window_layers)
        payload = rows * 2 * layout.kv_heads * layout.head_dim * layout.numpy_type.itemsize
    size = payload + _HEADER_BYTES
    # Redis' allocator (jemalloc) has four sizes in each doubling: a record of 4 MiB and a header takes 5.
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step
