"""A request's spans say where its time went, belong to its caller's trace, and are made for sampled requests alone."""

import gzip
import random
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tenuto.deployments.entry.service.traces import Traces

CALLER = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = {"batching": (1000.0, 1004.0), "gpulet_queue": (1004.0, 1005.0), "execution": (1005.0, 1009.0)}


def traces(exporter: InMemorySpanExporter, ratio: float = 0.0) -> Traces:
    """At 1,010 ms of the monotonic clock and 50 s of Unix time."""
    return Traces(exporter, ratio, draw=random.Random(0), clock=lambda: 1.01, wall_clock_ns=lambda: 50_000_000_000)


def test_spans_have_the_times_of_the_stages_and_the_callers_trace() -> None:
    exporter = InMemorySpanExporter()
    made = traces(exporter)
    traced = made.begin(CALLER, 1000.0)
    assert traced is not None
    assert traced.header.startswith(b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-")
    traced.end(1010.0, stages=STAGES, about={"model": "m", "outcome": "late", "gpulet": "a"})
    made.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans["infer m"]
    assert whole.parent is not None
    assert whole.parent.span_id == 0xB7AD6B7169203331
    assert b"%016x-01\r\n" % whole.context.span_id in traced.header
    assert {span.context.trace_id for span in spans.values()} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert (whole.start_time, whole.end_time) == (49_990_000_000, 50_000_000_000)
    for name, (start_ms, end_ms) in STAGES.items():
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == whole.context.span_id
        assert spans[name].start_time == 49_990_000_000 + round(1e6 * (start_ms - 1000.0))
        assert spans[name].end_time == 49_990_000_000 + round(1e6 * (end_ms - 1000.0))
    assert whole.attributes == {"tenuto.model": "m", "tenuto.outcome": "late", "tenuto.gpulet": "a"}
    assert whole.status.is_unset


def test_a_refused_request_is_an_error() -> None:
    exporter = InMemorySpanExporter()
    made = traces(exporter, ratio=1.0)
    traced = made.begin(None, 1000.0)
    assert traced is not None
    traced.end(1010.0, stages={}, about={"model": "m", "outcome": "expired"})
    made.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert not span.status.is_ok
    assert span.status.description == "expired"


@pytest.mark.parametrize(
    "header", [None, CALLER[:-1] + b"0", b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01", b"garbage", CALLER + b"-more"]
)
def test_what_nobody_sampled_is_not_traced(header: bytes | None) -> None:
    assert traces(InMemorySpanExporter()).begin(header, 1000.0) is None


def test_the_share_of_requests_without_a_caller() -> None:
    made = traces(InMemorySpanExporter(), ratio=0.25)
    assert 200 < sum(made.begin(None, 1000.0) is not None for _ in range(1000)) < 300


class Collector(BaseHTTPRequestHandler):
    """Takes what OTLP sends over HTTP."""

    taken: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.taken.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_collector_gets_the_spans_also_where_a_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    taken: list[ExportTraceServiceRequest] = []
    server = HTTPServer(("127.0.0.1", 0), type("Taking", (Collector,), {"taken": taken}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        made = Traces.otlp(f"http://127.0.0.1:{server.server_port}/v1/traces")
        now_ms = 1000.0 * time.monotonic()
        traced = made.begin(CALLER, now_ms)
        assert traced is not None
        about = {"model": "m", "outcome": "ok"}
        traced.end(now_ms + 1, stages={"batching": (now_ms, now_ms + 1)}, about=about)
        made.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    (resource,) = [resource for request in taken for resource in request.resource_spans]
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "tenuto"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"infer m", "batching"}
    assert {span.trace_id.hex() for span in spans.values()} == {"0af7651916cd43dd8448eb211c80319c"}
    assert spans["infer m"].span_id.hex().encode() in traced.header
    assert spans["infer m"].span_id == spans["batching"].parent_span_id


def test_a_collector_that_is_away_costs_no_answer() -> None:
    """Spans are handed over in the background: making them neither waits nor raises."""
    made = traces(_Away())
    traced = made.begin(CALLER, 1000.0)
    assert traced is not None
    traced.end(1010.0, stages=STAGES, about={"model": "m", "outcome": "ok"})
    made.close()


class _Away(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        del spans
        return SpanExportResult.FAILURE
