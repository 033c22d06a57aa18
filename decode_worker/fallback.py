"""While no prefill worker serves a model, its decode workers take the prompts and compute them themselves.

This is slower, but a night with a dead machine still ends with results. Jobs are passed on a few at a time, so that a
prefill worker that comes back finds the rest.
"""

import logging
import time

from infra.broker import topology
from infra.broker.base import Broker, Delivery
from infra.broker.envelope import Attempt
from infra.broker.settle import Settler, passing_on
from infra.turns import Turns
from kvstore.base import ClusterState
from messages import codec
from messages.errors import BrokerUnavailable, NoQueue
from messages.jobs import DecodeJob, PrefillJob
from messages.lifecycle import Step
from messages.workers import ENGINE_AWAY, SELF_PAUSED

log = logging.getLogger(__name__)

# A prefill worker that is restarted or redeployed is back within this time.
ALONE_FOR_SURE_S = 10.0
REASON = "no prefill worker serves this model"


class Fallback:
    """Takes over prefill jobs while no prefill worker is there. Call `look` about twice a second, from one thread."""

    def __init__(
        self,
        broker: Broker,
        cluster_state: ClusterState,
        settler: Settler,
        worker_id: str,
        model: str,
        slots: int,
    ) -> None:
        self._broker = broker
        self._cluster_state = cluster_state
        self._settler = settler
        self._worker_id = worker_id
        self._model = model
        self._slots = slots
        self._alone_since = 0.0  # monotonic time when the last prefill worker left; 0 while a prefill worker is present
        self._others = topology.work_queue("prefill", model, "now"), topology.suspects_queue("prefill", model)
        self._turns = Turns(broker, "prefill", model)

    def look(self) -> None:
        """Pass on jobs that wait for prefill, if no prefill worker will take them. Never raises."""
        if not self._is_needed():
            return
        try:
            capacity = self._slots - topology.jobs_waiting(self._broker, "decode", self._model)
            while capacity > 0 and (delivery := self._pull_job()):
                self._pass_on(delivery)
                capacity -= 1
        # The broker client reconnects on its own, and declares the missing queues again.
        except (BrokerUnavailable, NoQueue) as error:
            log.info("could not look for jobs that no prefill worker takes: %s", error)

    def _is_needed(self) -> bool:
        registrations = self._cluster_state.registrations()
        # If this worker's own registration is missing, the store could not be read, so nothing is known about other
        # workers.
        if not any(registration.worker_id == self._worker_id for registration in registrations):
            return False
        if any(
            (registration.role, registration.model) == ("prefill", self._model)
            and registration.off not in (ENGINE_AWAY, SELF_PAUSED)
            for registration in registrations
        ):
            self._alone_since = 0.0
            return False
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since >= ALONE_FOR_SURE_S

    def _pull_job(self) -> Delivery | None:
        now, suspects = self._others
        return self._broker.get(now) or self._turns.pull() or self._broker.get(suspects)

    def _pass_on(self, delivery: Delivery) -> None:
        attempt = self._settler.begin(Attempt[PrefillJob], delivery)
        with self._settler.settling_errors(attempt):
            job = codec.decode(delivery.message.body, PrefillJob)
            self._settler.observe(attempt.envelope.event(Step.PREFILL_STARTED))
            log.info("job %s: passed on without prefill: %s", job.job_id, REASON)
            self._settler.settle(passing_on(attempt, DecodeJob(job, None, why_no_kv=REASON)))
