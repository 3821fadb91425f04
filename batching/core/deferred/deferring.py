"""Ours: Symphony's deferred batching with a look ahead at all batches that wait.

Three rules, each in a module of its own; docs/scheduling.md draws them.

1. *Due* (`due.py`): a batch that has used the part `hold` of the time for which Symphony would hold it takes the
   fastest idle gpu-let.
2. *Line-up* (`lineup.py`; `waiting.py` says which batches are lined up together): where more batches wait than gpu-lets
   are idle, all are lined up by their latest start. When time is short, the line-up drops first the excess of any model
   above twice its planned rate, then batches of lower priority, then those that serve the least per ms. Under overload
   a batch of half the staggered size may start early. A batch leaves a gpu-let free for models that cannot wait for it,
   where these would lose more than it serves (`keeping_free.py`).
3. *Cut* (`cut.py`, `admission.py`): a batch is cut by the window rule; of a model that exceeds its plan, what others
   lose requests for is turned away.

This module carries the rules out: events come in, the queues concerned are looked at, batches go out. An observer
(`tenuto.batching.rehearsal`) may set `hold` and `defend` while it serves.

What a request is worth follows the objective: alike (`total`), the weight of its model (`weighted`), or first of all
the loss that its model had lately (`each`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from tenuto.batching.core.deferred.cut import Cutter
from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.keeping_free import kept_until
from tenuto.batching.core.deferred.lineup import is_short, line_up, rank
from tenuto.batching.core.deferred.waiting import Place, Queue, Waiting
from tenuto.batching.core.gathering import longest_within, window
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.scheduler import Dispatch, Drop, Reject, Scheduler, SchedulerOptions
from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.system import EXPIRY_MARGIN_MS, INF, TIME_TOLERANCE_MS, NetworkDelay, System
from tenuto.batching.core.told import SchedulerStatus

# Derived: the windows of the recent and twice that of the offered rate (`ArrivalRate`).
PRESSED_MS = 1000.0  # for which nothing is lent after a program that keeps to its plan lost a request
LOSING_MS = 10_000.0  # for which requests may be held in full after one was lost
EVERY_LOOK = 6  # programs: what a look takes by itself, and what follows on it


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


class Known(NamedTuple):
    """What a scheduler learned while serving: delays, by program the offered rate (requests per second; None: unknown),
    how many times as long as planned a program takes on a gpu-let, and which gpu-lets are lost."""

    network: NetworkDelay
    rates: tuple[float | None, ...]
    factors: tuple[tuple[int, int, float], ...]
    lost: tuple[int, ...]


class DeferredScheduler(Scheduler):
    """See the module. Invariant: no due batch of a program within its plan waits while a gpu-let that can serve it in
    time is idle.

    `is_light`: nobody needs the GPU time that holding saves. `looked` counts how often it looked at the batch of a
    program.
    """

    name = "deferred"
    summary = "Symphony with a look ahead at all waiting batches, and holding times chosen by rehearsal"
    options_type = DeferredOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None, known: Known | None = None) -> None:
        """`known`: what another one learned; by default what is planned."""
        super().__init__(system, options)
        chosen = self.options = options if isinstance(options, DeferredOptions) else DeferredOptions()
        self.looked = 0
        self.is_light = False
        self._gpulets = Gpulets(system, Place)
        hold = chosen.hold if chosen.hold is not None else (1.0 if self._is_roomy() else 0.4)
        self._holding = Holding(self._gpulets, hold, chosen.defend, chosen.save_above)
        weighted = system.objective == "weighted"
        self._evens_out = system.objective == "each"
        self._cutter = Cutter(self._gpulets, self._holding, evens_out=self._evens_out)
        self._lost_until: dict[int, float] = {}  # by program that lost requests: until when that counts as lately
        self._pressed_until = -INF  # a program lost requests lately though it keeps to its plan
        self._queues = [
            Queue.of(p, offered, offered.weight if weighted else 1.0) for p, offered in enumerate(system.offered)
        ]
        self._queue_of = [self._queues[program] for program in system.program_of]
        self._waiting = Waiting(self._queues)
        self._expiries: list[tuple[float, int]] = []  # a heap of (when, program); valid is what says its `expire_at`
        self._silent: list[tuple[float, int]] = []  # a heap: when a program will have been silent for long
        self._heavy = 0  # pools that are not under light load
        self._adopt(system.network if known is None else known.network)
        if known is not None:
            for queue, rps in zip(self._queues, known.rates, strict=True):
                queue.rate = ArrivalRate(rps)
            for program, gpulet, factor in known.factors:
                self.update_latency(program, gpulet, factor)
            for gpulet in known.lost:
                self._gpulets.lose(gpulet)
        self._adopt_all_costs()

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

    def _adopt_all_costs(self) -> None:
        for pool in self._gpulets.pools:
            pool.alone = pool.crowd = 0.0
        for queue in self._queues:
            self._adopt_costs(queue)
            if queue.pools:
                self._holding.set_staggered(queue)
            for pool in queue.pools:
                pool.alone += queue.alone
                pool.crowd += 1.0 / queue.gpulets
        self._heavy = sum(pool.alone >= self._holding.save_above for pool in self._gpulets.pools)
        for pool in self._gpulets.pools:
            pool.is_enclosed = all(len(self._queues[program].pools) == 1 for program in pool.run)
        for queue in self._queues:
            self._holding.set_patience(queue)

    def _adopt_costs(self, queue: Queue) -> None:
        """Plan with what was learned of gpu-lets and of the way there."""
        system, program = self.system, queue.program
        longest_ms = max(system.models[m].slo_ms for m in system.programs[program].members)
        shortest_ms = system.offered[program].slo_ms
        queue.adopt_costs(self._gpulets, shortest_ms - self._response_ms, longest_ms - self._response_ms)

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
        self._adopt_costs(queue)
        self._load(queue)
        self._holding.set_patience(queue)
        if self.is_light != (not self._heavy):
            self.is_light = not self._heavy
            self._holding.in_full_until = -INF  # what was lost under heavy load says nothing of light load

    def _load(self, queue: Queue) -> None:
        """Follow a change of the load that a queue is for its gpu-lets."""
        before = queue.alone
        self._holding.set_staggered(queue)
        for pool in queue.pools:
            was_heavy = pool.alone >= self._holding.save_above
            pool.alone += queue.alone - before
            self._heavy += (pool.alone >= self._holding.save_above) - was_heavy

    # Events ----------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        rate = queue.rate
        rate.count += 1
        if now_ms >= rate.next_at:
            rate.roll(now_ms)
            if queue.pools:
                self._weigh(queue, now_ms)
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
        run = found.run[queue.program]
        gpulets = self._gpulets
        if size >= queue.longest or (watch.is_tight and size >= queue.ripe) or size + 1 >= len(run):
            look = now_ms
        else:
            sent_ms = gpulets.ctrl_ms + gpulets.data_ms * (size + 1) + queue.factor * run[size + 1]
            look = self._holding.due_ms(queue, size, sent_ms, now_ms)
            if most > idle:
                run = pools[-1].run[queue.program]
                planned = watch.at - (run[size] - run[size - 1]) if 1 < size < len(run) else now_ms
                if planned < look:
                    look = planned
        if not idle and gpulets.ahead:
            way_ms = gpulets.way_ms(min(size, queue.longest))
            look = max(look, min([gpulets.open_at(pool, now_ms)[0] for pool in pools]) - way_ms)
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
        pool = self._gpulets.pool_of(gpulet)
        # Where as many gpu-lets were idle as programs wait, none of them waited for this one.
        was_short = len(pool.waiting) > len(pool.idle)
        if self._gpulets.done(gpulet, now_ms) and was_short:
            self._touch([pool], now_ms)

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
        self._lost_until[queue.program] = now + LOSING_MS
        if not queue.allowance.exceeds:
            self._pressed_until = now + PRESSED_MS
        self._holding.in_full_until = now + LOSING_MS
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
        way_ms = self._gpulets.way_ms(max([min(len(queue.ids), queue.longest) for queue in part])) if ahead else 0.0
        if ahead or _has_idle(part):
            for queue in part:
                pool, open_at = queue.pools[0], now
                if pool.idle:
                    gpulet = pool.idle[0]
                else:
                    pool, gpulet, open_at = self._opening(queue, now, way_ms)
                queue.is_open = open_at <= reach
                is_as_cut = queue.cut_until >= now and queue.pool is pool and not queue.is_light
                if not is_as_cut or queue.factor != self._gpulets.factor(queue.program, gpulet):
                    self._cutter.cut(queue, pool, gpulet, now)
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
            losing = self._losing(now)
            for queue in can_go:
                to = queue.pool
                if to is None:
                    continue
                kept = kept_until(queue, to, losing, now, is_tight=is_tight) if losing and to.idle else now
                if kept > now:
                    look_at = min(look_at, kept)
                elif self._dispatch(queue, to, now):
                    return True
        watch = self._waiting.watch_together(part)
        watch.is_tight = is_tight
        self._waiting.look_at(watch, look_at)
        return False

    def _losing(self, now: float) -> list[Queue]:
        """Return the queues that lost requests lately."""
        losing = self._lost_until
        for program in [program for program, until in losing.items() if until < now]:
            del losing[program]
        return [self._queues[program] for program in losing]

    def _opening(self, queue: Queue, now: float, way_ms: float) -> tuple[Place, int, float]:
        """Return the pool and the gpu-let for the next batch of a queue, and when a batch may be sent there: now, if
        one is idle, or where batches are sent ahead the longest way before one ends. So it goes to the most urgent, and
        not to the batch with the longest way."""
        found, found_gpulet, soonest = queue.pools[0], queue.pools[0].gpulets[0], INF
        for pool in queue.pools:
            if pool.idle:
                return pool, pool.idle[0], now
            at, gpulet = self._gpulets.open_at(pool, now)
            if at < soonest:
                found, found_gpulet, soonest = pool, gpulet, at
        return found, found_gpulet, soonest - way_ms

    def _dispatch(self, queue: Queue, pool: Place, now: float) -> bool:
        """Cut a batch for the next gpu-let of a pool and send it; False if no request can be met there."""
        program, deadlines, ids = queue.program, queue.deadlines, queue.ids
        free_at, gpulet = self._gpulets.open_at(pool, now)
        gpulets, run = self._gpulets, pool.run[program]
        factor = gpulets.factor(program, gpulet)
        skip, size = window(deadlines, queue.defend, run, factor, now + gpulets.ctrl_ms, gpulets.data_ms, free_at)
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
            short = longest_within(run, self._cutter.longest_beside_ms(self._queues, pool, now), factor)
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
        start, run_ms = max(now + gpulets.way_ms(size), free_at), factor * run[size]
        self.decisions.append(Dispatch(gpulet, program, batch, start, start + run_ms))
        gpulets.send(gpulet, run_ms, start + run_ms)
        return True

    # What an observer reads and sets ----------------------------------------------------------------------------------

    @property
    def hold(self) -> float:
        """Part of Symphony's holding time for which batches are held."""
        return self._holding.hold

    @property
    def defend(self) -> float:
        """Part of the staggered batch for which heads are given up."""
        return self._holding.defend

    def tune(self, now: float, hold: float, defend: float) -> None:
        """Go on with other values of both."""
        holding = self._holding
        if (hold, defend) != (holding.hold, holding.defend):
            holding.hold, holding.defend = hold, defend
            for queue in self._queues:
                queue.cut_until = -INF
                if queue.pools:
                    holding.set_staggered(queue)
            self._waiting.touch(self._gpulets.pools)
            self.next_wake_ms = now

    def offered_rps(self) -> float:
        """Return how many requests come per second, of all models."""
        return sum([queue.rate.rps or 0.0 for queue in self._queues])

    def known(self) -> Known:
        """Return what was learned while serving, for another scheduler of the same system to begin with."""
        gpulets = self._gpulets
        rates = tuple([queue.rate.rps for queue in self._queues])
        return Known(self._network, rates, gpulets.factors(), gpulets.lost())

    def status(self) -> SchedulerStatus:
        return SchedulerStatus(hold=self._holding.hold, defend=self._holding.defend)

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

    def update_latency(self, program: int, gpulet: int, factor: float) -> None:
        self._gpulets.correct(program, gpulet, factor)
        queue = self._queues[program]
        queue.least_factor = min(queue.least_factor, factor)

    def update_network(self, network: NetworkDelay) -> None:
        self._adopt(network)


def _has_idle(part: list[Queue]) -> bool:
    """Whether a gpu-let is idle that one of them can use."""
    for queue in part:
        for pool in queue.pools:
            if pool.idle:
                return True
    return False
