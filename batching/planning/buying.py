"""What to buy of an elastic cluster: the cheapest GPUs on which the search finds a plan that keeps every SLO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tenuto.batching.planning.search import Found, Search
from tenuto.placement import Cluster, Plan
from tenuto.placement.cluster import Gpu
from tenuto.placement.policies.shared.gpu_pool import GpuPool

NEAR = 0.9  # of the rates served by a start: from less, small changes do not lead to all
MOST_MORE = 8  # GPUs added beyond twice as many
WORTH_A_TRIAL = 0.98  # of the rates served by the model: it may be wrong by that, against a layout too


def cheapest(search: Search, cluster: Cluster, attainment: float) -> Found | None:
    """Return the cheapest layout found that keeps every model's attainment, or else one that serves most.

    From the cheapest start that is expected to keep it, GPUs are taken away as long as the model of queueing and
    batches finds a layout that does: of one type by bisection down to what full batches without neighbours keep busy,
    of several one at a time, or a cheaper one is put in a dearer one's place. Trials in virtual time have the last
    word: where the cheapest fails its trial the next cheapest is tried, and where it stands it, one GPU less, if that
    is expected to serve nearly everything. Where no start keeps it, GPUs are added one at a time.
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
            found = self._likely(gpus, search_from=math.inf)
            if found is None:
                continue
            if best is None or found.forecast.value > best.forecast.value:
                best = found
            if self._keeps(found):
                return self._confirmed(self._shrunk([found]))
            if self._search.watch.is_stopped():
                return best
        best = best or self._likely(self._cluster.gpus)
        return None if best is None else self._confirmed(self._grown(best))

    def _likely(self, gpus: tuple[Gpu, ...], *, search_from: float = 0.0) -> Found | None:
        """Return the layout of these GPUs that is expected to serve most."""
        return next(iter(self._search.expected(gpus, search_from=search_from)), None)

    def _keeps(self, found: Found) -> bool:
        return found.forecast.keeps(self._attainment)

    def _grown(self, found: Found) -> list[Found]:
        """Search where nothing was searched yet, then add the GPU that serves most for its price, one at a time."""
        most = 2 * len(found.gpus) + MOST_MORE
        found = self._likely(found.gpus) or found
        while not self._keeps(found) and len(found.gpus) < most and not self._search.watch.is_stopped():
            bigger = []
            for kind in sorted(self._prices):
                more = self._likely(self._named([*(gpu.type for gpu in found.gpus), kind]))
                if more is not None:
                    bigger.append(((more.forecast.value - found.forecast.value) / (self._prices[kind] or 1.0), more))
            gain, chosen = max(bigger, key=lambda pair: pair[0], default=(0.0, None))
            if chosen is None or gain <= 0.0:
                break
            found = chosen
        return self._shrunk([found]) if self._keeps(found) else [found]

    def _shrunk(self, kept: list[Found]) -> list[Found]:
        """Take GPUs away as long as every model is expected to keep its attainment; return all that do, each cheaper
        than the one before."""
        if len(self._prices) == 1:
            return self._bisected(kept)
        is_cheaper = True
        while is_cheaper and not self._search.watch.is_stopped():
            is_cheaper = False
            for kinds in self._cheaper([gpu.type for gpu in kept[-1].gpus]):
                smaller = self._smaller(self._named(kinds))
                if smaller is not None and self._keeps(smaller):
                    kept, is_cheaper = [*kept, smaller], True
                    break
        return kept

    def _bisected(self, kept: list[Found]) -> list[Found]:
        """Find the fewest GPUs of the only type that do, taking it that more GPUs never do worse."""
        (kind,) = self._prices
        too_few, enough = 0, len(kept[-1].gpus)
        while enough - too_few > 1 and not self._search.watch.is_stopped():
            middle = (too_few + enough) // 2
            smaller = self._smaller(self._named([kind] * middle))
            if smaller is None or not self._keeps(smaller):
                too_few = middle
            else:
                kept, enough = [*kept, smaller], middle
        return kept

    def _confirmed(self, kept: Sequence[Found]) -> Found:
        """Return the cheapest of these, or between them, that stands a trial; with more GPUs than all where none does.

        The model is wrong by a few percent, either way: what it finds to be enough may fail, and one GPU less may do.
        """
        choices = self._between(kept)
        for number, each in enumerate(choices):
            if self._search.watch.is_stopped():
                break
            tried = self._search.safe(each)
            if tried is not None:
                return self._fewer(tried) if number == 0 else tried
        return self._enlarged(kept[0])

    def _enlarged(self, failed: Found) -> Found:
        """Add GPUs of the cheapest type to what failed its trial until a trial is stood; as it is where none is."""
        cheapest = min(self._prices, key=lambda kind: (self._prices[kind] or 0.0, kind))
        kinds = [gpu.type for gpu in failed.gpus]
        for more in range(1, len(kinds) + MOST_MORE):
            if self._search.watch.is_stopped():
                break
            found = self._likely(self._named([*kinds, *[cheapest] * more]))
            tried = self._search.safe(found) if found is not None and self._keeps(found) else None
            if tried is not None:
                return tried
        return self._search.tried(failed) or failed

    def _between(self, kept: Sequence[Found]) -> Iterator[Found]:
        """Return layouts from the cheapest on; of one GPU type also with the numbers of GPUs that were left out."""
        for here, dearer in zip(reversed(kept), [*reversed(kept[:-1]), None], strict=True):
            yield here
            if dearer is None or len(self._prices) > 1:
                continue
            (kind,) = self._prices
            for count in range(len(here.gpus) + 1, len(dearer.gpus)):
                found = self._smaller(self._named([kind] * count))
                if found is not None and self._keeps(found):
                    yield found

    def _fewer(self, found: Found) -> Found:
        """Take GPUs away as long as trials allow, where nearly everything is expected to be served."""
        while not self._search.watch.is_stopped():
            for kinds in self._cheaper([gpu.type for gpu in found.gpus]):
                smaller = self._smaller(self._named(kinds))
                if smaller is None or smaller.forecast.value < WORTH_A_TRIAL * self._search.offered_value:
                    continue
                tried = self._search.safe(smaller)
                if tried is not None:
                    found = tried
                    break
            else:
                return found
        return found

    def _smaller(self, gpus: tuple[Gpu, ...]) -> Found | None:
        """Return the layout of these GPUs that is expected to serve most; None where they are too few even with full
        batches and no neighbours."""
        if self._attainment * self._search.builder.least_busy(gpus) > len(gpus):
            return None
        return self._likely(gpus, search_from=NEAR)

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
