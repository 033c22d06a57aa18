"""A worker's place at the broker: takes deliveries while there is room, keeps suspects apart, listens for broadcasts.

Both workers are a station and a handler. The station knows nothing of engines, the handler nothing of queues.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Protocol

from infra.broker import Broker, Delivery
from infra.control import ControlListener
from infra.deaths import answer_deaths
from infra.endings import POISON_AFTER_RETURNS, SUSPECT_AFTER_RETURNS, Endings
from infra.envelope import Envelope, open_envelope
from infra.intake import Intake
from infra.topology import WorkStage
from messages.errors import BrokerUnavailable, NoQueue, Poison

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.2
_DEATHS_EVERY_S = 5.0


class Handler(Protocol):
    """What a worker does at its station."""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether one more delivery can be taken now."""

    def is_shut(self) -> bool:
        """Whether nothing may be taken, nor held, for the moment."""

    def holding(self) -> int:
        """How many deliveries are being worked on."""

    def take(self, delivery: Delivery) -> None:
        """Work on a delivery, here or in another thread; never raises."""

    def finish(self) -> None:
        """Return when everything taken has been settled."""

    def on_cancel(self, batch_id: str) -> None:
        """The batch was cancelled."""

    def tick(self) -> None:
        """Called about twice a second."""


class Station:
    """Serves the queues of one stage of one model. `run` blocks until `stop`."""

    def __init__(
        self, broker: Broker, endings: Endings, stage: WorkStage, model: str, name: str, prefetch: int
    ) -> None:
        self._broker = broker
        self._endings = endings
        self._stage = stage
        self._model = model
        self._name = name
        self._prefetch = prefetch
        self._stopping = threading.Event()

    def run(self, handler: Handler) -> None:
        """Take deliveries until stopped; finish what is in hand, hand back the rest, leave."""
        for remark in self._broker.declare([self._model]):
            log.warning(remark)
        intake = Intake(self._broker, self._stage, self._model, self._prefetch)
        house = threading.Thread(target=self._keep_house, args=(intake, handler), name="housekeeping", daemon=True)
        house.start()
        try:
            while not self._stopping.is_set():
                self._take_one(intake, handler)
        finally:
            self._stopping.set()
            self._hand_back(intake.close())
            handler.finish()
            house.join()

    def stop(self) -> None:
        """Take nothing more. May be called from any thread, and from a signal handler."""
        self._stopping.set()

    def _take_one(self, intake: Intake, handler: Handler) -> None:
        if handler.is_shut():
            self._hand_back(intake.pause())
            self._stopping.wait(_IDLE_WAIT_S)
            return
        intake.resume()
        if not handler.wait_for_room(_IDLE_WAIT_S):
            return
        delivery = intake.next(_IDLE_WAIT_S, handler.holding())
        if delivery is None:
            return
        if self._stopping.is_set():
            return self._hand_back([delivery])
        if not intake.is_suspect(delivery):
            return handler.take(delivery)
        # Nothing else is held while a suspect runs, so nothing else can fall with it.
        self._hand_back(intake.pause())
        handler.take(delivery)
        handler.finish()

    def _hand_back(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            # If the broker is gone, it has the message and will hand it out again.
            with suppress(BrokerUnavailable):
                envelope = open_envelope(delivery, self._stage, self._model)
                self._endings.hand_back([delivery], envelope, begun=False)

    def _keep_house(self, intake: Intake, handler: Handler) -> None:
        control = None
        next_look = time.monotonic()
        while not self._stopping.is_set():
            try:
                control = control or ControlListener(self._broker, self._name, intake.bell, handler.on_cancel)
                control.poll(0.5)
                if time.monotonic() > next_look:
                    answer_deaths(self._broker, self._endings, self._model)
                    next_look = time.monotonic() + _DEATHS_EVERY_S
            except (BrokerUnavailable, NoQueue):
                self._stopping.wait(0.5)  # it reconnects by itself; what was deleted is declared again by a publisher
            handler.tick()
        if control:
            control.close()


def must_run_alone(delivery: Delivery, envelope: Envelope) -> bool:
    """Whether a job came back so often that it belongs to the suspects. Raises Poison if even that did not help."""
    if envelope.returns >= POISON_AFTER_RETURNS:
        raise Poison(f"it came back {envelope.returns} times, the last ones while run alone: it takes its worker along")
    return envelope.returns >= SUSPECT_AFTER_RETURNS and not delivery.queue.startswith("suspects.")
