"""Models that generate and models of fixed cost on the same A100s, beside GPUs apart for the two kinds.

python lab/benchmarks/bench_mixed.py [--count 20] [--first-seed 0] [--tolerance 0.03]

Each seed is a workload: 2 to 4 of LLaMA 7B and 13B (profile `muxserve-a100`) and 3 to 8 networks of `parvagpu-a100`
with SLOs of 5 times l(1), on 2 to 8 GPUs. Both sides are planned by policy `tenuto`, anew for each factor on all rates,
and judged by `simulate` on other arrivals: the highest factor at which every model has 99 % of its requests in time.
The rival is the best split of the GPUs: so many for one kind, the others for the other. Beside them stands what the
same shares carry as a flow, and a bound that no plan from these profiles exceeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from tenuto.batching.planning.tenuto_policy import TenutoPolicy
from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, solve
from tenuto.placement.costs import costs_of
from tenuto.placement.generation_capacity import carried, options_of, room_mib
from tenuto.profiles import Profiles
from tenuto.profiles.share_latency import EVERY_RULE
from tenuto.profiles.shipped import load_shipped

KIND = "a100-80gb"
PROFILES = Profiles([load_shipped(name) for name in ("muxserve-a100", "parvagpu-a100")])
WRITERS = ("llama-7b", "llama-13b")
IN_TIME = 0.99
TRIED_RATES = 1.1  # derived: the ratio of two rates that trials of shares try
MEMORY = (1.0, 1.5, 2.0, 3.0)  # limit: times the memory of its share that a gpu-let may have in the linear program
LLM_REQUESTS, REQUESTS = 1500, 40_000
"""Requests of the rarest model that generates, and of all others together, by which a plan is judged."""


@dataclass(frozen=True)
class Scene:
    """A workload at factor 1, and its GPUs."""

    seed: int
    gpus: int
    models: tuple[ModelSpec, ...]

    def of(self, kind: str, factor: float) -> Workload:
        """Return the models of a kind (`writes`, `fixed` or `both`) at a factor on their rates."""
        chosen = [m for m in self.models if kind == "both" or (m.generates is not None) == (kind == "writes")]
        return Workload(models=tuple(m.model_copy(update={"rate_rps": factor * m.rate_rps}) for m in chosen))


def drawn(seed: int) -> Scene:
    """Return the workload of a seed. Its rates fill the GPUs about once, by what whole GPUs carry; between 30 and 70 %
    of that is of models that generate."""
    draws = np.random.default_rng([20261124, seed])
    gpus = int(draws.integers(2, 9))
    rows = PROFILES.for_type(KIND)
    fixed_rows = sorted(name for name in rows if rows[name].generation is None)
    writers, others = int(draws.integers(2, 5)), int(draws.integers(3, 9))
    part = float(draws.uniform(0.3, 0.7))
    models = []
    for index, load in enumerate(part * gpus * draws.dirichlet(np.full(writers, 2.0))):
        row = str(draws.choice(WRITERS))
        prompt, output = int(draws.integers(50, 601)), int(draws.integers(50, 301))
        generation = rows[row].generation
        assert generation is not None
        cost = generation.cost(100.0)
        lengths: dict[str, object] = {"prompt_tokens": prompt, "output_tokens": output}
        if draws.random() < 0.5:
            for key, most in (("prompt_tokens", 1200), ("output_tokens", 800)):
                lengths[key] = {
                    "lognormal": {"median": lengths[key], "sigma": float(draws.uniform(0.3, 0.8)), "most": most}
                }
        slo = {
            "ttft_ms": cost.ms(prompt) * draws.uniform(5, 20),
            "tpot_ms": cost.ms(0, 1, prompt) * draws.uniform(2, 8),
        }
        given = {"name": f"llm-{index}", "profile": row, "rate_rps": 1.0, "slo": slo, "generates": lengths}
        spec = ModelSpec.model_validate(given)
        kv_tokens = int(
            (0.9 * 81_920 - 600 - (rows[row].weights_mib or 0)) * 2**20 / (generation.kv_bytes_per_token or 1)
        )
        models.append(spec.model_copy(update={"rate_rps": float(load) * carried(spec, cost, kv_tokens)[0]}))
    models = [spec for spec in models if spec.rate_rps > 0]
    names = draws.choice(fixed_rows, size=others, replace=False)
    for row, load in zip(names, (1.0 - part) * gpus * draws.dirichlet(np.full(others, 2.0)), strict=True):
        profile = rows[str(row)]
        spec = ModelSpec(name=str(row), rate_rps=1.0, slo_ms=5.0 * profile.latency_ms(1))
        on = costs_of(Workload(models=(spec,)), Cluster.parse(KIND), PROFILES)[spec.name][KIND]
        batch = on.largest_batch(spec.slo_ms / 2.0)
        models.append(spec.model_copy(update={"rate_rps": float(load) * 1000.0 * batch / on.steps()[batch]}))
    return Scene(seed, gpus, tuple(models))


class Planner:
    """Policy `tenuto`, which tries each share of a model that generates once however often the same is planned."""

    def __init__(self) -> None:
        self.carries = TenutoPolicy().carries

    def plan(self, workload: Workload, gpus: int) -> Plan | None:
        """Return its plan; None where it has none."""
        policy = TenutoPolicy(starts=("symphony", "gpulet"), requests=2000)
        policy.carries = self.carries  # type: ignore[method-assign]
        try:
            return solve(policy, workload, Cluster.parse(f"{KIND}:{gpus}"), PROFILES)
        except InvalidInputError:
            return None


def keeps(plan: Plan | None, seed: int) -> bool:
    """Say whether every model of a plan is in time, each kind in a run as long as it needs."""
    if plan is None or plan.unserved:
        return False
    for writes in (True, False):
        models = tuple(spec for spec in plan.models if (spec.generates is not None) == writes)
        names = {spec.name for spec in models}
        gpulets = tuple(gpulet for gpulet in plan.gpulets if gpulet.models[0].name in names)
        if models:
            own = plan.model_copy(update={"models": models, "gpulets": gpulets})
            rates = [spec.rate_rps for spec in models]
            duration_s = min(3000.0, LLM_REQUESTS / min(rates)) if writes else max(10.0, REQUESTS / sum(rates))
            run = Simulation.of_plan(own, duration_s=duration_s, seed=seed).run().summary()
            if min(figures["attainment"] for figures in run["models"].values()) < IN_TIME:
                return False
    return True


def fluid(scene: Scene, planner: Planner, *, is_bound: bool) -> float:
    """Return the factor at which shares of all GPUs together just carry all rates, if GPUs could be cut at will and
    each model had its best share: a linear program over shares and memory.

    With `is_bound` no plan from these profiles carries more: batches take a model's whole SLO, a share that generates
    carries as much more as the next rate that its trials failed, and models of fixed cost need no memory. Without,
    batches take half of the SLO, as the closed forms of the search have it, and shares carry what trials found.
    """
    gpu = Cluster.parse(KIND).gpus[0]
    columns: list[tuple[int, float, float, float]] = []  # model, share, memory, requests per second
    more = TRIED_RATES if is_bound else 1.0
    for index, spec in enumerate(scene.models):
        if spec.generates is not None:
            for option in options_of(spec, gpu, PROFILES, planner.carries):
                for part in sorted({min(1.0, option.share_pct / 100.0 * times) for times in MEMORY}):
                    tokens = option.tokens_in(room_mib(gpu, part, PROFILES))
                    rate = planner.carries(spec, option.steps, tokens)[0] if tokens > 0 else 0.0
                    columns.append((index, option.share_pct / 100.0, part, more * rate))
            continue
        on = costs_of(Workload(models=(spec,)), Cluster.parse(KIND), PROFILES)[spec.name][KIND]
        for share in range(10, 101, 10):
            if not on.knows(share, EVERY_RULE):
                continue
            batch = on.largest_batch(spec.slo_ms if is_bound else spec.slo_ms / 2.0, share)
            if batch:
                columns.append((index, share / 100.0, 0.0, 1000.0 * batch / on.steps(share)[batch]))
    limits = np.zeros((2 + len(scene.models), len(columns) + 1))
    for column, (index, share, part, rate) in enumerate(columns):
        limits[0, column], limits[1, column], limits[2 + index, column] = share, part, -rate
    limits[2:, -1] = [spec.rate_rps for spec in scene.models]
    found = linprog([*[0.0] * len(columns), -1.0], limits, [scene.gpus, scene.gpus, *[0.0] * len(scene.models)])
    return float(-found.fun) if found.success else math.nan


def highest(keeps_at: Callable[[float], bool], start: float, tolerance: float) -> float:
    """Return the highest factor that keeps, found by halving the distance of two; 0 below a tenth."""
    low, high, factor = 0.0, math.inf, start
    while high / max(low, 1e-9) > 1.0 + tolerance and factor > 0.05:
        if keeps_at(factor):
            low = factor
        else:
            high = factor
        factor = math.sqrt(low * high) if low > 0.0 and high < math.inf else (1.25 * low if low else high / 1.25)
    return low


def apart(scene: Scene, planner: Planner, factor: float, seed: int) -> bool:
    """Say whether some split of the GPUs keeps all in time: the fewest for those that generate, the rest for others."""
    for own in range(1, scene.gpus):
        if keeps(planner.plan(scene.of("writes", factor), own), seed):
            return keeps(planner.plan(scene.of("fixed", factor), scene.gpus - own), seed)
    return False


def together(scene: Scene, planner: Planner, factor: float, seed: int) -> bool:
    """Say whether the plan of both kinds keeps all in time."""
    return keeps(planner.plan(scene.of("both", factor), scene.gpus), seed)


def judged(seed: int, tolerance: float) -> float:
    """Return how many times the load of GPUs apart the plan of both kinds keeps; infinite where no split keeps any."""
    scene, planner, arrivals, began = drawn(seed), Planner(), 100_000 + seed, time.process_time()
    writers = sum(spec.generates is not None for spec in scene.models)
    rival = highest(lambda factor: apart(scene, planner, factor, arrivals), 0.7, tolerance)
    split_s = time.process_time() - began
    ours = highest(lambda factor: together(scene, planner, factor, arrivals), 1.25 * rival or 0.7, tolerance)
    ratio = ours / rival if rival else math.inf
    flows = [fluid(scene, planner, is_bound=is_bound) for is_bound in (False, True)]
    print(
        f"{seed:5d} {scene.gpus} GPUs, {writers} + {len(scene.models) - writers} models: apart {rival:.3f}, together "
        f"{ours:.3f}, {ratio:.2f} times; as a flow {flows[0]:.3f}, at most {flows[1]:.3f} "
        f"({split_s:.0f} + {time.process_time() - began - split_s:.0f} s)",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.03)
    chosen = parser.parse_args()
    ratios = [judged(seed, chosen.tolerance) for seed in range(chosen.first_seed, chosen.first_seed + chosen.count)]
    finite = sorted(ratio for ratio in ratios if math.isfinite(ratio))
    print(
        f"{len(finite)} of {len(ratios)} have a split that works: median {statistics.median(finite):.2f}, mean "
        f"{statistics.mean(finite):.2f}, least {finite[0]:.2f}, most {finite[-1]:.2f}; "
        f"{sum(ratio >= 1.3 for ratio in ratios)} of {len(ratios)} at 1.3 or more"
    )


if __name__ == "__main__":
    main()
