"""State of the deferred scheduler: models with their queues, and gpu-lets grouped by what they hold and their speed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from heapq import heapify, heappush

from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, Host, NetworkDelay
from tenuto.batching.core.target import ArrivalRate

__all__ = ["Lane", "ModelQueue", "Pool"]


class Lane:
    """One model on one pool: its latencies as the scheduler plans with them, in ms by batch size.

    `run[b]` is l(b); `sent[b]` adds the data delay; `lead[b]` is how long before the head's deadline a batch of b has
    to be sent so that it could not grow any further: l(b+1) and the delay of b+1. `cap` is the largest size worth
    waiting for. `load` is the number of gpu-lets the model keeps busy here, `load_ms` that times the length of its
    batches; the pool holds their sums.
    """

    __slots__ = ("cap", "factor", "lead", "load", "load_ms", "pool", "run", "sent")

    def __init__(self, pool: Pool, factor: float) -> None:
        self.pool = pool
        self.factor = factor
        self.cap = 1
        self.load = 0.0
        self.load_ms = 0.0
        self.run: list[float] = []
        self.sent: list[float] = []
        self.lead: list[float] = []

    def adopt(self, host: Host, network: NetworkDelay, budget_ms: float) -> None:
        """Compute the tables from the host's latency, the correction factor and the network's delays."""
        self.run = [latency * self.factor for latency in host.planned_ms()]
        self.sent = [latency + network.data_ms_per_request * size for size, latency in enumerate(self.run)]
        fitting = bisect_right(self.sent, budget_ms - network.ctrl_ms + TIME_TOLERANCE_MS) - 1
        self.cap = max(1, fitting)
        self.lead = [ms + network.ctrl_ms for ms in self.sent[1:]]
        self.lead.append(INF)
        self.lead[self.cap :] = [INF] * (len(self.lead) - self.cap)


class Pool:
    """Gpu-lets that hold the same models at the same speeds, as heaps whose entries may be stale."""

    __slots__ = ("hosts", "idle", "index", "lanes", "load", "load_ms", "size", "soon", "timer", "waiting")

    def __init__(self, index: int, hosts: Mapping[int, Host]) -> None:
        self.index = index
        self.hosts = hosts
        self.size = 0
        self.load = 0.0
        self.load_ms = 0.0
        self.lanes: dict[int, Lane] = {}
        self.idle: list[int] = []  # gpu-let indices; valid while the gpu-let is marked idle and in this pool
        self.soon: list[tuple[float, int]] = []  # (free at, gpu-let) of running ones; only with a network delay
        self.waiting: list[tuple[float, int]] = []  # (rank, model); valid while it is the model's rank
        self.timer = INF

    def add_waiting(self, rank: float, model: int, models: list[ModelQueue]) -> None:
        """Enter a model among the waiting ones; entries that went stale are cleared out before they pile up."""
        waiting = self.waiting
        if len(waiting) > 64 + 4 * len(models):
            waiting[:] = {entry for entry in waiting if models[entry[1]].waiting and models[entry[1]].rank == entry[0]}
            heapify(waiting)
        heappush(waiting, (rank, model))

    def set_load(self, lane: Lane, load: float, batch_ms: float) -> None:
        """Take over how many gpu-lets a lane of this pool keeps busy, with batches of which length."""
        self.load += load - lane.load
        self.load_ms += load * batch_ms - lane.load_ms
        lane.load, lane.load_ms = load, load * batch_ms


class ModelQueue:
    """One model: its queue in order of deadlines, and when it has to be looked at again."""

    __slots__ = (
        "batch_ms",
        "budget_ms",
        "cost_ms",
        "deadlines",
        "dirty",
        "early_ms",
        "full",
        "ids",
        "index",
        "lanes",
        "lead",
        "rank",
        "rate",
        "release",
        "reserve_ms",
        "stage",
        "target",
        "timer",
        "waiting",
    )

    def __init__(self, index: int, rate: ArrivalRate) -> None:
        self.index = index
        self.rate = rate
        self.budget_ms = 0.0  # from arrival to the end of the batch
        self.deadlines: list[float] = []  # ascending; when the batch must have ended
        self.ids: list[int] = []
        self.lanes: list[Lane] = []  # slowest first
        self.cost_ms = 0.0  # gpu-let time of one request, as batches were lately; 0: none ran
        self.batch_ms = 0.0  # length of its batches, the longer ones counting more
        self.stage = 0  # which lane's frontrun is awaited
        self.lead: list[float] = [INF]  # that lane's
        self.target = 1  # the size defended by giving requests up
        self.release = 1  # the queue length that need not wait for frontrun
        self.full = 1  # the same within the awaited lane's cap
        self.reserve_ms = 0.0  # head start on frontrun that collisions of batches ask for
        self.early_ms = 0.0  # the whole head start on frontrun, that of the balance included
        self.timer = INF  # frontrun, or for a waiting model the expiry of its head
        self.dirty = False  # timer not yet in the heap
        self.waiting = False
        self.rank = INF

    def order_lanes(self) -> None:
        """Sort slowest first; among equals the most general pool first: the last, preferred one is the most special."""
        common = min(len(lane.run) for lane in self.lanes) - 1
        self.lanes.sort(key=lambda lane: (-lane.run[common], -len(lane.pool.hosts), -lane.pool.index))

    def await_stage(self, stage: int) -> None:
        """Await the frontrun of the lane at this position."""
        self.stage = stage
        lane = self.lanes[stage]
        self.lead = lane.lead
        self.full = self.release if self.release < lane.cap else lane.cap
