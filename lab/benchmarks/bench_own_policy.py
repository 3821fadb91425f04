"""Tenuto's own policy on the ground of each published system: same models, GPUs, rates and SLOs, and a judge's seed.

Every plan is judged in virtual time on arrivals that no planner saw. Batching is `deferred` for all, so that placement
is compared. A published policy is also run with the router for which it was made, if there is one. Interference in the
judge's run is that of the published system (measured pairs for the thesis, iGniter's model for iGniter, gpulet's for
gpulet). It is the model that our own policy plans with only if the output says so.

Run: python lab/benchmarks/bench_own_policy.py [--quick] [thesis igniter gpulet usher symphony starts each]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from bench_promises import scenes, served
from placement_scenes import machine, mixed_workload, thesis

from tenuto.batching.core.system import NetworkDelay
from tenuto.batching.planning.judging import Judged
from tenuto.batching.planning.plan_search import STARTS
from tenuto.batching.planning.trial import Trials
from tenuto.errors import MissingProfileError, TenutoError
from tenuto.placement import Cluster, Plan, Replica, Workload, load_policy, solve
from tenuto.placement.interference import Resident
from tenuto.placement.interference.named import interference_models
from tenuto.profiles import Latency, LatencyTable, Profiles
from tenuto.profiles.share_latency import latency_on_share, with_share
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.experiments.case import Case, run_case

sys.path.insert(0, str(Path(__file__).parents[2]))
from lab.tests.baselines.igniter.cases import profiles as igniter_profiles
from lab.tests.baselines.igniter.cases import twelve
from tests.batching.planning.test_large import many, parts
from tests.placement.policies.gpulet.turns import FIVE, IGNITER, five_models

VISION = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
JUDGE_SEED = 1_000
KEEPS = 0.99
EACH = (  # seed, models, GPUs: clusters that are too small, by a third to four fifths
    (40, 8, 2),
    (41, 15, 4),
    (42, 30, 6),
    (43, 50, 12),
    (41, 15, 2),
    (42, 30, 3),
    (43, 50, 5),
    (44, 100, 40),
    (45, 300, 90),
)


def judged(plan: Plan, workload: Workload, profiles: Profiles, truth: str, requests: int) -> Judged:
    """Return what a plan serves beside neighbours that cost what `truth` says, by full batches of both.

    Latencies are those on each gpu-let's share, measured or by SM utilisation, whatever the policy believed.
    """
    models = interference_models(truth, {gpu.type for gpu in plan.gpus}, profiles)
    types = {gpu.id: gpu.type for gpu in plan.gpus}
    by_gpu = plan.by_gpu()
    gpulets = []
    for gpulet in plan.gpulets:
        kind = types[gpulet.gpu]

        def resident(name: str, size: int, share_pct: float, kind: str = kind) -> Resident:
            profile = profiles.get(workload[name].profile_row, kind)
            with suppress(MissingProfileError):  # iGniter's model needs no latency on the share
                profile = with_share(profile, share_pct, latency_on_share(profile, share_pct)[0])
            return Resident(profile, size, share_pct)

        replicas = []
        for replica in gpulet.models:
            own = resident(replica.name, replica.batch_size, gpulet.effective_share_pct)
            others = [
                max(
                    (resident(r.name, r.batch_size, other.effective_share_pct) for r in other.models),
                    key=lambda beside, own=own, kind=kind: models[kind].slowdown(own, [beside]),
                )
                for other in by_gpu[gpulet.gpu]
                if other.id != gpulet.id
            ]
            slowdown = models[kind].slowdown(own, others) if others else 1.0
            latency = latency_here(replica, own)
            replicas.append(replica.model_copy(update={"slowdown": max(1.0, slowdown), "latency": latency}))
        gpulets.append(gpulet.model_copy(update={"models": tuple(replicas)}))
    seen = plan.model_copy(update={"gpulets": tuple(gpulets)})
    trials = Trials(workload.models, requests=requests, seed=JUDGE_SEED, scheduler="deferred", network=NetworkDelay())
    return trials.run(seen)


def latency_here(replica: Replica, own: Resident) -> Latency | None:
    """Return l(b) on the share up to the planned batch, or the plan's where the profile does not know it."""
    try:
        latency = own.profile.latency(own.share_pct)
        latency.at(replica.batch_size)
    except MissingProfileError:
        return replica.latency
    if not isinstance(latency, LatencyTable):
        return latency
    points = {size: ms for size, ms in latency.points.items() if size < replica.batch_size}
    return LatencyTable(points={**points, replica.batch_size: latency.at(replica.batch_size)})


def on_thesis(quick: bool) -> None:
    """Goodput by GPUs (figure 6.1) and by rate (figure 6.15), beside every policy of the thesis."""
    policies = ("usher", "wao-usher", "ao-milp", "wsm-milp", "tenuto")
    print("\nThesis, figure 6.1: five vision models, 433 r/s each, SLO 200 ms; r/s in time, router / deferred")
    for gpus in (2, 4) if quick else (1, 2, 3, 4, 5, 6):
        cells = []
        for policy in policies:
            case = Case(
                policy=policy,
                models=VISION,
                rates_rps=(500.0,) * 5,
                slo_ms=200.0,
                gpus=gpus,
                x=gpus,
                sent_share=433.34 / 500,
                duration_s=10.0,
                seed=JUDGE_SEED,
            )
            runs = run_case(case).get("runs", {})
            cells.append(f"{policy} " + "/".join(f"{run['goodput_rps']:,.0f}" for run in runs.values()))
        print(f"  {gpus} V100: " + ", ".join(cells), flush=True)


def on_igniter(requests: int) -> None:
    """The twelve workloads: GPUs bought, and how many keep 99 % with iGniter's interference."""
    print("\niGniter: its twelve workloads on as many V100s as needed; interference: iGniter's model")
    workload, profiles, cluster = twelve(), igniter_profiles(), Cluster.parse("v100:1", elastic=True)
    choices: list[tuple[str, dict[str, str]]] = [(name, {}) for name in ("igniter", "ffd++", "gpulets+", "gslice")]
    choices += [("tenuto", {})]
    for name, options in choices:
        _line(name, options, workload, cluster, profiles, "igniter", requests)


def on_gpulet(first: int, every: int, gpu_counts: Iterable[int], requests: int) -> None:
    """Of the 1,023 scenarios, how many keep 99 % of every model with gpulet's interference."""
    rates = [tuple(200 * (number // 4**digit % 4) for digit in range(5)) for number in range(1, 1024)][first::every]
    print(f"\ngpulet: {len(rates)} of its 1,023 scenarios (profile igniter-v100); kept at 99 % by every model")
    policies: list[tuple[str, dict[str, str]]] = [
        ("sbp", {}),
        ("gpulet", {"interference": "contention"}),
        ("ideal", {}),
        ("tenuto", {}),
    ]
    for gpus in gpu_counts:
        cluster, kept, seconds = Cluster.parse(f"v100:{gpus}"), [0] * len(policies), [0.0] * len(policies)
        for scenario in rates:
            workload = five_models(**{n.replace("-", "_"): r for n, r in zip(FIVE, scenario, strict=True)})
            for index, (name, options) in enumerate(policies):
                start = time.process_time()
                plan = solve(load_policy(name, options), workload, cluster, IGNITER)
                seconds[index] += time.process_time() - start
                kept[index] += judged(plan, workload, IGNITER, "contention", requests).keeps(KEEPS)
        cells = (
            f"{_named(*policy)} {count} ({1000 * spent / len(rates):.0f} ms a plan)"
            for policy, count, spent in zip(policies, kept, seconds, strict=True)
        )
        print(f"  {gpus} V100: " + ", ".join(cells), flush=True)


def on_usher(quick: bool, requests: int) -> None:
    """Many networks of the thesis' profile on a fixed cluster, and what they cost on an elastic one."""
    count, gpus, rate = (8, 6, 1_500.0) if quick else (20, 24, 6_000.0)
    print(f"\nUSHER: {count} models, {rate:,.0f} r/s, SLO 150 to 300 ms on {gpus} V100; interference: contention")
    workload, profiles = mixed_workload(count, rate), thesis()
    for name in ("usher", "wao-usher", "tenuto"):
        _line(name, {}, workload, Cluster.parse(f"v100:{gpus}"), profiles, "contention", requests)
    print("  and bought:")
    for name in ("usher", "wao-usher", "tenuto"):
        _line(name, {}, workload, Cluster.parse("v100:1", elastic=True), profiles, "contention", requests)


def on_symphony(quick: bool, requests: int) -> None:
    """The 1080Ti zoo, all models at one rate, on a fixed cluster: Symphony's own setting."""
    zoo = load_shipped("symphony-1080ti")
    names = sorted(zoo.models)[:: 4 if quick else 1]
    gpus = 8 if quick else 32
    profiles = Profiles([zoo])
    print(f"\nSymphony: {len(names)} models of its 1080Ti zoo on {gpus} GPUs, SLO 2 l(8) but at least 15 ms")
    for rate in (60.0, 120.0, 180.0):
        models = [
            {"name": name, "rate_rps": rate, "slo_ms": max(15.0, 2 * zoo.models[name].latency().at(8))}
            for name in names
        ]
        workload = Workload.model_validate({"models": models})
        print(f"  {rate:g} r/s each")
        for name in ("symphony", "tenuto"):
            _line(name, {}, workload, Cluster.parse(f"1080ti:{gpus}"), profiles, "none", requests)


def on_starts(first: int, count: int) -> None:
    """Random workloads of `bench_promises`: what is served against the best of the policies whose plans are starts."""
    print(f"\nRandom workloads, seeds {first} to {first + count - 1}: r/s in time over those of the best start")
    ratios = []
    for seed, scene in zip(range(first, first + count), scenes(first, count), strict=True):
        in_time: dict[str, float] = {}
        for name in (*STARTS, "tenuto"):
            with suppress(TenutoError):
                plan = solve(load_policy(name), scene.workload, scene.cluster, scene.profiles)
                in_time[name] = sum(ok for _, ok in served(plan, scene.workload, 20.0).values())
        own = in_time.pop("tenuto")
        best = max(in_time, key=in_time.__getitem__)
        ratios.append(own / in_time[best])
        print(
            f"  {seed}: {own:,.1f} of {scene.workload.rate_rps:,.1f}; {best} {in_time[best]:,.1f}; {ratios[-1]:.4f}",
            flush=True,
        )
    print(f"  mean {sum(ratios) / count:.4f}, least {min(ratios):.4f}, most {max(ratios):.4f}")


def on_each() -> None:
    """Clusters that are too small under the objective `each`: the worst model's part and the mean, as planned and as
    served in virtual time under `deferred` on other arrivals."""
    print("\nObjective each: models, GPUs; worst part and mean, planned; the same, served")
    for seed, count, gpus in EACH:
        load = many(count, seed, "each")
        plan = solve(load_policy("tenuto"), load, Cluster.parse(f"v100:{gpus}"), thesis())
        cells = [f"{value:.3f}" for value in _worst_and_mean(parts(plan))]
        if count <= 50:  # a trial of more takes minutes
            trials = Trials(
                load.models,
                requests=int(8.0 * load.rate_rps),
                seed=JUDGE_SEED,
                scheduler="deferred",
                objective="each",
                network=NetworkDelay(),
            )
            cells += [f"{value:.3f}" for value in _worst_and_mean(trials.run(plan).attainment.tolist())]
        print(f"  {count}, {gpus}: " + " | ".join(cells), flush=True)


def _worst_and_mean(values: Sequence[float]) -> tuple[float, float]:
    return min(values), sum(values) / len(values)


def _named(name: str, options: dict[str, str]) -> str:
    return name + "".join(f" {key}={value}" for key, value in options.items())


def _line(
    name: str,
    options: dict[str, str],
    workload: Workload,
    cluster: Cluster,
    profiles: Profiles,
    truth: str,
    requests: int,
) -> None:
    start = time.process_time()
    try:
        plan = solve(load_policy(name, options), workload, cluster, profiles)
    except TenutoError as error:
        print(f"    {_named(name, options):<32} cannot plan: {str(error).splitlines()[0][:90]}")
        return
    took = time.process_time() - start
    trial = judged(plan, workload, profiles, truth, requests)
    missed = [spec.name for spec, part in zip(workload.models, trial.attainment, strict=True) if part < KEEPS]
    print(
        f"    {_named(name, options):<32} {plan.expected.gpus_used:>3} GPUs, {trial.ok_rps.sum():>9,.0f} of "
        f"{trial.offered_rps.sum():>9,.0f} r/s in time, {len(missed)} models below 99 %, planned in {took:.2f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the chosen comparisons, with hardware and versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    grounds = ("thesis", "igniter", "gpulet", "usher", "symphony", "starts", "each")
    parser.add_argument("grounds", nargs="*", help=f"of {', '.join(grounds)}; default: all")
    parser.add_argument("--first-scenario", type=int, default=0, help="of gpulet's 1,023")
    parser.add_argument("--every", type=int, default=16, help="gpulet: so many scenarios from one to the next")
    parser.add_argument("--first-seed", type=int, default=300, help="of the random workloads for `starts`")
    parser.add_argument("--quick", action="store_true", help="smaller cases, fewer requests")
    chosen = parser.parse_args(arguments)
    requests = 10_000 if chosen.quick else 50_000
    print(machine("tenuto"))
    for ground in chosen.grounds or grounds:
        match ground:
            case "thesis":
                on_thesis(chosen.quick)
            case "igniter":
                on_igniter(requests)
            case "gpulet":
                every, gpu_counts = (64, (2,)) if chosen.quick else (chosen.every, (1, 2, 3))
                on_gpulet(chosen.first_scenario, every, gpu_counts, 10_000)
            case "usher":
                on_usher(chosen.quick, requests)
            case "starts":
                on_starts(chosen.first_seed, 4 if chosen.quick else 12)
            case "each":
                on_each()
            case "symphony":
                on_symphony(chosen.quick, requests)
            case _:
                parser.error(f"'{ground}' is none of {', '.join(grounds)}")


if __name__ == "__main__":
    main()
