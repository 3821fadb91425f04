"""The gpu-lets of the present plan as the dispatcher sees them: connections, running batches, and which may be used.

When the plan changes, unchanged gpu-lets keep their connections and their batches. Removed gpu-lets answer their
batches before their connection closes. The fleet decides nothing about batches.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tenuto.deployments.dispatch.in_flight import Batch
from tenuto.deployments.dispatch.readiness import READINESS, GpuletEvent, Readiness
from tenuto.deployments.wire.messages import GpuletState, HeldBlocks
from tenuto.deployments.wire.peer import Connection, ConnectionEvents, Finder, PeerConnection
from tenuto.deployments.wire.status import GpuletStatus, RunningBatch
from tenuto.placement import Plan
from tenuto.placement.program import Program
from tenuto.profiles.networks.catalogue import ModelSignature

GpuletConnection = Connection[GpuletState]
# Makes the connection to a gpu-let from its id, the function that finds it, and the object that is told of events.
ConnectionFactory = Callable[[str, Finder, ConnectionEvents[GpuletState]], GpuletConnection]

_LAST_ANSWERS_S = 30.0  # limit: for the batches of a gpu-let that the plan no longer has
_FIRST_REST_S = 0.1  # pace: the rest of a gpu-let after its first failure; twice as long after each further one
_LONGEST_REST_S = 5.0  # limit: the longest rest, so that a gpu-let that works again is soon used


def gpulet_connection(gpulet_id: str, find: Finder, events: ConnectionEvents[GpuletState]) -> GpuletConnection:
    """Return the connection over sockets."""
    return PeerConnection(GpuletState, gpulet_id, find, events)


@dataclass(slots=True, eq=False)
class AttachedGpulet:
    """One gpu-let. `running`: its unanswered batches by number, oldest first.

    `index` is its place in the present plan, None once it was removed.
    """

    id: str
    connection: GpuletConnection
    index: int | None = None
    programs: tuple[Program, ...] = ()
    running: dict[int, Batch] = field(default_factory=dict)
    is_used: bool = False  # the core may use it
    readiness: Readiness = Readiness.AWAY
    rest: asyncio.TimerHandle | None = None  # ends its rest
    failures: int = 0  # in a row
    busy_ms: float = 0.0  # measured time of its batches
    predicted_ms: float = 0.0  # planned time of its batches
    batches: int = 0
    lost: int = 0  # how often its connection ended
    generating: set[int] = field(default_factory=set)  # the numbers of its generations
    offline: Counter[str] = field(default_factory=Counter)  # how many of those are offline, by model
    held: HeldBlocks = field(default_factory=HeldBlocks)  # what its generations held after its last step

    @property
    def is_ready(self) -> bool:
        """Whether it is connected, takes batches and holds the plan's programs. It may still run an earlier batch."""
        state = self.connection.state
        if state is None or not self.connection.is_up or self.readiness is not Readiness.CONNECTED:
            return False
        return all(state.programs.get(program.name, 0) >= program.batch_size for program in self.programs)

    def planned_rps(self, model: str) -> float:
        """Return the requests per second of a model that are planned here."""
        return sum(
            replica.planned_rps for program in self.programs for replica in program.members if replica.name == model
        )

    def lose(self) -> list[Batch]:
        """Return and forget the batches of a gpu-let that is gone."""
        lost = list(self.running.values())
        for batch in lost:
            batch.release_memory()
        self.running.clear()
        self.is_used = False
        self.take_event(GpuletEvent.LOST)
        return lost

    def take_event(self, event: GpuletEvent) -> None:
        """Be as ready as an event leaves it."""
        self.end_rest()
        self.readiness = READINESS.after(self.readiness, event)

    def fail(self, then: Callable[[], None]) -> None:
        """Count a failure, and let the gpu-let rest; `then` is called when the rest is over, unless it ends before.
        Each rest is longer, so that a gpu-let that fails all batches at once does not draw the traffic."""
        self.take_event(GpuletEvent.FAILED)
        self.failures += 1
        rest_s = min(_LONGEST_REST_S, _FIRST_REST_S * 2.0 ** (self.failures - 1))
        if self.readiness is Readiness.RESTING:
            self.rest = asyncio.get_running_loop().call_later(rest_s, then)

    def end_rest(self) -> None:
        """End its rest now, if it rests."""
        if self.rest is not None:
            self.rest.cancel()
            self.rest = None


class Fleet:
    """Invariant: a batch is in `running` of its gpu-let from its dispatch until it is answered or lost."""

    def __init__(
        self,
        find_gpulet: Callable[[str], Finder],
        events: ConnectionEvents[GpuletState],
        make_connection: ConnectionFactory = gpulet_connection,
    ) -> None:
        """Prepare without a plan.

        Args:
            find_gpulet: returns the function that finds a gpu-let by its id.
            events: is told what happens on connections.
            make_connection: makes the connections.
        """
        self._find_gpulet = find_gpulet
        self._events = events
        self._make_connection = make_connection
        self._gpulets: list[AttachedGpulet] = []
        self._standby: list[AttachedGpulet] = []  # connected for a later plan
        self._by_connection: dict[int, AttachedGpulet] = {}
        self._plan: Plan | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __getitem__(self, index: int) -> AttachedGpulet:
        """Return the gpu-let of this index in the present plan."""
        return self._gpulets[index]

    def __iter__(self) -> Iterator[AttachedGpulet]:
        """Return the gpu-lets of the present plan in its order."""
        return iter(self._gpulets)

    def attached(self) -> Iterator[AttachedGpulet]:
        """Return all gpu-lets with a connection, also those that left the plan or are on standby."""
        return iter(self._by_connection.values())

    def behind(self, connection: GpuletConnection) -> AttachedGpulet:
        """Return the gpu-let at the far end of a connection."""
        return self._by_connection[id(connection)]

    # --- plan changes -------------------------------------------------------------------------------------------

    def adopt(self, plan: Plan, standby: Sequence[str] = ()) -> None:
        """Take over a plan. No gpu-let is used until `offer` says so; connections of unchanged ids stay. The gpu-lets
        with ids in `standby` are connected as well."""
        old = {gpulet.id: gpulet for gpulet in (*self._gpulets, *self._standby)}
        self._plan = plan

        def attached(name: str, index: int | None = None) -> AttachedGpulet:
            gpulet = old.pop(name) if name in old else self._attach(name)
            gpulet.index, gpulet.is_used = index, False
            return gpulet

        self._gpulets = [attached(planned.id, index) for index, planned in enumerate(plan.gpulets)]
        for gpulet, planned in zip(self._gpulets, plan.gpulets, strict=True):
            gpulet.programs = planned.programs
        self._standby = [attached(name) for name in standby]
        for gpulet in old.values():
            self._retire(gpulet)

    def _attach(self, gpulet_id: str) -> AttachedGpulet:
        connection = self._make_connection(gpulet_id, self._find_gpulet(gpulet_id), self._events)
        gpulet = self._by_connection[id(connection)] = AttachedGpulet(gpulet_id, connection)
        connection.start()
        return gpulet

    def _retire(self, gpulet: AttachedGpulet) -> None:
        """Let a removed gpu-let answer its batches and end its generations, then close its connection. Generations
        leave it when its process closes or dies."""

        async def close_when_idle() -> None:
            limit = asyncio.get_running_loop().time() + _LAST_ANSWERS_S
            while gpulet.generating or (gpulet.running and asyncio.get_running_loop().time() < limit):
                await asyncio.sleep(0.02)
            await gpulet.connection.stop()
            if gpulet.running:
                self._events.peer_lost(gpulet.connection, "it is no longer in the plan")
            self._by_connection.pop(id(gpulet.connection), None)

        gpulet.index = None
        gpulet.is_used = False
        task = asyncio.create_task(close_when_idle(), name=f"close {gpulet.id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Disconnect from every gpu-let."""
        connections = [gpulet.connection for gpulet in (*self._gpulets, *self._standby)]
        await asyncio.gather(*(connection.stop() for connection in connections), *self._closing)
        for gpulet in self._gpulets:
            gpulet.lose()

    # --- which gpu-lets may be used -----------------------------------------------------------------------------

    def offer(self, gpulet: AttachedGpulet) -> bool:
        """Mark a gpu-let as used if the core may use it now; return whether this changed."""
        if gpulet.index is None or gpulet.is_used or gpulet.running or not gpulet.is_ready:
            return False
        gpulet.is_used = True
        return True

    def is_ready(self, model: str | None = None) -> bool:
        """Whether every gpu-let is ready; with a model, whether at least one of its gpu-lets is."""
        if self._plan is None:
            return False
        if model is None:
            return all(gpulet.is_ready for gpulet in self._gpulets)
        return bool(self.ready_for(model))

    def ready_for(self, model: str) -> list[AttachedGpulet]:
        """Return the gpu-lets of the plan that can run a model now."""
        return [each for each in self._gpulets if each.is_ready and any(model in p.models for p in each.programs)]

    def signature(self, model: str) -> ModelSignature | None:
        """Return a model's signature as its first connected gpu-let reported it; None before one connected."""
        for gpulet in self._gpulets:
            state = gpulet.connection.state
            if state is not None and model in state.signatures:
                return state.signatures[model]
        return None

    def descriptions(self, slowdowns: Mapping[int, Mapping[str, float]]) -> list[GpuletStatus]:
        """Return for the status what every gpu-let reported, and whether it is up.

        `slowdowns`: by index of the gpu-let and program, measured over planned latency of recent batches.
        """
        described_gpulets = []
        planned_ones = () if self._plan is None else self._plan.gpulets
        for index, (gpulet, planned) in enumerate(zip(self._gpulets, planned_ones, strict=True)):
            state = gpulet.connection.state
            described = GpuletStatus(
                id=gpulet.id,
                up=gpulet.connection.is_up,
                gpu=planned.gpu,
                also_on=planned.also_on,
                share_pct=planned.share_pct,
                busy_s=gpulet.busy_ms / 1000.0,
                predicted_s=gpulet.predicted_ms / 1000.0,
                batches=gpulet.batches,
                lost=gpulet.lost,
                running=[RunningBatch(batch.name, batch.size) for batch in gpulet.running.values()],
                slowdown=dict(slowdowns.get(index, {})),
                generating=len(gpulet.generating),
                free_blocks=None if gpulet.held.free_blocks < 0 else gpulet.held.free_blocks,
                blocks=gpulet.held.blocks,
                waiting=gpulet.held.waiting,
                preempted=gpulet.held.preempted,
            )
            described_gpulets.append(described if state is None else state.described(described))
        return described_gpulets

    # --- running batches ----------------------------------------------------------------------------------------

    def pop_batch(self, gpulet: AttachedGpulet, number: int) -> Batch | None:
        """Return an answered batch and forget it; None if its number is not known."""
        if (batch := gpulet.running.pop(number, None)) is not None:
            batch.release_memory()
        return batch
