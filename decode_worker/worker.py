"""What happens to one decode delivery: check, load the KV cache, generate, store the result, publish + confirm, ack.

The order is the safety. The result is stored before it is published, so that a redelivery is answered and not
decoded again; it is confirmed before the delivery is acked; and only then are the job's own blocks deleted.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from decode_worker.generate import Generated, Generation, own_refs
from decode_worker.running import Running, RunningJobs, Why
from engines.base import DecodeEngine
from infra.broker import Broker, Delivery
from infra.control import ring
from infra.endings import Endings
from infra.envelope import Envelope, open_envelope, read_job
from infra.station import Station, must_run_alone
from infra.topology import work_queue
from kvstore.base import Board, KVStore
from kvstore.best_effort import BestEffortBoard
from kvstore.heartbeat import CLAIM_TTL_S, Heartbeat, new_worker_id
from messages import codec
from messages.cards import WorkerCard
from messages.errors import (
    BrokerUnavailable,
    Cancelled,
    HandOverFailed,
    InvalidMessage,
    KvasirError,
    NewerMessage,
    Retry,
    StoreUnavailable,
)
from messages.jobs import DecodeJob, JobResult
from messages.lifecycle import Moment, Step

log = logging.getLogger(__name__)

# A prompt this short is prefilled here sooner than it is sent back and fetched again.
LOCAL_PREFILL_TOKENS = 256
MAX_HAND_OVERS = 2
_NOTE_CHARS = 250  # a card's notes take 1,024 bytes, and a reason may quote anything


class DecodeWorker:
    """Serves one model's decode queue with one engine, `engine.info.slots` jobs at once.

    `run` blocks until `stop`; everything else may be called from other threads.
    """

    def __init__(
        self,
        model: str,
        engine: DecodeEngine,
        broker: Broker,
        kv: KVStore,
        board: Board,
        observe: Callable[[Moment], None],
        why_no_kv: str = "",
    ) -> None:
        self.worker_id = new_worker_id()
        self._model = model
        self._engine = engine
        self._slots = engine.info.slots
        self._broker = broker
        self._kv = kv
        self._board = BestEffortBoard(board)
        self._observe = observe
        self._why_no_kv = why_no_kv  # a sentence if the engine's hand-over was not proved at start
        self._endings = Endings(broker, [model], observe)
        self._station = Station(broker, self._endings, "decode", model, self.worker_id, self._slots)
        self._running = RunningJobs()
        self._free = threading.Semaphore(self._slots)
        self._pool = ThreadPoolExecutor(self._slots, thread_name_prefix="slot")
        self._futures: set[Future[None]] = set()
        self._aborting = False
        self._started_at = self._board.now()
        self._done = 0
        self._tokens_per_s = 0.0

    def run(self) -> None:
        """Serve until stopped."""
        heartbeat = Heartbeat(self._board, self._card, lambda: [running.key for running in self._running.all()])
        try:
            self._station.run(self)
        finally:
            self._pool.shutdown()
            heartbeat.close()

    def stop(self, abort: bool = False) -> None:
        """Leave after the jobs in the slots; with `abort` hand those back too."""
        self._station.stop()
        self._aborting = abort or self._aborting  # set first: a job may be beginning just now
        if abort:
            self._end_all("leaving")

    def _handle(self, delivery: Delivery) -> None:
        """One delivery, from arrival to ack, in a slot's thread."""
        envelope = open_envelope(delivery, "decode", self._model)
        self._endings.received(delivery, envelope)
        held = [delivery]
        try:
            job = read_job(delivery, DecodeJob)
            if self._settled_early(job, delivery, held, envelope):
                return
            running = self._running.start(job, held)
            if running:
                self._run(job, running, envelope)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the job out again
            log.warning("job %s: left unacked, the broker connection is closed", envelope.job_id)
        except Exception as error:  # noqa: BLE001  sorted out there
            self._end_failed(held, envelope, error)

    def _settled_early(self, job: DecodeJob, delivery: Delivery, held: list[Delivery], envelope: Envelope) -> bool:
        """Whether this job needs no decoding now; its delivery has been settled then."""
        if self._board.is_cancelled(job.job.batch_id):
            self._endings.drop(held)
        elif job.job.deadline and self._board.now() > job.job.deadline:
            self._endings.expire(held, envelope)
        elif must_run_alone(delivery, envelope):
            self._endings.isolate(held, envelope)
            return True
        elif stored := self._stored_result(job):
            self._endings.reply(held, envelope, stored)
        else:
            return False
        self._delete_own_blocks(job)
        return True

    def _run(self, job: DecodeJob, running: Running, envelope: Envelope) -> None:
        if self._aborting:
            running.end("leaving")
        settled = False
        try:
            self._attempt(job, running, envelope)
            settled = True
        finally:
            self._running.end(running, settled)
            self._board.release(*running.key, self.worker_id)

    def _attempt(self, job: DecodeJob, running: Running, envelope: Envelope) -> None:
        """Returns when all deliveries of the job are settled; raises only if they are not."""
        try:
            if self._board.claim(*running.key, self.worker_id, CLAIM_TTL_S):
                self._decode(job, running, envelope)
            else:
                self._endings.defer(running.held, envelope)
        except Cancelled:
            self._end_stopped(job, running, envelope)
        except BrokerUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  sorted out there
            self._end_failed(running.held, envelope, error)
            if not isinstance(error, Retry):  # nobody will need them again
                self._delete_own_blocks(job)

    def _decode(self, job: DecodeJob, running: Running, envelope: Envelope) -> None:
        """Load, generate, store the result, publish + confirm, ack, delete."""
        generation = Generation(self._engine, self._kv, self._broker, self._board, job, running.stop, self._see)
        self._see(Step.DECODE_STARTED, job, queue_s=generation.queue_s)
        try:
            made = generation.from_kv() if not self._why_no_kv else generation.without_kv(self._why_no_kv)
        except HandOverFailed as gone:
            log.warning("job %s: hand-over failed: %s", envelope.job_id, gone)
            generation.drop_damaged()
            if self._better_prefilled_again(job, envelope):
                return self._prefill_again(job, running, envelope)
            made = generation.without_kv(str(gone))
        result = self._result(job, envelope, made)
        self._board.put_result(*running.key, codec.encode(result))
        self._see(Step.ANSWERED, job, completion_tokens=made.report.completion_tokens)
        self._endings.reply(running.held, envelope, result)
        self._delete_own_blocks(job)
        self._note_rate(made)

    def _better_prefilled_again(self, job: DecodeJob, envelope: Envelope) -> bool:
        if envelope.hand_overs + 1 >= MAX_HAND_OVERS or len(job.job.tokens) <= LOCAL_PREFILL_TOKENS:
            return False
        return any(card.role == "prefill" and card.model == self._model for card in self._board.cards())

    def _prefill_again(self, job: DecodeJob, running: Running, envelope: Envelope) -> None:
        self._endings.prefill_again(running.held, envelope, job.job)
        ring(self._broker, work_queue("prefill", self._model, "now"))

    def _result(self, job: DecodeJob, envelope: Envelope, made: Generated) -> JobResult:
        inner = job.job
        return JobResult(
            inner.job_id,
            inner.run,
            inner.batch_id,
            inner.item_id,
            inner.model,
            "succeeded",
            text=made.text,
            finish_reason=made.finish_reason,
            more_texts=made.more_texts,
            attempts=envelope.attempts + 1,
            prefill=job.prefill,
            decode=replace(made.report, worker_id=self.worker_id),
        )

    def _stored_result(self, job: DecodeJob) -> JobResult | None:
        body = self._board.get_result(job.job.job_id, job.job.run)
        try:
            return codec.decode(body, JobResult) if body else None
        except (InvalidMessage, NewerMessage):
            return None

    def _delete_own_blocks(self, job: DecodeJob) -> None:
        try:
            self._kv.delete(own_refs(job))
        except StoreUnavailable as error:  # their TTL ends them
            log.info("job %s: its blocks stay until their TTL: %s", job.job.job_id, error)

    def _end_failed(self, held: list[Delivery], envelope: Envelope, error: Exception) -> None:
        if not isinstance(error, KvasirError):  # a bug of ours: logged with its traceback, and not run again
            log.error("job %s: bug while decoding", envelope.job_id, exc_info=error)
        self._endings.error(held, envelope, error)

    def _end_stopped(self, job: DecodeJob, running: Running, envelope: Envelope) -> None:
        if running.why == "cancelled":
            self._endings.drop(running.held)
        elif running.why == "expired":
            self._endings.expire(running.held, envelope)
        else:
            return self._endings.hand_back(running.held, envelope)
        self._delete_own_blocks(job)

    def _end_all(self, why: Why, batch_id: str = "") -> None:
        for running in self._running.all():
            if not batch_id or running.batch_id == batch_id:
                running.end(why)

    # What the station asks.

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether a slot is free."""
        if not self._free.acquire(timeout=timeout_s):
            return False
        self._free.release()  # only the station's thread takes slots, so this one stays free
        return True

    def is_shut(self) -> bool:
        """Never: decode frees what prefill waits for."""
        return False

    def holding(self) -> int:
        """Slots taken, those included whose job is only just being looked at."""
        return len(self._futures)

    def take(self, delivery: Delivery) -> None:
        """Give the delivery a slot."""
        self._free.acquire()
        future = self._pool.submit(self._handle, delivery)
        self._futures.add(future)
        future.add_done_callback(self._slot_freed)

    def finish(self) -> None:
        """Wait for all slots."""
        wait(list(self._futures))

    def on_cancel(self, batch_id: str) -> None:
        """Stop what runs of this batch."""
        self._end_all("cancelled", batch_id)

    def tick(self) -> None:
        """Stop what ran past its deadline."""
        now = self._board.now()
        for running in self._running.all():
            if running.deadline and now > running.deadline:
                running.end("expired")

    def _slot_freed(self, future: Future[None]) -> None:
        self._futures.discard(future)
        self._done += 1
        self._free.release()

    def _note_rate(self, made: Generated) -> None:
        seconds = made.report.decode_s
        if made.report.completion_tokens and seconds > 0:
            rate = made.report.completion_tokens / seconds
            self._tokens_per_s = 0.8 * self._tokens_per_s + 0.2 * rate if self._tokens_per_s else rate

    def _see(self, step: Step, job: DecodeJob, **facts: float) -> None:
        inner = job.job
        identity = {"batch_id": inner.batch_id, "stage": "decode", "run": inner.run, "lane": inner.lane}
        self._observe(Moment(step, inner.job_id, inner.model, identity | facts))

    def _card(self) -> WorkerCard:
        info = self._engine.info
        running = self._running.all()
        return WorkerCard(
            worker_id=self.worker_id,
            role="decode",
            model=self._model,
            engine=info.engine,
            device=info.device,
            fingerprint=info.fingerprint,
            tokenizer=info.tokenizer,
            context=info.context,
            slots=self._slots,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            chars_per_token=info.chars_per_token,
            busy=len(running),
            done=self._done,
            tokens_per_s=self._tokens_per_s,
            hands_over=not self._why_no_kv,
            notes=self._why_no_kv[:_NOTE_CHARS],
            jobs=tuple(job.key[0] for job in running),
        )
