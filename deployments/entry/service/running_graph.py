"""One request of an application under way: it asks models for what its stages need, as soon as their inputs are there.

`ApplicationRun` decides when and by when; here requests are made of tensors, and answers become tensors of later
requests. All of this happens in callbacks on one event loop, without tasks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
from msgspec import structs

from tenuto.batching.applications.application_run import ApplicationRun
from tenuto.batching.core.system import TIME_TOLERANCE_MS
from tenuto.deployments.dispatch.in_flight import OpenGeneration, Request
from tenuto.deployments.entry.http.exchange import HttpError, unexpected
from tenuto.deployments.entry.protocols.openai import GenerationRequest
from tenuto.deployments.entry.protocols.texts import (
    MOST_TEXT_BYTES,
    TEXT_AT_ONCE_BYTES,
    TEXTS_TOO_LARGE,
    TOO_MANY_TOKENS,
)
from tenuto.deployments.entry.service.dispatching import Dispatching
from tenuto.deployments.entry.service.function_pool import FunctionPool, PlacedTensor, VisibleTensors
from tenuto.deployments.entry.service.planned_application import ApplicationInterface, PlannedApplication
from tenuto.deployments.entry.service.planned_model import PlannedModel
from tenuto.deployments.entry.service.process_pool import HookFaultError
from tenuto.deployments.entry.service.run_memory import RunMemory
from tenuto.deployments.entry.service.stage_text import OnText, StageText, read_prompt
from tenuto.deployments.entry.service.traffic_split import Shadows
from tenuto.deployments.security.keys import Caller
from tenuto.deployments.wire.answers import Executed, Refused
from tenuto.deployments.wire.arena import Arena, Slot
from tenuto.deployments.wire.status import StageRecord
from tenuto.deployments.wire.tensors import InputPart, OutputTensor, RequestInputs
from tenuto.errors import new_incident
from tenuto.outcome import Outcome, Rule
from tenuto.placement.application_signature import BODY, TensorSource, stage_signature
from tenuto.placement.versions import tensors_of
from tenuto.profiles.networks.catalogue import BYTES, TensorSignature
from tenuto.profiles.networks.generating import Ending
from tenuto.profiles.networks.inputs import LENGTH_BYTES

logger = logging.getLogger("ray.serve")

_MOST_AT_ONCE = 64  # limit: requests of a stage that are sent in one turn of the loop, 2 ms or less

P = ParamSpec("P")
T = TypeVar("T")


class _MisfitError(Exception):
    """A tensor that a stage made does not fit where it goes. The text is for the client."""


class GraphAsker(Protocol):
    """Who has sent a request of an application. Exactly one of its methods is called, once, unless the request is
    withdrawn before."""

    def completed(self, graph: RunningGraph, outputs: Sequence[OutputTensor]) -> None:
        """Take the outputs of the application."""

    def given_up(self, graph: RunningGraph, refused: Refused) -> None:
        """Learn why there is no answer."""


class StageRequests:
    """The requests of one stage, and their answers: the outputs of each, None while it has none."""

    def __init__(self, graph: RunningGraph, place: int, count: int) -> None:
        self._graph: RunningGraph | None = graph
        self._place = place
        self.outputs: list[list[OutputTensor] | None] = [None] * count
        self.shared: dict[tuple[int, str], InputPart] = {}  # outputs in shared memory, by place and name
        self.opened: dict[int, tuple[Request, int]] = {}  # those that wait for an answer, with their places
        self.texts: dict[int, tuple[OpenGeneration, StageText]] = {}  # that are written, by place
        self.timer: asyncio.TimerHandle | None = None  # until the texts must be there
        self.refused_ids: set[int] = set()
        self.shadows: Shadows = ()  # versions of its model that get copies of
        self.samples: Sequence[RequestInputs] = ()  # these, its requests; empty where no version does
        self.emulated = False

    def close(self) -> tuple[list[Request], list[OpenGeneration]]:
        """Return the requests and texts that are open; their ends concern nobody any more. This forgets the graph, as
        only Python's collector would free a cycle of references."""
        opened, self.opened, self._graph = self.opened, {}, None
        texts, self.texts = self.texts, {}
        for _, text in texts.values():
            text.close()
        if self.timer is not None:
            self.timer.cancel()
        return [request for request, _ in opened.values()], [generation for generation, _ in texts.values()]

    def executed(self, request: Request, executed: Executed, row: int) -> None:
        """Take an answer (`Asker`)."""
        _, position = self.opened.pop(request.id, (None, -1))
        if self._graph is not None and position >= 0:
            self.outputs[position] = executed.tensors(row)
            self.emulated |= executed.emulated
            self._graph.answered(self._place, position)

    def refused(self, request: Request, refused: Refused) -> None:
        """Learn that a request gets no answer (`Asker`)."""
        self.opened.pop(request.id, None)  # one that is turned away at once was never in there
        self.refused_ids.add(request.id)
        if self._graph is not None:
            self._graph.lost(self._place, refused)

    # --- texts (TextAsker) -------------------------------------------------------------------------------------

    def stopped(self, position: int) -> None:
        """Have no more tokens made for a text."""
        written = self.texts.pop(position, None)
        if written is not None and self._graph is not None:
            self._graph.note_pace(self._place, written[0])
            self._graph.end_text(written[0])

    def written(self, position: int, outputs: list[OutputTensor]) -> None:
        """Take a text."""
        generation, _ = self.texts.pop(position, (None, None))
        if self._graph is not None:
            self.outputs[position] = outputs
            if generation is not None:
                self._graph.note_pace(self._place, generation)
            self._graph.answered(self._place, position)

    def unwritten(self, position: int, refused: Refused) -> None:
        """Learn that a text is not written."""
        self.texts.pop(position, None)
        self.refused_ids.add(position)
        if self._graph is not None:
            self._graph.lost(self._place, refused)


class RunningGraph:
    """Invariant: its asker is told one end, once, unless the request was withdrawn before. From then on none of its
    requests to models is open, and it holds no memory."""

    def __init__(
        self,
        application: PlannedApplication,
        interface: ApplicationInterface,
        dispatching: Dispatching,
        asker: GraphAsker,
        inputs: RequestInputs,
        *,
        arena: Arena | None,
        slot: Slot | None,
        body: InputPart | None,
        arrived_ms: float,
        slo_ms: float,
        reserve_ms: float,
        client_id: str,
        yields: bool,
        clock_ms: Callable[[], float],
        on_text: OnText | None = None,
        caller: Caller | None = None,
        offline: bool = False,
    ) -> None:
        """Prepare; `begin` asks for the first stages.

        Args:
            application: of the plan.
            interface: its tensors.
            dispatching: takes the requests to models.
            asker: is told of the end.
            inputs: of the application.
            arena: for what stages hand on; None: that is sent.
            slot: what the inputs lie in, if that is shared memory.
            body: what functions see beside the inputs: the body of a request that is no tensor.
            arrived_ms: when the request came, on the monotonic clock.
            slo_ms: time allowed from then.
            reserve_ms: time kept of the deadline for the way back to the client.
            client_id: the client's id of the request, which those to models get, too.
            yields: requests of others go first.
            clock_ms: what the monotonic clock shows.
            on_text: takes the text of a stage that is streamed, as it is written.
            caller: is charged for texts, and held to the tokens that its key allows.
            offline: every stage waits for time that costs no other request its deadline.
        """
        self.arrived_ms, self.deadline_ms, self.reserve_ms = arrived_ms, arrived_ms + slo_ms, reserve_ms
        self.client_id, self.stages = client_id, dict[int, StageRequests]()
        self.lost_at = ""  # the label of the stage at which it ended without an answer
        self.first_ms = math.nan  # when the first token of a stream came
        self.is_slow = False  # whether its further tokens took longer than they may
        self.prompt_tokens = self.tokens = 0  # of a stream
        self._application, self._interface, self._dispatching = application, interface, dispatching
        self._asker, self._yields, self._clock_ms = asker, yields, clock_ms
        self._on_text, self._caller, self._offline = on_text, caller, offline
        latest_ms, times = self.deadline_ms - reserve_ms, application.times
        self._run = ApplicationRun(interface.graph, arrived_ms, latest_ms, times, is_offline=offline)
        specs = interface.composed.signature.at(inputs.sizes).inputs
        self._inputs = {
            spec.name: PlacedTensor(part, part.dtype or spec.dtype, spec.fixed_shape)
            for spec, part in zip(specs, inputs.parts, strict=True)
        }
        self._body = body
        if interface.composed.takes_body:  # it is one element, behind its length
            part = self._inputs.pop(BODY).part
            at = part.offset + LENGTH_BYTES if part.arena else 0
            self._body = InputPart(memoryview(part.data)[LENGTH_BYTES:], "", part.arena, at)
        self._calls: dict[asyncio.Future[Any], asyncio.TimerHandle] = {}  # of functions, until they return
        self._is_over = False
        if interface.functions is not None:
            interface.functions.hold()
        self._memory = RunMemory(arena, slot)  # last, as nobody gives it back where this raises

    def begin(self) -> None:
        """Ask for the first stages."""
        now_ms = self._clock_ms()
        self._guarded(self._begin_stages, self._run.begin(now_ms), now_ms)

    def withdraw(self) -> None:
        """Ask for no more: the client is gone, or is answered without this."""
        if not self._is_over:
            self._is_over = True
            if not self._run.is_over:
                self._run.give_up(self._clock_ms())
            for stage in self.stages.values():
                requests, generations = stage.close()
                for request in requests:
                    self._dispatching.cancel(request)
                for generation in generations:
                    self._dispatching.leave(generation)
            for call in list(self._calls):
                call.cancel()
            self._memory.release()
            if self._interface.functions is not None:
                self._interface.functions.release()

    @property
    def emulated(self) -> bool:
        """Whether a stage ran on an emulated GPU."""
        return any(stage.emulated for stage in self.stages.values())

    def records(self) -> dict[str, StageRecord]:
        """Return what became of each stage that is complete, by label."""
        labels, run = [stage.label for stage in self._interface.graph.stages], self._run
        records = {}
        for place, stage in self.stages.items():
            took_ms = run.stage_ms[place]
            if math.isnan(took_ms) and self._is_streamed(place):
                took_ms = self.first_ms - run.due_ms[place]
            if not math.isnan(took_ms):
                begin_ms = run.due_ms[place] - self.arrived_ms
                end_ms = begin_ms + took_ms
                records[labels[place]] = StageRecord(round(begin_ms, 3), round(end_ms, 3), len(stage.outputs))
        return records

    # --- stages -------------------------------------------------------------------------------------------------

    def _begin_stages(self, places: Sequence[int], now_ms: float) -> None:
        """Ask for the stages that are due, and end when none is left."""
        for place in places:
            if not self._is_over:
                self._begin_stage(place, now_ms)
        if not self._run.is_complete or self._is_over or self._calls:
            return
        if self._interface.composed.outputs is None:
            seen, latest_ms = self._seen(self.stages), self.deadline_ms - self.reserve_ms
            self._call(None, lambda pool: pool.make_outputs(seen, latest_ms, self._memory), self._complete)
        else:
            self._complete(self._outputs())

    def _begin_stage(self, place: int, now_ms: float) -> None:
        stage = self._interface.application.stages[place]
        if self._run.cannot_end(place, now_ms):
            reason = f"stage '{stage.label}' and what follows cannot end by the deadline. Raise the SLO or add GPUs"
            is_hopeless = self._run.cannot_end(place, self.arrived_ms)  # asking again does not help
            self._give_up(Refused(Outcome.EXPIRED, reason, None if is_hopeless else 1.0, rule=Rule.TOO_LATE), place)
        elif stage.map is None:
            self._send(place, [self._stage_inputs(place)] * stage.most_requests, now_ms)
        else:
            seen, latest_ms = self._seen(self._interface.before[place]), self.deadline_ms - self.reserve_ms
            ask = lambda pool: pool.make_requests(place, seen, latest_ms, self._memory)  # noqa: E731
            self._call(place, ask, lambda samples: self._send(place, samples, self._clock_ms()))

    def _complete(self, outputs: Sequence[OutputTensor]) -> None:
        self.withdraw()
        self._asker.completed(self, outputs)

    def _guarded(self, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do a step of this request. Whatever it raises ends this request, and nothing else."""
        try:
            step(*args, **kwargs)
        except HttpError as error:
            self._give_up(_refusal("what its stages hand on", error))
        except Exception as error:
            is_told = isinstance(error, _MisfitError)
            reason = str(error) if is_told else unexpected(self._interface.application.name, error).message
            self._give_up(Refused(Outcome.FAILED, reason, rule=Rule.RAISED))

    # --- functions ----------------------------------------------------------------------------------------------

    def _call(
        self, place: int | None, begin: Callable[[FunctionPool], asyncio.Future[T]], then: Callable[[T], None]
    ) -> None:
        """Call the function that makes the requests of a stage, or without a stage the answer, and go on with what it
        makes."""
        pool = self._interface.functions
        assert pool is not None
        name = pool.name(place)
        try:
            call = begin(pool)
        except HttpError as error:
            self._give_up(_refusal(name, error), place)
        else:
            self._wait_for(place, name, call, then)

    def _wait_for(self, place: int | None, name: str, call: asyncio.Future[T], then: Callable[[T], None]) -> None:
        """Go on with the result of a call, which must be there by the deadline."""
        left_s = max(0.0, self.deadline_ms - self._clock_ms()) / 1000.0
        self._calls[call] = asyncio.get_running_loop().call_later(left_s, self._expire, place, name)
        call.add_done_callback(partial(self._returned, place, name, then))

    def _returned(self, place: int | None, name: str, then: Callable[[T], None], call: asyncio.Future[T]) -> None:
        timer = self._calls.pop(call, None)
        if timer is not None:
            timer.cancel()
        if call.cancelled() or self._is_over:
            return
        error = call.exception()
        if error is None:
            self._guarded(then, call.result())
        else:
            self._give_up(_refusal(name, error), place)

    def _expire(self, place: int | None, name: str) -> None:
        refused = Refused(Outcome.EXPIRED, f"{name} has not returned by the deadline", 1.0, rule=Rule.LOST)
        self._give_up(refused, place)

    # --- requests of stages -------------------------------------------------------------------------------------

    def _send(self, place: int, samples: Sequence[RequestInputs], now_ms: float) -> None:
        """Ask a model for all requests of a stage."""
        self.stages[place] = StageRequests(self, place, len(samples))
        due = self._run.expand(place, len(samples), now_ms)
        if self._interface.stages[place].generates is None:
            requests = self.stages[place]
            requests.shadows = self._application.shadows_of(self._interface.graph.stages[place].model)
            requests.samples = samples if requests.shadows else ()
            self._send_some(place, partial(self._send_request, place, samples), now_ms)
        else:
            self._read_prompts(place, samples)
        if due or not samples:
            self._begin_stages(due, now_ms)

    def _send_some(self, place: int, ask: Callable[[int, float, float], None], now_ms: float, first: int = 0) -> None:
        """Ask for the requests of a stage from one on: as many as one turn of the loop may take, then the others."""
        end, count = first + _MOST_AT_ONCE, len(self.stages[place].outputs)
        slo_ms = self._run.deadline_ms(place, now_ms) + self.reserve_ms - now_ms
        problem = self._why_other(place)
        for position in range(first, min(end, count)):
            if problem:
                self.lost(place, Refused(Outcome.FAILED, problem))
            else:
                ask(position, now_ms, slo_ms)
            if self._is_over:
                return
        if end < count:
            asyncio.get_running_loop().call_soon(self._guarded, partial(self._send_rest, place, ask, end))

    def _why_other(self, place: int) -> str:
        """Return why the model of a stage does not take the tensors that this request was composed for; empty where it
        does. Gpu-lets rely on that."""
        name, composed = self._interface.graph.stages[place].model, self._interface.stages[place]
        present = self._dispatching.signature(name)
        if present is not None:
            present = stage_signature(self._interface.application.stages[place], present)
        if present is None or present == composed or tensors_of(present) == tensors_of(composed):
            return ""
        return f"'{name}' takes other tensors since its plan changed. Send the request again"

    def _send_rest(self, place: int, ask: Callable[[int, float, float], None], first: int) -> None:
        if not self._is_over:
            self._send_some(place, ask, self._clock_ms(), first)

    def _send_request(
        self, place: int, samples: Sequence[RequestInputs], position: int, now_ms: float, slo_ms: float
    ) -> None:
        """Ask a model for one request of a stage."""
        stage, requests, (parts, sizes) = self._interface.graph.stages[place], self.stages[place], samples[position]
        try:
            request = self._dispatching.admit(
                self._application.choose(stage.model).name,
                requests,
                arrived_ms=now_ms,
                slo_ms=slo_ms,
                client_id=self.client_id,
                reserve_ms=self.reserve_ms,
                yields=self._yields,
                sizes=sizes,
                offline=self._offline,
                client="" if self._caller is None else self._caller.name,
            )
        except KeyError:
            self.lost(place, Refused(Outcome.FAILED, f"'{stage.model}' was removed from the plan"))
            return
        if request.id not in requests.refused_ids:
            if self._is_over:  # another one was refused meanwhile
                self._dispatching.cancel(request)
            else:
                requests.opened[request.id] = request, position
                self._dispatching.start(request, parts, self._memory)

    def _copy_request(self, place: int, position: int) -> None:
        """Send shadows copies of a request of a stage that has been answered."""
        stage = self.stages[place]
        parts, sizes = stage.samples[position]
        copied = [parts], self._memory, self.client_id, [sizes]
        self._application.copies.send(self._dispatching, stage.shadows, *copied)

    # --- texts of stages ----------------------------------------------------------------------------------------

    def _read_prompts(self, place: int, samples: Sequence[RequestInputs]) -> None:
        """Read the prompts of a stage, long ones in a thread, and let them be gone on with."""
        stage = self._interface.application.stages[place]
        model, size = self._application.choose(self._interface.graph.stages[place].model), 0
        for parts, _ in samples:  # what lies in shared memory may be given back while a thread reads
            parts[:] = [InputPart(bytes(part.data), part.dtype) for part in parts]
            size += sum(part.nbytes for part in parts)
        if size > MOST_TEXT_BYTES:
            for _ in samples:
                self.lost(place, Refused(Outcome.FAILED, TEXTS_TOO_LARGE, rule=Rule.INPUT))
            return

        def read() -> list[GenerationRequest | Refused]:
            return [read_prompt(stage, model, sample) for sample in samples]

        if size <= TEXT_AT_ONCE_BYTES:
            self._send_prompts(place, model, read())
        else:
            reading = asyncio.get_running_loop().run_in_executor(None, read)
            self._wait_for(
                place, f"the tokenizer of '{model.name}'", reading, partial(self._send_prompts, place, model)
            )

    def _send_prompts(self, place: int, model: PlannedModel, prompts: Sequence[GenerationRequest | Refused]) -> None:
        """Let a model go on with prompts. All texts must be there so early that the stages behind can end in time."""
        requests = self.stages[place]
        if not self._is_streamed(place):
            left_s = max(0.0, self._run.latest_end_ms(place) - self._clock_ms()) / 1000.0
            requests.timer = asyncio.get_running_loop().call_later(left_s, self._expire_texts, place)
        requests.emulated = self._interface.stages[place].platform == "emulated"
        self._send_some(place, partial(self._send_prompt, place, model, prompts), self._clock_ms())

    def _send_prompt(
        self,
        place: int,
        model: PlannedModel,
        prompts: Sequence[GenerationRequest | Refused],
        position: int,
        now_ms: float,
        slo_ms: float,
    ) -> None:
        """Let a model go on with one prompt of a stage."""
        requests, prompt = self.stages[place], prompts[position]
        if isinstance(prompt, Refused):
            self.lost(place, prompt)
            return
        (choice,), time_ms = prompt.choices, max(slo_ms - self.reserve_ms, TIME_TOLERANCE_MS)
        ttft_ms, tpot_ms, is_streamed = time_ms, math.inf if self._offline else model.tpot_ms, self._is_streamed(place)
        if not is_streamed and (slo := model.bounds_within(time_ms, choice.sampling.max_tokens)) is not None:
            ttft_ms, tpot_ms = (time_ms, math.inf) if self._offline else (slo.ttft_ms, slo.tpot_ms)
        if self._caller is not None:
            most = len(choice.prompt) + choice.sampling.max_tokens
            wait_s = self._caller.text_wait_s(now_ms / 1000.0, most)
            if wait_s > 0.0:
                self.lost(place, Refused(Outcome.REJECTED, TOO_MANY_TOKENS.format(self._caller.name), wait_s))
                return
        on_text = self._pass_on if is_streamed else None
        self.prompt_tokens += len(choice.prompt) if is_streamed else 0
        text = StageText(requests, position, model.tokenizer, prompt, on_text, self._caller)
        try:
            generation = self._dispatching.generate(
                model.name,
                text,
                choice.prompt,
                choice.sampling,
                arrived_ms=now_ms,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                client_id=self.client_id,
                offline=self._offline,
                client="" if self._caller is None else self._caller.name,
            )
        except KeyError:
            text.close()
            self.lost(place, Refused(Outcome.FAILED, f"'{model.name}' was removed from the plan"))
            return
        if position not in requests.refused_ids:
            if self._is_over:  # another one was refused meanwhile
                text.close()
                self._dispatching.leave(generation)
            else:
                requests.texts[position] = generation, text

    def _is_streamed(self, place: int) -> bool:
        return self._interface.graph.stages[place].is_streamed

    def _pass_on(self, text: str, token: int | None, finish: Ending | None) -> None:
        """Take note of the first token of a stream, and pass its text on to a client that reads it as it comes."""
        if math.isnan(self.first_ms):
            self.first_ms = self._clock_ms()
        self.tokens += token is not None
        if self._on_text is not None:
            self._on_text(text, token, finish)

    def note_pace(self, place: int, generation: OpenGeneration) -> None:
        """Take note of how fast a text was written."""
        self.is_slow |= self._is_streamed(place) and generation.measured_tpot_ms > generation.tpot_ms

    def end_text(self, generation: OpenGeneration) -> None:
        """Have no more tokens made: a text has all of its own."""
        self._dispatching.leave(generation, is_answered=True)

    def _expire_texts(self, place: int) -> None:
        """Give up the texts of a stage that are not there in time."""
        requests = self.stages[place]
        for position, (generation, text) in list(requests.texts.items()):
            if not self._is_over:
                del requests.texts[position]
                text.close()
                self._dispatching.leave(generation)
                reason = f"its text had {generation.tokens} tokens when it had to end. Ask for fewer, or raise the SLO"
                self.lost(place, Refused(Outcome.EXPIRED, reason, 1.0, rule=Rule.LOST))

    def answered(self, place: int, position: int) -> None:
        """Go on after a request of a stage was answered."""
        if not self._is_over:
            self._guarded(self._answered, place, position)

    def _answered(self, place: int, position: int) -> None:
        now_ms = self._clock_ms()
        at_ms = self.first_ms if self._is_streamed(place) else now_ms
        if self.stages[place].samples:
            self._copy_request(place, position)
        if self._interface.handed_on[place]:
            self._share(place, position)
        self._begin_stages(self._run.answered(place, at_ms), now_ms)

    def lost(self, place: int, refused: Refused) -> None:
        """Go on without a request of a stage, or end: a fan-out lives and dies together."""
        if self._is_over:
            return
        now_ms = self._clock_ms()
        if self._run.lost(place, now_ms):
            label = self._interface.graph.stages[place].label
            self._give_up(structs.replace(refused, reason=f"stage '{label}': {refused.reason}"), place)
        else:
            self._guarded(self._begin_stages, self._run.due(), now_ms)

    def _give_up(self, refused: Refused, place: int | None = None) -> None:
        """End this request without an answer: at a stage, or without one at what makes the answer."""
        if not self._is_over:
            self.lost_at = "" if place is None else self._interface.graph.stages[place].label
            self.withdraw()
            self._asker.given_up(self, refused)

    # --- tensors ------------------------------------------------------------------------------------------------

    def _share(self, place: int, position: int) -> None:
        """Put the outputs of a request that others take into shared memory, where that pays. Nothing holds the other
        rows of its batch then."""
        stage, answered = self.stages[place], self._interface.composed.outputs or ()
        tensors = stage.outputs[position] or []
        for at, tensor in enumerate(tensors):
            if tensor.name in self._interface.handed_on[place]:
                slot = self._memory.take_slot(tensor.data.nbytes)
                if slot is not None:
                    slot.data[:] = tensor.data
                    stage.shared[position, tensor.name] = InputPart(slot.data, "", slot.arena, slot.offset)
                    if TensorSource(tensor.name, place) not in answered:
                        tensors[at] = structs.replace(tensor, data=slot.data)

    def _placed(self, place: int, position: int) -> dict[str, PlacedTensor] | None:
        """Return the outputs of a request of a stage; None where there are none."""
        stage = self.stages[place]
        outputs, shared = stage.outputs[position], stage.shared
        return (
            None
            if outputs is None
            else {
                each.name: PlacedTensor(
                    shared.get((position, each.name)) or InputPart(each.data), each.dtype, each.shape
                )
                for each in outputs
            }
        )

    def _seen(self, places: Iterable[int]) -> VisibleTensors:
        """Return what a function is called with that sees these stages."""
        labels = self._interface.graph.stages
        return VisibleTensors(
            self._inputs,
            self._body,
            {
                labels[place].label: [
                    self._placed(place, position) for position in range(len(self.stages[place].outputs))
                ]
                for place in places
            },
        )

    def _stage_inputs(self, place: int) -> RequestInputs:
        """Return the tensors of a request of a stage; raises `_MisfitError` if they do not fit its model."""
        model, sources = self._interface.stages[place], self._interface.composed.inputs[place]
        assert sources is not None
        pairs = [self._input(source, spec) for source, spec in zip(sources, model.inputs, strict=True)]
        try:
            return RequestInputs([part for part, _ in pairs], model.sizes_of([shape for _, shape in pairs]))
        except ValueError as error:
            raise _MisfitError(f"stage '{self._interface.graph.stages[place].label}': {error}") from None

    def _input(self, source: TensorSource, spec: TensorSignature) -> tuple[InputPart, tuple[int, ...]]:
        """Return an input of a request of a stage, and its shape. What comes from other stages is checked here, and
        what comes from the client by its reader."""
        if source.stage is None:
            tensor, where = self._inputs[source.name], ""
        else:
            label, outputs = self._interface.graph.stages[source.stage].label, self._placed(source.stage, 0)
            if outputs is None:
                raise _MisfitError(f"stage '{label}' has no answer, which is an input of another")
            tensor, where = outputs[source.name], f"output '{source.name}' of stage '{label}'"
        dtype = "" if tensor.dtype == spec.dtype != BYTES else tensor.dtype
        part = tensor.part if tensor.part.dtype == dtype else structs.replace(tensor.part, dtype=dtype)
        if where and spec.dtype == BYTES and part.nbytes > spec.most_bytes:
            raise _MisfitError(f"{where} has {part.nbytes} bytes; input '{spec.name}' takes {spec.most_bytes}")
        if where and spec.below is not None and part.nbytes:
            values = np.frombuffer(part.data, tensor.dtype)
            if not 0 <= values.min() <= values.max() < spec.below:
                raise _MisfitError(f"{where} has values outside 0 to {spec.below - 1}; '{spec.name}' takes no others")
        return part, tensor.shape

    def _outputs(self) -> list[OutputTensor]:
        """Return the outputs of the application; raises `_MisfitError` where a stage's requests have several shapes."""
        composed, outputs = self._interface.composed, []
        for spec, source in zip(composed.signature.outputs, composed.outputs or (), strict=True):
            assert source.stage is not None
            answers = self.stages[source.stage].outputs
            rows = [each for answer in answers for each in answer or () if each.name == source.name]
            if self._interface.application.stages[source.stage].most_requests == 1:
                outputs += [structs.replace(each, name=spec.name) for each in rows]
                continue
            outputs.append(_stacked(spec, rows))
        return outputs


def _refusal(name: str, error: BaseException) -> Refused:
    """Return how a request ends for which a function failed, or could not be called."""
    if isinstance(error, HttpError):
        outcome, rule = Outcome.of_http_status(error.status), Rule.INPUT if error.status == 400 else Rule.NONE
        return Refused(outcome, f"{name}: {error.message}", error.retry_after_s, rule=rule)
    reason = error.reason if isinstance(error, HookFaultError) else ""
    incident = new_incident()
    logger.error("%s failed (%s): %s", name, incident, error, exc_info=None if reason else error)
    text = f"{name} {reason or 'failed'}. The gateway's log says more under {incident}"
    return Refused(Outcome.FAILED, text, rule=Rule.RAISED)


def _stacked(spec: TensorSignature, rows: Sequence[OutputTensor]) -> OutputTensor:
    """Return an output of several requests as one, a row of it for each."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    if len(shapes) > 1:
        shown = ", ".join(str(list(shape)) for shape in shapes)
        raise _MisfitError(f"output '{spec.name}' has several shapes ({shown}). Make one in a function (outputs)")
    shape = shapes[0] if shapes else tuple(0 if isinstance(each, str) else each for each in spec.shape[1:])
    return OutputTensor(spec.name, spec.dtype, (len(rows), *shape), memoryview(b"".join([row.data for row in rows])))
