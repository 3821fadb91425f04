"""A day of a fleet in virtual time: steps of the planner as rates change, requests in drawn seconds between.

Fleet and models are those of `bench_fleet`, on average `--load` of what all GPUs cost by the fluid. The rate of each
model follows the sum of its part of the functions of `azure_like`, minute by minute; `--swing` is theirs. At
`--doubling` of the day a tenant with a twentieth of the models asks for twice as much. The day before was the same.
With `--failures` nodes end, on average so many times a day each at drawn times, and are back, empty, after `--back`
minutes; several numbers make a run each. With `--survive` models ask for `spread: rack, survive: 1`, where each node is
a rack.

A step is made every `--every` minutes, a minute after a loss, and when a model was asked in the last minute for more
than the plan stands, which is `HEADROOM` times what it was made for. It takes each model's highest rate of the last
`LOOK` minutes, and plans near what runs. So a change of rate is in force a minute later: measured, planned, begun.
Gpu-lets that start and stop cost no requests by themselves.

Of every hour `--windows` minutes are drawn, one from each part of the hour, whenever steps are, so that a minute counts
as much as any other. In each the traffic of every cell is simulated request by request for `--seconds` at the rates of
that minute. The rest is a fluid: of each model all that plans stand, and of a cell that is asked for more what the
planner's formulas expect. The attainment of a model is that of the fluid over all minutes, and added to it what the
simulated seconds differ from the fluid of the same seconds. `--full` simulates every second of every minute. The minute
of a failure, soon after its beginning, is simulated whole, apart, and is no part of the attainment. With `--slower`
batches take so many times as long, SLOs are as much longer, and rates as much lower: fewer requests for as many GPUs.

With `--services` the models are those services of the gpu-v2025 trace (see `gpu_v2025`) that have a GPU in the
`--hours` from day `--day` on (1 to 31): each is one of the networks, and its rate in a minute takes as many GPUs as it
has live instances then, all divided by the same number so that the mean is `--load`. So instances that an operator
provisioned stand for requests, which the file does not have. They hardly follow the time of day; with `--swing` each
rate also does, as a function of `azure_like`. No tenant doubles. A service that comes is deployed before its first
request, with the highest rate of its first `LOOK` minutes; one that has had none for so long is no longer planned.

Static: one plan for every model's highest minute. Clairvoyant: a plan from nothing for the mean rates of five minutes,
of every `--clairvoyant`th five minutes; what runs meanwhile is what it is compared with.

Run: python lab/benchmarks/bench_fleet_day.py [--cells 4] [--cell 50] [--models 20] [--every 15] [--svg day.svg]
     python lab/benchmarks/bench_fleet_day.py --services disaggregated_DLRM_trace.csv [--day 17] [--cells 4] [--cell 50]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from azure_like import MINUTES, write_day
from bench_fleet import Scene, draw, planned
from gpu_v2025 import DAYS, live_gpus
from numpy.typing import NDArray
from placement_scenes import machine
from svg_panels import Panel, Series
from svg_panels import draw as picture

from tenuto.errors import InvalidInputError
from tenuto.loadgen.simulated import Simulation
from tenuto.outcome import Outcome
from tenuto.placement import Cluster, Plan
from tenuto.placement.cluster import node_of
from tenuto.placement.demand import HEADROOM
from tenuto.placement.expectation.outlook import Outlooks, Traffic
from tenuto.placement.fleet.traffic_spread import Shares

LOOK = 15  # minutes
SLOT = 5  # minutes that a clairvoyant plan is for
TENANT = 20  # every so manieth model is the tenant's
WARM_UP_S = 0.5

Numbers = NDArray[np.float64]


@dataclass
class Day:
    """What a day came to. By model: requests, those that the fluid serves, and of the simulated seconds requests, those
    in time and those that the fluid serves. `failures` has the requests and those lost in each minute of one."""

    offered: Numbers
    fluid: Numbers
    sampled: Numbers
    in_time: Numbers
    sampled_fluid: Numbers
    gpu_h: float = 0.0
    cost: float = 0.0
    requests: int = 0
    failures: list[tuple[Numbers, Numbers]] = field(default_factory=list)

    @classmethod
    def of(cls, models: int) -> Day:
        """Return a day before its first minute."""
        offered, fluid, sampled, in_time, sampled_fluid = (np.zeros(models) for _ in range(5))
        return cls(offered, fluid, sampled, in_time, sampled_fluid)

    def attainments(self) -> Numbers:
        """Return by model the part in time; NaN for one without requests."""
        with np.errstate(invalid="ignore", divide="ignore"):
            differs = np.nan_to_num((self.in_time - self.sampled_fluid) / self.sampled)
            result: Numbers = np.clip(self.fluid / self.offered + differs, 0.0, 1.0)
        return result

    def after_failures(self) -> str:
        """Return in words what the minutes of failures lost."""
        if not self.failures:
            return ""
        sent, lost = (np.concatenate(each) for each in zip(*self.failures, strict=True))
        parts = np.divide(lost, sent, out=np.zeros_like(sent), where=sent > 0.0)
        worst = int(parts.argmax())
        return (
            f"; {len(self.failures)} nodes lost: of their minutes' requests {lost.sum() / sent.sum():.3%}, of the "
            f"worst model {parts[worst]:.2%} ({lost[worst]:.0f} of {sent[worst]:,.0f}), more than 1 % in "
            f"{int((parts > 0.01).sum())} of {int((sent > 0.0).sum())} minutes of a model"
        )

    def lost(self, at_end: Day) -> float:
        """Return the requests not in time so far, where each simulated one stands for as many as at the day's end."""
        weights = np.divide(at_end.offered, at_end.sampled, out=np.zeros_like(self.offered), where=at_end.sampled > 0.0)
        return float((self.offered - self.fluid + weights * (self.sampled_fluid - self.in_time)).sum())


@dataclass
class Running:
    """What runs: the plan of each cell and the traffic."""

    plans: dict[str, Plan] = field(default_factory=dict)
    traffic: Shares = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """How many GPUs hold something."""
        return sum(plan.expected.gpus_used for plan in self.plans.values())

    @property
    def cost(self) -> float:
        """What these cost an hour."""
        return sum(plan.expected.cost_per_hour or 0.0 for plan in self.plans.values())

    def served(self, names: Sequence[str], rates: Numbers) -> Numbers:
        """Return by model the rate that is expected in time of the rates that clients send: all of it where every
        model of a cell has what its plan stands."""
        served, place = np.zeros(len(names)), {name: at for at, name in enumerate(names)}
        for cell, plan in self.plans.items():
            asked = {n: self.traffic.get(n, {}).get(cell, 0.0) * float(rates[place[n]]) for n in plan.expected.models}
            stands = {n: HEADROOM * each.goodput_rps for n, each in plan.expected.models.items()}
            if all(asked[name] <= stands[name] for name in asked):
                parts: Mapping[str, float] = dict.fromkeys(asked, 1.0)
            else:
                parts = Outlooks().of(plan, Traffic(asked)).parts
            for name, rate in asked.items():
                served[place[name]] += parts.get(name, 0.0) * rate
        return served

    def simulated(
        self,
        names: Sequence[str],
        rates: Numbers,
        seconds: float,
        seed: int,
        lost: frozenset[str] = frozenset(),
        warm_up_s: float = WARM_UP_S,
    ) -> tuple[Numbers, Numbers]:
        """Return by model the requests and those in time of so many seconds. The GPUs `lost` end `warm_up_s` after
        these begin. Requests to a cell that has no such model are late."""
        losses = ((2.0 * warm_up_s, lost),) if lost else ()
        offered, in_time = np.zeros(len(names)), np.zeros(len(names))
        for number, (cell, plan) in enumerate(self.plans.items()):
            sent = {name: self.traffic.get(name, {}).get(cell, 0.0) * float(rates[at]) for at, name in enumerate(names)}
            hosted = {replica.name for gpulet in plan.gpulets for replica in gpulet.models}
            for at, name in enumerate(names):
                if sent[name] > 0.0 and name not in hosted:
                    offered[at] += sent[name] * seconds
            specs = tuple(
                spec.with_rate_scaled(max(sent[spec.name], 1e-6) / spec.rate_rps)
                for spec in plan.models
                if spec.name in hosted
            )
            if not specs:
                continue
            now = plan.model_copy(update={"models": specs})
            whole_s, draws = seconds + warm_up_s, 1000 * seed + number
            simulation = Simulation.of_plan(now, losses=losses, duration_s=whole_s, warmup_s=warm_up_s, seed=draws)
            counts = simulation.run().result.counts()
            for spec, row in zip(specs, counts, strict=True):
                offered[names.index(spec.name)] += row.sum()
                in_time[names.index(spec.name)] += row[Outcome.OK]
        return offered, in_time


@dataclass(frozen=True)
class Seen:
    """What a step leaves at its end: the hour, the mean rate and the GPUs since the one before, and the day so far."""

    hour: float
    rps: float
    gpus: int
    day: Day


def shapes(models: int, seed: int, swing: float | None) -> Numbers:
    """Return the Azure-like day: a row for each minute, a column with a mean of 1 for each model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day.csv"
        write_day(path, seed, swing=swing)
        table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=range(4, 4 + MINUTES))
    result = np.zeros((MINUTES, models))
    for place in range(models):
        row = table[place::models].sum(axis=0) if models <= len(table) // 2 else table[place % len(table)]
        result[:, place] = row / row.mean()
    return result


def day_of_functions(seed: int, given: argparse.Namespace) -> tuple[Scene, Numbers]:
    """Return a fleet and the rates of a day: a row for each minute, a column for each model. None is 0, so that models
    stay."""
    scene = draw(seed, given.cells, given.cell, given.models, given.load, mixed=False, slower=given.slower)
    rates = shapes(given.models, seed, given.swing) * [spec.rate_rps for spec in scene.workload.models]
    rates[round(given.doubling * MINUTES) :, ::TENANT] *= 2.0
    return scene, np.maximum(rates, 1e-9)


def day_of_services(seed: int, given: argparse.Namespace) -> tuple[Scene, Numbers]:
    """Return a fleet and the rates of the services of gpu-v2025: a row for each minute of the hours, and then the
    `LOOK` minutes before these, where negative numbers find them."""
    minutes, first = round(given.hours * 60), (given.day - 1) * MINUTES
    try:
        live = live_gpus(Path(given.services), first - LOOK, minutes + LOOK)
    except InvalidInputError as error:
        raise SystemExit(f"--services: {error}") from None
    live = {name: np.roll(counts, -LOOK) for name, counts in live.items() if counts[LOOK:].max() > 1e-6}
    counts = np.stack([*live.values()])[:, :minutes]
    total, idle = counts.sum(axis=0), counts < 1e-6
    print(
        f"{len(live)} services of day {given.day} on, {total.min():,.0f} to {total.max():,.0f} GPUs live; of "
        f"{int((np.ptp(counts, axis=1) > 1e-6).sum())} the number changes, {int(idle[:, 0].sum())} come, "
        f"{int(idle[:, -1].sum())} go"
    )
    sizes = dict(zip(live, counts.mean(axis=1).tolist(), strict=True))
    scene = draw(seed, given.cells, given.cell, sizes, given.load, mixed=False, slower=given.slower)
    rates = np.stack([live[s.name] / sizes[s.name] * s.rate_rps for s in scene.workload.models], axis=1)
    if given.swing is not None:
        rates *= shapes(len(live), seed, given.swing)[np.r_[:minutes, -LOOK:0] % MINUTES]
    return scene, rates


def at_rates(scene: Scene, rates: Numbers) -> Scene:
    """Return the scene where models have these rates, without those that have none."""
    specs = zip(scene.workload.models, rates.tolist(), strict=True)
    models = tuple(spec.with_rate_scaled(max(0.1, rate) / spec.rate_rps) for spec, rate in specs if rate > 0.0)
    return replace(scene, workload=scene.workload.model_copy(update={"models": models}))


def without(scene: Scene, nodes: Collection[str]) -> Scene:
    """Return the scene without some nodes."""
    cells = []
    for cell in scene.cells:
        left = [gpu for gpu in cell.cluster.gpus if node_of(gpu.id) not in nodes]
        cells.append(replace(cell, cluster=Cluster.of(left)))
    return replace(scene, cells=tuple(cells))


def failures(scene: Scene, per_day: float, back: float, minutes: int, rng: np.random.Generator) -> dict[int, str]:
    """Return the nodes that end, by minute; one in a minute at most."""
    found: dict[int, str] = {}
    for node in sorted({node_of(gpu.id) for gpu in scene.joint.gpus}) if per_day else ():
        at = rng.exponential(MINUTES / per_day)
        while at < minutes - 1:
            if at >= 1:
                found.setdefault(int(at), node)
            at += back + rng.exponential(MINUTES / per_day)
    return found


def run(seed: int, failures_per_day: float, given: argparse.Namespace) -> None:
    """Print the figures of a seed, where nodes end so often."""
    scene, rates = day_of_services(seed, given) if given.services else day_of_functions(seed, given)
    if given.survive:
        asking = [spec.model_copy(update={"spread": "rack", "survive": 1.0}) for spec in scene.workload.models]
        scene = replace(scene, workload=scene.workload.model_copy(update={"models": tuple(asking)}))
    names, gpus = [spec.name for spec in scene.workload.models], len(scene.joint.gpus)
    minutes = round(given.hours * 60)
    rng = np.random.default_rng(seed)
    lost = failures(scene, failures_per_day, given.back, minutes, rng)
    peak, _ = planned(at_rates(scene, rates[:minutes].max(axis=0)), {}, given.policy)
    day, running, since = Day.of(len(names)), Running(), time.process_time()
    drawn = _drawn(minutes, 60.0 if given.full else given.windows, rng)
    plan_s, short, seen = 0.0, 0, list[Seen]()
    own, clairvoyant, start, steps, used = 0.0, 0.0, 0, 0, np.zeros(minutes)
    while start < minutes:
        gone = {node for minute, node in lost.items() if minute < start <= minute + given.back}
        asked = rates[range(start - LOOK, start)].max(axis=0)
        comes = (asked == 0.0) & (rates[start] > 0.0)
        asked[comes] = rates[start : min(start + LOOK, minutes), comes].max(axis=0)
        done, took = planned(at_rates(without(scene, gone), asked), running.plans, given.policy)
        running = Running({**running.plans, **done.plans}, done.traffic)
        plan_s, short, steps = plan_s + took.wall_s, short + bool(done.spread.lacking), steps + 1
        ends = (m for m in range(start + 1, minutes) if _is_due(m, rates, asked, given.every, lost))
        end = next(ends, minutes)
        used[start:end] = running.gpus
        day.gpu_h += running.gpus * (end - start) / 60.0
        day.cost += running.cost * (end - start) / 60.0
        quiet = [minute for minute in range(start, end) if minute not in lost]
        for minute in quiet:
            day.offered += 60.0 * rates[minute]
            day.fluid += 60.0 * running.served(names, rates[minute])
        for minute in drawn.intersection(quiet):
            seconds, draws = 60.0 if given.full else given.seconds, seed * MINUTES + minute
            offered, in_time = running.simulated(
                names, rates[minute], seconds, draws, warm_up_s=given.slower * WARM_UP_S
            )
            part = running.served(names, rates[minute]) / np.maximum(rates[minute], 1e-9)
            day.sampled += offered
            day.in_time += in_time
            day.sampled_fluid += part * offered
            day.requests += int(offered.sum())
        for minute in range(start, end):
            if minute in lost:
                ended = frozenset(
                    g.id for plan in running.plans.values() for g in plan.gpus if node_of(g.id) == lost[minute]
                )
                draws, warm_up_s = seed * MINUTES + minute, given.slower * WARM_UP_S
                offered, in_time = running.simulated(names, rates[minute], 60.0, draws, ended, warm_up_s)
                day.failures.append((offered, offered - in_time))
        good = day.attainments()
        print(
            f"{end / 60:5.2f} h: {steps} steps, {running.gpus} GPUs, {len(done.plans)} cells planned, "
            f"{day.gpu_h:.1f} GPU-hours, "
            f"{time.process_time() - since:.0f} CPU s; so far {_all(day, good):.3%}, worst {np.nanmin(good):.2%}",
            file=sys.stderr,
            flush=True,
        )
        seen.append(Seen(end / 60.0, float(rates[start:end].sum(axis=1).mean()), running.gpus, deepcopy(day)))
        start = end
    for slot in range(0, minutes, SLOT * given.clairvoyant) if given.clairvoyant else ():
        ideal, _ = planned(at_rates(scene, rates[slot : slot + SLOT].mean(axis=0)), {}, given.policy)
        clairvoyant += sum(plan.expected.gpus_used for plan in ideal.plans.values())
        own += used[slot : slot + SLOT].mean()
    attained = day.attainments()
    worst = int(np.nanargmin(attained))
    passing = attained[(rates[:minutes] == 0.0).any(axis=0)]
    static = sum(p.expected.gpus_used for p in peak.plans.values()) * minutes / 60.0
    lacking = f", {len(peak.spread.lacking)} models lack room there" if peak.spread.lacking else ""
    print(
        f"seed {seed}, {failures_per_day:g} failures of a node a day: {given.hours:g} h of {gpus} GPUs, "
        f"{len(names)} models, {steps} steps "
        f"({plan_s:.0f} s of planning, {time.process_time() - since:.0f} CPU s of this process); {day.requests:,} of "
        f"{day.offered.sum():,.0f} requests simulated; in time {_all(day, attained):.3%}, worst model {names[worst]} "
        f"{attained[worst]:.2%} ({day.offered[worst]:,.0f} requests), {int((attained < 0.99).sum())} below 99 %"
        + (f", of {passing.size} that come or go the worst {np.nanmin(passing):.2%}" if passing.size else "")
        + f"; {short} steps lacked room; GPU-hours {day.gpu_h:,.1f} ({day.cost:,.0f} $), {day.gpu_h / static:.3f} of a "
        f"static plan for the peak{lacking}"
        + (f", {own / clairvoyant:.3f} of the clairvoyant one" if clairvoyant else "")
        + day.after_failures(),
        flush=True,
    )
    if given.svg:
        _draw(Path(given.svg), f"A day of {gpus} GPUs in {given.cells} cells (simulated)", seen)


def _drawn(minutes: int, per_hour: float, rng: np.random.Generator) -> set[int]:
    """Return the minutes that are simulated: one of each part of the day of this length, any of them as likely."""
    apart = 60.0 / per_hour
    return {int(apart * (part + rng.random())) for part in range(int(minutes / apart))}


def _is_due(minute: int, rates: Numbers, asked: Numbers, every: int, lost: Mapping[int, str]) -> bool:
    """Return whether a step is in force from a minute on, after one for the rates `asked`."""
    if minute % every == 0 or minute - 1 in lost or bool((rates[minute, asked == 0.0] > 0.0).any()):
        return True
    return bool((rates[minute - 1] > HEADROOM * np.maximum(0.1, asked)).any())


def _all(day: Day, attained: Numbers) -> float:
    """Return the part of all requests that is in time."""
    return float(np.nansum(attained * day.offered) / day.offered.sum())


def _draw(path: Path, title: str, seen: Sequence[Seen]) -> None:
    hours, day = [row.hour for row in seen], seen[-1].day
    lost = [100.0 * row.day.lost(day) / day.offered.sum() for row in seen]
    panels = [
        Panel("requests per second", [Series("all models", hours, [row.rps for row in seen], "#1f77b4", steps=True)]),
        Panel("GPUs", [Series("in use", hours, [row.gpus for row in seen], "#999", steps=True)]),
        Panel("not in time so far, % of the day", [Series("all models", hours, lost, "#d62728")]),
    ]
    path.write_text(picture(title, panels, "h"), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    counts: Mapping[str, int] = {"cells": 4, "cell": 50, "models": 20, "every": 15, "clairvoyant": 12}
    for name, value in {**counts, "first-seed": 1, "seeds": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, number in {
        "hours": 24.0,
        "load": 0.4,
        "doubling": 0.6,
        "back": 60.0,
        "windows": 12.0,
        "seconds": 2.0,
        "slower": 1.0,
    }.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    parser.add_argument("--failures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--survive", action="store_true", help="models survive the loss of a rack")
    parser.add_argument("--services", help="the file of gpu-v2025")
    parser.add_argument("--day", type=int, choices=range(1, DAYS + 1), default=1, metavar=f"1..{DAYS}")
    parser.add_argument("--swing", type=float, help="every function follows the time of day so much")
    parser.add_argument("--policy", default="symphony")
    parser.add_argument("--full", action="store_true", help="simulate every second")
    parser.add_argument("--svg", help="draw load, GPUs and attainment over time, of the last seed")
    given = parser.parse_args(arguments)
    if not 0.0 < given.hours <= 24.0 * (DAYS + 1 - given.day if given.services else 1):
        parser.error(f"argument --hours: {given.hours:g} is none, or more than there are")
    print(machine("numpy", "highspy"))
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for failures_per_day in given.failures:
            run(seed, failures_per_day, given)


if __name__ == "__main__":
    main()
