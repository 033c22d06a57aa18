"""A worker's consumer loop: takes deliveries while there is room, keeps suspects apart, listens for broadcasts.

Both workers are such a loop and a handler. The loop knows nothing of engines, the handler nothing of queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from infra.broker.base import Broker, Delivery
from infra.broker.control import ControlListener
from infra.broker.deaths import answer_deaths
from infra.broker.envelope import came_back
from infra.broker.job_source import Flow, JobSource
from infra.broker.settle import Settler
from infra.broker.topology import WorkStage, queues
from infra.config.hours import ALWAYS, Hours
from messages.errors import BrokerUnavailable, NoQueue

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.2
_TICK_S = 0.5
_DEATHS_EVERY_S = 5.0  # between looks for deaths and for deleted queues


class Handler(Protocol):
    """What a worker does with its deliveries."""

    def wait_for_room(self, timeout_s: float) -> bool:
        """Whether one more delivery can be taken now."""

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


class ConsumerLoop:
    """Serves the queues of one stage of one model. `run` blocks until `stop`."""

    def __init__(
        self,
        broker: Broker,
        settler: Settler,
        stage: WorkStage,
        model: str,
        name: str,
        open_flow: Callable[[], Flow],  # called once the queues are there
    ) -> None:
        self._broker = broker
        self._settler = settler
        self._stage = stage
        self._model = model
        self._name = name
        self._open_flow = open_flow
        self._stopping = threading.Event()
        self._paused = threading.Event()
        self._hours = ALWAYS  # in which to take jobs

    @property
    def off(self) -> str:
        """Why it takes no jobs now, in a few words; "" if it does."""
        if self._paused.is_set():
            return "paused"
        return "" if self._hours.include(datetime.now()) else "outside its hours"

    def run(self, handler: Handler, hours: Hours = ALWAYS) -> None:
        """Take deliveries in these hours until stopped; finish what is in hand, hand back the rest, leave."""
        self._hours = hours
        for remark in self._broker.declare([self._model]):
            log.warning(remark)
        source = JobSource(self._broker, self._stage, self._model, self._open_flow(), handler.holding)
        house = threading.Thread(target=self._keep_house, args=(source, handler), name="housekeeping", daemon=True)
        house.start()
        try:
            while not self._stopping.is_set():
                self._take(source, handler)
        finally:
            self._stopping.set()
            self._hand_back(source.close())
            handler.finish()
            house.join()

    def stop(self) -> None:
        """Take nothing more. May be called from any thread, and from a signal handler."""
        self._stopping.set()

    def _take(self, source: JobSource, handler: Handler) -> None:
        if self.off:
            self._hand_back(source.pause())
            self._stopping.wait(_IDLE_WAIT_S)
            return
        if not handler.wait_for_room(0):
            source.full()
            if not handler.wait_for_room(_IDLE_WAIT_S):
                return
        try:
            deliveries = source.next(_IDLE_WAIT_S)
        except NoQueue:  # housekeeping declares it again
            self._stopping.wait(_IDLE_WAIT_S)
            return
        if self._stopping.is_set():
            return self._hand_back(deliveries)
        if deliveries and deliveries[0].queue.startswith("suspects."):
            self._hand_back(source.pause())  # nothing else is held while it runs, so nothing else can crash with it
            handler.take(deliveries)
            return handler.finish()
        # One that came back goes by itself: if it takes the worker along, its neighbours shall not count as crashed.
        if together := [delivery for delivery in deliveries if not came_back(delivery)]:
            handler.take(together)
        for delivery in deliveries:
            if came_back(delivery):
                handler.take([delivery])

    def _hand_back(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._settler.hand_back_all(deliveries, self._stage)

    def _restore_queues(self) -> None:
        """Declare what somebody deleted. The jobs in it were lost with it: their batch's owner publishes them again."""
        specs = queues([self._model], self._broker.clustered)
        names = [spec.name for spec in specs if not (self._broker.clustered and spec.is_classic)]
        if gone := [name for name in names if self._broker.depth(name) is None]:
            log.error("somebody deleted %s with all it held: declaring it again", ", ".join(gone))
            self._broker.declare([self._model])

    def _on_pause(self, worker: str) -> None:
        if self._is_me(worker):
            self._paused.set()

    def _on_resume(self, worker: str) -> None:
        if self._is_me(worker):
            self._paused.clear()

    def _is_me(self, worker: str) -> bool:
        return self._name == worker or self._name.startswith(f"{worker}.")

    def _keep_house(self, source: JobSource, handler: Handler) -> None:
        control = None
        heard = {"wakeup": source.ring, "cancel": handler.on_cancel, "pause": self._on_pause, "resume": self._on_resume}
        next_look = next_tick = time.monotonic()
        while not self._stopping.is_set():
            try:
                control = control or ControlListener(self._broker, self._name, heard)
                control.poll(_TICK_S)
                if time.monotonic() > next_look:
                    self._restore_queues()
                    answer_deaths(self._broker, self._settler, self._model)
                    next_look = time.monotonic() + _DEATHS_EVERY_S
            except (BrokerUnavailable, NoQueue):
                self._stopping.wait(0.5)  # it reconnects by itself; what was deleted is declared again at the next look
            if time.monotonic() >= next_tick:  # not at every wakeup: those come as often as jobs
                handler.tick()
                next_tick = time.monotonic() + _TICK_S
        if control:
            control.close()
