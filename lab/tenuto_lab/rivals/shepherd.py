"""Flex, the online part of Shepherd: the largest batch runs first, and aborts a running batch of a third its size."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tenuto.batching.core.scheduler import Preempt, SchedulerOptions
from tenuto.batching.core.system import NetworkDelay, System
from tenuto_lab.rivals.base import RivalQueue, RivalScheduler, head_first_batch


@dataclass(frozen=True)
class ShepherdOptions(SchedulerOptions):
    """`preempt_ratio`: how many times larger than a running batch a new one must be to abort it; 0: batches never do.

    The paper has 3.03.
    """

    preempt_ratio: float = field(default=3.03, metadata={"minimum": 0.0})


class _Running:
    """A batch on a gpu-let, remembered so that its requests can go back to the queue."""

    __slots__ = ("deadlines", "gpulet", "ids", "program", "version")

    def __init__(self, gpulet: int, program: int, deadlines: list[float], ids: list[int], version: int) -> None:
        self.gpulet = gpulet
        self.program = program
        self.deadlines = deadlines
        self.ids = ids
        self.version = version


class ShepherdScheduler(RivalScheduler):
    """Flex of Shepherd (Zhang et al., NSDI 2023). Shepherd's offline part, Herd, groups models and GPUs; it belongs to
    placement and is left out.

    The candidate of a model is the largest batch, in order of deadlines, that the first deadline allows. A head that
    would be late even alone is given up. (The published program looks at the newest request instead, so that a lost
    head blocks its model.) A request that arrives runs at once if a gpu-let is idle. If none is, the candidate of its
    model is compared with the smallest running batch, and with the smallest running batch of the same model, whose
    requests would join the candidate. When the candidate is at least `preempt_ratio` times larger, it aborts the
    running batch: the work is lost, and the requests are queued again. The paper does not say which of several gpu-lets
    to preempt; we take the smallest batch, which loses least. A gpu-let that becomes free takes the largest candidate
    of all its models; of two equal ones, the candidate of the model that has waited longer. Sizes are counted in
    requests across models, as in the paper.
    """

    name = "shepherd"
    summary = "Flex: largest batch first, preempting a running batch for one three times its size"
    options_type = ShepherdOptions
    preempts = True

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        chosen = options if isinstance(options, ShepherdOptions) else ShepherdOptions()
        self._ratio = chosen.preempt_ratio
        count = len(system.gpulets)
        self._running: list[_Running | None] = [None] * count
        self._versions = [0] * count
        super().__init__(system, options)
        self._waiting: dict[int, None] = {}  # models with a queue, longest waiting first
        # Heaps of running batches, the smallest first, by pool and by model. Entries are (size, gpu-let, version), and
        # may be stale.
        self._smallest: dict[int, list[tuple[int, int, int]]] = {id(pool): [] for pool in self._pools}
        self._own: list[list[tuple[int, int, int]]] = [[] for _ in system.programs]

    def _arrived(self, now: float, queue: RivalQueue) -> None:
        gpulet = self._idle_for(queue)
        if gpulet >= 0 and self._run(now, queue, gpulet):
            return
        self._waiting.setdefault(queue.program)
        if self._ratio:
            self._try_preempting(now, queue)

    def _run(self, now: float, queue: RivalQueue, gpulet: int) -> bool:
        skip, size = head_first_batch(queue.deadlines, now, self._tables[gpulet][queue.program])
        if not size:
            return False
        deadlines = queue.deadlines[skip : skip + size]
        self._send(now, queue, gpulet, skip, size)
        version = self._versions[gpulet] = self._versions[gpulet] + 1
        ids = list(self.decisions[-1].request_ids)  # type: ignore[union-attr]
        self._running[gpulet] = _Running(gpulet, queue.program, deadlines, ids, version)
        entry = (size, gpulet, version)
        self._remember(self._smallest[id(self._pool_of[gpulet])], entry)
        self._remember(self._own[queue.program], entry)
        if not queue.deadlines:
            self._waiting.pop(queue.program, None)
        else:
            self._waiting.setdefault(queue.program)
        return True

    def _remember(self, heap: list[tuple[int, int, int]], entry: tuple[int, int, int]) -> None:
        heappush(heap, entry)
        if len(heap) > 64 + 4 * len(self._running):
            heap[:] = [kept for kept in heap if self._is_current(kept)]
            heapify(heap)

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        running = self._running[entry[1]]
        return running is not None and running.version == entry[2]

    def _top(self, heap: list[tuple[int, int, int]]) -> _Running | None:
        while heap:
            if self._is_current(heap[0]):
                return self._running[heap[0][1]]
            heappop(heap)
        return None

    def _try_preempting(self, now: float, queue: RivalQueue) -> None:
        waiting = len(queue.deadlines)
        own = self._top(self._own[queue.program])
        if own is not None and waiting + len(own.ids) >= self._ratio * len(own.ids):
            merged = sorted([*own.deadlines, *queue.deadlines])
            if self._is_worth_it(now, merged, own, queue.program):
                self._preempt(now, own, queue)
                return
        for pool in queue.idle_pools:
            least = self._top(self._smallest[id(pool)])
            if least is None or least.program == queue.program or waiting < self._ratio * len(least.ids):
                continue
            if self._is_worth_it(now, queue.deadlines, least, queue.program):
                self._preempt(now, least, queue)
                return

    def _is_worth_it(self, now: float, deadlines: list[float], running: _Running, program: int) -> bool:
        _, size = head_first_batch(deadlines, now, self._tables[running.gpulet][program])
        return size >= self._ratio * len(running.ids)

    def _preempt(self, now: float, running: _Running, queue: RivalQueue) -> None:
        gpulet = running.gpulet
        self.decisions.append(Preempt(gpulet))
        self._running[gpulet] = None
        self._busy[gpulet] = False
        back = self._queues[running.program]
        for due, request in zip(running.deadlines, running.ids, strict=True):
            self._insert(back, due, request, now)
        self._waiting.setdefault(back.program)
        if not self._run(now, queue, gpulet):
            self._freed(now, gpulet)

    def _freed(self, now: float, gpulet: int) -> None:
        self._running[gpulet] = None
        queues, tables = self._queues, self._tables[gpulet]
        best, largest = None, 0
        for index in self._waiting:
            deadlines = queues[index].deadlines
            if len(deadlines) <= largest or index not in tables or len(tables[index]) - 1 <= largest:
                continue
            _, size = head_first_batch(deadlines, now, tables[index])
            if size > largest:
                best, largest = queues[index], size
        if best is None or not self._run(now, best, gpulet):
            self._set_idle(gpulet)

    def _head_changed(self, now: float, queue: RivalQueue) -> None:  # noqa: ARG002
        if not queue.deadlines:
            self._waiting.pop(queue.program, None)

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        super().gpulet_lost(now_ms, gpulet)
        self._running[gpulet] = None

    def update_network(self, network: NetworkDelay) -> None:
        shift = self._response_ms - network.response_ms
        for running in self._running:
            if running is not None:
                running.deadlines = [due + shift for due in running.deadlines]
        super().update_network(network)
