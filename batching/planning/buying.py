"""What to buy of an elastic cluster: the cheapest GPUs on which the search finds a plan that keeps every SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tenuto.batching.planning.search import Found, Search
from tenuto.placement import Cluster, Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.policies.shared.gpu_pool import GpuPool

__all__ = ["cheapest"]

NEAR = 0.9  # of the rates served by a start: from less, small changes do not lead to all


def cheapest(search: Search, cluster: Cluster, attainment: float) -> Found | None:
    """Return the cheapest layout found that keeps every model's attainment, or else one that serves most.

    From the cheapest start that keeps it, GPUs are taken away: of one type by bisection down to what full batches
    without neighbours keep busy, of several one at a time, or a cheaper one is put in a dearer one's place. Where no
    start keeps it, GPUs are added one at a time.
    """
    return _Purchase(search, cluster, attainment).cheapest()


class _Purchase:
    def __init__(self, search: Search, cluster: Cluster, attainment: float) -> None:
        self._search, self._cluster, self._attainment = search, cluster, attainment
        self._prices = {gpu.type: gpu.price_per_hour for gpu in cluster.gpus}

    def cheapest(self) -> Found | None:
        best: Found | None = None
        choices = {_bought(plan, self._cluster) for _, plan in self._search.starts(self._cluster)} - {()}
        for gpus in sorted(choices, key=lambda gpus: (self._cost(gpus), len(gpus), [gpu.id for gpu in gpus])):
            found = self._search.best(gpus, search_from=math.inf)
            if found is None:
                continue
            if best is None or found.trial.value > best.trial.value:
                best = found
            if self._search.is_safe(found):
                return self._shrunk(found)
            if self._search.watch.is_stopped():
                return best
        best = best or self._search.best(self._cluster.gpus)
        return None if best is None else self._grown(best)

    def _grown(self, found: Found) -> Found:
        """Search where nothing was searched yet, then add the GPU that serves most for its price, one at a time."""
        most = 2 * len(found.gpus) + 8
        found = self._search.best(found.gpus) or found
        while not self._search.is_safe(found) and len(found.gpus) < most and not self._search.watch.is_stopped():
            bigger = []
            for kind in sorted(self._prices):
                more = self._search.best(self._named([*(gpu.type for gpu in found.gpus), kind]))
                if more is not None:
                    bigger.append(((more.trial.value - found.trial.value) / (self._prices[kind] or 1.0), more))
            gain, chosen = max(bigger, key=lambda pair: pair[0], default=(0.0, None))
            if chosen is None or gain <= 0.0:
                break
            found = chosen
        return self._shrunk(found) if self._search.is_safe(found) else found

    def _shrunk(self, found: Found) -> Found:
        """Take GPUs away as long as every model keeps its attainment."""
        if len(self._prices) == 1:
            return self._bisected(found)
        is_cheaper = True
        while is_cheaper and not self._search.watch.is_stopped():
            is_cheaper = False
            for kinds in self._cheaper([gpu.type for gpu in found.gpus]):
                smaller = self._safe(self._named(kinds))
                if smaller is not None:
                    found, is_cheaper = smaller, True
                    break
        return found

    def _bisected(self, found: Found) -> Found:
        """Find the fewest GPUs of the only type that do, taking it that more GPUs never do worse."""
        (kind,) = self._prices
        too_few, enough = 0, len(found.gpus)
        while enough - too_few > 1 and not self._search.watch.is_stopped():
            middle = (too_few + enough) // 2
            smaller = self._safe(self._named([kind] * middle))
            if smaller is None:
                too_few = middle
            else:
                found, enough = smaller, middle
        return found

    def _safe(self, gpus: tuple[Gpu, ...]) -> Found | None:
        """Return a layout of these GPUs that keeps every model's attainment, if the search finds one."""
        if self._attainment * self._search.builder.least_busy(gpus) > len(gpus):
            return None  # not even with full batches and no neighbours
        found = self._search.best(gpus, search_from=NEAR)
        return found if found is not None and self._search.is_safe(found) else None

    def _cost(self, gpus: Sequence[Gpu]) -> float:
        """Return the price per hour, or the number of GPUs where a type has no price."""
        known = [price for price in (self._prices[gpu.type] for gpu in gpus) if price is not None]
        return float(len(gpus)) if len(known) < len(gpus) else sum(known)

    def _cheaper(self, kinds: list[str]) -> list[list[str]]:
        """Return the GPU types to buy instead: one fewer, or one replaced by a cheaper one; the cheapest first."""
        prices = {kind: price or 0.0 for kind, price in self._prices.items()}
        found = []
        for kind in sorted(set(kinds)):
            rest = list(kinds)
            rest.remove(kind)
            if rest:
                found.append(rest)
            found += [[*rest, other] for other in sorted(prices) if prices[other] < prices[kind]]
        return sorted(found, key=lambda each: (sum(prices[kind] for kind in each), len(each)))

    def _named(self, kinds: Sequence[str]) -> tuple[Gpu, ...]:
        """Return GPUs of these types with the names an elastic cluster gives them."""
        pool = GpuPool(self._cluster)
        order = {kind: position for position, kind in enumerate(self._cluster.gpu_types)}
        taken = [pool.take(kind) for kind in sorted(kinds, key=order.__getitem__)]
        return tuple(gpu for gpu in taken if gpu is not None)


def _bought(plan: Plan, cluster: Cluster) -> tuple[Gpu, ...]:
    """Return the GPUs that a plan of an elastic cluster uses."""
    kinds = {gpu.type: gpu for gpu in reversed(cluster.gpus)}
    used = {gpulet.gpu for gpulet in plan.gpulets}
    return tuple(
        kinds[gpu.type].model_copy(update={"id": gpu.id, "uuid": gpu.uuid}) for gpu in plan.gpus if gpu.id in used
    )
