"""How `bulk` jobs come to a prefill worker. See `infra.worker_loop.Flow`."""

from collections.abc import Callable

from infra.broker.base import Broker, Consumer, Delivery
from infra.turns import Turns


class PrefillFlow:
    """The flow of a worker that takes one prompt at a time. One job is pushed, and no other is held.

    `next` is called when the worker has finished its last job.
    """

    def __init__(self, broker: Broker, consume: Callable[[str, int], Consumer], model: str) -> None:
        self._turns = Turns(broker, "prefill", model)
        self._consumer = consume(self._turns.first, 1)
        self._is_paused = False
        self.close = self._consumer.close
        self.nudge = self._consumer.nudge

    def next(self, timeout_s: float) -> Delivery | None:
        """See `Flow`."""
        if self._is_paused:
            self._consumer.resume()
            self._is_paused = False
        return self._turns.take(lambda: self._consumer.receive(0)) or self._consumer.receive(timeout_s)

    def throttle(self, _urgent: Callable[[], Delivery | None]) -> None:
        """See `Flow`. The loop's own thread computes the prompt, so its slot is free whenever the loop checks."""

    def pause(self) -> list[Delivery]:
        """See `Flow`."""
        self._is_paused = True
        return self._consumer.pause()


class SlotFlow:
    """The flow of a worker whose engine takes several prompts at once.

    A job is pulled when a slot is free. A pushed job would wait here while another worker is idle. A worker listens
    only if it finds no job.
    """

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        self._broker = broker
        self._turns = Turns(broker, "prefill", model)
        self._hand_back = hand_back
        self._listening: Consumer | None = None

    def next(self, timeout_s: float) -> Delivery | None:
        """See `Flow`."""
        listening = self._listening
        if listening is None:
            if delivery := self._turns.pull():
                return delivery
            listening = self._listening = self._broker.consume(self._turns.first, 1)
        delivery = self._turns.take(lambda: listening.receive(0)) or listening.receive(timeout_s)
        if delivery:
            self._hand_back(self.pause())
        return delivery

    def throttle(self, _urgent: Callable[[], Delivery | None]) -> None:
        """See `Flow`. No job is held that another worker might take."""
        self._hand_back(self.pause())

    def pause(self) -> list[Delivery]:
        """See `Flow`."""
        listening, self._listening = self._listening, None
        return listening.close() if listening else []

    close = pause

    def nudge(self) -> None:
        """See `Flow`."""
        if listening := self._listening:
            listening.nudge()
