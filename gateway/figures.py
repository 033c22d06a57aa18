"""What the gateway counts, for /metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from gateway.keys import Key
from messages.jobs import JobResult
from monitoring.metrics import SECONDS
from producers.batch.openai_body import cached_tokens


class GatewayMetrics:
    """The metrics of one gateway.

    `model` labels are limited to configured models, so the number of series is bounded.
    """

    def __init__(self, models: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvasir_gateway_requests", "Requests answered, by HTTP status", ["status"], registry=self.registry
        )
        self.open = Gauge("kvasir_gateway_open_requests", "Requests under way", registry=self.registry)
        self.first_text = Histogram(
            "kvasir_gateway_first_text_seconds",
            "From a request to the first text of its stream",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvasir_gateway_answer_seconds",
            "From a request to its result",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.jobs = Counter("kvasir_gateway_jobs", "Jobs by how they ended", ["model", "state"], registry=self.registry)
        self.tokens = Counter(
            "kvasir_gateway_tokens", "Tokens of answered jobs", ["model", "kind"], registry=self.registry
        )
        # Every series starts at 0, because Prometheus can't compute a rate from the first value of a series.
        self.requests.labels("200")
        for model in models:
            self.first_text.labels(model)
            self.seconds.labels(model)
            self.jobs.labels(model, "succeeded")
            for kind in ("prompt", "cached", "completion"):
                self.tokens.labels(model, kind)

    def as_text(self, key: Key | None) -> bytes:
        """Return the text of `/metrics`, limited to the models that this key may use."""
        return generate_latest(_Visible(self.registry, key) if key else self.registry)

    def count_result(self, result: JobResult, seconds: float) -> None:
        """Count a result."""
        self.jobs.labels(result.model, result.state).inc()
        self.seconds.labels(result.model).observe(seconds)
        for kind, tokens in (
            ("prompt", result.decode.prompt_tokens),
            ("cached", cached_tokens(result)),
            ("completion", result.decode.completion_tokens),
        ):
            self.tokens.labels(result.model, kind).inc(tokens)


class _Visible(Collector):
    """The metrics that this key may see."""

    def __init__(self, registry: CollectorRegistry, key: Key) -> None:
        self._registry = registry
        self._key = key

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        for metric in self._registry.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if "model" not in sample.labels or self._key.may_use(sample.labels["model"])
            ]
            yield metric
