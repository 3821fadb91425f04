"""The controller over whole runs in virtual time, beside the best fixed plan and one that knows the future.

    python lab/benchmarks/bench_controller.py waves [--seed N] [--rate-scale F] [--svg FILE]
    python lab/benchmarks/bench_controller.py day [--seed N] [--swing A] [--policy NAME]
                                                    [--hours H] [--trace FILE] [--rival | --ideal]
    python lab/benchmarks/bench_controller.py day --types [--seed N] [--spot-h H] [--swing A] [--policy NAME]
    python lab/benchmarks/bench_controller.py day --generating [--seed N] [--spot-h H] [--hours H]
    python lab/benchmarks/bench_controller.py incidents [--seed N]
    python lab/benchmarks/bench_controller.py standby [--seed N]

waves: gpulet's test (section 6.5): 1,800 s, two waves, the second higher, five models, four V100 of iGniter's profile.
day: 20 models of Symphony's zoo with a day of Azure-like rates (`azure_like.py`) or of the published file, on a cluster
that grows; with `--types` by GPUs of three types with prices, of which the T4's latencies are made up, on nodes that
come after 60 to 180 s, and with `--spot-h` each node that has come ends once in so many hours, with two minutes'
notice. With `--generating` six models that generate, asked by ServeGen's clients, on three such types (`writers`).
incidents: a rate times three, a GPU lost and back, batches slower than profiled. standby: iGniter's figure
17, with and without standby processes: batches of a model take longer than profiled, so that it needs 10 % more share.

"clairvoyant" plans every period with the rates it really had, and changes at no cost, by the policy alone or with the
replicas that it takes to promise every model 99 %. Latencies are those of the
shipped profiles: these are simulated figures.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, repeat
from pathlib import Path
from statistics import NormalDist

import numpy as np
from azure_like import write_day
from numpy.typing import NDArray
from scenes import print_machine
from serve_queue_rule import serve_by_queue
from svg_panels import Panel, Series, draw

from tenuto.batching.registry import make_scheduler
from tenuto.deployments.control.journal import Kind
from tenuto.deployments.control.settings import ControlSettings
from tenuto.deployments.control.virtual import ControlledCluster, ControlledLoad, ControlledRun, Incident
from tenuto.loadgen.schedule import Schedule, make_schedule
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, ModelSpec, Plan, Workload, solve
from tenuto.placement.arrivals.arrival import Arrival
from tenuto.placement.cluster import GpuGroup, Node
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.expectation.queueing import rate_with_bursts
from tenuto.placement.generation_capacity import carried, options_of, with_lengths
from tenuto.placement.planner import PlanTask, make_plan
from tenuto.placement.planner.gpu_matching import gpus_of
from tenuto.placement.policy import load_policy
from tenuto.profiles import ModelProfile, Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.servegen import published

IGNITER = Profiles([load_shipped("igniter-v100")])
# The grid has four networks; the fifth model of gpulet's scenarios is a second client of ResNet-50.
FIVE = {"alexnet": "alexnet", "resnet50": "resnet50", "resnet50-b": "resnet50", "ssd": "ssd", "vgg19": "vgg19"}
MERGING = {"merge_without_free": True}  # turns also on a full cluster
PERIOD_S = 20.0
KEPT = 0.99
SIGMAS = NormalDist().inv_cdf(0.99)


def wave(at_s: float) -> float:
    """Return the rate as a part of the peak: two waves of 900 s."""
    return 0.15 + 0.85 * (0.6 if at_s < 900 else 1.0) * math.sin(math.pi * (at_s % 900) / 900) ** 2


def five_models(rate_rps: float) -> Workload:
    """Return the five models at this rate each; the SLO is twice a batch of 32 alone, the paper's rule."""

    def slo_ms(row: str) -> float:
        return 2 * IGNITER.get(row, "v100").latency_ms(32)

    models = [{"name": name, "profile": row, "rate_rps": rate_rps, "slo_ms": slo_ms(row)} for name, row in FIVE.items()]
    return Workload.model_validate({"models": models})


def stepped(workload: Workload, factors: Mapping[str, Sequence[float]]) -> tuple[ModelSpec, ...]:
    """Return the models whose rates follow these factors of their rate, in even steps."""
    return tuple(
        spec.model_copy(update={"arrival": Arrival(process="steps", options={"factors": list(factors[spec.name])})})
        if spec.name in factors
        else spec
        for spec in workload.models
    )


def gpus_held(plan: Plan) -> float:
    """Return what a plan holds, in GPUs by share."""
    return sum(gpulet.effective_share_pct for gpulet in plan.gpulets) / 100.0


def report(name: str, run: ControlledRun, cpu_s: float) -> None:
    """Print the figures of a run."""
    ended = run.ended()
    total = ended.sum(axis=0)
    attainments = run.attainments()
    worst = min(attainments, key=lambda model: attainments[model])
    print(
        f"{name}: {total.sum():,} requests in {cpu_s:.0f} s of a core; "
        f"violated {1 - total[Outcome.OK] / total.sum():.3%} (expired {total[Outcome.EXPIRED]:,}, "
        f"late {total[Outcome.LATE]:,}, rejected {total[Outcome.REJECTED]:,}, failed {total[Outcome.FAILED]:,}); "
        f"worst model {worst} {attainments[worst]:.3%}; {run.count(Kind.CHANGED)} changes, "
        f"{run.count(Kind.ROLLED_BACK)} rolled back; GPU-hours {run.gpu_s / 3600:.2f}, "
        f"by share {run.share_s / 3600:.2f}"
    )


def picture(title: str, run: ControlledRun, gpus: float, clairvoyant: Sequence[float] = ()) -> str:
    """Return rates, GPUs and attainment over time as SVG; with what the clairvoyant plan of every window holds."""
    unit, unit_s = ("h", 3600.0) if run.windows[-1].end_s > 7200.0 else ("s", 1.0)
    ends = [window.end_s / unit_s for window in run.windows]
    lengths = unit_s * np.diff([0.0, *ends])
    names = run.names if len(run.names) <= 6 else ()
    colours = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
    rates = [
        Series(name, ends, [float(w.arrived[i] / s) for w, s in zip(run.windows, lengths, strict=True)], colours[i])
        for i, name in enumerate(names)
    ] or [
        Series(
            "all models",
            ends,
            [float(w.arrived.sum() / s) for w, s in zip(run.windows, lengths, strict=True)],
            colours[0],
        )
    ]
    held = [
        Series("GPUs in use", ends, [w.gpu_s / s for w, s in zip(run.windows, lengths, strict=True)], "#999", True),
        Series("by share", ends, [w.share_s / s for w, s in zip(run.windows, lengths, strict=True)], "#1f77b4", True),
    ]
    if clairvoyant:
        held[1] = Series("clairvoyant", ends[: len(clairvoyant)], clairvoyant, "#2ca02c", True)
    bad = [100.0 * float(1 - w.ended[:, Outcome.OK].sum() / max(1, w.ended.sum())) for w in run.windows]
    panels = [
        Panel("requests per second", rates),
        Panel(f"GPUs (of {gpus:g})", held),
        Panel("violated, %", [Series("all models", ends, bad, "#d62728", bars=True)]),
    ]
    return draw(title, panels, unit)


def progress(now_s: float, run: ControlledRun) -> None:
    """Say now and then where a run is, on stderr."""
    if now_s % 1800 < run.windows[0].end_s:
        print(f"  {now_s:,.0f} s, {run.count(Kind.CHANGED)} changes", file=sys.stderr, flush=True)


def show_log(run: ControlledRun, kinds: Sequence[str]) -> None:
    """Print the entries of these kinds."""
    for entry in run.entries:
        if entry.kind in kinds:
            print(f"  {entry.at_s:8.0f} s {entry.kind}: {entry.text}")


# --- waves ------------------------------------------------------------------------------------------------------------


def waves(args: argparse.Namespace) -> None:
    """Run gpulet's test."""
    duration_s = 1800.0
    rate_rps = 480.0 * args.rate_scale
    cluster, policy = Cluster.parse("v100:4"), load_policy("gpulet", MERGING)
    factors = [wave(PERIOD_S * (place + 0.5)) for place in range(round(duration_s / PERIOD_S))]
    schedule = make_schedule(stepped(five_models(rate_rps), dict.fromkeys(FIVE, factors)), duration_s, args.seed)
    load = ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, duration_s)
    declared = five_models(rate_rps * factors[0] * 1.3)
    settings = ControlSettings.model_validate({"mode": "act", "policy": {"name": "gpulet", "options": MERGING}})
    since = time.process_time()
    run = ControlledCluster(
        load,
        declared,
        solve(policy, declared, cluster, IGNITER),
        cluster.gpus,
        IGNITER,
        settings,
        lambda system: make_scheduler("deferred", system),
    ).run(progress=progress)
    report(f"waves, peak {5 * rate_rps:,.0f} r/s, seed {args.seed}", run, time.process_time() - since)

    def bursty(rate: float) -> Workload:
        return five_models(rate + SIGMAS * math.sqrt(rate))

    static = gpus_held(solve(policy, bursty(rate_rps), cluster, IGNITER)) * duration_s
    clairvoyant = sum(gpus_held(solve(policy, bursty(rate_rps * f), cluster, IGNITER)) for f in factors) * PERIOD_S
    print(
        f"  GPU-share seconds: controller {run.share_s:,.0f}, static plan for the peak {static:,.0f} "
        f"({run.share_s / static:.2f} of it), clairvoyant per 20 s {clairvoyant:,.0f} "
        f"({run.share_s / clairvoyant:.2f} of it)"
    )
    if args.log:
        show_log(run, ("change", "changed", "roll back", "rolled back", "missing", "no plan"))
    if args.svg:
        Path(args.svg).write_text(picture("gpulet's two waves, four V100, policy gpulet (simulated)", run, 4))


# --- a day ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DayScene:
    """Models of a day, and what their GPUs cost and take: the price per hour by type, and the latencies. `most` is how
    many GPUs of a type the cluster may have."""

    models: tuple[ModelSpec, ...]
    profiles: Profiles
    prices: Mapping[str, float | None]
    most: int


def networks(args: argparse.Namespace, trace: Path) -> DayScene:
    """Return 20 networks of fixed cost, whose rates follow a day's file; it is made up if there is none."""
    profile = load_shipped("symphony-1080ti")
    profiles, prices = Profiles([profile]), {"1080ti": None}
    if args.types:
        slow = {name: model.scaled(1.5) for name, model in profile.models.items()}
        t4 = Profile(name="made-up-t4", gpu_type="t4", source="1.5 times a 1080 Ti", models=slow)
        profiles = Profiles([profile, load_shipped("symphony-a100"), t4])
        prices = {"1080ti": 0.7, "a100": 3.67, "t4": 0.35}
    lines = {name: model.line for name, model in profile.models.items() if model.line is not None}
    rows = sorted(lines, key=lambda name: -lines[name].alpha_ms)[:20]
    if not trace.exists():
        write_day(trace, args.seed, args.invocations, args.swing)
    models = [
        {
            "name": row,
            "rate_rps": 10.0,
            "slo_ms": profile.models[row].coefficients["slo_ms"],
            "arrival": {"process": "azure_2019", "path": str(trace), "options": {"part": at, "parts": len(rows)}},
        }
        for at, row in enumerate(rows)
    ]
    return DayScene(Workload.model_validate({"models": models}).models, profiles, prices, 64 if args.types else 24)


def writers(args: argparse.Namespace) -> DayScene:
    """Return six models that generate, which clients of ServeGen ask from an hour of the day on that the seed draws.

    One of the eight largest clients of three categories, of those with published lengths, asks a model of 7B, and one a
    model of 13B, all on whole GPUs. Step times on an A100 are measured (`muxserve-a100`). Made up are those on an A10G
    (3.4 times as long, the ratio of memory bandwidths) and an H100 (0.6 times), that the models read 16,384 tokens, and
    their mean rates, which take one to three A100s each.
    """
    draws, shipped = np.random.default_rng([20261130, args.seed]), load_shipped("muxserve-a100")
    rows = {name: shipped.models[name] for name in ("llama-7b", "llama-13b")}
    steps = {name: model.generation for name, model in rows.items() if model.generation is not None}

    def on_one_gpu(name: str, factor: float) -> ModelProfile:
        alone = steps[name].alone_on_one_gpu(factor)
        assert alone is not None
        return rows[name].model_copy(update={"generation": alone.model_copy(update={"longest_context": 16_384})})

    factors = {"a100-80gb": 1.0, "a10g": 3.4, "h100": 0.6}
    profiles = Profiles(
        Profile(
            name=f"made-up-{kind}",
            gpu_type=kind,
            source=f"{factor} times an A100",
            models={name: on_one_gpu(name, factor) for name in rows},
        )
        for kind, factor in factors.items()
    )
    hour, [a100] = float(draws.uniform(0, 24)), Cluster.parse("a100-80gb").gpus
    models = []
    for category, row in product(("m-small", "m-mid", "m-large"), rows):
        clients = enumerate(published()[category], 1)
        known = [number for number, client in clients if client.prompt_tokens and client.output_tokens]
        options = {"category": category, "client": int(draws.choice(known[:8])), "start_hour": hour}
        asked = {"name": f"{category}-{row}", "profile": row, "rate_rps": 1.0, "generates": {"max_batch_tokens": 512}}
        asked |= {"slo": {"ttft_ms": 2000, "tpot_ms": 200}}  # MLPerf Inference's of Llama 2 70B
        spec = ModelSpec.model_validate(asked | {"arrival": {"process": "servegen", "options": options}})
        [whole] = options_of(with_lengths(spec), a100, profiles, carried, shares=(100,))
        models.append(spec.model_copy(update={"rate_rps": draws.uniform(1, 3) * whole.rate_rps}))
    return DayScene(tuple(models), profiles, {"a100-80gb": 5.07, "a10g": 1.01, "h100": 6.98}, 64)


def day(args: argparse.Namespace) -> None:
    """Run a day on a cluster that grows to 24 GPUs, or, with several types, to 64 of each."""
    duration_s, policy = args.hours * 3600.0, load_policy(args.policy, {})
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(args.trace) if args.trace else Path(folder) / "day.csv"
        scene = writers(args) if args.generating else networks(args, trace)
        workload = Workload(models=scene.models, mps="off" if args.generating else "auto")
        schedule = make_schedule(workload.models, duration_s, args.seed if args.generating else 0)
    profiles, prices, most = scene.profiles, scene.prices, scene.most  # the clairvoyant plan is not limited
    by_price = len(prices) > 1
    counts = _counts(schedule.times_ms, schedule.model_index, len(workload.models), duration_s)
    first = counts[:300].mean(axis=0)
    declared = workload.model_copy(
        update={
            "models": tuple(
                spec.model_copy(update={"rate_rps": max(0.1, float(rate))})
                for spec, rate in zip(workload.models, first, strict=True)
            )
        }
    )
    groups = tuple(GpuGroup(type=kind, price_per_hour=price) for kind, price in prices.items())
    one = Cluster(nodes=(Node(name="n0", gpus=groups),), elastic=True)
    plan = solve(policy, declared.scaled(1.5), one, profiles)
    there = gpus_of(plan)
    bounds = {
        kind: {"min": 0 if by_price else 1, "max": most}
        | ({"price_per_hour": price} if price else {})
        | ({"spot": {"life_hours": args.spot_h, "notice_s": 120.0}} if args.spot_h else {})
        for kind, price in prices.items()
    }
    settings = ControlSettings.model_validate({"mode": "act", "policy": {"name": args.policy}, "gpus": bounds})
    since = time.process_time()
    by_epoch = counts[: int(duration_s // 300) * 300].reshape(-1, 300, len(workload.models))
    epochs = by_epoch.mean(axis=1)
    spreads = by_epoch.var(axis=1) / np.maximum(1e-9, epochs)

    def needed(rates: NDArray[np.float64], attainment: float = 0.0, spread: NDArray[np.float64] | None = None) -> float:
        """Return the GPUs, or their price, of the policy's plan for these mean rates with the bursts of a second, or of
        the TTFT of models that generate, of such a dispersion. It promises every model this part of the mean rate."""
        mean = Traffic({spec.name: float(rate) for spec, rate in zip(declared.models, rates, strict=True)})
        upper = np.maximum(0.1, rates)
        if not args.generating:
            upper += SIGMAS * np.sqrt(upper)
        elif spread is not None:
            ttfts_s = [spec.slo.ttft_ms / 1000.0 for spec in declared.models if spec.slo is not None]
            how = zip(upper.tolist(), spread.tolist(), ttfts_s, strict=True)
            upper = np.array([rate_with_bursts(*each, 1.0 - attainment) for each in how])
        models = tuple(
            spec.model_copy(update={"rate_rps": float(rate)}) for spec, rate in zip(declared.models, upper, strict=True)
        )
        workload = declared.model_copy(update={"models": models})
        expected = make_plan(PlanTask(policy, workload, one, profiles, traffic=mean, attainment=attainment)).expected
        return (expected.cost_per_hour if by_price else expected.gpus_used) or 0

    if args.ideal:
        found = [needed(rates) for rates in epochs]  # GPUs of the clairvoyant plan by epoch
        peak, total = needed(epochs.max(axis=0)), epochs.sum(axis=1)
        print(
            f"{args.policy}, seed {args.seed}: {total.min():.0f} to {total.max():.0f} r/s; a clairvoyant plan per "
            f"300 s takes {min(found)} to {max(found)} GPUs, {np.mean(found):.1f} on average, a static plan for every "
            f"model's peak {peak}: {np.mean(found) / peak:.2f} of it"
        )
        return
    found, promised = [], []

    def tell(now_s: float, run: ControlledRun) -> None:
        """Say every two hours, and at the end, how it stands."""
        progress(now_s, run)
        if now_s % 7200 and now_s < duration_s:
            return
        hours = now_s / 3600.0
        report(f"day, {args.policy}, seed {args.seed}, {hours:g} h", run, time.process_time() - since)
        ended = epochs[len(found) : int(now_s // 300)]
        found.extend(needed(rates) for rates in ended)
        promised.extend(map(needed, ended, repeat(KEPT), spreads[len(found) - len(ended) :]))
        keeps = sum(promised) * 300.0 / 3600.0
        clairvoyant, peak = sum(found) * 300.0 / 3600.0, needed(epochs[: len(found)].max(axis=0)) * hours
        unit = "$" if by_price else "GPU-hours"
        held = paid(run, prices, now_s) if by_price else run.gpu_s / 3600.0
        there = sum(seconds * ((prices[kind] or 0.0) if by_price else 1.0) for kind, seconds in run.present_s.items())
        print(
            f"  {unit}: controller {held:.1f} ({there / 3600.0:.1f} with GPUs that held nothing), static plan for "
            f"every model's peak {peak:.1f} ({held / peak:.2f} of it), clairvoyant per 300 s {clairvoyant:.1f} "
            f"({held / clairvoyant:.2f} of it; {keeps:.1f}, or {held / keeps:.2f}, where it promises every model "
            f"99 %); changes per hour "
            f"{run.count(Kind.CHANGED) / hours:.1f}; models below 99 %: "
            + (", ".join(f"{name} {part:.2%}" for name, part in run.attainments().items() if part < 0.99) or "none")
            + f"; the worst outside unannounced jumps {min(outside_jumps(run, counts).values()):.2%}",
            flush=True,
        )
        if args.svg:
            title = f"A day of 20 models, policy {args.policy} (simulated)"
            Path(args.svg).write_text(picture(title, run, most, found))

    if args.rival:
        _serve_day(args, schedule, workload, profiles, counts, most)
        return
    # Without rehearsals, which take as long as all the rest.
    run = ControlledCluster(
        ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, duration_s, tokens=schedule.tokens),
        declared,
        plan,
        there,
        profiles,
        settings,
        lambda system: make_scheduler("deferred", system, {"rehearse": False}),
        growth=one.one_of_each,
        seed=args.seed,
        **({"provision_s": (60.0, 180.0)} if by_price else {}),
    ).run(60.0, tell)
    if args.log:
        show_log(run, ("change", "changed", "roll back", "rolled back", "missing", "no plan", "stuck"))


def outside_jumps(run: ControlledRun, counts: NDArray[np.float64]) -> dict[str, float]:
    """Return the part of each model's requests in time, without the three minutes from each minute that brings more
    than 1.5 times the mean of the five before, and more by three standard deviations."""
    parts = {}
    for index, name in enumerate(run.names):
        by_minute = [counts[int(w.end_s) - 60 : int(w.end_s), index].sum() for w in run.windows]
        means = [np.mean(by_minute[max(0, at - 5) : at] or by_minute[:1]) for at in range(len(by_minute))]
        jumps = [at for at, mean in enumerate(means) if by_minute[at] > 1.5 * mean + 3.0 * math.sqrt(mean)]
        left_out = {at + late for at in jumps for late in range(3)}
        ended = np.sum([w.ended[index] for at, w in enumerate(run.windows) if at not in left_out], axis=0)
        parts[name] = float(ended[Outcome.OK] / ended.sum()) if ended.sum() else 1.0
    return parts


def paid(run: ControlledRun, prices: Mapping[str, float | None], until_s: float) -> float:
    """Return what the GPUs that hold something have cost until a time, in $."""
    ends_s = [at_s for at_s, _, _ in run.plans[1:]] + [until_s]
    total = 0.0
    for (at_s, plan, _), end_s in zip(run.plans, ends_s, strict=True):
        used = {gpu.device: gpu.whole_type for gpu in plan.gpus if gpu.id in set(plan.used_gpus)}
        total += sum(prices[kind] or 0.0 for kind in used.values()) * (end_s - at_s) / 3600.0
    return total


def _serve_day(
    args: argparse.Namespace,
    schedule: Schedule,
    workload: Workload,
    profiles: Profiles,
    counts: NDArray[np.float64],
    most: int,
) -> None:
    """Run the day with every model scaled by the length of its queue."""
    found, since = {}, time.process_time()
    for index, spec in enumerate(workload.models):
        line = profiles.get(spec.name, "1080ti").line
        assert line is not None
        first_rps = max(0.1, float(counts[:300, index].mean()))
        size = max([1, *(b for b in range(1, 65) if 2.0 * line.at(b) <= spec.slo_ms)])
        replicas = max(1, math.ceil(1.5 * first_rps * line.at(size) / size / 1000.0))
        found[spec.name] = serve_by_queue(
            schedule.times_ms[schedule.model_index == index].tolist(),
            line.at,
            spec.slo_ms,
            args.hours * 3600.0,
            replicas=replicas,
            start_s=72.5,
            most=most,
        )
    requests, late = sum(f.requests for f in found.values()), sum(f.late for f in found.values())
    low = {name: 1 - f.late / f.requests for name, f in found.items() if f.requests and f.late > 0.01 * f.requests}
    print(
        f"Serve's queue-length rule, seed {args.seed}, {args.hours:g} h: {requests:,} requests in "
        f"{time.process_time() - since:.0f} s; violated {late / requests:.3%}; GPU-hours "
        f"{sum(f.gpu_s for f in found.values()) / 3600.0:.1f}; changes per hour "
        f"{sum(f.changes for f in found.values()) / args.hours:.1f}; models below 99 %: "
        + (", ".join(f"{name} {part:.2%}" for name, part in sorted(low.items(), key=lambda p: p[1])) or "none")
    )


def _counts(
    times_ms: NDArray[np.float64], models: NDArray[np.int32], count: int, duration_s: float
) -> NDArray[np.float64]:
    """Return arrivals by second and model."""
    seconds = (times_ms / 1000.0).astype(np.int64)
    found = np.bincount(seconds * count + models, minlength=math.ceil(duration_s) * count)
    result: NDArray[np.float64] = found.reshape(-1, count).astype(np.float64)
    return result


# --- incidents --------------------------------------------------------------------------------------------------------


def incidents(args: argparse.Namespace) -> None:
    """Let single things happen to a cluster with room, and say after how many seconds every model is in time again."""
    cluster, policy = Cluster.parse("v100:4"), load_policy("gpulet", MERGING)
    workload = five_models(120.0)
    plan = solve(policy, workload, cluster, IGNITER)
    lost = plan.gpulets[0].gpu
    cases: dict[str, tuple[Mapping[str, Sequence[float]], list[Incident]]] = {
        "rate of vgg19 x 3 at 300 s": ({"vgg19": [1.0, 3.0]}, []),
        f"GPU {lost} lost at 300 s": ({}, [Incident(300.0, lose=(lost,))]),
        "batches of ssd take 1.4 of their profile from 300 s": ({}, [Incident(300.0, slow={"ssd": 1.4})]),
    }
    for (what, (factors, happens)), standby_gpus in product(cases.items(), (0, 1)):
        settings = ControlSettings.model_validate(
            {"mode": "act", "policy": {"name": "gpulet", "options": MERGING}, "standby_gpus": standby_gpus}
        )
        schedule = make_schedule(stepped(workload, factors), 600.0, args.seed)
        load = ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, 600.0)
        since = time.process_time()
        run = ControlledCluster(
            load,
            workload,
            plan,
            cluster.gpus,
            IGNITER,
            settings,
            lambda system: make_scheduler("deferred", system),
            incidents=happens,
        ).run(window_s=1.0)
        report(f"{what}, twins on {standby_gpus} GPU", run, time.process_time() - since)
        again, low = _recovered(run, 300.0)
        after = [window for window in run.windows if window.end_s > 300.0 + again]
        ended = np.sum([window.ended for window in after], axis=0)
        rest = ended[:, Outcome.OK] / np.maximum(1, ended.sum(axis=1))
        print(
            f"  every model at 99 % for 20 s again after {again} s; lowest second {low:.1%}; the worst from then on "
            f"{rest.min():.2%}"
        )
        if args.log:
            show_log(run, ("change", "changed", "roll back", "rolled back", "missing", "no plan", "kept", "standby"))


# --- standby ----------------------------------------------------------------------------------------------------------


def standby(args: argparse.Namespace) -> None:
    """Slow one model down at 60 s by what 10 % more share cures, with standby processes and without."""
    cluster, policy = Cluster.parse("v100:2"), load_policy("igniter", {})
    models = [
        {"name": name, "rate_rps": rate_rps, "slo_ms": slo_ms}
        for name, rate_rps, slo_ms in (("alexnet", 500.0, 15.0), ("resnet50", 200.0, 60.0), ("vgg19", 60.0, 60.0))
    ]
    workload = Workload.model_validate({"models": models})
    # iGniter's load comes evenly. For one that comes at random its plan needs room, or it loses 1 % from the start.
    upper = tuple(
        spec.model_copy(update={"rate_rps": 1.25 * spec.rate_rps + SIGMAS * math.sqrt(spec.rate_rps)})
        for spec in workload.models
    )
    plan = solve(policy, workload.model_copy(update={"models": upper}), cluster, IGNITER)
    for gpulet in plan.gpulets:
        held = ", ".join(f"{replica.name} (batch {replica.batch_size})" for replica in gpulet.models)
        print(f"  {gpulet.id}: {gpulet.effective_share_pct:g} % for {held}")
    for slowed in (spec.name for spec in plan.models):
        share = max(g.effective_share_pct for g in plan.hosts_of(slowed))
        profile = IGNITER.get(slowed, "v100")
        batch = plan.hosts_of(slowed)[0].models[0].batch_size
        factor = profile.latency(share).at(batch) / profile.latency(min(100.0, share + 10.0)).at(batch)
        for standby_pct in (10.0, None):
            settings = ControlSettings.model_validate(
                {"mode": "act", "policy": {"name": "igniter"}, "standby_pct": standby_pct}
            )
            schedule = make_schedule(workload.models, 180.0, args.seed)
            run = ControlledCluster(
                ControlledLoad(schedule.names, schedule.times_ms, schedule.model_index, 180.0),
                workload,
                plan,
                cluster.gpus,
                IGNITER,
                settings,
                lambda system: make_scheduler("deferred", system),
                incidents=[Incident(60.0, slow={slowed: factor})],
            ).run(window_s=1.0)
            again, low = _recovered(run, 60.0, slowed)
            row = run.names.index(slowed)
            ended = np.sum([window.ended[row] for window in run.windows if window.end_s <= 60.0], axis=0)
            print(
                f"{slowed} takes {factor:.2f} of its profile from 60 s on, {'with' if standby_pct else 'without'} "
                f"standby: {ended[Outcome.OK] / ended.sum():.2%} before, lowest second {low:.1%}, at 99 % again after "
                f"{again} s, "
                f"{run.attainments()[slowed]:.2%} of its requests in time over all"
            )
            if args.log:
                show_log(run, ("change", "changed", "roll back", "rolled back", "standby", "kept", "rates"))


def _recovered(run: ControlledRun, from_s: float, *only: str) -> tuple[int, float]:
    """Return after how many seconds every model, or those named, is at 99 % for the next twenty, and the lowest
    attainment of one of them in any second."""
    rows = [place for place, name in enumerate(run.names) if not only or name in only]
    after = [window for window in run.windows if window.end_s > from_s]
    bad = np.array([window.ended[rows, 1:].sum(axis=1) for window in after])
    total = np.array([window.ended[rows].sum(axis=1) for window in after])
    again = next(
        place
        for place in range(len(after) + 1)
        if (bad[place : place + 20].sum(axis=0) <= 0.01 * total[place : place + 20].sum(axis=0)).all()
    )
    return again, float((1 - bad / np.maximum(1, total)).min())


def main() -> None:
    """Read the arguments and run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["waves", "day", "incidents", "standby"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate-scale", type=float, default=1.0, help="of the waves")
    parser.add_argument("--policy", help="of the day; default: gpulet, or tenuto for models that generate")
    parser.add_argument("--ideal", action="store_true", help="of the day: only what no controller can go below")
    parser.add_argument("--hours", type=float, default=24.0, help="of the day")
    parser.add_argument("--invocations", type=int, default=20_000_000, help="of the day that is made up")
    parser.add_argument("--swing", type=float, help="of the day: all functions follow it, with this amplitude")
    parser.add_argument("--types", action="store_true", help="of the day: three GPU types with prices")
    parser.add_argument("--generating", action="store_true", help="of the day: models that generate, and three types")
    parser.add_argument("--spot-h", type=float, help="of the day with types: hours that a node lives in the mean")
    parser.add_argument("--rival", action="store_true", help="of the day: Ray Serve's own rule, and no controller")
    parser.add_argument("--trace", help="a day of the Azure Functions trace of 2019 in place of the made-up one")
    parser.add_argument("--svg", help="draw rates, GPUs and violations over time")
    parser.add_argument("--log", action="store_true", help="print the changes")
    args = parser.parse_args()
    args.policy = args.policy or ("tenuto" if args.generating else "gpulet")
    print_machine()
    {"waves": waves, "day": day, "incidents": incidents, "standby": standby}[args.what](args)


if __name__ == "__main__":
    main()
