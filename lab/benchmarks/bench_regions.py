"""A day of regions that generate, on the terms of SageServe (arXiv 2502.14617): fast and slow work, pools or a fleet.

Three regions are three cells. Four LLaMAs (`muxserve-a100`, on one to four A100s of a node) get fast requests, which
have an SLO, and slow ones, which have until the day's end. The rate of fast requests of a model follows the hours of
the clients of a category of ServeGen with a variation of at most `STEADY`, as much later in the other regions, and
varies from minute to minute as these clients do; slow ones are `--slow` of all requests and come evenly. Lengths are
those of the conversations in SageServe's repository. What the public files lack: the requests themselves (its traces
ES_26 and final_data_day_1), its forecasts, and which tier and region has how much. So mean rates are drawn: fast ones
take two to six replicas of a model in a region. Its step times (four models, by prompt and batch) are not used.

siloed:   each region has for each model a pool for fast and one for slow requests, of at least two replicas. A pool
          starts one replica, which takes `START_S`, where it is busy to more than one part, and ends one below
          another. These rules, the two replicas, the time and the parts 0.5 and 0.25 are those of SageServe's
          simulator (`BasicArbiter`; it counts the memory in use, which follows the load); `--rules` has closer ones.
reactive: the same, one pool for both; slow requests take what fast ones leave.
fleet:    plans of policy tenuto for fast requests of all regions, which may go to any; they are made for each model's
          highest rate of the last `LOOK` minutes, each quarter of an hour and when a model asks for more than the plan
          stands, near what runs, and are in force `START_S` later. Slow requests are offline and get idle time.

Busy is the rate as a part of what the planner's closed form says that replicas carry within the SLO. A fluid every
`TICK_S` counts GPU-hours, starting replicas included, fast requests that find `HEADROOM` times that, and slow ones. Of
`--windows` minutes drawn by chance the fast requests of each run one by one for `--seconds`, and in the fleet offline
ones without an end beside: what these get of the time is what slow requests get in the fluid.

Run: python lab/benchmarks/bench_regions.py [--seeds 1] [--slow 0.25] [--rules 0.5:0.25 0.85:0.7]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from azure_like import MINUTES
from bench_fleet import Scene, planned
from bench_fleet_day import LOOK, Running, at_rates
from numpy.typing import NDArray
from placement_scenes import machine

from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan, Workload
from tenuto.placement.demand import HEADROOM
from tenuto.placement.fleet.fleet_plan import CellState
from tenuto.placement.generation_capacity import ShareCapacity, carried, options_of, with_lengths
from tenuto.placement.workload import ModelSpec
from tenuto.profiles import Profile, Profiles
from tenuto.profiles.shipped import load_shipped
from tenuto_lab.servegen import published

MODELS = {"llama-7b": "m-small", "llama-13b": "m-mid", "llama-30b": "m-large", "llama-65b": "deepseek-r1"}
HOURS_LATER = (0, 1, 3)  # of the regions: east, central and west
STEADY = 2.0  # clients' variation of gaps
LEAST, START_S, TICK_S = 2, 155, 5
NODE, KIND = 8, "a100-80gb"
SLO = {"ttft_ms": 2000, "tpot_ms": 200}  # MLPerf Inference's of Llama 2 70B
# Quantiles of `conv_distributions.csv` of SageServe's repository (Azure, 2023; MIT).
PROMPT = {0: 2, 10: 207, 25: 396, 50: 1020, 75: 1189, 90: 2735, 99: 4142, 100: 4142}
OUTPUT = {0: 7, 10: 54, 25: 85, 50: 129, 75: 395, 90: 424, 99: 601, 100: 1000}

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Regions:
    """A day: by model what a replica is, and the fast rates by minute, region and model, the slow ones by region and
    model. `scene` is the same as a fleet."""

    scene: Scene
    replicas: tuple[ShareCapacity, ...]
    fast: Numbers
    slow: Numbers

    @property
    def carries(self) -> Numbers:
        """What a replica of each model carries."""
        return np.array([each.rate_rps for each in self.replicas])

    @property
    def together(self) -> Numbers:
        """How many GPUs a replica of each model takes."""
        return np.array([float(each.together) for each in self.replicas])


@dataclass
class Result:
    """GPU-hours, those of them that replicas start in, the part of each model's fast requests that finds a replica,
    the part of the slow ones that is done, and of the minutes that are drawn the fast requests and those in time."""

    gpu_h: float
    starting_h: float
    fast: Numbers
    slow: float
    windows: Sequence[tuple[float, float]]


def draw(seed: int, slow: float) -> Regions:
    """Return the day of a seed."""
    rng, shipped = np.random.default_rng([20261201, seed]), load_shipped("muxserve-a100")
    rows = {name: shipped.models[name] for name in MODELS}
    rows = {
        name: row.model_copy(update={"generation": row.generation.model_copy(update={"longest_context": 16_384})})
        for name, row in rows.items()
        if row.generation is not None
    }
    profiles = Profiles([Profile(name="muxserve", gpu_type=KIND, source="muxserve-a100", models=rows)])
    [gpu] = Cluster.parse(KIND).gpus
    generates = {"prompt_tokens": {"quantiles": PROMPT}, "output_tokens": {"quantiles": OUTPUT}}
    generates |= {"max_batch_tokens": 512}
    specs = [
        ModelSpec.model_validate({"name": name, "rate_rps": 1.0, "slo": SLO, "generates": generates}) for name in MODELS
    ]
    ways = [options_of(with_lengths(spec), gpu, profiles, carried, NODE, (100,)) for spec in specs]
    replicas = tuple(max(each, key=lambda way: way.rate_rps / way.takes_pct) for each in ways)
    fast = np.zeros((MINUTES, len(HOURS_LATER), len(MODELS)))
    for column, (category, replica) in enumerate(zip(MODELS.values(), replicas, strict=True)):
        clients = [client for client in published()[category] if client.cv <= STEADY]
        parts = np.array([client.mean_rps for client in clients])
        parts /= parts.sum()
        hours = parts @ np.array([client.hours for client in clients])
        varies = float(parts @ np.array([client.cv**2 for client in clients]))  # of a minute's count, over its mean
        for region, later in enumerate(HOURS_LATER):
            mean = rng.uniform(2.0, 6.0) * replica.rate_rps
            at = (np.arange(MINUTES) / 60.0 - 0.5 - later) % 24.0
            count = 60.0 * mean * np.interp(at, np.arange(24), hours, period=24) / hours.mean()
            fast[:, region, column] = rng.gamma(count / varies, varies) / 60.0
    total = fast.mean(axis=0)
    needs = (fast.sum(axis=1).max(axis=0) / [r.rate_rps / r.together for r in replicas]).sum()
    nodes = math.ceil(1.5 * needs / len(HOURS_LATER) / NODE)
    cells = tuple(
        CellState(name, Cluster.model_validate({"nodes": [_node(f"{name}{place}") for place in range(nodes)]}))
        for name in ("east", "central", "west")
    )
    specs = [spec.with_rate_scaled(float(rate)) for spec, rate in zip(specs, total.sum(axis=0), strict=True)]
    scene = Scene(Workload(models=tuple(specs), mps="off"), cells, profiles)
    return Regions(scene, replicas, fast, slow / (1.0 - slow) * total)


def _node(name: str) -> Mapping[str, object]:
    return {"name": name, "gpus": [{"type": KIND, "count": NODE}]}


def reactive(day: Regions, rule: str, minutes: Sequence[int], seconds: float, *, siloed: bool) -> Result:
    """Return the day of pools that follow how busy they are."""
    up, down = map(float, rule.split(":"))
    fast, slow = day.fast / day.carries, np.broadcast_to(day.slow / day.carries, day.fast.shape)  # in replicas
    if siloed:
        nothing = np.zeros_like(fast)
        fast, slow = np.concatenate([fast, nothing], axis=2), np.concatenate([nothing, slow], axis=2)
    together, rates = np.resize(day.together, fast.shape[2]), np.resize(day.carries, fast.shape[2])
    ready = np.maximum(LEAST, np.ceil((fast + slow)[0] / up))
    waiting, free_at = np.zeros_like(ready), np.zeros_like(ready)
    starting = np.zeros((START_S // TICK_S, *ready.shape))
    held, begun, good, done, by_minute = 0.0, 0.0, np.zeros_like(ready), 0.0, np.zeros_like(fast)
    for tick in range(MINUTES * 60 // TICK_S):
        minute, ring = tick * TICK_S // 60, tick % len(starting)
        ready += starting[ring]
        starting[ring] = 0.0
        busy, due = fast[minute], slow[minute] + waiting
        served = np.minimum(due, np.maximum(0.0, ready - busy))
        waiting = due - served
        part = np.where(waiting > 1e-9, 1.0, (busy + served) / ready)
        more = (part > up) & (free_at <= tick)
        starting[ring] = more
        free_at[more] = tick + len(starting)
        ready -= (part < down) & (ready > LEAST) & (free_at <= tick)
        under_way = starting.sum(axis=0)
        held += float(((ready + under_way) * together).sum())
        begun += float((under_way * together).sum())
        good += np.minimum(busy, HEADROOM * ready) * rates
        done += float((served * rates).sum())
        by_minute[minute] = ready
    hours, ticks = TICK_S / 3600.0, 60.0 / TICK_S
    part = good.sum(axis=0)[: len(MODELS)] / (ticks * day.fast.sum(axis=(0, 1)))
    windows = [
        simulate(pool_plan(day, m, int(by_minute[at, r, m]), day.fast[at, r, m]), seconds, at)[:2]
        for at in minutes
        for r, m in np.ndindex(day.fast.shape[1:])
    ]
    return Result(held * hours, begun * hours, part, done / (ticks * MINUTES * day.slow.sum()), windows)


def fleet(day: Regions, minutes: Sequence[int], seconds: float) -> Result:
    """Return the day of a fleet that is planned."""
    rates, running, start = day.fast.sum(axis=1), Running(), 0
    held, begun, good, got = 0.0, 0.0, np.zeros(len(MODELS)), Counter[str]()
    later, steps, windows = math.ceil(START_S / 60), 0, list[tuple[float, float]]()
    while start < MINUTES:
        asked = rates[range(start - LOOK, start)].max(axis=0)
        plan, _ = planned(at_rates(day.scene, asked), running.plans, "tenuto")
        steps += 1
        before, running = running, Running({**running.plans, **plan.plans}, plan.traffic)
        old, new = (_replicas(each) for each in (before, running))
        in_force = start + later if before.plans else start
        if before.plans:
            begun += sum(map(len, new - old)) * START_S / 3600.0
            held += sum(map(len, old - new)) * START_S / 3600.0
        due = (m for m in range(in_force, MINUTES) if m % 15 == 0 or (rates[m - 1] > HEADROOM * asked).any())
        end = next(due, MINUTES)
        for minute in range(start, end):
            now = running if minute >= in_force else before
            stands = np.array([_carried(now, name) for name in MODELS])
            good += np.minimum(rates[minute], HEADROOM * stands)
            held += len({gpu for plan in running.plans.values() for gpu in plan.used_gpus}) / 60.0
            if minute in minutes:
                sent, in_time, offline = _simulated(now, rates[minute], seconds, minute)
                windows.append((sent, in_time))
                got.update(offline)
        print(
            f"{end / 60:5.2f} h: {steps} steps, {running.gpus} GPUs, {time.process_time():.0f} CPU s, windows "
            f"{sum(w[1] for w in windows):,.0f} of {sum(w[0] for w in windows):,.0f}",
            file=sys.stderr,
            flush=True,
        )
        start = end
    room = np.array([got[name] for name in MODELS]) / (seconds * max(1, len(windows)))
    asks = day.slow.sum(axis=0)
    print(f"idle time has room for {', '.join(f'{each:.2f}' for each in room / asks)} of the slow requests by model")
    done = float(np.minimum(room, asks).sum() / asks.sum())
    return Result(held, begun, good / rates.sum(axis=0), done, windows)


def _replicas(running: Running) -> set[tuple[str, ...]]:
    """Return the replicas that run, by their GPUs."""
    return {gpulet.gpus for plan in running.plans.values() for gpulet in plan.gpulets}


def _carried(running: Running, name: str) -> float:
    return sum(p.expected.models[name].goodput_rps for p in running.plans.values() if name in p.expected.models)


def _simulated(running: Running, rates: Numbers, seconds: float, seed: int) -> tuple[float, float, Counter[str]]:
    """Return the fast requests of some seconds, those in time, and by model the offline ones that end."""
    sent, in_time, offline = 0.0, 0.0, Counter[str]()
    for number, (cell, plan) in enumerate(running.plans.items()):
        parts = {n: running.traffic.get(n, {}).get(cell, 0.0) * r for n, r in zip(MODELS, rates.tolist(), strict=True)}
        specs = tuple(s.with_rate_scaled(max(parts[s.name], 1e-6) / s.rate_rps) for s in plan.models)
        if not specs or not plan.gpulets:
            continue
        sent_here, in_time_here, offline_here = simulate(
            plan.model_copy(update={"models": specs}), seconds, seed + MINUTES * number, [s.name for s in specs]
        )
        sent, in_time = sent + sent_here, in_time + in_time_here
        offline.update(offline_here)
    return sent, in_time, offline


def simulate(
    plan: Plan, seconds: float, seed: int, offline: Sequence[str] = ()
) -> tuple[float, float, Mapping[str, float]]:
    """Return the requests of some seconds of a plan, those in time, and by model the offline ones that end."""
    made = Simulation.of_plan(plan, duration_s=2.0 * seconds, warmup_s=seconds, seed=seed)
    run = (replace(made, offline=dict.fromkeys(offline, math.inf)) if offline else made).run()
    counts = run.result.counts()
    ended = run.summary()["offline"]["requests"] if offline else {}
    return float(counts.sum()), float(counts[:, Outcome.OK].sum()), ended


def pool_plan(day: Regions, model: int, replicas: int, rate: float) -> Plan:
    """Return the plan of a pool."""
    spec, way = day.scene.workload.models[model], day.replicas[model]
    ids = [[f"n{place}/{part}" for part in range(way.together)] for place in range(replicas)]
    replica = {"name": spec.name, "batch_size": 256, "kv_tokens": way.kv_tokens}
    replica |= {"steps": way.steps.model_dump(mode="json"), "rate_rps": rate / replicas}
    gpulets = [{"id": f"{own[0]}/a", "gpu": own[0], "models": [replica]} for own in ids]
    return Plan.from_data(
        {
            "policy": {"name": "pool"},
            "gpus": [{"id": own[0], "type": KIND} for own in ids],
            "gpulets": gpulets,
            "models": [spec.with_rate_scaled(rate / spec.rate_rps).model_dump(mode="json")],
        }
    )


def run(seed: int, given: argparse.Namespace) -> None:
    """Print the figures of a seed."""
    day = draw(seed, given.slow)
    minutes = np.random.default_rng(seed).choice(MINUTES, given.windows, replace=False).tolist()
    print(
        f"seed {seed}: fast {day.fast.sum(axis=(1, 2)).min():.0f} to {day.fast.sum(axis=(1, 2)).max():.0f} r/s, slow "
        f"{day.slow.sum():.0f}; a replica carries {', '.join(f'{each:.2f}' for each in day.carries)} r/s on "
        f"{', '.join(f'{each:.0f}' for each in day.together)} GPUs; {len(day.scene.joint.gpus)} GPUs; fast ones keep "
        f"{float((day.fast / day.carries * day.together).sum()) / 60.0:,.0f} GPU-hours busy"
    )
    ways: dict[str, Callable[[], Result]] = {
        f"{name} {rule}": partial(reactive, day, rule, minutes, given.seconds, siloed=name == "siloed")
        for rule in given.rules
        for name in ("siloed", "reactive")
    }
    baseline = 0.0
    for name, way in {**ways, "fleet": partial(fleet, day, minutes, given.seconds)}.items():
        since, result = time.process_time(), way()
        baseline = baseline or result.gpu_h
        sent, in_time = (sum(each) for each in zip(*result.windows, strict=True))
        fast = float(result.fast @ day.fast.sum(axis=(0, 1)) / day.fast.sum())
        print(
            f"{name}: GPU-hours {result.gpu_h:,.1f} ({result.gpu_h / baseline:.3f}), {result.starting_h:.1f} of them "
            f"starting ({result.starting_h / result.gpu_h:.2%}); fast in time {fast:.3%} by the fluid, worst model "
            f"{result.fast.min():.2%}, {in_time / sent:.3%} of {sent:,.0f} one by one; slow done {result.slow:.1%}; "
            f"{time.process_time() - since:.0f} CPU s",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {"--seeds": 1, "--first-seed": 1, "--windows": 4}.items():
        parser.add_argument(name, type=int, default=count)
    parser.add_argument("--rules", nargs="+", default=["0.5:0.25"], help="parts above and below which pools change")
    for name, number in {"--slow": 0.25, "--seconds": 30.0}.items():
        parser.add_argument(name, type=float, default=number)
    given = parser.parse_args(arguments)
    print(machine("numpy", "highspy"))
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        run(seed, given)


if __name__ == "__main__":
    main()
