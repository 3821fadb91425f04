"""Rule 5: when offline requests run, which have no SLO: only in time that no other request loses.

A gpu-let that no batch is due on takes an offline batch, as large as the slack beside it allows. The slack of a program
is the time until its deadline, of the head of its queue or of a request that would come now, less the time of its own
batch and of the batches that go before it, with what is expected to come meanwhile. Of that slack a part is kept for
bursts: the square of the load, as so often a request finds two batches before it. A batch of the offline requests' own
model takes them along where the same slack allows it. Where none fits beside a batch that is held on an idle gpu-let,
that batch goes at once.

What comes is shared by the gpu-lets of a pool that no offline batch has, and so are the batches before a program's own:
the last such gpu-let is kept for all of them.

A program that nobody asks keeps the slack of a request that would come now. Where not even one offline request fits
into it, one at a time runs once nobody has asked for a minute.

No two programs share a turn: each offline batch is of the program that had none for longest. Within a batch clients
take turns, and each one's requests go first come, first served.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil, exp, sqrt

from tenuto.batching.core.deferred.waiting import WaitingPool, WaitingQueue
from tenuto.batching.core.gpulets import Gpulets
from tenuto.batching.core.staggered import ArrivalRate
from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS

_UNASKED_MS = 60_000.0  # limit: then a program no longer keeps offline requests away that do not fit into its slack
_CHANCE = 2.0  # derived: standard deviations of what comes during a batch (Poisson): 2 % of the time more comes


class OfflineRequests:
    """The offline requests that wait. Invariant: a program without any is not in `waiting`."""

    def __init__(self, queues: list[WaitingQueue], gpulets: Gpulets[WaitingPool]) -> None:
        # Requests by program and client; whose turn it is comes first.
        self.waiting: dict[int, dict[str, dict[int, None]]] = {}
        self._clients: dict[tuple[int, int], str] = {}  # by program and request
        self._queues = queues
        self._gpulets = gpulets
        self._busy: dict[int, tuple[float, float]] = {}  # by pool: see `_busy_ms`, and when that was
        self._ends_ms: dict[int, dict[int, float]] = {}  # of the last offline batch, by pool and gpu-let
        self._deadlines: list[tuple[float, int, int]] = []  # a heap of (deadline, program, request)
        self._since_ms = INF  # when the first came

    def add(self, program: int, client: str, request_id: int, deadline: float) -> None:
        """Let a request wait."""
        self.waiting.setdefault(program, {}).setdefault(client, {})[request_id] = None
        self._clients[program, request_id] = client
        if deadline < INF:
            heappush(self._deadlines, (deadline, program, request_id))

    def remove(self, program: int, request_id: int) -> bool:
        """Forget a request; False if it does not wait."""
        client = self._clients.pop((program, request_id), None)
        if client is None:
            return False
        waiting = self.waiting[program]
        del waiting[client][request_id]
        if not waiting[client]:
            del waiting[client]
        if not waiting:
            del self.waiting[program]
        return True

    def count(self, program: int) -> int:
        """Return how many requests of a program wait."""
        return sum([len(requests) for requests in self.waiting.get(program, {}).values()])

    def note_other(self, pool: WaitingPool, run_ms: float, now: float) -> None:
        """Note that a batch which is not offline takes so long on a gpu-let of a pool."""
        self._busy[pool.index] = self._busy_ms(pool, now) + run_ms, now

    def _busy_ms(self, pool: WaitingPool, now: float) -> float:
        """Return how long such batches took on a pool in about the last second, the last ones in full."""
        busy_ms, at = self._busy.get(pool.index, (0.0, now))
        return busy_ms * exp((at - now) / ArrivalRate.RECENT_MS)

    def take_batch(self, program: int, count: int) -> list[int]:
        """Remove and return so many requests of a program, of each client in turn. It is the turn of other programs
        then."""
        waiting, ids = self.waiting.pop(program), list[int]()
        while waiting and len(ids) < count:
            client = next(iter(waiting))
            requests = waiting.pop(client)
            request_id = next(iter(requests))
            del requests[request_id], self._clients[program, request_id]
            ids.append(request_id)
            if requests:
                waiting[client] = requests
        if waiting:
            self.waiting[program] = waiting
        return ids

    def expired(self, now: float) -> list[tuple[int, int]]:
        """Remove and return (program, request) of those whose deadline has passed."""
        gone = list[tuple[int, int]]()
        heap = self._deadlines
        while heap and heap[0][0] <= now:
            _, program, request_id = heappop(heap)
            if self.remove(program, request_id):
                gone.append((program, request_id))
        return gone

    def look_at(self, now: float) -> float:
        """Return when to look again though nothing happens: rates fall when nothing comes."""
        self._since_ms = min(self._since_ms, now)
        if not any(pool.size for program in self.waiting for pool in self._queues[program].pools):
            return self._deadlines[0][0] if self.waiting and self._deadlines else INF
        return min(now + ArrivalRate.STEP_MS, self._deadlines[0][0] if self._deadlines else INF)

    def next_batch(self, pool: WaitingPool, now: float, starts_at: float, gpulet: int) -> tuple[int, int]:
        """Return the program and the size of the offline batch that may start on a gpu-let then; size 0: none."""
        ends_ms = self._ends_ms.setdefault(pool.index, {})
        rivals, lately = self._rivals(pool, now, None, INF), None
        for program in self.waiting:
            run = pool.run.get(program)
            if run is not None:
                begin = max(starts_at, now + self._gpulets.way_ms(1))
                factor = self._gpulets.factor(program, gpulet)
                most = min(self.count(program), len(run) - 1)
                size = self._largest(pool, rivals, run, factor, begin, now, most, 0)
                if not size:
                    lately = self._rivals(pool, now, None, _UNASKED_MS) if lately is None else lately
                    size = self._largest(pool, lately, run, factor, begin, now, 1, 0)
                if size:
                    ends_ms[gpulet] = begin + factor * run[size]
                    return program, size
        return -1, 0

    def fits_alone(self, pool: WaitingPool, now: float) -> bool:
        """Return whether one offline request fits beside what may come to a pool, if nothing else waited."""
        rivals = [
            (now + queue.costs.budget_ms, queue, per_ms) for _, queue, per_ms in self._rivals(pool, now, None, INF)
        ]
        begin = now + self._gpulets.way_ms(1)
        runs = [run for program, run in pool.run.items() if program in self.waiting]
        return any(self._largest(pool, rivals, run, 1.0, begin, now, 1, 0) for run in runs)

    def beside(self, queue: WaitingQueue, pool: WaitingPool, size: int, end_by: float, now: float) -> int:
        """Return how many offline requests of its program a batch of so many may take along, if it must end by a
        time."""
        if queue.program not in self.waiting:
            return 0
        run, factor = pool.run[queue.program], queue.batch.factor
        most = min(self.count(queue.program), len(run) - 1 - size)
        begin = now + self._gpulets.way_ms(size)
        while most > 0 and begin + factor * run[size + most] > end_by:
            most //= 2
        if most <= 0:
            return 0
        rivals = self._rivals(pool, now, queue, INF)
        return self._largest(pool, rivals, run, factor, begin, now, size + most, size) - size

    def _largest(
        self,
        pool: WaitingPool,
        rivals: list[tuple[float, WaitingQueue, float]],
        run: list[float],
        factor: float,
        begin: float,
        now: float,
        most: int,
        least: int,
    ) -> int:
        """Return the largest batch, up to `most` and else `least`, that leaves every one of `rivals` its slack."""
        load = min(1.0, self._busy_ms(pool, now) / (ArrivalRate.RECENT_MS * pool.size))
        low, high = least, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(rivals, begin + factor * run[middle] - now, now, pool, 1.0 - load * load):
                low = middle
            else:
                high = middle
        return low

    def _rivals(
        self, pool: WaitingPool, now: float, apart: WaitingQueue | None, asked_within_ms: float
    ) -> list[tuple[float, WaitingQueue, float]]:
        """Return (deadline, queue, requests per ms to a gpu-let without an offline batch) of the programs that may need
        a gpu-let of the pool, the first deadline first; only of those that were asked within a time."""
        rivals = []
        free = self._free(pool, now)
        for program in pool.run:
            queue = self._queues[program]
            rate = queue.rate
            asked_ms = rate.next_at if rate.count else self._since_ms
            is_silent = now >= asked_ms + ArrivalRate.RECENT_MS
            per_ms = 0.0 if is_silent else max(rate.rps or 0.0, rate.recent_rps) / (1000.0 * free)
            if queue.ids and queue is not apart:
                rivals.append((queue.deadlines[0], queue, per_ms))
            elif (rate.rps or rate.count) and now - asked_ms < asked_within_ms:
                rivals.append((now + queue.costs.budget_ms, queue, per_ms))
        rivals.sort(key=_deadline)
        return rivals

    def _free(self, pool: WaitingPool, now: float) -> int:
        """Return how many gpu-lets of a pool no offline batch has, and at least 1: the others share what comes."""
        return max(1, pool.size - sum(end > now for end in self._ends_ms.get(pool.index, {}).values()))

    def _fits(
        self,
        rivals: list[tuple[float, WaitingQueue, float]],
        ends_ms: float,
        now: float,
        pool: WaitingPool,
        part: float,
    ) -> bool:
        """Return whether a batch that ends in so many ms takes at most this part of every program's slack."""
        before_ms, free = 0.0, self._free(pool, now)
        for deadline, queue, per_ms in rivals:
            costs = queue.costs
            come = per_ms * ends_ms
            count = ceil(len(queue.ids) + come + _CHANCE * sqrt(come))
            run = pool.run[queue.program]
            own_ms = queue.batch.factor * run[max(1, min(count, costs.longest, len(run) - 1))]
            slack_ms = deadline - now - self._gpulets.way_ms(1) - before_ms - own_ms
            if count:  # of those that nobody asks, two do not come at once
                before_ms += own_ms / free
            if ends_ms > part * slack_ms + TIME_TOLERANCE_MS:
                return False
        return True


def _deadline(rival: tuple[float, WaitingQueue, float]) -> float:
    return rival[0]
