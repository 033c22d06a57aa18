"""Takes jobs of other models for a free slot, where `stealing` says that it pays."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable

from decode_worker.outlook import Outlook
from decode_worker.residency import Residency
from decode_worker.stealing import Offer, Refusal, Steal, decide
from infra.broker import Broker, Delivery
from infra.envelope import open_envelope
from infra.topology import work_queue
from messages.errors import NoQueue
from messages.jobs import LANES
from messages.lifecycle import Moment, Step

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1
_SLOWER_EACH_TIME = 1.6
# A look is two passive declares for each other model: at these intervals nothing that a broker notices.
_AT_MOST_S = 0.2  # while somebody works at one of these models
_AT_MOST_IDLE_S = 0.5


class Thief:
    """One worker's looks at other models' queues. Used from one thread; the counts may be read from any.

    `stolen` counts jobs taken, `refused` looks at waiting work that ended without one, by reason.
    """

    def __init__(
        self, broker: Broker, outlook: Outlook, residency: Residency, observe: Callable[[Moment], None]
    ) -> None:
        self._broker = broker
        self._outlook = outlook
        self._residency = residency
        self._observe = observe
        self._next_look = 0.0
        self._pause_s = 0.0
        self.stolen = 0
        self.refused: Counter[str] = Counter()

    def steal(self) -> Delivery | None:
        """A job of another model, if it is time to look and one pays. Raises BrokerUnavailable."""
        if time.monotonic() < self._next_look:
            return None
        delivery = self._look()
        if delivery:
            self._pause_s = self._next_look = 0.0
            return delivery
        most_s = _AT_MOST_S if self._outlook.is_active(self._residency.candidates()) else _AT_MOST_IDLE_S
        self._pause_s = min(most_s, max(_LOOK_AGAIN_S, self._pause_s * _SLOWER_EACH_TIME))
        self._next_look = time.monotonic() + self._pause_s * random.uniform(0.8, 1.2)  # two thieves don't look in step
        return None

    def _look(self) -> Delivery | None:
        candidates = self._residency.candidates()
        if not candidates or not self._outlook.sees():
            return None
        offers = [self._outlook.offer(model, self._residency.load_s(model)) for model in candidates]
        verdict = decide(offers)
        if isinstance(verdict, Steal) and not self._residency.get(verdict.model):
            self._load(verdict, offers)
            verdict = decide([offer for offer in offers if self._residency.get(offer.queue.model)])
        if isinstance(verdict, Steal):
            return self._take(verdict)
        self._refuse(verdict)
        return None

    def _load(self, steal: Steal, offers: list[Offer]) -> None:
        waiting_s = {offer.queue.model: offer.queue.ready * offer.service_s for offer in offers}
        if self._residency.load(steal.model, waiting_s):
            log.info("loading a model to steal from: %s", steal.why)
        else:
            self.refused["no room"] += 1

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.model:
            self.refused[refusal.reason] += 1
            log.debug("stole nothing, %s: %s", refusal.reason, refusal)

    def _take(self, steal: Steal) -> Delivery | None:
        for lane in LANES:
            try:
                delivery = self._broker.get(work_queue("decode", steal.model, lane))
            except NoQueue:
                continue
            if delivery:
                self._note(delivery, steal)
                return delivery
        self.refused["gone"] += 1  # somebody was faster
        return None

    def _note(self, delivery: Delivery, steal: Steal) -> None:
        self.stolen += 1
        envelope = open_envelope(delivery, "decode", steal.model)
        log.info("stole job %s of %s", envelope.job_id, steal.why)
        identity = {"batch_id": envelope.batch_id, "stage": "decode", "run": envelope.run, "lane": envelope.lane}
        facts = {
            "saving_s": steal.saving_s,
            "waiting_s": steal.wait_s,
            "cost_s": steal.cost_s,
            "end_here_s": steal.end_here_s,
            "end_there_s": min(steal.end_there_s, 1e9),
        }
        self._observe(Moment(Step.STOLEN, envelope.job_id, steal.model, identity | facts))
