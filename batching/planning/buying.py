"""What to buy of an elastic cluster: the cheapest GPUs found on which a plan stands its trial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, product

from tenuto.batching.planning.choosing import Candidate, Chooser
from tenuto.placement import Cluster

MOST_MORE = 8  # limit: GPUs added beyond twice as many as a start has
FREE = 1e-6  # derived: below every price: of a GPU that costs nothing, so that fewer of them are better
LOOKED_AT = 40  # limit: clusters that are planned for one price
STEPS, REACH = 8, 4  # fitted: types are exchanged in steps of an eighth of all GPUs at first, up to four of them


def cheapest(choice: Chooser, cluster: Cluster) -> Candidate | None:
    """Return the cheapest plan found that stands its trial, or else the start that serves most, with what it served.

    It begins with the cheapest start that stands its trial; where none does, GPUs are added to the one that serves
    most. From there on it looks at clusters that cost less, each with as many GPUs as that price allows, those most
    like the present one first. A cluster that fails rules out all clusters within it.
    """
    starts = choice.candidates(cluster)
    if not starts:
        return None
    purchase = _Purchase(choice, cluster)
    found = purchase.first_safe(sorted(starts, key=lambda each: purchase.price(each.bought)))
    found = found or purchase.grown(starts[0])
    return purchase.lowered(found) if found else choice.best(starts)


class _Purchase:
    def __init__(self, choice: Chooser, cluster: Cluster) -> None:
        self._choice, self._of_type = choice, cluster.one_of_each
        self._prices = {kind: max(FREE, price) for kind, price in cluster.prices.items()}

    def price(self, counts: Mapping[str, int]) -> float:
        """Return what so many GPUs of each type cost an hour."""
        return sum(self._prices[kind] * count for kind, count in counts.items())

    def first_safe(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """Return the first that stands its trial."""
        return next((safe for each in candidates if (safe := self._choice.safe(each)) is not None), None)

    def grown(self, found: Candidate) -> Candidate | None:
        """Add GPUs of the type that serves most for its price, or leaves most headroom, until a plan stands its trial;
        None: it took too many."""
        most = 2 * sum(found.bought.values()) + MOST_MORE
        while sum(found.bought.values()) < most and not self._choice.watch.is_stopped():
            before, bigger = found, []
            for kind in sorted(self._prices):
                planned = self._planned({**before.bought, kind: before.bought.get(kind, 0) + 1})
                if (safe := self.first_safe(planned)) is not None:
                    return safe
                bigger += [
                    ((before.foreseen.value - each.foreseen.value) / self._prices[kind], each.rank(1.0), each)
                    for each in planned[:1]
                ]
            found = min(bigger, key=lambda each: each[:2])[2] if bigger else before
            if sum(found.bought.values()) <= sum(before.bought.values()):
                break
        return None

    def lowered(self, found: Candidate) -> Candidate:
        """Return the cheapest plan found below the price of one that stands its trial.

        Half of what its GPUs idle is asked for first; what fails halves that, down to any lower price.
        """
        failed: list[Mapping[str, int]] = []
        step, in_vain = max(1, sum(found.bought.values()) // STEPS), 0.0
        while step and not self._choice.watch.is_stopped():
            price = self.price(found.bought)
            less = (price - max(in_vain, price * float(found.foreseen.busy.mean()))) / 2.0
            asked = price - (less if less > min(self._prices.values()) else FREE / 2.0)
            clusters = (each for each in self._below(asked, found.bought, step) if not _is_within(each, failed))
            for counts in islice(clusters, LOOKED_AT):
                safe = self.first_safe(self._planned(counts))
                if safe is not None:
                    found = safe
                    break
                failed.append(counts)
            else:
                in_vain = asked
                step //= 2 if asked > price - FREE else 1
        return found

    def _below(self, price: float, has: Mapping[str, int], step: int) -> list[dict[str, int]]:
        """Return clusters of at most this price to which no GPU can be added, those with most in common first; of all
        types but the cheapest up to `REACH` steps more or fewer GPUs."""
        *dear, last = sorted(self._prices, key=lambda kind: (-self._prices[kind], kind))
        clusters = []
        for steps in product(range(-REACH, REACH + 1), repeat=len(dear)):
            cluster = {kind: max(0, has.get(kind, 0) + n * step) for kind, n in zip(dear, steps, strict=True)}
            left = price - self.price(cluster)
            if left >= 0.0:
                cluster[last] = min(int(left / self._prices[last]), 2 * sum(has.values()) + MOST_MORE)
                if any(cluster.values()) and cluster not in clusters:
                    clusters.append(cluster)

        def changed(each: Mapping[str, int]) -> float:
            return sum(self._prices[kind] * abs(n - has.get(kind, 0)) for kind, n in each.items())

        return sorted(clusters, key=changed)

    def _planned(self, counts: Mapping[str, int]) -> list[Candidate]:
        return self._choice.on([self._of_type[kind] for kind in sorted(counts) for _ in range(counts[kind])])


def _is_within(counts: Mapping[str, int], others: Iterable[Mapping[str, int]]) -> bool:
    return any(all(count <= other[kind] for kind, count in counts.items()) for other in others)
