"""One request for inference, from its body to its response: parsed, given to the dispatcher, answered. In callbacks,
without tasks; what requests share is `SharedService`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from tenuto.deployments.dispatch.in_flight import Asker, Request
from tenuto.deployments.entry.dispatching import Dispatching
from tenuto.deployments.entry.exchange import JSON, Exchange, HttpError, crash, fail, retry_after
from tenuto.deployments.entry.heads import Route
from tenuto.deployments.entry.oip import (
    BadRequestError,
    InferRequest,
    NotFiniteError,
    check_finite,
    check_outputs,
    encode_response,
)
from tenuto.deployments.entry.planned_model import PlannedModel
from tenuto.deployments.entry.traces import Traces
from tenuto.deployments.wire.answers import Executed, Refused, late_loop
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor
from tenuto.outcome import Outcome

_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
_TIMES = (
    b"x-tenuto-queue-ms: %.3f\r\nx-tenuto-batching-ms: %.3f\r\nx-tenuto-execution-ms: %.3f\r\n"
    b"x-tenuto-batch-size: %d\r\nx-tenuto-gpulet: %b\r\nx-tenuto-request-id: %b\r\n"
)
_PARAMETERS = b'{"queue_ms":%.3f,"batching_ms":%.3f,"execution_ms":%.3f,"batch_size":%d,"gpulet":%b,"emulated":%b}'
_SCANNED_BYTES = 1 << 16  # limit: of a body that is searched for the name of a deadline; longer ones are parsed


class SharedService(Protocol):
    """What a gateway does for each of its requests."""

    traces: Traces | None

    @property
    def dispatching(self) -> Dispatching:
        """The scheduling side; raises `HttpError` 503 before the first plan."""

    @property
    def now_ms(self) -> float:
        """The monotonic clock."""

    def request_id(self, raw: str) -> str:
        """Return what a request is called: what its client calls it, in printable ASCII, else a new name."""

    def admit(
        self, asker: Asker, exchange: Exchange, model: PlannedModel, slo_ms: float, client_id: str, *, yields: bool
    ) -> Request:
        """Ask the scheduling side for one sample."""

    def answer_left(self, request: Request, slo_ms: float, alone_ms: float) -> None:
        """The response to an executed request, which was allowed so much, has been handed to the socket."""

    def gave_up(self, request: Request, alone_ms: float) -> None:
        """A request expired."""


class InferCall:
    """One HTTP request for inference, of one or more samples, from its body to its response.

    The core is asked before the body is parsed, where the body can name neither a deadline nor a priority of its own:
    what it turns away costs no more.
    """

    def __init__(self, service: SharedService, exchange: Exchange, route: Route) -> None:
        assert route.model is not None
        self._service = service
        self._exchange = exchange
        self._route = route
        self._model = route.model
        self._slo_ms = route.slo_ms if route.slo_ms is not None else route.model.slo_ms
        self._id = ""  # the protocol's
        self._parsed: InferRequest | None = None  # None: the response names classes
        self._open: list[Request] = []  # in the order of the samples
        self._outputs: dict[int, list[OutputTensor]] = {}  # of the samples that were executed, by request
        self._yields = False
        self._is_over = False
        traces = service.traces
        self._traced = None if traces is None else traces.begin(route.traceparent)

    def begin(self) -> None:
        """Ask for what is in the body of the exchange.

        Raises:
            HttpError: the request cannot be taken.
        """
        route, body = self._route, self._exchange.body
        early: Request | None = None
        if not _may_name(body, route.json_length, slo=route.slo_ms is None):
            early = self._admit(route.client_id)
            if self._is_over:
                return  # turned away, and responded to
        try:
            parsed = self.parse(body, is_received=True)
        except BaseException as error:
            self._cancel()
            if isinstance(error, BadRequestError):
                raise HttpError(400, str(error)) from None
            raise
        self.begin_parsed(parsed, early)

    def begin_parsed(self, parsed: InferRequest, early: Request | None = None) -> None:
        """Ask for what `parse` returned; `early`: the scheduling side was asked for its one sample."""
        self._parsed = parsed
        self._id, self._yields = parsed.header.id, parsed.header.yields
        if parsed.header.slo_ms is not None and self._route.slo_ms is None:
            self._slo_ms = parsed.header.slo_ms
        self._start(parsed.parts, early)

    def begin_decoded(self, parts: list[InputPart]) -> None:
        """Ask for one sample that is decoded already; the response names classes."""
        self._start([parts], None)

    def parse(self, body: Buffer, *, is_received: bool) -> InferRequest:
        """Return what a body asks for; `is_received`: it lies where the exchange received it. Changes nothing here.

        Raises:
            BadRequestError: it is malformed, or does not fit the model.
        """
        slot = self._exchange.slot if is_received else None
        reader, json_length = self._model.reader, self._route.json_length
        if slot is None:
            parsed = reader.read(body, json_length)
        else:
            parsed = reader.read(body, json_length, arena=slot.arena, offset=slot.offset)
        if parsed.header.outputs:
            interface = self._model.interface
            assert interface is not None
            check_outputs(parsed.header.outputs, interface.outputs)
        return parsed

    def _admit(self, client_id: str) -> Request:
        request = self._service.admit(self, self._exchange, self._model, self._slo_ms, client_id, yields=self._yields)
        if not self._is_over:
            self._open.append(request)
        return request

    def _start(self, samples: Sequence[Sequence[InputPart]], early: Request | None) -> None:
        exchange = self._exchange
        exchange.on_left = self._cancel
        dispatching = self._service.dispatching
        name = self._service.request_id(self._id or self._route.client_id)
        for parts in samples:
            request = early or self._admit(name)
            early = None
            if self._is_over:
                return
            request.client_id = name
            dispatching.start(request, parts, exchange.slot)

    def _cancel(self) -> None:
        """The client is gone, or nobody waits for the rest of its samples."""
        self._is_over = True
        opened, self._open = self._open, []
        for request in opened:
            if request.id not in self._outputs:
                self._service.dispatching.cancel(request)

    # --- the end (Asker) ----------------------------------------------------------------------------------------

    def refused(self, request: Request, refused: Refused) -> None:
        """A sample was not executed: so is the request."""
        if refused.outcome is Outcome.EXPIRED:
            self._service.gave_up(request, self._model.alone_ms)
        if self._is_over:
            return
        self._is_over = True
        waited_ms = max(0.0, self._service.now_ms - request.arrived_ms)
        name = request.client_id or self._service.request_id(self._id or self._route.client_id)
        lines = _TIMES % (waited_ms, waited_ms, 0.0, 0, refused.gpulet.encode(), name.encode())
        payload = orjson.dumps({"error": refused.reason, "outcome": refused.outcome.word})
        self._reply(refused.outcome.http_status, lines + JSON + retry_after(refused.retry_after_s), [payload])
        if self._traced is not None:
            stages = {"waiting": (request.arrived_ms, self._service.now_ms)}
            self._trace(request, stages, refused.outcome.word, rule=refused.rule.value, loop=refused.loop.value)
        self._cancel()

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """A sample was executed; the last one makes the response."""
        if self._is_over:
            return
        outputs, parsed = self._outputs, self._parsed
        outputs[request.id] = executed.tensors(row)
        if parsed is not None and len(outputs) < len(parsed.parts):
            return
        self._is_over = True
        try:
            if parsed is None:
                self._respond_with_classes(request, executed)
            else:
                self._respond(parsed, request, executed)
            self._service.answer_left(request, self._slo_ms, self._model.alone_ms)
            if self._traced is not None:
                self._trace_executed(request, executed)
        except NotFiniteError as error:
            fail(self._exchange, HttpError(406, str(error)))
        except Exception as error:
            crash(self._exchange, error)
        finally:
            self._open = []  # they hold this call

    def _reply(self, status: int, lines: bytes, payload: Sequence[Buffer]) -> None:
        """Send the response, with the trace it belongs to."""
        self._exchange.respond(status, lines if self._traced is None else lines + self._traced.header, payload)

    def _trace_executed(self, request: Request, executed: Executed) -> None:
        sent_ms, end_ms = executed.sent_ms, executed.sent_ms + executed.gpulet_queue_ms + executed.execution_ms
        start_ms = executed.started_ms
        if math.isnan(start_ms):  # another machine's clock: the way there and back is not told apart from the queue
            start_ms = sent_ms + executed.gpulet_queue_ms
        else:
            end_ms = start_ms + executed.execution_ms
        late_ms = self._service.now_ms - request.deadline_ms
        about = {} if late_ms <= 0.0 else {"loop": late_loop(executed.execution_ms, executed.planned_ms, late_ms).value}
        self._trace(
            request,
            {
                "batching": (request.arrived_ms, sent_ms),
                "gpulet_queue": (sent_ms, start_ms),
                "execution": (start_ms, end_ms),
                "answering": (end_ms, self._service.now_ms),
            },
            "ok" if late_ms <= 0.0 else "late",
            gpulet=executed.gpulet,
            batch_size=executed.batch_size,
            emulated=executed.emulated,
            **about,
        )

    def _trace(self, request: Request, stages: Mapping[str, tuple[float, float]], outcome: str, **about: Any) -> None:
        traces, traced = self._service.traces, self._traced
        if traces is not None and traced is not None:
            named = {"model": self._model.name, "outcome": outcome, "request_id": request.client_id, **about}
            traces.end(traced, arrived_ms=request.arrived_ms, stages=stages, about=named)

    def _respond(self, parsed: InferRequest, request: Request, executed: Executed) -> None:
        """Send what was asked for, of every sample; the times are those of the last."""
        interface = self._model.interface
        lines, parameters = told_of(request, executed)
        text, binary = encode_response(
            self._model.name,
            parsed.header,
            [self._outputs[each.id] for each in self._open],
            parameters,
            interface.signature.labels if interface is not None else (),
        )
        if binary:
            self._reply(200, lines + _BINARY % len(text), [text, *binary])
        else:
            self._reply(200, lines + JSON, [text])

    def _respond_with_classes(self, request: Request, executed: Executed) -> None:
        interface = self._model.interface
        assert interface is not None
        tensors = self._outputs[request.id]
        check_finite(tensors)
        lines, parameters = told_of(request, executed)
        document = {
            "model_name": self._model.name,
            "predictions": interface.postprocess(tensors),
            "parameters": orjson.Fragment(parameters),
        }
        self._reply(200, lines + JSON, [orjson.dumps(document)])


def told_of(request: Request, executed: Executed) -> tuple[bytes, bytes]:
    """Return what a response says of its execution: raw header lines, and the parameters of its JSON."""
    batching_ms = executed.sent_ms - request.arrived_ms
    start_ms = executed.started_ms - request.arrived_ms
    times = batching_ms + executed.gpulet_queue_ms, batching_ms, executed.execution_ms, executed.batch_size
    lines = _TIMES % (*times, executed.gpulet.encode(), request.client_id.encode())
    if not math.isnan(start_ms):
        lines += b"x-tenuto-start-ms: %.3f\r\n" % start_ms
    return lines, _PARAMETERS % (*times, orjson.dumps(executed.gpulet), b"true" if executed.emulated else b"false")


def _may_name(body: Buffer, json_length: int | None, *, slo: bool) -> bool:
    """Whether a body could name a priority, or with `slo` a deadline, so that it has to be parsed first; long JSON is.
    JSON may write any name with `\\u`."""
    if (len(body) if json_length is None else json_length) > _SCANNED_BYTES:
        return True
    text = body if isinstance(body, bytes) and json_length is None else bytes(body[:json_length])
    return b"priority" in text or b"\\u" in text or (slo and (b"slo_ms" in text or b"timeout" in text))
