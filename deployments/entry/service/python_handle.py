"""Asks a running Tenuto from Python, without HTTP, from any process of the Ray cluster on which it serves.

A request through a Serve handle costs 3 to 4 ms of processor time. So the handle asks the entry application only once,
where its dispatchers listen. Requests go there over sockets in bundles, as between gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tenuto.deployments.entry.http.exchange import HttpError
from tenuto.deployments.entry.protocols.oip_requests import parse_slo
from tenuto.deployments.entry.protocols.openai import GenerationRequest, read_generation
from tenuto.deployments.entry.protocols.openai_bodies import CompletionBody, made_body
from tenuto.deployments.entry.protocols.texts import GrowingText, Tokenizer, tokenizer_of
from tenuto.deployments.entry.service.dispatcher_client import DispatcherClient
from tenuto.deployments.entry.service.dispatching import ask
from tenuto.deployments.entry.service.generation_call import CollectedTokens
from tenuto.deployments.entry.service.margin import Margin
from tenuto.deployments.entry.service.planned_application import PlannedApplication
from tenuto.deployments.entry.service.planned_model import ModelInterface, PlannedModel
from tenuto.deployments.entry.service.running_graph import RunningGraph
from tenuto.deployments.entry.service.served_models import ServedModels
from tenuto.deployments.entry.service.stage_text import OnText
from tenuto.deployments.entry.service.waking_models import wake
from tenuto.deployments.process.limits import ANSWER_S, within
from tenuto.deployments.security.keys import Callers
from tenuto.deployments.serve.config import ENTRY_APPLICATION
from tenuto.deployments.serve.discovery import find_dispatcher, find_gateway
from tenuto.deployments.wire.answers import Answer, Refused
from tenuto.deployments.wire.arena import Arena, Slot
from tenuto.deployments.wire.status import Served
from tenuto.deployments.wire.tensors import Buffer, InputPart, OutputTensor, RequestInputs, pack_elements
from tenuto.errors import EnvironmentFaultError, InvalidInputError, Problem, UnavailableError, refused
from tenuto.outcome import Outcome
from tenuto.placement import Plan
from tenuto.placement.versions import split_name, versioned
from tenuto.profiles.networks.catalogue import BYTES, GenerationLimits, TensorSignature
from tenuto.profiles.networks.generating import Ending
from tenuto.profiles.networks.inputs import packed_bytes

_SLOT_BYTES = 1 << 14  # derived: below it a copy costs less than shared memory, as for bodies of HTTP
_ARENA_BYTES = 1 << 28  # limit: of the memory that a handle shares with gpu-lets; beyond it tensors are sent
ALONE = "gateway"  # the only sub-cluster when the gateway itself schedules


class RequestFailedError(UnavailableError):
    """A request that was not answered in time, or at all; `answer` has its outcome and reason."""

    def __init__(self, model: str, answer: Answer) -> None:
        """Take the model's name and its answer."""
        super().__init__(model, answer)
        self.answer = answer
        self._model = model

    def __str__(self) -> str:
        return f"{self._model}: {self.answer.outcome.word}: {self.answer.reason or 'no reason given'}"


class TenutoHandle:
    """A connection to what is being served. Use it on one event loop; `close` it, or use it as a context manager."""

    def __init__(self, dispatchers: DispatcherClient) -> None:
        """Take connected dispatchers, which follow a plan; `connect` is the usual way."""
        assert dispatchers.plan is not None
        self._plan = dispatchers.plan
        self._dispatchers = dispatchers
        self._margin = Margin()
        self._arena: Arena | None = None  # made for the first large input
        self._served, self._seen = ServedModels(Callers(), reads_bodies=False), -1
        self._is_closed = False

    @classmethod
    async def connect(cls, *, wait_s: float = 20.0) -> TenutoHandle:  # limit: for a gateway to answer
        """Connect to the Tenuto on the Ray cluster that this process has joined.

        Raises:
            EnvironmentFaultError: Ray is not joined, or no Tenuto runs on it.
        """
        import ray

        if not ray.is_initialized():
            raise EnvironmentFaultError("this process has not joined a Ray cluster. Call join_ray() first.")
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            handle = await asyncio.to_thread(within, ANSWER_S, serve.get_app_handle, ENTRY_APPLICATION)
            async with asyncio.timeout(ANSWER_S):
                served: Served | None = await handle.entry.remote()
        except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
            raise EnvironmentFaultError(
                f"no Tenuto runs on this Ray cluster ({error}). Start it with `tenuto serve PLAN`."
            ) from error
        if served is None:
            raise EnvironmentFaultError("Tenuto has no plan yet. Wait a moment, or apply one with `serve deploy`.")
        plan = Plan.from_data(served.plan, origin="the running Tenuto", is_whole=False)
        sub_clusters = served.sub_clusters
        find = find_dispatcher if sub_clusters else lambda _name: find_gateway()
        dispatchers = DispatcherClient(find, is_watched=False)  # its loop is the user's
        models = sub_clusters or {ALONE: tuple(spec.name for spec in plan.models)}
        await dispatchers.apply(plan, models, dispatchers=served.dispatchers, wait_s=wait_s)
        return cls(dispatchers)

    async def __aenter__(self) -> TenutoHandle:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def _models(self) -> ServedModels:
        """The plan's models as they are now."""
        if self._is_closed:
            raise UnavailableError("this handle is closed. Connect again: `await TenutoHandle.connect()`.")
        if self._seen != self._dispatchers.changes:
            self._seen = self._dispatchers.changes
            self._served.follow(self._dispatchers)
        return self._served

    @property
    def models(self) -> tuple[str, ...]:
        """The plan's models and applications that can be asked now."""
        names = [*(spec.name for spec in self._plan.models), *self._models.applications]
        return tuple(name for name in names if self._models[name].is_ready)

    def interface(self, model: str, version: str | None = None) -> ModelInterface:
        """Return the inputs and outputs of a model, or of a version of it, or of an application.

        Raises:
            InvalidInputError: the plan does not know the model, or has no such version of it.
            UnavailableError: none of its gpu-lets is ready.
        """
        planned = self._find(model, version)
        try:
            return self._models.ready_interface(planned)
        except HttpError as error:
            raise UnavailableError(error.message) from None

    def _find(self, model: str, version: str | None = None) -> PlannedModel:
        """Return a model, or a version of it, or without a version the one that takes the rest; or an application."""
        try:
            return self._models.find_model(model, version or "")
        except HttpError as error:
            reason = f"{error.message} Connect again if the plan has changed since."
            raise InvalidInputError(reason) from None

    def _wake(self, model: str, version: str | None = None) -> None:
        """Let the controller hear of a request for an idle model, or for an application with such stages."""
        application = None if version else self._models.applications.get(model)
        models = [model] if application is None else [split_name(s.model)[0] for s in application.graph.stages]
        for planned in [self._find(name, version) for name in models]:
            if self._plan.model(planned.name).idle_after_s is not None and not planned.is_ready:
                wake(self._dispatchers, planned.name)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str | None = None,
        slo_ms: float | None = None,
        request_id: str = "",
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Ask a model or an application with one sample and return its outputs by name, without the batch dimension.

        Args:
            model: name in the plan.
            inputs: one array per input of the model's signature, without the batch dimension.
            version: of the model; default: the one that the model's split chooses.
            slo_ms: time to answer, from now; default: the plan's.
            request_id: its name in `/requests` and in the records.

        Raises:
            InvalidInputError: unknown model or version, inputs that do not fit its signature, or no time.
            UnavailableError: none of its gpu-lets is ready.
            RequestFailedError: expired, rejected or failed.
        """
        slo_ms = _allowed_ms(slo_ms, "slo_ms")
        self._wake(model, version)
        parts, sizes = _parts(self.interface(model, version), inputs)
        answer = await self.submit(model, parts, slo_ms, request_id, version, sizes)
        if answer.outcome is not Outcome.OK:
            raise RequestFailedError(model, answer)
        return {t.name: t.array for t in answer.outputs}

    def submit(
        self,
        model: str,
        parts: Sequence[Buffer],
        slo_ms: float | None = None,
        request_id: str = "",
        version: str | None = None,
        sizes: tuple[int, ...] = (),
    ) -> asyncio.Future[Answer]:
        """Send one request with raw little-endian buffers, one per input, and return the future of its answer. In a
        buffer of bytes each element has its length in front, in four bytes. `sizes`: as `ModelSignature.sizes_of` gives
        them; () for a model of fixed shapes.

        Cancelling the future frees its place. Raises KeyError for an unknown model.
        """
        models = self._models
        if (application := models.applications.get(model)) is not None and not version:
            return self._submit_application(application, _GraphFuture(), parts, slo_ms, request_id, sizes)
        split = None if version else models.splits.get(model)
        name = split.choose(models.copies.draw()) if split else versioned(model, version) if version else model
        spec = self._plan.model(name)
        spec_slo_ms = spec.own_slo_ms if slo_ms is None else slo_ms
        reserve_ms = 0.0 if spec.offline else self._margin.reserve_ms(spec_slo_ms, 0.0)
        signature = self._dispatchers.signature(name)
        placed, slot = self._placed(parts, () if signature is None else signature.inputs)
        future = ask(
            self._dispatchers,
            name,
            placed,
            memory=slot,
            slo_ms=slo_ms,
            client_id=request_id,
            reserve_ms=reserve_ms,
            sizes=sizes,
            offline=spec.offline,
        )
        due_ms = _now_ms() + spec_slo_ms

        def learn(done: asyncio.Future[Answer]) -> None:
            if not done.cancelled() and done.result().outcome is Outcome.OK and not spec.offline:
                self._margin.answered(due_ms - _now_ms(), spec_slo_ms, 0.0, reserve_ms)
                if split is not None and split.shadows:
                    models.copies.send(self._dispatchers, split.shadows, [placed], slot, request_id, [sizes])
            if slot is not None:
                slot.release()

        future.add_done_callback(learn)
        return future

    def _submit_application(
        self,
        application: PlannedApplication,
        asker: _GraphFuture,
        parts: Sequence[Buffer],
        slo_ms: float | None,
        request_id: str,
        sizes: tuple[int, ...],
    ) -> asyncio.Future[Answer]:
        """Send a request of an application, as `submit` does; raises `UnavailableError` if it cannot be asked."""
        model, interface = application.model, application.interface
        if interface is None or application.problem:
            raise UnavailableError(application.problem)
        allowed_ms = model.slo_ms if slo_ms is None else slo_ms
        reserve_ms = 0.0 if model.offline else self._margin.reserve_ms(allowed_ms, model.alone_ms)
        placed, slot = self._placed(parts, interface.composed.signature.inputs)
        self._arena = self._arena or Arena(_ARENA_BYTES)
        try:
            graph = RunningGraph(
                application,
                interface,
                self._dispatchers,
                asker,
                RequestInputs(placed, sizes),
                arena=self._arena,
                slot=slot,
                body=None,
                arrived_ms=_now_ms(),
                slo_ms=allowed_ms,
                reserve_ms=reserve_ms,
                client_id=request_id,
                yields=False,
                clock_ms=_now_ms,
                on_text=asker.on_text,
                offline=model.offline,
            )
        finally:
            if slot is not None:
                slot.release()  # the graph holds it

        def learn(done: asyncio.Future[Answer]) -> None:
            if done.cancelled():
                graph.withdraw()
            elif done.result().outcome is Outcome.OK and not model.offline:
                answered_ms = _now_ms() if math.isnan(graph.first_ms) else graph.first_ms
                self._margin.answered(graph.deadline_ms - answered_ms, allowed_ms, model.alone_ms, reserve_ms)

        asker.answer.add_done_callback(learn)
        graph.begin()
        return asker.answer

    async def generate(
        self,
        model: str,
        prompt: str,
        *,
        max_tokens: int = 16,  # format: the default of OpenAI's protocol
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        slo_ms: float | None = None,
        tpot_ms: float | None = None,
        request_id: str = "",
    ) -> AsyncIterator[str]:
        """Let a model go on with a text, and give out its text part by part; leaving the loop ends the generation.

        Args:
            model: name in the plan.
            prompt: the text.
            max_tokens: the most tokens to be made.
            temperature: 0 for the likeliest tokens.
            top_p: one of the likeliest tokens that together have this probability is drawn.
            seed: of the draws.
            stop: the text ends before this string, or the first of these.
            slo_ms: time to the first token, from now; default: the plan's.
            tpot_ms: mean time for each further token; default: the plan's.
            request_id: its name in `/requests`.

        Raises:
            InvalidInputError: unknown model, one that has no tokenizer, or what the model cannot do.
            UnavailableError: none of its gpu-lets is ready.
            RequestFailedError: expired, rejected or failed.
        """
        self._limits(model)
        planned = self._find(model)
        planned.follow_texts(spec := self._plan.model(planned.name))
        if (tokenizer := planned.tokenizer or tokenizer_of(spec)) is None:  # which says why it cannot be opened
            raise refused("prompt", prompt, f"needs a tokenizer, and '{model}' has none", "Use `generate_tokens`.")
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
        asked = self._read_generation(model, tokenizer, prompt=prompt, **options)
        text = GrowingText(tokenizer, asked.stops)
        tokens = self._tokens(model, asked, slo_ms, tpot_ms, request_id)
        async with contextlib.aclosing(tokens):
            async for token in tokens:
                part = text.add(token)
                if part:
                    yield part
                if text.is_stopped:
                    return
        rest = text.end()
        if rest:
            yield rest

    async def stream(
        self, application: str, inputs: Mapping[str, Any], *, slo_ms: float | None = None, request_id: str = ""
    ) -> AsyncGenerator[str]:
        """Ask an application that streams, and give out the text of its last stage: a part for each token, which is
        empty while a character is not whole; leaving the loop ends it all.

        Args:
            application: name in the plan.
            inputs: as of `infer`.
            slo_ms: time to the first token, from now; default: the plan's.
            request_id: its name in `/requests`.

        Raises:
            InvalidInputError: unknown, no application that streams, or inputs that do not fit.
            UnavailableError: a stage has no gpu-let that is ready.
            RequestFailedError: expired, rejected or failed.
        """
        self._wake(application)
        parts, sizes = _parts(self.interface(application), inputs)
        known = self._models.applications.get(application)
        if known is None or not known.application.streams:
            raise refused("application", application, "has no stream", "Use `infer`, or `generate` for models.")
        slo_ms, came = _allowed_ms(slo_ms, "slo_ms"), asyncio.Queue[str | None]()

        def on_text(text: str, _token: int | None, finish: Ending | None) -> None:
            if text or finish is None:
                came.put_nowait(text)

        asker = _GraphFuture(on_text)
        done = self._submit_application(known, asker, parts, slo_ms, request_id, sizes)
        done.add_done_callback(lambda _: came.put_nowait(None))
        try:
            while (part := await came.get()) is not None:
                yield part
        finally:
            done.cancel()
        if (answer := done.result()).outcome is not Outcome.OK:
            raise RequestFailedError(application, answer)

    async def generate_tokens(
        self,
        model: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,  # format: the default of OpenAI's protocol
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        slo_ms: float | None = None,
        tpot_ms: float | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[int]:
        """Let a model go on with tokens, and give out its tokens; see `generate`."""
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        tokens = self._tokens(
            model, self._read_generation(model, None, prompt=_plain(prompt), **options), slo_ms, tpot_ms, request_id
        )
        async with contextlib.aclosing(tokens):
            async for token in tokens:
                yield token

    def _read_generation(self, model: str, tokenizer: Tokenizer | None, **fields: Any) -> GenerationRequest:
        """Return what is asked of a model, by the rules of /v1/completions.

        Raises:
            InvalidInputError: the model cannot do this.
        """
        limits = self._limits(model)
        try:
            return read_generation(made_body(CompletionBody, model=model, **fields), model, tokenizer, limits)
        except HttpError as error:
            raise InvalidInputError(error.message) from None

    def _limits(self, model: str) -> GenerationLimits:
        self._wake(model)
        if (limits := self.interface(model).signature.generates) is None:
            raise refused("model", model, "has no language-modelling head", "Use `infer`.")
        return limits

    async def _tokens(
        self, model: str, asked: GenerationRequest, slo_ms: float | None, tpot_ms: float | None, request_id: str
    ) -> AsyncGenerator[int]:
        """Give out the tokens of a generation."""
        slo_ms, tpot_ms = _allowed_ms(slo_ms, "slo_ms"), _allowed_ms(tpot_ms, "tpot_ms")
        name, collected = self._find(model).name, CollectedTokens()
        spec = self._plan.model(name)
        slo = spec.slo
        generation = self._dispatchers.generate(
            name,
            collected,
            asked.choices[0].prompt,
            asked.choices[0].sampling,
            ttft_ms=slo_ms if slo_ms is not None else math.inf if slo is None else slo.ttft_ms,
            tpot_ms=tpot_ms if tpot_ms is not None else math.inf if slo is None else slo.tpot_ms,
            client_id=request_id,
            offline=spec.offline,
        )
        try:
            while not isinstance(came := await collected.came.get(), Ending):
                if isinstance(came, Refused):
                    waited_ms = _now_ms() - generation.arrived_ms
                    raise RequestFailedError(model, Answer.of_refusal(waited_ms, came))
                yield came
        finally:
            self._dispatchers.leave(generation)

    def _placed(
        self, parts: Sequence[Buffer], inputs: Sequence[TensorSignature]
    ) -> tuple[list[InputPart], Slot | None]:
        """Put large inputs where gpu-lets of this machine can read them: one copy instead of four."""
        dtypes = [tensor.dtype if tensor.dtype == BYTES else "" for tensor in inputs] or [""] * len(parts)
        placed = [InputPart(memoryview(part).cast("B"), dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        size, slot, at = sum(part.nbytes for part in placed), None, 0
        if size >= _SLOT_BYTES:
            self._arena = self._arena or Arena(_ARENA_BYTES)
            slot = self._arena.take(size)
        if slot is not None:
            for index, part in enumerate(placed):
                data = slot.data[at : at + part.nbytes]
                data[:] = part.data
                placed[index] = InputPart(data, part.dtype, slot.arena, slot.offset + at)
                at += part.nbytes
        return placed, slot

    async def close(self) -> None:
        """Disconnect; what is under way fails."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._dispatchers.close()
        self._served.close()
        if self._arena is not None:
            self._arena.close()


class _GraphFuture:
    """Waits for the answer of a request of an application (`GraphAsker`), and with `on_text` for its text."""

    def __init__(self, on_text: OnText | None = None) -> None:
        self.on_text = on_text
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def completed(self, graph: RunningGraph, outputs: Sequence[OutputTensor]) -> None:
        if not self.answer.done():
            answer = Answer(Outcome.OK, list(outputs), emulated=graph.emulated, stage_ms=_stage_ms(graph))
            self.answer.set_result(answer)

    def given_up(self, graph: RunningGraph, refused: Refused) -> None:
        if not self.answer.done():
            answer = Answer.of_refusal(_now_ms() - graph.arrived_ms, refused)
            self.answer.set_result(replace(answer, stage_ms=_stage_ms(graph)))


def _stage_ms(graph: RunningGraph) -> dict[str, float]:
    return {label: stage.end_ms - stage.begin_ms for label, stage in graph.records().items()}


def _now_ms() -> float:
    return time.monotonic() * 1000.0


def _allowed_ms(given_ms: float | None, where: str) -> float | None:
    """Return the time that an argument allows; raises `InvalidInputError`."""
    try:
        return None if given_ms is None else parse_slo(given_ms, where)
    except HttpError as error:
        raise InvalidInputError(str(error)) from None


def _plain(prompt: Sequence[int]) -> list[int]:
    """Return tokens as integers of Python, whatever array they are in; raises `InvalidInputError`."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise refused("prompt", prompt, "is no sequence of tokens", "Give whole numbers.") from None


def _parts(interface: ModelInterface, inputs: Mapping[str, Any]) -> tuple[list[memoryview], tuple[int, ...]]:
    """Return the raw buffers of one sample in the signature's order, and its sizes; lists every input that does not
    fit."""
    known = [tensor.name for tensor in interface.inputs]
    problems = [
        Problem(f"inputs.{name}", name, "is no input of the model", f"Its inputs: {', '.join(known)}.")
        for name in inputs
        if name not in known
    ]
    parts = []
    shapes: list[tuple[int, ...]] = []
    for tensor in interface.inputs:
        where = f"inputs.{tensor.name}"
        if tensor.name not in inputs:
            problems.append(Problem(where, None, "is missing", "Give one array per input."))
            continue
        given, is_bytes = inputs[tensor.name], tensor.dtype == BYTES
        array = np.asarray(given, object if is_bytes else None)
        shapes.append(array.shape)
        if is_bytes:
            fits = all(type(each) is bytes for each in array.flat)
        else:
            fits = np.can_cast(array.dtype, tensor.dtype, casting="same_kind")
        if not tensor.takes(array.shape) or not fits:
            kind = type(given).__name__ if is_bytes else array.dtype
            rule = f"must be {tensor.dtype} {list(tensor.shape)}, one sample without a batch dimension"
            cure = "Encode texts, convert numbers, and send samples one by one."
            problems.append(Problem(where, f"{kind} {list(array.shape)}", rule, cure))
        elif is_bytes and (size := packed_bytes(array.ravel())) > tensor.most_bytes:
            rule = f"must take at most {tensor.most_bytes} bytes, the lengths of its elements included"
            problems.append(Problem(where, size, rule, "Send less."))
        elif is_bytes:
            parts.append(memoryview(pack_elements(array.flat)))
        elif tensor.below is not None and array.size and not (array.min() >= 0 and array.max() < tensor.below):
            rule = f"must be between 0 and {tensor.below - 1}"
            problems.append(Problem(where, int(array.max()), rule, "Use the model's own tokeniser."))
        else:
            parts.append(np.ascontiguousarray(array, dtype=tensor.dtype).reshape(-1).view(np.uint8).data)
    if not problems:
        try:
            return parts, interface.signature.sizes_of(shapes)
        except ValueError as error:
            shown = ", ".join(str(list(shape)) for shape in shapes)
            problems.append(Problem("inputs", shown, str(error).rstrip("."), "Send tensors of other shapes."))
    raise InvalidInputError(problems)
