"""What waits: the queue of each program, and which queues are looked at together, and when.

Two batches are in one part if they may need the same gpu-lets, at once or by way of others. Only a part is looked at,
so that the time a decision takes goes by what it concerns, and not by the number of models.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from tenuto.batching.core.deferred.admission import Allowance
from tenuto.batching.core.gathering import longest_within
from tenuto.batching.core.gpulets import Gpulets, Pool
from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, Model

ORDER = attrgetter("order")


@dataclass(slots=True, eq=False)
class Place(Pool):
    """A pool, and what waits for it.

    `alone` is the part of the time that its gpu-lets would be busy if every request ran alone, `crowd` the programs per
    gpu-let; where a program has gpu-lets in several pools, its part of both is the same on all. `waiting` by program;
    `is_enclosed`: no program on it has gpu-lets elsewhere. By the last plan: `free`, when its gpu-lets become free,
    `slack` in ms, and `least`, a heap of the batches on it, the one worth least first. `seen` is the last search that
    found it.
    """

    alone: float = 0.0
    crowd: float = 0.0
    waiting: dict[int, Queue] = field(default_factory=dict)
    is_enclosed: bool = False
    free: list[float] = field(default_factory=list)
    slack: float = INF
    least: list[tuple[int, float, int, Queue]] = field(default_factory=list)
    seen: int = 0


@dataclass(slots=True, eq=False)
class Queue:
    """The requests of one program in order of their deadlines, what its batches cost, and the batch it would run now.

    The batch: `size`, 0 if nothing can be met; on a gpu-let of `pool`; to be sent by `latest`, and from `due` on. It
    is as cut until `cut_until`, if no request comes or goes. `run_ms` is its length where the plan has it.
    """

    program: int
    rate: ArrivalRate
    allowance: Allowance
    worth: float  # of one request
    priority: int
    longest_hold_ms: float  # as asked for
    level: int = 0  # the priority, and lower while it exceeds its plan
    arrived: list[float] = field(default_factory=list)  # when the requests did
    deadlines: list[float] = field(default_factory=list)  # when the batch must have ended
    ids: list[int] = field(default_factory=list)
    oldest: float = INF  # when the first of them arrived
    alone: float = 0.0  # the load of each gpu-let that hosts it, if its requests ran alone
    patience: float = INF  # for how many times its own length a batch is held at most
    hold_at_most_ms: float = INF  # for how long a batch is held at most in any case
    is_bounded: bool = False  # how long a batch is held is bounded
    is_light: bool = False  # nobody needs the GPU time that holding saves
    lost: float = 0.0  # share of its requests lately
    loss_step: float = 0.0  # by which one request changes it
    pools: list[Place] = field(default_factory=list)  # fastest first
    run: list[float] = field(default_factory=lambda: [0.0])  # on the fastest, by plan
    factor: float = 1.0  # how many times as long it takes on the gpu-let that it was cut for, as measured
    least_factor: float = 1.0  # that of the gpu-let on which it was ever found to be fastest
    budget_ms: float = 0.0  # from arrival to the end of the batch
    held_ms: float = 0.0  # the same by the longest SLO of its models: who allows more is not held for longer
    gpulets: int = 1  # that host it
    longest: int = 1  # the largest batch that can be in time at all
    saving: float = 0.0  # part of the GPU time of its requests alone that this batch saves
    quickest_ms: float = INF  # from dispatch to the end of one request alone
    staggered: int = 1  # the batch of the staggered pattern
    defend: int = 1  # the size below which the head is given up
    ripe: int = 1  # the size that may go before it is due
    pool: Place | None = None
    size: int = 0
    way_ms: float = 0.0  # how long its data is on the way
    run_ms: float = 0.0
    latest: float = INF
    due: float = INF
    density: float = 0.0  # worth of its requests per ms
    cut_until: float = -INF
    is_open: bool = False  # a gpu-let can be sent its batch
    is_out: bool = False  # of the plan
    placed: Place | None = None  # the pool it has in the plan
    end: float = 0.0  # in the plan
    watch: Watch = field(init=False)
    order: int = 0  # when it began to wait
    seen: int = 0  # the last search that found it
    expire_at: float = INF  # when its head may have to be given up
    is_weighed: bool = False  # it is looked back at when its requests stop

    def __post_init__(self) -> None:
        self.watch = Watch([self])

    @classmethod
    def of(cls, program: int, offered: Model, worth: float) -> Queue:
        """Return the empty queue of a program."""
        hold_ms = INF if offered.longest_hold_ms is None else offered.longest_hold_ms
        rate = offered.rate_rps
        return cls(program, ArrivalRate(rate), Allowance(rate), worth, offered.priority, hold_ms)

    def adopt_costs(self, gpulets: Gpulets[Place], budget_ms: float, longest_slo_ms: float) -> None:
        """Take over where its batches run and what they cost there as far as known, and what follows from that."""
        program = self.program
        gpulets.order(program)
        pools = self.pools = gpulets.pools_of[program]
        self.budget_ms = budget_ms
        self.held_ms = longest_slo_ms + TIME_TOLERANCE_MS
        self.cut_until = -INF
        if pools:
            self.run = pools[0].run[program]
            self.factor = gpulets.factor(program, pools[0].idle[0] if pools[0].idle else pools[0].gpulets[0])
            self.quickest_ms = gpulets.way_ms(1) + self.least_factor * self.run[1]
            room_ms = budget_ms + TIME_TOLERANCE_MS - gpulets.ctrl_ms
            self.longest = max(1, longest_within(self.run, room_ms, self.factor, gpulets.data_ms))
            self.saving = 1.0 - self.run[self.longest] / (self.longest * self.run[1])
            self.gpulets = sum(pool.size for pool in pools)

    def take(self, begin: int, end: int) -> None:
        """Take requests out."""
        del self.ids[begin:end], self.deadlines[begin:end], self.arrived[begin:end]
        self.cut_until = -INF
        if self.ids:
            self.oldest = min(self.arrived)
        else:
            for pool in self.pools:
                pool.waiting.pop(self.program, None)


class Watch:
    """Batches that were lined up together, and when to look at them again."""

    __slots__ = ("at", "is_tight", "queues")

    def __init__(self, queues: list[Queue]) -> None:
        self.queues = queues
        self.at = INF
        self.is_tight = False  # the plan has no slack somewhere: ripe batches may go there


class Waiting:
    """Which queues wait together, and when to look at them."""

    def __init__(self, queues: list[Queue]) -> None:
        self._queues = queues
        self._is_shared = len(queues) != 1  # a program by itself has one watch, and needs no heap
        self._watches: list[tuple[float, int, Watch]] = []  # a heap; valid is what says when its watch is
        self._touched: list[Place] = []  # where something happened: who waits for them is looked at at once
        self._pushed = self._order = self._search = 0

    def wait(self, queue: Queue) -> None:
        """A queue has requests."""
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
        """Look at a part then."""
        watch.at = at
        if self._is_shared and at < INF:
            self._pushed += 1
            heappush(self._watches, (at, self._pushed, watch))

    def touch(self, pools: Iterable[Place]) -> bool:
        """Look at once at what waits for some pools; False: nothing does."""
        touched = [pool for pool in pools if pool.waiting]
        self._touched += touched
        return bool(touched)

    def ripe(self, now: float) -> list[Queue]:
        """Return the queues to look at now."""
        queues: list[Queue] = []
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

    def part(self, queues: list[Queue]) -> list[Queue]:
        """Return, of some queues, those with requests, and all that wait for gpu-lets together with them: where as many
        gpu-lets are idle as programs wait, nobody keeps another from any."""
        self._search += 1
        search = self._search
        part: list[Queue] = []
        for queue in queues:
            if queue.ids:
                queue.seen = search
                part.append(queue)
        for queue in part:
            for pool in queue.pools:
                if pool.seen != search:
                    pool.seen = search
                    if len(pool.waiting) > len(pool.idle):
                        for other in pool.waiting.values():
                            if other.seen != search:
                                other.seen = search
                                part.append(other)
        if len(part) > 1:
            part.sort(key=ORDER)
        return part

    def watch_together(self, part: list[Queue]) -> Watch:
        """Return the one watch of a part."""
        watch = part[0].watch
        if len(part) > 1 or len(watch.queues) > 1:
            watch = Watch(part)
            for queue in part:
                queue.watch = watch
        return watch
