"""What a scheduler knows of its gpu-lets: idle, busy until when, or lost, and how long each program takes on them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tenuto.batching.core.system import INF, TIME_TOLERANCE_MS, Host, NetworkDelay, System


class GpuletState(NamedTuple):
    """A gpu-let: when the batches sent to it end, how long the last of them takes, and what is known of its speed."""

    ends: tuple[float, ...]
    run_ms: float
    is_lost: bool
    factors: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Pool:
    """Gpu-lets that host the same programs at the same speeds: what queueing theory calls a server pool.

    By program: `run[p][b]` is l(b) as it is planned with, `sent[p][b]` the time from the dispatch of a batch of b to
    an idle gpu-let until its end, network included. `idle` holds gpu-lets by index; `busy` (end, gpu-let) of those that
    run one batch, ascending; `full` the same of those to which a second one was sent ahead.
    """

    index: int
    hosts: Mapping[int, Host]
    factors: Mapping[int, float]
    size: int = 0
    run: dict[int, list[float]] = field(default_factory=dict)
    sent: dict[int, list[float]] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)
    busy: list[tuple[float, int]] = field(default_factory=list)
    full: list[tuple[float, int]] = field(default_factory=list)

    def adopt(self, network: NetworkDelay) -> None:
        """Compute the tables for these delays."""
        for program, host in self.hosts.items():
            factor = self.factors.get(program, 1.0)
            run = self.run[program] = [latency * factor for latency in host.planned_ms()]
            way_ms = [network.ctrl_ms + network.data_ms_per_request * size for size in range(len(run))]
            self.sent[program] = [latency + way for latency, way in zip(run, way_ms, strict=True)]


P = TypeVar("P", bound=Pool)
IDLE = GpuletState((), 0.0, False, ())


class Gpulets(Generic[P]):
    """Invariant: a gpu-let that is not lost is in exactly one list of exactly one pool.

    `pools_of[p]` are the pools that host a program, the fastest first; among equals the one that hosts the fewest
    programs, so that what can run anywhere stays free. `ahead` says whether there is a delay to send batches ahead
    for.
    """

    def __init__(self, system: System, pool_type: type[P]) -> None:
        """Begin with every gpu-let idle."""
        self._system = system
        self._pool_type = pool_type
        self.resume((IDLE,) * len(system.gpulets), system.network)

    def resume(self, states: Sequence[GpuletState], network: NetworkDelay) -> None:
        """Begin anew from states of all gpu-lets."""
        count = len(states)
        self._pending = [len(state.ends) for state in states]  # batches sent and not done
        self._free_at = [state.ends[-1] if state.ends else 0.0 for state in states]  # when the last of them ends
        self._run_ms = [state.run_ms for state in states]  # how long that one takes
        self._is_lost = [state.is_lost for state in states]
        self._factors = [dict(state.factors) for state in states]
        self._pool_of: list[P] = []
        self._pool_by_key: dict[object, P] = {}
        self.pools: list[P] = []
        self.pools_of: list[list[P]] = []
        self.adopt(network)
        for gpulet in range(count):
            self._pool_of.append(self._pool_for(gpulet))
            self._insert(gpulet)
        self._order_pools()

    def state(self) -> tuple[GpuletState, ...]:
        """Return the states of all gpu-lets."""
        return tuple(
            GpuletState(self._ends(gpulet), self._run_ms[gpulet], self._is_lost[gpulet], tuple(factors.items()))
            for gpulet, factors in enumerate(self._factors)
        )

    def _ends(self, gpulet: int) -> tuple[float, ...]:
        end = self._free_at[gpulet]
        return ((), (end,), (end - self._run_ms[gpulet], end))[self._pending[gpulet]]

    def adopt(self, network: NetworkDelay) -> None:
        """Budget these delays from now on."""
        self._network = network
        self.ahead = network.ctrl_ms > 0 or network.data_ms_per_request > 0
        for pool in self.pools:
            pool.adopt(network)

    def _pool_for(self, gpulet: int) -> P:
        hosts, factors = self._system.gpulets[gpulet].hosts, self._factors[gpulet]
        key = (id(hosts), tuple(sorted(factors.items())))
        pool = self._pool_by_key.get(key)
        if pool is None:
            pool = self._pool_by_key[key] = self._pool_type(len(self.pools), hosts, dict(factors))
            pool.adopt(self._network)
            self.pools.append(pool)
        pool.size += 1
        return pool

    def _order_pools(self) -> None:
        """Drop pools without gpu-lets and order those of every program."""
        self._pool_by_key = {key: pool for key, pool in self._pool_by_key.items() if pool.size}
        self.pools = list(self._pool_by_key.values())
        for index, pool in enumerate(self.pools):
            pool.index = index
        self.pools_of = [[] for _ in self._system.programs]
        for pool in self.pools:
            for program in pool.run:
                self.pools_of[program].append(pool)
        for program, hosting in enumerate(self.pools_of):
            common = min((len(pool.run[program]) for pool in hosting), default=1) - 1
            hosting.sort(key=lambda pool, p=program, b=common: (pool.run[p][b], len(pool.hosts), pool.index))  # type: ignore[misc]

    def correct(self, program: int, gpulet: int, factor: float) -> bool:
        """Plan with `factor` times the latency of a program on a gpu-let; False if that changes nothing."""
        factors, rounded = self._factors[gpulet], round(factor, 2)
        if program not in self._system.gpulets[gpulet].hosts or factors.get(program, 1.0) == rounded:
            return False
        self._remove(gpulet)
        self._pool_of[gpulet].size -= 1
        factors.pop(program, None)
        if rounded != 1.0:
            factors[program] = rounded
        self._pool_of[gpulet] = self._pool_for(gpulet)
        self._insert(gpulet)
        self._order_pools()
        return True

    def _insert(self, gpulet: int) -> None:
        pool, pending = self._pool_of[gpulet], self._pending[gpulet]
        if self._is_lost[gpulet]:
            return
        if not pending:
            insort(pool.idle, gpulet)
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

    # What happens ----------------------------------------------------------------------------------------------------

    def open_at(self, pool: P, now: float) -> tuple[float, int]:
        """Return when a gpu-let of the pool can begin with a batch that is sent to it next, and which; (inf, -1): none.

        That is an idle one, or with a network delay the one that ends first and has nothing sent ahead yet. One that is
        overdue is not waited for: nobody knows when it ends.
        """
        if pool.idle:
            return now, pool.idle[0]
        if self.ahead:
            for end, gpulet in pool.busy:
                if end >= now - TIME_TOLERANCE_MS:
                    return end, gpulet
        return INF, -1

    def send(self, gpulet: int, run_ms: float, end: float) -> None:
        """A batch was sent that takes so long and ends then."""
        self._remove(gpulet)
        self._pending[gpulet] += 1
        self._free_at[gpulet] = end
        self._run_ms[gpulet] = run_ms
        self._insert(gpulet)

    def done(self, gpulet: int, now: float) -> bool:
        """Its oldest batch has ended; False for a gpu-let that is lost."""
        if self._is_lost[gpulet]:
            return False
        self._remove(gpulet)
        self._pending[gpulet] -= 1
        if self._pending[gpulet]:
            # The batch sent ahead begins now or later: without this, small delays of a live gpu-let would add up
            # unseen.
            run_ms = self._run_ms[gpulet]
            self._free_at[gpulet] = max(self._free_at[gpulet] - run_ms, now) + run_ms
        self._insert(gpulet)
        return True

    def lose(self, gpulet: int) -> None:
        """Stop using a gpu-let."""
        self._remove(gpulet)
        self._is_lost[gpulet] = True
        self._pending[gpulet] = 0

    def back(self, gpulet: int) -> None:
        """Use a gpu-let again, idle."""
        if self._is_lost[gpulet]:
            self._is_lost[gpulet] = False
            self._insert(gpulet)
