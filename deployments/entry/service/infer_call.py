"""One request for inference, from its body to its response: it is parsed, given to the dispatcher and answered. All of
this happens in callbacks, without tasks. `SharedService` is what requests share."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import orjson

from tenuto.deployments.dispatch.in_flight import Request, Samples
from tenuto.deployments.entry.http.exchange import JSON, Exchange, refusal_of, refuse
from tenuto.deployments.entry.protocols.oip_answers import JsonRows, check_finite, encode_response
from tenuto.deployments.entry.protocols.oip_requests import PLAIN, DescribedRequest, InferRequest, check_outputs
from tenuto.deployments.entry.service.application_counters import ApplicationCounters
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.margin import Margin
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.entry.service.routing import Route, allowed_ms
from tenuto.deployments.entry.service.traces import Traced
from tenuto.deployments.wire.answers import Executed, Refused, late_loop
from tenuto.deployments.wire.arena import Arena, Slot
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RequestInputs
from tenuto.outcome import Outcome

_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
# What every answer says: of its request, and of its batch.
_LINES = b"x-tenuto-queue-ms: %b\r\nx-tenuto-batching-ms: %b\r\n%bx-tenuto-request-id: %b\r\n"
_BATCH_LINES = b"x-tenuto-execution-ms: %.3f\r\nx-tenuto-batch-size: %d\r\nx-tenuto-gpulet: %b\r\n"
_BATCH_PARAMETERS = b'"execution_ms":%.3f,"batch_size":%d,"gpulet":%b,"emulated":%b}'


Writer = Callable[[Sequence[Sequence[OutputTensor]]], bytes]  # makes a response of the outputs of all samples


class SharedService(Protocol):
    """What a gateway does for each of its requests."""

    margin: Margin
    arena: Arena | None
    application_counters: ApplicationCounters

    @property
    def now_ms(self) -> float:
        """What the monotonic clock shows."""

    def request_id(self, raw: str) -> str:
        """Return the name that the client gave the request, in printable ASCII, or a new name."""

    def gave_up(self, arrived_ms: float, deadline_ms: float, alone_ms: float) -> None:
        """Note that a request expired, which takes so long alone."""

    def wait_for(
        self, exchange: Exchange, result: asyncio.Future[bytes], then: Callable[[bytes], None], due_ms: float
    ) -> None:
        """Call `then` when the result is there. The request expires when there is no result at `due_ms`."""


class InferCall(msgspec.Struct, eq=False):
    """One HTTP request for inference, of one or more samples, from its body to its response.

    When the body can name neither a deadline, a priority nor sizes of its own, the scheduler is asked before the body
    is parsed. A request that it turns away is then never parsed.
    """

    _service: SharedService
    _dispatching: Dispatching
    _exchange: Exchange
    _route: Route
    _model: PlannedModel
    _slo_ms: float
    _traced: Traced | None = None
    _described: DescribedRequest | None = None  # what a request over gRPC asks for; the body is then its tensors
    _id: str = ""  # the protocol's
    _parsed: InferRequest | None = None  # None: it came decoded
    _write: Writer | None = None  # what makes the response of one that came decoded; None: the model's interface does
    _count: int = 1  # of its samples
    _request: Buffer = b""  # the body of one that hooks have decoded
    _open: list[Request] = []  # in the order of the samples; msgspec copies defaults
    _rows: dict[int, tuple[Executed, int]] = {}  # of what is not plain, the samples that were executed, by request
    _yields: bool = False
    _offline: bool = False  # it has no SLO, and costs no other request its deadline
    _sizes: Sequence[tuple[int, ...]] = ((),)  # of each sample
    _is_over: bool = False

    def begin(self) -> None:
        """Ask for what is in the body of the exchange. Its JSON must be short enough to be read at once.

        Raises:
            HttpError: the request cannot be taken.
        """
        route, body = self._route, self._exchange.body
        early: Request | None = None
        is_told = self._described is None and not self._model.reader.is_sized
        if is_told and not _may_name(body, route.json_length, slo=route.slo_ms is None):
            early = self._admit(route.client_id, ())
            if self._is_over:
                return  # turned away, and responded to
        try:
            parsed = self.parse(body, self._exchange.slot)
        except BaseException:
            self._cancel()
            raise
        self.begin_parsed(parsed, early)

    def begin_parsed(self, parsed: InferRequest, early: Request | None = None) -> None:
        """Ask for what `parse` returned. `early`: the request by which the dispatcher was already asked for its one
        sample."""
        self._parsed, header = parsed, parsed.header
        if header is not PLAIN:
            self._id, self._yields, self._sizes = header.id, header.yields, [header.sizes] * len(parsed.parts)
            if header.offline:
                self.run_offline()
            if header.slo_ms is not None:
                self._slo_ms = self._allowed_ms(header.slo_ms)
        self._start(parsed.parts, early)

    def begin_decoded(
        self, samples: Sequence[RequestInputs], write: Writer | None = None, request: Buffer = b""
    ) -> None:
        """Ask for samples that are already decoded. `write` makes the response of the outputs of all of them; without,
        there is one, of the body `request`, and the response says what its outputs mean."""
        self._write, self._request, self._sizes = write, request, [sample.sizes for sample in samples]
        self._start([sample.parts for sample in samples], None)

    def run_offline(self) -> None:
        """Have it cost no other request its deadline, and no SLO of its own."""
        self._offline = True
        self._slo_ms = self._allowed_ms()

    def _allowed_ms(self, named_ms: float | None = None) -> float:
        return allowed_ms(self._exchange, self._route, self._model, offline=self._offline, named_ms=named_ms)

    def parse(self, body: Buffer, slot: Slot | None = None) -> InferRequest:
        """Return what a body asks for. `slot`: where the body lies, if other processes can read it there. This changes
        nothing here.

        Raises:
            BadRequestError: the body is malformed, or does not fit the model.
        """
        described, reader = self._described, self._model.reader
        if described is None:
            parsed = reader.read(body, self._route.json_length, slot)
        else:
            parsed = reader.read_described(described, body, slot)
        interface = self._model.interface
        assert interface is not None
        if parsed.header.outputs and interface.outputs:  # only an application may have none that are known before
            check_outputs(parsed.header.outputs, interface.outputs)
        return parsed

    def _admit(self, client_id: str, sizes: tuple[int, ...], samples: Samples | None = None) -> Request:
        service, model, slo_ms = self._service, self._model, self._slo_ms
        request = self._dispatching.admit(
            model.name,
            self,
            arrived_ms=self._exchange.arrived_ms,
            slo_ms=slo_ms,
            client_id=client_id,
            reserve_ms=0.0 if self._offline else self._after_ms + service.margin.reserve_ms(slo_ms, model.alone_ms),
            yields=self._yields,
            samples=samples,
            sizes=sizes,
            offline=self._offline,
            client=self._exchange.key,
        )
        if not self._is_over:
            self._open.append(request)
        return request

    @property
    def _after_ms(self) -> float:
        """How much time before the deadline is left to the model's own hooks."""
        return self._model.after_ms if self._parsed is None and self._write is None else 0.0

    def _start(self, samples: Sequence[Sequence[InputPart]], early: Request | None) -> None:
        exchange = self._exchange
        exchange.on_left = self._cancel
        if len(samples) > 1:
            exchange.spend(len(samples))
        self._count = len(samples)
        name = self._service.request_id(self._id or self._route.client_id)
        together = Samples(len(samples)) if len(samples) > 1 else None
        if together is not None and early is not None:  # it was counted before anybody knew of the others
            early.samples, together.first, together.is_counted = together, early.id, True
        for parts, sizes in zip(samples, self._sizes, strict=True):
            request = early or self._admit(name, sizes, together)
            early = None
            if self._is_over:
                return
            request.client_id = name
            self._dispatching.start(request, parts, exchange.slot)

    def _cancel(self) -> None:
        """Drop the samples that are open: the client is gone, or the request is answered without them."""
        self._is_over = True
        opened, self._open = self._open, []
        for request in opened:
            if request.id not in self._rows:
                self._dispatching.cancel(request)

    # --- the end (Asker) ----------------------------------------------------------------------------------------

    def refused(self, request: Request, refused: Refused) -> None:
        """Refuse the request, because one of its samples was not executed."""
        if refused.outcome is Outcome.EXPIRED:
            alone_ms = self._model.alone_ms + self._after_ms
            self._service.gave_up(request.arrived_ms, request.deadline_ms, alone_ms)
        if self._is_over:
            return
        self._is_over = True
        waited = b"%.3f" % max(0.0, self._service.now_ms - request.arrived_ms)
        name = request.client_id or self._service.request_id(self._id or self._route.client_id)
        self._refuse(
            refused, _LINES % (waited, waited, _BATCH_LINES % (0.0, 0, refused.gpulet.encode()), name.encode())
        )
        if self._traced is not None:
            stages = {"waiting": (request.arrived_ms, self._service.now_ms)}
            rules = {"rule": refused.rule.value, "loop": refused.loop.value}
            self._trace(request.client_id, stages, refused.outcome.word, **rules)
        self._cancel()

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """Keep what a sample gave, and respond when it was the last one."""
        if self._is_over:
            return
        parsed, service = self._parsed, self._service
        if self._write is not None or (parsed is not None and parsed.header is not PLAIN):
            self._rows[request.id] = executed, row
            if len(self._rows) < self._count:
                return
        self._is_over = True
        try:
            hooks = self._model.hooks
            if parsed is None and hooks is not None and self._write is None:
                self._keep_time(request, self._after_ms)
                answer = hooks.postprocess(executed.tensors(row), self._request, request.deadline_ms)
                told = functools.partial(self._respond_hooked, request, executed)
                service.wait_for(self._exchange, answer, told, request.deadline_ms)
                return
            self._respond(request, executed, row)
            self._keep_time(request, 0.0)
            if self._traced is not None:
                self._trace_executed(request, executed)
        except Exception as error:
            refuse(self._exchange, error)
        finally:
            self._open = []  # they hold this call

    def _keep_time(self, request: Request, after_ms: float) -> None:
        """Tell the margin how much time was left. `after_ms` is for what still follows; the margin does not cover
        it."""
        margin, left_ms = self._service.margin, request.deadline_ms - self._service.now_ms
        margin.answered(left_ms - after_ms, self._slo_ms, self._model.alone_ms, request.reserve_ms - after_ms)

    def _respond_hooked(self, request: Request, executed: Executed, answer: bytes) -> None:
        """Send what the model's own hooks made of its outputs."""
        shown: Shown = executed.shown or Shown.of(executed)
        lines, parameters = shown.told(request, executed)
        text = b'{%b,"prediction":%b,"parameters":%b}' % (self._model.named, answer, parameters)
        self._reply(200, lines + JSON, [text])
        if self._traced is not None:
            self._trace_executed(request, executed)

    def _refuse(self, refused: Refused, lines: bytes) -> None:
        """Send the response of a request that was not executed."""
        error = refusal_of(refused, lines)
        self._reply(error.status, error.lines(), [error.payload(self._exchange.head.url)])

    def _reply(self, status: int, lines: bytes, payload: Sequence[Buffer]) -> None:
        """Send the response, with the header of the trace that it belongs to."""
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
            request.client_id,
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

    def _trace(self, name: str, stages: Mapping[str, tuple[float, float]], outcome: str, **about: Any) -> None:
        if self._traced is not None:
            named = {"model": self._model.name, "outcome": outcome, "request_id": name, **about}
            self._traced.end(self._service.now_ms, stages, named)

    def _respond(self, request: Request, executed: Executed, row: int) -> None:
        """Send the outputs that were asked for, of every sample. The times are those of the last sample."""
        parsed, model = self._parsed, self._model
        shown: Shown = executed.shown or Shown.of(executed)
        lines, parameters = shown.told(request, executed)
        if parsed is not None and parsed.header is PLAIN:
            text = b'{%b,"outputs":[%b],"parameters":%b}' % (model.named, shown.text(executed, row), parameters)
            self._reply(200, lines + JSON, [text])
            return
        interface = model.interface
        assert interface is not None
        if parsed is None and self._write is None:
            tensors = executed.tensors(row)
            check_finite(tensors)
            predictions = "predictions" if interface.signature.answers == "classes" else "prediction"
            answer: dict[str, Any] = {"model_name": model.model, "model_version": model.version}
            answer |= {
                predictions: interface.postprocess(tensors, self._request),
                "parameters": orjson.Fragment(parameters),
            }
            self._reply(200, lines + JSON, [orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)])
            return
        samples = [at[0].tensors(at[1]) for at in map(self._rows.__getitem__, [each.id for each in self._open])]
        self._write_samples(samples, lines, parameters)

    def _write_samples(self, samples: Sequence[Sequence[OutputTensor]], lines: bytes, parameters: bytes) -> None:
        """Send the outputs of all samples, as the request wants them."""
        if self._write is not None:
            self._reply(200, lines + JSON, [self._write(samples)])
            return
        parsed, model = self._parsed, self._model
        assert parsed is not None
        assert model.interface is not None
        labels = model.interface.signature.labels
        text, binary = encode_response(model.named, parsed.header, samples, parameters, labels)
        if binary:
            self._reply(200, lines + _BINARY % len(text), [text, *binary])
        else:
            self._reply(200, lines + JSON, [text])


class Shown:
    """What all answers of one batch have in common. It is made once."""

    def __init__(self, executed: Executed) -> None:
        self._rows: JsonRows | None = None  # made for the first answer in JSON
        gpulet, ran = executed.gpulet, (executed.execution_ms, executed.batch_size)
        self._lines = _BATCH_LINES % (*ran, gpulet.encode())
        self._parameters = _BATCH_PARAMETERS % (*ran, orjson.dumps(gpulet), b"true" if executed.emulated else b"false")

    @classmethod
    def of(cls, executed: Executed) -> Shown:
        """Return what the batch's answers have in common. It is kept in `executed` for the rest of the batch."""
        executed.shown = made = cls(executed)
        return made

    def text(self, executed: Executed, row: int) -> bytes:
        """Return the outputs of a sample as JSON."""
        if self._rows is None:
            self._rows = JsonRows(executed)
        return self._rows.text(row)

    def told(self, request: Request, executed: Executed) -> tuple[bytes, bytes]:
        """Return what a response says of how its request was executed: raw header lines, and the parameters of its
        JSON."""
        arrived_ms = request.arrived_ms
        batching_ms = executed.sent_ms - arrived_ms
        queue, batching = b"%.3f" % (batching_ms + executed.gpulet_queue_ms), b"%.3f" % batching_ms
        lines = _LINES % (queue, batching, self._lines, request.client_id.encode())
        if not math.isnan(executed.started_ms):
            lines += b"x-tenuto-start-ms: %.3f\r\n" % (executed.started_ms - arrived_ms)
        return lines, b'{"queue_ms":%b,"batching_ms":%b,%b' % (queue, batching, self._parameters)


def _may_name(body: Buffer, json_length: int | None, *, slo: bool) -> bool:
    """Whether a body could name a priority, or with `slo` a deadline. Such a body has to be parsed first. JSON may
    write any name with `\\u`."""
    text = body if isinstance(body, bytes) and json_length is None else bytes(body[:json_length])
    if b"parameters" in text:
        return b"priority" in text or b"\\u" in text or (slo and (b"slo_ms" in text or b"timeout" in text))
    return b"\\u" in text
