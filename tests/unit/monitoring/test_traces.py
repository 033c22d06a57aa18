"""A job's trace, as a server of OTLP over HTTP gets it: the request is decoded with opentelemetry-proto's own classes.

OTLP 1.x: POST /v1/traces, application/x-protobuf, an ExportTraceServiceRequest
(opentelemetry.io/docs/specs/otlp, "OTLP/HTTP"). Without the variable nothing of OpenTelemetry is imported.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from infra.broker.trace import new_traceparent
from messages.lifecycle import Event, Step
from monitoring.events import fan_out
from monitoring.traces import SpanMaker, trace_observers
from tests.support.pipeline import MODEL, OWN_TEXT, SHARED_TEXT, Pipeline

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Collector:
    """Takes traces over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                assert handler.path == "/v1/traces"
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                if handler.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                self.bodies.append(body)
                handler.send_response(200)
                handler.end_headers()

            def log_message(handler, format: str, *args: Any) -> None:  # noqa: N805
                """Nobody reads it."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    monkeypatch.setenv(VARIABLE, collector.url)
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


def test_a_job_s_way_is_one_trace(collector: Collector) -> None:
    (maker,) = trace_observers()
    assert isinstance(maker, SpanMaker)
    with Pipeline() as pipeline:
        pipeline.observe = fan_out(pipeline.observe, maker)  # type: ignore[method-assign]
        pipeline.client.observe = pipeline.observe
        job = pipeline.job()
        pipeline.start()
        result = pipeline.run(job)
    maker.provider.shutdown()

    _, trace_id, root_id, _ = new_traceparent(job.job_id, 1).split("-")
    spans = {span.name.removesuffix(f" {MODEL}"): span for span in collector.spans()}
    assert set(spans) == {"submit", "prefill", "KV put", "KV get", "chat", "reply"}
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert spans["submit"].span_id.hex() == root_id
    assert spans["submit"].parent_span_id == b""
    assert {span.parent_span_id.hex() for name, span in spans.items() if name != "submit"} == {root_id}
    chat = {each.key: each.value for each in spans["chat"].attributes}
    assert chat["gen_ai.operation.name"].string_value == "chat"
    assert chat["gen_ai.request.model"].string_value == MODEL
    assert chat["gen_ai.usage.input_tokens"].int_value > 0
    assert chat["gen_ai.usage.output_tokens"].int_value > 0
    assert spans["KV get"].end_time_unix_nano <= spans["chat"].start_time_unix_nano
    assert spans["prefill"].start_time_unix_nano <= spans["KV put"].start_time_unix_nano
    # No prompt leaves, no answer, no item
    sent = b"".join(collector.bodies)
    assert job.job_id.encode() in sent
    for text in (OWN_TEXT[:10], SHARED_TEXT[:10], result.text[:10], job.item_id):
        assert text
        assert text.encode() not in sent


def test_what_came_back_and_what_was_stolen_is_a_link_of_the_next_span(collector: Collector) -> None:
    (maker,) = trace_observers()
    assert isinstance(maker, SpanMaker)
    facts = {"traceparent": new_traceparent("j", 1), "run": 1, "decode_s": 2.0, "get_s": 0.5}
    for step in (Step.REDELIVERED, Step.STOLEN, Step.ANSWERED):
        maker(Event(step, "j", MODEL, facts))
    maker(Event(Step.ANSWERED, "k", MODEL, {"run": 1}))  # of an older message, without a trace
    maker.provider.shutdown()
    get, chat = collector.spans()
    steps = [link.attributes[0].value.string_value for link in chat.links]
    assert steps == ["redelivered", "stolen"]
    assert chat.end_time_unix_nano - chat.start_time_unix_nano == pytest.approx(2e9, rel=0.01)
    assert get.end_time_unix_nano == pytest.approx(chat.start_time_unix_nano, abs=1e6)


def test_without_an_endpoint_nothing_is_imported() -> None:
    program = (
        "import sys, monitoring.traces as t; assert t.trace_observers() == []; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
