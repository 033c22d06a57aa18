"""A job's steps as OpenTelemetry spans, if OTEL_EXPORTER_OTLP_ENDPOINT is set. Otherwise OpenTelemetry isn't imported.

The trace is that of the job's `traceparent`, whose parent id is the span of the submission. Each later step is a child
of that span, with the duration from its event. Names and attributes follow the conventions for generative AI
(opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans: "{gen_ai.operation.name} {gen_ai.request.model}").
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from messages.lifecycle import Event, Step

log = logging.getLogger(__name__)

# The spans that each event makes, in order, as (name of the span, name of the fact that gives the span's duration).
# The last span ends at the time of the event.
_SPANS = {
    Step.SUBMITTED: (("submit", ""),),
    Step.KV_STORED: (("prefill", "prefill_s"), ("KV put", "put_s")),
    Step.ANSWERED: (("KV get", "get_s"), ("chat", "decode_s")),
    Step.REPLIED: (("reply", ""),),
    Step.FAILED: (("reply", ""),),
}
_LINKED = (Step.REDELIVERED, Step.STOLEN)
_MOST_LINKED = 10_000  # maximum number of jobs that came back or were stolen and still wait for their next span


def trace_observers() -> list[Callable[[Event], None]]:
    """Return the observers that make spans of events, if they are wanted."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return []
    try:
        return [SpanMaker()]
    except ImportError as error:
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces can't be made: %s; install kvasir[otel]", error)
        return []


class SpanMaker:
    """An observer that makes spans. Raises ImportError if OpenTelemetry's SDK or its HTTP exporter is not installed."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import RandomIdGenerator, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The span "submit" gets the ids that the job's messages carry. The job's other spans are children of "submit".
        ids, random_ids = RandomIdGenerator(), RandomIdGenerator()
        ids.generate_trace_id = lambda: self._root.trace_id
        ids.generate_span_id = lambda: self._root.span_id if self._root else random_ids.generate_span_id()
        self.provider = TracerProvider(resource=Resource.create({"service.name": "kvasir"}), id_generator=ids)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self.provider.get_tracer("kvasir")
        self._trace = trace
        self._root: Any = None  # the ids of the span "submit" while that span is made; otherwise None
        self._links: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Make the spans of an event. An event without a trace has none."""
        _, trace_id, parent_id, *_ = (str(event.facts.get("traceparent", "")) + "---").split("-")
        if not trace_id:
            return
        parent = self._trace.SpanContext(
            int(trace_id, 16),
            int(parent_id, 16),
            is_remote=True,
            trace_flags=self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED),
        )
        with self._lock:
            if event.step in _LINKED and len(self._links) < _MOST_LINKED:
                link = self._trace.Link(parent, {"kvasir.step": event.step.value})
                self._links.setdefault(event.job_id, []).append(link)
            elif event.step in _SPANS:
                self._make(event, parent, self._links.pop(event.job_id, []))

    def _make(self, event: Event, parent: Any, links: list[Any]) -> None:
        durations = [float(event.facts.get(fact, 0.0)) for _, fact in _SPANS[event.step]]
        ends = list(accumulate(durations, initial=time.time() - sum(durations)))
        self._root = parent if event.step is Step.SUBMITTED else None
        above = self._trace.INVALID_SPAN if self._root else self._trace.NonRecordingSpan(parent)
        context = self._trace.set_span_in_context(above)
        for (name, _), start, end in zip(_SPANS[event.step], ends, ends[1:], strict=False):
            span = self._tracer.start_span(
                f"{name} {event.model}", context, attributes=_attributes(name, event), links=links,
                start_time=int(start * 1e9),
            )  # fmt: skip
            span.end(int(end * 1e9))


def _attributes(name: str, event: Event) -> dict[str, Any]:
    """Return only ids, counts and known words: no prompt, no answer, no name."""
    attributes = {
        "gen_ai.operation.name": name,
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": event.model,
        "gen_ai.usage.input_tokens": event.facts.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": event.facts.get("completion_tokens"),
        "error.type": event.facts.get("error"),
        "kvasir.job": event.job_id,
        "kvasir.batch": event.facts.get("batch_id"),
        "kvasir.run": event.facts.get("run"),
    }
    return {name: value for name, value in attributes.items() if value is not None}
