"""Takes jobs of other models for a free slot, if `policy` says that it pays."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable

from decode_worker.stealing.models import ModelCache
from decode_worker.stealing.policy import Offer, Verdict, decide
from decode_worker.stealing.queue_forecast import (
    REGISTRATIONS_FOR_S,
    Outlook,
    QueueForecast,
    Tail,
    Throughput,
    look_at_home,
)
from infra.broker.base import Broker, Delivery
from infra.broker.envelope import open_envelope
from infra.broker.topology import work_queues
from kvstore.base import ClusterState
from messages.errors import NoQueue
from messages.jobs import DecodeReport
from messages.lifecycle import Event, Step

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1
_SLOWER_EACH_TIME = 1.6
# The longest pause between two checks of the other models' queues. _AT_MOST_S applies while another worker is busy with
# one of these models, and _AT_MOST_IDLE_S applies at all other times.
#
# A check sends the broker one passive declare for each of these queues. At this rate, the load is too small to notice.
_AT_MOST_S = 0.2
_AT_MOST_IDLE_S = 0.5


class Thief:
    """Checks other models' queues for one worker. Used from one thread; the counts may be read from any thread.

    `stolen_jobs` counts stolen jobs. `refusals` counts, by reason, checks that found waiting jobs but took none.
    """

    def __init__(
        self, broker: Broker, forecast: QueueForecast, model_cache: ModelCache, observe: Callable[[Event], None]
    ) -> None:
        self._broker = broker
        self._forecast = forecast
        self._model_cache = model_cache
        self._observe = observe
        self._next_look = 0.0
        self._pause_s = 0.0
        self.stolen_jobs = 0
        self.refusals: Counter[str] = Counter()

    def steal(self) -> Delivery | None:
        """Return a job of another model, if it is time to check and a steal pays. Raises BrokerUnavailable."""
        if time.monotonic() < self._next_look:
            return None
        delivery = self._look()
        if delivery:
            self._pause_s = self._next_look = 0.0
            return delivery
        most_s = _AT_MOST_S if self._forecast.is_active(self._model_cache.candidates()) else _AT_MOST_IDLE_S
        self._pause_s = min(most_s, max(_LOOK_AGAIN_S, self._pause_s * _SLOWER_EACH_TIME))
        # The random factor keeps two workers from always checking at the same time.
        self._next_look = time.monotonic() + self._pause_s * random.uniform(0.8, 1.2)
        return None

    def _look(self) -> Delivery | None:
        candidates = self._model_cache.candidates()
        if not candidates or not self._forecast.sees_everybody():
            return None
        offers = [self._forecast.offer(model, self._model_cache.load_s(model)) for model in candidates]
        verdict = decide(offers)
        if not verdict.reason and not self._model_cache.get(verdict.model):
            self._load(verdict, offers)
            verdict = decide([offer for offer in offers if self._model_cache.get(offer.queue.model)])
        if not verdict.reason:
            return self._fetch_job(verdict)
        if verdict.model:
            self.refusals[verdict.reason] += 1
            log.debug("stole nothing, %s: %s", verdict.reason, verdict)
        return None

    def _load(self, steal: Verdict, offers: list[Offer]) -> None:
        waiting_s = {offer.queue.model: offer.queue.ready * offer.decode_s for offer in offers}
        if self._model_cache.load(steal.model, waiting_s):
            log.info("loading a model to steal its jobs: %s", steal.summary)
        else:
            self.refusals["no room"] += 1

    def _fetch_job(self, steal: Verdict) -> Delivery | None:
        now, *bulk = work_queues("decode", steal.model)
        # The order is random, so that no batch always comes last.
        for queue in (now, *random.sample(bulk, len(bulk))):
            try:
                delivery = self._broker.get(queue)
            except NoQueue:
                continue
            if delivery:
                self._note(delivery, steal)
                return delivery
        self.refusals["gone"] += 1  # another worker took the job first
        return None

    def _note(self, delivery: Delivery, steal: Verdict) -> None:
        self.stolen_jobs += 1
        envelope = open_envelope(delivery, "decode", steal.model)
        log.info("stole job %s of %s", envelope.job_id, steal.summary)
        facts = {
            "saving_s": steal.saving_s,
            "waiting_s": steal.wait_s,
            "cost_s": steal.cost_s,
            "end_here_s": steal.end_here_s,
            "end_there_s": min(steal.end_there_s, 1e9),
        }
        self._observe(envelope.event(Step.STOLEN, **facts))


class QueueChoice:
    """What a decode worker chooses between queues with: its measurements, its view of others, and the two rules.

    `look` is called about twice a second, independently of jobs, and stores its result in `outlook`.
    """

    def __init__(
        self,
        broker: Broker,
        cluster_state: ClusterState,
        model_cache: ModelCache,
        worker_id: str,
        observe: Callable[[Event], None],
    ) -> None:
        self.model_cache = model_cache
        self.throughput = Throughput()
        self.forecast = QueueForecast(broker, cluster_state, self.throughput, worker_id)
        self.thief = Thief(broker, self.forecast, model_cache, observe)
        self.tail = Tail(self.forecast, self.throughput, model_cache.home.model)
        self.look()

    def look(self) -> None:
        """Update the outlook of the worker's own queue. May be called from any thread."""
        self.outlook = look_at_home(self.forecast, self.throughput, self.model_cache.home.model)

    def outlook_for_long(self) -> Outlook:
        """Return the outlook.

        For long jobs, where a check costs relatively little, it is at most as old as registrations.
        """
        if not self.outlook.are_short and time.monotonic() - self.outlook.at > REGISTRATIONS_FOR_S:
            self.look()
        return self.outlook

    def note(self, model: str, report: DecodeReport, sequences: int = 1) -> None:
        """Note a decoded job, one of `sequences` that ran at once.

        After the first, it is known whether jobs are short.
        """
        self.throughput.note(model, report, sequences)
        if not self.outlook.is_measured:
            self.look()
