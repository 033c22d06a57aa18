"""What a worker's card says, as metrics: slots, who it is, whether its model is resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from messages.cards import WorkerCard

_LABELS = ("model", "stage")


class CardCollector(Collector):
    """Asks for the card at every scrape, so that the figures are never older than that.

    Args:
        card: the worker's card, or None while it is still loading.
    """

    def __init__(self, card: Callable[[], WorkerCard | None]) -> None:
        self._card = card

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The figures; none before the model is loaded."""
        card = self._card()
        if card is None:
            return
        info = GaugeMetricFamily(
            "kvasir_worker_info", "1 for each worker.", labels=(*_LABELS, "engine", "device", "host")
        )
        info.add_metric((card.model, card.role, card.engine, card.device, card.host), 1)
        yield info
        yield _gauge("kvasir_slots", "Jobs it works on at once, at most.", card, card.slots)
        yield _gauge("kvasir_slots_busy", "Jobs it works on now.", card, card.busy)
        yield _gauge("kvasir_hands_over", "1 if the hand-over was proved at start.", card, card.hands_over)
        yield _resident(card)
        yield _gauge("kvasir_tokens_per_second", "Of its stage, moving average.", card, card.tokens_per_s)


def _resident(card: WorkerCard) -> GaugeMetricFamily:
    """Its own model, and those that it has loaded to steal from."""
    gauge = GaugeMetricFamily("kvasir_model_resident", "1 while the model is loaded.", labels=_LABELS)
    for model in dict.fromkeys((card.model, *card.resident)):
        gauge.add_metric((model, card.role), 1)
    return gauge


def _gauge(name: str, description: str, card: WorkerCard, value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, description, labels=_LABELS)
    gauge.add_metric((card.model, card.role), float(value))
    return gauge
