"""Depth-first search for a way to serve all models on given gpu-lets; the inner part of the ideal placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenuto.placement.cluster import Gpu
from tenuto.placement.policies.gpulet.share_costs import ShareCosts
from tenuto.placement.policies.gpulet.shared_gpu import Solved, Tenants, solve_gpu
from tenuto.placement.policies.shared.hosting import CARRIED, Hosted
from tenuto.placement.watch import PlanningWatch

FULL = 1 + 1e-9


class SearchStopped(Exception):
    """The steps of a search ran out before it was complete, or it was interrupted."""


@dataclass
class Let:
    """A gpu-let of the partition under search."""

    gpu: int
    kind: str
    share_pct: float
    tenants: Tenants = ()


class PartitionSearch:
    """Searches partitions one after another with a common budget of steps.

    The search of a branch ends when the remaining models could not fit even if they could be divided freely. For this,
    a model that runs at r r/s, on a share that could carry c r/s of it alone, keeps at least r/c of the share busy,
    whatever its batches.
    """

    def __init__(
        self,
        costs: Mapping[str, Mapping[str, ShareCosts]],
        rates: Mapping[str, float],
        steps: int,
        *,
        turns: bool = True,
        watch: PlanningWatch | None = None,
    ) -> None:
        self._costs, self._rates, self._steps, self._turns = costs, rates, steps, turns
        self._watch = watch or PlanningWatch()
        self._capacity = {
            (name, kind, share): own.capacity_rps(share)
            for name, by_type in costs.items()
            for kind, own in by_type.items()
            for share in own.latency_ms
        }
        self._least = {  # percent of a GPU that one request per second takes, on the share where that is least
            name: min(share / rps for (owner, _, share), rps in self._capacity.items() if owner == name)
            for name in costs
        }
        self._order = sorted(costs, key=lambda name: -rates[name] * self._least[name])
        self._solved: dict[object, Solved | None] = {}

    def run(self, lets: Sequence[Let]) -> bool:
        """Say whether these gpu-lets carry every rate; if so, their tenants are set.

        Raises:
            SearchStopped: the budget of steps is used up, or the watch says so.
        """
        return self._model(lets, 0, None, 0)

    def hosted(self, lets: Sequence[Let], gpus: Sequence[Gpu]) -> list[Hosted]:
        """Return the gpu-lets in use after a successful run, on these GPUs by position."""
        solved = ((let, self._solve(let.kind, let.share_pct, let.tenants)) for let in lets if let.tenants)
        return [one.hosted(gpus[let.gpu], let.share_pct, let.tenants) for let, one in solved if one is not None]

    def _busy(self, let: Let) -> float:
        return sum(rate / self._capacity[c.spec.name, let.kind, let.share_pct] for c, rate in let.tenants)

    def _model(self, lets: Sequence[Let], position: int, left: float | None, start: int) -> bool:
        """Place the rest of the model at a position of the order, then the models after it.

        `start`: index of the first gpu-let that may still be filled whole, so that no set is tried in two orders.
        """
        if position == len(self._order):
            return True
        self._steps -= 1
        if self._steps < 0 or self._watch.is_stopped():
            raise SearchStopped
        name = self._order[position]
        rate = self._rates[name] if left is None else left
        need = rate * self._least[name] + sum(self._rates[n] * self._least[n] for n in self._order[position + 1 :])
        if need > sum(let.share_pct * (FULL - self._busy(let)) for let in lets) + 1e-6:
            return False
        tried: set[object] = set()
        for let in lets:
            before = let.tenants
            state = (let.kind, let.share_pct, tuple((c.spec.name, r) for c, r in before))
            if state in tried or any(c.spec.name == name for c, _ in before):
                continue
            tried.add(state)
            if self._add(let, name, rate):
                if self._model(lets, position + 1, None, 0):
                    return True
                let.tenants = before
        filled: set[object] = set()
        for index in range(start, len(lets)):
            let = lets[index]
            carries = self._capacity.get((name, let.kind, let.share_pct), 0.0)
            if let.tenants or (let.kind, let.share_pct) in filled or not 0 < carries < rate * (1 - CARRIED):
                continue
            filled.add((let.kind, let.share_pct))
            if self._add(let, name, carries):
                if self._model(lets, position, rate - carries, index + 1):
                    return True
                let.tenants = ()
        return False

    def _add(self, let: Let, name: str, rate: float) -> bool:
        own = self._costs[name].get(let.kind)
        capacity = self._capacity.get((name, let.kind, let.share_pct), 0.0)
        if own is None or not capacity or (let.tenants and not self._turns):
            return False
        if self._busy(let) + rate / capacity > FULL:
            return False
        tenants: Tenants = (*let.tenants, (own, rate))
        if self._solve(let.kind, let.share_pct, tenants) is None:
            return False
        let.tenants = tenants
        return True

    def _solve(self, kind: str, share_pct: float, tenants: Tenants) -> Solved | None:
        """Return the duty cycle of tenants on a share; None if they do not fit. Partitions share these results."""
        key = (kind, share_pct, tuple((c.spec.name, rate) for c, rate in tenants))
        if key not in self._solved:
            # Memory is kept per share when the costs are made and checked again for several tenants together.
            answer = solve_gpu([(share_pct, tenants)])
            self._solved[key] = answer[0] if answer else None
        return self._solved[key]
