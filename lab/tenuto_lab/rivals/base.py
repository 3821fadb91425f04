"""What rivals share: queues in order of deadlines, tables of batch times, pools of idle gpu-lets, and dropping of
requests that would be late."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from tenuto.batching.core.by_deadline import Queue
from tenuto.batching.core.gpulets import Pool
from tenuto.batching.core.scheduler import Dispatch, Drop, Scheduler, SchedulerOptions
from tenuto.batching.core.system import EXPIRY_MARGIN_MS, INF, TIME_TOLERANCE_MS, Host, NetworkDelay, System


class IdlePool:
    """The gpu-lets that host the same programs. They may differ in speed. Both heaps may contain stale entries."""

    __slots__ = ("hosts", "idle", "waiting")

    def __init__(self, hosts: Mapping[int, Host]) -> None:
        self.hosts = hosts
        self.idle: list[int] = []  # gpu-let indices; an entry is stale once its gpu-let is not marked idle
        self.waiting: list[tuple[float, int]] = []  # (rank, program); an entry is stale once the program's rank differs


class RivalQueue(Queue[Pool]):
    """The queue of one program. Its deadlines include the tolerance, so that a plain <= compares them.

    `sent[b]` is the time from the dispatch to the end of a batch of b on the fastest gpu-let. `quickest` is how long
    before its deadline a request is given up.
    """

    __slots__ = ("budget_ms", "idle_pools", "quickest", "rank", "sent", "timer_at")

    def __init__(self, program: int) -> None:
        super().__init__(program, [])
        self.idle_pools: list[IdlePool] = []  # fastest first
        self.sent: list[float] = [0.0]
        self.quickest = INF
        self.budget_ms = 0.0  # time from an arrival to the latest end of its batch, for the shortest SLO of the models
        self.timer_at = INF  # when the timer of a subclass is due
        self.rank = INF  # order among waiting programs; INF: not waiting


def head_first_batch(deadlines: list[float], now: float, sent: list[float]) -> tuple[int, int]:
    """Return how many requests at the front would be late even alone, and the size of the largest batch behind them.

    The size is 0 when no request is left.
    """
    skip = bisect_left(deadlines, now + sent[1])
    count = len(deadlines) - skip
    if not count:
        return skip, 0
    size = bisect_right(sent, deadlines[skip] - now) - 1
    return skip, min(size, count)


class RivalScheduler(Scheduler):
    """The base of the rivals. A subclass decides what an arrival, a free gpu-let, a new head and a timer cause.

    An event costs O(log M + log G) here, for M models and G gpu-lets, plus what the subclass does.
    """

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        count = len(system.gpulets)
        self._timers: list[tuple[float, int]] = []  # (time, key): a program, or programs + a key of the subclass
        self._queues = [RivalQueue(index) for index in range(len(system.programs))]
        self._queue_of = [self._queues[program] for program in system.program_of]
        self._idle = [True] * count
        self._busy = [False] * count
        self._lost = [False] * count
        self._factors: list[dict[int, float]] = [{} for _ in range(count)]
        self._pool_of: list[IdlePool] = []
        pools: dict[int, IdlePool] = {}
        for index, gpulet in enumerate(system.gpulets):
            pool = pools.setdefault(id(gpulet.hosts), IdlePool(gpulet.hosts))
            self._pool_of.append(pool)
            pool.idle.append(index)
        self._pools = list(pools.values())
        # By gpu-let and program: the time from dispatch to end, by batch size.
        self._tables: list[dict[int, list[float]]] = []
        self._adopt(system.network)

    def _adopt(self, network: NetworkDelay) -> None:
        """Compute all tables from the latencies, their corrections and the network delays."""
        self._ctrl_ms, self._data_ms = network.ctrl_ms, network.data_ms_per_request
        self._response_ms = network.response_ms
        shared: dict[object, dict[int, list[float]]] = {}
        self._tables = []
        for index, gpulet in enumerate(self.system.gpulets):
            key = (id(gpulet.hosts), tuple(sorted(self._factors[index].items())))
            if key not in shared:
                shared[key] = {program: self._table(index, program) for program in gpulet.hosts}
            self._tables.append(shared[key])
        distinct = list({id(table): (table, self._pool_of[g]) for g, table in enumerate(self._tables)}.values())
        for queue, spec in zip(self._queues, self.system.offered, strict=True):
            queue.budget_ms = spec.slo_ms - self._response_ms + TIME_TOLERANCE_MS
            own = sorted(
                ((table[queue.program], pool) for table, pool in distinct if queue.program in table),
                key=lambda t: t[0][1],
            )
            queue.idle_pools = list({id(pool): pool for _, pool in own}.values())
            if own:
                queue.sent = own[0][0]
                queue.quickest = self._give_up_ms(queue)

    def _table(self, gpulet: int, program: int) -> list[float]:
        host = self.system.gpulets[gpulet].hosts[program]
        factor = self._factors[gpulet].get(program, 1.0)
        delays = [0.0] + [self._ctrl_ms + self._data_ms * size for size in range(1, len(host.latency_ms))]
        return [latency * factor + delay for latency, delay in zip(host.planned_ms(), delays, strict=True)]

    def _give_up_ms(self, queue: RivalQueue) -> float:
        """Return how long before its deadline a queued request is given up: when it would be late even alone."""
        return queue.sent[1]

    # What a subclass decides -----------------------------------------------------------------------------------------

    def _arrived(self, now: float, queue: RivalQueue) -> None:
        """React to a request that was queued."""
        raise NotImplementedError

    def _freed(self, now: float, gpulet: int) -> None:
        """React to a gpu-let that has nothing to run: send a batch to it, or mark it with `_set_idle`."""
        raise NotImplementedError

    def _head_changed(self, now: float, queue: RivalQueue) -> None:
        """React to requests that left the queue without being run. The queue may be empty."""

    def _timer(self, now: float, at: float, key: int) -> None:
        """React to a timer that the subclass set with `_push_timer`."""

    def _tables_changed(self) -> None:
        """React to corrected latencies or delays."""

    # Events ----------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        due = deadline_ms - self._response_ms + TIME_TOLERANCE_MS
        if now_ms + queue.quickest > due:
            self.decisions.append(Drop(queue.program, [request_id]))
            return
        self._insert(queue, due, request_id, now_ms)
        self._arrived(now_ms, queue)

    def _insert(self, queue: RivalQueue, due: float, request_id: int, now: float) -> None:
        queue.insert(due, request_id, now)
        at = queue.deadlines[0] - queue.quickest + EXPIRY_MARGIN_MS
        if at < queue.expire_at:
            queue.expire_at = at
            self._push_timer(at, queue.program)

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        queue = self._queue_of[model]
        try:
            place = queue.ids.index(request_id)
        except ValueError:
            return False
        queue.remove(place, place + 1)
        self._head_changed(now_ms, queue)
        return True

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        if self._busy[gpulet] and not self._lost[gpulet]:
            self._busy[gpulet] = False
            self._freed(now_ms, gpulet)

    def wake(self, now_ms: float) -> None:
        timers, count = self._timers, len(self._queues)
        while timers and timers[0][0] <= now_ms:
            at, key = heappop(timers)
            if key >= count:
                self._timer(now_ms, at, key - count)
                continue
            queue = self._queues[key]
            if at == queue.expire_at:
                queue.expire_at = INF
                self._expire(now_ms, queue)
        self.next_wake_ms = timers[0][0] if timers else INF

    def _push_timer(self, at: float, key: int) -> None:
        heappush(self._timers, (at, key))
        if at < self.next_wake_ms:
            self.next_wake_ms = at

    def _expire(self, now: float, queue: RivalQueue) -> None:
        """Give up the requests that would be late on every gpu-let, and set the timer of the new head."""
        gone = bisect_left(queue.deadlines, now + queue.quickest)
        if gone:
            self._drop(queue, gone)
        if queue.deadlines:
            at = queue.deadlines[0] - queue.quickest + EXPIRY_MARGIN_MS
            if at < queue.expire_at:
                queue.expire_at = at
                self._push_timer(at, queue.program)
        if gone:
            self._head_changed(now, queue)

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:  # noqa: ARG002
        self._lost[gpulet] = True
        self._busy[gpulet] = self._idle[gpulet] = False

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        if self._lost[gpulet]:
            self._lost[gpulet] = False
            self._freed(now_ms, gpulet)

    def queued(self, program: int) -> int:
        return len(self._queues[program].ids)

    def update_latency(self, program: int, gpulet: int, factor: float) -> None:
        self._factors[gpulet][program] = factor
        self._adopt(NetworkDelay(self._ctrl_ms, self._data_ms, self._response_ms))
        self._tables_changed()

    def update_network(self, network: NetworkDelay) -> None:
        shift = self._response_ms - network.response_ms
        for queue in self._queues:
            queue.deadlines = [due + shift for due in queue.deadlines]
        self._adopt(network)
        self._tables_changed()

    # Gpu-lets and batches --------------------------------------------------------------------------------------------

    def _set_idle(self, gpulet: int) -> None:
        self._idle[gpulet] = True
        heappush(self._pool_of[gpulet].idle, gpulet)

    def _idle_for(self, queue: RivalQueue) -> int:
        """Return the idle gpu-let with the smallest index in the fastest pool that hosts the program; -1 if none."""
        is_idle = self._idle
        for pool in queue.idle_pools:
            idle = pool.idle
            while idle:
                if is_idle[idle[0]]:
                    return idle[0]
                heappop(idle)
        return -1

    def _send(self, now: float, queue: RivalQueue, gpulet: int, skip: int, size: int) -> None:
        """Run the `size` requests behind the first `skip`. Give up those of the first that would be late everywhere."""
        index = queue.program
        batch = queue.remove(skip, skip + size)
        if skip:
            gone = min(skip, bisect_left(queue.deadlines, now + queue.quickest))
            if gone:
                self._drop(queue, gone)
        self._idle[gpulet] = False
        self._busy[gpulet] = True
        start = now + self._ctrl_ms + self._data_ms * size
        self.decisions.append(Dispatch(gpulet, index, batch, start, now + self._tables[gpulet][index][size]))

    def _drop(self, queue: RivalQueue, count: int) -> None:
        self.decisions.append(Drop(queue.program, queue.remove(0, count)))

    # Waiting programs, for rivals that rank programs by a time -------------------------------------------------------

    def _wait(self, queue: RivalQueue, rank: float) -> None:
        """Let a program wait for a gpu-let under this rank. The program with the smallest rank is served first."""
        if rank != queue.rank:
            queue.rank = rank
            for pool in queue.idle_pools:
                heappush(pool.waiting, (rank, queue.program))
                if len(pool.waiting) > 64 + 8 * len(self._queues):
                    pool.waiting = [entry for entry in pool.waiting if self._queues[entry[1]].rank == entry[0]]
                    heapify(pool.waiting)
