"""What happens to a request between its bytes and its answer: routed, refused early where that is known, parsed, given
to the dispatcher, answered. One path, in callbacks, without tasks; see `InferCall`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import orjson

from tenuto.deployments.dispatch.histogram import Histogram, buckets_around
from tenuto.deployments.dispatch.in_flight import Asker, Request
from tenuto.deployments.entry.dispatching import Dispatching
from tenuto.deployments.entry.http import JSON, Exchange, Head, HttpError, inflated, retry_after
from tenuto.deployments.entry.margin import Margin
from tenuto.deployments.entry.oip import (
    BadRequestError,
    InferRequest,
    QuickReader,
    QuickWriter,
    check_outputs,
    encode_response,
    parse_infer,
    parse_slo,
)
from tenuto.deployments.entry.served_model import ServedModel
from tenuto.deployments.entry.shared_memory import Regions
from tenuto.deployments.operator.traces import Traces
from tenuto.deployments.security.keys import Caller, Callers, presented_key
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Arena, Held, HeldTogether
from tenuto.deployments.wire.tensors import Buffer, InputPart
from tenuto.errors import InvalidInputError
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature

__all__ = ["InferenceService"]

logger = logging.getLogger("ray.serve")

_PRINTABLE = "".join(chr(code) for code in range(33, 127) if code != ord("%"))
_BINARY = b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
_TIMES = (
    b"x-tenuto-queue-ms: %.3f\r\nx-tenuto-batching-ms: %.3f\r\nx-tenuto-execution-ms: %.3f\r\n"
    b"x-tenuto-batch-size: %d\r\nx-tenuto-gpulet: %b\r\nx-tenuto-request-id: %b\r\n"
)
_BEHIND = orjson.dumps(
    {"error": "more requests come than this gateway can read. Retry in a second.", "outcome": Outcome.REJECTED.word}
)
_BEHIND_LINES = JSON + retry_after(1.0)
_INFLATE_ASIDE_BYTES = 1 << 16  # smaller ones cost less than the way to another thread
_SCANNED_BYTES = 1 << 16
_LONGEST_BEFORE_S = 60.0  # a proxy that says more has another clock
_WITHOUT_KEY = b"/v2/health/"  # load balancers have none
_BEARER = b"www-authenticate: Bearer\r\n"
_DECODERS = min(4, os.cpu_count() or 1)
_MOST_DECODING = 64  # pictures and texts that wait for a thread; what comes then is turned away


class FrontLag:
    """Whether the event loop stays behind what comes in, by the rule of CoDel (RFC 8289): requests that waited too long
    to be read are turned away only where every one has for a tenth of a second, and from then on at once until that has
    not been so for a second.

    Beyond what the processor can read, first come first served would read each request when its deadline is almost
    over, and serve none well. A standstill of the machine is no reason: what came meanwhile may still be in time.
    """

    _INTERVAL_MS = 100.0
    _ALERT_MS = 1000.0
    _PART = 0.2  # of the SLO: what reading a request may take of it

    def __init__(self) -> None:
        self._behind_from_ms = math.inf
        self._alert_until_ms = -math.inf
        self.turned_away = 0

    def is_behind(self, lag_ms: float, slo_ms: float, now_ms: float) -> bool:
        """Take the next request that is read, and return whether it is to be turned away.

        Args:
            lag_ms: since its bytes came.
            slo_ms: time it is allowed.
            now_ms: the clock.
        """
        if lag_ms <= self._PART * slo_ms:
            self._behind_from_ms = math.inf
            return False
        self._behind_from_ms = min(self._behind_from_ms, now_ms)
        if now_ms - self._behind_from_ms < self._INTERVAL_MS and now_ms > self._alert_until_ms:
            return False
        self._alert_until_ms = now_ms + self._ALERT_MS
        self.turned_away += 1
        return True


class _Model:
    """A model of the plan as requests meet it. `is_ready`: a gpu-let has said what it takes, and can be used."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slo_ms = 0.0
        self.alone_ms = 0.0  # a batch of one, on the fastest of its gpu-lets
        self.served: ServedModel | None = None
        self.is_ready = False
        self.reader = QuickReader(())
        self.writer = QuickWriter(name, ())

    def follow(self, slo_ms: float, alone_ms: float, signature: ModelSignature | None, *, is_ready: bool) -> None:
        """Take what the plan and the gpu-lets say now."""
        self.slo_ms, self.alone_ms = slo_ms, alone_ms
        if signature is not None and (self.served is None or self.served.signature != signature):
            self.served = ServedModel.of(signature)
            self.reader = QuickReader(self.served.inputs)
            self.writer = QuickWriter(self.name, self.served.outputs)
        self.is_ready = is_ready and self.served is not None


class _Route(NamedTuple):
    """What a head leads to, with what its headers say about it; `problem` where they are wrong.

    `caller`: who asks, where clients have keys. `began_s`: when a proxy in front took the request, in Unix time.
    """

    handle: Callable[[Exchange, _Route], None]
    model: _Model | None = None
    slo_ms: float | None = None
    json_length: int | None = None
    encoding: bytes | None = None
    client_id: str = ""
    problem: HttpError | None = None
    caller: Caller | None = None
    began_s: float | None = None
    traceparent: bytes | None = None


class InferenceService:
    """Answers the requests that carry load. Invariant: every exchange is responded to exactly once, or left."""

    def __init__(
        self,
        arena: Arena,
        cold: Callable[[Exchange], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare without a plan.

        Args:
            arena: where tensors are put that do not come in a body of their own.
            cold: answers every other request.
            clock: monotonic seconds.
            wall_clock: Unix time, which proxies go by.
        """
        self._wall_clock = wall_clock
        self.margin = Margin()
        self.lag = FrontLag()
        self.regions = Regions(arena)
        self.callers = Callers()
        self.traces: Traces | None = None
        self.proxied: dict[str, Histogram] = {}  # by model: seconds in a proxy in front, where it says so
        self.max_body_bytes = 64 << 20
        self._cold = cold
        self._clock = clock
        self._dispatching: Dispatching | None = None
        self._plan: Plan | None = None
        self._models: dict[str, _Model] = {}
        self._generation = 0
        self._id_prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(_DECODERS, "decode")
        self._decoding = 0
        self._shown = Shown()

    # --- the plan -----------------------------------------------------------------------------------------------

    def follow(self, dispatching: Dispatching) -> None:
        """Send requests there, by its present plan; call it again when the plan or what gpu-lets hold has changed."""
        plan = dispatching.plan
        self._dispatching, self._plan = dispatching, plan
        self._generation += 1
        known, self._models = self._models, {}
        if plan is None:
            return
        for spec in plan.models:
            model = self._models[spec.name] = known.get(spec.name) or _Model(spec.name)
            signature, is_ready = dispatching.signature(spec.name), dispatching.is_ready(spec.name)
            model.follow(spec.slo_ms, _alone_ms(plan, spec.name), signature, is_ready=is_ready)

    @property
    def dispatching(self) -> Dispatching:
        """The scheduling side; raises `HttpError` 503 before the first plan."""
        if self._dispatching is None:
            raise HttpError(503, "no plan is applied yet. Wait a moment and retry.", retry_after_s=1)
        return self._dispatching

    def served(self, name: str) -> ServedModel:
        """Return a model that can be asked now.

        Raises:
            HttpError: 404 for a model the plan does not know, 503 for one that is unserved or whose gpu-lets are
                starting.
        """
        return self._ready(self._known(name))

    def _known(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            _ = self.dispatching  # before the first plan no model is unknown
            known = ", ".join(self._models) or "(none)"
            raise HttpError(404, f"unknown model '{name}'. Models here: {known}.")
        return model

    def _ready(self, model: _Model) -> ServedModel:
        if model.is_ready and model.served is not None:
            return model.served
        plan = self._plan
        if plan is not None and model.name in plan.unserved:
            why = plan.unserved_reasons.get(model.name, "no reason given")
            raise HttpError(
                503, f"the plan leaves '{model.name}' unserved: {why}. Plan again with more GPUs or another policy."
            )
        raise HttpError(503, f"no gpu-let of '{model.name}' is ready. Retry in a few seconds.", retry_after_s=2)

    # --- requests -----------------------------------------------------------------------------------------------

    def refusal(self, exchange: Exchange) -> HttpError | None:
        """Return why a request need not send its body; called once, when its head is there."""
        route = self._route(exchange.head)
        if route.problem is None and route.caller is not None:
            wait_s = route.caller.wait_s(self._clock())
            if wait_s > 0.0:
                reason = f"'{route.caller.name}' asks more often than its key allows; retry in {wait_s:.3g} s."
                return HttpError(429, reason, retry_after_s=wait_s)
        return route.problem

    def handle(self, exchange: Exchange) -> None:
        """Answer a request whose body is there."""
        route = self._route(exchange.head)
        try:
            if route.problem is not None:
                raise route.problem
            if route.began_s is not None and route.model is not None:
                self._count_proxy(exchange, route.model, route.began_s)
            route.handle(exchange, route)
        except HttpError as error:
            _fail(exchange, error)

    def _route(self, head: Head) -> _Route:
        """Return what a head leads to; found once for each head and plan."""
        if head.generation == self._generation:
            found: _Route = head.route
            return found
        action, name = _load_path(head.url) if head.method == b"POST" else ("", "")
        try:
            caller = self._caller(head, name)
            if not action:
                route = _Route(lambda exchange, _route: self._cold(exchange), caller=caller)
            else:
                route = self._load_route(action, self._known(name), head.headers)._replace(caller=caller)
        except HttpError as error:
            route = _Route(lambda _exchange, _route: None, problem=error)
        head.route, head.generation = route, self._generation
        return route

    def _caller(self, head: Head, model: str) -> Caller | None:
        """Return who asks; None where nobody has to say so.

        Raises:
            HttpError: 401 without a key that is known, 403 for a model that is not among those of the key.
        """
        if not self.callers or head.url.startswith(_WITHOUT_KEY):
            return None
        key = presented_key(head.headers)
        if key is None:
            raise HttpError(401, "no key. Send `Authorization: Bearer KEY`, or X-Api-Key.", headers=_BEARER)
        caller = self.callers.find(key)
        if caller is None:
            raise HttpError(401, "this key is not known here. Ask who runs this server for one.", headers=_BEARER)
        named = model or _named_model(head.url)
        if named and not caller.may_ask(named):
            raise HttpError(403, f"the key of '{caller.name}' is not for model '{named}'.")
        return caller

    def _count_proxy(self, exchange: Exchange, model: _Model, began_s: float) -> None:
        """Take the time before this process as part of the request's: its deadline counts from where it began."""
        before_s = self._wall_clock() - began_s
        if 0.0 <= before_s < _LONGEST_BEFORE_S:
            exchange.arrived_ms -= before_s * 1000.0
            histogram = self.proxied.get(model.name)
            if histogram is None:
                histogram = self.proxied[model.name] = Histogram(buckets_around(model.slo_ms))
            histogram.add(before_s)

    def _load_route(self, action: str, model: _Model, headers: Mapping[bytes, bytes]) -> _Route:
        self._ready(model)
        encoding = headers.get(b"content-encoding")
        length = headers.get(b"inference-header-content-length")
        if length is not None and not (length.isdigit() and len(length) < 12):
            shown = length.decode("latin-1")
            raise HttpError(400, f"Inference-Header-Content-Length is {shown!r}. Give a number of bytes.")
        return _Route(
            self._infer if action == "infer" else self._predict, model, _slo_of(headers),
            None if length is None else int(length), None if encoding == b"identity" else encoding,
            headers.get(b"x-request-id", b"").decode("latin-1"), began_s=_began_s(headers),
            traceparent=headers.get(b"traceparent"),
        )  # fmt: skip

    def _infer(self, exchange: Exchange, route: _Route) -> None:
        assert route.model is not None
        slo_ms = route.model.slo_ms if route.slo_ms is None else route.slo_ms
        now_ms = self._clock() * 1000.0
        if self.lag.is_behind(now_ms - exchange.arrived_ms, slo_ms, now_ms):
            exchange.respond(429, _BEHIND_LINES, [_BEHIND])
            return
        encoding, limit = route.encoding, self.max_body_bytes
        if encoding is None:
            InferCall(self, exchange, route).begin(exchange.body)
        elif len(exchange.body) < _INFLATE_ASIDE_BYTES:
            InferCall(self, exchange, route).begin(inflated(exchange.body, encoding, limit), is_received=False)
        else:
            self._aside(
                exchange,
                lambda: inflated(exchange.body, encoding, limit),
                lambda body: InferCall(self, exchange, route).begin(body, is_received=False),
            )

    def _predict(self, exchange: Exchange, route: _Route) -> None:
        """Answer a raw image or text. Decoding and resizing are real work: in threads, where they delay no timer."""
        model = route.model
        assert model is not None
        served = self._ready(model)
        slo_ms = model.slo_ms if route.slo_ms is None else route.slo_ms
        if self._clock() * 1000.0 + model.alone_ms > exchange.arrived_ms + slo_ms:
            raise HttpError(
                504, "the deadline cannot be met. Raise the SLO.", retry_after_s=1.0, details={"outcome": "expired"}
            )

        def decode() -> list[InputPart]:
            plain = exchange.body
            if route.encoding is not None:
                plain = inflated(plain, route.encoding, self.max_body_bytes)
            return served.preprocess(plain)

        self._aside(exchange, decode, lambda parts: InferCall(self, exchange, route).begin_decoded(parts))

    def _aside(self, exchange: Exchange, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run something in a thread, and go on with its result on the loop."""
        if self._decoding >= _MOST_DECODING:
            raise HttpError(429, f"{_MOST_DECODING} bodies wait to be decoded. Retry in a second.", retry_after_s=1.0)
        self._decoding += 1
        has_left = False
        loop = asyncio.get_running_loop()

        def left() -> None:
            nonlocal has_left
            has_left = True

        def done(result: Any, error: BaseException | None) -> None:
            self._decoding -= 1
            if has_left:
                return
            exchange.on_left = None
            try:
                if isinstance(error, BadRequestError | InvalidInputError):
                    raise HttpError(400, str(error))
                if error is not None:
                    raise error
                then(result)
            except HttpError as refused:
                _fail(exchange, refused)
            except Exception as unexpected:
                _crash(exchange, unexpected)

        def run() -> None:
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(done, result, error)

        exchange.on_left = left
        self._threads.submit(run)

    def request_id(self, raw: str) -> str:
        """Return what a request is called: what its client calls it, else a name made here.

        It goes into headers and logs, so that what is not printable ASCII is percent-encoded, and 128 characters kept.
        """
        if not raw:
            return f"{self._id_prefix}-{next(self._numbers)}"
        return raw[:128] if raw.isascii() and raw.isprintable() else quote(raw, safe=_PRINTABLE)[:128]

    def admit(self, asker: Asker, exchange: Exchange, model: _Model, slo_ms: float, client_id: str) -> Request:
        """Ask the scheduling side for one sample."""
        return self.dispatching.admit(
            model.name, asker, arrived_ms=exchange.arrived_ms, slo_ms=slo_ms, client_id=client_id,
            reserve_ms=self.margin.reserve_ms(slo_ms, model.alone_ms),
        )  # fmt: skip

    def answer_left(self, request: Request, alone_ms: float) -> None:
        """The response to an executed request has been handed to the socket: learn whether it is late."""
        left_ms = request.deadline_ms - self._clock() * 1000.0
        self.margin.answered(left_ms, request.deadline_ms - request.arrived_ms, alone_ms, request.reserve_ms)

    def gave_up(self, request: Request, alone_ms: float) -> None:
        """A request expired: note where only the margin was in its way."""
        allowance_ms = self.margin.allowance_part_ms(request.deadline_ms - request.arrived_ms, alone_ms)
        if self._clock() * 1000.0 + alone_ms <= request.deadline_ms - allowance_ms:
            self.margin.refused_for_it()

    def shown(self, executed: Executed) -> Shown:
        """Return what responses say of a batch; made once for all of its requests."""
        if self._shown.executed is not executed:
            self._shown = Shown(executed)
        return self._shown

    @property
    def now_ms(self) -> float:
        """The monotonic clock."""
        return self._clock() * 1000.0

    def close(self) -> None:
        """End the threads and let go of shared memory."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()
        self.regions.close()


class InferCall:
    """One HTTP request for inference, of one or more samples, from its body to its response.

    The core is asked before the body is parsed, where the body cannot name a deadline of its own: what it turns away
    costs no more.
    """

    __slots__ = (
        "_exchange", "_id", "_is_over", "_model", "_open", "_parsed", "_route", "_rows", "_service", "_slo_ms",
        "_traced", "_wants_classes",
    )  # fmt: skip

    def __init__(self, service: InferenceService, exchange: Exchange, route: _Route) -> None:
        assert route.model is not None
        self._service = service
        self._exchange = exchange
        self._route = route
        self._model = route.model
        self._slo_ms = route.slo_ms if route.slo_ms is not None else route.model.slo_ms
        self._id = ""  # the protocol's
        self._parsed: InferRequest | None = None  # where the plainest response will not do
        self._open: list[Request] = []  # in the order of the samples
        self._rows: dict[int, tuple[Executed, int]] = {}
        self._is_over = False
        self._wants_classes = False
        traces = service.traces
        self._traced = None if traces is None else traces.begin(route.traceparent)

    def begin(self, body: Buffer, *, is_received: bool = True) -> None:
        """Ask for what is in a body; `is_received`: it lies where the exchange received it.

        Raises:
            HttpError: the request cannot be taken.
        """
        route = self._route
        early: Request | None = None
        if route.slo_ms is not None or not _may_name_slo(body, route.json_length):
            early = self._admit(route.client_id)
            if self._is_over:
                return  # turned away, and responded to
        quick = self._model.reader.read(body) if route.json_length is None else None
        if quick is not None:
            self._id, parts = quick
            self._start([parts], early)
            return
        try:
            parsed = self._parsed = self._parse(body, is_received=is_received)
        except BaseException as error:
            self._cancel()
            if isinstance(error, BadRequestError):
                raise HttpError(400, str(error)) from None
            raise
        self._id = parsed.id
        if parsed.slo_ms is not None and route.slo_ms is None:
            self._slo_ms = parsed.slo_ms
        self._start(parsed.parts, early)

    def begin_decoded(self, parts: list[InputPart]) -> None:
        """Ask for one sample that is decoded already; the response names classes."""
        self._wants_classes = True
        self._start([parts], None)

    def _parse(self, body: Buffer, *, is_received: bool) -> InferRequest:
        exchange = self._exchange
        slot = exchange.slots[0] if is_received and exchange.is_in_slot else None
        served = self._model.served
        assert served is not None
        parsed = parse_infer(
            body,
            self._route.json_length,
            served.inputs,
            arena="" if slot is None else slot.arena,
            offset=0 if slot is None else slot.offset,
            read_region=functools.partial(self._service.regions.read, exchange),
        )
        check_outputs(parsed.outputs, served.outputs)
        return parsed

    def _admit(self, client_id: str) -> Request:
        request = self._service.admit(self, self._exchange, self._model, self._slo_ms, client_id)
        self._open.append(request)
        return request

    def _start(self, samples: Sequence[Sequence[InputPart]], early: Request | None) -> None:
        exchange = self._exchange
        exchange.on_left = self._cancel
        dispatching = self._service.dispatching
        memory: Held | None = None
        if exchange.slots:
            memory = exchange.slots[0] if len(exchange.slots) == 1 else HeldTogether(tuple(exchange.slots))
        name = self._service.request_id(self._id or self._route.client_id)
        for parts in samples:
            request = early or self._admit(name)
            early = None
            if self._is_over:
                return
            request.client_id = name
            dispatching.start(request, parts, memory)

    def _cancel(self) -> None:
        """The client is gone, or nobody waits for the rest of its samples."""
        self._is_over = True
        for request in self._open:
            if request.id not in self._rows:
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
            self._trace(request, {"waiting": (request.arrived_ms, self._service.now_ms)}, refused.outcome.word)
        self._cancel()

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """A sample was executed; the last one makes the response."""
        if self._is_over:
            return
        try:
            self._rows[request.id] = (executed, row)
            parsed = self._parsed
            if parsed is not None and len(self._rows) < len(parsed.parts):
                return
            self._is_over = True
            if self._wants_classes:
                self._respond_with_classes(request, executed, row)
            elif parsed is None or (parsed.is_plain and len(parsed.parts) == 1):
                self._respond(request, executed, row)
            else:
                self._respond_as_asked(parsed)
            self._service.answer_left(request, self._model.alone_ms)
            if self._traced is not None:
                self._trace_executed(request, executed)
        except Exception as error:
            _crash(self._exchange, error)

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
        outcome = "ok" if self._service.now_ms <= request.deadline_ms else "late"
        self._trace(
            request,
            {
                "batching": (request.arrived_ms, sent_ms), "gpulet_queue": (sent_ms, start_ms),
                "execution": (start_ms, end_ms), "answering": (end_ms, self._service.now_ms),
            },
            outcome, gpulet=executed.gpulet, batch_size=executed.batch_size, emulated=executed.emulated,
        )  # fmt: skip

    def _trace(
        self, request: Request, stages: Mapping[str, tuple[float, float]], outcome: str, **about: Any
    ) -> None:
        traces, traced = self._service.traces, self._traced
        if traces is not None and traced is not None:
            named = {"model": self._model.name, "outcome": outcome, "request_id": request.client_id, **about}
            traces.end(traced, arrived_ms=request.arrived_ms, stages=stages, about=named)

    def _respond(self, request: Request, executed: Executed, row: int) -> None:
        """Send the plainest response: all outputs of one sample as JSON."""
        shown = self._service.shown(executed)
        writer = self._model.writer
        if not writer.knows(executed.outputs):
            self._respond_as_asked(InferRequest(self._id, [[]], None, False, None))
            return
        batching_ms = executed.sent_ms - request.arrived_ms
        parameters = shown.parameters(batching_ms)
        payload = writer.write(shown.arrays, row, parameters, self._id)
        self._reply(200, shown.lines(request, batching_ms) + JSON, [payload])

    def _respond_as_asked(self, parsed: InferRequest) -> None:
        """Send what was asked for, of every sample; the times are those of the slowest."""
        rows = [self._rows[request.id] for request in self._open]
        executed, slowest = max(
            ((executed, request) for (executed, _), request in zip(rows, self._open, strict=True)),
            key=lambda pair: pair[0].sent_ms + pair[0].gpulet_queue_ms + pair[0].execution_ms - pair[1].arrived_ms,
        )
        shown = self._service.shown(executed)
        batching_ms = executed.sent_ms - slowest.arrived_ms
        served = self._model.served
        try:
            text, binary = encode_response(
                self._model.name,
                parsed,
                [each.tensors(row) for each, row in rows],
                orjson.loads(shown.parameters(batching_ms)),
                served.labels if served is not None else (),
                self._service.regions.write,
            )
        except BadRequestError as error:
            _fail(self._exchange, HttpError(400, str(error)))
            return
        lines = shown.lines(slowest, batching_ms)
        if binary:
            self._reply(200, lines + _BINARY % len(text), [text, *binary])
        else:
            self._reply(200, lines + JSON, [text])

    def _respond_with_classes(self, request: Request, executed: Executed, row: int) -> None:
        shown = self._service.shown(executed)
        served = self._model.served
        assert served is not None
        batching_ms = executed.sent_ms - request.arrived_ms
        document = {
            "model_name": self._model.name,
            "predictions": served.postprocess(executed.tensors(row)),
            "parameters": orjson.loads(shown.parameters(batching_ms)),
        }
        self._reply(200, shown.lines(request, batching_ms) + JSON, [orjson.dumps(document)])


class Shown:
    """What the responses to the requests of one batch say of it, made ready once for all of them."""

    def __init__(self, executed: Executed | None = None) -> None:
        self.executed = executed
        if executed is None:
            return
        self.arrays = executed.arrays()
        execution_ms, size, gpulet = executed.execution_ms, executed.batch_size, executed.gpulet
        emulated = b"true" if executed.emulated else b"false"
        self._parameters = b',"execution_ms":%.3f,"batch_size":%d,"gpulet":%b,"emulated":%b}' % (
            execution_ms, size, orjson.dumps(gpulet), emulated
        )  # fmt: skip
        self._lines = b"x-tenuto-execution-ms: %.3f\r\nx-tenuto-batch-size: %d\r\nx-tenuto-gpulet: %b\r\n" % (
            execution_ms, size, gpulet.encode()
        )  # fmt: skip

    def parameters(self, batching_ms: float) -> bytes:
        """Return the response parameters of one request as JSON."""
        assert self.executed is not None
        queue_ms = batching_ms + self.executed.gpulet_queue_ms
        return b'{"queue_ms":%.3f,"batching_ms":%.3f%b' % (queue_ms, batching_ms, self._parameters)

    def lines(self, request: Request, batching_ms: float) -> bytes:
        """Return the times of one request as raw header lines."""
        assert self.executed is not None
        queue_ms = batching_ms + self.executed.gpulet_queue_ms
        lines = b"x-tenuto-queue-ms: %.3f\r\nx-tenuto-batching-ms: %.3f\r\n%bx-tenuto-request-id: %b\r\n" % (
            queue_ms, batching_ms, self._lines, request.client_id.encode()
        )  # fmt: skip
        start_ms = self.executed.started_ms - request.arrived_ms
        return lines if math.isnan(start_ms) else b"%bx-tenuto-start-ms: %.3f\r\n" % (lines, start_ms)


def _fail(exchange: Exchange, error: HttpError) -> None:
    exchange.respond(error.status, error.lines(), [error.payload()])


def _crash(exchange: Exchange, error: Exception) -> None:
    logger.error("a request to %r failed", exchange.head.url, exc_info=error)
    _fail(exchange, HttpError(500, f"internal error: {type(error).__name__}: {error}"))


def _slo_of(headers: Mapping[bytes, bytes]) -> float | None:
    """Return what header X-SLO-Ms says; raises `HttpError` 400 for what is no number."""
    raw = headers.get(b"x-slo-ms")
    if raw is None:
        return None
    try:
        return parse_slo(raw.decode("latin-1"), "header X-SLO-Ms")
    except BadRequestError as error:
        raise HttpError(400, str(error)) from None


def _began_s(headers: Mapping[bytes, bytes]) -> float | None:
    """Return when a proxy in front took a request, in Unix time; None where it does not say so in a way that is known.

    X-Request-Start is written in seconds by nginx (`t=${msec}`), in ms by others, in µs by Apache (`t=%t`).
    """
    raw = headers.get(b"x-request-start")
    if raw is None:
        return None
    text = raw.removeprefix(b"t=")[:32]
    if not text.replace(b".", b"", 1).isdigit():
        return None
    began = float(text)
    return began / (1e6 if began > 1e14 else 1e3 if began > 1e11 else 1.0)


def _named_model(url: bytes) -> str:
    """Return the model that a path names, whatever is asked of it; empty where it names none."""
    parts = url.partition(b"?")[0].decode("latin-1").split("/")
    return unquote(parts[3]) if len(parts) > 3 and parts[1:3] == ["v2", "models"] else ""


def _may_name_slo(body: Buffer, json_length: int | None) -> bool:
    """Whether a body could name a deadline of its own, so that it has to be parsed first; long JSON is."""
    if (len(body) if json_length is None else json_length) > _SCANNED_BYTES:
        return True
    text = body if isinstance(body, bytes) and json_length is None else bytes(body[:json_length])
    return b"slo_ms" in text or b"timeout" in text or b"\\u" in text


def _load_path(url: bytes) -> tuple[str, str]:
    """Return (infer|predict, model) for the two paths that carry load, else two empty strings."""
    parts = url.partition(b"?")[0].decode("latin-1").split("/")
    if len(parts) == 5 and parts[1] == "v2" and parts[2] == "models" and parts[4] == "infer":
        return "infer", unquote(parts[3])
    if len(parts) == 7 and parts[1:3] == ["v2", "models"] and parts[4:] == ["versions", "1", "infer"]:
        return "infer", unquote(parts[3])
    if len(parts) == 3 and parts[1] == "predict":
        return "predict", unquote(parts[2])
    return "", ""


def _alone_ms(plan: Plan, model: str) -> float:
    """Return what a batch of one request takes on the fastest gpu-let of a model; 0 where nothing hosts it."""
    found = [
        program.latency.at(1) * program.slowdown
        for gpulet in plan.gpulets
        for program in gpulet.programs
        if model in program.models and program.latency is not None
    ]
    return min(found, default=0.0)
