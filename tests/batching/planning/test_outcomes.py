"""What is chosen, whatever trials say: never dearer than a start that stood as much, and promised as it was tried."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tenuto.batching.planning.judging import Judged, Worth
from tenuto.batching.planning.plan_search import JudgedPlan, PlanSearch, PlanSource, SearchOptions, rank_of
from tenuto.placement import Cluster, ModelSpec, Plan, Replica, Workload
from tenuto.placement.plan import Expected, PlannedGpu, PolicyUsed
from tenuto.placement.program import Gpulet
from tenuto.placement.watch import PlanningWatch
from tenuto.profiles import Profiles
from tests.instruments.seeds import seeds

RATE = 100.0
WINDOW_S = 1_000.0
LEAST = 0.99
ONE = Gpulet(id="n0/0/a", gpu="n0/0", models=(Replica(name="m0", batch_size=1),))
WORKLOAD = Workload.model_validate(
    {
        "models": [
            {"name": f"m{k}", "rate_rps": RATE, "slo_ms": 50, "latency": {"alpha_ms": 1, "beta_ms": 1}} for k in (0, 1)
        ]
    }
)


def judged(worth: Worth, parts: tuple[float, ...], *, is_ended: bool = False) -> Judged:
    """Return a run in which these parts of the models' requests are in time."""
    offered = np.full(len(parts), RATE)
    ok = offered * parts
    return Judged(WINDOW_S, offered, ok, np.array([0.5]), -1.0 if is_ended else worth.of(ok, offered))


class WrittenRuns:
    """Runs that end as was written down, by the plan's policy."""

    def __init__(self, outcomes: Mapping[str, tuple[float, ...]], worth: Worth) -> None:
        self._outcomes, self._worth = outcomes, worth

    def run(self, plan: Plan, *, floor: float = 0.0, attainment: float = 0.0) -> Judged:
        parts = self._outcomes[plan.policy.name]
        run = judged(self._worth, parts)
        return judged(self._worth, parts, is_ended=run.value < floor or min(parts) < attainment)


class DrawnCandidates(PlanSource):
    """Drawn plans: what is expected of each, and what its trials serve, have nothing to do with each other."""

    def __init__(self, seed: int) -> None:
        self._rng, self.outcomes = random.Random(f"outcomes {seed}"), dict[str, tuple[float, ...]]()
        groups = [{"type": kind, "price_per_hour": round(self._rng.uniform(0.5, 4.0), 2)} for kind in ("v100", "t4")]
        self.cluster = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": groups}], "elastic": True})
        super().__init__(SearchOptions(), WORKLOAD, self.cluster, Profiles([]), PlanningWatch(), "weighted")
        self.starts = [self._drawn({kind: self._rng.randint(0, 3) for kind in ("v100", "t4")}) for _ in range(5)]

    def on(self, cluster: Cluster, *, is_one_enough: bool = False, split: Workload | None = None) -> list[JudgedPlan]:
        drawn = self.starts if cluster.elastic else [self._drawn(cluster.counts)]
        return sorted(drawn, key=lambda each: rank_of(each, each.foreseen, SearchOptions().aim))

    def _drawn(self, counts: Mapping[str, int]) -> JudgedPlan:
        kinds = [kind for kind, count in counts.items() for _ in range(count)] or ["t4"]
        name = f"plan {len(self.outcomes)}"
        self.outcomes[name] = tuple(self._rng.choice((0.3, 0.9, 0.97, 0.995, 1.0)) for _ in range(2))
        prices = self.cluster.prices
        plan = Plan(
            policy=PolicyUsed(name=name),
            gpus=tuple(PlannedGpu(id=f"n0/{place}", type=kind) for place, kind in enumerate(kinds)),
            gpulets=tuple(ONE.model_copy(update={"gpu": f"n0/{place}"}) for place in range(len(kinds))),
            expected=Expected(cost_per_hour=sum(prices[kind] for kind in kinds), gpus_used=len(kinds)),
        )
        parts = tuple(self._rng.choice((0.5, 0.9, 0.97, 0.98, 1.0)) for _ in range(2))
        return JudgedPlan(name, plan, judged(self.worth, parts))

    def served(self, each: JudgedPlan) -> Judged:
        return judged(self.worth, self.outcomes[each.start])


@pytest.mark.parametrize("seed", seeds(40, 200))
def test_no_start_that_stood_as_much_is_cheaper_whatever_was_expected(seed: int) -> None:
    drawn = DrawnCandidates(seed)

    def runs(models: tuple[ModelSpec, ...], **given: Any) -> Any:
        return WrittenRuns(drawn.outcomes, Worth(models, given["objective"]))

    search = PlanSearch(SearchOptions(), WORKLOAD, drawn.cluster, Profiles([]), trials=runs)
    search.candidates = drawn
    best = search.best()
    assert best is not None
    assert best.judged is not best.foreseen
    assert (best.judged.attainment == drawn.served(best).attainment).all()
    if best.judged.surely_keeps(LEAST):
        as_much = [each for each in drawn.starts if drawn.served(each).surely_keeps(LEAST)]
    else:
        assert not any(drawn.served(each).surely_keeps(LEAST) for each in drawn.starts)
        as_much = [each for each in drawn.starts if drawn.served(each).value >= best.judged.value]
        assert all(drawn.served(each).value == best.judged.value for each in as_much)
    assert all(best.plan.expected.price <= each.plan.expected.price + 1e-6 for each in as_much)
