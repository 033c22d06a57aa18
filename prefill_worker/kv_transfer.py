"""From tokens to a stored KV cache. Stored records are not sent again, nor computed again if the engine can resume."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from engines.base import LoadedEngine, PrefillEngine
from engines.curves import MeasuredCurves, length_class
from infra.broker.failpoints import failpoint
from kvstore.base import ClusterState, KVStore
from kvstore.blocks import BlockRef, block_refs, shared_boundary, snapshot_refs
from kvstore.heartbeat import CLAIM_TTL_S
from kvstore.uploader import Uploader
from messages.change import replace_fields
from messages.errors import Cancelled, ContextExceeded, KvasirError, KVTransferFailed, StoreUnavailable
from messages.jobs import DecodeJob, PrefillJob, PrefillReport, StoredKV
from messages.kv import Block, KVCache, KVLayout, Record, RecurrentState, Window
from prefill_worker.admission import Admission, NoCapacity
from prefill_worker.free_memory import FreeMemory

log = logging.getLogger(__name__)

# Computing fewer tokens than this is as fast as fetching their KV cache and writing it into a slot.
MIN_RESUME_TOKENS = 64
# Assumed speed of a worker until it has measured its own. The guess is low, because waiting for another worker costs
# less than computing the same prefix twice.
_FIRST_GUESS_TOKENS_PER_S = 100.0
# The longest that a worker waits for another worker's prefix, as a multiple of the time that it takes to compute that
# prefix. This is above 1 because the other worker must also store the prefix.
_STORING_TOO = 1.5
# Pauses between two checks for another worker's prefix, and between two readings of the decode workers' registrations.
_LOOK_EVERY_S = 0.1
REFUSALS_EVERY_S = 3.0

# A KV cache smaller than this is stored faster without a background thread.
_BEHIND_BYTES = 1 << 20
_HEADER_BYTES = 512  # bytes that a record's key and header take

_Records = list[tuple[type[Record], BlockRef]]


class KVWriter:
    """Stores the KV caches of one prefill worker's jobs.

    Prompts are left to decode if their tokens, times their answers, are below `short_tokens`.
    """

    def __init__(
        self,
        loaded_engine: LoadedEngine[PrefillEngine],
        kv: KVStore,
        cluster_state: ClusterState,
        worker_id: str,
        decode_waits: Callable[[], bool],
        refusals: "Refusals",
        free_memory: FreeMemory,
        short_tokens: int = 0,
    ) -> None:
        self.admission = Admission(kv, cluster_state, worker_id, decode_waits)
        self.leases = PrefixLeases(cluster_state, worker_id)
        self.tokens_per_s = self.prompt_s = 0.0  # moving averages; 0 before the first prompt
        self.curves = MeasuredCurves()
        self.engine = loaded_engine.engine
        self.store = kv
        self._engine_why_no_kv = loaded_engine.why_no_kv
        self._worker_id = worker_id
        self.sketch = loaded_engine.sketches.name
        self._refusals = refusals
        self._free_memory = free_memory
        self._short_tokens = short_tokens

    def compute_and_store(self, job: PrefillJob, stop: threading.Event, queue_s: float = 0.0) -> DecodeJob:
        """Make sure that the KV cache of `job.kv_tokens` is in the store, and return the decode job.

        `queue_s`: how long the job has waited, for the report.

        If the store is away or too small, or the engine can't export its cache, only the KV transfer is lost and not
        the job: the decode worker then computes the prompt itself. Raises ContextExceeded, NoCapacity, and the engine's
        errors.
        """
        layout, reason = self.engine.info.layout, self._why_no_kv(job)
        report = PrefillReport(self._worker_id, self.engine.info.engine, queue_s)
        if reason or not layout:
            return DecodeJob(job, None, report, reason)
        transfer = _Transfer(self, layout, job, report, stop)
        try:
            transfer.known_absent = transfer.absent(transfer.kv.num_tokens)
            with self._free_memory.reserve(transfer.kv.stored_bytes), self.admission.reserve(transfer.bytes_to_store):
                transfer.compute_in_parts()
        except NoCapacity:
            raise
        # After an error, no decode job refers to the stored records, so only this worker can delete them.
        except Exception as error:
            transfer.drop_own()
            if isinstance(error, StoreUnavailable):
                reason = f"the store did not accept it: {error}"
            elif isinstance(error, KVTransferFailed):
                reason = f"the engine did not export it: {error}"
            else:
                raise
            log.warning("job %s goes on without its KV cache: %s", job.job_id, reason)
            return DecodeJob(job, None, report, reason)
        if transfer.report.computed_tokens and transfer.report.prefill_s > 0:
            seconds, computed_tokens = transfer.report.prefill_s, transfer.report.computed_tokens
            self.tokens_per_s = _moving_average(self.tokens_per_s, computed_tokens / seconds)
            self.prompt_s = _moving_average(self.prompt_s, seconds)
            self.curves.note(job.model, length_class(computed_tokens), computed_tokens / seconds)
        return DecodeJob(job, transfer.kv, transfer.report)

    def _why_no_kv(self, job: PrefillJob) -> str:
        """Return why this prompt goes on without a KV cache; "" if it gets one.

        Raises ContextExceeded if it is too long.
        """
        info, asks = self.engine.info, job.asks()
        prompt, answer = max(((len(ask.tokens), ask.sampling.max_tokens) for ask in asks), key=sum)
        if prompt + answer > info.context:
            raise ContextExceeded(
                f"the prompt has {prompt:,} tokens and the answer up to {answer:,}, "
                f"but {job.model} is loaded with a context of {info.context:,}"
            )
        if not info.capabilities.exports_kv or info.layout is None:
            return f"engine {info.engine} can't export a KV cache"
        if job.kv_tokens < 1:
            return "a prompt of one token has no KV cache to transfer"
        if job.kv_tokens * len(asks) < self._short_tokens:
            return "computing a prompt this short is faster than fetching its KV cache"
        return self._engine_why_no_kv or info.layout.why_unsupported or self._refusals.reason()


def _moving_average(mean: float, value: float) -> float:
    return 0.8 * mean + 0.2 * value if mean else value


class _Transfer:
    """The transfer of one prompt's KV cache into the store: where it will be stored, and what that has cost so far."""

    def __init__(
        self, owner: KVWriter, layout: KVLayout, job: PrefillJob, report: PrefillReport, stop: threading.Event
    ) -> None:
        self._owner = owner
        self._engine = owner.engine
        self._store = owner.store
        self._job = job
        self._stop = stop
        num_tokens = job.kv_tokens  # the decode worker computes the rest of the prompt
        shared_tokens = shared_boundary(layout, min(job.shared_tokens, num_tokens))
        fingerprint = self._engine.info.fingerprint
        # The sketch is part of the records' names. A prompt is therefore resumed only from records of engines that
        # compute the same values.
        sketch = owner.sketch
        size = num_tokens * layout.token_bytes + layout.state_bytes
        self.kv = StoredKV(fingerprint, layout, num_tokens, shared_tokens, size, sketch)
        self.report = replace_fields(report, restored_tokens=num_tokens)
        self._refs = block_refs(fingerprint, layout, job.tokens, num_tokens, shared_tokens, job.job_id, sketch, job.tag)
        self._resumes = self._engine.info.capabilities.resumes
        # The shared part of the prompt is computed separately, because a snapshot describes the end of a sequence and
        # can't be cut. In a conversation, the part up to the last whole block is also computed separately, so that the
        # next turn can resume there.
        self._stops_at_boundary = self._resumes and shared_tokens >= MIN_RESUME_TOKENS
        last_boundary = shared_boundary(layout, num_tokens) if job.tag and layout.snapshots and self._resumes else 0
        self._turn_end = last_boundary if last_boundary >= max(MIN_RESUME_TOKENS, shared_tokens + 1) else 0
        # The records that the last check did not find in the store. This becomes None as soon as another worker may
        # have stored some of them.
        self.known_absent: _Records | None = None
        # Whether the stored start of the prompt was found damaged and was deleted. This is done at most once.
        self._has_repaired = False

    def bytes_to_store(self) -> int:
        """Return about how many bytes its absent records will take in the store."""
        absent, shared_tokens = self.absent(self.kv.num_tokens), self.kv.shared_tokens
        stops = (shared_tokens if self._stops_at_boundary and self.kv.layout.snapshots else 0, self._turn_end)
        for stop in stops:
            if 0 < stop < self.kv.num_tokens:
                absent += [(type_, ref) for type_, ref in self.absent(stop) if type_ is not Block]
        return self._bytes(absent)

    def _bytes(self, absent: _Records) -> int:
        layout, total = self.kv.layout, 0
        for type_, ref in absent:
            payload = (ref.end - ref.start) * layout.token_bytes
            if type_ is Window:
                rows = min(ref.end, layout.window) * len(layout.window_layers)
                payload = rows * 2 * layout.kv_heads * layout.head_dim * layout.numpy_type.itemsize
            elif type_ is RecurrentState:
                payload = layout.state_bytes // len(layout.state_layers)
            size = payload + _HEADER_BYTES
            # jemalloc, the allocator of Redis, has four sizes from one power of two to the next, and rounds each
            # request up. So a record of 4 MiB plus its header takes 5 MiB.
            step = 1 << max(0, size.bit_length() - 3)
            total += -(-size // step) * step
        return total

    def drop_own(self) -> None:
        """Delete the records that were stored only for this job."""
        try:
            self._store.delete([ref for _, ref in self._records(self.kv.num_tokens) if not ref.is_shared])
        except StoreUnavailable as error:  # the store deletes the records after their TTL
            log.info("job %s: its blocks stay until their TTL: %s", self._job.job_id, error)

    def compute_in_parts(self) -> None:
        """Compute the prompt, the class-wide part first and separately.

        Only one worker computes that part. The others wait for it and resume from it.
        """
        if self._stops_at_boundary and self.absent(self.kv.shared_tokens):
            chain = next(ref.chain for ref in self._refs if ref.end == self.kv.shared_tokens)
            patience_s = _STORING_TOO * self.kv.shared_tokens / (self._owner.tokens_per_s or _FIRST_GUESS_TOKENS_PER_S)
            self.known_absent = None
            with self._owner.leases.turn(
                chain, lambda: not self.absent(self.kv.shared_tokens), patience_s, self._stop
            ) as holds_lease:
                if holds_lease:
                    self._compute(self.kv.shared_tokens)
        if self._turn_end:
            self._compute(self._turn_end)
        self._compute(self.kv.num_tokens)

    def _compute(self, end: int) -> None:
        """Run the engine up to position `end`, and store each absent record as it is computed."""
        absent = self.absent(end)
        self.known_absent = None
        if not absent:
            return
        first = min([ref.start for type_, ref in absent if type_ is Block], default=end)
        try:
            resume = self._stored_start(min(first, end - 1))
        except KVTransferFailed as error:
            if self._has_repaired:
                raise
            self._has_repaired = True
            log.warning("job %s: deleted its stored start, which can't be used: %s", self._job.job_id, error)
            return self.compute_in_parts() if end > self.kv.shared_tokens else self._compute(end)
        uploader = Uploader(
            self._store, self.kv.fingerprint, self.kv.layout, background=self._bytes(absent) > _BEHIND_BYTES
        )
        try:
            self._upload(uploader, end, absent, resume)
        except BaseException:
            uploader.abandon()
            with suppress(KvasirError):
                # Wait for the upload thread to end. Otherwise it could store a block after the other blocks have been
                # deleted.
                uploader.finish()
            raise

    def _upload(self, uploader: Uploader, end: int, absent: _Records, resume: KVCache | None) -> None:
        """Have the engine compute up to `end`, and store the absent records."""
        absent_refs = {(type_, ref.end, ref.layer): ref for type_, ref in absent}
        first = min([ref.start for type_, ref in absent if type_ is Block], default=end)
        tokens = self._job.tokens[:end]

        def emit(record: Record) -> None:
            end = record.end if isinstance(record, Block) else record.position
            ref = absent_refs.get((type(record), end, record.layer if isinstance(record, RecurrentState) else None))
            if ref:
                uploader.put(ref, record)
                failpoint("prefill.storing", self._job.job_id)

        try:
            outcome = self._engine.prefill(tokens, emit, first=first, resume=resume, stop=self._stop)
        except KVTransferFailed as error:
            if resume is None:
                raise
            log.info("job %s: the engine can't resume from the stored start: %s", self._job.job_id, error)
            outcome = self._engine.prefill(tokens, emit, first=first, stop=self._stop)
        upload = uploader.finish()
        report, computed_tokens = self.report, self.report.computed_tokens + outcome.computed_tokens
        self.report = replace_fields(
            report,
            prefill_s=report.prefill_s + outcome.prefill_s,
            put_s=report.put_s + upload.exposed_s,
            computed_tokens=computed_tokens,
            restored_tokens=max(0, self.kv.num_tokens - computed_tokens),
            put_bytes=report.put_bytes + upload.bytes,
        )

    def _records(self, end: int) -> _Records:
        """Return all records up to position `end`, including the snapshot of the other layers at `end`."""
        records: _Records = [(Block, ref) for ref in self._refs if ref.end <= end]
        if self.kv.layout.snapshots:
            ends = snapshot_refs(self.kv.layout, records[-1][1])
            records += [(Window if ref.layer is None else RecurrentState, ref) for ref in ends]
        return records

    def absent(self, end: int) -> _Records:
        """Return the records up to `end` that are not stored. The store is asked unless the answer is still known.

        A known answer does not cover snapshots at positions other than the last.
        """
        if self.known_absent is not None and (end == self.kv.num_tokens or not self.kv.layout.snapshots):
            return [(type_, ref) for type_, ref in self.known_absent if ref.end <= end]
        records = self._records(end)
        missing_refs = set(self._store.find_missing([ref for _, ref in records]))
        return [(type_, ref) for type_, ref in records if ref in missing_refs]

    def _stored_start(self, end: int) -> KVCache | None:
        """Return the stored start of the prompt, at most up to `end`; None if there is none to resume from.

        It must be long enough to be worth it, and the engine must be able to resume. Sliding and recurrent layers keep
        only the end of a sequence, so models with such layers can resume only from the end of the class-wide part or of
        a turn. Raises KVTransferFailed if the start is damaged or has just been evicted. All of it has then been
        deleted, since existing records are not stored again.
        """
        ends = [self.kv.shared_tokens, *self._turns(end)] if self.kv.layout.snapshots else [r.end for r in self._refs]
        start = max([position for position in ends if position <= end], default=0)
        if not self._resumes or start < MIN_RESUME_TOKENS:
            return None
        try:
            blocks = [ref for ref in self._refs if ref.end <= start]
            return self._store.get_cache(self.kv.fingerprint, self.kv.layout, blocks)
        except KVTransferFailed:
            self._store.delete([ref for _, ref in self._records(start)])
            raise

    def _turns(self, end: int) -> list[int]:
        """Return the positions up to `end` at which earlier turns of the conversation left a complete snapshot."""
        layout = self.kv.layout
        at = {ref.end: snapshot_refs(layout, ref) for ref in self._refs if ref.is_tagged and ref.end <= end}
        missing_refs = set(self._store.find_missing([ref for refs in at.values() for ref in refs])) if at else set()
        return [position for position, refs in at.items() if missing_refs.isdisjoint(refs)]


class PrefixLeases:
    """The leases of one worker: one worker computes a class's prefix while the others, and its own other jobs, wait.

    A lease is a claim in the cluster state, and says who computes. Waiting ends when the prefix is stored, when the
    lease is free, or after about the time that computing would have taken: a lease saves work, but never holds up a
    job. The worker's heartbeat calls `renew`. Thread-safe.
    """

    def __init__(self, cluster_state: ClusterState, worker_id: str) -> None:
        self._cluster_state = cluster_state
        self._worker_id = worker_id
        self.claims: list[tuple[str, int]] = []  # claims that this worker has
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Renew the claims that this worker holds."""
        for name in list(self.claims):
            self._cluster_state.claim(*name, self._worker_id, CLAIM_TTL_S)

    @contextmanager
    def turn(
        self, chain: str, is_there: Callable[[], bool], patience_s: float, stop: threading.Event
    ) -> Iterator[bool]:
        """Yield whether the caller must compute the prefix whose last block has this chain hash; False: it is stored.

        Waits at most `patience_s` for another worker or job that computes it; after that both compute it. Raises
        Cancelled if `stop` is set meanwhile, and what `is_there` raises.
        """
        name = (f"prefix-{chain}", 1)
        give_up = time.monotonic() + patience_s
        while True:
            # The store can't tell the jobs of one worker apart, so `claims` lists the prefixes that this worker's jobs
            # are computing.
            with self._lock:
                holds_lease = name not in self.claims and self._cluster_state.claim(*name, self._worker_id, CLAIM_TTL_S)
                if holds_lease:
                    self.claims.append(name)
            if holds_lease or is_there() or time.monotonic() > give_up:
                break
            if stop.wait(_LOOK_EVERY_S):
                raise Cancelled("cancelled while another worker computed the prefix")
        try:
            # The previous holder of the lease may have stored the prefix a moment ago.
            yield not is_there()
        finally:
            if holds_lease:
                self.claims.remove(name)
                self._cluster_state.release(*name, self._worker_id)


class Refusals:
    """Whether all decode workers of a model refuse a sketch, by their registrations. May be called from any thread.

    Computing and storing a KV cache that no decode worker will use would waste work. Such a job goes on without one,
    with the decode workers' own reason, until one of them accepts the sketch or another decode worker comes.
    """

    def __init__(
        self, cluster_state: ClusterState, model: str, sketch: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster_state = cluster_state
        self._model = model
        self._sketch = sketch
        self._clock = clock
        self._next_look = 0.0
        self._reason = ""

    def reason(self) -> str:
        """Return why all of them refuse it, in the words of one; "" if there is no decode worker, or one accepts it.

        The answer is at most REFUSALS_EVERY_S old.
        """
        now = self._clock()
        if self._sketch and now >= self._next_look:
            self._next_look = now + REFUSALS_EVERY_S
            reasons = [
                registration.why_refused(self._sketch)
                for registration in self._cluster_state.registrations()
                if registration.role == "decode" and registration.model == self._model
            ]
            self._reason = reasons[0] if reasons and all(reasons) else ""
        return self._reason
