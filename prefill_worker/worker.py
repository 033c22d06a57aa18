"""What happens to one prefill delivery: check, tokenize, compute, store, publish + confirm, ack.

The order is the safety. All KV lies in the store before the decode job is published, and the decode job is
confirmed before the delivery is acked; so a crash anywhere means a redelivery, at worst a duplicate.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engines.base import PrefillEngine
from infra.broker import Broker, Delivery
from infra.control import ring
from infra.endings import Endings
from infra.envelope import Envelope, open_envelope, read_job
from infra.station import Station, must_run_alone
from infra.topology import work_queue
from kvstore.base import Board, KVStore
from kvstore.best_effort import BestEffortBoard
from kvstore.heartbeat import Heartbeat, new_worker_id
from messages.cards import WorkerCard
from messages.errors import BrokerUnavailable, Cancelled, KvasirError
from messages.jobs import LANES, DecodeJob, PrefillJob
from messages.lifecycle import Moment, Step
from prefill_worker.hand_over import HandOvers, NoRoom

log = logging.getLogger(__name__)

_NOTE_CHARS = 250  # a card's notes take 1,024 bytes, and a reason may quote anything


@dataclass
class _Current:
    """The job being prefilled: how to stop it, and whether that was its batch's wish."""

    batch_id: str
    job_id: str
    stop: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False


class PrefillWorker:
    """Serves one model's prefill queue with one engine, a job at a time.

    `run` blocks until `stop`; everything else may be called from other threads.
    """

    def __init__(
        self,
        model: str,
        engine: PrefillEngine,
        broker: Broker,
        kv: KVStore,
        board: Board,
        observe: Callable[[Moment], None],
        why_no_kv: str = "",
    ) -> None:
        self.worker_id = new_worker_id()
        self._model = model
        self._engine = engine
        self._broker = broker
        self._kv = kv
        self._board = BestEffortBoard(board)
        self._observe = observe
        self._why_no_kv = why_no_kv  # a sentence if the engine's hand-over was not proved at start
        self._hand_overs = HandOvers(engine, kv, self._board, self.worker_id, self._decode_waits, why_no_kv)
        self._endings = Endings(broker, [model], observe)
        self._station = Station(broker, self._endings, "prefill", model, self.worker_id, prefetch=1)
        self._current: _Current | None = None
        self._aborting = False
        self._started_at = self._board.now()
        self._done = 0

    def run(self) -> None:
        """Serve until stopped."""
        heartbeat = Heartbeat(self._board, self._card, self._hand_overs.leases.held)
        try:
            self._station.run(self)
        finally:
            heartbeat.close()

    def stop(self, abort: bool = False) -> None:
        """Leave after the job in hand; with `abort` hand that back too."""
        self._station.stop()
        self._aborting = abort or self._aborting  # set first: a job may be beginning just now
        current = self._current
        if abort and current:
            current.stop.set()

    def take(self, delivery: Delivery) -> None:
        """One delivery, from arrival to ack."""
        envelope = open_envelope(delivery, "prefill", self._model)
        self._endings.received(delivery, envelope)
        try:
            self._settle(delivery, envelope)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the job out again
            log.warning("job %s: left unacked, the broker connection is closed", envelope.job_id)
        finally:
            self._current = None
            self._done += 1

    def _settle(self, delivery: Delivery, envelope: Envelope) -> None:
        held = [delivery]
        try:
            self._handle(delivery, held, envelope)
        except BrokerUnavailable:
            raise
        except NoRoom:
            self._endings.hand_back(held, envelope)
        except Cancelled:
            self._end_stopped(held, envelope)
        except KvasirError as error:
            self._endings.error(held, envelope, error)
        except Exception as error:  # a bug of ours: logged with its traceback, and not run again
            log.exception("job %s: bug while prefilling", envelope.job_id)
            self._endings.error(held, envelope, error)

    def _handle(self, delivery: Delivery, held: list[Delivery], envelope: Envelope) -> None:
        job = read_job(delivery, PrefillJob)
        if self._board.is_cancelled(job.batch_id):
            return self._endings.drop(held)
        if job.deadline and self._board.now() > job.deadline:
            return self._endings.expire(held, envelope)
        if must_run_alone(delivery, envelope):
            return self._endings.isolate(held, envelope)
        self._current = _Current(job.batch_id, job.job_id)
        if self._aborting:
            self._current.stop.set()
        decode_job = self._prefill(job, self._current)
        self._endings.pass_on(held, envelope, decode_job)
        if job.lane == "now":
            ring(self._broker, work_queue("decode", self._model, "now"))

    def _prefill(self, job: PrefillJob, current: _Current) -> DecodeJob:
        """Tokenize (once in a job's life), compute what isn't stored yet, store it."""
        queue_s = max(0.0, self._board.now() - job.submitted_at)
        self._see(Step.PREFILL_STARTED, job, queue_s=queue_s)
        if not job.tokens:
            prompt = self._engine.tokenize(job.shared, job.own, job.submitted_at)
            job = job.tokenized(prompt.ids, prompt.shared)
        done = self._hand_overs.compute_and_store(job, current.stop)
        report = replace(done.report, worker_id=self.worker_id, queue_s=queue_s)
        if done.kv:
            self._see(Step.KV_STORED, job, prefill_s=report.prefill_s, put_s=report.put_s, put_bytes=report.put_bytes)
        return DecodeJob(job, done.kv, report, done.why_no_kv)

    def _end_stopped(self, held: list[Delivery], envelope: Envelope) -> None:
        if self._current and self._current.cancelled:
            self._endings.drop(held)
        else:
            self._endings.hand_back(held, envelope)

    # What the station asks.

    def wait_for_room(self, timeout_s: float) -> bool:
        """Always: `take` returns when the job is done."""
        return True

    def is_shut(self) -> bool:
        """While the store has no room for another job."""
        return not self._hand_overs.admission.is_open()

    def holding(self) -> int:
        """None: the station asks between two jobs."""
        return 0

    def finish(self) -> None:
        """Nothing is left behind by `take`."""

    def on_cancel(self, batch_id: str) -> None:
        """Stop the job in hand if it is of this batch."""
        current = self._current
        if current and current.batch_id == batch_id:
            current.cancelled = True
            current.stop.set()

    def tick(self) -> None:
        """Nothing to do."""

    def _decode_waits(self) -> bool:
        """Whether any job waits for decode, of any model that shares this store, as far as the broker tells."""
        models = {card.model for card in self._board.cards()} | {self._model}
        try:
            depths = [self._broker.depth(work_queue("decode", model, lane)) for model in models for lane in LANES]
        except BrokerUnavailable:
            return True
        return any(depth and depth.ready for depth in depths)

    def _see(self, step: Step, job: PrefillJob, **facts: float) -> None:
        identity = {"batch_id": job.batch_id, "stage": "prefill", "run": job.run, "lane": job.lane}
        self._observe(Moment(step, job.job_id, job.model, identity | facts))

    def _card(self) -> WorkerCard:
        info = self._engine.info
        current = self._current
        return WorkerCard(
            worker_id=self.worker_id,
            role="prefill",
            model=self._model,
            engine=info.engine,
            device=info.device,
            fingerprint=info.fingerprint,
            tokenizer=info.tokenizer,
            context=info.context,
            slots=1,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            chars_per_token=info.chars_per_token,
            busy=1 if current else 0,
            done=self._done,
            tokens_per_s=self._hand_overs.tokens_per_s,
            hands_over=not self._why_no_kv,
            notes=self._why_no_kv[:_NOTE_CHARS],
            jobs=(current.job_id,) if current else (),
        )
