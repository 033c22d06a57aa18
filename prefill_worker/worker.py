"""What happens to a prefill delivery. `PrefillWorker.handle` shows it, from the arrival to the ack.

The order of steps makes it safe. The whole KV cache is stored before the decode job is published, and the decode job is
confirmed before the delivery is acked. So a crash at any point causes a redelivery, and at worst a duplicate.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

from engines.base import LoadedEngine, PrefillEngine, outage_of
from engines.questions import tokenize_job
from engines.worker_info import engine_registration
from infra.broker.base import Broker, Delivery
from infra.broker.control import ring
from infra.broker.envelope import Attempt
from infra.broker.failpoints import failpoint
from infra.broker.settle import Settlement, Settler, passing_on
from infra.broker.topology import TURNS, jobs_waiting, work_queue
from infra.checks import Checks
from infra.config.hours import ALL_HOURS, Hours
from infra.worker_loop import ConsumerLoop, Flow, OneByOne, SlotPool
from kvstore.base import ClusterState, KVStore
from kvstore.cluster_state import BestEffortClusterState
from kvstore.heartbeat import Heartbeat, new_worker_id
from kvstore.runnable import Tombstones, counting_crashes
from messages import codec
from messages.errors import BrokerUnavailable
from messages.jobs import DecodeJob, PrefillJob
from messages.lifecycle import Event, Step
from messages.workers import WorkerInfo, WorkerStage
from prefill_worker.flow import PrefillFlow, SlotFlow
from prefill_worker.free_memory import FreeMemory
from prefill_worker.kv_transfer import KVWriter, Refusals

log = logging.getLogger(__name__)

# Fields of the prefill report that the event KV_STORED contains.
_FACTS = ("prefill_s", "put_s", "put_bytes", "computed_tokens", "restored_tokens")
_EARLIER_VERSION = "the job's message version can't name the producer of a KV cache"


class PrefillWorker:
    """Serves one model's prefill queue with one engine, with as many jobs at once as the engine computes prompts.

    Prompts go on without a KV cache if their tokens, times their answers, are below `short_tokens`. A prompt that would
    leave less than `free_bytes` of the machine's memory is left to another worker. `run` blocks until `stop`;
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
        steps: Callable[..., OneByOne[Settlement]] = OneByOne,
        worker_id: str = "",
        roles: tuple[WorkerStage, ...] = ("prefill",),
        free_bytes: int = 0,
    ) -> None:
        self.worker_id = worker_id or new_worker_id()
        self._roles = roles
        self._model = model
        self._engine = loaded_engine.engine
        self._broker = broker
        self._cluster_state = BestEffortClusterState(cluster_state)
        self._observe = observe
        self._loaded_engine = loaded_engine
        self._refusals = Refusals(self._cluster_state, model, loaded_engine.sketches.name)
        self._free_memory = FreeMemory(free_bytes, self._others_prefill)
        self._kv_writer = KVWriter(
            loaded_engine,
            kv,
            self._cluster_state,
            self.worker_id,
            self._decode_waits,
            self._refusals,
            self._free_memory,
            short_tokens,
        )
        self._tombstones = Tombstones(self._cluster_state)
        self._checks = Checks(
            self._tombstones.has, self._cluster_state.now, partial(counting_crashes, self._cluster_state)
        )
        self._settler = Settler(broker, [model], observe)
        prompts_at_once = loaded_engine.engine.info.prefill_slots
        self.slots = SlotPool(prompts_at_once, inline=prompts_at_once == 1)
        self._jobs = steps(broker, self._settler, self.slots, self.handle, self.commit)
        find_outage = partial(outage_of, loaded_engine.engine)
        find_trouble = self._free_memory.why_short
        self.loop = ConsumerLoop(
            broker, self._settler, "prefill", model, self.worker_id, self._open_flow, find_outage, find_trouble
        )
        self._lock = threading.Lock()
        self._prefilling: set[Attempt[PrefillJob]] = set()
        self._aborting = False
        self._started_at = self._cluster_state.now()

    def handle(self, delivery: Delivery, _leave_slot: Callable[[], None]) -> None:
        """Handle one delivery, from its arrival to its ack. Each step ends before the next begins."""
        # In these cases, another worker should do the job.
        if self._aborting or outage_of(self._engine) or self._free_memory.why_short():
            return self._settler.hand_back_all([delivery])
        attempt = self._settler.begin(Attempt[PrefillJob], delivery)
        envelope, settlement = attempt.envelope, None
        with (
            self._settler.settling_errors(attempt),
            # Check whether the job is cancelled or expired, and how many workers died while they ran it.
            self._checks.passed(attempt) as standing,
            self._in_hand_until_done(attempt),
        ):
            waited_s = standing.job.waited_s(standing.now)
            self._observe(envelope.event(Step.PREFILL_STARTED, queue_s=waited_s))
            # A retried job already has its tokens.
            job = standing.job if standing.job.tokens else tokenize_job(self._engine, standing.job)
            failpoint("prefill.tokenized", job.job_id)
            # Only the missing records are computed and stored, in the space that `Admission` has reserved. A shared
            # prefix is computed only by the worker that holds its lease.
            if envelope.version == codec.VERSION:
                onward = self._kv_writer.compute_and_store(job, attempt.stop, waited_s)
            else:
                onward = DecodeJob(job, None, why_no_kv=_EARLIER_VERSION)
            failpoint("prefill.stored", job.job_id)
            if onward.kv:
                facts = {name: getattr(onward.prefill, name) for name in _FACTS}
                self._observe(envelope.event(Step.KV_STORED, **facts))
            settlement = passing_on(attempt, onward)
        if settlement:
            # The order is: publish the decode job with a confirm, then ack the delivery.
            self._jobs.commit(settlement)

    def commit(self, ready: list[Settlement]) -> None:
        """Publish decode jobs with confirms, then ack. Never raises."""
        try:
            self._settler.settle(*ready)
        # This error comes only if this worker closed its connection. The broker then delivers the jobs again.
        except BrokerUnavailable:
            log.warning("%d jobs: left unacked, the broker connection is closed", len(ready))
            return
        for settlement in ready:
            failpoint("prefill.acked", settlement.attempt.envelope.job_id)
        if any(settlement.attempt.envelope.lane == "now" for settlement in ready):
            ring(self._broker, work_queue("decode", self._model, "now"))

    def run(self, hours: Hours = ALL_HOURS) -> None:
        """Serve until stopped. Outside of `hours` no jobs are taken, but running jobs go on."""
        self._renew()
        with closing(Heartbeat(self._cluster_state, self.registration, self._renew)):
            self.loop.run(self._jobs, self, hours)

    def _renew(self) -> None:
        """Renew what the store keeps for this worker: its leases, and its sketch, which decode workers check."""
        self._loaded_engine.sketches.publish()
        self._kv_writer.leases.renew()

    def stop(self, abort: bool = False) -> None:
        """Stop after the jobs in hand. With `abort`, hand those back too."""
        self.loop.stop()
        # This is set before the running jobs are stopped. Otherwise a job that begins in between would not be stopped.
        self._aborting = abort or self._aborting
        if abort:
            for attempt in self._in_hand():
                attempt.stop_for("not now")

    def _open_flow(self) -> Flow:
        if self.slots.count > 1:
            return SlotFlow(self._broker, self._model, self._settler.hand_back_all)
        return PrefillFlow(self._broker, self._jobs.consume, self._model)

    # Methods that the consumer loop calls

    def has_room(self) -> bool:
        """Whether the store has room for another KV cache."""
        return self._kv_writer.admission.is_open()

    def on_cancel(self, batch_id: str) -> None:
        """Stop the jobs of this batch that are being prefilled here."""
        self._tombstones.note_cancel(batch_id)
        for attempt in self._in_hand():
            if attempt.job.batch_id == batch_id:
                attempt.stop_for("cancelled")

    def tick(self) -> None:
        """If the worker paused for lack of memory, check whether there is enough now."""
        self._free_memory.look_again()

    def _others_prefill(self) -> bool:
        """Whether another worker takes this model's prefill jobs, by its registration."""
        return any(
            (other.role, other.model, other.off) == ("prefill", self._model, "") and other.worker_id != self.worker_id
            for other in self._cluster_state.registrations()
        )

    def _decode_waits(self) -> bool:
        """Whether any job waits for decode, of any model that shares this store, by the broker's counts."""
        models = {registration.model for registration in self._cluster_state.registrations()} | {self._model}
        try:
            return any(jobs_waiting(self._broker, "decode", model) for model in models)
        except BrokerUnavailable:
            return True

    @contextmanager
    def _in_hand_until_done(self, attempt: Attempt[PrefillJob]) -> Iterator[None]:
        """Make the attempt stoppable from other threads, for the length of the block."""
        with self._lock:
            self._prefilling.add(attempt)
        if self._aborting:
            attempt.stop_for("not now")
        try:
            yield
        finally:
            with self._lock:
                self._prefilling.discard(attempt)

    def _in_hand(self) -> list[Attempt[PrefillJob]]:
        """Return the attempts that are being prefilled now."""
        with self._lock:
            return list(self._prefilling)

    @property
    def prompt_s(self) -> float:
        """Mean seconds of a prompt in the engine; 0: no prompt was computed yet."""
        return self._kv_writer.prompt_s

    def registration(self) -> WorkerInfo:
        """Return what this worker says about itself now."""
        engine = engine_registration(
            self.worker_id, "prefill", self._model, self._started_at, self._loaded_engine, self._roles
        )
        attempts = self._in_hand()
        onward = [settlement.attempt for settlement in self._jobs.uncommitted()]
        return replace(
            engine,
            busy=len(attempts),
            done=self._settler.jobs_finished,
            tokens_per_s=self._kv_writer.tokens_per_s,
            details=replace(
                engine.details,
                prefill_curves=self._kv_writer.curves.curves(),
                paused_because=self.loop.paused_because,
                turns=TURNS,
            ),
            off=self.loop.idle_reason,
            notes=engine.notes or self._refusals.reason(),
            jobs=tuple(attempt.envelope.job_id for attempt in [*attempts, *onward]),
        )
