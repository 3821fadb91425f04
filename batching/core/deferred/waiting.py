"""The queue of each program, which queues are looked at together, and when.

Two batches are in one *part* when they may need the same gpu-lets, directly or through other batches. Only one part is
looked at for a decision, so that a decision takes time by the size of that part and not by the number of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from tenuto.batching.core.by_deadline import Queue
from tenuto.batching.core.deferred.allowance import Allowance
from tenuto.batching.core.deferred.loss import Loss
from tenuto.batching.core.gathering import longest_within
from tenuto.batching.core.gpulets import Gpulets, Pool
from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, Model

ORDER = attrgetter("order")


@dataclass(slots=True, eq=False)
class WaitingPool(Pool):
    """A pool, and what waits for it.

    `alone` is the part of the time that its gpu-lets would be busy if every request ran alone. `crowd` is the number of
    programs per gpu-let. When a program has gpu-lets in several pools, it counts the same in each. `waiting` has the
    queues that wait, by program. `is_enclosed`: no program of this pool has gpu-lets in another one. The last line-up
    set `free` (when gpu-lets become free), `slack` in ms, and `least`, a heap of the batches placed here, the least
    valuable first. `seen` is the number of the last search that found this pool.
    """

    alone: float = 0.0
    crowd: float = 0.0
    waiting: dict[int, WaitingQueue] = field(default_factory=dict)
    is_enclosed: bool = False
    free: list[float] = field(default_factory=list)
    slack: float = INF
    least: list[tuple[int, float, int, WaitingQueue]] = field(default_factory=list)
    seen: int = 0


@dataclass(slots=True, eq=False)
class Costs:
    """What batches of a program cost by what is known, and how large they should be."""

    run: list[float] = field(default_factory=lambda: [0.0])  # planned l(b) on the fastest gpu-let
    budget_ms: float = 0.0  # the longest time from arrival to the end of the batch, by the shortest SLO of its models
    held_ms: float = 0.0  # the same by the longest SLO of its models: the upper bound of holding
    gpulets: int = 1  # how many gpu-lets host it
    longest: int = 1  # the largest batch that can be in time at all
    quickest_ms: float = INF  # from dispatch to the end of one request alone
    alone: float = 0.0  # the load that its requests would be for each of its gpu-lets, if each request ran alone
    busy: float = 0.0  # how many gpu-lets its requests keep busy in staggered batches
    staggered: int = 1  # the size of the staggered batch
    defend: int = 1  # when the head keeps the batch below this size, it is given up
    defend_on: dict[int, int] = field(
        default_factory=dict
    )  # by pool, where larger batches are planned than on the fastest
    ripe: int = 1  # the size from which a batch may start before it is due

    @property
    def patience_ms(self) -> float:
        """How long a request can wait, in ms."""
        return self.budget_ms - self.quickest_ms


@dataclass(slots=True, eq=False)
class Hold:
    """The bounds on how long batches of a program are held."""

    most_ms: float = INF  # the model's `longest_hold_ms`
    patience: float = INF  # a multiple of the batch's own latency
    lull_ms: float = INF  # from the newest request, not from the oldest
    is_light: bool = False  # under light load: no program needs the GPU time that holding saves
    is_bounded: bool = False  # one of these bounds applies


@dataclass(slots=True, eq=False)
class CutBatch:
    """The batch that a queue would run now, and its place in the line-up.

    The cut sets `size` (0: no request can be met) and `pool`, where the program takes `factor` times its planned
    latency. The batch may be sent from `due` on and must be sent by `latest`. The cut holds until `cut_until`, or until
    a request comes or goes.
    """

    pool: WaitingPool | None = None
    size: int = 0
    factor: float = 1.0
    way_ms: float = 0.0  # how long its data is on the way
    latest: float = INF
    due: float = INF
    density: float = 0.0  # worth of its requests per ms
    effective_priority: int = 0  # lowered while the program exceeds its plan
    cut_until: float = -INF
    is_open: bool = False  # a gpu-let can take it now
    # In the line-up:
    is_out: bool = False
    placed: WaitingPool | None = None  # the pool on which it was placed
    run_ms: float = 0.0
    end: float = 0.0


class WaitingQueue(Queue[WaitingPool]):
    """A queue, what is known and planned of its program, and the batch it would run now."""

    __slots__ = (
        "allowance",
        "batch",
        "costs",
        "hold",
        "is_weighed",
        "loss",
        "newest",
        "oldest",
        "order",
        "priority",
        "provided_rps",
        "rate",
        "seen",
        "siblings",
        "watch",
        "worth",
    )

    def __init__(self, program: int, pools: list[WaitingPool], offered: Model, worth: float) -> None:
        super().__init__(program, pools)
        self.worth = worth  # of one request
        self.priority = offered.priority
        self.provided_rps = offered.provided_rps
        self.rate = ArrivalRate(offered.rate_rps)
        self.allowance = Allowance(offered.rate_rps)
        self.loss = Loss()
        self.costs = Costs()
        self.hold = Hold(INF if offered.longest_hold_ms is None else offered.longest_hold_ms)
        self.batch = CutBatch()
        self.watch = Watch([self])
        self.oldest = INF  # when the first of the requests arrived
        self.newest = -INF  # when the last request arrived
        # Of a size class: the other classes of its model, smallest first, each with the smallest one that covers both.
        self.siblings: list[tuple[WaitingQueue, WaitingQueue]] = []
        self.order = 0  # when it began to wait
        self.seen = 0  # the number of the last search that found it
        self.is_weighed = False  # a timer will look whether its requests have stopped

    def adopt_costs(self, gpulets: Gpulets[WaitingPool], budget_ms: float, longest_slo_ms: float) -> None:
        """Take over what batches of the program cost now, and what follows from that."""
        costs, batch, pools = self.costs, self.batch, self.pools
        gpulets.order(self.program)
        costs.budget_ms = budget_ms
        costs.held_ms = longest_slo_ms + TIME_TOLERANCE_MS
        batch.cut_until = -INF
        if pools:
            run = costs.run = pools[0].run[self.program]
            batch.factor = gpulets.factor(self.program, pools[0].idle[0] if pools[0].idle else pools[0].gpulets[0])
            costs.quickest_ms = gpulets.way_ms(1) + self.least_factor * run[1]
            room_ms = budget_ms + TIME_TOLERANCE_MS - gpulets.ctrl_ms
            runs = [run, *[pool.run[self.program] for pool in self.larger()]]
            longest = [longest_within(each, room_ms, batch.factor, gpulets.data_ms) for each in runs]
            costs.longest = max(1, *longest)
            costs.gpulets = max(1, sum([pool.size for pool in pools]))

    def larger(self) -> list[WaitingPool]:
        """Return the pools on which larger batches are planned than on the fastest one."""
        most = len(self.pools[0].run[self.program])
        return [pool for pool in self.pools[1:] if len(pool.run[self.program]) > most]

    def remove(self, begin: int, end: int) -> list[int]:
        removed = super().remove(begin, end)
        self.batch.cut_until = -INF
        if self.ids:
            self.oldest = min(self.arrived)
        else:
            for pool in self.pools:
                pool.waiting.pop(self.program, None)
        return removed


class Watch:
    """Batches that were lined up together, and when to look at them again."""

    __slots__ = ("at", "is_tight", "queues")

    def __init__(self, queues: list[WaitingQueue]) -> None:
        self.queues = queues
        self.at = INF
        self.is_tight = False  # a pool has no slack: ripe batches may start there


class Waiting:
    """Which queues wait together, and when to look at them."""

    def __init__(self, queues: list[WaitingQueue], gpulets: Gpulets[WaitingPool]) -> None:
        self._queues = queues
        self._gpulets = gpulets
        self._is_shared = len(queues) != 1  # a program by itself has one watch, and needs no heap
        self._watches: list[tuple[float, int, Watch]] = []  # a heap by time; stale unless it is the watch's `at`
        self._touched: list[WaitingPool] = []  # pools whose waiting queues must be looked at at once
        self._pushed = self._order = self._search = 0

    def wait(self, queue: WaitingQueue) -> None:
        """Note that a queue has requests now."""
        self._order += 1
        queue.order = self._order
        if len(queue.watch.queues) > 1:
            queue.watch = Watch([queue])
        else:
            queue.watch.at = INF
            queue.watch.is_tight = False
        for pool in queue.pools:
            pool.waiting[queue.program] = queue

    def look_at(self, watch: Watch, at: float) -> None:
        """Set when to look at a part."""
        watch.at = at
        if self._is_shared and at < INF:
            self._pushed += 1
            heappush(self._watches, (at, self._pushed, watch))

    def touch(self, pools: Iterable[WaitingPool]) -> bool:
        """Look at once at the queues that wait for some pools; False if none wait."""
        touched = [pool for pool in pools if pool.waiting]
        self._touched += touched
        return bool(touched)

    def ripe(self, now: float) -> list[WaitingQueue]:
        """Return the queues to look at now."""
        queues: list[WaitingQueue] = []
        for pool in self._touched:
            queues += pool.waiting.values()
        self._touched.clear()
        if not self._is_shared and (queues or self._queues[0].watch.at <= now):
            self._queues[0].watch.at = INF
            queues = self._queues
        watches = self._watches
        while watches and watches[0][0] <= now:
            at, _, watch = heappop(watches)
            if watch.at == at:
                watch.at = INF
                queues += [queue for queue in watch.queues if queue.watch is watch]
        return queues

    def next_ms(self) -> float:
        """Return when to look again."""
        if not self._is_shared:
            return self._queues[0].watch.at
        watches = self._watches
        while watches and watches[0][2].at != watches[0][0]:
            heappop(watches)
        return watches[0][0] if watches else INF

    def part(self, queues: list[WaitingQueue], now: float) -> list[WaitingQueue]:
        """Return those of the queues that have requests, and all queues that compete with them for gpu-lets. When as
        many gpu-lets of a pool are ready as programs wait for it, they do not compete there."""
        self._search += 1
        gpulets = self._gpulets
        search = self._search
        part: list[WaitingQueue] = []
        for queue in queues:
            if queue.ids:
                queue.seen = search
                part.append(queue)
        for queue in part:
            for pool in queue.pools:
                if pool.seen != search:
                    pool.seen = search
                    waiting = len(pool.waiting)
                    if waiting > len(pool.idle) and (not gpulets.ahead or waiting > gpulets.ready(pool, now)):
                        for other in pool.waiting.values():
                            if other.seen != search:
                                other.seen = search
                                part.append(other)
        if len(part) > 1:
            part.sort(key=ORDER)
        return part

    def watch_together(self, part: list[WaitingQueue]) -> Watch:
        """Return the watch that all queues of a part share."""
        watch = part[0].watch
        if len(part) > 1 or len(watch.queues) > 1:
            watch = Watch(part)
            for queue in part:
                queue.watch = watch
        return watch
