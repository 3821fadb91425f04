"""Gpu-lets in virtual time: each runs one batch at a time, in the order sent, for the latency in its table."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappush

from tenuto.batching.core.scheduler import Dispatch
from tenuto.batching.core.system import System
from tenuto.batching.virtual.interference import Interference
from tenuto.batching.virtual.offline_backlog import FIRST_OFFLINE, online_of
from tenuto.batching.virtual.result import BatchLog


class EmulatedBatch:
    """A batch on a gpu-let, from its dispatch to its end."""

    __slots__ = ("has_begun", "ids", "offline", "program", "ready_at", "sent_at", "size", "start_at")

    def __init__(self, program: int, ids: list[int], sent_at: float, ready_at: float) -> None:
        self.program = program
        self.size = len(ids)
        self.ids = online_of(ids) if ids[-1] >= FIRST_OFFLINE else ids
        self.offline = ids[len(self.ids) :]  # those that are more in it
        self.sent_at = sent_at
        self.ready_at = ready_at
        self.start_at = 0.0
        self.has_begun = True  # False: the batch is for a shared GPU, and its data is still on the way


class EmulatedGpulets:
    """The gpu-lets of all systems that were added, each at its own place. Those of the last system begin at `first`.

    `events` is a heap of (time, place, version): when batches end, and when their data has arrived.
    """

    def __init__(self) -> None:
        self.first = 0
        self.latency: list[Mapping[int, tuple[float, ...]]] = []  # l(b) in ms, by place and program
        self.running: list[EmulatedBatch | None] = []
        self.behind: list[deque[EmulatedBatch]] = []
        self.version: list[int] = []
        self.events: list[tuple[float, int, int]] = []
        self.interference = Interference()
        self.log = BatchLog()

    def add(self, system: System, data_ms_by_model: Sequence[float] | None = None) -> None:
        """Send batches to the gpu-lets of this system from now on; `data_ms_by_model`: see `simulate`."""
        network = system.network
        by_model, place = data_ms_by_model or [network.data_ms_per_request] * len(system.reported), system.reported_of
        self.ctrl_ms = network.ctrl_ms
        self.data_ms = [max(by_model[place[member]] for member in program.members) for program in system.programs]
        self.first, count = len(self.latency), len(system.gpulets)
        tables = {
            id(hosts): {program: host.latency_ms for program, host in hosts.items()}
            for hosts in system.distinct_hosts()
        }
        self.latency += [tables[id(gpulet.hosts)] for gpulet in system.gpulets]
        self.running += [None] * count
        self.behind += [deque() for _ in range(count)]
        self.version += [0] * count
        self.interference.add(system.gpulets)

    def stretch(self, system: System, factors: Mapping[int, float]) -> None:
        """Let batches of these programs take `factors` times the latency, on the gpu-lets of the last system."""
        self.latency[self.first :] = [
            {
                program: tuple(factors.get(program, 1.0) * ms for ms in host.latency_ms)
                for program, host in gpulet.hosts.items()
            }
            for gpulet in system.gpulets
        ]

    def send(self, now: float, decision: Dispatch) -> None:
        gpulet, program, ids = self.first + decision[0], decision[1], decision[2]
        batch = EmulatedBatch(program, ids, now, now + self.ctrl_ms + self.data_ms[program] * len(ids))  # type: ignore[arg-type]
        if self.running[gpulet] is None:
            self.start(now, gpulet, batch)
        else:
            self.behind[gpulet].append(batch)

    def start(self, now: float, gpulet: int, batch: EmulatedBatch) -> None:
        """Give the gpu-let to a batch, which executes from the moment its data is there."""
        self.running[gpulet] = batch
        start = batch.start_at = now if now > batch.ready_at else batch.ready_at
        version = self.version[gpulet] = self.version[gpulet] + 1
        if gpulet not in self.interference.shared:
            heappush(self.events, (start + self.latency[gpulet][batch.program][batch.size], gpulet, version))
        elif start > now:
            batch.has_begun = False
            heappush(self.events, (start, gpulet, version))
        else:
            self.begin(now, gpulet)

    def begin(self, now: float, gpulet: int) -> None:
        """Start executing on a GPU shared with other gpu-lets."""
        batch = self.running[gpulet]
        if batch is None:
            return
        batch.has_begun = True
        work_ms = self.latency[gpulet][batch.program][batch.size]
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
        self.log.add(gpulet, batch.program, batch.ids, batch.sent_at, batch.start_at, now, False, len(batch.offline))
        self._free(now, gpulet)

    def abort(self, now: float, gpulet: int) -> None:
        """Throw away the running batch and its work so far."""
        batch = self.running[gpulet]
        if batch is None:
            return
        self.version[gpulet] += 1
        begun = batch.sent_at, min(batch.start_at, now)
        self.log.add(gpulet, batch.program, batch.ids, *begun, now, True, len(batch.offline))
        self._free(now, gpulet)

    def _free(self, now: float, gpulet: int) -> None:
        self.running[gpulet] = None
        if gpulet in self.interference.shared:
            self._move(self.interference.end(now, gpulet))
        if self.behind[gpulet]:
            self.start(now, gpulet, self.behind[gpulet].popleft())
