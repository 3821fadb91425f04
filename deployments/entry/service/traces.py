"""Spans of single requests for OpenTelemetry: one for the request, one below it for each stage of its time.

Nothing is recorded while a request is under way: its times are known when it ends, and its spans get them then, for
those that are sampled. W3C `traceparent` comes in with the request and goes out with its response.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tenuto.errors import EnvironmentFaultError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer


class Traced:
    """A request that is sampled. `header` is its `traceparent`, as a raw header line of the response."""

    def __init__(self, tracer: Tracer, span: Span, unix_ns: Callable[[float], int]) -> None:
        context = span.get_span_context()
        self.header = b"traceparent: 00-%032x-%016x-01\r\n" % (context.trace_id, context.span_id)
        self._tracer, self._span, self._unix_ns = tracer, span, unix_ns

    def end(self, now_ms: float, stages: Mapping[str, tuple[float, float]], about: Mapping[str, Any]) -> None:
        """Make the spans of a request that has just been answered.

        Args:
            now_ms: what the monotonic clock shows.
            stages: begin and end of each part of its time, on this clock.
            about: attributes of the request's span: model, outcome, gpu-let, …
        """
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        unix_ns, own = self._unix_ns, set_span_in_context(self._span)
        for name, (start_ms, end_ms) in stages.items():
            self._tracer.start_span(name, own, start_time=unix_ns(start_ms)).end(unix_ns(end_ms))
        outcome = str(about["outcome"])
        self._span.update_name(f"infer {about['model']}")
        self._span.set_attributes({f"tenuto.{key}": value for key, value in about.items()})
        if outcome not in ("ok", "late"):
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end(unix_ns(now_ms))


class Traces:
    """Decides which requests are traced, and hands their spans to an exporter in the background."""

    def __init__(
        self,
        exporter: SpanExporter,
        ratio: float = 0.0,
        *,
        draw: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Prepare.

        Args:
            exporter: see `otlp` for the usual one.
            ratio: share of the requests without a `traceparent` that are traced; a `traceparent` decides for itself.
            draw: draws which of them are traced.
            clock: monotonic seconds, the clock of requests' times.
            wall_clock_ns: Unix time in ns, the clock of spans.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._ratio = ratio
        self._draw = draw or random.Random()
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        resource = Resource.create({"service.name": "tenuto"})
        self._provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)  # `begin` samples
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._read = TraceContextTextMapPropagator().extract
        self._tracer = self._provider.get_tracer("tenuto")

    @classmethod
    def otlp(cls, endpoint: str, ratio: float = 0.0) -> Traces:
        """Return traces that go to a collector by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.

        Raises:
            EnvironmentFaultError: the extra is not installed.
        """
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise EnvironmentFaultError(
                "traces need OpenTelemetry's OTLP exporter. Run: pip install 'tenuto[tracing]'"
            ) from error
        session = requests.Session()
        # What goes to a collector on this machine must not pass a proxy of the environment.
        session.trust_env = urlsplit(endpoint).hostname not in ("127.0.0.1", "localhost", "::1")
        return cls(OTLPSpanExporter(endpoint=endpoint, session=session), ratio)

    def begin(self, traceparent: bytes | None, arrived_ms: float) -> Traced | None:
        """Return how a request is traced; None for one that is not sampled. `arrived_ms`: on the monotonic clock."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, get_current_span

        context = Context()
        if traceparent is not None:
            context = self._read({"traceparent": traceparent.decode("latin-1")}, context)
        caller = get_current_span(context).get_span_context()
        if not caller.trace_flags.sampled if caller.is_valid else self._draw.random() >= self._ratio:
            return None
        now_ms, now_ns = self._clock() * 1000.0, self._wall_clock_ns()

        def unix_ns(moment_ms: float) -> int:
            return now_ns - round(1e6 * (now_ms - moment_ms))

        span = self._tracer.start_span("infer", context, SpanKind.SERVER, start_time=unix_ns(arrived_ms))
        return Traced(self._tracer, span, unix_ns)

    def close(self) -> None:
        """Hand over the spans that are left."""
        self._provider.shutdown()
