"""While no prefill worker serves a model, its decode workers take the prompts as they are and do them themselves.

Slower, but a night with one dead machine still ends with results. Jobs are passed on a few at a time, so that a
prefill worker that comes back finds the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from infra import topology
from infra.broker import Broker, Delivery
from infra.endings import Endings
from infra.envelope import open_envelope, read_job
from kvstore.base import Board
from messages.errors import BrokerUnavailable, KvasirError, NoQueue
from messages.jobs import LANES, DecodeJob, PrefillJob
from messages.lifecycle import Moment, Step

log = logging.getLogger(__name__)

# A prefill worker that is started again, or deployed anew, is back by then.
PATIENCE_S = 10.0
WHY = "no prefill worker serves this model"


class Fallback:
    """Call `look` about twice a second, from one thread."""

    def __init__(
        self,
        broker: Broker,
        board: Board,
        endings: Endings,
        observe: Callable[[Moment], None],
        worker_id: str,
        model: str,
        slots: int,
    ) -> None:
        self._broker = broker
        self._board = board
        self._endings = endings
        self._observe = observe
        self._worker_id = worker_id
        self._model = model
        self._slots = slots
        self._alone_since = 0.0  # 0: not alone
        self._queues = [topology.work_queue("prefill", model, lane) for lane in LANES]
        self._queues.append(topology.suspects_queue("prefill", model))

    def look(self) -> None:
        """Pass on what waits for prefill, if nobody will do it. Never raises."""
        if not self._is_needed():
            return
        try:
            room = self._slots - self._waiting()
            while room > 0 and (delivery := self._take()):
                self._pass_on(delivery)
                room -= 1
        except (BrokerUnavailable, NoQueue) as error:  # it reconnects, and declares, by itself
            log.info("could not look for jobs without a prefill worker: %s", error)

    def _is_needed(self) -> bool:
        cards = self._board.cards()
        # Without our own card the board is away, and says nothing about anybody.
        if not any(card.worker_id == self._worker_id for card in cards):
            return False
        if any(card.role == "prefill" and card.model == self._model for card in cards):
            self._alone_since = 0.0
            return False
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since >= PATIENCE_S

    def _waiting(self) -> int:
        depths = [self._broker.depth(topology.work_queue("decode", self._model, lane)) for lane in LANES]
        return sum(depth.ready for depth in depths if depth)

    def _take(self) -> Delivery | None:
        return next((delivery for queue in self._queues if (delivery := self._broker.get(queue))), None)

    def _pass_on(self, delivery: Delivery) -> None:
        envelope = open_envelope(delivery, "prefill", self._model)
        held = [delivery]
        self._endings.received(delivery, envelope)
        try:
            job = read_job(delivery, PrefillJob)
        except KvasirError as error:
            return self._endings.error(held, envelope, error)
        identity = {"batch_id": job.batch_id, "stage": "prefill", "run": job.run, "lane": job.lane}
        self._observe(Moment(Step.PREFILL_STARTED, job.job_id, job.model, identity))
        log.info("job %s: passed on without prefill: %s", job.job_id, WHY)
        return self._endings.pass_on(held, envelope, DecodeJob(job, None, why_no_kv=WHY))
