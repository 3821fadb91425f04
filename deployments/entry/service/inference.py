"""Handles a request before it is a call: routes it, checks its key, refuses it early if possible, and decodes large
ones in a thread. `InferCall` does the rest."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from tenuto.deployments.dispatch.histogram import Histogram, buckets_around
from tenuto.deployments.entry.http.bounded_cache import BoundedCache
from tenuto.deployments.entry.http.exchange import Exchange, Head, HttpError, expired, fail, inflated, refuse
from tenuto.deployments.entry.http.framing import MOST_CACHED_HEADS
from tenuto.deployments.entry.http.relay import is_upload
from tenuto.deployments.entry.protocols.embeddings import (
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TextBody,
    TextQuestion,
    read_question,
)
from tenuto.deployments.entry.protocols.oip_requests import (
    JSON_AT_ONCE_BYTES,
    JSON_TOO_LARGE,
    MOST_JSON_BYTES,
    DescribedRequest,
    InferRequest,
    named_slo_ms,
)
from tenuto.deployments.entry.protocols.openai import GenerationRequest, read_generation
from tenuto.deployments.entry.protocols.openai_bodies import ChatBody, CompletionBody, GenerateBody, read_body
from tenuto.deployments.entry.protocols.texts import (
    MOST_TEXT_BYTES,
    TEXT_AT_ONCE_BYTES,
    TEXTS_TOO_LARGE,
    TOO_MANY_TOKENS,
)
from tenuto.deployments.entry.service.application_call import ApplicationCall
from tenuto.deployments.entry.service.application_counters import ApplicationCounters
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.generation_call import GenerationCall
from tenuto.deployments.entry.service.infer_call import InferCall
from tenuto.deployments.entry.service.margin import Margin
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.entry.service.reading_lag import ReadingLag
from tenuto.deployments.entry.service.routing import OPENAI_ACTIONS, Route, allowed_ms, load_path, named_model, route_to
from tenuto.deployments.entry.service.schema_checks import SchemaChecks
from tenuto.deployments.entry.service.served_models import ServedModels, no_plan
from tenuto.deployments.entry.service.traces import Traces
from tenuto.deployments.entry.service.traffic_split import CopiedCall, Split
from tenuto.deployments.entry.service.waking_models import IdleModelError
from tenuto.deployments.security.cross_site import refusal_reason
from tenuto.deployments.security.guesses import Guesses
from tenuto.deployments.security.keys import Caller, Callers, presented_key
from tenuto.deployments.wire.arena import Arena
from tenuto.deployments.wire.tensors import Buffer, RequestInputs

T = TypeVar("T")

_PRINTABLE = "".join(chr(code) for code in range(33, 127) if code != ord("%"))
_SITE = {name: name.encode() for name in ("host", "origin", "sec-fetch-site", "sec-fetch-mode")}
_MOST_MANAGEMENT_BYTES = 1 << 16  # limit: of requests that carry no load: the application reads them on the loop
_MANAGEMENT_TOO_LARGE = (
    f"the body exceeds {_MOST_MANAGEMENT_BYTES >> 10} KiB. Only inference and files take large ones."
)
_LONGEST_BEFORE_S = 60.0  # limit: a proxy that says more has another clock
WITHOUT_KEY = (b"/v2/health/", b"/health")  # load balancers have none
_BEARER = b"www-authenticate: Bearer\r\n"
_GENERATIONS: dict[str, type[CompletionBody] | type[ChatBody] | type[GenerateBody]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "generate": GenerateBody,
    "generate_stream": GenerateBody,
}
_TEXTS: dict[str, type[TextBody]] = {"embeddings": EmbeddingBody, "rerank": RerankBody, "score": ScoreBody}
_DECODERS = min(4, os.cpu_count() or 1)
_MOST_DECODING = 64  # limit: pictures and texts that wait for a thread; what comes then is turned away


def _json_length(head: Head) -> int | None:
    """Return how long the JSON before binary tensors is, in bytes; None where the body is all JSON. Raises `HttpError`
    400 for what is no such number."""
    length = head.headers.get(b"inference-header-content-length")
    if length is None or (length.isdigit() and len(length) < 12):
        return None if length is None else int(length)
    raise HttpError(
        400, f"Inference-Header-Content-Length is {length.decode('latin-1')[:32]!r}. Give a number of bytes."
    )


class InferenceService:
    """Answers the requests that carry load. Invariant: every exchange is responded to exactly once, or left."""

    def __init__(
        self, manage: Callable[[Exchange, Caller | None], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare without a plan.

        Args:
            manage: answers every other request, of a client that is known or not.
            clock: monotonic seconds.
        """
        self.margin = Margin()
        self.lag = ReadingLag()
        self.callers = Callers()
        self.guesses = Guesses()
        # Names by which clients may call this server, besides those of this machine; None: any name.
        self.host_names: frozenset[str] | None = frozenset()
        self.traces: Traces | None = None
        self.proxied: dict[str, Histogram] = {}  # by model: seconds in a proxy in front, if it says so
        self.max_body_bytes = 64 << 20
        self.arena: Arena | None = None  # what stages of applications hand on lies there
        self._manage = manage
        self._clock = clock
        self._dispatching: Dispatching | None = None
        self.models = ServedModels(self.callers)
        self.application_counters = ApplicationCounters()
        self._routes: BoundedCache[Head, Route] = BoundedCache(MOST_CACHED_HEADS)  # by the present plan
        self._latest: tuple[Head, Route] | None = None  # likewise; most bodies come with their heads
        self._id_prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(_DECODERS, "decode")
        self._schemas = SchemaChecks()
        self._decoding = 0

    def follow(self, dispatching: Dispatching) -> None:
        """Send requests to a scheduling side, by its present plan. Call this again when the plan has changed, or what
        gpu-lets hold."""
        self._dispatching = dispatching
        self._forget_routes()
        self.models.follow(dispatching)
        self.application_counters.follow([each.application for each in self.models.applications.values()])

    @property
    def dispatching(self) -> Dispatching:
        """The scheduling side; raises `HttpError` 503 before the first plan."""
        if self._dispatching is None:
            raise no_plan()
        return self._dispatching

    # --- requests -----------------------------------------------------------------------------------------------

    def refusal(self, exchange: Exchange) -> HttpError | None:
        """Return why a request is refused before its body; called once, when its head is there."""
        head = exchange.head
        route = self._routes.get(head) or self._latest_route(head)
        problem = route.problem
        if problem is None and route.caller is None:
            return None
        if problem is not None and problem.status == 401 and presented_key(exchange.head.headers) is not None:
            wait_s = self.guesses.wait_s(exchange.address, self._clock())
            return HttpError(401, problem.message, headers=problem.headers, after_s=wait_s)
        exchange.key = "" if route.caller is None else route.caller.name
        if problem is None and route.caller is not None:
            wait_s = route.caller.wait_s(self._clock())
            if wait_s > 0.0:
                reason = f"'{route.caller.name}' asks more often than its key allows. See Retry-After."
                return HttpError(429, reason, retry_after_s=wait_s)
        return route.problem

    def handle(self, exchange: Exchange, described: DescribedRequest | None = None) -> None:
        """Answer a request whose body is there. `described`: what a request over gRPC asks for, whose body is
        tensors."""
        head = exchange.head
        route = self._routes.get(head) or self._latest_route(head)
        problem = route.problem or exchange.problem
        if problem is not None:
            fail(exchange, problem)
            return
        try:
            if route.began_s is not None and route.model is not None:
                self._count_proxy(exchange, route.model, route.began_s)
            route.handle(exchange, route, described)
        except IdleModelError as error:
            self._wait_for_start(exchange, route, described, error)
        except HttpError as error:
            refuse(exchange, error)

    def _wait_for_start(
        self, exchange: Exchange, route: Route, described: DescribedRequest | None, error: IdleModelError
    ) -> None:
        """Begin anew when the models that are asked for have started; refuse what has not the time to wait."""
        if described is not None or load_path(exchange.head.url)[0] == "predict":
            named_ms = None if described is None else described.slo_ms
        else:
            try:
                named_ms = named_slo_ms(exchange.body, _json_length(exchange.head))
            except HttpError as problem:
                refuse(exchange, problem)
                return
        slo_ms = allowed_ms(exchange, route, error.model, offline=route.offline, named_ms=named_ms)
        due_ms = exchange.arrived_ms + slo_ms
        started = self.models.waking.wake(error, self.dispatching, due_ms / 1000.0 - self._clock())
        if started is None:
            refuse(exchange, error.without_frames())
        else:
            self.wait_for(exchange, started, lambda _: self.handle(exchange, described), due_ms)

    def _forget_routes(self) -> None:
        self._routes.clear()
        self._latest = None

    def _latest_route(self, head: Head) -> Route:
        """Return the route of a head that is not cached; found once when nothing comes between head and body."""
        if self._latest is None or self._latest[0] is not head:
            self._latest = head, self._route(head)
        return self._latest[1]

    def _route(self, head: Head) -> Route:
        """Find what a head leads to, once for each head and plan, and return it."""
        action, name, version = load_path(head.url)
        caller = None
        try:
            self._check_site(head)
            caller = self._caller(head, name)
            if action and head.method != b"POST":
                method = head.method.decode("latin-1")
                raise HttpError(405, f"{method} is not taken here. Send POST.", headers=b"allow: POST\r\n")
            if not action:
                if head.length > _MOST_MANAGEMENT_BYTES and not is_upload(head.url):
                    raise HttpError(413, _MANAGEMENT_TOO_LARGE)
                route = Route(self._answer_management, caller=caller)
            elif action in OPENAI_ACTIONS:
                route = self._text_route(action, None, head)._replace(caller=caller)
            else:
                route = self._load_route(action, self.models.find_model(name, version), head)
                if not version and name in self.models.splits:
                    route = self._split_route(action, self.models.splits[name], head, route)
                route = route._replace(caller=caller)
        except IdleModelError as error:  # each request wakes it, or waits
            route = route_to(self._ask_anew, error.model, head)._replace(caller=caller)
        except HttpError as error:
            route = Route(lambda _exchange, _route, _described: None, problem=error.without_frames())
        if caller is not None and caller.entry.offline:
            route = route._replace(offline=True)
        return self._routes.add(head, route) if head.is_cached else route

    def _ask_anew(self, exchange: Exchange, route: Route, described: DescribedRequest | None) -> None:
        """Answer a request for a model that was asleep when its route was made."""
        assert route.model is not None
        self.models.ready_interface(route.model)
        self._forget_routes()
        self.handle(exchange, described)

    def _check_site(self, head: Head) -> None:
        """Raise `HttpError` 403 if the page of another site may have asked and only this machine may ask."""
        if self.host_names is not None:
            said = {name: head.headers[key].decode("latin-1") for name, key in _SITE.items() if key in head.headers}
            reason = refusal_reason(said, self.host_names)
            if reason is not None:
                raise HttpError(403, reason)

    def _answer_management(self, exchange: Exchange, route: Route, _described: DescribedRequest | None) -> None:
        if len(exchange.body) > _MOST_MANAGEMENT_BYTES:
            raise HttpError(413, _MANAGEMENT_TOO_LARGE)
        self._manage(exchange, route.caller)

    def _caller(self, head: Head, model: str) -> Caller | None:
        """Return who asks; None if clients need no keys.

        Raises:
            HttpError: 401 without a key that is known, 403 for a model that is not among those of the key.
        """
        if not self.callers or head.url.startswith(WITHOUT_KEY):
            return None
        key = presented_key(head.headers)
        if key is None:
            raise HttpError(401, "no key. Send `Authorization: Bearer KEY`, or X-Api-Key.", headers=_BEARER)
        caller = self.callers.find(key)
        if caller is None:
            raise HttpError(401, "this key is not known here. Ask who runs this server for one.", headers=_BEARER)
        named = model or named_model(head.url)
        if named and not caller.may_ask(named):
            raise HttpError(403, f"the key of '{caller.name}' is not for model '{named}'.")
        return caller

    def _count_proxy(self, exchange: Exchange, model: PlannedModel, began: float) -> None:
        """Take the time before this process as part of the request's: its deadline counts from where it began. Once,
        also where the request begins anew as its model was asleep."""
        if exchange.has_proxy_time:
            return
        exchange.has_proxy_time, before_s = True, time.time() - began
        if 0.0 <= before_s < _LONGEST_BEFORE_S:
            exchange.arrived_ms -= before_s * 1000.0
            histogram = self.proxied.get(model.name)
            if histogram is None:
                histogram = self.proxied[model.name] = Histogram(buckets_around(model.slo_ms))
            histogram.add(before_s)

    def _load_route(self, action: str, model: PlannedModel, head: Head) -> Route:
        generates = self.models.ready_interface(model).signature.generates is not None
        application = self.models.applications.get(model.name)
        interface = None if application is None else application.interface
        is_streamed = interface is not None and action == "generate_stream"
        if is_streamed and interface is not None and interface.streamed is None:
            rule = "has no stream: the workload does not say that it `streams`"
            raise HttpError(400, f"'{model.model}' {rule}. Ask /v2/models/MODEL/infer.")
        if not is_streamed and generates != (action in _GENERATIONS):
            cure = "Ask /v1/completions." if generates else "Ask /v2/models/MODEL/infer."
            does = "generates: it takes no tensors" if generates else "has no language-modelling head"
            raise HttpError(400, f"'{model.model}' {does}. {cure}")
        if generates:
            return self._text_route(action, model, head)
        json_length = _json_length(head)
        if action != "predict" and (head.length if json_length is None else json_length) > MOST_JSON_BYTES:
            raise HttpError(413, JSON_TOO_LARGE)
        route = route_to(self._predict if action == "predict" else self._infer, model, head)
        call: Any = InferCall
        if application is not None:
            call = partial(ApplicationCall, _application=application, _interface=application.interface)
        if is_streamed:
            call = partial(call, _is_streamed=True)
        return route._replace(json_length=json_length, call=call)

    def _text_route(self, action: str, model: PlannedModel | None, head: Head) -> Route:
        """Return the route of texts in JSON; of OpenAI's interface only the body names the model."""
        if head.length > MOST_TEXT_BYTES:
            raise HttpError(413, TEXTS_TOO_LARGE)
        handle = self._ask_of_texts if action in _TEXTS else self._generate
        return route_to(handle, model, head)._replace(action=action)

    def _split_route(self, action: str, split: Split, head: Head, rest: Route) -> Route:
        """Return the route of requests that name no version: to one of those that can be asked."""
        to = [(below, self._load_route(action, self.models[name], head)) for below, name in split.canaries]
        to.append((math.inf, rest))
        if split.shadows:
            call = partial(CopiedCall, _copies=self.models.copies)
            to = [(below, route._replace(call=call, shadows=split.shadows)) for below, route in to]
        return rest._replace(handle=self._split, began_s=None, split=tuple(to))

    def _split(self, exchange: Exchange, route: Route, described: DescribedRequest | None) -> None:
        drawn = random.random()
        for below, chosen in route.split:
            if drawn < below:
                if chosen.began_s is not None and chosen.model is not None:
                    self._count_proxy(exchange, chosen.model, chosen.began_s)
                chosen = chosen._replace(offline=True) if route.offline else chosen
                chosen.handle(exchange, chosen, described)
                return

    def _infer(self, exchange: Exchange, route: Route, described: DescribedRequest | None) -> None:
        model: Any = route.model  # a `PlannedModel`: only routes of models lead here
        slo_ms = allowed_ms(exchange, route, model, offline=route.offline)
        self.lag.check_wait(exchange.arrived_ms, slo_ms, self._clock() * 1000.0)
        call: InferCall
        call, encoding = self._call(exchange, route, model, slo_ms, described), route.encoding
        json_bytes = len(exchange.body) if route.json_length is None else route.json_length
        if model.reader.takes_bytes:  # each element is looked at, wherever it lies
            is_short = len(exchange.body) <= JSON_AT_ONCE_BYTES
        else:
            is_short = json_bytes <= JSON_AT_ONCE_BYTES or described is not None
        if encoding is None and is_short:
            call.begin()
            return
        limit = MOST_JSON_BYTES if route.json_length is None else self.max_body_bytes

        def parse() -> InferRequest:
            if encoding is None:
                return call.parse(exchange.body, exchange.slot)
            return call.parse(inflated(exchange.body, encoding, limit))

        self._aside(exchange, parse, call.begin_parsed)

    def _generate(self, exchange: Exchange, route: Route, _described: DescribedRequest | None) -> None:
        """Answer a request for generation."""
        read = partial(self._read_generation, route=route)
        self._read_texts(exchange, route, read, lambda found: self._begin_checked(exchange, route, *found))

    def _ask_of_texts(self, exchange: Exchange, route: Route, _described: DescribedRequest | None) -> None:
        """Answer a question about texts: for their vectors, or how relevant they are."""
        read = partial(self._read_question, route=route)
        self._read_texts(exchange, route, read, lambda found: self._begin_question(exchange, route, *found))

    def _read_texts(
        self, exchange: Exchange, route: Route, read: Callable[[bytes], T], then: Callable[[T], None]
    ) -> None:
        """Read a body, and go on with what it asks. Large ones are read in threads: tokenizers take their time."""
        if len(exchange.body) > MOST_TEXT_BYTES:
            raise HttpError(413, TEXTS_TOO_LARGE)

        def work() -> T:
            body = bytes(exchange.body)
            return read(body if route.encoding is None else inflated(body, route.encoding, MOST_TEXT_BYTES))

        if route.encoding is None and len(exchange.body) <= TEXT_AT_ONCE_BYTES:
            then(work())
        else:
            self._aside(exchange, work, then)

    def _read_question(self, body: bytes, route: Route) -> tuple[PlannedModel, Split | None, TextQuestion]:
        """Return the model that is asked, how its requests are split, and what it is asked."""
        parsed = read_body(_TEXTS[route.action], body)
        model, split = self._named_in_body(route, parsed.model)
        return model, split, read_question(parsed, model.model, self.models.ready_interface(model).signature)

    def _begin_question(
        self, exchange: Exchange, route: Route, model: PlannedModel, split: Split | None, question: TextQuestion
    ) -> None:
        """Ask for all texts of a request, which has one deadline."""
        route = route._replace(offline=True) if question.offline else route
        slo_ms = allowed_ms(exchange, route, model, offline=route.offline)
        self._check_rates(exchange, route, slo_ms, question.tokens)
        if route.caller is not None:
            route.caller.begin_text(question.tokens, 0)
        call: Any = InferCall
        if split is not None and split.shadows:
            call, route = partial(CopiedCall, _copies=self.models.copies), route._replace(shadows=split.shadows)
        samples = self.models.ready_interface(model).text_samples(question.texts)
        self._call(exchange, route._replace(call=call), model, slo_ms).begin_decoded(samples, question.write)

    def _begin_checked(
        self, exchange: Exchange, route: Route, model: PlannedModel, asked: GenerationRequest, own_id: str
    ) -> None:
        """Begin generations, when the schema that they keep is one that can be kept."""
        schema = asked.choices[0].sampling.schema
        if not schema or self._schemas.is_known(schema):
            self._begin_generation(exchange, route, model, asked, own_id)
            return
        due_ms = exchange.arrived_ms + allowed_ms(
            exchange, route, model, offline=asked.offline or route.offline or model.offline
        )
        checked = self._schemas.check(schema, due_ms)
        self.wait_for(
            exchange, checked, lambda _: self._begin_generation(exchange, route, model, asked, own_id), due_ms
        )

    def _read_generation(self, body: bytes, route: Route) -> tuple[PlannedModel, GenerationRequest, str]:
        """Return the model that is asked, what it is asked for, and the id that the body gives the request."""
        parsed = read_body(_GENERATIONS[route.action], body)
        model = route.model
        if isinstance(parsed, GenerateBody):
            assert model is not None
            own_id = parsed.id
        else:
            own_id = ""
            model, _ = self._named_in_body(route, parsed.model)
        limits = self.models.ready_interface(model).signature.generates
        if limits is None:
            raise HttpError(400, f"'{model.model}' has no language-modelling head. Ask /v2/models/MODEL/infer.")
        is_streamed = route.action == "generate_stream"
        return model, read_generation(parsed, model.model, model.tokenizer, limits, is_streamed=is_streamed), own_id

    def _named_in_body(self, route: Route, name: str) -> tuple[PlannedModel, Split | None]:
        """Return the model that a body names, or one of its versions, and how its requests are split if they are."""
        if route.caller is not None and not route.caller.may_ask(name):
            raise HttpError(403, f"the key of '{route.caller.name}' is not for model '{name}'.")
        split = self.models.splits.get(name)
        return (self.models.find_model(name) if split is None else self.models[split.choose(random.random())]), split

    def _check_rates(self, exchange: Exchange, route: Route, slo_ms: float, tokens: int) -> None:
        """Refuse a request that is read too late, or of a client that uses more tokens than its key allows: with these
        at most."""
        now_s = self._clock()
        self.lag.check_wait(exchange.arrived_ms, slo_ms, now_s * 1000.0)
        wait_s = 0.0 if route.caller is None else route.caller.text_wait_s(now_s, tokens)
        if route.caller is not None and wait_s > 0.0:
            raise HttpError(429, TOO_MANY_TOKENS.format(route.caller.name), retry_after_s=wait_s)

    def _begin_generation(
        self, exchange: Exchange, route: Route, model: PlannedModel, asked: GenerationRequest, own_id: str
    ) -> None:
        offline = asked.offline or route.offline or model.offline
        ttft_ms = allowed_ms(exchange, route, model, offline=offline)
        most = sum(len(choice.prompt) + choice.sampling.max_tokens for choice in asked.choices)
        self._check_rates(exchange, route, ttft_ms, most)
        traced = None if self.traces is None else self.traces.begin(route.traceparent, exchange.arrived_ms)
        name = self.request_id(own_id or route.client_id)
        call = GenerationCall(self, self.dispatching, exchange, asked, model.tokenizer, name, traced, route.caller)
        own_ms = math.inf if offline else model.tpot_ms
        tpot_ms = own_ms if route.tpot_ms is None else route.tpot_ms
        call.begin(model.name, ttft_ms=ttft_ms, tpot_ms=tpot_ms, offline=offline)

    def _predict(self, exchange: Exchange, route: Route, _described: DescribedRequest | None) -> None:
        """Answer a raw image or text. Decoding and resizing are real work: in threads, where they delay no timer."""
        model = route.model
        assert model is not None
        interface, application = self.models.ready_interface(model), self.models.applications.get(model.name)
        preprocess: Callable[[Buffer], RequestInputs] = interface.preprocess
        hooks = model.hooks
        if application is not None and application.decoder is not None:
            interface, hooks = self.models.ready_interface(application.decoder), application.decoder.hooks
            preprocess = interface.preprocess
        elif application is not None:
            preprocess = application.take_body
        limit = self.max_body_bytes if hooks is not None or interface.signature.text is None else MOST_TEXT_BYTES
        if len(exchange.body) > limit:
            raise HttpError(413, f"a text may have {limit >> 10} KiB. Send less of it.")
        slo_ms = allowed_ms(exchange, route, model, offline=route.offline)
        due_ms = exchange.arrived_ms + slo_ms
        latest_ms = due_ms - model.alone_ms - model.after_ms
        if self._clock() * 1000.0 > latest_ms:
            raise expired()

        def plain() -> Buffer:
            return exchange.body if route.encoding is None else inflated(exchange.body, route.encoding, limit)

        def begin(sample: RequestInputs, body: Buffer) -> None:
            self._call(exchange, route, model, slo_ms).begin_decoded([sample], request=body)

        def read() -> tuple[RequestInputs, Buffer]:
            body = plain()
            return preprocess(body), body

        if hooks is None:
            self._aside(exchange, read, lambda found: begin(*found), due_ms)
            return
        pool = hooks

        def begin_hooks(body: Buffer) -> None:
            made = pool.preprocess(body, latest_ms)
            self.wait_for(exchange, made, lambda sample: begin(sample, body), due_ms)

        if route.encoding is None:
            begin_hooks(exchange.body)
        else:
            self._aside(exchange, plain, begin_hooks, due_ms)

    def _call(
        self,
        exchange: Exchange,
        route: Route,
        model: PlannedModel,
        slo_ms: float,
        described: DescribedRequest | None = None,
    ) -> Any:
        traced = None if self.traces is None else self.traces.begin(route.traceparent, exchange.arrived_ms)
        call = route.call(self, self.dispatching, exchange, route, model, slo_ms, traced, described)
        if route.offline or model.offline:
            call.run_offline()
        return call

    def _aside(
        self, exchange: Exchange, work: Callable[[], T], then: Callable[[T], None], due_ms: float = math.inf
    ) -> None:
        """Run something in a thread, and go on with its result on the loop; `due_ms` as in `wait_for`."""
        if self._decoding >= _MOST_DECODING:
            raise HttpError(429, f"{_MOST_DECODING} bodies wait to be decoded. Retry in a second.", retry_after_s=1.0)
        self._decoding += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._decoded)
        self.wait_for(exchange, future, then, due_ms)

    def _decoded(self, _done: object) -> None:
        self._decoding -= 1

    def wait_for(self, exchange: Exchange, result: asyncio.Future[T], then: Callable[[T], None], due_ms: float) -> None:
        """Go on with a result when it is there. The request expires when it is not there at `due_ms`, on the monotonic
        clock."""

        def expire() -> None:
            if result.cancel():
                fail(exchange, expired())

        timer = None
        if due_ms < math.inf:
            left_s = max(0.0, due_ms / 1000.0 - self._clock())
            timer = asyncio.get_running_loop().call_later(left_s, expire)
        exchange.on_left = result.cancel
        result.add_done_callback(lambda done: self._resume(exchange, done, then, timer))

    def _resume(
        self, exchange: Exchange, done: asyncio.Future[T], then: Callable[[T], None], timer: asyncio.TimerHandle | None
    ) -> None:
        if timer is not None:
            timer.cancel()
        if done.cancelled():
            return  # the client has left, or was answered
        exchange.on_left = None
        error = done.exception()  # raised here it would hold this frame, and this frame it
        if isinstance(error, IdleModelError):
            self._wait_for_start(exchange, self._latest_route(exchange.head), None, error)
            return
        if error is not None:
            refuse(exchange, error)
            return
        try:
            then(done.result())
        except Exception as raised:
            refuse(exchange, raised)

    def request_id(self, raw: str) -> str:
        """Return the name of a request: its client's name for it, else one that is made here.

        The name goes into headers and logs. So characters that are not printable ASCII are percent-encoded, and 128
        characters are kept.
        """
        if not raw:
            return f"{self._id_prefix}-{next(self._numbers)}"
        return raw[:128] if raw.isascii() and raw.isprintable() else quote(raw, safe=_PRINTABLE)[:128]

    def gave_up(self, arrived_ms: float, deadline_ms: float, alone_ms: float) -> None:
        """A request expired: note whether only the margin prevented it."""
        allowance_ms = self.margin.allowance_ms(deadline_ms - arrived_ms, alone_ms)
        if self._clock() * 1000.0 + alone_ms <= deadline_ms - allowance_ms:
            self.margin.refused_for_it()

    @property
    def now_ms(self) -> float:
        """The monotonic clock."""
        return self._clock() * 1000.0

    def close(self) -> None:
        """End the threads and the processes of hooks."""
        self.models.close()
        self._forget_routes()  # they lead back here
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._schemas.close()
