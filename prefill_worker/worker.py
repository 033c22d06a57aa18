"""What happens to one prefill delivery: check, tokenize, compute, store, publish + confirm, ack.

The order is the safety. All KV lies in the store before the decode job is published, and the decode job is
confirmed before the delivery is acked; so a crash anywhere means a redelivery, at worst a duplicate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engines.base import LoadedEngine, PrefillEngine, outage_of
from engines.questions import tokenize_job
from engines.worker_info import engine_registration
from infra.broker.base import Broker, Consumer, Delivery
from infra.broker.control import ring
from infra.broker.envelope import Attempt
from infra.broker.failpoints import failpoint
from infra.broker.settle import GroupCommit, Settlement, Settler, check_runnable, passing_on
from infra.broker.topology import jobs_waiting, work_queue
from infra.config.hours import ALL_HOURS, Hours
from infra.worker_loop import (
    GROUP_PATIENCE_S,
    HELD_IF_INSTANT,
    QUICK_S,
    ConsumerLoop,
    SlotPool,
    adaptive_prefetch,
    receive_group,
)
from kvstore.base import ClusterState, KVStore
from kvstore.cluster_state import BestEffortClusterState
from kvstore.heartbeat import Heartbeat, new_worker_id
from kvstore.runnable import Tombstones, counting_crashes
from messages import codec
from messages.errors import BrokerUnavailable
from messages.jobs import DecodeJob, PrefillJob
from messages.lifecycle import Event, Step
from messages.workers import WorkerInfo
from prefill_worker.kv_transfer import KVWriter, Refusals

log = logging.getLogger(__name__)

_FACTS = ("prefill_s", "put_s", "put_bytes", "computed_tokens", "restored_tokens")  # of the report, for the event
_SLOW_S = 2 * QUICK_S  # from here on jobs are quick no more
_LARGE_BYTES = 16 * 1024
_EARLIER_VERSION = "the job's version of messages can't say who made a KV cache"


class PrefillWorker:
    """Serves one model's prefill queue with one engine, with as many jobs at once as that computes prompts.

    Prompts of up to `short_tokens`, times their answers, go on without a KV cache. `run` blocks until `stop`;
    everything else may be called from other threads.
    """

    def __init__(
        self,
        model: str,
        loaded_engine: LoadedEngine[PrefillEngine],
        broker: Broker,
        kv: KVStore,
        cluster_state: ClusterState,
        observe: Callable[[Event], None],
        short_tokens: int = 0,
    ) -> None:
        self.worker_id = new_worker_id()
        self._model = model
        self._engine = loaded_engine.engine
        self._broker = broker
        self._cluster_state = BestEffortClusterState(cluster_state)
        self._observe = observe
        self._loaded_engine = loaded_engine
        self._refusals = Refusals(self._cluster_state, model, loaded_engine.sketches.name)
        self._kv_writer = KVWriter(
            loaded_engine, kv, self._cluster_state, self.worker_id, self._decode_waits, self._refusals, short_tokens
        )
        self._tombstones = Tombstones(self._cluster_state)
        self._settler = Settler(broker, [model], observe)
        self._onward = GroupCommit("passing on", self._settle, HELD_IF_INSTANT)
        self._slots = SlotPool(loaded_engine.engine.info.prefill_slots)
        flow = SlotFlow if self._slots.count > 1 else PrefillFlow
        open_flow = partial(flow, broker, model, self._settler.hand_back_all)
        find_outage = partial(outage_of, loaded_engine.engine)
        self._loop = ConsumerLoop(broker, self._settler, "prefill", model, self.worker_id, open_flow, find_outage)
        self._lock = threading.Lock()
        self._prefilling: set[Attempt[PrefillJob]] = set()
        self._aborting = False
        self._started_at = self._cluster_state.now()
        self._finished_jobs = 0

    def run(self, hours: Hours = ALL_HOURS) -> None:
        """Serve until stopped. Outside of `hours` no jobs are taken; what has begun goes on."""
        self._renew()
        heartbeat = Heartbeat(self._cluster_state, self.registration, self._renew)
        try:
            self._loop.run(self, hours)
        finally:
            self._slots.close()
            self._onward.close()
            heartbeat.close()

    def _renew(self) -> None:
        """What lies in the store under our name: our sketch, so that decoders can compare theirs, and leases."""
        self._loaded_engine.sketches.publish()
        self._kv_writer.leases.renew()

    def stop(self, abort: bool = False) -> None:
        """Leave after what is in hand; with `abort` hand that back too."""
        self._loop.stop()
        self._aborting = abort or self._aborting  # set first: a job may be beginning just now
        if abort:
            for attempt in self._in_hand():
                attempt.stop_for("not now")

    def accept(self, deliveries: list[Delivery]) -> None:
        """Deliveries, from arrival to decode jobs that are about to be published; the acks follow that.

        Here, if the engine computes one prompt at a time, and else in a slot.
        """
        if self._slots.count > 1:
            self._slots.run_in_slot(lambda _leave_slot: self.handle(deliveries), len(deliveries))
        else:
            self.handle(deliveries)

    def handle(self, deliveries: list[Delivery]) -> None:
        """Deliveries, from arrival to decode jobs on their way out, one after the other."""
        start = time.monotonic()
        ready: list[Settlement] = []
        for number, delivery in enumerate(deliveries):
            slow = number and time.monotonic() - start > GROUP_PATIENCE_S  # they are slower than was thought
            if slow or self._aborting or outage_of(self._engine):
                self._settler.hand_back_all(deliveries[number:])
                break
            if ready and is_large(delivery):  # what is ready does not wait for this one
                self._onward.add(*ready)
                ready = []
            if settlement := self._prefill(delivery):
                ready.append(settlement)
        if ready:
            self._onward.add(*ready)

    def _prefill(self, delivery: Delivery) -> Settlement | None:
        """One delivery: check, tokenize (once in a job's life), compute what isn't stored yet, store it.

        Returns the decode job to publish; None if the delivery has been settled.
        """
        attempt = self._settler.begin(Attempt[PrefillJob], delivery)
        envelope = attempt.envelope
        settlement = None
        crash_counter = counting_crashes(
            self._cluster_state, "prefill", envelope.job_id, envelope.run, envelope.returns
        )
        try:
            with crash_counter as crashes, self._settler.settling_errors(attempt):
                failpoint("prefill.taken", envelope.job_id)
                job = attempt.job = codec.decode(delivery.message.body, PrefillJob)
                cancelled, now = self._tombstones.has(job.batch_id), self._cluster_state.now()
                check_runnable(attempt, job, cancelled, now, crashes)
                with self._lock:
                    self._prefilling.add(attempt)
                if self._aborting:
                    attempt.stop_for("not now")
                self._observe(envelope.event(Step.PREFILL_STARTED, queue_s=job.waited_s(now)))
                job = job if job.tokens else tokenize_job(self._engine, job)
                failpoint("prefill.tokenized", job.job_id)
                if envelope.version == codec.VERSION:
                    onward = self._kv_writer.compute_and_store(job, attempt.stop, job.waited_s(now))
                else:
                    onward = DecodeJob(job, None, why_no_kv=_EARLIER_VERSION)
                failpoint("prefill.stored", job.job_id)
                if onward.kv:
                    facts = {name: getattr(onward.prefill, name) for name in _FACTS}
                    self._observe(envelope.event(Step.KV_STORED, **facts))
                settlement = passing_on(attempt, onward)
        finally:
            with self._lock:
                self._prefilling.discard(attempt)
                self._finished_jobs += 1
        return settlement

    def _settle(self, ready: list[Settlement]) -> None:
        """Publish decode jobs, confirmed; then ack. The next job is under way meanwhile."""
        try:
            self._settler.settle(*ready)
        except BrokerUnavailable:  # only if our broker object was closed: the broker hands the jobs out again
            log.warning("%d jobs: left unacked, the broker connection is closed", len(ready))
            return
        for settlement in ready:
            failpoint("prefill.acked", settlement.attempt.envelope.job_id)
        if any(settlement.attempt.envelope.lane == "now" for settlement in ready):
            ring(self._broker, work_queue("decode", self._model, "now"))

    # What the consumer loop asks.

    def wait_for_capacity(self, timeout_s: float) -> bool:
        """Whether there is a slot for another job, and room in the store as far as is known; waits for either."""
        if self._kv_writer.admission.is_open():
            return self._slots.wait(timeout_s)
        time.sleep(timeout_s)
        return False

    def count_in_progress(self) -> int:
        """Jobs whose decode job is not confirmed yet; the loop's own thread computes none while it asks."""
        return self._slots.active_groups + len(self._onward.snapshot())

    def finish(self) -> None:
        """Wait until what was taken is acked."""
        self._slots.finish()
        self._onward.finish()

    def on_cancel(self, batch_id: str) -> None:
        """Stop what is prefilled of this batch."""
        self._tombstones.note_cancel(batch_id)
        for attempt in self._in_hand():
            if attempt.job.batch_id == batch_id:
                attempt.stop_for("cancelled")

    def tick(self) -> None:
        """Nothing to do."""

    def _decode_waits(self) -> bool:
        """Whether any job waits for decode, of any model that shares this store, as far as the broker tells."""
        models = {registration.model for registration in self._cluster_state.registrations()} | {self._model}
        try:
            return any(jobs_waiting(self._broker, "decode", model) for model in models)
        except BrokerUnavailable:
            return True

    def _in_hand(self) -> list[Attempt[PrefillJob]]:
        """What is being prefilled: a snapshot."""
        with self._lock:
            return list(self._prefilling)

    def _job_ids(self) -> tuple[str, ...]:
        onward = [settlement.attempt for settlement in self._onward.snapshot()]
        return tuple(attempt.envelope.job_id for attempt in [*self._in_hand(), *onward])

    def registration(self) -> WorkerInfo:
        """What this worker says of itself, now."""
        engine = engine_registration(self.worker_id, "prefill", self._model, self._started_at, self._loaded_engine)
        return replace(
            engine,
            busy=len(self._in_hand()),
            done=self._finished_jobs,
            tokens_per_s=self._kv_writer.tokens_per_s,
            off=self._loop.idle_reason,
            notes=engine.notes or self._refusals.reason(),
            jobs=self._job_ids(),
        )


def is_large(delivery: Delivery) -> bool:
    """Whether its prompt is so long that it is not quick, whatever came before it."""
    return len(delivery.message.body) > _LARGE_BYTES


class PrefillFlow:
    """See infra.worker_loop.Flow: of a worker that computes one prompt at a time. One is held, or many quick ones.

    Computing a prompt takes seconds as a rule, and then nothing is held beside it. Short prompts that decode does
    itself take less than the way to the broker and back; held one at a time, they would mostly wait for that.
    `next` is called when the worker is done with what it was given before.
    """

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        self._broker = broker
        self._bulk = work_queue("prefill", model, "bulk")
        self._consumer = broker.consume(self._bulk, 1)
        self._hand_back = hand_back
        self._prefetch = 1
        self._mean_s = _SLOW_S  # of a job
        self._group_size = 0  # how many were given out last
        self._given_at = 0.0
        self._is_paused = False

    def next(self, timeout_s: float) -> list[Delivery]:
        """One job, or a group of quick ones."""
        if self._is_paused:
            self._consumer.resume()
            self._is_paused = False
        if self._group_size:
            took_s = (time.monotonic() - self._given_at) / self._group_size
            self._mean_s += (1 - 0.9**self._group_size) * (took_s - self._mean_s)
        self._set_prefetch(adaptive_prefetch(self._mean_s, self._prefetch))
        first = self._consumer.receive(timeout_s)
        if first is None:
            group = []
        elif self._prefetch == 1 or is_large(first):
            group = [first]
        else:
            group = receive_group(self._consumer, first, self._mean_s)
        if self._prefetch > 1 and any(map(is_large, group)):
            self._mean_s = _SLOW_S
            self._set_prefetch(1)
        self._group_size, self._given_at = len(group), time.monotonic()
        return group

    def throttle(self, _urgent: Callable[[], Delivery | None]) -> None:
        """The store has no room: nothing is held that another worker might take."""
        self._hand_back(self.pause())

    def pause(self) -> list[Delivery]:
        """See Flow."""
        self._is_paused, self._group_size = True, 0
        return self._consumer.pause()

    def close(self) -> list[Delivery]:
        """See Flow."""
        return self._consumer.close()

    def nudge(self) -> None:
        """See Flow."""
        self._consumer.nudge()

    def _set_prefetch(self, prefetch: int) -> None:
        if prefetch > self._prefetch:
            self._consumer.widen(prefetch)
        elif prefetch < self._prefetch:
            self._hand_back(self._consumer.close())
            self._consumer = self._broker.consume(self._bulk, prefetch)
        self._prefetch = prefetch


class SlotFlow:
    """See infra.worker_loop.Flow: of a worker whose engine computes several prompts at once.

    A job is pulled when a slot is free: one that was pushed would lie here while another worker idles. Only a worker
    that finds none listens.
    """

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        self._broker = broker
        self._bulk = work_queue("prefill", model, "bulk")
        self._hand_back = hand_back
        self._listening: Consumer | None = None

    def next(self, timeout_s: float) -> list[Delivery]:
        """One job."""
        if self._listening is None:
            if delivery := self._broker.get(self._bulk):
                return [delivery]
            self._listening = self._broker.consume(self._bulk, 1)
        delivery = self._listening.receive(timeout_s)
        if delivery is None:
            return []
        self._hand_back(self.pause())
        return [delivery]

    def throttle(self, _urgent: Callable[[], Delivery | None]) -> None:
        """No slot is free, or the store has no room: nothing is held that another worker might take."""
        self._hand_back(self.pause())

    def pause(self) -> list[Delivery]:
        """See Flow."""
        listening, self._listening = self._listening, None
        return listening.close() if listening else []

    def close(self) -> list[Delivery]:
        """See Flow."""
        return self.pause()

    def nudge(self) -> None:
        """See Flow."""
        if listening := self._listening:
            listening.nudge()
