"""What happens to one decode delivery: check, load the KV cache, generate, store the result, publish + confirm, ack.

The order is the safety. The result is stored before it is published, so that a redelivery is answered and not
decoded again; it is confirmed before the delivery is acked; and only then are the job's own blocks deleted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from decode_worker.fallback import Fallback
from decode_worker.flow import DecodeFlow
from decode_worker.generate import DecodeAttempt, FetchedCache, Generator, RunningJobs, stored_refs
from decode_worker.stealing.models import LoadedModel, ModelCache, NotLoaded
from decode_worker.stealing.thief import QueueChoice
from engines.base import outage_of
from engines.worker_info import engine_registration
from infra.broker.base import Broker, Delivery
from infra.broker.envelope import StopReason
from infra.broker.failpoints import failpoint
from infra.broker.settle import GroupCommit, Settler, check_runnable, replying
from infra.broker.topology import model_of
from infra.config.hours import ALL_HOURS, Hours
from infra.worker_loop import GROUP_PATIENCE_S, HELD_IF_INSTANT, ConsumerLoop, SlotPool
from kvstore.base import ClusterState, KVStore
from kvstore.blocks import BlockRef, snapshot_refs
from kvstore.cluster_state import BestEffortClusterState
from kvstore.heartbeat import CLAIM_TTL_S, Heartbeat, new_worker_id
from kvstore.runnable import Tombstones, counting_crashes
from messages import codec
from messages.errors import (
    BrokerUnavailable,
    InvalidMessage,
    NewerMessage,
    StoreUnavailable,
)
from messages.jobs import KV_CHECK_EVERY, DecodeJob, JobResult
from messages.lifecycle import Event, Step
from messages.workers import MAX_REFUSALS, WorkerInfo

log = logging.getLogger(__name__)

# Of the report, for the event.
_FACTS = (
    *("prompt_tokens", "transferred_tokens", "evaluated_tokens", "completion_tokens"),
    *("get_s", "ttft_s", "decode_s", "total_s"),
)


class DecodeWorker:
    """Serves the decode queue of one model, the home of `model_cache`, with as many jobs at once as its engine has
    slots.

    It also takes jobs of the other models that may be in memory where that pays (`decode_worker.stealing.policy`), in
    the same slots. `run` blocks until `stop`; everything else may be called from other threads.
    """

    def __init__(
        self,
        model_cache: ModelCache,
        broker: Broker,
        kv: KVStore,
        cluster_state: ClusterState,
        observe: Callable[[Event], None],
        kv_check_every: int = KV_CHECK_EVERY,
    ) -> None:
        self.worker_id = new_worker_id()
        self._model_cache = model_cache
        self._broker = broker
        self._kv = kv
        self._cluster_state = BestEffortClusterState(cluster_state)
        self._observe = observe
        self._slots = SlotPool(model_cache.home.loaded_model.engine.info.slots)
        self.wait_for_capacity = self._slots.wait
        self._settler = Settler(broker, model_cache.models, observe)
        self._generator = Generator(
            kv, broker, self._cluster_state, self._slots, self.worker_id, observe, kv_check_every
        )
        self._choice = QueueChoice(broker, self._cluster_state, model_cache, self.worker_id, observe)
        self._running_jobs = RunningJobs()
        self._flow: DecodeFlow | None = None
        model = model_cache.home.model
        self._find_outage = partial(outage_of, model_cache.home.loaded_model.engine)
        self._loop = ConsumerLoop(
            broker, self._settler, "decode", model, self.worker_id, self._open_flow, self._find_outage
        )
        self._tombstones = Tombstones(self._cluster_state)
        self._outgoing = GroupCommit("answers", self._settle, HELD_IF_INSTANT)
        self._aborting = False
        self._started_at = self._cluster_state.now()
        self._fallback = Fallback(broker, self._cluster_state, self._settler, self.worker_id, model, self._slots.count)

    def run(self, hours: Hours = ALL_HOURS) -> None:
        """Serve until stopped. Outside of `hours` no jobs are taken; what has begun goes on."""
        self._renew()
        heartbeat = Heartbeat(self._cluster_state, self.registration, self._renew)
        try:
            self._loop.run(self, hours)
        finally:
            self._slots.close()
            self._outgoing.close()
            self._model_cache.close()
            heartbeat.close()

    def stop(self, abort: bool = False) -> None:
        """Leave after the jobs in the slots; with `abort` hand those back too."""
        self._loop.stop()
        self._aborting = abort or self._aborting  # set first: a job may be beginning just now
        if abort:
            self._end_all("not now")

    def _open_flow(self) -> DecodeFlow:
        hand_back = self._settler.hand_back_all
        self._flow = DecodeFlow(self._broker, self._slots, self._running_jobs, self._choice, self._kv, hand_back)
        return self._flow

    def handle(
        self, deliveries: list[Delivery], ahead: Future[FetchedCache | None] | None, leave_slot: Callable[[], None]
    ) -> None:
        """Deliveries of one model, from arrival to answers on their way out, one after the other in a slot's thread."""
        if self._aborting or self._find_outage():
            return self._settler.hand_back_all(deliveries)
        attempts: list[DecodeAttempt] = []
        num_begun = 0
        try:
            with ExitStack() as until_done:
                loaded_model = until_done.enter_context(self._model_cache.job(model_of(deliveries[0].queue)))
                opened_attempts = [
                    new_attempt
                    for delivery in deliveries
                    if (new_attempt := self._open(delivery, loaded_model, until_done))
                ]
                attempts = self._claim(opened_attempts)
                began = time.monotonic()
                for attempt in attempts:
                    attempt.ahead = ahead  # of the only one: a job that was fetched ahead comes alone
                    slow = num_begun and time.monotonic() - began > GROUP_PATIENCE_S
                    if self._aborting or slow or self._find_outage():
                        attempt.stop_for("not now")  # those behind a slow one go back: the engine stops at once
                    num_begun += 1
                    self._decode(attempt)
        except NotLoaded:  # unloaded since they were fetched
            self._settler.hand_back_all(deliveries)
        finally:  # whatever ends the slot: what is answered is sent, and nothing runs any more
            leave_slot()
            for attempt in attempts[num_begun:]:
                self._running_jobs.end(attempt)
            if finished_attempts := [attempt for attempt in attempts if attempt.body]:
                self._outgoing.add(*finished_attempts)

    def _open(self, delivery: Delivery, loaded_model: LoadedModel, until_done: ExitStack) -> DecodeAttempt | None:
        """Read and check a delivery; None if it has been settled."""
        attempt = self._settler.begin(DecodeAttempt, delivery)
        attempt.loaded_model = loaded_model
        envelope = attempt.envelope
        with self._settler.settling_errors(attempt):
            crash_counter = counting_crashes(
                self._cluster_state, "decode", envelope.job_id, envelope.run, envelope.returns
            )
            crashes = until_done.enter_context(crash_counter)
            failpoint("decode.taken", envelope.job_id)
            attempt.job = codec.decode(delivery.message.body, DecodeJob)
            inner = attempt.job.job
            cancelled, now = self._tombstones.has(inner.batch_id), self._cluster_state.now()
            check_runnable(attempt, inner, cancelled, now, crashes)
            return attempt
        if attempt.has_ended_unanswered and attempt.why_stopped:
            self._delete_own_blocks([attempt.job])
        return None

    def _claim(self, attempts: list[DecodeAttempt]) -> list[DecodeAttempt]:
        """Those of them that are ours to decode. The others are answered, adopted, or somebody else's: deferred."""
        if not attempts:
            return []
        own_attempts = []
        results_and_claims = self._cluster_state.take_up(
            self.worker_id, [attempt.key for attempt in attempts], CLAIM_TTL_S
        )
        for attempt, (body, has_claim) in zip(attempts, results_and_claims, strict=True):
            with self._settler.settling_errors(attempt):
                if body and (stored_result := _result_in(body)):
                    self._settler.settle(replying(attempt, stored_result))
                    self._delete_own_blocks([attempt.job])
                elif self._running_jobs.start(attempt):
                    if has_claim or body:  # with an unreadable result nobody else is on it
                        own_attempts.append(attempt)
                    else:
                        self._running_jobs.end(attempt)
                        self._settler.defer(attempt)
        return own_attempts

    def _renew(self) -> None:
        """Our sketch, and all claims in one round trip; those that have their results need no claim any more."""
        self._model_cache.home.loaded_model.sketches.publish()
        self._cluster_state.take_up(
            self.worker_id, [attempt.key for attempt in self._running_jobs.snapshot()], CLAIM_TTL_S
        )

    def _decode(self, attempt: DecodeAttempt) -> None:
        """Set `attempt.result` and `body`; without these it is settled, and runs no more."""
        with self._settler.settling_errors(attempt):
            try:
                failpoint("decode.claimed", attempt.envelope.job_id)
                attempt.result = self._generator.result(attempt)
                self._choice.throughput.note(attempt.envelope.model, attempt.result.decode)
                failpoint("decode.generated", attempt.envelope.job_id)
                attempt.body = codec.encode(attempt.result, attempt.envelope.version)
            finally:
                if not attempt.body:  # first: a copy that goes back may come here at once, and is another attempt
                    self._running_jobs.end(attempt)
                    self._cluster_state.release(*attempt.key, self.worker_id)
        if attempt.has_ended_unanswered:
            self._delete_own_blocks([attempt.job])

    def _settle(self, answers: list[DecodeAttempt]) -> None:
        """Results stored, published and confirmed, deliveries acked, the jobs' own blocks deleted. Never raises.

        Done for all answers that are ready at once, each step for all of them before the next: one round trip to the
        store and one to the broker serve many short jobs, while their slots decode the next ones.
        """
        try:
            # Stored first, so that a redelivery is answered and not decoded again. Claims are of no use from then on.
            self._cluster_state.finish(self.worker_id, [(*attempt.key, attempt.body) for attempt in answers])
            ready = []
            for attempt in answers:
                with self._settler.settling_errors(attempt):
                    failpoint("decode.stored", attempt.envelope.job_id)
                    kv, report = attempt.job.kv, attempt.result.decode
                    facts = {name: getattr(report, name) for name in _FACTS}
                    facts["get_bytes"] = kv.stored_bytes if kv and report.transferred_tokens else 0
                    self._observe(attempt.envelope.event(Step.ANSWERED, **facts))
                    ready.append(replying(attempt, attempt.result, attempt.body))
            self._settler.settle(*ready)
            for attempt in answers:
                failpoint("decode.acked", attempt.envelope.job_id)
            self._delete_own_blocks(attempt.job for attempt in answers)
            for attempt in answers:
                failpoint("decode.deleted", attempt.envelope.job_id)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the jobs out again
            log.warning("%d jobs: left unacked, the broker connection is closed", len(answers))
        finally:
            for attempt in answers:
                self._running_jobs.end(attempt)

    def _delete_own_blocks(self, jobs: Iterable[DecodeJob]) -> None:
        """Delete what these jobs alone used: nobody will need it again."""
        refs: list[BlockRef] = []
        for job in jobs:
            if job.kv and (own_refs := [ref for ref in stored_refs(job, job.kv) if not ref.is_shared]):
                refs += [*own_refs, *(snapshot_refs(job.kv.layout, own_refs[-1]) if job.kv.layout.snapshots else ())]
            if job.job.questions or job.job.sampling.answers > 1:
                self._cluster_state.forget_answers(job.job.job_id, job.job.run)
        try:
            self._kv.delete(refs)
        except StoreUnavailable as error:  # their TTL ends them
            log.info("%d blocks stay until their TTL: %s", len(refs), error)

    def _end_all(self, reason: StopReason, batch_id: str = "") -> None:
        for attempt in self._running_jobs.snapshot():
            if batch_id in ("", attempt.job.job.batch_id):
                attempt.stop_for(reason)

    # What the consumer loop asks.

    def count_in_progress(self) -> int:
        """Jobs that are not settled."""
        return self._slots.active_groups + len(self._outgoing.snapshot())

    def accept(self, deliveries: list[Delivery]) -> None:
        """Give the deliveries a slot."""
        ahead = self._flow.pop_fetch(deliveries[0]) if self._flow else None
        self._slots.run_in_slot(partial(self.handle, deliveries, ahead), len(deliveries))

    def finish(self) -> None:
        """Wait for all slots, and for their answers to be settled."""
        self._slots.finish()
        self._outgoing.finish()

    def on_cancel(self, batch_id: str) -> None:
        """Stop what runs of this batch."""
        self._tombstones.note_cancel(batch_id)
        self._end_all("cancelled", batch_id)

    def tick(self) -> None:
        """Stop what ran past its deadline; look after jobs that no prefill worker is there for."""
        now = self._cluster_state.now()
        for attempt in self._running_jobs.snapshot():
            if attempt.job.job.deadline and now > attempt.job.job.deadline:
                attempt.stop_for("expired")
        if not self._loop.idle_reason:
            self._fallback.look()

    def registration(self) -> WorkerInfo:
        """What this worker says of itself, now."""
        home, throughput = self._model_cache.home, self._choice.throughput
        job_ids = tuple(attempt.key[0] for attempt in self._running_jobs.snapshot())
        resident = tuple(self._model_cache.resident())
        averages = [throughput.of(model) for model in resident]
        engine = engine_registration(self.worker_id, "decode", home.model, self._started_at, home.loaded_model)
        endings = self._generator.checks.endings()
        refusals = [(name, reason) for name, reason in (home.loaded_model.sketches.refusals | endings).items() if name]
        refusals = refusals[-MAX_REFUSALS:]
        return replace(
            engine,
            slots=self._slots.count,
            busy=min(len(job_ids), self._slots.count),  # one that is being settled is in no slot any more
            done=self._slots.jobs_done,
            tokens_per_s=throughput.of(home.model).tokens_per_s,
            off=self._loop.idle_reason,
            notes=engine.notes or next(iter(endings.values()), ""),
            refuses=tuple(name for name, _ in refusals),
            refuses_because=tuple(reason for _, reason in refusals),
            jobs=job_ids,
            resident=resident,
            resident_tokens_per_s=tuple(model_averages.tokens_per_s for model_averages in averages),
            resident_answer_tokens=tuple(model_averages.answer_tokens for model_averages in averages),
            stolen=self._choice.thief.stolen_jobs,
            not_stolen=sum(self._choice.thief.refusals.values()),
            left=self._choice.tail.jobs_left,
        )


def _result_in(body: bytes) -> JobResult | None:
    """A stored result, unless it is of no use to us."""
    try:
        return codec.decode(body, JobResult)
    except (InvalidMessage, NewerMessage):
        return None
