"""What a decode worker knows of the others: their cards and the depth of their queues, as figures for `stealing`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from decode_worker.pace import Pace
from decode_worker.stealing import FASTER, Offer, Peer, Queue, expected_service_s
from infra.broker import Broker
from infra.topology import work_queue
from kvstore.base import Board
from messages.cards import WorkerCard
from messages.jobs import LANES

_CARDS_FOR_S = 0.5  # cards are renewed once a second; reading them more often tells little more


class Outlook:
    """One worker's view. Reads cards at most twice a second, and queues when asked to. Thread-safe."""

    def __init__(self, broker: Broker, board: Board, pace: Pace, worker_id: str) -> None:
        self._broker = broker
        self._board = board
        self._pace = pace
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._cards: list[WorkerCard] = []
        self._sees = False
        self._active: set[str] = set()  # models that somebody works at, at either stage
        self._waited: set[str] = set()  # models of which jobs waited at the last look
        self._read_at = -_CARDS_FOR_S

    def others(self) -> list[WorkerCard]:
        """The cards of all other decode workers."""
        with self._lock:
            if time.monotonic() - self._read_at > _CARDS_FOR_S:
                cards = self._board.cards()
                self._active = {card.model for card in cards if card.busy and card.worker_id != self._worker_id}
                self._sees = any(card.worker_id == self._worker_id for card in cards)
                self._cards = [card for card in cards if card.role == "decode" and card.worker_id != self._worker_id]
                self._read_at = time.monotonic()
            return self._cards

    def sees(self) -> bool:
        """Whether the cards can be trusted to be all there: ours is among them. Not so while the store is away."""
        self.others()
        with self._lock:
            return self._sees

    def is_active(self, models: Iterable[str]) -> bool:
        """Whether anybody else works at one of these models, so that jobs may come to wait."""
        self.others()
        with self._lock:
            return not self._active.isdisjoint(models)

    def at_home(self, model: str) -> list[WorkerCard]:
        """Those of them whose queue is this model's."""
        return [card for card in self.others() if card.model == model]

    def queue(self, model: str, in_hand: int = 0) -> Queue:
        """The decode queue of a model, both lanes, as the broker counts it now; plus jobs `in_hand` that could go back.

        Raises BrokerUnavailable.
        """
        return Queue(model, self._ready(model) + in_hand, self._peers(model))

    def waiting_queue(self, model: str) -> Queue:
        """The same for somebody who might help there. Raises BrokerUnavailable.

        Where jobs wait at two calls in a row nobody is free, whatever the cards say: they may be a second old, and a
        free worker takes a job within milliseconds.
        """
        queue = self.queue(model)
        if queue.ready and model in self._waited:
            queue = replace(queue, peers=tuple(replace(peer, busy=peer.slots) for peer in queue.peers))
        (self._waited.add if queue.ready else self._waited.discard)(model)
        return queue

    def has_faster(self, model: str, service_s: float) -> bool:
        """Whether a worker at home there might be left something, by the cards alone."""
        return any(peer.service_s * FASTER <= service_s for peer in self._peers(model))

    def offer(self, model: str, load_s: float) -> Offer:
        """That queue, and what one of its jobs would cost here. Raises BrokerUnavailable."""
        queue = self.waiting_queue(model)
        return Offer(queue, self.service_s(model), self._pace.fetch_s(model), load_s)

    def service_s(self, model: str) -> float:
        """Mean time of a job of this model in one of this worker's slots, its KV cache there.

        Not measured here yet: this worker is taken to be as fast as those at home there, else as with any model.
        """
        rate = self._pace.of(model).tokens_per_s or self._rate_at_home(model)
        return expected_service_s(self._answer_tokens(model), rate)

    def _answer_tokens(self, model: str) -> float:
        """Mean length of an answer, over all workers that have measured it, this one included; 0: nobody has."""
        found = [card.measured(model)[1] for card in self.others()] + [self._pace.of(model).answer_tokens]
        return _mean(found)

    def _rate_at_home(self, model: str) -> float:
        return _mean(card.measured(model)[0] for card in self.at_home(model))

    def _peers(self, model: str) -> tuple[Peer, ...]:
        """Those at home there. Their KV caches are taken to need as long as ours."""
        tokens, fetch_s = self._answer_tokens(model), self._pace.fetch_s(model)
        found = []
        for card in self.at_home(model):
            rate = card.measured(model)[0] or card.tokens_per_s
            found.append(Peer(card.slots, card.busy, expected_service_s(tokens, rate, fetch_s)))
        return tuple(found)

    def _ready(self, model: str) -> int:
        depths = [self._broker.depth(work_queue("decode", model, lane)) for lane in LANES]
        return sum(depth.ready for depth in depths if depth)


def _mean(values: Iterable[float]) -> float:
    known: Sequence[float] = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0
