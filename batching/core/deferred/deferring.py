"""Ours: Symphony's deferred batching with a look ahead at all batches that wait.

Four rules, each in a module of its own; docs/reference/scheduling.md draws them.

1. *Due* (`due.py`): a batch that has used the part `hold` of the time for which Symphony would hold it takes the
   fastest idle gpu-let.
2. *Line-up* (`lineup.py`; `waiting.py` says which batches are lined up together): where more batches wait than gpu-lets
   are idle, all are lined up by their latest start. When time is short, the line-up drops first the excess of any model
   above twice its planned rate, then batches of lower priority, then those that serve the least per ms. Then a batch of
   half the staggered size may start before it is due. A batch leaves a gpu-let free when models that cannot wait for
   the batch would lose more than it serves (`keeping_free.py`).
3. *Cut* (`cut.py`, `allowance.py`): a batch is cut by the window rule. When a model exceeds its plan while others lose
   requests, its excess is turned away.
4. *Offline* (`offline.py`): requests without an SLO run in time that no other request loses.

This module applies the rules: it takes events, looks at the queues that an event concerns, and sends batches. An
observer (`tenuto.batching.rehearsal`) may set `hold` and `defend` while it serves.

The objective says what a request is worth: the same for every model (`total`), the weight of its model (`weighted`), or
more when its model lost more requests lately (`each`). Under `each` a model is not served more than the plan has room
for while another model loses a larger share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tenuto.batching.core.by_deadline import DeadlineScheduler
from tenuto.batching.core.deferred.allowance import Allowance
from tenuto.batching.core.deferred.cut import Cutter
from tenuto.batching.core.deferred.due import Holding
from tenuto.batching.core.deferred.joining import find_joint_batch
from tenuto.batching.core.deferred.keeping_free import kept_until
from tenuto.batching.core.deferred.lineup import is_short, line_up, rank
from tenuto.batching.core.deferred.looking import look_at
from tenuto.batching.core.deferred.offered_load import OfferedLoad
from tenuto.batching.core.deferred.offline import OfflineRequests
from tenuto.batching.core.deferred.recent_losses import RecentLosses
from tenuto.batching.core.deferred.waiting import Waiting, WaitingPool, WaitingQueue
from tenuto.batching.core.deferred_steps import DeferredSteps
from tenuto.batching.core.gathering import longest_within
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.scheduler import Drop, Reject, SchedulerOptions
from tenuto.batching.core.scheduler_status import SchedulerStatus
from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.step_scheduler import StepOrder
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, GeneratingGpulet, NetworkDelay, System

_HOLD = 0.4  # fitted: the first `hold` where held batches would meet; rehearsals then try others
EVERY_LOOK = 6  # derived: from measurements: the fixed time of a look, as many times the time it takes per program


@dataclass(frozen=True)
class DeferredOptions(SchedulerOptions):
    """The first values of `hold` and `defend`, and whether rehearsals change them.

    hold: part of Symphony's holding time. By default it is 1 when held batches seldom wait for the same gpu-let (a
    program is alone on its gpu-lets, or there are fewer programs than equal gpu-lets), and 0.4 otherwise.
    defend: part of the staggered batch for which heads are given up. rehearse: whether rehearsals may change both.
    save_above: when gpu-lets are busy for more than this part of their time, requests are held to save GPU time; 0:
    requests are always held, so that GPU time falls with the load.
    """

    hold: float | None = field(default=None, metadata={"minimum": 0.0})
    defend: float = field(default=1.0, metadata={"minimum": 0.0})
    save_above: float = field(default=0.5, metadata={"minimum": 0.0})
    rehearse: bool = True


class Known(NamedTuple):
    """The measurements of a scheduler: the network delays, the offered rate of each program (requests per second; None:
    unknown), measured over planned latency by (program, gpu-let), and which gpu-lets are lost."""

    network: NetworkDelay
    rates: tuple[float | None, ...]
    factors: tuple[tuple[int, int, float], ...]
    lost: tuple[int, ...]


class DeferredScheduler(DeadlineScheduler[WaitingPool, WaitingQueue]):
    """The scheduler of this module. Invariant: when a gpu-let is idle that can serve a due batch in time, the batch
    does not wait, unless its program exceeds its plan.

    `looked` counts how often the batch of a program was looked at.
    """

    name = "deferred"
    summary = "Symphony with a look ahead at all waiting batches, and holding times chosen by rehearsal"
    options_type = DeferredOptions
    takes_offline = True

    def __init__(self, system: System, options: SchedulerOptions | None = None, known: Known | None = None) -> None:
        """`known`: the measurements of another scheduler; by default the plan's numbers stand."""
        chosen = self.options = options if isinstance(options, DeferredOptions) else DeferredOptions()
        gpulets = Gpulets(system, WaitingPool)
        for gpulet in known.lost if known is not None else ():
            gpulets.lose(gpulet)
        weighted = system.objective == "weighted"
        queues = [
            WaitingQueue(program, gpulets.pools_of[program], offered, offered.weight if weighted else 1.0)
            for program, offered in enumerate(system.offered)
        ]
        super().__init__(system, options, gpulets, queues)
        self._join_classes(system)
        self.looked = 0
        self._first_hold = self._hold_by_room()
        self._holding = Holding(self._gpulets, self._first_hold, chosen.defend, chosen.save_above)
        self._evens_out = system.objective == "each"
        self._cutter = Cutter(self._gpulets, self._holding, evens_out=self._evens_out)
        self._load = OfferedLoad(system, self._queues, self._gpulets, self._holding)
        self._losses = RecentLosses(self._queues)
        self._waiting = Waiting(self._queues, self._gpulets)
        self._offline: OfflineRequests | None = None  # None until one comes
        self._is_resized = False  # gpu-lets were lost or came back since costs were adopted
        if known is not None:
            self._adopt(known.network)
            for queue, rps in zip(self._queues, known.rates, strict=True):
                queue.rate = ArrivalRate(rps)
            for program, gpulet, factor in known.factors:
                self.update_latency(program, gpulet, factor)
        self._load.adopt_all(self._response_ms)

    def _join_classes(self, system: System) -> None:
        """Let the size classes of a model know each other. They keep to the rate of the model together."""
        for classes in system.classes_of:
            if len(classes) > 1:
                rates = [system.models[model].rate_rps for model in classes]
                known = [rate for rate in rates if rate is not None]
                allowance = Allowance(sum(known) if known else None)
                for model in classes:
                    self._queue_of[model].allowance = allowance
        for program, joint in system.joint_classes.items():
            queues = self._queues
            queues[program].siblings = [(queues[other], queues[both]) for other, both in joint.items()]

    def _is_roomy(self) -> bool:
        """Whether held batches seldom wait for the same gpu-let. That is so in a pool with one program, and in a pool
        with fewer programs than gpu-lets, if none of them has other gpu-lets besides: batches that are held for the
        fastest gpu-lets would meet there."""
        pools_of = self._gpulets.pools_of
        return all(
            len(pool.run) <= 1
            or (len(pool.run) < pool.size and all(len(pools_of[program]) == 1 for program in pool.run))
            for pool in self._gpulets.pools
        )

    def _hold_by_room(self) -> float:
        """Return the first value of `hold`."""
        return self.options.hold if self.options.hold is not None else (1.0 if self._is_roomy() else _HOLD)

    def _resize(self, now: float) -> None:
        """Plan with the gpu-lets that are there now. When another first value of `hold` suits them, begin with it."""
        self._is_resized = False
        self._load.adopt_all(self._response_ms)
        self._load.see_whether_light()
        hold = self._hold_by_room()
        if hold != self._first_hold:
            self._first_hold = hold
            self.tune(now, hold, self._holding.defend)
        self._touch(self._gpulets.pools, now)

    # Events ----------------------------------------------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        rate = queue.rate
        rate.count += 1
        if now_ms >= rate.next_at:
            rate.roll(now_ms)
            if queue.pools:
                self._load.follow(queue, now_ms, self._response_ms)
                if queue.ids:
                    self._expire_later(queue)
        allowance = queue.allowance
        is_borrowed = allowance.is_limited and not allowance.take_token(now_ms)
        if (
            is_borrowed
            and allowance.exceeds
            and len(queue.ids) >= queue.costs.longest
            and self._losses.are_due_to(queue, now_ms)
        ):
            self.decisions.append(Reject(queue.program, [request_id], allowance.next_ms()))
            return
        if (
            self._evens_out
            and queue.provided_rps is not None
            and self._losses.favour(queue, queue.provided_rps, now_ms)
        ):
            queue.loss.lose(1)
            self.decisions.append(Reject(queue.program, [request_id], 1000.0 / queue.provided_rps))
            return
        queue.batch.cut_until = -INF
        queue.newest = now_ms
        if not queue.ids:
            queue.oldest = now_ms
            self._waiting.wait(queue)
        if queue.insert(deadline_ms - self._response_ms, request_id, now_ms):
            self._expire_later(queue)
        if queue.pools:
            at = look_at(queue, self._gpulets, self._holding, now_ms)
            if at < queue.watch.at:
                self._waiting.look_at(queue.watch, at)
                if at < self.next_wake_ms:
                    self.next_wake_ms = at if at > now_ms else now_ms

    def _quickest_ms(self, queue: WaitingQueue) -> float:
        return queue.costs.quickest_ms

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        pool = self._gpulets.pool_of(gpulet)
        # When as many gpu-lets are idle as programs wait, no program waited for this gpu-let.
        was_short = len(pool.waiting) > len(pool.idle)
        if self._gpulets.done(gpulet, now_ms) and was_short:
            self._touch([pool], now_ms)
        if self._offline is not None and self._offline.waiting:
            self.next_wake_ms = now_ms

    def _touch(self, pools: list[WaitingPool], now: float) -> None:
        """Look at once at the queues that wait for some pools."""
        if self._waiting.touch(pools):
            self.next_wake_ms = now

    def wake(self, now_ms: float) -> None:
        if self._is_resized:
            self._resize(now_ms)
        expiries = self._expiries
        if expiries and expiries[0][0] <= now_ms:
            self._expire(now_ms)
        queues = self._waiting.ripe(now_ms)
        if queues:
            self._look(queues, now_ms)
        at = self._waiting.next_ms()
        if self._offline is not None and self._offline.waiting:
            at = min(at, self._run_offline(self._offline, now_ms))
        self.next_wake_ms = expiries[0][0] if expiries and expiries[0][0] < at else at

    def _drop(self, queue: WaitingQueue, count: int, now: float) -> None:
        super()._drop(queue, count, now)
        self._holding.also_light_until = self._losses.note(queue, now)
        if self._evens_out:
            queue.loss.lose(count)

    # Decisions -------------------------------------------------------------------------------------------------------

    def _look(self, queues: list[WaitingQueue], now: float) -> None:
        """Send every batch that should go now, and set when to look at the others again."""
        done: set[int] = set()
        for first in queues:
            if first.program in done:
                continue
            part = self._waiting.part([first], now)
            while self._send_next(part, now):
                part = self._waiting.part(part, now)
            done.update(queue.program for queue in part)

    def _send_next(self, part: list[WaitingQueue], now: float) -> bool:
        """Send the first batch that should go now. If there is none, set when to look again and return False."""
        if not part:
            return False
        self.looked += EVERY_LOOK + len(part)
        ahead, factor = self._gpulets.ahead, self._gpulets.factor
        reach = now + TIME_TOLERANCE_MS
        waiting: list[WaitingQueue] = []
        can_go: list[WaitingQueue] = []
        next_look_ms = INF
        room = len(part)  # the number of ready gpu-lets in the pool that has the fewest
        is_tight = False
        way_ms = (
            self._gpulets.way_ms(max([min(len(queue.ids), queue.costs.longest) for queue in part])) if ahead else 0.0
        )
        if ahead or _has_idle(part):
            for queue in part:
                pool, open_at = queue.pools[0], now
                if pool.idle:
                    gpulet = pool.idle[0]
                else:
                    pool, gpulet, open_at = self._opening(queue, now, way_ms)
                batch = queue.batch
                batch.is_open = open_at <= reach
                is_as_cut = batch.cut_until >= now and batch.pool is pool
                if not is_as_cut or batch.factor != factor(queue.program, gpulet):
                    self._cutter.cut(queue, pool, gpulet, now)
                elif queue.hold.is_light:  # under light load, it is due as soon as many gpu-lets are idle
                    batch.due = self._holding.due_ms(queue, pool.run[queue.program], batch.size, now)
                if not batch.size:
                    continue
                waiting.append(queue)
                ready = self._gpulets.ready(pool, now) if ahead else len(pool.idle)
                if ready < room:
                    room = ready
                at = batch.due if batch.due > open_at else open_at
                if at <= reach:
                    can_go.append(queue)
                elif at < next_look_ms:
                    next_look_ms = at
            if len(waiting) > room:
                self.looked += len(waiting)
                is_tight, passing_ms = line_up(waiting, now)
                next_look_ms = min(next_look_ms, now + passing_ms)
                if ahead:  # with a network delay, look again before the next gpu-let ends; without, `batch_done` does
                    pools = {pool for queue in waiting for pool in queue.pools}
                    ends = [self._gpulets.free_by(pool, now + way_ms)[1] for pool in pools]
                    next_look_ms = min(next_look_ms, min(ends) - way_ms)
                if is_tight:
                    can_go += [
                        queue
                        for queue in waiting
                        if queue.batch.due > reach
                        and queue.batch.is_open
                        and len(queue.ids) >= queue.costs.ripe
                        and is_short(queue)
                    ]
                if len(can_go) > 1:
                    can_go.sort(key=rank)
            losing = self._losses.queues(now) if can_go else []
            for queue in can_go:
                to = queue.batch.pool
                if to is None:
                    continue
                free_until = kept_until(queue, to, losing, self._gpulets, now, is_tight=is_tight) if losing else now
                if free_until > now:
                    next_look_ms = min(next_look_ms, free_until)
                elif self._dispatch(queue, to, now):
                    return True
        watch = self._waiting.watch_together(part)
        watch.is_tight = is_tight
        self._waiting.look_at(watch, next_look_ms)
        return False

    def _opening(self, queue: WaitingQueue, now: float, way_ms: float) -> tuple[WaitingPool, int, float]:
        """Return the pool and the gpu-let for the next batch of a queue, and when a batch may be sent there. When a
        gpu-let is idle, that is now. Otherwise it is `way_ms` before one ends, where `way_ms` is the longest way of all
        batches: so the most urgent batch gets the gpu-let, and not the one with the longest way."""
        first, gpulet, soonest = queue.pools[0], queue.pools[0].gpulets[0], INF
        for pool in queue.pools:
            if pool.idle:
                return pool, pool.idle[0], now
            at, opening = self._gpulets.open_at(pool, now)
            if at < soonest:
                first, gpulet, soonest = pool, opening, at
        return first, gpulet, soonest - way_ms

    def _dispatch(self, queue: WaitingQueue, pool: WaitingPool, now: float) -> bool:
        """Cut a batch for the next gpu-let of a pool and send it; False if no request can be met there."""
        defended, waiting = queue.costs.defend_on.get(pool.index, queue.costs.defend), len(queue.ids)
        skip, size = self._cut(queue, pool, defended, now)
        if size and (skip or len(queue.ids) < waiting):
            self._holding.has_defended = True
        allowance = queue.allowance
        # A program that exceeds its plan may run whole batches when another gpu-let stays ready for the others.
        if (
            allowance.exceeds
            and allowance.owed < size
            and sum([self._gpulets.ready(place, now) for place in queue.pools]) <= 1
        ):
            longest_ms = self._cutter.longest_beside_ms(self._queues, pool, now)
            largest = longest_within(pool.run[queue.program], longest_ms, queue.batch.factor)
            # When other programs cannot wait even for one request, this one is served at its planned rate only.
            if largest < 1 < queue.costs.gpulets:
                if allowance.owed < min(queue.costs.ripe, allowance.most):
                    return False
                largest = int(allowance.owed)
            size = min(size, max(1, largest))
        if not size:
            return False
        if self._evens_out:
            queue.loss.serve(size)
        if allowance.is_limited:
            allowance.serve(size)
        if self._offline is not None:
            self._offline.note_other(pool, queue.batch.factor * pool.run[queue.program][size], now)
        if queue.siblings and not allowance.exceeds:
            self._send_with_others(queue, pool, skip, size, now)
        elif self._offline is not None and not queue.siblings:
            along = self._offline.beside(queue, pool, size, queue.deadlines[skip], now)
            ids = queue.remove(skip, skip + size)
            self._send_ids(
                queue.program, pool, ids + self._offline.take_batch(queue.program, along) if along else ids, now
            )
        else:
            self._send(queue, pool, skip, size, now)
        return True

    def _send_with_others(self, queue: WaitingQueue, pool: WaitingPool, skip: int, size: int, now: float) -> None:
        """Send a batch of a size class with the requests of other classes that join it."""
        joint = find_joint_batch(queue, pool, skip, size, self._gpulets, now)
        ids, program = queue.remove(skip, skip + size), queue.program
        if joint is not None:
            program = joint.target.program
            for other, first, count in joint.parts:
                ids += other.remove(first, first + count)
                if self._evens_out:
                    other.loss.serve(count)
                if other.allowance.is_limited:
                    other.allowance.serve(count)
        self._send_ids(program, pool, ids, now)

    # Offline requests -------------------------------------------------------------------------------------------------

    def add_offline(self, now_ms: float, model: int, request_id: int, deadline_ms: float, client: str = "") -> None:
        queue = self._queue_of[model]
        if self._offline is None:
            self._offline = OfflineRequests(self._queues, self._gpulets)
        self._offline.add(queue.program, client, request_id, deadline_ms - self._response_ms)
        self.next_wake_ms = now_ms

    def queued_offline(self, program: int) -> int:
        return 0 if self._offline is None else self._offline.count(program)

    def _run_offline(self, offline: OfflineRequests, now: float) -> float:
        """Send the offline batches that may go now; return when to look again."""
        gpulets = self._gpulets
        for program, request_id in offline.expired(now):
            self.decisions.append(Drop(program, [request_id]))
        next_look_ms = offline.look_at(now)
        for pool in gpulets.pools:
            while offline.waiting:
                open_at, gpulet = gpulets.open_at(pool, now)
                program, size = -1, 0
                if open_at - gpulets.way_ms(1) <= now + TIME_TOLERANCE_MS:
                    program, size = offline.next_batch(pool, now, open_at, gpulet)
                elif open_at < INF:
                    next_look_ms = min(next_look_ms, open_at - gpulets.way_ms(1))
                if not size:
                    if pool.idle and self._send_held(offline, pool, now):
                        continue
                    break
                self._send_ids(program, pool, offline.take_batch(program, size), now)
        return next_look_ms

    def _send_held(self, offline: OfflineRequests, pool: WaitingPool, now: float) -> bool:
        """Send the most urgent batch that is held while a gpu-let of its fastest pool is idle, if offline requests wait
        for the slack that it takes. Otherwise the gpu-let would be idle until the batch is due."""
        held = [queue for queue in pool.waiting.values() if queue.pools[0] is pool]
        if not held or not offline.fits_alone(pool, now):
            return False
        for queue in held:
            self._cutter.cut(queue, pool, pool.idle[0], now)
        urgent = min(held, key=lambda queue: queue.batch.latest)
        losing = self._losses.queues(now)
        if losing and kept_until(urgent, pool, losing, self._gpulets, now, is_tight=False) > now:
            return False
        return self._dispatch(urgent, pool, now)

    # For an observer --------------------------------------------------------------------------------------------------

    @property
    def load(self) -> float:
        """The part of the time for which the offered requests would keep the gpu-lets busy in staggered batches."""
        return self._load.load

    @property
    def hold(self) -> float:
        """Part of Symphony's holding time for which batches are held."""
        return self._holding.hold

    @property
    def defend(self) -> float:
        """Part of the staggered batch for which heads are given up."""
        return self._holding.defend

    @property
    def has_defended(self) -> bool:
        """Whether a smaller `defend` may have decided otherwise, where larger batches take no less time."""
        return self._holding.has_defended

    def tune(self, now: float, hold: float, defend: float) -> None:
        """Set `hold` and `defend` from now on."""
        holding = self._holding
        if (hold, defend) != (holding.hold, holding.defend):
            holding.hold, holding.defend = hold, defend
            for queue in self._queues:
                queue.batch.cut_until = -INF
                if queue.pools:
                    holding.set_staggered(queue)
            self._waiting.touch(self._gpulets.pools)
            self.next_wake_ms = now

    def offered_rps(self) -> float:
        """Return how many requests come per second for all models together."""
        return sum([queue.rate.rps or 0.0 for queue in self._queues], 0.0)

    def known(self) -> Known:
        """Return the measurements of this scheduler, as the start for another one of the same system."""
        gpulets = self._gpulets
        rates = tuple([queue.rate.rps for queue in self._queues])
        return Known(self._network, rates, gpulets.factors(), gpulets.lost())

    def step_order(self, gpulet: GeneratingGpulet) -> StepOrder | None:
        return DeferredSteps(gpulet.cost, gpulet.limits.max_batch_tokens)

    def status(self) -> SchedulerStatus:
        held = self._holding
        return SchedulerStatus(hold=held.hold, defend=held.defend, losing=self._losses.programs)

    def cancel(self, now_ms: float, model: int, request_id: int) -> bool:
        program = self.system.program_of[model]
        if self._offline is not None and self._offline.remove(program, request_id):
            return True
        return super().cancel(now_ms, model, request_id)

    # Everything else -------------------------------------------------------------------------------------------------

    def _cancelled(self, queue: WaitingQueue, now: float) -> None:
        self._touch(queue.pools, now)

    def gpulet_lost(self, now_ms: float, gpulet: int) -> None:
        self._gpulets.lose(gpulet)
        self._is_resized, self.next_wake_ms = True, now_ms

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        self._gpulets.back(gpulet)
        self._is_resized, self.next_wake_ms = True, now_ms


def _has_idle(part: list[WaitingQueue]) -> bool:
    """Whether some queue of the part can use an idle gpu-let."""
    for queue in part:
        for pool in queue.pools:
            if pool.idle:
                return True
    return False
