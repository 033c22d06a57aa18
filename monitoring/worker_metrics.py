"""A worker's registration as metrics: its slots, its identity, and whether its model is in memory."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from messages.workers import WorkerInfo

_LABELS = ("model", "stage")


class RegistrationCollector(Collector):
    """Reads the registrations at every scrape, so that the metrics are always current.

    Args:
        registrations: returns the worker's registrations, one for each of its roles; none while it is loading.
    """

    def __init__(self, registrations: Callable[[], Sequence[WorkerInfo]]) -> None:
        self._registrations = registrations

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics; none before the model is loaded."""
        workers = self._registrations()
        if not workers:
            return
        info = GaugeMetricFamily(
            "kvasir_worker_info", "1 for each worker.", labels=(*_LABELS, "engine", "device", "host")
        )
        for worker in workers:
            info.add_metric((worker.model, worker.role, worker.engine, worker.device, worker.host), 1)
        yield info
        figures: list[tuple[str, str, Callable[[WorkerInfo], float]]] = [
            ("kvasir_slots", "Jobs it works on at once, at most.", lambda worker: worker.slots),
            ("kvasir_slots_busy", "Jobs it works on now.", lambda worker: worker.busy),
            ("kvasir_transfers_kv", "1 if the KV transfer was proved at start.", lambda worker: worker.transfers_kv),
            # One sample for the worker's own model, and one for each model that it has loaded to steal jobs.
            ("kvasir_model_resident", "1 while the model is loaded.", lambda _worker: 1),
            ("kvasir_paused", "1 while it has paused itself.", lambda worker: bool(worker.details.paused_because)),
            (
                "kvasir_tokens_per_second",
                "Of its stage, moving average.",
                lambda worker: worker.tokens_per_s,
            ),
        ]
        for name, description, figure in figures:
            gauge = GaugeMetricFamily(name, description, labels=_LABELS)
            for worker in workers:
                resident_models = worker.resident if name == "kvasir_model_resident" else ()
                for model in dict.fromkeys((worker.model, *resident_models)):
                    gauge.add_metric((model, worker.role), float(figure(worker)))
            yield gauge
