"""The state of the gpu-lets, as a scheduler knows it: whether each is idle, busy (and until when) or lost, and how
long each program takes on it.

Pools and their latency tables come from the plan and never change; only the count of gpu-lets that are not lost does.
What is learned while serving is kept as numbers beside the tables: how much longer than planned a program takes on a
gpu-let, and the delay to the gpu-lets. Learning such a number costs one assignment. It is applied when a batch is cut.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, Host, NetworkDelay, System


@dataclass(slots=True, eq=False)
class Pool:
    """Gpu-lets that host the same programs at the same planned speeds: what queueing theory calls a server pool.

    `run[p][b]` is the planned l(b) of program p. `size` counts the gpu-lets that are not lost. `idle` lists idle
    gpu-lets by index, but slow ones last. `busy` lists (end, gpu-let) of gpu-lets that run one batch, ascending. `full`
    lists the same of gpu-lets to which a second batch was sent ahead.
    """

    index: int
    hosts: Mapping[int, Host]
    size: int = 0
    gpulets: list[int] = field(default_factory=list)
    run: dict[int, list[float]] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    busy: list[tuple[float, int]] = field(default_factory=list)
    full: list[tuple[float, int]] = field(default_factory=list)


P = TypeVar("P", bound=Pool)


class Gpulets(Generic[P]):
    """Invariant: a gpu-let that is not lost is in exactly one list of exactly one pool.

    `pools_of[p]` are the pools that host program p, the fastest first. Of equally fast pools the one with the fewest
    programs comes first, so that gpu-lets which can run anything stay free. `ahead` is True when there is a network
    delay, so that batches are sent before their gpu-let is free. `moved` are the programs whose speed on some gpu-let
    changed by a tenth since `order` was called.
    """

    def __init__(self, system: System, pool_type: type[P]) -> None:
        """Begin with every gpu-let idle."""
        self._system = system
        self.pools: list[P] = []
        self._pool_of: list[P] = []
        by_hosts: dict[int, P] = {}
        for index, gpulet in enumerate(system.gpulets):
            pool = by_hosts.get(id(gpulet.hosts))
            if pool is None:
                pool = by_hosts[id(gpulet.hosts)] = pool_type(len(self.pools), gpulet.hosts)
                pool.run = {program: host.planned_ms() for program, host in gpulet.hosts.items()}
                self.pools.append(pool)
            pool.size += 1
            pool.gpulets.append(index)
            self._pool_of.append(pool)
        self.pools_of: list[list[P]] = [[] for _ in system.programs]
        for pool in self.pools:
            for program in pool.run:
                self.pools_of[program].append(pool)
        count = len(system.gpulets)
        self._pending = [0] * count  # batches sent and not done
        self._free_at = [0.0] * count  # when the last of them ends
        self._run_ms = [0.0] * count  # how long that one takes
        self._is_lost = [False] * count
        self._factors: list[dict[int, float]] = [{} for _ in range(count)]
        self._place = [self._place_of(gpulet) for gpulet in range(count)]  # rank among idle gpu-lets
        self.adopt(system.network)
        for place in range(count):
            self._insert(place)
        self.moved = set(range(len(self.pools_of)))
        for program in range(len(self.pools_of)):
            self.order(program)

    def factors(self) -> tuple[tuple[int, int, float], ...]:
        """Return (program, gpu-let, factor) for each factor learned: measured over planned latency."""
        return tuple([(p, gpulet, f) for gpulet, learned in enumerate(self._factors) for p, f in learned.items()])

    def lost(self) -> tuple[int, ...]:
        """Return the gpu-lets that are lost."""
        return tuple([gpulet for gpulet, is_lost in enumerate(self._is_lost) if is_lost])

    def adopt(self, network: NetworkDelay) -> None:
        """Budget these delays from now on."""
        self.ctrl_ms, self.data_ms = network.ctrl_ms, network.data_ms_per_request
        self.ahead = network.ctrl_ms > 0 or network.data_ms_per_request > 0

    def way_ms(self, size: int) -> float:
        """Return how long a batch of `size` requests is on its way to a gpu-let."""
        return self.ctrl_ms + self.data_ms * size

    def factor(self, program: int, gpulet: int) -> float:
        """Return measured over planned latency of a program on a gpu-let; 1.0 while nothing is known."""
        return self._factors[gpulet].get(program, 1.0)

    def correct(self, program: int, gpulet: int, factor: float) -> None:
        """Plan with `factor` times the planned latency of a program on a gpu-let."""
        factors = self._factors[gpulet]
        if program not in self._pool_of[gpulet].run:
            return
        if round(10.0 * factor) != round(10.0 * factors.get(program, 1.0)):  # derived: tenths, as in `_place_of`
            self.moved.add(program)
        factors[program] = factor
        self._place[gpulet] = self._place_of(gpulet, factor)

    def _place_of(self, gpulet: int, factor: float | None = None) -> int:
        """Return the rank of a gpu-let among idle ones: by its factor in tenths, then by index."""
        if factor is None:
            factor = next(reversed(self._factors[gpulet].values()), 1.0)
        return round(10.0 * factor) * len(self._factors) + gpulet  # derived: tenths, which chance seldom changes

    def order(self, program: int) -> None:
        """Sort the pools of a program again by their known speeds."""
        if program in self.moved:
            self.moved.discard(program)
            hosting = self.pools_of[program]
            common = min((len(pool.run[program]) for pool in hosting), default=1) - 1
            hosting.sort(
                key=lambda pool: (
                    pool.run[program][common] * round(min(self.factor(program, g) for g in pool.gpulets), 1),
                    len(pool.hosts),
                    pool.index,
                )
            )

    def _insert(self, gpulet: int) -> None:
        pool, pending = self._pool_of[gpulet], self._pending[gpulet]
        if self._is_lost[gpulet]:
            return
        if not pending:
            insort(pool.idle, gpulet, key=self._place.__getitem__)
        else:
            insort(pool.busy if pending == 1 else pool.full, (self._free_at[gpulet], gpulet))

    def _remove(self, gpulet: int) -> None:
        pool, pending = self._pool_of[gpulet], self._pending[gpulet]
        if self._is_lost[gpulet]:
            return
        if not pending:
            pool.idle.remove(gpulet)
        else:
            ends = pool.busy if pending == 1 else pool.full
            del ends[bisect_left(ends, (self._free_at[gpulet], gpulet))]

    def pool_of(self, gpulet: int) -> P:
        """Return the pool of a gpu-let."""
        return self._pool_of[gpulet]

    # Events ----------------------------------------------------------------------------------------------------------

    def open_at(self, pool: P, now: float) -> tuple[float, int]:
        """Return the gpu-let of the pool that takes the next batch, and when it can begin; (inf, -1): none.

        An idle gpu-let can begin now. With a network delay it may also be the gpu-let that ends first and has no batch
        sent ahead yet. An overdue gpu-let is not waited for, as nobody knows when it ends.
        """
        if pool.idle:
            return now, pool.idle[0]
        if self.ahead:
            for end, gpulet in pool.busy:
                if end >= now - TIME_TOLERANCE_MS:
                    return end, gpulet
        return INF, -1

    def ready(self, pool: P, now: float) -> int:
        """Return how many gpu-lets of the pool can begin with a batch as soon as it arrives: the idle ones, and with a
        network delay also those that will be idle by then."""
        if not self.ahead or not pool.busy:
            return len(pool.idle)
        overdue = bisect_left(pool.busy, (now - TIME_TOLERANCE_MS, -1))
        return len(pool.idle) + bisect_left(pool.busy, (now + self.way_ms(1) + TIME_TOLERANCE_MS, -1)) - overdue

    def free_by(self, pool: P, at: float) -> tuple[int, float]:
        """Return how many gpu-lets of the pool will have ended all their batches at the time `at`, and when the first
        of the others will."""
        free, soonest = len(pool.idle), INF
        for ends in (pool.busy, pool.full):
            ended = bisect_left(ends, (at + TIME_TOLERANCE_MS, -1))
            free += ended
            if ended < len(ends):
                soonest = min(soonest, ends[ended][0])
        return free, soonest

    def send(self, gpulet: int, run_ms: float, end: float) -> None:
        """Note that a batch was sent which takes `run_ms` and ends at `end`."""
        self._remove(gpulet)
        self._pending[gpulet] += 1
        self._free_at[gpulet] = end
        self._run_ms[gpulet] = run_ms
        self._insert(gpulet)

    def done(self, gpulet: int, now: float) -> bool:
        """Note that the oldest batch of a gpu-let has ended; False if the gpu-let is lost."""
        if self._is_lost[gpulet]:
            return False
        self._remove(gpulet)
        self._pending[gpulet] -= 1
        if self._pending[gpulet]:
            # The batch sent ahead begins now or later. Without this, small delays of a live gpu-let would add up
            # unseen.
            run_ms = self._run_ms[gpulet]
            self._free_at[gpulet] = max(self._free_at[gpulet] - run_ms, now) + run_ms
        self._insert(gpulet)
        return True

    def lose(self, gpulet: int) -> None:
        """Stop using a gpu-let."""
        self._remove(gpulet)
        self._pool_of[gpulet].size -= not self._is_lost[gpulet]
        self._is_lost[gpulet] = True
        self._pending[gpulet] = 0

    def back(self, gpulet: int) -> None:
        """Use a gpu-let again, idle."""
        if self._is_lost[gpulet]:
            self._is_lost[gpulet] = False
            self._pool_of[gpulet].size += 1
            self._insert(gpulet)
