"""The functions of an application as a gateway calls them, in processes beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tenuto.deployments.entry.service.application_functions import CallFunction, Described, SetUpFunctions
from tenuto.deployments.entry.service.hook_process import Done, HookAnswer
from tenuto.deployments.entry.service.process_pool import (
    HANGS_S,
    HookFaultError,
    ProcessPool,
    check_length,
    cut_requests,
    new_memory,
)
from tenuto.deployments.entry.service.run_memory import RunMemory
from tenuto.deployments.wire.arena import Held, Slot
from tenuto.deployments.wire.bundles import Places
from tenuto.deployments.wire.tensors import InputPart, OutputTensor, RequestInputs, most_row_bytes
from tenuto.placement.application import Application
from tenuto.placement.application_signature import BODY
from tenuto.profiles.networks.catalogue import ModelSignature

_PROCESSES = 2  # default: as of hooks
_MOST_OUTPUT_BYTES = 64 << 20  # limit: of an answer that a function makes
_MOST_INPUT_BYTES = 256 << 20  # limit: of the requests that a function makes at once


class PlacedTensor(NamedTuple):
    """A tensor on its way through an application: where its bytes lie, its numpy dtype and its shape."""

    part: InputPart
    dtype: str
    shape: tuple[int, ...]


class VisibleTensors(NamedTuple):
    """What a function is called with: the inputs of the application, a body that is no tensor, and the outputs of each
    request of the stages before it, None for one without an answer."""

    request: Mapping[str, PlacedTensor]
    body: InputPart | None
    stages: Mapping[str, Sequence[Mapping[str, PlacedTensor] | None]]


class FunctionPool(Held):
    """The functions of one application, for its models of one time. Made, used and closed on one event loop. The
    processes end after the last holder has released the pool; whoever made it is the first."""

    def __init__(self, application: Application, models: Sequence[ModelSignature]) -> None:
        """Start the processes.

        Args:
            application: has at least one function.
            models: the signatures of the models of its stages.
        """
        super().__init__()
        self._application, self._models = application, models
        places = [place for place, stage in enumerate(application.stages) if stage.map is not None]
        sources = [application.stages[place].map or "" for place in places]
        most = [
            application.stages[place].most_requests * most_row_bytes(models[place].inputs, models[place].sizes)
            for place in places
        ]
        self._numbers: dict[int | None, int] = {place: number for number, place in enumerate(places)}
        if isinstance(application.outputs, str):
            self._numbers[None] = len(sources)
            sources.append(application.outputs)
            most.append(_MOST_OUTPUT_BYTES)
        set_up = SetUpFunctions(sources, [None if place is None else models[place] for place in self._numbers])
        self._sources = sources
        self._pool = ProcessPool(
            f"the functions of '{application.name}'",
            set_up,
            _PROCESSES,
            longest_s=max(HANGS_S, application.slo_ms / 1000.0),
            most_bytes=min(max(most), _MOST_INPUT_BYTES),
        )

    def name(self, place: int | None) -> str:
        """Return the function that makes a stage's requests, or without a stage the answer, in words."""
        label = None if place is None else self._application.stages[place].label
        return f"function {self._sources[self._numbers[place]]}" + ("" if label is None else f" of stage '{label}'")

    def make_requests(
        self, place: int, seen: VisibleTensors, latest_ms: float, memory: RunMemory
    ) -> asyncio.Future[list[RequestInputs]]:
        """Begin to make the requests of a stage; large ones lie in shared memory. Raises as `ProcessPool.begin`."""
        slot: Slot | None = None

        def room(size: int) -> memoryview:
            nonlocal slot
            slot = memory.take_slot(size)
            return new_memory(size) if slot is None else slot.data

        counts = range(self._application.stages[place].most_requests + 1)
        call, parts = self._call(place, seen, counts.stop - 1)
        return self._pool.begin(
            call,
            parts,
            latest_ms,
            lambda answer, body: cut_requests(answer, body, self._models[place], self.name(place), counts, slot),
            memory=memory,
            room=room,
        )

    def make_outputs(
        self, seen: VisibleTensors, latest_ms: float, memory: RunMemory
    ) -> asyncio.Future[list[OutputTensor]]:
        """Begin to make the answer. Raises as `ProcessPool.begin`."""
        call, parts = self._call(None, seen, 1)
        return self._pool.begin(call, parts, latest_ms, self._outputs, memory=memory)

    def _give_back(self) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, and refuse the calls that are under way."""
        self._pool.close()

    def _call(self, place: int | None, seen: VisibleTensors, most: int) -> tuple[CallFunction, Sequence[memoryview]]:
        """Return the message of a call and the bytes behind it."""
        places = Places(shares_memory=True)
        put = []

        def describe(tensors: Mapping[str, PlacedTensor]) -> list[Described]:
            put.extend([places.put(tensor.part) for tensor in tensors.values()])
            return [(name, dtype, shape) for name, (_, dtype, shape) in tensors.items()]

        request = describe(seen.request)
        if seen.body is not None:
            put.append(places.put(seen.body))
        stages = {
            label: [None if each is None else describe(each) for each in answers]
            for label, answers in seen.stages.items()
        }
        call = CallFunction(
            self._numbers[place], most, request, BODY if seen.body is not None else "", stages, places.arenas, put
        )
        return call, [memoryview(each) for each in places.buffers]

    def _outputs(self, answer: HookAnswer, body: memoryview) -> list[OutputTensor]:
        """Cut the bytes behind an answer into outputs."""
        outputs, at = [], 0
        try:
            (made,) = answer.requests if isinstance(answer, Done) else [[]]
            for each in made:
                name, dtype, shape, size = each
                outputs.append(OutputTensor(name, dtype, shape, check_length(each, body[at : at + size])))
                at += size
        except ValueError as error:
            raise HookFaultError(f"{self.name(None)} returned no outputs: {error}") from None
        return outputs
