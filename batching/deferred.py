"""Deferred batch scheduling: a batch is held as long as its deadline allows it to grow, and never longer.

Symphony's Algorithm 1 in the extended form of its appendix D (arXiv 2308.07470), over gpu-lets instead of GPUs. Each model has
a queue and a candidate batch with two moments: *frontrun* `d - l(b+1)`, when waiting for one more request would cost the
head its deadline, and *latest* `d - l(b)`. At frontrun a model takes the idle gpu-let of the smallest index; if there is none
it waits, and a gpu-let that becomes free takes the waiting model whose latest moment comes first. Every comparison of times
admits equality; with strict ones the paper's own trace (§3.3) fails.

Gpu-lets with the same models and latencies form a pool, so that a new request costs O(log M) and a completion O(log M + log G).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tenuto.batching.gathering import GATHERING
from tenuto.batching.interface import (
    INF,
    TIME_TOLERANCE_MS,
    Dispatch,
    Drop,
    Host,
    NetworkDelay,
    Scheduler,
    SchedulerOptions,
    Setup,
)
from tenuto.batching.target import ArrivalRate, target_batch

__all__ = ["DeferredOptions", "DeferredScheduler"]

EXPIRY_MARGIN_MS = 1e-3  # how long after the last possible start a queued request is given up


@dataclass(frozen=True)
class DeferredOptions(SchedulerOptions):
    """What can be varied; the defaults are the measured best (docs/benchmarks-batching.md)."""

    gather: str = field(default="window", metadata={"choices": tuple(GATHERING)})
    release: str = field(default="target", metadata={"choices": ("frontrun", "target")})
    target: str = field(default="rate", metadata={"choices": ("rate", "gpus", "none")})
    rank: str = field(default="latest", metadata={"choices": ("latest", "deadline")})


class _Lane:
    """One model on one pool: its latencies as the scheduler plans with them, in ms by batch size.

    `run[b]` is l(b); `sent[b]` adds the data delay; `lead[b]` is how long before the head's deadline a batch of b has to be
    sent to be just in time for growing no further: l(b+1) + delay(b+1).
    """

    __slots__ = ("cap", "lead", "pool", "run", "sent")

    def __init__(self, pool: _Pool, host: Host, factor: float, network: NetworkDelay, budget_ms: float) -> None:
        self.pool = pool
        self.run = [latency * factor for latency in host.planned_ms()]
        self.sent = [latency + network.data_ms_per_request * size for size, latency in enumerate(self.run)]
        # Sizes that miss the model's own SLO are never worth waiting for.
        fitting = bisect_right(self.sent, budget_ms - network.ctrl_ms + TIME_TOLERANCE_MS) - 1
        self.cap = max(1, fitting)
        self.lead = [ms + network.ctrl_ms for ms in self.sent[1:]]
        self.lead.append(INF)
        self.lead[self.cap :] = [INF] * (len(self.lead) - self.cap)


class _Pool:
    """Gpu-lets that hold the same models at the same speeds."""

    __slots__ = ("hosts", "idle", "index", "lanes", "soon", "timer", "waiting")

    def __init__(self, index: int, hosts: Mapping[int, Host]) -> None:
        self.index = index
        self.hosts = hosts
        self.lanes: dict[int, _Lane] = {}
        self.idle: list[int] = []  # heap of gpu-let indices; valid while the gpu-let is marked idle
        self.soon: list[tuple[float, int]] = []  # heap of (free at, gpu-let) of running ones; only with a network delay
        self.waiting: list[tuple[float, int]] = []  # heap of (rank, model); valid while it is the model's rank
        self.timer = INF


class _Model:
    __slots__ = (
        "budget_ms", "deadlines", "dirty", "full", "ids", "index", "lanes", "lead", "rank", "rate", "stage", "target", "timer",
        "waiting",
    )

    def __init__(self, index: int, budget_ms: float, rate: ArrivalRate) -> None:
        self.index = index
        self.budget_ms = budget_ms
        self.deadlines: list[float] = []  # ascending; when the batch must have ended
        self.ids: list[int] = []
        self.lanes: list[_Lane] = []  # slowest first
        self.stage = 0  # which lane's frontrun is awaited
        self.lead: list[float] = [INF]
        self.full = 1  # queue length that is released without waiting for frontrun
        self.target = 1
        self.rate = rate
        self.timer = INF  # frontrun, or for a waiting model the expiry of its head
        self.dirty = False  # timer not yet in the heap
        self.waiting = False
        self.rank = INF


class DeferredScheduler(Scheduler):
    """Symphony. See the module's text; the invariant is that a model is waiting only while no gpu-let it could use is idle."""

    name = "deferred"
    summary = "Symphony: hold each batch as long as its deadline allows, most urgent model first"
    options_type = DeferredOptions

    def __init__(self, setup: Setup, options: SchedulerOptions | None = None) -> None:
        super().__init__(setup, options)
        chosen = options if isinstance(options, DeferredOptions) else DeferredOptions()
        self._options = chosen
        self._gather = GATHERING[chosen.gather]
        self._network = setup.network
        self._timers: list[tuple[float, int]] = []  # (time, model index, or number of models + pool index)
        self._dirty: list[_Model] = []
        count = len(setup.gpulets)
        self._pending = [0] * count
        self._free_at = [0.0] * count
        self._is_idle = [False] * count
        self._is_lost = [False] * count
        self._factors: list[dict[int, float]] = [{} for _ in range(count)]
        self._pools: list[_Pool] = []
        self._pool_by_key: dict[object, _Pool] = {}
        self._pool_of: list[_Pool] = []
        self._models = [_Model(i, 0.0, ArrivalRate(spec.rate_rps)) for i, spec in enumerate(setup.models)]
        self._adopt_network(setup.network)
        for gpulet in range(count):
            self._pool_of.append(self._pool_for(gpulet))
        for gpulet in range(count):
            self._set_idle(gpulet)

    # Building -------------------------------------------------------------------------------------------------------

    def _adopt_network(self, network: NetworkDelay) -> None:
        self._network = network
        self._ctrl_ms = network.ctrl_ms
        self._response_ms = network.response_ms
        self._ahead = network.ctrl_ms > 0 or network.data_ms_per_request > 0
        for model, spec in zip(self._models, self.setup.models, strict=True):
            model.budget_ms = spec.slo_ms - network.response_ms

    def _pool_for(self, gpulet: int) -> _Pool:
        hosts = self.setup.gpulets[gpulet].hosts
        key = (id(hosts), tuple(sorted(self._factors[gpulet].items())))
        pool = self._pool_by_key.get(key)
        if pool is None:
            pool = _Pool(len(self._pools), hosts)
            self._pool_by_key[key] = pool
            self._pools.append(pool)
            for index, host in hosts.items():
                model = self._models[index]
                factor = self._factors[gpulet].get(index, 1.0)
                lane = _Lane(pool, host, factor, self._network, model.budget_ms)
                pool.lanes[index] = lane
                model.lanes.append(lane)
                self._order_lanes(model)
                if model.waiting:
                    heappush(pool.waiting, (model.rank, index))
        return pool

    def _order_lanes(self, model: _Model) -> None:
        """Slowest first; among equals the pool with more models first, so that the last, preferred one is the most specialised."""
        common = min(len(lane.run) for lane in model.lanes) - 1
        model.lanes.sort(key=lambda lane: (-lane.run[common], len(lane.pool.hosts), lane.pool.index), reverse=False)
        model.stage = 0
        self._refresh_target(model)

    def _refresh_target(self, model: _Model) -> None:
        options = self._options
        fastest = model.lanes[-1]
        if options.target == "none":
            model.target = fastest.cap
        else:
            rate = model.rate.rps
            if options.target == "gpus":
                gpus = float(sum(1 for pool in self._pool_of if model.index in pool.lanes) or 1)
                model.target = target_batch(fastest.sent, model.budget_ms - self._ctrl_ms, None, gpus)
            else:
                model.target = target_batch(fastest.sent, model.budget_ms - self._ctrl_ms, rate, None)
        lane = model.lanes[model.stage]
        model.lead = lane.lead
        model.full = min(lane.cap, model.target) if options.release == "target" else lane.cap

    # Events in ------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model_index: int, request_id: int, deadline_ms: float) -> None:
        model = self._models[model_index]
        model.rate.count += 1
        deadlines = model.deadlines
        deadline_ms -= self._response_ms
        if deadlines and deadline_ms < deadlines[-1]:
            position = bisect_right(deadlines, deadline_ms)
            deadlines.insert(position, deadline_ms)
            model.ids.insert(position, request_id)
            if not position and model.waiting:
                self._arm(model, now_ms)
        else:
            deadlines.append(deadline_ms)
            model.ids.append(request_id)
        if model.waiting:
            return
        count = len(deadlines)
        due = deadlines[0] - model.lead[count] if count < model.full else now_ms
        if due < model.timer:
            model.timer = due
            if not model.dirty:
                model.dirty = True
                self._dirty.append(model)
            if due < self.next_wake_ms:
                self.next_wake_ms = due

    def cancel(self, now_ms: float, model_index: int, request_id: int) -> bool:
        model = self._models[model_index]
        try:
            position = model.ids.index(request_id)
        except ValueError:
            return False
        del model.ids[position]
        del model.deadlines[position]
        if not model.ids:
            model.timer = INF
            model.waiting = False
        elif model.waiting:
            self._wait(model, now_ms)
        elif self._arm(model, now_ms):
            self._due(model, now_ms)
        return True

    def batch_done(self, now_ms: float, gpulet_index: int) -> None:
        pending = self._pending
        pending[gpulet_index] -= 1
        if self._is_lost[gpulet_index]:
            return
        pool = self._pool_of[gpulet_index]
        if pending[gpulet_index]:
            heappush(pool.soon, (self._free_at[gpulet_index], gpulet_index))
        elif not (pool.waiting and self._serve_waiting(pool, gpulet_index, now_ms)):
            self._set_idle(gpulet_index)
        if self._ahead:
            self._arm_pool(pool)

    def wake(self, now_ms: float) -> None:
        timers, dirty, models = self._timers, self._dirty, self._models
        count = len(models)
        while True:
            if dirty:
                for model in dirty:
                    model.dirty = False
                    if model.timer < INF:
                        heappush(timers, (model.timer, model.index))
                dirty.clear()
            if not timers:
                self.next_wake_ms = INF
                return
            time, index = timers[0]
            if index >= count:
                pool = self._pools[index - count]
                if pool.timer != time:
                    heappop(timers)
                elif time <= now_ms:
                    heappop(timers)
                    pool.timer = INF
                    self._serve_ahead(pool, now_ms)
                else:
                    break
                continue
            model = models[index]
            if model.timer != time:
                heappop(timers)
            elif time <= now_ms:
                heappop(timers)
                model.timer = INF
                if model.waiting:
                    self._expire(model, now_ms)
                else:
                    self._due(model, now_ms)
            else:
                break
        self.next_wake_ms = time

    def gpulet_lost(self, now_ms: float, gpulet_index: int) -> None:
        self._is_lost[gpulet_index] = True
        self._is_idle[gpulet_index] = False
        self._pending[gpulet_index] = 0

    def gpulet_back(self, now_ms: float, gpulet_index: int) -> None:
        self._is_lost[gpulet_index] = False
        self._pending[gpulet_index] = 0
        self._free_at[gpulet_index] = now_ms
        pool = self._pool_of[gpulet_index]
        if not self._serve_waiting(pool, gpulet_index, now_ms):
            self._set_idle(gpulet_index)

    def queued(self, model_index: int) -> int:
        return len(self._models[model_index].ids)

    def update_latency(self, model_index: int, gpulet_index: int, factor: float) -> None:
        factors = self._factors[gpulet_index]
        rounded = round(factor, 2)
        if model_index not in self.setup.gpulets[gpulet_index].hosts or factors.get(model_index, 1.0) == rounded:
            return
        factors[model_index] = rounded
        if rounded == 1.0:
            del factors[model_index]
        old = self._pool_of[gpulet_index]
        pool = self._pool_of[gpulet_index] = self._pool_for(gpulet_index)
        if self._is_idle[gpulet_index]:
            heappush(pool.idle, gpulet_index)
        elif self._pending[gpulet_index] == 1 and self._ahead:
            heappush(pool.soon, (self._free_at[gpulet_index], gpulet_index))
        if old not in self._pool_of:
            self._retire(old)

    def _retire(self, pool: _Pool) -> None:
        """Forget a pool that lost its last gpu-let."""
        self._pool_by_key = {key: kept for key, kept in self._pool_by_key.items() if kept is not pool}
        pool.timer = INF
        for index, lane in pool.lanes.items():
            model = self._models[index]
            model.lanes.remove(lane)
            if model.lanes:
                self._order_lanes(model)

    def update_network(self, network: NetworkDelay) -> None:
        self._adopt_network(network)
        for pool in self._pools:
            for index, lane in list(pool.lanes.items()):
                model = self._models[index]
                if lane not in model.lanes:
                    continue
                host = pool.hosts[index]
                factor = lane.run[1] / (host.latency_ms[1] * host.slowdown)
                lane.__init__(pool, host, factor, network, model.budget_ms)  # type: ignore[misc]
                self._order_lanes(model)

    # Decisions ------------------------------------------------------------------------------------------------------

    def _set_idle(self, gpulet: int) -> None:
        self._is_idle[gpulet] = True
        heappush(self._pool_of[gpulet].idle, gpulet)

    def _idle_in(self, pool: _Pool) -> int:
        """Return the idle gpu-let of the smallest index, or -1."""
        idle, is_idle, pool_of = pool.idle, self._is_idle, self._pool_of
        while idle:
            if is_idle[idle[0]] and pool_of[idle[0]] is pool:
                return idle[0]
            heappop(idle)
        return -1

    def _free_in(self, pool: _Pool, ready_at: float, now: float) -> int:
        """Return an idle gpu-let, else one that will be free by `ready_at` when the data has arrived; -1 if none."""
        gpulet = self._idle_in(pool)
        if gpulet >= 0 or not self._ahead:
            return gpulet
        soon = pool.soon
        while soon:
            free_at, gpulet = soon[0]
            stale = self._pending[gpulet] != 1 or self._free_at[gpulet] != free_at or self._pool_of[gpulet] is not pool
            if stale or free_at < now - TIME_TOLERANCE_MS or self._is_lost[gpulet]:  # overdue: wait until it reports
                heappop(soon)
            elif free_at <= ready_at + TIME_TOLERANCE_MS:
                return gpulet
            else:
                break
        return -1

    def _due(self, model: _Model, now: float) -> None:
        """The model's frontrun moment has come: take a gpu-let for as long as it is due, or join the waiting ones."""
        if not model.lanes:
            self._drop(model, len(model.ids))
            return
        if now >= model.rate.next_at:
            model.rate.roll(now)
            self._refresh_target(model)
        while True:
            lanes = model.lanes
            chosen = -1
            lane = lanes[model.stage]
            if len(lanes) > 1:
                if model.stage + 1 < len(lanes) and any(
                    self._free_in(faster.pool, now, now) >= 0 for faster in lanes[model.stage + 1 :]
                ):
                    self._set_stage(model, model.stage + 1)
                    if not self._arm(model, now):
                        return
                    continue
                for lane in reversed(lanes):
                    chosen = self._free_in(lane.pool, self._ready_at(lane, model, now), now)
                    if chosen >= 0:
                        break
            else:
                chosen = self._free_in(lane.pool, self._ready_at(lane, model, now) if self._ahead else now, now)
            if chosen < 0 or not self._dispatch(model, lane, chosen, now):
                if model.ids:
                    self._wait(model, now)
                return
            if not model.ids or not self._arm(model, now):
                return

    def _ready_at(self, lane: _Lane, model: _Model, now: float) -> float:
        size = min(len(model.ids), lane.cap)
        return now + self._ctrl_ms + lane.sent[size] - lane.run[size]

    def _set_stage(self, model: _Model, stage: int) -> None:
        model.stage = stage
        lane = model.lanes[stage]
        model.lead = lane.lead
        model.full = min(lane.cap, model.target) if self._options.release == "target" else lane.cap

    def _arm(self, model: _Model, now: float) -> bool:
        """Set the timer of a model with a queue; True, and no timer, when it is due already."""
        deadlines = model.deadlines
        if model.waiting:
            fastest = model.lanes[-1]
            due = deadlines[0] - self._ctrl_ms - fastest.sent[1] + EXPIRY_MARGIN_MS
        else:
            count = len(deadlines)
            due = deadlines[0] - model.lead[count] if count < model.full else now
            if due <= now:
                model.timer = INF
                return True
        model.timer = due
        if not model.dirty:
            model.dirty = True
            self._dirty.append(model)
        if due < self.next_wake_ms:
            self.next_wake_ms = due
        return False

    def _wait(self, model: _Model, now: float) -> None:
        """Join the models that wait for a gpu-let, ranked by the latest moment of the batch as it stands."""
        lane = model.lanes[-1]
        deadlines = model.deadlines
        skip, size = self._gather(deadlines, model.target, now + self._ctrl_ms, lane.sent, now, lane.run)
        if not size:
            self._expire(model, now)
            return
        model.waiting = True
        rank = deadlines[skip]
        if self._options.rank == "latest":
            rank -= lane.run[size]
        model.rank = rank
        index = model.index
        for lane in model.lanes:
            heappush(lane.pool.waiting, (rank, index))
            if self._ahead:
                self._arm_pool(lane.pool)
        self._arm(model, now)

    def _expire(self, model: _Model, now: float) -> None:
        """Drop the requests at the front that cannot be met even alone on the fastest gpu-let."""
        lane = model.lanes[-1]
        gone = bisect_left(model.deadlines, now + self._ctrl_ms + lane.sent[1] - TIME_TOLERANCE_MS)
        if gone:
            self._drop(model, gone)
        if not model.ids:
            model.waiting = False
            model.timer = INF
        elif model.waiting:
            if gone:
                self._wait(model, now)
            else:
                self._arm(model, now)

    def _drop(self, model: _Model, count: int) -> None:
        self.decisions.append(Drop(model.index, model.ids[:count]))
        del model.ids[:count]
        del model.deadlines[:count]

    def _serve_waiting(self, pool: _Pool, gpulet: int, now: float) -> bool:
        """Give a gpu-let to the most urgent waiting model; False if none of them can use it."""
        waiting, models = pool.waiting, self._models
        while waiting:
            rank, index = waiting[0]
            heappop(waiting)
            model = models[index]
            if not model.waiting or model.rank != rank:
                continue
            if now >= model.rate.next_at:
                model.rate.roll(now)
                self._refresh_target(model)
            if self._dispatch(model, pool.lanes[index], gpulet, now):
                model.waiting = False
                model.timer = INF
                if model.ids and self._arm(model, now):
                    self._due(model, now)
                return True
            if model.ids:  # feasible elsewhere only
                continue
            model.waiting = False
            model.timer = INF
        return False

    def _serve_ahead(self, pool: _Pool, now: float) -> None:
        """The data of the most urgent waiting batch has to be sent now to be there when the next gpu-let becomes free."""
        soon = pool.soon
        while soon and pool.waiting:
            free_at, gpulet = soon[0]
            stale = self._pending[gpulet] != 1 or self._free_at[gpulet] != free_at or self._pool_of[gpulet] is not pool
            if stale or free_at < now - TIME_TOLERANCE_MS or self._is_lost[gpulet]:
                heappop(soon)
                continue
            if free_at - self._lead_of_waiting(pool) > now + TIME_TOLERANCE_MS or not self._serve_waiting(pool, gpulet, now):
                break
        self._arm_pool(pool)

    def _lead_of_waiting(self, pool: _Pool) -> float:
        waiting, models = pool.waiting, self._models
        while waiting:
            rank, index = waiting[0]
            model = models[index]
            if model.waiting and model.rank == rank:
                lane = pool.lanes[index]
                size = min(len(model.ids), lane.cap, model.target)
                return self._ctrl_ms + lane.sent[size] - lane.run[size]
            heappop(waiting)
        return -INF

    def _arm_pool(self, pool: _Pool) -> None:
        """Set the gpu-let timer of a pool: when the most urgent waiting batch has to be sent to the next free gpu-let."""
        lead = self._lead_of_waiting(pool)
        if lead < 0 or not pool.soon:
            pool.timer = INF
            return
        due = pool.soon[0][0] - lead
        if due != pool.timer:
            pool.timer = due
            heappush(self._timers, (due, len(self._models) + pool.index))
        if due < self.next_wake_ms:
            self.next_wake_ms = due

    def _dispatch(self, model: _Model, lane: _Lane, gpulet: int, now: float) -> bool:
        """Cut a batch for a gpu-let and send it; False if no request of the model can be met there."""
        deadlines, ids = model.deadlines, model.ids
        free_at = self._free_at[gpulet] if self._pending[gpulet] else now
        send_at = now + self._ctrl_ms
        sent, run = lane.sent, lane.run
        skip, size = self._gather(deadlines, model.target, send_at, sent, free_at, run)
        if skip:
            fastest = model.lanes[-1]
            lost = skip
            if lane is not fastest:  # what this gpu-let is too slow for may still be met by a faster one
                lost = bisect_left(deadlines, send_at + fastest.sent[1] - TIME_TOLERANCE_MS, 0, skip)
            if lost:
                self._drop(model, lost)
                skip -= lost
        if not size:
            return False
        stop = skip + size
        batch = ids[skip:stop]
        del ids[skip:stop]
        del deadlines[skip:stop]
        start = max(send_at + sent[size] - run[size], free_at)
        finish = start + run[size]
        self.decisions.append(Dispatch(gpulet, model.index, batch, start, finish))
        self._free_at[gpulet] = finish
        self._is_idle[gpulet] = False
        self._pending[gpulet] += 1
        if self._ahead and self._pending[gpulet] == 1:
            heappush(lane.pool.soon, (finish, gpulet))
        if model.stage:
            self._set_stage(model, 0)
        return True
