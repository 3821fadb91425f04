"""Spans of single requests for OpenTelemetry: one for the request, one below it for each stage of its time.

Nothing is recorded while a request is under way: its times are known when it ends, and its spans are made then, for
those that are sampled. W3C `traceparent` comes in with the request and goes out with its response.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tenuto.errors import EnvironmentFaultError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1  # format: the flag of a traceparent (W3C Trace Context)


class Traced(NamedTuple):
    """A request that is sampled: its trace, its own span, and its caller's span (0: it has none)."""

    trace_id: int
    span_id: int
    parent_id: int

    @property
    def header(self) -> bytes:
        """Its `traceparent` as a raw header line of the response."""
        return b"traceparent: 00-%032x-%016x-01\r\n" % (self.trace_id, self.span_id)


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
            draw: draws which of them are traced, and the ids.
            clock: monotonic seconds, the clock of requests' times.
            wall_clock_ns: Unix time in ns, the clock of spans.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._ratio = ratio
        self._draw = draw or random.Random()
        self._clock = clock
        self._wall_clock_ns = wall_clock_ns
        self._exporter = BatchSpanProcessor(exporter)
        self._made_by: dict[str, Any] = {
            "resource": Resource.create({"service.name": "tenuto"}),
            "instrumentation_scope": InstrumentationScope("tenuto"),
        }

    @classmethod
    def otlp(cls, endpoint: str, ratio: float = 0.0) -> Traces:
        """Return traces that go to a collector by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces.

        Raises:
            EnvironmentFaultError: the extra is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise EnvironmentFaultError(
                "traces need OpenTelemetry's OTLP exporter. Run: pip install 'tenuto[tracing]'"
            ) from error
        return cls(OTLPSpanExporter(endpoint=endpoint), ratio)

    def begin(self, traceparent: bytes | None) -> Traced | None:
        """Return how a request is traced; None for one that is not sampled."""
        match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent.strip())
        if match is not None and int(match[1], 16) and int(match[2], 16):
            if not int(match[3], 16) & _SAMPLED:
                return None
            return Traced(int(match[1], 16), self._id(64), int(match[2], 16))
        if self._draw.random() >= self._ratio:
            return None
        return Traced(self._id(128), self._id(64), 0)

    def _id(self, bits: int) -> int:
        return self._draw.getrandbits(bits) or 1

    def end(
        self, traced: Traced, *, arrived_ms: float, stages: Mapping[str, tuple[float, float]], about: Mapping[str, Any]
    ) -> None:
        """Make the spans of a request that has just been answered.

        Args:
            traced: what `begin` returned.
            arrived_ms: when it came, on the monotonic clock in ms, as all moments here.
            stages: begin and end of each part of its time.
            about: attributes of the request's span: model, outcome, gpu-let, …
        """
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        now_ms, now_ns = self._clock() * 1000.0, self._wall_clock_ns()

        def unix_ns(moment_ms: float) -> int:
            return now_ns - round(1e6 * (now_ms - moment_ms))

        def context(span_id: int, *, is_remote: bool = False) -> SpanContext:
            return SpanContext(traced.trace_id, span_id, is_remote, TraceFlags(_SAMPLED))

        own = context(traced.span_id)
        for name, (start_ms, end_ms) in stages.items():
            times: dict[str, Any] = {"start_time": unix_ns(start_ms), "end_time": unix_ns(end_ms)}
            self._exporter.on_end(ReadableSpan(name, context(self._id(64)), own, **self._made_by, **times))
        outcome = str(about["outcome"])
        whole = ReadableSpan(
            f"infer {about['model']}",
            own,
            context(traced.parent_id, is_remote=True) if traced.parent_id else None,
            attributes={f"tenuto.{key}": value for key, value in about.items()},
            kind=SpanKind.SERVER,
            status=Status() if outcome in ("ok", "late") else Status(StatusCode.ERROR, outcome),
            start_time=unix_ns(arrived_ms),
            end_time=now_ns,
            **self._made_by,
        )
        self._exporter.on_end(whole)

    def close(self) -> None:
        """Hand over the spans that are left."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
