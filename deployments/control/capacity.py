"""What a plan carries: a linear program for every connected component of gpu-lets that share programs, quick enough to
be asked for every plan. Most components are one gpu-let, or have time enough however requests are spread: these need
none.

A request of a program costs a gpu-let l(b)/b of its time, where b is the batch the scheduler forms at that rate. How
requests spread over the gpu-lets that host a program is what the program chooses. Bursts add up as independent ones do:
models that share gpu-lets need room for less than the sum of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack

from tenuto.batching.core.build import NO_DELAY, from_plan
from tenuto.batching.core.staggered import staggered_batch
from tenuto.batching.core.system import NetworkDelay
from tenuto.placement import Plan, Replica
from tenuto.placement.components import connected_components
from tenuto.placement.expectation.goodput import expected_of
from tenuto.placement.solver import linear_program

UNSERVED = 1e9  # load of a plan that has no gpu-let for a program with requests

# The gpu-lets of each program of a component, its rate, and whether the load is asked for.
_Question: TypeAlias = tuple[tuple[tuple[int, ...], ...], tuple[float, ...], bool]


@dataclass(frozen=True)
class Demand:
    """What is to be carried, by model: the mean rate, and how far a second may exceed it, both in requests per second.

    `burst_rps` is what is exceeded as rarely as requests may be lost; without it there are no bursts.
    """

    mean_rps: Mapping[str, float]
    burst_rps: Mapping[str, float]

    @property
    def upper_rps(self) -> dict[str, float]:
        """Mean and burst of every model, as each needs them where it has its gpu-lets for itself."""
        return {name: mean + self.burst_rps.get(name, 0.0) for name, mean in self.mean_rps.items()}

    @classmethod
    def steady(cls, rates_rps: Mapping[str, float]) -> Demand:
        """Return a demand without bursts."""
        return cls(rates_rps, {})


def promised_parts(plan: Plan, rates_rps: Mapping[str, float], slowdowns: Mapping[str, float]) -> dict[str, float]:
    """Return which part of each model's requests a plan promises in time at these rates, what random arrivals cost
    counted (`tenuto.placement.expectation`)."""

    def slowed(replica: Replica) -> Replica:
        factor = slowdowns.get(replica.name, 1.0)
        if factor == 1.0 or replica.latency is None:
            return replica
        return replica.model_copy(update={"latency": replica.latency.scaled(factor)})

    gpulets = tuple(g.model_copy(update={"models": tuple(slowed(r) for r in g.models)}) for g in plan.gpulets)
    models = tuple(
        spec.model_copy(update={"rate_rps": rates_rps[spec.name]}) for spec in plan.models if rates_rps.get(spec.name)
    )
    expected = expected_of(plan.model_copy(update={"gpulets": gpulets, "models": models})).models
    return {
        spec.name: expected[spec.name].goodput_rps / spec.rate_rps if spec.name in expected else 0.0 for spec in models
    }


class Capacity:
    """The gpu-lets of a plan, or those of them that are `ready`, as programs use them."""

    def __init__(
        self,
        plan: Plan,
        *,
        ready: Collection[str] | None = None,
        slowdowns: Mapping[str, float] | None = None,
        network: NetworkDelay = NO_DELAY,
    ) -> None:
        """Read a plan.

        Args:
            plan: with latencies.
            ready: the gpu-lets that count; default: all.
            slowdowns: what batches of a program really take over what the plan says, where that is not 1.
            network: delays on the way of a batch.
        """
        self._system = from_plan(plan, network, check_slos=False)
        self._slowdowns = slowdowns or {}
        self._ids = [gpulet.id for gpulet in plan.gpulets]
        self._costs: dict[tuple[int, int, float], float] = {}  # by program, host and rate
        self._solved: dict[_Question, tuple[float, ...]] = {}
        self._count(ready)

    def _count(self, ready: Collection[str] | None) -> None:
        self._used = [index for index, name in enumerate(self._ids) if ready is None or name in ready]
        gpulets = self._system.gpulets
        self._hosting: list[list[int]] = [[] for _ in self._system.programs]
        for index in self._used:
            for program in gpulets[index].hosts:
                self._hosting[program].append(index)
        alone = ([program] for program in range(len(self._system.programs)))
        self._components = connected_components([*alone, *(gpulets[i].hosts for i in self._used)])

    def of(self, ready: Collection[str]) -> Capacity:
        """Return that of other gpu-lets of the plan; components that are the same in both are solved once."""
        other = copy(self)
        other._count(ready)
        return other

    def forget(self) -> None:
        """Let go of what was found; call it between demands that have nothing in common."""
        self._costs.clear()
        self._solved.clear()

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models of the plan."""
        return tuple(model.name for model in self._system.models)

    def load(self, demand: Demand) -> float:
        """Return the load of the busiest gpu-let when requests are spread as evenly as can be: 1.0 is all its time.

        A model with requests that the plan does not know, or has no gpu-let for, makes it `UNSERVED`.
        """
        if not set(self.models).issuperset(name for name, rate in demand.mean_rps.items() if rate > 0):
            return UNSERVED
        offered = self._offered(demand)
        if any(rate > 0 and not self._hosting[program] for program, rate in enumerate(offered)):
            return UNSERVED
        return max((self._answer(component, offered, None)[0] for component in self._components), default=0.0)

    def carried(self, demand: Demand) -> dict[str, float]:
        """Return the requests per second of each model, of its mean rate, that are carried with no gpu-let busier than
        all its time.

        Weights decide who gives way, as they do in the scheduler under the objective `weighted`.
        """
        offered = self._offered(demand)
        weights = self._weights(offered)
        share = dict.fromkeys(demand.mean_rps, 0.0)
        for component in self._components:
            programs = sorted(component)
            for index, rate in zip(programs, self._answer(component, offered, weights), strict=True):
                for member in self._system.programs[index].members:
                    name = self._system.models[member].name
                    if name in share and offered[index] > 0:
                        share[name] = demand.mean_rps[name] * min(1.0, rate / offered[index])
        return share

    def asked_rps(self, demand: Demand) -> dict[str, float]:
        """Return the rate each model needs on these gpu-lets: its mean and, of its burst, the part that is left where
        models share them: sqrt(sum (c u)^2) / sum (c u) over the models of the gpu-lets it can use, u its burst and c
        what a request costs."""
        offered = self._offered(demand)
        found = {}
        for index, program in enumerate(self._system.programs):
            mean, burst = self._program_demand(demand, index)
            part = (offered[index] - mean) / burst if burst > 0 else 1.0
            for member in program.members:
                name = self._system.models[member].name
                if name in demand.mean_rps:
                    found[name] = demand.mean_rps[name] + part * demand.burst_rps.get(name, 0.0)
        return demand.upper_rps | found

    def _program_demand(self, demand: Demand, index: int) -> tuple[float, float]:
        names = [self._system.models[member].name for member in self._system.programs[index].members]
        burst = math.sqrt(sum(demand.burst_rps.get(name, 0.0) ** 2 for name in names))
        return sum(demand.mean_rps.get(name, 0.0) for name in names), burst

    def _offered(self, demand: Demand) -> list[float]:
        """Return the rate each program needs, its part of the bursts included."""
        programs = range(len(self._system.programs))
        mean, burst = zip(*(self._program_demand(demand, index) for index in programs), strict=True)
        offered = list(mean)
        if not any(burst):
            return offered
        for component in self._components:
            weighted = []
            for program in component:
                if offered[program] > 0 and self._hosting[program]:
                    cost = [self._cost_ms(program, gpulet, offered[program]) for gpulet in self._hosting[program]]
                    weighted.append(burst[program] * sum(cost) / len(cost))
            part = math.sqrt(sum(w * w for w in weighted)) / sum(weighted) if sum(weighted) > 0 else 1.0
            for program in component:
                offered[program] += part * burst[program]
        return offered

    def _weights(self, offered: list[float]) -> list[float]:
        by_request = self._system.objective != "weighted"
        return [1.0 if by_request else self._system.offered[index].weight for index in range(len(offered))]

    def _cost_ms(self, program: int, gpulet: int, rate_rps: float) -> float:
        """Return what a request of a program takes of a gpu-let's time, in the batches of this rate."""
        host = self._system.gpulets[gpulet].hosts[program]
        key = (program, id(host), rate_rps)
        found = self._costs.get(key)
        if found is None:
            network, spec = self._system.network, self._system.offered[program]
            factor = self._slowdowns.get(self._system.programs[program].name, 1.0)
            latency = [factor * ms for ms in host.planned_ms()]
            budget_ms = spec.slo_ms - network.response_ms - network.ctrl_ms
            size = staggered_batch(latency, budget_ms, rate_rps)
            found = self._costs[key] = latency[size] / size if latency[1] <= budget_ms else UNSERVED
        return found

    def _answer(self, component: set[int], offered: list[float], weights: list[float] | None) -> tuple[float, ...]:
        """Return what the programs of a component, in ascending order, are served, in requests per second; without
        weights the load of its busiest gpu-let alone."""
        programs = sorted(component)
        question: _Question = (
            tuple((program, *self._hosting[program]) for program in programs),
            tuple(offered[program] for program in programs),
            weights is None,
        )
        found = self._solved.get(question)
        if found is None:
            pairs = [
                _Pair(place, gpulet, self._cost_ms(program, gpulet, offered[program]) / 1000.0)
                for place, program in enumerate(programs)
                if offered[program] > 0
                for gpulet in self._hosting[program]
            ]
            rates = list(question[1])
            if weights is None:
                found = (_least_load(pairs, rates),)
            else:
                found = tuple(_most_carried(pairs, rates, [weights[program] for program in programs]))
            self._solved[question] = found
        return found


class _Pair(NamedTuple):
    """A program of a component on one of its gpu-lets, and the seconds of the gpu-let's time that a request takes."""

    program: int
    gpulet: int
    cost_s: float


def _least_load(pairs: Sequence[_Pair], rates: Sequence[float]) -> float:
    """Return the load of the busiest gpu-let where the programs of a component are spread as evenly as can be."""
    if len({pair.program for pair in pairs}) == len(pairs):  # nothing to choose
        return max(_loads((pair, rates[pair.program]) for pair in pairs).values(), default=0.0)
    rows, count = _rows(pairs), len(pairs)
    gpulets = len(rows)
    # Columns: requests per second of each pair, and the load to make small.
    cost = coo_matrix(
        (
            [*(pair.cost_s for pair in pairs), *([-1.0] * gpulets)],
            ([*(rows[pair.gpulet] for pair in pairs), *range(gpulets)], [*range(count), *([count] * gpulets)]),
        ),
        shape=(gpulets, count + 1),
    )
    carried = coo_matrix(([1.0] * count, ([p.program for p in pairs], range(count))), shape=(len(rates), count + 1))
    objective = np.zeros(count + 1)
    objective[-1] = 1.0
    hosted = {pair.program for pair in pairs}
    asked = [rate if program in hosted else 0.0 for program, rate in enumerate(rates)]
    found = linprog(objective, A_ub=cost.tocsr(), b_ub=np.zeros(gpulets), A_eq=carried.tocsr(), b_eq=asked)
    return float(found.x[-1])


def _most_carried(pairs: Sequence[_Pair], rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return what is carried of each program of a component where the weighted sum is as large as can be."""
    hosts: dict[int, list[_Pair]] = {}
    for pair in pairs:
        hosts.setdefault(pair.program, []).append(pair)
    served = [rate if program in hosts else 0.0 for program, rate in enumerate(rates)]
    # Each on its gpu-lets in proportion to how fast they are: where that is enough, there is nothing to choose.
    speed = {program: sum(1.0 / pair.cost_s for pair in own) for program, own in hosts.items()}
    even = ((pair, rates[pair.program] / pair.cost_s / speed[pair.program]) for pair in pairs)
    if max(_loads(even).values(), default=0.0) <= 1.0:
        return served
    if all(len(own) == 1 for own in hosts.values()):
        return _knapsacks(pairs, rates, weights)
    rows, count = _rows(pairs), len(pairs)
    cost = coo_matrix(
        ([pair.cost_s for pair in pairs], ([rows[pair.gpulet] for pair in pairs], range(count))),
        shape=(len(rows), count),
    )
    sums = coo_matrix(([1.0] * count, ([pair.program for pair in pairs], range(count))), shape=(len(rates), count))
    flows = linear_program(
        [-weights[pair.program] for pair in pairs],
        vstack([cost, sums]).tocsr(),
        [*([1.0] * len(rows)), *rates],
        [rates[pair.program] for pair in pairs],
    )
    by_program = np.bincount([pair.program for pair in pairs], weights=flows, minlength=len(rates))
    return [float(rate) for rate in by_program]


def _knapsacks(pairs: Sequence[_Pair], rates: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return what is carried where every program has one gpu-let: whatever gains most with its time comes first."""
    left: dict[int, float] = {}
    carried = [0.0] * len(rates)
    for program, gpulet, cost_s in sorted(pairs, key=lambda pair: pair.cost_s / max(weights[pair.program], 1e-12)):
        time = left.setdefault(gpulet, 1.0)
        carried[program] = min(rates[program], time / cost_s)
        left[gpulet] = time - carried[program] * cost_s
    return carried


def _loads(flows: Iterable[tuple[_Pair, float]]) -> dict[int, float]:
    """Return the load of every gpu-let, of requests per second by pair."""
    loads: dict[int, float] = {}
    for pair, rate_rps in flows:
        loads[pair.gpulet] = loads.get(pair.gpulet, 0.0) + pair.cost_s * rate_rps
    return loads


def _rows(pairs: Sequence[_Pair]) -> dict[int, int]:
    return {gpulet: row for row, gpulet in enumerate(dict.fromkeys(pair.gpulet for pair in pairs))}
