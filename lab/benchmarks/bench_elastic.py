"""What policy `tenuto` buys of three GPU types, against its own starts and every small cluster that is cheaper.

Scenes are drawn from a seed: 1 to 8 models of the thesis on a V100 and on scaled A100s and T4s, with half to twice the
list prices, SLOs that only some types hold, and rates of half a V100 to three in all. Three counts are made, each on
Poisson arrivals of a seed that no planner uses, under `deferred`:

* models below 99 % that the plan does not name as served in part. When a model is below 99 % among 20,000 requests of
  all models, 300,000 others decide;
* plans dearer than the elastic plan of one of the policy's own starts that passes the planner's trial and keeps every
  model. A start that failed the trial may not be bought; it is counted apart when it keeps every model here;
* plans dearer than a cluster of up to `--most` GPUs on which some candidate of the policy keeps every model, among the
  20,000 and the 300,000: of many candidates that miss 99 % by little, some are lucky with few arrivals.

Run: python lab/benchmarks/bench_elastic.py [--seeds 40] [--first-seed 1] [--most 5]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product

from bench_promises import Scene
from placement_scenes import NETWORKS, machine, thesis

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.judging import Judged
from tenuto.batching.planning.plan_search import PlanSearch, SearchOptions
from tenuto.batching.planning.trial import Trials
from tenuto.placement import Cluster, Plan, Workload, load_policy, solve
from tenuto.profiles import Profile, Profiles

FASTER = {"v100": (1.0, 1.0), "a100": (0.35, 0.7), "t4": (1.8, 3.5)}  # what a batch takes, in terms of a V100's
PRICES = {"v100": 3.06, "a100": 3.67, "t4": 0.526}
KEPT = 0.99
JUDGE_SEED = 7_001
REQUESTS, DECIDING = 20_000, 300_000


def scene(seed: int) -> Scene:
    """Return the scene of a seed."""
    rng = random.Random(f"elastic {seed}")
    [measured] = thesis()
    slower = {(kind, row): rng.uniform(*FASTER[kind]) for kind in FASTER for row in NETWORKS}
    profiles = Profiles(
        Profile.model_validate(
            measured.model_copy(
                update={
                    "name": f"made-up-{kind}",
                    "gpu_type": kind,
                    "models": {row: measured.models[row].scaled(slower[kind, row]) for row in NETWORKS},
                }
            )
        )
        for kind in FASTER
    )
    entries = []
    wanted, count = rng.uniform(0.5, 3.0), rng.randint(1, 8)
    weights = [rng.uniform(0.2, 1.8) for _ in range(count)]
    for index, weight in enumerate(weights):
        row = rng.choice(NETWORKS)
        profile = profiles.get(row, "v100")
        slo = max(rng.choice((50, 100, 150, 200, 300)), 2.5 * profile.latency_ms(1))
        most = max(
            profile.throughput_rps(size) for size in profile.batch_sizes() if profile.latency_ms(size) <= slo / 2
        )
        rate = round(wanted * weight / sum(weights) * most, 3)
        entries.append({"name": f"m{index}", "profile": row, "slo_ms": slo, "rate_rps": rate})
    gpus = [{"type": kind, "price_per_hour": round(PRICES[kind] * rng.uniform(0.5, 2.0), 3)} for kind in FASTER]
    cluster = Cluster.model_validate({"nodes": [{"name": "n0", "gpus": gpus}], "elastic": True})
    return Scene(Workload.model_validate({"models": entries}), cluster, profiles)


def judge(workload: Workload, requests: int = REQUESTS) -> Trials:
    """Return the arrivals that judge, others for each number of requests."""
    seed = JUDGE_SEED + requests - REQUESTS
    return Trials(workload.models, requests=requests, seed=seed, scheduler="deferred", network=NetworkDelay())


def below_unsaid(scene: Scene, plan: Plan, run: Judged) -> set[str]:
    """Return the models with less in time than is to be kept, in percent, of which the plan does not say it."""
    return {
        f"{spec.name} {100 * part:.2f}"
        for spec, part in zip(scene.workload.models, run.attainment, strict=True)
        if part < KEPT and spec.name not in plan.unserved_reasons
    }


def small_clusters(cluster: Cluster, most: int) -> list[tuple[float, Cluster]]:
    """Return every cluster of at most so many GPUs with its price, those with most GPUs first."""
    [node] = cluster.nodes
    found = []
    for counts in product(range(most + 1), repeat=len(node.gpus)):
        groups = tuple(group.model_copy(update={"count": n}) for n, group in zip(counts, node.gpus, strict=True) if n)
        if 0 < sum(counts) <= most:
            price = sum(group.count * (group.price_per_hour or 0.0) for group in groups)
            found.append((price, Cluster(nodes=(node.model_copy(update={"gpus": groups}),))))
    return sorted(found, key=lambda each: (-len(each[1].gpus), each[0]))


def cheapest_kept(scene: Scene, judges: Sequence[Trials], price: float, most: int) -> tuple[float, Cluster] | None:
    """Return the cheapest small cluster below a price on which some candidate keeps every model before every judge;
    None: none does.

    Clusters within one on which nothing is expected to serve nine tenths need not be tried.
    """
    best, hopeless = None, list[Cluster]()
    for cost, cluster in small_clusters(scene.cluster, most):
        if cost >= price - 1e-6 or any(not Counter(cluster.counts) - Counter(more.counts) for more in hopeless):
            continue
        candidates = PlanSearch(SearchOptions(), scene.workload, cluster, scene.profiles).candidates
        found = candidates.on(cluster)
        if max((each.foreseen.value for each in found), default=0.0) < 0.9 * candidates.worth.most:
            hopeless.append(cluster)
        likely = (each for each in found if each.foreseen.value >= 0.97 * candidates.worth.most)
        if any(all(judged.run(each.plan, attainment=KEPT).keeps(KEPT) for judged in judges) for each in likely):
            best, price = (cost, cluster), cost
    return best


def price_of(plan: Plan) -> float:
    """Return what an hour of a plan costs."""
    return plan.expected.cost_per_hour or 0.0


def main() -> None:
    """Print a line per scene, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--most", type=int, default=5)
    given = parser.parse_args()
    print(machine("numpy", "scipy", "tenuto"))
    print("| seed | models | bought | $/h | planned in | unsaid | said | cheapest start | failed | by luck | found |")
    print("|" + 11 * "---|", flush=True)
    unsaid = below_a_start = below_failed = dearer = by_luck = 0
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        drawn = scene(seed)
        started = time.process_time()
        plan = solve(load_policy("tenuto"), drawn.workload, drawn.cluster, drawn.profiles)
        took_s = time.process_time() - started
        trials, deciding, price = judge(drawn.workload), judge(drawn.workload, DECIDING), price_of(plan)
        below = below_unsaid(drawn, plan, trials.run(plan))
        if below:
            print(f"seed {seed}: {', '.join(sorted(below))} among {REQUESTS:,} requests; others decide", flush=True)
            below = below_unsaid(drawn, plan, deciding.run(plan))
        search, starts, failed = PlanSearch(SearchOptions(), drawn.workload, drawn.cluster, drawn.profiles), [], []
        for own in search.candidates.on(drawn.cluster):
            if trials.run(own.plan, attainment=KEPT).keeps(KEPT):
                stood = price_of(own.plan) >= price - 1e-6 or search.safe(own) is not None
                (starts if stood else failed).append((price_of(own.plan), own.start))
        start_price, start_name = min(starts, default=(price, ""))
        failed_price, failed_name = min(failed, default=(price, ""))
        lucky = found = cheapest_kept(drawn, (trials,), price, given.most)
        if lucky is not None:
            found = cheapest_kept(drawn, (trials, deciding), price, given.most)
        unsaid += len(below)
        below_a_start += start_price < price - 1e-6
        below_failed += failed_price < price - 1e-6
        dearer += found is not None
        by_luck += lucky is not None
        counts = Counter(gpu.type for gpu in plan.gpus)
        cells = (
            str(seed),
            str(len(drawn.workload.models)),
            ", ".join(f"{kind}:{count}" for kind, count in counts.items()),
            f"{price:.2f}",
            f"{took_s:.1f} s",
            ", ".join(sorted(below)) or "–",
            str(len(plan.unserved_reasons)),
            f"{start_price:.2f} {start_name}" if start_name else "none keeps all",
            f"{failed_price:.2f} {failed_name}" if failed_name else "–",
            *("–" if each is None else f"{each[0]:.2f} {dict(each[1].counts)}" for each in (lucky, found)),
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    print(
        f"{unsaid} models below {KEPT:.0%} unsaid; {below_a_start} plans dearer than a start that stood its "
        f"trial, {below_failed} than one that failed it; {dearer} of "
        f"{given.seeds} dearer than a cluster of up to {given.most} GPUs, {by_luck} by {REQUESTS:,} requests alone"
    )


if __name__ == "__main__":
    main()
