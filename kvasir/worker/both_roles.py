"""A worker with both roles: a prefill and a decode worker of one model, with one engine, in one process.

Both work as usual: each has its loop and its registration, and passes its jobs on through broker and store. They share
the engine, the process's memory of KV caches, and the decision which kind of job to take next.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from decode_worker.stealing.policy import Peer, Queue
from decode_worker.stealing.watermark import ModelWork
from decode_worker.worker import DecodeWorker
from infra.broker.base import Broker
from infra.broker.topology import jobs_waiting
from infra.config.hours import ALL_HOURS, Hours
from kvstore.base import ClusterState
from kvstore.cluster_state import BestEffortClusterState
from kvstore.heartbeat import new_worker_id
from messages.errors import BrokerUnavailable
from messages.workers import BOTH_ROLES, WorkerInfo, prefill_id
from prefill_worker.worker import PrefillWorker

LOOK_S = 0.2  # interval between checks while jobs wait; a check costs ten passive declares and a read of the store


class TwoRoleWorker:
    """Combines two workers. `make_prefill` and `make_decode` make them, and get an id and the roles.

    Both must use the same `broker` and engine. `run` blocks until `stop`; all other methods may be called from other
    threads.
    """

    def __init__(
        self,
        make_prefill: Callable[..., PrefillWorker],
        make_decode: Callable[..., DecodeWorker],
        model: str,
        broker: Broker,
        cluster_state: ClusterState,
    ) -> None:
        self.worker_id = new_worker_id()
        self._model = model
        self._broker = broker
        self._cluster_state = BestEffortClusterState(cluster_state)
        self.prefill = make_prefill(worker_id=prefill_id(self.worker_id), roles=BOTH_ROLES)
        self.decode = make_decode(worker_id=self.worker_id, roles=BOTH_ROLES)
        self.prefill.loop.pair_with(self.decode.loop)
        self.prefill.loop.wants_bulk = lambda: (work := self._work_now()) is None or work.lacks_ready_jobs
        self.decode.loop.wants_bulk = lambda: (work := self._work_now()) is None or not work.holds_ready_jobs
        # None while it is unknown. Both roles then take any job.
        self._work: ModelWork | None = None
        # This worker's counters at the last check.
        self._prefilled_then = self._prefilling_then = self._answers_then = 0
        self._stopping = threading.Event()

    def run(self, hours: Hours = ALL_HOURS) -> None:
        """Serve until stopped. If a role or the look at the queues fails, all of them stop, and the error is raised."""
        with ThreadPoolExecutor(2, thread_name_prefix="role") as pool:
            threads = [pool.submit(self.prefill.run, hours), pool.submit(self._look_on)]
            for thread in threads:
                thread.add_done_callback(lambda _: self.stop())
            try:
                self.decode.run(hours)
            finally:
                self.stop()
        for thread in threads:
            thread.result()

    def stop(self, abort: bool = False) -> None:
        """Stop after the jobs in hand. With `abort`, hand these back too."""
        self._stopping.set()
        self.prefill.stop(abort)
        self.decode.stop(abort)

    def look(self) -> None:
        """Find out what waits where, and who could take it."""
        try:
            self._work = self._see()
        except BrokerUnavailable:  # the broker client reconnects on its own
            self._work = None

    def _see(self) -> ModelWork:
        registrations = self._cluster_state.registrations()
        forecast, ours = self.decode.choice.forecast, prefill_id(self.worker_id)
        prefill, others = self.prefill.registration(), prefillers(registrations, self._model, ours)
        can_prefill = not prefill.off and self.prefill.has_room()
        decode_rate = self.decode.choice.throughput.of(self._model).tokens_per_s * self.decode.slots.count
        own_advantage = prefill.tokens_per_s / decode_rate if decode_rate else 0.0
        best_advantage = max((advantage(other, registrations) for other in others), default=0.0)
        self._prefilled_then, self._prefilling_then = self.prefill.slots.jobs_done, prefill.busy
        prompts = jobs_waiting(self._broker, "prefill", self._model) if can_prefill else 0
        ready = jobs_waiting(self._broker, "decode", self._model)
        self._answers_then = self._answers_begun()
        return ModelWork(
            queue=Queue(self._model, ready + prompts, forecast.peers(self._model)),
            ready=ready,
            prompts=prompts,
            own=Peer(self.decode.slots.count, 0, forecast.decode_s(self._model)),
            has_pure_decoders=has_pure_decoders(registrations, self._model),
            prefilling=sum(other.busy for other in others),
            prefill_s=self.prefill.prompt_s,
            lead_elsewhere=lead(best_advantage, own_advantage),
            look_s=LOOK_S,
        )

    def _work_now(self) -> ModelWork | None:
        """Return the state at the last look, corrected by this worker's jobs since then."""
        work = self._work
        if work is None:
            return None
        prefill, decode = self.prefill.slots, self.decode.slots
        begun = max(self._prefilling_then, prefill.active_groups + prefill.jobs_done - self._prefilled_then)
        return replace(
            work,
            ready=work.ready - max(0, self._answers_begun() - self._answers_then),
            prompts=max(0, work.prompts - (begun - self._prefilling_then)),
            own=replace(work.own, busy=decode.count - decode.free),
            prefilling=work.prefilling + begun,
        )

    def _answers_begun(self) -> int:
        return self.decode.slots.active_groups + self.decode.slots.jobs_done

    def _look_on(self) -> None:
        while not self._stopping.is_set():
            self.look()
            # While nothing waits, there is nothing to decide: either role takes the first job that comes.
            self._stopping.wait(5 * LOOK_S if self._work and not self._work.queue.ready else LOOK_S)


def prefillers(registrations: Sequence[WorkerInfo], model: str, ours: str) -> list[WorkerInfo]:
    """Return all other workers that prefill this model and take jobs."""
    return [
        registration
        for registration in registrations
        if (registration.role, registration.model, registration.off) == ("prefill", model, "")
        and registration.worker_id != ours
    ]


def has_pure_decoders(registrations: Sequence[WorkerInfo], model: str) -> bool:
    """Whether any worker takes jobs and decodes this model without prefilling any."""
    that_prefill = {registration.process for registration in registrations if registration.role == "prefill"}
    return any(
        (registration.role, registration.model, registration.off) == ("decode", model, "")
        and registration.process not in that_prefill
        for registration in registrations
    )


def advantage(prefiller: WorkerInfo, registrations: Sequence[WorkerInfo]) -> float:
    """Return how many tokens it prefills in the time of decoding one; inf if it does not decode, 0 if not measured."""
    for registration in registrations:
        if registration.role == "decode" and registration.process == prefiller.process:
            rate = registration.tokens_per_s * registration.slots
            return prefiller.tokens_per_s / rate if rate else 0.0
    return math.inf


def lead(best: float, own: float) -> float:
    """Return how many times better the best other worker is. A worker that only prefills counts even if unmeasured."""
    if not own:
        return best if math.isinf(best) else 0.0
    return best / own
