"""Ours: Symphony's deferred batching, which looks ahead at all batches that wait and rehearses how long to hold them.

Three rules; docs/scheduling.md draws them.

1. *Due.* A batch is due when it has used the part `hold` of the time for which Symphony would hold it: 1 is Symphony's
   frontrun, 0 sends at once. A due batch takes the fastest idle gpu-let. Holding saves GPU time, and is bounded where
   nobody needs it: nothing is held under light load, while single requests would keep gpu-lets busy for less than
   `save_above` of the time, and otherwise no longer than takes them to that. Where even the longest batch saves next to
   nothing, nothing is held at all.
2. *Plan.* Where more batches wait than gpu-lets are idle, all of them are lined up by their latest start, and each is
   given the gpu-let on which it would end first, the running ones from their known end on. One that would start too
   late pushes out the batch that serves the least per ms of those lined up so far. Idle gpu-lets go to due batches in
   that order, those pushed out last. Where the plan starts a batch after it is due, gpu-lets are too few to hold
   anything: then batches of half the staggered size may go before they are due (`lineup.py`; which batches
   are lined up together: `waiting.py`).
3. *Rehearsal.* Now and then the arrivals of the last seconds are replayed with other values of `hold` and `defend`, and
   the best is adopted, for light load and for heavy load by itself (`rehearsal.py`).

What a request is worth follows the objective: alike (`total`), the weight of its model (`weighted`), or first of all
the loss that its model had lately (`each`). Batches of lower priority are pushed out first, and before all others those
that a model which comes at more than twice its planned rate sends beyond it (`admission.py`). Such batches are no
longer than others can wait, and while one of these loses requests, those beyond the plan are turned away.

A batch is cut by the window rule of Symphony's program: heads are given up where they keep it below `defend` times the
staggered size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from math import ceil
from typing import Any

from tenuto.batching.core.gathering import window
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.lineup import is_short, line_up, rank
from tenuto.batching.core.rehearsal import Rehearsals, RehearsingScheduler, Replayed, Setting, State
from tenuto.batching.core.scheduler import Dispatch, Drop, Rehearse, Reject, SchedulerOptions
from tenuto.batching.core.staggered import ArrivalRate, staggered_batch
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, NetworkDelay, System
from tenuto.batching.core.waiting import ORDER, Place, Queue, Waiting

EXPIRY_MARGIN_MS = 1e-3  # how long after its last possible start a queued request is given up
RIPE = 0.5  # part of the staggered batch from which on a batch may go before it is due
BORROWED = 1_000_000  # by which the priority of a program that exceeds its plan falls
PRESSED_MS = 1000.0  # for which nothing is lent after a program that keeps to its plan lost a request
LOSS_MS = 5000.0  # over which the share of requests lost is taken, so that one batch hardly changes it
LOSS_COUNT = 200.0  # requests over which it is taken at least
LOSING_MS = 10_000.0  # for which requests may be held in full after one was lost
ORDINARY_LOSS = 0.01  # beside which a smaller difference of losses does not count
LEAST_SAVING = 0.1  # part of the GPU time that the longest batch saves, below which batches are not held
EVERY_LOOK = 6  # programs: what a look takes by itself, and what follows on it
WORST_FIRST = 1e6  # requests per ms: by which whoever lost more comes before whoever serves more with the same time


@dataclass(frozen=True)
class DeferredOptions(SchedulerOptions):
    """Where it begins, and whether it rehearses.

    hold: part of Symphony's holding time; by default all of it where programs are alone or fewer than their gpu-lets,
    which are alike, and 0.4 where batches that are held would meet.
    defend: part of the staggered batch for which heads are given up. rehearse: whether both are changed by what
    rehearsals find. save_above: part of the gpu-lets' time above which requests are held to save it; 0: always, so that
    GPU time follows the load as far down as it can.
    """

    hold: float | None = field(default=None, metadata={"minimum": 0.0})
    defend: float = field(default=1.0, metadata={"minimum": 0.0})
    save_above: float = field(default=0.5, metadata={"minimum": 0.0})
    rehearse: bool = True


class DeferredScheduler(RehearsingScheduler):
    """See the module. Invariant: no due batch of a program within its plan waits while a gpu-let that can serve it in
    time is idle."""

    name = "deferred"
    summary = "Symphony with a look ahead at all waiting batches, and holding times chosen by rehearsal"
    options_type = DeferredOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        super().__init__(system, options)
        chosen = options if isinstance(options, DeferredOptions) else DeferredOptions()
        self._gpulets = Gpulets(system, Place)
        hold = chosen.hold if chosen.hold is not None else (1.0 if self._is_roomy() else 0.4)
        self._setting = Setting(hold, chosen.defend, in_full=not chosen.rehearse)
        self._save_above = chosen.save_above
        self._is_light = False  # so it is for all programs
        self._rehearsals = Rehearsals(system, self._setting) if chosen.rehearse else None
        self._record: list[tuple[float, int, float]] | None = None  # (arrival, model, deadline) to be replayed
        self._until_step = self._rehearsals.next_step() if self._rehearsals else -1  # requests until it goes on
        weighted = system.objective == "weighted"
        self._evens_out = system.objective == "each"
        self._pressed_until = -INF  # a program lost requests lately though it keeps to its plan
        self._in_full_until = -INF  # requests were lost lately, and are fewer where all are held in full
        self._queues = [
            Queue.of(p, offered, offered.weight if weighted else 1.0) for p, offered in enumerate(system.offered)
        ]
        self._queue_of = [self._queues[program] for program in system.program_of]
        self._waiting = Waiting(self._queues)
        self._expiries: list[tuple[float, int]] = []  # a heap of (when, program); valid is what says its `expire_at`
        self._silent: list[tuple[float, int]] = []  # a heap: when a program will have been silent for long
        self._heavy = 0  # pools that are not under light load
        self._adopt(system.network)

    def _is_roomy(self) -> bool:
        """Whether programs are alone, or fewer than their gpu-lets, which are alike: batches that are held meet seldom.
        Where gpu-lets differ, whoever is held for the fastest meets others there."""
        pools_of = self._gpulets.pools_of
        return all(
            len(pool.run) <= 1 or (len(pool.run) < pool.size and all(len(pools_of[one]) == 1 for one in pool.run))
            for pool in self._gpulets.pools
        )

    def _adopt(self, network: NetworkDelay) -> None:
        self._network = network
        self._response_ms = network.response_ms
        self._gpulets.adopt(network)
        self._adopt_all_costs()

    def _adopt_all_costs(self) -> None:
        for pool in self._gpulets.pools:
            pool.alone = pool.crowd = 0.0
        for queue in self._queues:
            longest_ms = max(self.system.models[m].slo_ms for m in self.system.programs[queue.program].members)
            pools = self._gpulets.pools_of[queue.program]
            shortest_ms = self.system.offered[queue.program].slo_ms
            queue.adopt_costs(pools, shortest_ms - self._response_ms, longest_ms - self._response_ms)
            if pools:
                self._set_staggered(queue)
            for pool in pools:
                pool.alone += queue.alone
                pool.crowd += 1.0 / queue.gpulets
        self._heavy = sum(pool.alone >= self._save_above for pool in self._gpulets.pools)
        waiting = sorted((queue for queue in self._queues if queue.ids), key=ORDER)
        for pool in self._gpulets.pools:
            pool.waiting.clear()
            pool.is_enclosed = all(len(self._queues[program].pools) == 1 for program in pool.run)
        for queue in self._queues:
            self._set_patience(queue)
        for queue in waiting:
            self._waiting.wait(queue)

    def _look_at_all(self) -> None:
        """Look at everything as soon as time goes on."""
        self._waiting.forget_watches()
        self._expiries.clear()
        for queue in self._queues:
            queue.cut_until = -INF
            queue.expire_at = -INF if queue.ids else INF
            if queue.ids:
                self._expiries.append((-INF, queue.program))
        self._waiting.touch(self._gpulets.pools)
        self.next_wake_ms = -INF

    def _weigh(self, queue: Queue, now: float) -> None:
        """Follow a change of what a queue is offered, and of others that are offered nothing any more."""
        silent = self._silent
        if not queue.is_weighed:
            queue.is_weighed = True
            heappush(silent, (queue.rate.silent_at(now), queue.program))
        while silent[0][0] <= now:
            other = self._queues[silent[0][1]]
            if other.pools and other is not queue and other.rate.is_silent(now):
                other.rate.look_back(now)
                self._load(other)
            heapreplace(silent, (other.rate.silent_at(now), other.program))
        self._load(queue)
        self._set_patience(queue)
        is_light = not self._heavy
        if self._rehearsals and is_light != self._is_light:
            self._is_light = is_light
            if not is_light:
                self._rehearsals.becomes_heavy()
            if self._record is None and self._until_step > 0 and self._rehearsals.is_new_to(is_light=is_light):
                self._until_step = 1
            self._adopt_setting(self._rehearsals.setting(is_light=is_light), now)

    def _load(self, queue: Queue) -> None:
        """Follow a change of the load that a queue is for its gpu-lets."""
        before = queue.alone
        self._set_staggered(queue)
        for pool in queue.pools:
            was_heavy = pool.alone >= self._save_above
            pool.alone += queue.alone - before
            self._heavy += (pool.alone >= self._save_above) - was_heavy

    def _set_patience(self, queue: Queue) -> None:
        """Find for how many times their own length batches of a queue are held at most.

        With m programs per gpu-let and batches held for k times their length, each program keeps a gpu-let busy for at
        most 1/k of the time, and all together for at most m/k: the bound is the k that makes this `save_above`. Where a
        batch has its staggered size by then, there is none.
        """
        if not queue.pools:
            return
        rps = queue.rate.rps
        queue.is_light = rps is not None and max(pool.alone for pool in queue.pools) < self._save_above
        queue.patience = max(pool.crowd for pool in queue.pools) / self._save_above if self._save_above else INF
        if rps is not None and rps / 1000.0 * queue.patience * queue.run[queue.staggered] >= queue.staggered:
            queue.patience = INF
        # What saves next to nothing is held for nothing.
        queue.hold_at_most_ms = 0.0 if self._save_above and queue.saving < LEAST_SAVING else queue.longest_hold_ms
        queue.is_bounded = queue.is_light or queue.patience < INF or queue.hold_at_most_ms < INF

    def _bound_ms(self, queue: Queue, size: int, now: float) -> float:
        """Return until when a batch of so many is held at most."""
        bound = queue.hold_at_most_ms
        if now >= self._in_full_until:
            # The load may have risen since its rate was taken: then gpu-lets are busy.
            idle = sum(len(pool.idle) for pool in queue.pools)
            is_light = queue.is_light and idle >= (1.0 - self._save_above) * queue.gpulets
            bound = min(bound, 0.0 if is_light else queue.patience * queue.run[size])
        return queue.oldest + bound

    def _set_staggered(self, queue: Queue) -> None:
        queue.staggered = staggered_batch(queue.sent[: queue.longest + 1], queue.budget_ms, queue.rate.rps)
        queue.defend = max(1, round(self._setting.defend * queue.staggered))
        queue.ripe = ceil(RIPE * queue.staggered)
        queue.loss_step = 1.0 / max(LOSS_COUNT, LOSS_MS / 1000.0 * (queue.rate.rps or 0.0))
        queue.alone = (queue.rate.recent_rps or 0.0) / 1000.0 * queue.run[1] / queue.gpulets

    # Events ----------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        rate = queue.rate
        rate.count += 1
        if now_ms >= rate.next_at:
            rate.roll(now_ms)
            if queue.pools:
                self._weigh(queue, now_ms)
        if self._record is not None:
            self._record.append((now_ms, model, deadline_ms))
        self._until_step -= 1
        if not self._until_step:
            self._step(now_ms)
        deadlines = queue.deadlines
        size = len(deadlines) + 1
        allowance = queue.allowance
        is_borrowed = allowance.is_limited and not allowance.take(now_ms)
        if is_borrowed and now_ms < self._pressed_until and allowance.exceeds and size > queue.longest:
            self.decisions.append(Reject(queue.program, [request_id], allowance.next_ms()))
            return
        deadline = deadline_ms - self._response_ms
        queue.cut_until = -INF
        if size == 1:
            queue.oldest = now_ms
            self._waiting.wait(queue)
        if size == 1 or deadline >= deadlines[-1]:
            deadlines.append(deadline)
            queue.ids.append(request_id)
            queue.arrived.append(now_ms)
        else:
            place = bisect_right(deadlines, deadline)
            deadlines.insert(place, deadline)
            queue.ids.insert(place, request_id)
            queue.arrived.insert(place, now_ms)
        head = deadlines[0]
        if head - queue.quickest_ms + EXPIRY_MARGIN_MS < queue.expire_at:
            self._expire_later(queue)
        pools = queue.pools
        if not pools:
            return
        found = pools[0]  # with an idle gpu-let
        idle = len(found.idle)
        if found.is_enclosed:
            if not idle and not self._gpulets.ahead:
                return
            most = len(found.waiting)
        else:
            most = 0
            idle = sum([len(pool.idle) for pool in pools])
            for pool in reversed(pools):
                most = max(most, len(pool.waiting))
                if pool.idle:
                    found = pool
        # Looking costs time, so it is put off until something may have come due. One more request makes its batch
        # longer, and so at most by that much others start later in the plan.
        watch = queue.watch
        sent = found.sent[queue.program]
        if size >= queue.longest or (watch.is_tight and size >= queue.ripe) or size + 1 >= len(sent):
            look = now_ms
        else:
            hold = self._setting.hold
            until = queue.oldest + queue.held_ms
            look = (head if head < until else until) - (1.0 - hold) * queue.budget_ms - hold * sent[size + 1]
            if queue.is_bounded:
                look = min(look, self._bound_ms(queue, size, now_ms))
            if most > idle:
                run = pools[-1].run[queue.program]
                planned = watch.at - (run[size] - run[size - 1]) if 1 < size < len(run) else now_ms
                if planned < look:
                    look = planned
        if not idle and self._gpulets.ahead:
            way_ms = queue.sent[min(size, queue.longest)] - queue.run[min(size, queue.longest)]
            look = max(look, min(self._gpulets.open_at(pool, now_ms)[0] for pool in pools) - way_ms)
        if look < watch.at:
            self._waiting.look_at(watch, look)
            if look < self.next_wake_ms:
                self.next_wake_ms = look if look > now_ms else now_ms

    def _expire_later(self, queue: Queue) -> None:
        """See to it that a head is given up in time."""
        at = queue.expire_at = queue.deadlines[0] - queue.quickest_ms + EXPIRY_MARGIN_MS
        heappush(self._expiries, (at, queue.program))
        if at < self.next_wake_ms:
            self.next_wake_ms = at

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        if self._gpulets.done(gpulet, now_ms):
            self._touch([self._gpulets.pool_of(gpulet)], now_ms)

    def _touch(self, pools: list[Place], now: float) -> None:
        """Look at once at what waits for some pools."""
        if self._waiting.touch(pools):
            self.next_wake_ms = now

    def wake(self, now_ms: float) -> None:
        expiries = self._expiries
        if expiries and expiries[0][0] <= now_ms:
            self._expire(now_ms)
        queues = self._waiting.ripe(now_ms)
        if queues:
            self._look(queues, now_ms)
        at = self._waiting.next_ms()
        self.next_wake_ms = expiries[0][0] if expiries and expiries[0][0] < at else at

    def _expire(self, now: float) -> None:
        """Give up the requests that cannot be met even alone on the fastest gpu-let."""
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            at, program = heappop(expiries)
            queue = self._queues[program]
            if at != queue.expire_at:
                continue
            queue.expire_at = INF
            limit = now + queue.quickest_ms - TIME_TOLERANCE_MS
            if queue.ids and queue.deadlines[0] < limit:
                self._drop(queue, bisect_left(queue.deadlines, limit), now)
            if queue.ids:
                self._expire_later(queue)

    def _drop(self, queue: Queue, count: int, now: float) -> None:
        self.decisions.append(Drop(queue.program, queue.ids[:count]))
        queue.take(0, count)
        if not queue.allowance.exceeds:
            self._pressed_until = now + PRESSED_MS
        if self._setting.in_full:
            self._in_full_until = max(self._in_full_until, now + LOSING_MS)
        if self._evens_out:
            kept = (1.0 - queue.loss_step) ** count
            queue.lost = 1.0 - (1.0 - queue.lost) * kept

    # Decisions -------------------------------------------------------------------------------------------------------

    def _look(self, queues: list[Queue], now: float) -> None:
        """Send what is to go now, and find out when to look at the rest again."""
        done: set[int] = set()
        for first in queues:
            if first.program in done:
                continue
            part = self._waiting.part([first])
            while self._send_next(part, now):
                part = self._waiting.part(part)
            done.update(queue.program for queue in part)

    def _send_next(self, part: list[Queue], now: float) -> bool:
        """Send the first of what is to go now; if there is nothing, find out when to look again, and return False."""
        if not part:
            return False
        self.looked += EVERY_LOOK + len(part)
        ahead = self._gpulets.ahead
        reach = now + TIME_TOLERANCE_MS
        waiting: list[Queue] = []
        can_go: list[Queue] = []
        look_at = INF
        room = len(part)  # idle gpu-lets of the pool that has the fewest
        is_tight = False
        way_ms = max(map(Queue.way_ms, part), default=0.0) if ahead else 0.0
        if ahead or _has_idle(part):
            for queue in part:
                pool, open_at = queue.pools[0], now
                if not pool.idle:
                    pool, open_at = self._opening(queue, now, way_ms)
                queue.is_open = open_at <= reach
                if queue.cut_until < now or queue.pool is not pool or queue.is_light:
                    self._cut(queue, pool, now)
                if not queue.size:
                    continue
                waiting.append(queue)
                if len(pool.idle) < room:
                    room = len(pool.idle)
                at = queue.due if queue.due > open_at else open_at
                if at <= reach:
                    can_go.append(queue)
                elif at < look_at:
                    look_at = at
            if len(waiting) > room:
                self.looked += len(waiting)
                for slack in line_up(waiting, now):
                    if slack <= TIME_TOLERANCE_MS:
                        is_tight = True
                    elif now + slack < look_at:
                        look_at = now + slack
                if is_tight:
                    can_go += [
                        q for q in waiting if q.due > reach and q.is_open and len(q.ids) >= q.ripe and is_short(q)
                    ]
                if len(can_go) > 1:
                    can_go.sort(key=rank)
            for queue in can_go:
                if queue.pool and self._dispatch(queue, queue.pool, now):
                    return True
        watch = self._waiting.watch_together(part)
        watch.is_tight = is_tight
        self._waiting.look_at(watch, look_at)
        return False

    def _opening(self, queue: Queue, now: float, way_ms: float) -> tuple[Place, float]:
        """Return the pool for the next batch of a queue, and when a batch may be sent to it: now, if a gpu-let is idle,
        or where batches are sent ahead the longest way before one ends. So it goes to the most urgent, and not to the
        batch with the longest way."""
        found, soonest = queue.pools[0], INF
        for pool in queue.pools:
            if pool.idle:
                return pool, now
            at = self._gpulets.open_at(pool, now)[0]
            if at < soonest:
                found, soonest = pool, at
        return found, soonest - way_ms

    def _cut(self, queue: Queue, pool: Place, now: float) -> None:
        """Cut the batch that the queue would run now on a gpu-let of the pool."""
        program, deadlines = queue.program, queue.deadlines
        queue.pool = pool
        run, sent = pool.run[program], pool.sent[program]
        size, head = len(deadlines), deadlines[0]
        most = min(queue.longest, len(run) - 1)
        hold = self._setting.hold
        if size < most:
            until = min(head, queue.oldest + queue.held_ms)
            queue.due = until - (1.0 - hold) * queue.budget_ms - hold * sent[size + 1]
            if queue.is_bounded:
                queue.due = min(queue.due, self._bound_ms(queue, size, now))
        else:
            queue.due = now
            size = most
        queue.cut_until = head - sent[size]
        if queue.cut_until < now:
            skip, size = window(deadlines, queue.defend, now, sent, now, sent)
            if size:
                head = deadlines[skip]
            elif pool is not queue.pools[0]:
                queue.size = 0
                return
            else:
                size = 1
            queue.due = now
        queue.size = size
        queue.latest = head - sent[size]
        queue.density = queue.worth * size / run[size]
        queue.level = queue.priority
        if queue.allowance.borrowed:
            queue.density *= 1.0 - queue.allowance.borrowed
            if queue.allowance.exceeds and queue.allowance.owed < size:
                queue.level -= BORROWED
        if self._evens_out:
            queue.density += WORST_FIRST * round(queue.lost / ORDINARY_LOSS)

    def _dispatch(self, queue: Queue, pool: Place, now: float) -> bool:
        """Cut a batch for the next gpu-let of a pool and send it; False if no request can be met there."""
        program, deadlines, ids = queue.program, queue.deadlines, queue.ids
        free_at, gpulet = self._gpulets.open_at(pool, now)
        sent, run = pool.sent[program], pool.run[program]
        skip, size = window(deadlines, queue.defend, now, sent, free_at, run)
        # What this gpu-let is too slow for may still be met by a faster one.
        lost = skip
        if skip and pool is not queue.pools[0]:
            lost = bisect_left(deadlines, now + queue.quickest_ms - TIME_TOLERANCE_MS, 0, skip)
        if lost:
            self._drop(queue, lost, now)
            skip -= lost
        if not size:
            return False
        # It borrows whole batches where others find a gpu-let idle besides.
        if queue.allowance.exceeds and queue.allowance.owed < size and sum(len(pool.idle) for pool in queue.pools) <= 1:
            short = bisect_right(run, self._longest_ms(pool, now)) - 1
            if short < 1 < queue.gpulets:  # where others cannot wait even for one, of the last it gets what is planned
                if queue.allowance.owed < min(queue.ripe, queue.allowance.most):
                    return False
                short = int(queue.allowance.owed)
            size = min(size, max(1, short))
        if self._evens_out:
            queue.lost *= (1.0 - queue.loss_step) ** size
        if queue.allowance.is_limited:
            queue.allowance.serve(size)
        stop = skip + size
        batch = ids[skip:stop]
        queue.take(skip, stop)
        start = max(now + sent[size] - run[size], free_at)
        self.decisions.append(Dispatch(gpulet, program, batch, start, start + run[size]))
        self._gpulets.send(gpulet, run[size], start + run[size])
        return True

    def _longest_ms(self, pool: Place, now: float) -> float:
        """Return how long a batch of a program that exceeds its plan may be on the last idle gpu-let of a pool: as long
        as any that keeps to its plan can wait, unless another gpu-let ends sooner."""
        longest_ms = INF
        for other in map(self._queues.__getitem__, pool.run):
            if not other.allowance.exceeds and other.rate.rps and sum(len(place.idle) for place in other.pools) <= 1:
                wait_ms = other.budget_ms - other.sent[other.ripe]
                if all(place.busy[0][0] > now + wait_ms for place in other.pools if place.busy):
                    longest_ms = min(longest_ms, wait_ms)
        return longest_ms

    # Rehearsal -------------------------------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        """Begin to record arrivals, or have those recorded replayed."""
        rehearsals = self._rehearsals
        if rehearsals is None:
            return
        if self._record is None:
            if rehearsals.may_begin(now, sum([queue.rate.rps or 0.0 for queue in self._queues])):
                self._record = rehearsals.begin(self.state(now), self.looked, is_light=self._is_light)
        else:
            options = DeferredOptions(save_above=self._save_above, rehearse=False)
            job = rehearsals.end(type(self), options, self.looked, now)
            if job is not None:
                self._record = None
                self.decisions.append(Rehearse(job, rehearsals.due_ms(now)))
        self._until_step = rehearsals.next_step()

    def state(self, now: float) -> State:
        """Return what a replay begins with."""
        return State(
            now,
            tuple(tuple(queue.deadlines) for queue in self._queues),
            tuple(queue.rate.rps for queue in self._queues),
            tuple(queue.allowance.borrowed for queue in self._queues),
            tuple(queue.allowance.usual for queue in self._queues),
            tuple(queue.lost for queue in self._queues),
            self._gpulets.state(),
            self._network,
        )

    def resume(self, state: State, setting: Setting) -> None:
        self._setting = setting
        self._in_full_until = INF if setting.in_full else -INF
        self._pressed_until = -INF
        self._network = state.network
        self._response_ms = state.network.response_ms
        self._gpulets.resume(state.gpulets, state.network)
        self.decisions = []
        self._silent = []
        number = 0
        for queue, deadlines, rps, borrowed, burst, lost in zip(
            self._queues, state.deadlines, state.rates, state.borrowed, state.bursts, state.lost, strict=True
        ):
            queue.rate = ArrivalRate(rps)
            queue.lost = lost
            queue.allowance.resume(state.now_ms, borrowed, burst)
            queue.deadlines = list(deadlines)
            queue.arrived = [min(deadline - queue.budget_ms, state.now_ms) for deadline in deadlines]
            queue.oldest = min(queue.arrived, default=INF)
            queue.ids = list(range(number - 1, number - 1 - len(deadlines), -1))
            number -= len(deadlines)
            queue.order = 0
            queue.is_weighed = False
        self._adopt_all_costs()
        self._look_at_all()
        self.next_wake_ms = state.now_ms

    def rehearsed(self, now_ms: float, result: list[Replayed], cpu_ms: float | None = None) -> None:
        if self._rehearsals is None:
            return
        self._rehearsals.learn(result, now_ms, cpu_ms)
        self._until_step = self._rehearsals.next_step()
        self._adopt_setting(self._rehearsals.setting(is_light=self._is_light), now_ms)

    def _adopt_setting(self, setting: Setting, now: float) -> None:
        if setting != self._setting:
            self._setting = setting
            if not setting.in_full:
                self._in_full_until = -INF
            for queue in self._queues:
                queue.cut_until = -INF
                if queue.pools:
                    self._set_staggered(queue)
            self._waiting.touch(self._gpulets.pools)
            self.next_wake_ms = now

    def status(self) -> dict[str, Any]:
        return {"hold": self._setting.hold, "defend": self._setting.defend} | (
            self._rehearsals.status() if self._rehearsals else {}
        )

    # Everything else -------------------------------------------------------------------------------------------------

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        queue = self._queue_of[model]
        if request_id not in queue.ids:
            return False
        place = queue.ids.index(request_id)
        queue.take(place, place + 1)
        self._touch(queue.pools, now_ms)
        return True

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        self._gpulets.lose(gpulet)
        self._touch([self._gpulets.pool_of(gpulet)], now_ms)

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        self._gpulets.back(gpulet)
        self._touch([self._gpulets.pool_of(gpulet)], now_ms)

    def queued(self, program: int) -> int:
        return len(self._queues[program].ids)

    @property
    def sends_ahead(self) -> bool:
        """Whether there is a delay to send ahead for."""
        return self._gpulets.ahead

    def update_latency(self, program: int, gpulet: int, factor: float) -> None:
        if self._gpulets.correct(program, gpulet, factor):
            self._adopt_all_costs()
            self._look_at_all()

    def update_network(self, network: NetworkDelay) -> None:
        later_ms = self._network.response_ms - network.response_ms
        for queue in self._queues:
            queue.deadlines = [deadline + later_ms for deadline in queue.deadlines]
        self._adopt(network)
        self._look_at_all()


def _has_idle(part: list[Queue]) -> bool:
    """Whether a gpu-let is idle that one of them can use."""
    for queue in part:
        for pool in queue.pools:
            if pool.idle:
                return True
    return False
