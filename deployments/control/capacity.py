"""What a plan carries: a linear program over its gpu-lets, quick enough to be asked for every plan.

A request of a program costs a gpu-let l(b)/b of its time, where b is the batch the scheduler forms at that rate. How
requests spread over the gpu-lets that host a program is what the program chooses. Bursts add up as independent ones do:
models that share gpu-lets need room for less than the sum of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack

from tenuto.batching.core.build import NO_DELAY, from_plan
from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.core.target import target_batch
from tenuto.placement import Plan, Replica
from tenuto.placement.expectation.goodput import expected_of
from tenuto.placement.pools import joined

__all__ = ["UNSERVED", "Capacity", "Demand", "promised_parts"]

UNSERVED = 1e9  # load of a plan that has no gpu-let for a program with requests


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
        used = [i for i, gpulet in enumerate(plan.gpulets) if ready is None or gpulet.id in ready]
        self._gpulets = [self._system.gpulets[i] for i in used]

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
        pairs = self._pairs(offered)
        hosted = {program for program, _, _ in pairs}
        if any(rate > 0 and program not in hosted for program, rate in enumerate(offered)):
            return UNSERVED
        if not pairs:
            return 0.0
        # Columns: requests per second of each pair, and the load to make small.
        count, gpulets = len(pairs), len(self._gpulets)
        cost = coo_matrix(
            (
                [*(ms / 1000.0 for _, _, ms in pairs), *([-1.0] * gpulets)],
                ([*(g for _, g, _ in pairs), *range(gpulets)], [*range(count), *([count] * gpulets)]),
            ),
            shape=(gpulets, count + 1),
        )
        carried = coo_matrix(
            ([1.0] * count, ([p for p, _, _ in pairs], range(count))), shape=(len(offered), count + 1)
        )
        rates = [rate if program in hosted else 0.0 for program, rate in enumerate(offered)]
        objective = np.zeros(count + 1)
        objective[-1] = 1.0
        found = linprog(objective, A_ub=cost.tocsr(), b_ub=np.zeros(gpulets), A_eq=carried.tocsr(), b_eq=rates)
        return float(found.x[-1])

    def carried(self, demand: Demand) -> dict[str, float]:
        """Return the requests per second of each model, of its mean rate, that are carried with no gpu-let busier than
        all its time.

        Weights decide who gives way, as they do in the scheduler under the objective `weighted`.
        """
        offered = self._offered(demand)
        pairs = self._pairs(offered)
        share = dict.fromkeys(demand.mean_rps, 0.0)
        if not pairs:
            return share
        count, gpulets = len(pairs), len(self._gpulets)
        cost = coo_matrix(
            ([ms / 1000.0 for _, _, ms in pairs], ([g for _, g, _ in pairs], range(count))), shape=(gpulets, count)
        )
        sums = coo_matrix(([1.0] * count, ([p for p, _, _ in pairs], range(count))), shape=(len(offered), count))
        weights = self._weights(offered)
        found = linprog(
            [-weights[p] for p, _, _ in pairs],
            A_ub=vstack([cost, sums]).tocsr(), b_ub=[*([1.0] * gpulets), *offered],
        )  # fmt: skip
        by_program = np.bincount([p for p, _, _ in pairs], weights=found.x, minlength=len(offered))
        for index, program in enumerate(self._system.programs):
            for member in program.members:
                name = self._system.models[member].name
                if name in share and offered[index] > 0:
                    share[name] = demand.mean_rps[name] * min(1.0, float(by_program[index]) / offered[index])
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
        cost: dict[int, list[float]] = {}
        for program, _, ms in self._pairs(offered):
            cost.setdefault(program, []).append(ms)
        for pool in joined([*([program] for program in programs), *(gpulet.hosts for gpulet in self._gpulets)]):
            weighted = [burst[p] * sum(cost[p]) / len(cost[p]) for p in pool if p in cost]
            part = math.sqrt(sum(w * w for w in weighted)) / sum(weighted) if sum(weighted) > 0 else 1.0
            for program in pool:
                offered[program] += part * burst[program]
        return offered

    def _weights(self, offered: list[float]) -> list[float]:
        by_request = self._system.objective != "weighted"
        return [1.0 if by_request else self._system.offered[index].weight for index in range(len(offered))]

    def _pairs(self, offered: list[float]) -> list[tuple[int, int, float]]:
        """Return (program, gpu-let, ms of the gpu-let's time per request) for every program with requests."""
        hosting = [0] * len(offered)
        for gpulet in self._gpulets:
            for program in gpulet.hosts:
                hosting[program] += 1
        network = self._system.network
        known: dict[tuple[int, int], float] = {}
        pairs = []
        for index, gpulet in enumerate(self._gpulets):
            for program, host in gpulet.hosts.items():
                if offered[program] <= 0:
                    continue
                key = (program, id(host))
                if key not in known:
                    spec = self._system.offered[program]
                    factor = self._slowdowns.get(self._system.programs[program].name, 1.0)
                    latency = [factor * ms for ms in host.planned_ms()]
                    budget_ms = spec.slo_ms - network.response_ms - network.ctrl_ms
                    size = target_batch(latency, budget_ms, offered[program])
                    known[key] = latency[size] / size if latency[1] <= budget_ms else UNSERVED
                pairs.append((program, index, known[key]))
        return pairs
