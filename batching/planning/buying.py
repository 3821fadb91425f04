"""What to buy of an elastic cluster: the cheapest GPUs found on which some plan keeps every model's attainment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenuto.batching.planning.choosing import Candidate, Chooser
from tenuto.placement import Cluster

MOST_MORE = 8  # limit: GPUs added beyond twice as many as a start has
WORTH_A_TRIAL = 0.98  # derived: of the rates expected to be served: expectations are wrong by that, against a plan too


def cheapest(choice: Chooser, cluster: Cluster, attainment: float) -> Candidate | None:
    """Return the cheapest plan found that keeps every model's attainment, or else one that serves most.

    From the cheapest start that is expected to keep it, GPUs are taken away, many at a time and then fewer, or replaced
    by cheaper ones, as long as some plan of what is left is expected to keep it; where no start is expected to, GPUs
    are added first. Trials have the last word: a GPU less where a trial is stood, a GPU more where it is not.
    """
    purchase = _Purchase(choice, cluster, attainment)
    return purchase.cheapest()


class _Purchase:
    def __init__(self, choice: Chooser, cluster: Cluster, attainment: float) -> None:
        self._choice, self._cluster, self._attainment = choice, cluster, attainment
        self._prices = {gpu.type: gpu.price_per_hour or 0.0 for gpu in cluster.gpus}
        self._of_type = cluster.one_of_each

    def cheapest(self) -> Candidate | None:
        starts = self._choice.candidates(self._cluster)
        if not starts:
            return None
        kept = [each for each in starts if self._keeps(each)]
        found = min(kept, key=lambda each: self._cost(_bought(each))) if kept else self._grown(starts[0])
        if self._keeps(found):
            found = self._shrunk(found)
        return self._confirmed(found)

    def _keeps(self, each: Candidate) -> bool:
        return each.foreseen.keeps(self._attainment)

    def _cost(self, kinds: Sequence[str]) -> tuple[float, int]:
        return sum(self._prices[kind] for kind in kinds), len(kinds)

    def _expected(self, kinds: Sequence[str]) -> Candidate | None:
        return self._choice.expected([self._of_type[kind] for kind in sorted(kinds)])

    def _grown(self, found: Candidate) -> Candidate:
        """Add GPUs of the type that serves most for its price, one at a time, until every model is kept."""
        most = 2 * len(_bought(found)) + MOST_MORE
        while not self._keeps(found) and len(_bought(found)) < most and not self._choice.watch.is_stopped():
            bigger = [(kind, self._expected([*_bought(found), kind])) for kind in sorted(self._prices)]
            gains = [
                ((more.foreseen.value - found.foreseen.value) / (self._prices[kind] or 1.0), place, more)
                for place, (kind, more) in enumerate(bigger)
                if more is not None
            ]
            gain, _, more = max(gains, default=(0.0, 0, found))
            if gain <= 0.0:
                break
            found = more
        return found

    def _shrunk(self, found: Candidate) -> Candidate:
        """Take GPUs away, or cheaper ones in their place, as long as every model is expected to be kept."""
        step = max(1, len(_bought(found)) // 2)
        while step and not self._choice.watch.is_stopped():
            for kinds in self._cheaper(_bought(found), step):
                smaller = self._expected(kinds)
                if smaller is not None and self._keeps(smaller):
                    found = smaller
                    break
            else:
                step //= 2
        return found

    def _cheaper(self, kinds: list[str], step: int) -> Iterator[list[str]]:
        """Return the GPU types to buy instead, the cheapest first: `step` of a type fewer, or replaced."""
        choices = []
        for kind in sorted(set(kinds)):
            rest, taken = [other for other in kinds if other != kind], kinds.count(kind)
            if taken < step:
                continue
            rest += [kind] * (taken - step)
            choices += [rest] if rest else []
            choices += [[*rest, *[c] * step] for c in sorted(self._prices) if self._prices[c] < self._prices[kind]]
        yield from sorted(choices, key=self._cost)

    def _confirmed(self, found: Candidate) -> Candidate:
        """Return the cheapest that stands a trial: of fewer GPUs as long as trials allow, else of more of the cheapest
        type; as it is where none does."""
        tried = self._choice.safe(found)
        if tried is None:
            kind = min(self._prices, key=lambda kind: (self._prices[kind], kind))
            for more in range(1, len(_bought(found)) + MOST_MORE):
                if self._choice.watch.is_stopped():
                    break
                larger = self._expected([*_bought(found), *[kind] * more])
                tried = self._choice.safe(larger) if larger is not None else None
                if tried is not None:
                    return tried
            return found
        while not self._choice.watch.is_stopped():
            for kinds in self._cheaper(_bought(tried), 1):
                smaller = self._expected(kinds)
                is_likely = smaller is not None and smaller.foreseen.value >= WORTH_A_TRIAL * self._choice.worth.most
                less = self._choice.safe(smaller) if smaller is not None and is_likely else None
                if less is not None:
                    tried = less
                    break
            else:
                break
        return tried


def _bought(each: Candidate) -> list[str]:
    """Return the types of the GPUs that a plan uses."""
    used = {gpulet.gpu for gpulet in each.plan.gpulets}
    return sorted(gpu.type for gpu in each.plan.gpus if gpu.id in used)
