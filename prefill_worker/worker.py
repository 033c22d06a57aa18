"""What happens to one prefill delivery: check, tokenize, compute, store, publish + confirm, ack.

The order is the safety. All KV lies in the store before the decode job is published, and the decode job is
confirmed before the delivery is acked; so a crash anywhere means a redelivery, at worst a duplicate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engines.base import PrefillEngine
from engines.card import engine_card
from infra.broker import Broker, Delivery
from infra.control import ring
from infra.endings import Endings, Outgoing, passing_on
from infra.envelope import Envelope, open_envelope, read_job
from infra.fault_points import reached
from infra.group import Group
from infra.hours import Hours
from infra.intake import HELD_IF_INSTANT, PATIENCE_S
from infra.station import Station, must_run_alone
from infra.topology import work_queue
from kvstore.base import Board, KVStore
from kvstore.best_effort import BestEffortBoard
from kvstore.heartbeat import Heartbeat, new_worker_id
from kvstore.takes import taking
from kvstore.tombstones import Tombstones
from messages.cards import WorkerCard
from messages.change import changed
from messages.errors import BrokerUnavailable, Cancelled, KvasirError
from messages.jobs import LANES, DecodeJob, PrefillJob, PrefillReport
from messages.lifecycle import Moment, Step
from prefill_worker.hand_over import HandOvers, NoRoom
from prefill_worker.supply import LARGE_BYTES, Supply

log = logging.getLogger(__name__)


@dataclass
class _Current:
    """The job being prefilled: how to stop it, and whether that was its batch's wish."""

    batch_id: str
    job_id: str
    stop: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False


class PrefillWorker:
    """Serves one model's prefill queue with one engine, a job at a time.

    Prompts of up to `short_tokens` go on without a KV cache. `run` blocks until `stop`; everything else may be called
    from other threads.
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
        short_tokens: int = 0,
    ) -> None:
        self.worker_id = new_worker_id()
        self._model = model
        self._engine = engine
        self._broker = broker
        self._kv = kv
        self._board = BestEffortBoard(board)
        self._observe = observe
        self._why_no_kv = why_no_kv  # a sentence if the engine's hand-over was not proved at start
        self._hand_overs = HandOvers(
            engine, kv, self._board, self.worker_id, self._decode_waits, why_no_kv, short_tokens
        )
        self._tombstones = Tombstones(self._board)
        self._endings = Endings(broker, [model], observe)
        self._passing = Group("passing on", self._pass_on, HELD_IF_INSTANT)
        self._station = Station(
            broker, self._endings, "prefill", model, self.worker_id, 1, lambda back: Supply(broker, model, back)
        )
        self._current: _Current | None = None
        self._aborting = False
        self._started_at = self._board.now()
        self._done = 0

    def run(self) -> None:
        """Serve until stopped."""
        heartbeat = Heartbeat(self._board, self.card, self._hand_overs.leases.renew)
        try:
            self._station.run(self)
        finally:
            self._passing.close()
            heartbeat.close()

    def keep_hours(self, hours: Hours) -> None:
        """Take jobs in these hours only; what has begun goes on."""
        self._station.hours = hours

    def stop(self, abort: bool = False) -> None:
        """Leave after the job in hand; with `abort` hand that back too."""
        self._station.stop()
        self._aborting = abort or self._aborting  # set first: a job may be beginning just now
        current = self._current
        if abort and current:
            current.stop.set()

    def take(self, deliveries: list[Delivery]) -> None:
        """Deliveries, from arrival to decode jobs that are about to be published; the acks follow that."""
        started = time.monotonic()
        ready: list[Outgoing] = []
        for number, delivery in enumerate(deliveries):
            if ready and len(delivery.message.body) > LARGE_BYTES:  # what is ready does not wait for this one
                self._passing.add(*ready)
                ready = []
            ready += self._take_one(delivery)
            if time.monotonic() - started > PATIENCE_S:  # they are slower than was thought
                self._endings.hand_back_all(deliveries[number + 1 :], "prefill")
                break
        if ready:
            self._passing.add(*ready)

    def _take_one(self, delivery: Delivery) -> list[Outgoing]:
        """Its decode job; none if the delivery has been settled otherwise."""
        envelope = open_envelope(delivery, "prefill", self._model)
        self._endings.received(delivery, envelope)
        try:
            with taking(self._board, "prefill", envelope.job_id, envelope.run, envelope.returns) as fallen:
                return self._settle(delivery, envelope, fallen)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the job out again
            log.warning("job %s: left unacked, the broker connection is closed", envelope.job_id)
        finally:
            self._current = None
            self._done += 1
        return []

    def _settle(self, delivery: Delivery, envelope: Envelope, fallen: int) -> list[Outgoing]:
        held = [delivery]
        try:
            return self._handle(delivery, held, envelope, fallen)
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
        return []

    def _handle(self, delivery: Delivery, held: list[Delivery], envelope: Envelope, fallen: int) -> list[Outgoing]:
        reached("prefill.taken", envelope.job_id)
        job = read_job(delivery, PrefillJob)
        if self._settled_early(job, delivery, held, envelope, fallen):
            return []
        self._current = _Current(job.batch_id, job.job_id)
        if self._aborting:
            self._current.stop.set()
        decode_job = self._prefill(job, self._current)
        return [passing_on(held, envelope, decode_job)]

    def _settled_early(
        self, job: PrefillJob, delivery: Delivery, held: list[Delivery], envelope: Envelope, fallen: int
    ) -> bool:
        """Whether this job is not for us to prefill now; its delivery has been settled then."""
        if self._tombstones.has(job.batch_id):
            self._endings.drop(held)
        elif job.deadline and self._board.now() > job.deadline:
            self._endings.expire(held, envelope)
        elif must_run_alone(delivery, fallen):
            self._endings.isolate(held, envelope)
        else:
            return False
        return True

    def _pass_on(self, ready: list[Outgoing]) -> None:
        """Publish decode jobs, confirmed; then ack. The next job is under way meanwhile."""
        try:
            self._endings.settle(*ready)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the jobs out again
            log.warning("%d jobs: left unacked, the broker connection is closed", len(ready))
            return
        for one in ready:
            reached("prefill.acked", one.envelope.job_id)
        if any(one.envelope.lane == "now" for one in ready):
            ring(self._broker, work_queue("decode", self._model, "now"))

    def _prefill(self, job: PrefillJob, current: _Current) -> DecodeJob:
        """Tokenize (once in a job's life), compute what isn't stored yet, store it."""
        queue_s = job.waited_s(self._board.now())
        self._see(Step.PREFILL_STARTED, job, queue_s=queue_s)
        if not job.tokens:
            prompt = self._engine.tokenize(job.shared, job.own, job.submitted_at)
            job = job.tokenized(prompt.ids, prompt.shared)
        reached("prefill.tokenized", job.job_id)
        done = self._hand_overs.compute_and_store(job, current.stop)
        reached("prefill.stored", job.job_id)
        report = changed(done.report, worker_id=self.worker_id, queue_s=queue_s)
        if done.kv:
            self._see(Step.KV_STORED, job, **_facts(report))
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
        """Jobs whose decode job is not confirmed yet: the station asks between two jobs."""
        return len(self._passing.unfinished())

    def finish(self) -> None:
        """Wait until what was taken is acked."""
        self._passing.finish()

    def on_cancel(self, batch_id: str) -> None:
        """Stop the job in hand if it is of this batch."""
        self._tombstones.heard(batch_id)
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

    def _job_ids(self) -> tuple[str, ...]:
        current = self._current
        return (*([current.job_id] if current else []), *(one.envelope.job_id for one in self._passing.unfinished()))

    def card(self) -> WorkerCard:
        """What this worker says of itself, now."""
        engine = engine_card(
            self.worker_id, "prefill", self._model, self._started_at, self._engine.info, self._why_no_kv
        )
        return replace(
            engine,
            busy=1 if self._current else 0,
            done=self._done,
            tokens_per_s=self._hand_overs.tokens_per_s,
            off=self._station.off,
            jobs=self._job_ids(),
        )


def _facts(report: PrefillReport) -> dict[str, float]:
    names = ("prefill_s", "put_s", "put_bytes", "computed_tokens", "restored_tokens")
    return {name: getattr(report, name) for name in names}
