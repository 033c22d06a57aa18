"""What a worker's registration says, as metrics: slots, who it is, whether its model is resident."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from messages.workers import WorkerInfo

_LABELS = ("model", "stage")


class RegistrationCollector(Collector):
    """Asks for the registration at every scrape, so that the figures are never older than that.

    Args:
        registration: the worker's registration, or None while it is still loading.
    """

    def __init__(self, registration: Callable[[], WorkerInfo | None]) -> None:
        self._registration = registration

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The figures; none before the model is loaded."""
        registration = self._registration()
        if registration is None:
            return
        info = GaugeMetricFamily(
            "kvasir_worker_info", "1 for each worker.", labels=(*_LABELS, "engine", "device", "host")
        )
        info.add_metric(
            (registration.model, registration.role, registration.engine, registration.device, registration.host), 1
        )
        yield info
        yield _gauge("kvasir_slots", "Jobs it works on at once, at most.", registration, registration.slots)
        yield _gauge("kvasir_slots_busy", "Jobs it works on now.", registration, registration.busy)
        yield _gauge(
            "kvasir_transfers_kv", "1 if the KV transfer was proved at start.", registration, registration.transfers_kv
        )
        # Its own model, and those that it has loaded to steal from.
        resident_models = dict.fromkeys((registration.model, *registration.resident))
        yield _gauge("kvasir_model_resident", "1 while the model is loaded.", registration, 1, resident_models)
        yield _gauge(
            "kvasir_tokens_per_second", "Of its stage, moving average.", registration, registration.tokens_per_s
        )


def _gauge(
    name: str, description: str, registration: WorkerInfo, value: float, models: Iterable[str] = ()
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, description, labels=_LABELS)
    for model in models or (registration.model,):
        gauge.add_metric((model, registration.role), float(value))
    return gauge
