"""What happens to a decode delivery. `DecodeWorker.handle` shows it, from the arrival to the ack.

The order of steps makes it safe. The result is stored before it is published, so a redelivery is answered from the
store instead of being decoded again. It is confirmed before the delivery is acked. Only then are the job's own blocks
deleted.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

from decode_worker.fallback import Fallback
from decode_worker.flow import DecodeFlow
from decode_worker.generate import DecodeAttempt, Generator, RunningJobs, stored_refs
from decode_worker.stealing.models import ModelCache
from decode_worker.stealing.thief import QueueChoice
from engines.base import outage_of
from engines.worker_info import engine_registration
from infra.broker.base import Broker, Delivery
from infra.broker.envelope import StopReason, run_of
from infra.broker.failpoints import failpoint
from infra.broker.settle import Settler, replying
from infra.broker.topology import TURNS
from infra.checks import Checks
from infra.config.hours import ALL_HOURS, Hours
from infra.worker_loop import ConsumerLoop, GroupHelp, OneByOne, SlotPool
from kvstore.base import ClusterState, KVStore, Run
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
from messages.workers import MAX_CURVES, MAX_REFUSALS, MAX_STEALS, WorkerInfo, WorkerStage

log = logging.getLogger(__name__)

# Fields of the decode report that the event ANSWERED contains.
_FACTS = (
    *("prompt_tokens", "transferred_tokens", "evaluated_tokens", "completion_tokens"),
    *("get_s", "ttft_s", "decode_s", "total_s"),
)


class DecodeWorker:
    """Serves the decode queue of one model, the home model of `model_cache`.

    It runs as many jobs at once as its engine has slots. In the same slots it also takes jobs of other models that may
    be in memory, if that pays (`decode_worker.stealing.policy`). `run` blocks until `stop`; everything else may be
    called from other threads.
    """

    def __init__(
        self,
        model_cache: ModelCache,
        broker: Broker,
        kv: KVStore,
        cluster_state: ClusterState,
        observe: Callable[[Event], None],
        kv_check_every: int = KV_CHECK_EVERY,
        steps: Callable[..., OneByOne[DecodeAttempt]] = OneByOne,
        worker_id: str = "",
        roles: tuple[WorkerStage, ...] = ("decode",),
    ) -> None:
        self.worker_id = worker_id or new_worker_id()
        self._roles = roles
        self._model_cache = model_cache
        self._broker = broker
        self._kv = kv
        self._cluster_state = BestEffortClusterState(cluster_state)
        self._observe = observe
        self.slots = SlotPool(model_cache.home.loaded_model.engine.info.slots)
        self._settler = Settler(broker, model_cache.models, observe)
        self._generator = Generator(
            kv, broker, self._cluster_state, self.slots, self.worker_id, observe, kv_check_every
        )
        self.choice = QueueChoice(broker, self._cluster_state, model_cache, self.worker_id, observe)
        self._running_jobs = RunningJobs()
        self._flow: DecodeFlow | None = None
        model = model_cache.home.model
        self._find_outage = partial(outage_of, model_cache.home.loaded_model.engine)
        self.loop = ConsumerLoop(
            *(broker, self._settler, "decode", model, self.worker_id, self._open_flow),
            find_outage=self._find_outage,
            find_trouble=self._generator.why_cut_off,
        )
        self._tombstones = Tombstones(self._cluster_state)
        self._checks = Checks(
            self._tombstones.has, self._cluster_state.now, partial(counting_crashes, self._cluster_state)
        )
        self._claims = Claims(self._cluster_state, self.worker_id)
        group_help = GroupHelp(lambda: self.choice.throughput.decode_s(model), self._claims.looked_up)
        self._jobs = steps(broker, self._settler, self.slots, self.handle, self.commit, group_help)
        self._aborting = False
        self._started_at = self._cluster_state.now()
        # A settler counts its finished jobs. Jobs that are only passed on have a separate settler, so that they don't
        # count as decoded here.
        passing_on = Settler(broker, model_cache.models, observe)
        self._fallback = Fallback(broker, self._cluster_state, passing_on, self.worker_id, model, self.slots.count)

    def handle(self, delivery: Delivery, leave_slot: Callable[[], None]) -> None:
        """Handle one delivery, from its arrival to its ack. Each step ends before the next begins."""
        ahead = self._flow.pop_fetch(delivery) if self._flow else None
        if self._aborting or self._find_outage() or self._generator.why_cut_off():  # another worker should do the job
            return self._settler.hand_back_all([delivery])
        attempt = self._settler.begin(DecodeAttempt, delivery)
        attempt.ahead = ahead
        with self._settler.settling_errors(attempt), self._model_cache.job(attempt.envelope.model) as loaded_model:
            attempt.loaded_model = loaded_model
            # `passed` checks whether the job is cancelled or expired, and how many workers died while they ran it.
            # `_claimed` checks whether the job has a result already, and whether another worker is decoding it.
            with self._checks.passed(attempt), self._claimed(attempt) as is_ours:
                if is_ours:
                    failpoint("decode.claimed", attempt.envelope.job_id)
                    attempt.result = self._generator.result(attempt)
                    failpoint("decode.generated", attempt.envelope.job_id)
                    sequences = max(1, self.slots.count - self.slots.free)
                    self.choice.note(attempt.envelope.model, attempt.result.decode, sequences)
                    attempt.body = codec.encode(attempt.result, attempt.envelope.version)
        leave_slot()
        if attempt.body:
            # The order is: store the result, publish it with a confirm, ack the delivery, delete the job's blocks.
            self._jobs.commit(attempt)
        elif attempt.has_ended_unanswered and attempt.is_read:
            self._delete_own_blocks([attempt.job])

    def commit(self, answers: list[DecodeAttempt]) -> None:
        """Store and publish results with confirms, ack the deliveries, and delete the jobs' own blocks. Never raises.

        This is done for all answers that are ready, each step for all of them before the next step. One round trip to
        the store and one to the broker then serve many short jobs, while their slots decode the next ones.
        """
        try:
            # The result must be stored first. A redelivery is then answered from the store, and needs no claim.
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
        # This error comes only if this worker closed its connection. The broker then delivers the jobs again.
        except BrokerUnavailable:
            log.warning("%d jobs: left unacked, the broker connection is closed", len(answers))
        finally:
            for attempt in answers:
                self._running_jobs.end(attempt)

    @contextmanager
    def _claimed(self, attempt: DecodeAttempt) -> Iterator[bool]:
        """Yield whether this worker should decode the job.

        If not, the job was answered from the store, adopted by a running attempt, or deferred because another worker
        has it. If the block ends without a result, the job no longer runs here.
        """
        body, has_claim = self._claims.take_up(attempt.key)
        if body and (stored_result := _result_in(body)):
            self._settler.settle(replying(attempt, stored_result))
            self._delete_own_blocks([attempt.job])
            yield False
        elif not self._running_jobs.start(attempt):
            yield False
        # No result is stored, and another worker has the claim, so leave the job to that worker. (If a result is stored
        # but can't be read, no other worker will decode the job, so it is decoded below.)
        elif not (has_claim or body):
            self._running_jobs.end(attempt)
            self._settler.defer(attempt)
            yield False
        else:
            # If the worker was aborted before this attempt was added to the running jobs, stop the attempt here.
            if self._aborting:
                attempt.stop_for("not now")
            try:
                yield True
            finally:
                # The attempt ends before the job is settled, because a job that is sent back to its queue can return at
                # once as a new attempt.
                if not attempt.body:
                    self._running_jobs.end(attempt)
                    self._claims.release(attempt.key)

    def run(self, hours: Hours = ALL_HOURS) -> None:
        """Serve until stopped. Outside of `hours` no jobs are taken, but running jobs go on."""
        self._renew()
        with closing(Heartbeat(self._cluster_state, self.registration, self._renew)), closing(self._model_cache):
            self.loop.run(self._jobs, self, hours)

    def stop(self, abort: bool = False) -> None:
        """Stop after the jobs in the slots. With `abort`, hand those back too."""
        self.loop.stop()
        # This is set before the running jobs are stopped. Otherwise a job that begins in between would not be stopped.
        self._aborting = abort or self._aborting
        if abort:
            self._end_all("not now")

    def _open_flow(self) -> DecodeFlow:
        hand_back = self._settler.hand_back_all
        self._flow = DecodeFlow(self._broker, self._jobs, self._running_jobs, self.choice, self._kv, hand_back)
        return self._flow

    def _renew(self) -> None:
        """Publish our sketch, and renew all claims in one round trip.

        Jobs that have their results need no claim any more. If such a result can't be sent, its job must not be kept
        from other workers.
        """
        self._model_cache.home.loaded_model.sketches.publish()
        self._claims.renew([attempt.key for attempt in self._running_jobs.snapshot() if not attempt.body])

    def _delete_own_blocks(self, jobs: Iterable[DecodeJob]) -> None:
        """Delete the blocks that only these jobs used, which are not needed any more."""
        refs: list[BlockRef] = []
        for job in jobs:
            if job.kv and (own_refs := [ref for ref in stored_refs(job, job.kv) if not ref.is_shared]):
                refs += [*own_refs, *(snapshot_refs(job.kv.layout, own_refs[-1]) if job.kv.layout.snapshots else ())]
            if job.job.questions or job.job.sampling.answers > 1:
                self._cluster_state.forget_answers(job.job.job_id, job.job.run)
        try:
            self._kv.delete(refs)
        except StoreUnavailable as error:  # the store deletes the blocks after their TTL
            log.info("%d blocks stay until their TTL: %s", len(refs), error)

    def _end_all(self, reason: StopReason, batch_id: str = "") -> None:
        for attempt in self._running_jobs.snapshot():
            if batch_id in ("", attempt.job.job.batch_id):
                attempt.stop_for(reason)

    # Methods that the consumer loop calls

    def has_room(self) -> bool:
        """Return True, because a result takes next to no room."""
        return True

    def on_cancel(self, batch_id: str) -> None:
        """Stop the jobs of this batch that run here."""
        self._tombstones.note_cancel(batch_id)
        self._end_all("cancelled", batch_id)

    def tick(self) -> None:
        """Update the outlook, stop jobs that are past their deadline, and take jobs that no prefill worker serves."""
        self.choice.look()
        self._generator.probe_store(self._model_cache.home.model)
        now = self._cluster_state.now()
        for attempt in self._running_jobs.snapshot():
            if attempt.job.job.deadline and now > attempt.job.job.deadline:
                attempt.stop_for("expired")
        if not self.loop.idle_reason:
            self._fallback.look()

    def registration(self) -> WorkerInfo:
        """Return what this worker says about itself now."""
        home, throughput = self._model_cache.home, self.choice.throughput
        job_ids = tuple(attempt.key[0] for attempt in self._running_jobs.snapshot())
        resident = tuple(self._model_cache.resident())
        averages = [throughput.of(model) for model in resident]
        engine = engine_registration(
            self.worker_id, "decode", home.model, self._started_at, home.loaded_model, self._roles
        )
        endings = self._generator.checks.endings()
        refusals = [(name, reason) for name, reason in (home.loaded_model.sketches.refusals | endings).items() if name]
        refusals = refusals[-MAX_REFUSALS:]
        return replace(
            engine,
            slots=self.slots.count,
            busy=min(len(job_ids), self.slots.count),  # a job that is being settled no longer takes up a slot
            done=self._settler.jobs_finished,
            tokens_per_s=throughput.of(home.model).tokens_per_s,
            off=self.loop.idle_reason,
            notes=engine.notes or next(iter(endings.values()), ""),
            refuses=tuple(name for name, _ in refusals),
            refuses_because=tuple(reason for _, reason in refusals),
            jobs=job_ids,
            resident=resident,
            resident_tokens_per_s=tuple(model_averages.tokens_per_s for model_averages in averages),
            resident_answer_tokens=tuple(model_averages.answer_tokens for model_averages in averages),
            stolen=self.choice.thief.stolen_jobs,
            not_stolen=sum(self.choice.thief.refusals.values()),
            left=self.choice.tail.jobs_left,
            details=replace(
                engine.details,
                decode_curves=throughput.curves.curves()[-MAX_CURVES:],
                paused_because=self.loop.paused_because,
                turns=TURNS,
                steals=tuple(self._model_cache.candidates())[:MAX_STEALS],
            ),
        )


def _result_in(body: bytes) -> JobResult | None:
    """Return the stored result, or None if it can't be read."""
    try:
        return codec.decode(body, JobResult)
    except (InvalidMessage, NewerMessage):
        return None


# Two values: the stored result or None, and whether this worker has the claim.
_Standing = tuple[bytes | None, bool]


class Claims:
    """The claims of one decode worker, in the cluster state: a dead worker doesn't renew them, so they expire.

    Thread-safe.
    """

    def __init__(self, cluster_state: ClusterState, worker_id: str) -> None:
        self._cluster_state = cluster_state
        self._worker_id = worker_id
        self._looked_up: dict[Run, _Standing] = {}

    def take_up(self, key: Run) -> _Standing:
        """Return the job's result, if it has one, and whether the job is ours."""
        return self._looked_up.pop(key, None) or self.renew([key])[0]

    def renew(self, keys: Sequence[Run]) -> list[_Standing]:
        """Renew these claims in one round trip. Jobs that have their results need no claim any more."""
        return self._cluster_state.take_up(self._worker_id, keys, CLAIM_TTL_S)

    def release(self, key: Run) -> None:
        """Give up a claim, so that other workers can take the job."""
        self._cluster_state.release(*key, self._worker_id)

    @contextmanager
    def looked_up(self, deliveries: list[Delivery]) -> Iterator[None]:
        """Claim the jobs of these deliveries, which are handled within the block.

        Unused claims are released at its end.
        """
        keys = [run_of(delivery) for delivery in deliveries]
        self._looked_up |= zip(keys, self.renew(keys), strict=True)
        try:
            yield
        finally:
            for key in keys:
                if self._looked_up.pop(key, None):
                    self.release(key)
