"""A worker's place at the broker: takes deliveries while there is room, keeps suspects apart, listens for broadcasts.

Both workers are a station and a handler. The station knows nothing of engines, the handler nothing of queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from infra.broker import Broker, Delivery
from infra.control import ControlListener
from infra.deaths import answer_deaths
from infra.endings import POISON_AFTER_FALLS, SUSPECT_AFTER_FALLS, Endings
from infra.envelope import came_back
from infra.hours import Hours
from infra.intake import Intake
from infra.topology import WorkStage, queues
from messages.errors import BrokerUnavailable, NoQueue, Poison

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.2
_DEATHS_EVERY_S = 5.0  # is how often to look for them, and for queues of ours that are gone


class Handler(Protocol):
    """What a worker does at its station."""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether one more delivery can be taken now."""

    def is_shut(self) -> bool:
        """Whether nothing may be taken, nor held, for the moment."""

    def holding(self) -> int:
        """How many deliveries are being worked on."""

    def take(self, deliveries: list[Delivery]) -> None:
        """Work on deliveries of one model, one after the other, here or in another thread; never raises."""

    def finish(self) -> None:
        """Return when everything taken has been settled."""

    def on_cancel(self, batch_id: str) -> None:
        """The batch was cancelled."""

    def tick(self) -> None:
        """Called about twice a second."""


# An intake for a station; what it is given hands back deliveries that it holds and nobody has begun.
MakeIntake = Callable[[Callable[[list[Delivery]], None]], Intake]


class Station:
    """Serves the queues of one stage of one model. `run` blocks until `stop`."""

    def __init__(
        self,
        broker: Broker,
        endings: Endings,
        stage: WorkStage,
        model: str,
        name: str,
        prefetch: int,
        make_intake: MakeIntake | None = None,
    ) -> None:
        self._broker = broker
        self._endings = endings
        self._stage = stage
        self._model = model
        self._name = name
        self._make_intake = make_intake or (lambda _hand_back: Intake(broker, stage, model, prefetch))
        self._stopping = threading.Event()
        self._paused = threading.Event()
        self.hours = Hours()  # in which to take jobs

    @property
    def off(self) -> str:
        """Why it takes no jobs now, in a few words; "" if it does."""
        if self._paused.is_set():
            return "paused"
        return "" if self.hours.include(datetime.now()) else "outside its hours"

    def run(self, handler: Handler) -> None:
        """Take deliveries until stopped; finish what is in hand, hand back the rest, leave."""
        for remark in self._broker.declare([self._model]):
            log.warning(remark)
        intake = self._make_intake(self._hand_back)
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
        if self.off or handler.is_shut():
            self._hand_back(intake.pause())
            self._stopping.wait(_IDLE_WAIT_S)
            return
        intake.resume()
        if not handler.wait_for_room(0):
            intake.full()
            if not handler.wait_for_room(_IDLE_WAIT_S):
                return
        delivery = self._next(intake, handler)
        if delivery is None:
            return
        if self._stopping.is_set():
            return self._hand_back([delivery])
        if not intake.is_suspect(delivery):
            return _give(handler, [delivery, *intake.along(delivery)])
        # Nothing else is held while a suspect runs, so nothing else can fall with it.
        self._hand_back(intake.pause())
        handler.take([delivery])
        handler.finish()

    def _next(self, intake: Intake, handler: Handler) -> Delivery | None:
        try:
            return intake.next(_IDLE_WAIT_S, handler.holding())
        except NoQueue:  # housekeeping declares it again
            self._stopping.wait(_IDLE_WAIT_S)
            return None

    def _restore_queues(self) -> None:
        """Declare what somebody deleted. The jobs in it were lost with it: their batch's owner publishes them again."""
        names = [spec.name for spec in queues([self._model])]
        if gone := [name for name in names if self._broker.depth(name) is None]:
            log.error("somebody deleted %s with all it held: declaring it again", ", ".join(gone))
            self._broker.declare([self._model])

    def _hand_back(self, deliveries: list[Delivery]) -> None:
        self._endings.hand_back_all(deliveries, self._stage)

    def _on_pause(self, worker: str) -> None:
        if self._is_me(worker):
            self._paused.set()

    def _on_resume(self, worker: str) -> None:
        if self._is_me(worker):
            self._paused.clear()

    def _is_me(self, worker: str) -> bool:
        return self._name == worker or self._name.startswith(f"{worker}.")

    def _keep_house(self, intake: Intake, handler: Handler) -> None:
        control = None
        heard = {"bell": intake.bell, "cancel": handler.on_cancel, "pause": self._on_pause, "resume": self._on_resume}
        next_look = time.monotonic()
        while not self._stopping.is_set():
            try:
                control = control or ControlListener(self._broker, self._name, heard)
                control.poll(0.5)
                if time.monotonic() > next_look:
                    self._restore_queues()
                    answer_deaths(self._broker, self._endings, self._model)
                    next_look = time.monotonic() + _DEATHS_EVERY_S
            except (BrokerUnavailable, NoQueue):
                self._stopping.wait(0.5)  # it reconnects by itself; what was deleted is declared again at the next look
            handler.tick()
        if control:
            control.close()


def _give(handler: Handler, deliveries: list[Delivery]) -> None:
    """One that came back goes by itself: if it takes the worker along, its neighbours shall not count as fallen."""
    if together := [delivery for delivery in deliveries if not came_back(delivery)]:
        handler.take(together)
    for delivery in deliveries:
        if came_back(delivery):
            handler.take([delivery])


def must_run_alone(delivery: Delivery, fallen: int) -> bool:
    """Whether a job that so many workers fell with belongs to the suspects. Raises Poison if they are too many."""
    if fallen >= POISON_AFTER_FALLS:
        raise Poison(f"it came back {fallen} times, the last ones while run alone: it takes its worker along")
    return fallen >= SUSPECT_AFTER_FALLS and not delivery.queue.startswith("suspects.")
