"""The part of the deferred scheduler that knows models and gpu-lets but makes no decision.

It groups gpu-lets into pools, keeps what is idle or soon free, derives the sizes that steer each model, and takes over
corrections of latency and network delay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from tenuto.batching.core.balance import Balance
from tenuto.batching.core.gathering import GATHERING
from tenuto.batching.core.pools import Lane, ModelQueue, Pool
from tenuto.batching.core.scheduler import Scheduler, SchedulerOptions
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, NetworkDelay, System
from tenuto.batching.core.target import ArrivalRate, Burstiness, batch_sizes, reserve_ms, wait_reserve_ms

__all__ = ["DeferredOptions", "PooledScheduler"]

UNKNOWN_LOAD = 0.5  # of a pool's gpu-lets, taken to be kept busy by all its models together until their rates are known


@dataclass(frozen=True)
class DeferredOptions(SchedulerOptions):
    """What can be varied; the defaults are the measured best (docs/benchmarks-batching.md).

    gather: `window` gives up the head to keep the batch at the size worth defending; `head-first` only what is lost
    anyway. release: `frontrun` as published; `target` also once the staggered batch is complete; `adaptive` as soon as
    waiting for more does not pay, with a reserve before frontrun against collisions.
    balance: `each` evens out the losses between models; `total` loses the fewest requests over all models, at the cost
    of the expensive ones; `off` ranks by urgency alone, as published.
    """

    gather: str = field(default="window", metadata={"choices": tuple(GATHERING)})
    release: str = field(default="adaptive", metadata={"choices": ("adaptive", "target", "frontrun")})
    balance: str = field(default="each", metadata={"choices": ("each", "total", "off")})


class PooledScheduler(Scheduler):
    """State and bookkeeping of `DeferredScheduler`. Invariant: every gpu-let is in exactly one pool."""

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        chosen = options if isinstance(options, DeferredOptions) else DeferredOptions()
        self._options = chosen
        self._gather = GATHERING[chosen.gather]
        self._timers: list[tuple[float, int]] = []  # (time, model index, or number of models + pool index)
        self._dirty: list[ModelQueue] = []
        self._burstiness = Burstiness()
        self._contention = 0.0  # share of batches lately that had to wait for a gpu-let
        count = len(system.gpulets)
        self._pending = [0] * count
        self._free_at = [0.0] * count
        self._run_ms = [0.0] * count  # of the batch sent last
        self._is_idle = [False] * count
        self._is_lost = [False] * count
        self._factors: list[dict[int, float]] = [{} for _ in range(count)]
        self._pools: list[Pool] = []
        self._free_places: list[int] = []  # positions in `_pools` of retired ones
        self._pool_by_key: dict[object, Pool] = {}
        self._pool_of: list[Pool] = []
        self._models = [ModelQueue(i, ArrivalRate(spec.rate_rps)) for i, spec in enumerate(system.offered)]
        self._queue_of = [self._models[program] for program in system.program_of]
        # One model alone has nobody to give way to.
        self._balance = (
            Balance([spec.slo_ms for spec in system.offered], chosen.balance == "total")
            if chosen.balance != "off" and len(system.programs) > 1
            else None
        )
        self._adopt_network(system.network)
        for gpulet in range(count):
            self._pool_of.append(self._pool_for(gpulet))
            self._pool_of[gpulet].size += 1
        for model in self._models:
            if model.lanes:
                self._refresh_sizes(model)
        for gpulet in range(count):
            self._set_idle(gpulet)

    def _adopt_network(self, network: NetworkDelay) -> None:
        self._network = network
        self._ctrl_ms = network.ctrl_ms
        self._response_ms = network.response_ms
        self._ahead = network.ctrl_ms > 0 or network.data_ms_per_request > 0
        for model, spec in zip(self._models, self.system.offered, strict=True):
            model.budget_ms = spec.slo_ms - network.response_ms

    def _pool_for(self, gpulet: int) -> Pool:
        hosts = self.system.gpulets[gpulet].hosts
        factors = self._factors[gpulet]
        key = (id(hosts), tuple(sorted(factors.items())))
        pool = self._pool_by_key.get(key)
        if pool is None:
            if self._free_places:
                pool = Pool(self._free_places.pop(), hosts)
                self._pools[pool.index] = pool
            else:
                pool = Pool(len(self._pools), hosts)
                self._pools.append(pool)
            self._pool_by_key[key] = pool
            for index, host in hosts.items():
                model = self._models[index]
                lane = Lane(pool, factors.get(index, 1.0))
                lane.adopt(host, self._network, model.budget_ms)
                pool.lanes[index] = lane
                model.lanes.append(lane)
                model.order_lanes()
                model.await_stage(0)
                if model.waiting:
                    heappush(pool.waiting, (model.rank, index))
        return pool

    def _refresh_sizes(self, model: ModelQueue) -> None:
        """Recompute the sizes that steer a model from its rate and the latencies of its fastest gpu-lets."""
        fastest = model.lanes[-1]
        latency = fastest.sent[: fastest.cap + 1]
        gpulets = sum(lane.pool.size for lane in model.lanes)
        sizes = batch_sizes(latency, model.budget_ms - self._ctrl_ms, model.rate.rps, gpulets, self._contention > 0.3)
        release = self._options.release
        if release == "adaptive":
            model.target, model.release = sizes.defend, sizes.release
            rate = model.rate.rps or 0.0
            reserve = reserve_ms(fastest.run, sizes.target, model.budget_ms, rate, self._burstiness.dispersion)
            reserve = max(reserve, self._reserve_for_others(model, gpulets, sizes.target))
            model.early_ms += reserve - model.reserve_ms
            model.reserve_ms = reserve
        else:
            model.target = sizes.target
            model.release = sizes.target if release == "target" else fastest.cap
        if self._balance is not None:
            self._balance.set_cost(model.index, fastest.run[sizes.target] / sizes.target)
        model.await_stage(model.stage)

    def _reserve_for_others(self, model: ModelQueue, gpulets: int, target: int) -> float:
        """Note the model's load and return the reserve that the load of the other models on its gpu-lets asks for."""
        load, load_ms, others = 0.0, 0.0, 0
        rate = model.rate.rps
        for lane in model.lanes:
            pool = lane.pool
            size = min(target, len(lane.run) - 1)
            if rate is None:
                busy = UNKNOWN_LOAD * pool.size / len(pool.lanes)
            else:
                busy = rate * (model.cost_ms or lane.run[size] / size) / 1000.0 * pool.size / max(1, gpulets)
            pool.set_load(lane, busy, model.batch_ms or lane.run[size])
            load += pool.load - lane.load
            load_ms += pool.load_ms - lane.load_ms
            others = max(others, len(pool.lanes) - 1)
        if load <= 0.0:
            return 0.0
        run = model.lanes[-1].run
        # Until its latest moment a batch may wait without losing more than the request it was not held for.
        slack_ms = run[2] - run[1] if len(run) > 2 else 0.0
        wait_ms = wait_reserve_ms(load, load_ms, gpulets, others) - slack_ms
        return min(model.budget_ms - run[1], max(0.0, wait_ms))

    def _roll(self, model: ModelQueue, now: float) -> None:
        """Close a step of the model's arrivals and adapt what depends on their rate and burstiness."""
        deviation = model.rate.roll(now)
        if deviation is not None:
            self._burstiness.add(deviation)
        self._refresh_sizes(model)

    @property
    def sends_ahead(self) -> bool:
        """Whether there is a delay to send ahead for."""
        return self._ahead

    def queued(self, model_index: int) -> int:
        return len(self._models[model_index].ids)

    def update_latency(self, model_index: int, gpulet_index: int, factor: float) -> None:
        factors = self._factors[gpulet_index]
        rounded = round(factor, 2)
        if model_index not in self.system.gpulets[gpulet_index].hosts or factors.get(model_index, 1.0) == rounded:
            return
        factors[model_index] = rounded
        if rounded == 1.0:
            del factors[model_index]
        old = self._pool_of[gpulet_index]
        pool = self._pool_of[gpulet_index] = self._pool_for(gpulet_index)
        old.size -= 1
        pool.size += 1
        if self._is_idle[gpulet_index]:
            heappush(pool.idle, gpulet_index)
        elif self._pending[gpulet_index] == 1 and self._ahead:
            heappush(pool.soon, (self._free_at[gpulet_index], gpulet_index))
        if not old.size:
            self._retire(old)
        for index in pool.lanes:
            self._lanes_changed(self._models[index])

    def _retire(self, pool: Pool) -> None:
        """Forget a pool that lost its last gpu-let."""
        self._pool_by_key = {key: kept for key, kept in self._pool_by_key.items() if kept is not pool}
        self._free_places.append(pool.index)
        pool.timer = INF
        for index, lane in pool.lanes.items():
            self._models[index].lanes.remove(lane)

    def _lanes_changed(self, model: ModelQueue) -> None:
        """Latencies have changed: order the lanes and look again at the time the queue is due."""
        model.order_lanes()
        model.await_stage(0)
        self._refresh_sizes(model)
        if model.ids and not model.waiting:
            count = len(model.ids)
            due = model.deadlines[0] - model.lead[count] - model.early_ms if count < model.full else -INF
            self._set_timer(model, due)

    def _set_timer(self, model: ModelQueue, due: float) -> None:
        model.timer = due
        if not model.dirty:
            model.dirty = True
            self._dirty.append(model)
        if due < self.next_wake_ms:
            self.next_wake_ms = due

    def update_network(self, network: NetworkDelay) -> None:
        self._adopt_network(network)
        for model in self._models:
            for lane in model.lanes:
                lane.adopt(lane.pool.hosts[model.index], network, model.budget_ms)
            if model.lanes:
                self._lanes_changed(model)

    def _set_idle(self, gpulet: int) -> None:
        self._is_idle[gpulet] = True
        heappush(self._pool_of[gpulet].idle, gpulet)

    def _idle_in(self, pool: Pool) -> int:
        """Return the idle gpu-let of the smallest index, or -1."""
        idle, is_idle, pool_of = pool.idle, self._is_idle, self._pool_of
        while idle:
            if is_idle[idle[0]] and pool_of[idle[0]] is pool:
                return idle[0]
            heappop(idle)
        return -1

    def _free_in(self, pool: Pool, ready_at: float, now: float) -> int:
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
