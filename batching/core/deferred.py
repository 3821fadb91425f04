"""Deferred batch scheduling: a batch is held as long as its deadline allows it to grow, and never longer.

Symphony's Algorithm 1 in the extended form of its appendix D (arXiv 2308.07470), over gpu-lets instead of GPUs. Each
model has a queue and a candidate batch with two moments: *frontrun* `d - l(b+1)`, when waiting for one more request
would cost the head its deadline, and *latest* `d - l(b)`. At frontrun a model takes the idle gpu-let of the smallest
index; if there is none it waits, and a gpu-let that becomes free takes the waiting model whose latest moment comes
first. Every comparison of times admits equality; with strict ones the paper's own trace (§3.3) fails.

Three things go beyond the paper, each an option: releasing before frontrun and defending less than the staggered batch
(`release`, see `batch_sizes` and `reserve_ms`), and a fair distribution of losses (`balance`, see `balance.py`). With
`release=frontrun` and `balance=off` the scheduler is Symphony as published.

Gpu-lets with the same models and latencies form a pool, so that a new request costs O(log M) and a completion
O(log M + log G).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush

from tenuto.batching.core.pooled import DeferredOptions, PooledScheduler
from tenuto.batching.core.pools import Lane, ModelQueue, Pool
from tenuto.batching.core.scheduler import Dispatch, Drop
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS

__all__ = ["DeferredOptions", "DeferredScheduler"]

EXPIRY_MARGIN_MS = 1e-3  # how long after the last possible start a queued request is given up
CONTENTION_STEP = 1 / 256  # how fast the share of batches that had to wait for a gpu-let follows
COST_STEP = 1 / 32  # how fast the mean length of a model's batches follows
EARLY_PART = 1.0  # how much of a model's head start in rank also moves its frontrun


class DeferredScheduler(PooledScheduler):
    """Symphony. Invariant: a model is waiting only while no gpu-let it could use is idle."""

    name = "deferred"
    summary = "Symphony: hold each batch as long as its deadline allows, most urgent model first"
    options_type = DeferredOptions

    # Events in ------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model_index: int, request_id: int, deadline_ms: float) -> None:
        model = self._queue_of[model_index]
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
        count = len(deadlines)
        if model.waiting:
            if len(model.lanes) > 1:  # what no idle gpu-let could meet so far, one may now
                model.waiting = False
                self._set_timer(model, now_ms)
            elif count <= model.lanes[-1].cap:
                self._grow(model, count, now_ms)
            return
        due = deadlines[0] - model.lead[count] - model.early_ms if count < model.full else now_ms
        if due < model.timer:
            model.timer = due
            if not model.dirty:
                model.dirty = True
                self._dirty.append(model)
            if due < self.next_wake_ms:
                self.next_wake_ms = due

    def cancel(self, now_ms: float, model_index: int, request_id: int) -> bool:
        model = self._queue_of[model_index]
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
            # The batch sent ahead begins now or later: without this, small delays of a live gpu-let would add up
            # unseen.
            run_ms = self._run_ms[gpulet_index]
            self._free_at[gpulet_index] = max(self._free_at[gpulet_index] - run_ms, now_ms) + run_ms
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

    def gpulet_lost(self, now_ms: float, gpulet_index: int) -> None:  # noqa: ARG002
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

    # Decisions ------------------------------------------------------------------------------------------------------

    def _due(self, model: ModelQueue, now: float) -> None:
        """The model's frontrun moment has come: take a gpu-let for as long as it is due, or join the waiting ones."""
        if not model.lanes:
            self._drop(model, len(model.ids))
            return
        if now >= model.rate.next_at:
            self._roll(model, now)
        while True:
            lanes = model.lanes
            chosen = -1
            lane = lanes[model.stage]
            if len(lanes) > 1:
                if model.stage + 1 < len(lanes) and any(
                    self._free_in(faster.pool, now, now) >= 0 for faster in lanes[model.stage + 1 :]
                ):
                    model.await_stage(model.stage + 1)
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
            self._contention -= self._contention * CONTENTION_STEP
            if not model.ids or not self._arm(model, now):
                return

    def _ready_at(self, lane: Lane, model: ModelQueue, now: float) -> float:
        size = min(len(model.ids), lane.cap)
        return now + self._ctrl_ms + lane.sent[size] - lane.run[size]

    def _arm(self, model: ModelQueue, now: float) -> bool:
        """Set the timer of a model with a queue; True, and no timer, when it is due already."""
        deadlines = model.deadlines
        if not model.lanes:
            return True
        if model.waiting:
            fastest = model.lanes[-1]
            due = deadlines[0] - self._ctrl_ms - fastest.sent[1] + EXPIRY_MARGIN_MS
        else:
            count = len(deadlines)
            due = deadlines[0] - model.lead[count] - model.early_ms if count < model.full else now
            if due <= now:
                model.timer = INF
                return True
        self._set_timer(model, due)
        return False

    def _wait(self, model: ModelQueue, now: float) -> None:
        """Join the models that wait for a gpu-let, ranked by the latest moment of the batch as it stands."""
        lane = model.lanes[-1]
        deadlines = model.deadlines
        skip, size = self._gather(deadlines, model.target, now + self._ctrl_ms, lane.sent, now, lane.run)
        if not size:
            self._expire(model, now)
            return
        model.waiting = True
        rank = deadlines[skip] - lane.run[size]
        if self._balance is not None:
            rank -= self._balance.offset_ms[model.index]
        model.rank = rank
        index = model.index
        for lane in model.lanes:
            lane.pool.add_waiting(rank, index, self._models)
            if self._ahead:
                self._arm_pool(lane.pool)
        self._arm(model, now)

    def _grow(self, model: ModelQueue, count: int, now: float) -> None:
        """A waiting model whose whole queue still is one batch has become more urgent by a new request."""
        rank = model.deadlines[0] - model.lanes[-1].run[count]
        if rank < now:
            return
        if self._balance is not None:
            rank -= self._balance.offset_ms[model.index]
        if rank < model.rank:
            model.rank = rank
            for lane in model.lanes:
                heappush(lane.pool.waiting, (rank, model.index))

    def _expire(self, model: ModelQueue, now: float) -> None:
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

    def _drop(self, model: ModelQueue, count: int) -> None:
        self.decisions.append(Drop(model.index, model.ids[:count]))
        del model.ids[:count]
        del model.deadlines[:count]
        if self._balance is not None:
            offset = self._balance.gave_up(model.index, count)
            model.early_ms = model.reserve_ms + (EARLY_PART * offset if offset > 0.0 else 0.0)

    def _serve_waiting(self, pool: Pool, gpulet: int, now: float) -> bool:
        """Give a gpu-let to the most urgent waiting model; False if none of them can use it."""
        waiting, models = pool.waiting, self._models
        while waiting:
            rank, index = waiting[0]
            heappop(waiting)
            model = models[index]
            if not model.waiting or model.rank != rank:
                continue
            if now >= model.rate.next_at:
                self._roll(model, now)
            if self._dispatch(model, pool.lanes[index], gpulet, now):
                self._contention += (1.0 - self._contention) * CONTENTION_STEP
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

    def _serve_ahead(self, pool: Pool, now: float) -> None:
        """Send the most urgent waiting batch now, so that its data is there when the next gpu-let becomes free."""
        soon = pool.soon
        while soon and pool.waiting:
            free_at, gpulet = soon[0]
            stale = self._pending[gpulet] != 1 or self._free_at[gpulet] != free_at or self._pool_of[gpulet] is not pool
            if stale or free_at < now - TIME_TOLERANCE_MS or self._is_lost[gpulet]:
                heappop(soon)
                continue
            if free_at - self._lead_of_waiting(pool) > now + TIME_TOLERANCE_MS or not self._serve_waiting(
                pool, gpulet, now
            ):
                break
        self._arm_pool(pool)

    def _lead_of_waiting(self, pool: Pool) -> float:
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

    def _arm_pool(self, pool: Pool) -> None:
        """Set the gpu-let timer of a pool: when the most urgent waiting batch has to be sent to the next free one."""
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

    def _dispatch(self, model: ModelQueue, lane: Lane, gpulet: int, now: float) -> bool:
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
        run_ms = self._run_ms[gpulet] = run[size]
        if model.cost_ms:
            model.cost_ms += (run_ms / size - model.cost_ms) * COST_STEP
            model.batch_ms += (run_ms - model.batch_ms) * COST_STEP
        else:
            model.cost_ms, model.batch_ms = run_ms / size, run_ms
        self._is_idle[gpulet] = False
        self._pending[gpulet] += 1
        if self._ahead and self._pending[gpulet] == 1:
            heappush(lane.pool.soon, (finish, gpulet))
        if self._balance is not None:
            offset = self._balance.served(model.index, size)
            model.early_ms = model.reserve_ms + (EARLY_PART * offset if offset > 0.0 else 0.0)
        if model.stage:
            model.await_stage(0)
        return True
