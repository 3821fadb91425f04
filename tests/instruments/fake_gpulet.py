"""A gpu-let without Ray or process: speaks the frame protocol from inside the test, answers when told to, and can
die."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tenuto.deployments.wire.arena import MappedArenas, machine_id
from tenuto.deployments.wire.bundles import read_parts
from tenuto.deployments.wire.frames import FrameProtocol, listener
from tenuto.deployments.wire.messages import (
    BatchFailed,
    BatchRan,
    GpuletCloses,
    GpuletState,
    Message,
    RunBatch,
    TakeCharge,
    Term,
)
from tenuto.deployments.wire.peer import Endpoint, Finder
from tenuto.deployments.wire.status import GpuletMode
from tenuto.deployments.wire.tensors import Blocks, RowOutput, inline_blocks, input_blocks
from tenuto.placement import Plan
from tenuto.profiles.networks.catalogue import ModelSignature, TensorSignature
from tests.instruments.acceptor import Acceptor

__all__ = ["SIGNATURE", "FakeGpulet", "finder", "make_plan", "state"]

_names = itertools.count()
SIGNATURE = ModelSignature(
    "tensor", (TensorSignature("x", "float32", (2,)),), (TensorSignature("y", "float32", (2,)),), platform="fake"
)


def state(
    gpulet: str, programs: dict[str, int], signatures: dict[str, ModelSignature], *, pid: int = 1, machine: str = ""
) -> GpuletState:
    """What a gpu-let says it is; by default on this machine."""
    return GpuletState(
        gpulet=gpulet,
        gpu="g",
        pid=pid,
        machine=machine or machine_id(),
        device="fake",
        emulated=False,
        share_pct=None,
        memory_mib=None,
        memory_cap_mib=None,
        sm_count=None,
        mode=GpuletMode(share=False, streaming=False, programs=dict.fromkeys(programs, "plain")),
        cuda_mps=None,
        programs=programs,
        merged={},
        signatures=signatures,
    )


class FakeGpulet:
    """Answers y = 2x. With `hold` set, batches wait until `release` is called."""

    def __init__(self, gpulet_id: str, programs: tuple[str, ...], *, hold: bool = False, machine: str = "") -> None:
        self.id = gpulet_id
        self.programs = programs
        self.hold = hold
        self.machine = machine
        self.sizes: list[int] = []
        self.messages: list[RunBatch] = []
        self.bodies: list[int] = []
        self.error: str | None = None
        self.may_retry = False
        self.queue_ms = 0.0  # what it says that batches waited there
        self.incarnation = 0
        self._held: list[tuple[FrameProtocol, RunBatch, memoryview]] = []
        self._protocols: set[FrameProtocol] = set()  # connections that have sent the token
        self.terms: dict[str, Term] = {}
        self.taken: list[int] = []  # the numbers of the terms that held, one after the other
        self.in_charge: FrameProtocol | None = None  # of the one sub-cluster that tests have
        self._acceptor: Acceptor | None = None
        self._alive = asyncio.Event()
        self._arenas = MappedArenas()
        self.arrived = asyncio.Event()

    async def start(self) -> None:
        self.incarnation += 1
        self._address = f"\0tenuto-fake-{os.getpid()}-{id(self)}-{next(_names)}"
        self._acceptor = Acceptor(listener(self._address), self._make_protocol)
        self._alive.set()

    def _make_protocol(self) -> FrameProtocol:
        return FrameProtocol(
            self._on_message, self._on_lost, expect_token="t", on_hello=lambda protocol, _: self._greet(protocol)
        )

    def _greet(self, protocol: FrameProtocol) -> None:
        self._protocols.add(protocol)
        state = self._state()
        protocol.limit_bodies(state.most_asked_bytes())
        protocol.send(state)

    @property
    def is_connected(self) -> bool:
        return bool(self._protocols)

    def die(self) -> None:
        self._alive.clear()
        if self._acceptor is not None:
            self._acceptor.close()
        self._protocols.clear()
        self._held.clear()

    def load(self, *programs: str) -> None:
        """Hold these programs from now on, and say so to every gateway, as a reconfigured gpu-let does."""
        self.programs = programs
        self.tell(self._state())

    def close_down(self) -> None:
        """Say that no more batches are run here."""
        self.tell(GpuletCloses("the test says so"))

    def tell(self, message: Message) -> None:
        for protocol in self._protocols:
            protocol.send(message)

    async def endpoint(self) -> Endpoint:
        await self._alive.wait()
        return Endpoint(self._address, "t")

    def largest(self) -> int:
        return 4

    def signatures(self) -> dict[str, ModelSignature]:
        return dict.fromkeys(self.programs, SIGNATURE)

    def _state(self) -> GpuletState:
        programs = dict.fromkeys(self.programs, self.largest())
        found = state(self.id, programs, self.signatures(), pid=self.incarnation, machine=self.machine)
        found.terms = dict(self.terms)
        return found

    def _on_message(self, protocol: FrameProtocol, message: Message, body: memoryview) -> None:
        if isinstance(message, TakeCharge):
            number = self.terms.get(message.sub_cluster, Term()).number
            if message.term.number > number:
                self.taken.append(message.term.number)
            if message.term.number >= number:
                self._hold(message.sub_cluster, message.term, protocol)
        if not isinstance(message, RunBatch):
            return
        if self.in_charge not in (None, protocol):
            protocol.send(BatchFailed(message.number, "another dispatcher is in charge", may_retry=True))
            return
        self.note_batch(message, body)
        self.sizes.append(message.size)
        self.messages.append(message)
        self.bodies.append(len(body))
        self.arrived.set()
        if self.hold:
            self._held.append((protocol, message, body))
        else:
            self._answer(protocol, message, body)

    def note_batch(self, message: RunBatch, body: memoryview) -> None:
        """Take note of a batch when it comes, before it runs or is held."""

    def _on_lost(self, protocol: FrameProtocol, _error: BaseException | None) -> None:
        self._protocols.discard(protocol)
        if protocol is self.in_charge:
            for name, term in self.terms.items():
                self._hold(name, Term(term.number), protocol)

    def _hold(self, sub_cluster: str, term: Term, protocol: FrameProtocol) -> None:
        self.in_charge = protocol
        if self.terms.get(sub_cluster) != term:
            self.terms[sub_cluster] = term
            self.tell(self._state())

    def release(self) -> None:
        held, self._held = self._held, []
        for item in held:
            self._answer(*item)

    def _answer(self, protocol: FrameProtocol, message: RunBatch, body: memoryview) -> None:
        if self.error is not None:
            protocol.send(BatchFailed(message.number, self.error, self.may_retry))
            return
        members, buffers = [], []
        for (model, rows), blocks in zip(message.members, self.inputs(message, body), strict=True):
            described = []
            for name, array in self.compute(model, blocks).items():
                described.append(RowOutput(name, "float32", array.shape[1:], array.nbytes // rows))
                buffers.append(np.ascontiguousarray(array, np.float32).tobytes())
            members.append((rows, described))
        started_at_ms = (time.monotonic() - 0.001) * 1000.0
        protocol.send(BatchRan(message.number, started_at_ms, 1.0, self.queue_ms, 0.0, 0.0, members), buffers)

    def inputs(self, message: RunBatch, body: memoryview) -> list[Blocks]:
        found = []
        parts = iter(read_parts(message.places, message.arenas, body, self._arenas)[0])
        sizes = iter(message.sizes)
        for model, rows in message.members:
            signature = self.signatures()[model]
            if message.places:
                blocks = input_blocks(signature, rows, parts, list(itertools.islice(sizes, rows)))
            else:
                blocks, body = inline_blocks(signature.inputs, rows, body)
            found.append(blocks)
        return found

    def compute(self, model: str, blocks: Blocks) -> dict[str, np.ndarray]:
        del model
        return {"y": np.concatenate(blocks["x"]) * 2}


def make_plan(
    *gpulets: tuple[str, tuple[str, ...]],
    slo_ms: float = 20_000.0,
    batch_size: int = 1,
    models: tuple[str, ...] = (),
    terms: Mapping[str, Mapping[str, Any]] | None = None,
) -> Plan:
    """A plan over fake gpu-lets, each (id, models); l(b) = b + 1 ms. `terms`: more of models' entries."""
    names = models or tuple(dict.fromkeys(name for _, hosted in gpulets for name in hosted))
    replica = {"batch_size": batch_size, "latency": {"alpha_ms": 1.0, "beta_ms": 1.0}, "latency_ms": batch_size + 1.0}
    return Plan.from_data(
        {
            "policy": {"name": "test"},
            "gpus": [{"id": "g", "type": "v100"}],
            "gpulets": [
                {"id": i, "gpu": "g", "models": [{"name": n, **replica} for n in hosted]} for i, hosted in gpulets
            ],
            "models": [
                {"name": n, "rate_rps": 10, "slo_ms": slo_ms, "latency": {"alpha_ms": 1.0, "beta_ms": 1.0}}
                | dict((terms or {}).get(n, {}))
                for n in names
            ],
        }
    )


def finder(gpulets: dict[str, FakeGpulet]) -> Callable[[str], Finder]:
    return lambda gpulet_id: gpulets[gpulet_id].endpoint
