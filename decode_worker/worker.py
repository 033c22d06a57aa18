"""What happens to one decode delivery: check, load the KV cache, generate, store the result, publish + confirm, ack.

The order is the safety. The result is stored before it is published, so that a redelivery is answered and not
decoded again; it is confirmed before the delivery is acked; and only then are the job's own blocks deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from decode_worker.answers import Answered, Answers
from decode_worker.card import Identity, decode_card
from decode_worker.fallback import Fallback
from decode_worker.fetching import AheadFetch
from decode_worker.generate import Generated, Generation
from decode_worker.outlook import Outlook
from decode_worker.pace import Pace
from decode_worker.residency import Loaded, NotResident, Residency, Resident, Stealable
from decode_worker.running import Means, Running, RunningJobs, Why
from decode_worker.slots import Seat, Slots
from decode_worker.supply import Supply, Tail
from decode_worker.thief import Thief
from engines.base import DecodeEngine
from infra.broker import Broker, Delivery
from infra.control import ring
from infra.endings import Endings
from infra.envelope import Envelope, open_envelope, read_job
from infra.fault_points import reached
from infra.hours import Hours
from infra.intake import PATIENCE_S
from infra.station import Station, must_run_alone
from infra.topology import model_of, work_queue
from kvstore.base import Board, KVStore, Run
from kvstore.best_effort import BestEffortBoard
from kvstore.heartbeat import CLAIM_TTL_S, Heartbeat, new_worker_id
from kvstore.takes import taking
from kvstore.tombstones import Tombstones
from messages import codec
from messages.cards import WorkerCard
from messages.change import changed
from messages.errors import (
    BrokerUnavailable,
    Cancelled,
    HandOverFailed,
    InvalidMessage,
    KvasirError,
    NewerMessage,
    Retry,
)
from messages.jobs import DecodeJob, JobResult
from messages.lifecycle import Moment, Step

log = logging.getLogger(__name__)

# A prompt this short is prefilled here sooner than it is sent back and fetched again.
LOCAL_PREFILL_TOKENS = 256
MAX_HAND_OVERS = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """A delivery that was read, and is to be decoded now."""

    held: list[Delivery]
    envelope: Envelope
    job: DecodeJob

    @property
    def key(self) -> Run:
        """What claims and results go by."""
        return self.job.job.job_id, self.job.job.run


@dataclass(frozen=True, slots=True)
class Started:
    """A job that is ours to decode: `claimed`, unless another worker is on it."""

    job: DecodeJob
    envelope: Envelope
    running: Running
    claimed: bool


class DecodeWorker:
    """Serves one model's decode queue with one engine, `engine.info.slots` jobs at once.

    With `others` it also takes jobs of other models where that pays (`decode_worker.stealing`), in the same slots;
    `memory_bytes` bounds the weights of all models in memory, its own of `size_bytes` included (0: no bound).
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
        why_no_kv: str = "",  # a sentence if the engine's hand-over was not proved at start
        others: Sequence[Stealable] = (),
        memory_bytes: int = 0,
        size_bytes: int = 0,
    ) -> None:
        self.worker_id = new_worker_id()
        self._model = model
        self._slots = Slots(engine.info.slots)
        self._broker = broker
        self._kv = kv
        self._board = BestEffortBoard(board)
        self._observe = observe
        self._endings = Endings(broker, [model, *(other.model for other in others)], observe)
        self._pace = Pace()
        self._outlook = Outlook(broker, self._board, self._pace, self.worker_id)
        self._residency = Residency(Resident(model, size_bytes, Loaded(engine, why_no_kv)), others, memory_bytes)
        self._thief = Thief(broker, self._outlook, self._residency, observe)
        self._tail = Tail(self._outlook, self._pace, model)
        self._supply: Supply | None = None
        self._station = Station(
            broker, self._endings, "decode", model, self.worker_id, self._slots.count, self._make_supply
        )
        self._running = RunningJobs()
        self._tombstones = Tombstones(self._board)
        self._answers = Answers(self._endings, self._board, kv, self.worker_id, self._running, self._see)
        self._aborting = False
        self._identity = Identity(self.worker_id, self._board.now())
        stand_in = (self.worker_id, model, self._slots.count)
        self._fallback = Fallback(broker, self._board, self._endings, observe, *stand_in)

    def run(self) -> None:
        """Serve until stopped."""
        heartbeat = Heartbeat(self._board, self.card, self._renew_claims)
        try:
            self._station.run(self)
        finally:
            self._slots.close()
            self._answers.close()
            self._residency.close()
            heartbeat.close()

    def keep_hours(self, hours: Hours) -> None:
        """Take jobs in these hours only; what has begun goes on."""
        self._station.hours = hours

    def stop(self, abort: bool = False) -> None:
        """Leave after the jobs in the slots; with `abort` hand those back too."""
        self._station.stop()
        self._aborting = abort or self._aborting  # set first: a job may be beginning just now
        if abort:
            self._end_all("leaving")

    def _make_supply(self, hand_back: Callable[[list[Delivery]], None]) -> Supply:
        parts = (self._slots, self._running, self._outlook, self._pace, self._residency, self._thief, self._tail)
        self._supply = Supply(self._broker, self._model, *parts, self._kv, hand_back)
        return self._supply

    def _handle(self, deliveries: list[Delivery], ahead: AheadFetch | None, seat: Seat) -> None:
        """Deliveries of one model, from arrival to answers on their way out, one after the other in a slot's thread."""
        try:
            with ExitStack() as until_done:
                loaded = until_done.enter_context(self._residency.job(model_of(deliveries[0].queue)))
                taken = [one for delivery in deliveries if (one := self._open(delivery, until_done))]
                answers = self._answer(self._start(taken, Means(loaded, ahead)))
        except NotResident:  # evicted between their get and now
            return self._endings.hand_back_all(deliveries, "decode")
        seat.leave()
        if answers:
            self._answers.add(*answers)

    @contextmanager
    def _ending(self, held: list[Delivery], envelope: Envelope) -> Iterator[None]:
        """Whatever goes wrong with a job ends its deliveries."""
        try:
            yield
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the job out again
            log.warning("job %s: left unacked, the broker connection is closed", envelope.job_id)
        except Exception as error:  # noqa: BLE001  sorted out there
            self._end_failed(held, envelope, error)

    def _open(self, delivery: Delivery, until_done: ExitStack) -> Taken | None:
        """Read and check a delivery; None if it has been settled."""
        envelope = open_envelope(delivery, "decode", model_of(delivery.queue))
        self._endings.received(delivery, envelope)
        held = [delivery]
        with self._ending(held, envelope):
            fallen = self._note_take(envelope, until_done) if envelope.returns else 0
            reached("decode.taken", envelope.job_id)
            job = read_job(delivery, DecodeJob)
            if not self._settled_early(job, delivery, held, envelope, fallen):
                return Taken(held, envelope, job)
        return None

    def _note_take(self, envelope: Envelope, until_done: ExitStack) -> int:
        """Say that we have a job in hand that came back; how many workers have fallen with it, at most."""
        take = taking(self._board, "decode", envelope.job_id, envelope.run, envelope.returns)
        return until_done.enter_context(take)

    def _start(self, taken: list[Taken], means: Means) -> list[Started]:
        """Those of them that are ours to decode. The others are answered, or run already."""
        started = []
        for one, (body, claimed) in zip(taken, self._take_up(taken), strict=True):
            with self._ending(one.held, one.envelope):
                if body and (stored := _readable(body)):
                    self._endings.reply(one.held, one.envelope, stored)
                    self._answers.delete_own_blocks([one.job])
                elif running := self._running.start(one.job, one.held, means, self._pace.expected_s(one.job)):
                    started.append(Started(one.job, one.envelope, running, claimed or bool(body)))
        return started

    def _renew_claims(self) -> None:
        """All in one round trip; those that have their results need no claim any more."""
        self._board.take_up(self.worker_id, [running.key for running in self._running.all()], CLAIM_TTL_S)

    def _take_up(self, taken: list[Taken]) -> list[tuple[bytes | None, bool]]:
        """For each the stored result of an earlier delivery, and whether we hold the claim to decode it."""
        if not taken:
            return []
        return self._board.take_up(self.worker_id, [one.key for one in taken], CLAIM_TTL_S)

    def _answer(self, jobs: list[Started]) -> list[Answered]:
        """Decode them, one after the other; those behind a slow one go back."""
        began = time.monotonic()
        answers = []
        for number, one in enumerate(jobs):
            if self._aborting or (number and time.monotonic() - began > PATIENCE_S):
                one.running.end("leaving")
            with self._ending(one.running.held, one.envelope):
                answers += self._run(one)
        return answers

    def _settled_early(
        self, job: DecodeJob, delivery: Delivery, held: list[Delivery], envelope: Envelope, fallen: int
    ) -> bool:
        """Whether this job is not for us to decode now; its delivery has been settled then."""
        if self._tombstones.has(job.job.batch_id):
            self._endings.drop(held)
        elif job.job.deadline and self._board.now() > job.job.deadline:
            self._endings.expire(held, envelope)
        else:
            alone = must_run_alone(delivery, fallen)
            if alone:
                self._endings.isolate(held, envelope)
            return alone
        self._answers.delete_own_blocks([job])
        return True

    def _run(self, one: Started) -> list[Answered]:
        """Its answer, to be sent; none when all deliveries of the job are settled. Raises only if they are not."""
        answers, settled = [], False
        try:
            answers = self._attempt(one)
            settled = True
        finally:
            if not answers:
                self._running.end(one.running, settled)
                self._board.release(*one.running.key, self.worker_id)
        return answers

    def _attempt(self, one: Started) -> list[Answered]:
        job, envelope, held = one.job, one.envelope, one.running.held
        try:
            if one.claimed:
                reached("decode.claimed", envelope.job_id)
                return self._decode(job, one.running, envelope)
            self._endings.defer(held, envelope)
        except Cancelled:
            self._end_stopped(job, one.running, envelope)
        except BrokerUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  sorted out there
            self._end_failed(held, envelope, error)
            if not isinstance(error, Retry):  # nobody will need them again
                self._answers.delete_own_blocks([job])
        return []

    def _decode(self, job: DecodeJob, running: Running, envelope: Envelope) -> list[Answered]:
        """Load and generate; none if the job went back to prefill."""
        engine, why_no_kv = running.means.loaded.engine, running.means.loaded.why_no_kv
        ahead = running.means.ahead
        generation = Generation(engine, self._kv, self._broker, self._board, job, running.stop, self._see, ahead)
        self._see(Step.DECODE_STARTED, job, queue_s=generation.queue_s, waited_s=_waited_s(job, generation.queue_s))
        try:
            made = generation.without_kv(why_no_kv) if why_no_kv else generation.from_kv()
        except HandOverFailed as gone:
            log.warning("job %s: hand-over failed: %s", envelope.job_id, gone)
            generation.drop_damaged()
            if self._better_prefilled_again(job, envelope):
                self._prefill_again(job, running, envelope)
                return []
            made = generation.without_kv(str(gone))
        running.answered()
        self._pace.note(envelope.model, made.report)
        result = self._result(job, envelope, made)
        reached("decode.generated", envelope.job_id)
        return [Answered(job, running, envelope, result, codec.encode(result))]

    def _better_prefilled_again(self, job: DecodeJob, envelope: Envelope) -> bool:
        if envelope.hand_overs + 1 >= MAX_HAND_OVERS or len(job.job.tokens) <= LOCAL_PREFILL_TOKENS:
            return False
        return any(card.role == "prefill" and card.model == envelope.model for card in self._board.cards())

    def _prefill_again(self, job: DecodeJob, running: Running, envelope: Envelope) -> None:
        self._endings.prefill_again(running.held, envelope, job.job)
        ring(self._broker, work_queue("prefill", envelope.model, "now"))

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
            decode=changed(made.report, worker_id=self.worker_id),
        )

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
        self._answers.delete_own_blocks([job])

    def _end_all(self, why: Why, batch_id: str = "") -> None:
        for running in self._running.all():
            if not batch_id or running.batch_id == batch_id:
                running.end(why)

    # What the station asks.

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether a slot is free."""
        return self._slots.wait(timeout_s)

    def is_shut(self) -> bool:
        """Never: decode frees what prefill waits for."""
        return False

    def holding(self) -> int:
        """Jobs that are not settled."""
        return self._slots.holding + len(self._answers.unfinished())

    def take(self, deliveries: list[Delivery]) -> None:
        """Give the deliveries a slot."""
        ahead = self._supply.fetched(deliveries[0]) if self._supply else None
        self._slots.take(partial(self._handle, deliveries, ahead), len(deliveries))

    def finish(self) -> None:
        """Wait for all slots, and for their answers to be settled."""
        self._slots.finish()
        self._answers.finish()

    def on_cancel(self, batch_id: str) -> None:
        """Stop what runs of this batch."""
        self._tombstones.heard(batch_id)
        self._end_all("cancelled", batch_id)

    def tick(self) -> None:
        """Stop what ran past its deadline; look after jobs that no prefill worker is there for."""
        now = self._board.now()
        for running in self._running.all():
            if running.deadline and now > running.deadline:
                running.end("expired")
        if not self._station.off:
            self._fallback.look()

    def _see(self, step: Step, job: DecodeJob, **facts: float) -> None:
        inner = job.job
        identity = {"batch_id": inner.batch_id, "stage": "decode", "run": inner.run, "lane": inner.lane}
        self._observe(Moment(step, inner.job_id, inner.model, identity | facts))

    def card(self) -> WorkerCard:
        """What this worker says of itself, now."""
        running = [running.key[0] for running in self._running.all()]
        card = decode_card(self._identity, self._residency, self._pace, self._slots, self._thief, self._tail, running)
        return replace(card, off=self._station.off)


def _readable(body: bytes) -> JobResult | None:
    """A stored result, unless it is of no use to us."""
    try:
        return codec.decode(body, JobResult)
    except (InvalidMessage, NewerMessage):
        return None


def _waited_s(job: DecodeJob, queue_s: float) -> float:
    """Since prefill was done; `queue_s` counts from submission."""
    before = job.prefill
    return max(0.0, queue_s - before.queue_s - before.prefill_s - before.put_s)
