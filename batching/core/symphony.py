"""Symphony as published: deferred batch scheduling (arXiv 2308.07470, Algorithm 1 in the form of its appendix D).

Each program has a queue and from it a *candidate*: the batch it would run, with two moments. At *frontrun*,
d - l(b+1), waiting for one more request would cost the head its deadline d; at *latest*, d - l(b), the batch itself has
to start. The *model timer* fires at frontrun: the program takes an idle gpu-let, or waits. A gpu-let that becomes free
(the *GPU timer*) takes, of the programs that wait, the one whose latest moment comes first.

This is the baseline that `deferred` is measured against, and the rule that `deferred` starts from. Two rules are in the
authors' program but not in their paper. The head is given up only when it keeps the batch below the staggered size
(`gather=window`). A candidate is gathered anew at every arrival, at its latest moment and after each dispatch. One rule
is ours, since the paper's GPUs are all alike: a candidate is made for the fastest gpu-lets of which one is idle. Of
idle gpu-lets the first is taken, as the paper says; the authors' program takes the one that is idle longest. Every
comparison of times admits equality, because with strict ones the paper's own trace (section 3.3) fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from tenuto.batching.core.by_deadline import DeadlineScheduler, Queue
from tenuto.batching.core.gathering import longest_within, window
from tenuto.batching.core.gpulets import Gpulets, Pool
from tenuto.batching.core.scheduler import SchedulerOptions
from tenuto.batching.core.staggered import ArrivalRate, staggered_batch
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, System

PAST_MS = (
    1e-3  # derived: a microsecond, above the tolerance; so long after its latest moment a candidate is gathered anew
)


@dataclass(frozen=True)
class SymphonyOptions(SchedulerOptions):
    """The settings of the published program.

    gather: `window` gives up the head when it keeps the batch below the staggered size; `head-first` gives up only
    requests that cannot be met. release: `frontrun` starts a batch at frontrun; `target` also starts it once it has the
    staggered size.
    """

    gather: str = field(default="window", metadata={"choices": ("head-first", "window")})
    release: str = field(default="frontrun", metadata={"choices": ("frontrun", "target")})


class _Candidate(Queue[Pool]):
    """The requests of one program, and the batch it would run now."""

    __slots__ = ("is_waiting", "latest", "longest", "rate", "slo_ms", "staggered", "timer")

    def __init__(self, program: int, pools: list[Pool], slo_ms: float, rate: ArrivalRate) -> None:
        super().__init__(program, pools)
        self.slo_ms = slo_ms
        self.rate = rate
        self.staggered = 1  # the batch of the staggered pattern
        self.longest = 1  # the largest batch that can be in time at all
        self.timer = INF  # frontrun; while the candidate waits: when to gather it anew
        self.is_waiting = False
        self.latest = INF  # while the candidate waits: when its batch must start


class SymphonyScheduler(DeadlineScheduler[Pool, _Candidate]):
    """The published rule. Invariant: a program waits only while no gpu-let is idle that can take its batch."""

    name = "symphony"
    summary = "Symphony as published: hold each batch until frontrun, most urgent model first"
    options_type = SymphonyOptions

    def __init__(self, system: System, options: SchedulerOptions | None = None) -> None:
        chosen = options if isinstance(options, SymphonyOptions) else SymphonyOptions()
        self._is_head_first = chosen.gather == "head-first"
        self._releases_at_target = chosen.release == "target"
        gpulets = Gpulets(system, Pool)
        candidates = [
            _Candidate(program, gpulets.pools_of[program], offered.slo_ms, ArrivalRate(offered.rate_rps))
            for program, offered in enumerate(system.offered)
        ]
        super().__init__(system, options, gpulets, candidates)
        self._waiting: dict[int, _Candidate] = {}
        self._timers: list[tuple[float, int]] = []  # (time, program); stale unless it is the queue's timer
        self._gpu_timer = INF  # only with a network delay: when to send the next batch ahead
        for queue in candidates:
            self._set_staggered(queue)

    def _set_staggered(self, queue: _Candidate) -> None:
        program, gpulets = queue.program, self._gpulets
        gpulets.order(program)
        pools = queue.pools
        if pools:
            run, factor = pools[0].run[program], gpulets.factor(program, pools[0].gpulets[0])
            budget_ms = queue.slo_ms - self._response_ms - gpulets.ctrl_ms
            queue.longest = max(1, longest_within(run, budget_ms + TIME_TOLERANCE_MS, factor, gpulets.data_ms))
            queue.staggered = staggered_batch(
                run, budget_ms, queue.rate.rps, longest=queue.longest, factor=factor, data_ms=gpulets.data_ms
            )

    def _defended(self, queue: _Candidate) -> int:
        """Return the batch for which requests at the head may be given up."""
        return 1 if self._is_head_first else queue.staggered

    def _sent_ms(self, program: int, pool: Pool, size: int) -> float:
        """Return how long a batch takes from its dispatch to its end, on the next gpu-let of a pool."""
        gpulet = pool.idle[0] if pool.idle else pool.gpulets[0]
        return self._gpulets.way_ms(size) + self._gpulets.factor(program, gpulet) * pool.run[program][size]

    # Model thread: candidates and their timers -----------------------------------------------------------------------

    def add_request(self, now_ms: float, model: int, request_id: int, deadline_ms: float) -> None:
        queue = self._queue_of[model]
        queue.rate.count += 1
        if now_ms >= queue.rate.next_at:
            queue.rate.roll(now_ms)
            self._set_staggered(queue)
        queue.insert(deadline_ms - self._response_ms, request_id, now_ms)
        if queue.is_waiting:
            self._update(queue, now_ms)
        else:
            self._set_timer(queue, min(queue.timer, max(now_ms, self._frontrun(queue, now_ms))))

    def _frontrun(self, queue: _Candidate, now: float) -> float:
        """Return when the candidate must run because time is short; until then the whole queue fits in one batch."""
        program, size = queue.program, len(queue.deadlines)
        pools = queue.pools
        if not pools or size >= queue.longest or (self._releases_at_target and size >= queue.staggered):
            return now
        idle = next((pool for pool in pools if pool.idle), pools[0])
        if size + 1 >= len(idle.run[program]):
            return now
        return queue.deadlines[0] - self._sent_ms(program, idle, size + 1)

    def _set_timer(self, queue: _Candidate, at: float) -> None:
        if at != queue.timer:
            queue.timer = at
            if at < INF:
                heappush(self._timers, (at, queue.program))
                self.next_wake_ms = min(self.next_wake_ms, at)

    def _update(self, queue: _Candidate, now: float) -> None:
        """Gather the candidate. When it is due, run it, or wait if no gpu-let can take it; else set the model timer."""
        pools = queue.pools
        while queue.ids:
            frontrun = self._frontrun(queue, now)
            if frontrun > now and not queue.is_waiting:
                self._set_timer(queue, frontrun)
                return
            if not pools:
                self._drop(queue, len(queue.ids), now)
                break
            way_ms = self._way_ms(queue)
            if not any(self._can_take(pool, way_ms, now) and self._dispatch(queue, pool, now) for pool in pools):
                self._wait(queue, now)
                return
            self._rest(queue)
        self._rest(queue)

    def _can_take(self, pool: Pool, way_ms: float, now: float) -> bool:
        """Whether a gpu-let of the pool will be free when a batch's data has arrived."""
        at, gpulet = self._gpulets.open_at(pool, now)
        return gpulet >= 0 and at <= now + way_ms + TIME_TOLERANCE_MS

    def _way_ms(self, queue: _Candidate) -> float:
        return self._gpulets.way_ms(min(len(queue.ids), queue.longest))

    def _wait(self, queue: _Candidate, now: float) -> None:
        """Let the candidate wait for a gpu-let, and give up the requests that cannot be part of it."""
        gpulets, program = self._gpulets, queue.program
        pool = queue.pools[0]
        factor = gpulets.factor(program, pool.idle[0] if pool.idle else pool.gpulets[0])
        arrives_at = now + gpulets.ctrl_ms
        skip, size = window(
            queue.deadlines, self._defended(queue), pool.run[program], factor, arrives_at, gpulets.data_ms, arrives_at
        )
        if skip:
            self._drop(queue, skip, now)
        if not size:
            self._rest(queue)
            return
        queue.is_waiting = True
        queue.latest = queue.deadlines[0] - self._sent_ms(program, pool, size)
        self._waiting[queue.program] = queue
        self._set_timer(queue, max(queue.latest, now) + PAST_MS)
        self._arm_gpu_timer(now)

    def _rest(self, queue: _Candidate) -> None:
        queue.timer = INF
        queue.is_waiting = False
        self._waiting.pop(queue.program, None)

    def wake(self, now_ms: float) -> None:
        timers = self._timers
        while timers and timers[0][0] <= now_ms:
            at, program = heappop(timers)
            queue = self._queues[program]
            if at == queue.timer:
                queue.timer = INF
                self._update(queue, now_ms)
        if self._gpu_timer <= now_ms:
            self._gpu_timer = INF
            self._serve_waiting(now_ms)
        self.next_wake_ms = min(timers[0][0] if timers else INF, self._gpu_timer)

    # Rank thread: gpu-lets and who gets them -------------------------------------------------------------------------

    def batch_done(self, now_ms: float, gpulet: int) -> None:
        if self._gpulets.done(gpulet, now_ms) and self._waiting:
            self._serve_waiting(now_ms)

    def _serve_waiting(self, now: float) -> None:
        """Act on the GPU timer: the most urgent programs take the gpu-lets that will be free when their batch arrives.

        The longest way among the waiting batches says when that is.
        """
        way_ms = self._longest_way_ms()
        for queue in sorted(self._waiting.values(), key=lambda queue: queue.latest):
            pools = [pool for pool in queue.pools if self._can_take(pool, way_ms, now)]
            if pools:
                queue.is_waiting = False
                self._waiting.pop(queue.program, None)
                if any(self._can_take(pool, way_ms, now) and self._dispatch(queue, pool, now) for pool in pools):
                    self._set_timer(queue, INF)
                    self._update(queue, now)
                else:
                    self._wait(queue, now)
        self._arm_gpu_timer(now)

    def _longest_way_ms(self) -> float:
        return max((self._way_ms(queue) for queue in self._waiting.values()), default=0.0)

    def _arm_gpu_timer(self, now: float) -> None:
        """With a network delay: wake when a waiting batch has to leave to meet the next gpu-let that becomes free."""
        if not self._gpulets.ahead or not self._waiting:
            return
        self._gpu_timer = INF
        way_ms = self._longest_way_ms()
        for pool in self._gpulets.pools:
            at, gpulet = self._gpulets.open_at(pool, now)
            # An earlier moment was tried already, in vain.
            if gpulet >= 0 and at - way_ms > now + TIME_TOLERANCE_MS and self._waiting.keys() & pool.run.keys():
                self._gpu_timer = min(self._gpu_timer, at - way_ms)
        self.next_wake_ms = min(self.next_wake_ms, self._gpu_timer)

    def _dispatch(self, queue: _Candidate, pool: Pool, now: float) -> bool:
        """Cut a batch for the next gpu-let of a pool and send it; False if no request can be met there."""
        skip, size = self._cut(queue, pool, self._defended(queue), now)
        if size:
            self._send(queue, pool, skip, size, now)
        return size > 0

    # Everything else -------------------------------------------------------------------------------------------------

    def _cancelled(self, queue: _Candidate, now: float) -> None:
        self._set_timer(queue, INF)
        self._update(queue, now)

    def gpulet_back(self, now_ms: float, gpulet: int) -> None:
        self._gpulets.back(gpulet)
        self._serve_waiting(now_ms)
