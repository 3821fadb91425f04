"""Gpu-lets in virtual time: each runs one batch at a time, in the order sent, for as long as its table says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappush

from tenuto.batching.core.scheduler import Dispatch, Rehearsal, Rehearse
from tenuto.batching.core.system import System
from tenuto.batching.virtual.interference import Interference
from tenuto.batching.virtual.result import BatchLog


class EmulatedBatch:
    """A batch on a gpu-let, from its dispatch to its end."""

    __slots__ = ("has_begun", "ids", "program", "ready_at", "sent_at", "start_at")

    def __init__(self, program: int, ids: list[int], sent_at: float, ready_at: float) -> None:
        self.program = program
        self.ids = ids
        self.sent_at = sent_at
        self.ready_at = ready_at
        self.start_at = 0.0
        self.has_begun = True  # False: on a shared GPU, its data still on the way


class EmulatedGpulets:
    """The gpu-lets of a system. Completions, and the moments at which data has arrived, are put on `events`."""

    def __init__(self, system: System, data_ms_by_model: Sequence[float] | None = None) -> None:
        network = system.network
        self.ctrl_ms = network.ctrl_ms
        by_model = data_ms_by_model or [network.data_ms_per_request] * len(system.models)
        self.data_ms = [max(by_model[member] for member in program.members) for program in system.programs]
        tables: dict[int, dict[int, tuple[float, ...]]] = {}
        for gpulet in system.gpulets:
            if id(gpulet.hosts) not in tables:
                tables[id(gpulet.hosts)] = {program: host.latency_ms for program, host in gpulet.hosts.items()}
        self.latency = [tables[id(gpulet.hosts)] for gpulet in system.gpulets]
        count = len(system.gpulets)
        self.running: list[EmulatedBatch | None] = [None] * (count + 1)  # the last place is never taken
        self.behind: list[deque[EmulatedBatch]] = [deque() for _ in range(count)]
        self.version = [0] * (count + 1)
        self.events: list[tuple[float, int, int]] = []  # (time, gpu-let, version); gpu-let `count`: a rehearsal is due
        self.rehearsal: Rehearsal | None = None
        self.interference = Interference(system)
        self.log = BatchLog()

    def send(self, now: float, decision: Dispatch) -> None:
        gpulet, program, ids = decision[0], decision[1], decision[2]
        batch = EmulatedBatch(program, ids, now, now + self.ctrl_ms + self.data_ms[program] * len(ids))  # type: ignore[arg-type]
        if self.running[gpulet] is None:
            self.start(now, gpulet, batch)
        else:
            self.behind[gpulet].append(batch)

    def start(self, now: float, gpulet: int, batch: EmulatedBatch) -> None:
        """Give the gpu-let to a batch; it executes from the moment its data is there."""
        self.running[gpulet] = batch
        start = batch.start_at = now if now > batch.ready_at else batch.ready_at
        version = self.version[gpulet] = self.version[gpulet] + 1
        if gpulet not in self.interference.shared:
            heappush(self.events, (start + self.latency[gpulet][batch.program][len(batch.ids)], gpulet, version))
        elif start > now:
            batch.has_begun = False
            heappush(self.events, (start, gpulet, version))
        else:
            self.begin(now, gpulet)

    def rehearse(self, decision: Rehearse) -> None:
        """Keep a job until its result is due."""
        self.rehearsal = decision.job
        heappush(self.events, (decision.due_ms, len(self.running) - 1, 0))

    def begin(self, now: float, gpulet: int) -> None:
        """Start executing on a GPU shared with other gpu-lets."""
        batch = self.running[gpulet]
        if batch is None:
            return
        batch.has_begun = True
        work_ms = self.latency[gpulet][batch.program][len(batch.ids)]
        self._move(self.interference.begin(now, gpulet, batch.program, work_ms))

    def _move(self, finishes: list[tuple[int, float]]) -> None:
        for gpulet, finish in finishes:
            self.version[gpulet] += 1
            heappush(self.events, (finish, gpulet, self.version[gpulet]))

    def finish(self, now: float, gpulet: int) -> None:
        """End the running batch and begin the one behind it."""
        batch = self.running[gpulet]
        if batch is None:
            return
        self.log.add(gpulet, batch.program, batch.ids, batch.sent_at, batch.start_at, now, False)
        self._free(now, gpulet)

    def abort(self, now: float, gpulet: int) -> None:
        """Throw away the running batch; what it did until now is lost."""
        batch = self.running[gpulet]
        if batch is None:
            return
        self.version[gpulet] += 1
        self.log.add(gpulet, batch.program, batch.ids, batch.sent_at, min(batch.start_at, now), now, True)
        self._free(now, gpulet)

    def _free(self, now: float, gpulet: int) -> None:
        self.running[gpulet] = None
        if gpulet in self.interference.shared:
            self._move(self.interference.end(now, gpulet))
        if self.behind[gpulet]:
            self.start(now, gpulet, self.behind[gpulet].popleft())
