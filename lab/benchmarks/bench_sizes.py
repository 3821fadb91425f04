"""Requests that vary in size: how far joining is behind the best of its rivals, over random scenarios.

Each scenario has one model with lognormal sizes (sigma 0.3 to 1.2) on 1 to 8 GPUs at 0.3 to 1.3 of the fluid bound's
capacity. A batch costs l(b, n) = fixed + slope * work, where work is linear in b * n, tiled (whole tiles of b * n) or
quadratic in n. All contestants but *equal shapes* know what batches of twelve sizes cost, each smaller by the root of
two. Rivals pad to this grid. *Joining* has the size classes of a profile: the grid, and others between, whose cost is
interpolated. Batches take what they really cost.

    python lab/benchmarks/bench_sizes.py [--quick] [--count 40] [--judge COMMIT] [--keep FILE] [--highest] [--overload]

* `joining`: the scheduler as it is. * `largest`: one class, all padded to the largest. * `buckets`: the same grid, and
no class joins another. * `equal shapes`: only requests of equal size share a batch, which costs what its own size
costs (Triton's dynamic batcher). * `sorted buckets`: as TurboTransformers. `bound`: the part of the offered requests
that no scheduler can exceed by GPU time, each request at the least cost of its own size.

With `--highest`, prints for each scenario the highest load at which *largest* and *joining* serve 99 %. With
`--overload`, prints which part of small and of large requests *joining* serves at 1.2 to 3 times the bound's capacity.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scenes import arguments, print_machine

from tenuto.batching.core.build import latency_steps
from tenuto.batching.core.deferred import DeferredScheduler
from tenuto.batching.core.eager import EagerScheduler
from tenuto.batching.core.scheduler import Scheduler
from tenuto.batching.core.system import Host, Model, ScheduledGpulet, System
from tenuto.batching.virtual.result import SimulationResult
from tenuto.batching.virtual.simulator import simulate
from tenuto.outcome import Outcome
from tenuto.placement import Objective
from tenuto.profiles import ModelProfile
from tenuto_lab.rivals.sorted_buckets import SortedBucketsScheduler

DESIGN_SEED = 1
REQUESTS = 8_000
COSTS = ("linear", "tiled", "quadratic")
ARRIVALS = ("poisson", "gamma 0.4", "on-off")
GRID, STEP = 12, 2**0.5  # the grid: the largest size, and each next one so many times smaller
MOST_BATCH = 128
POINT = 0.01
LEAST_PART = 0.99
OVERLOAD = (1.2, 3.0)  # times the bound's capacity
PARTS = (0.25, 0.25, 0.25, 0.15, 0.1)  # of the requests, from small to large
# The scheduler, whether it has the grid, and whether classes join.
CONTESTANTS: dict[str, tuple[type[Scheduler], bool, bool]] = {
    "joining": (DeferredScheduler, True, True),
    "largest": (DeferredScheduler, False, True),
    "buckets": (DeferredScheduler, True, False),
    "equal shapes": (EagerScheduler, False, False),
    "sorted buckets": (SortedBucketsScheduler, True, False),
}
RIVALS = tuple(name for name in CONTESTANTS if name != "joining")
Cost = Callable[[int, int], float]


@dataclass(frozen=True)
class Scenario:
    """A model whose requests vary in size. `load` is the offered rate over that of the bound."""

    name: str
    cost_kind: str
    arrivals: str
    cost: Cost
    median: float
    sigma: float
    most: int
    slo_ms: float
    gpus: int
    load: float
    seed: int

    def system(
        self, sizes: Iterable[int], objective: Objective = "total", *, joins: bool, profile: ModelProfile | None = None
    ) -> System:
        """Return the system with these sizes as classes: what they cost by a profile, or really."""
        classes = sorted(set(sizes))
        models = tuple(Model("m", self.slo_ms, None, sizes=(size,), joins=joins) for size in classes)
        hosts = {}
        for place, size in enumerate(classes):
            steps = self._steps(size)
            if profile is not None:
                steps = latency_steps(profile.by_class[(size,)].latency(), 0.0, len(steps) - 1)
            hosts[place] = Host(steps)
        gpulets = tuple(ScheduledGpulet(f"g{n}", f"g{n}", hosts) for n in range(self.gpus))
        return System(models, gpulets, objective=objective)

    def _steps(self, size: int) -> tuple[float, ...]:
        steps = [0.0, self.cost(1, size)]
        while len(steps) <= MOST_BATCH and self.cost(len(steps), size) <= self.slo_ms:
            steps.append(self.cost(len(steps), size))
        return tuple(steps)

    def profile(self, sizes: Iterable[int]) -> ModelProfile:
        """Return what was measured of the model at these sizes."""
        points = [
            {"batch_size": batch, "sizes": {"n": size}, "latency_ms": self.cost(batch, size)}
            for size in sorted(set(sizes))
            for batch in range(1, MOST_BATCH + 1)
        ]
        return ModelProfile.model_validate({"points": points})

    def least_ms(self, size: int) -> float:
        """Return the least GPU time of a request of this size."""
        steps = self._steps(size)
        return min(steps[batch] / batch for batch in range(1, len(steps)))

    def draw_sizes(self, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return sizes of requests."""
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)

    def offered(self, load: float, requests: int) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
        """Return times in ms and sizes of requests at a load, and the part of them that the bound serves."""
        rng = np.random.default_rng([self.seed, 1])
        sizes = self.draw_sizes(requests, rng)
        least = {int(size): self.least_ms(int(size)) for size in np.unique(sizes)}
        each_ms = np.array([least[int(size)] for size in sizes])
        duration_ms = float(each_ms.sum()) / self.gpus / load
        gaps = _gaps(self.arrivals, requests, rng, self.slo_ms * requests / duration_ms)
        times = np.cumsum(gaps)
        times *= duration_ms / times[-1]
        spent = np.cumsum(np.sort(each_ms)) <= self.gpus * (duration_ms + self.slo_ms)
        return times, sizes.reshape(-1, 1), float(spent.mean())


def _gaps(process: str, count: int, rng: np.random.Generator, per_slo: float) -> NDArray[np.float64]:
    if process.startswith("gamma"):
        return rng.gamma(float(process.split()[1]), 1.0, count)
    gaps = rng.exponential(1.0, count)
    if process == "on-off":  # bursts of ten SLOs at 1.5 times the mean rate, then as quiet as makes up for them
        phase = (np.arange(count) // max(1, int(10 * per_slo))) % 2
        gaps *= np.where(phase == 0, 1.0 / 1.5, 1.5)
    return gaps


def draw(seed: int, number: int) -> Scenario:
    """Return scenario `number` of a series; the same numbers give the same scenario."""
    rng = np.random.default_rng([seed, number])

    def log(low: float, high: float) -> float:
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))

    kind, arrivals = str(rng.choice(COSTS)), str(rng.choice(ARRIVALS, p=(0.6, 0.2, 0.2)))
    median, sigma, gpus = log(16, 200), float(rng.uniform(0.3, 1.2)), round(log(1, 8))
    most = round(median * math.exp(2.5 * sigma))
    first_ms, ratio = log(2, 20), log(0.3, 20)  # l(1, median), and the part of it that is fixed over the other
    fixed, slope = first_ms * ratio / (1 + ratio), first_ms / (1 + ratio) / median
    tile = log(1, 8) * median

    def cost(batch: int, size: int) -> float:
        if kind == "tiled":
            return fixed + slope * tile * math.ceil(batch * size / tile)
        if kind == "quadratic":
            return fixed + slope * batch * size * (1.0 + size / median) / 2.0
        return fixed + slope * batch * size

    slo_ms = max(log(3, 20) * cost(1, round(median)), 1.5 * cost(1, most))
    load = float(rng.uniform(0.3, 1.3))
    name = f"{seed:x}/{number}"
    return Scenario(name, kind, arrivals, cost, median, sigma, most, slo_ms, gpus, load, int(rng.integers(2**31)))


def attained(scenario: Scenario, contestant: str, load: float, requests: int) -> tuple[float, float, float]:
    """Return the part of the requests that a contestant answers in time, that of the bound, and CPU us a request."""
    times, sizes, bound = scenario.offered(load, requests)
    began = time.process_time()
    counts = simulated(scenario, contestant, times, sizes).counts()
    spent_us = 1e6 * (time.process_time() - began) / len(times)
    return float(counts[0, Outcome.OK] / counts.sum()), bound, spent_us


def simulated(
    scenario: Scenario,
    contestant: str,
    times: NDArray[np.float64],
    sizes: NDArray[np.int64],
    objective: Objective = "total",
) -> SimulationResult:
    """Run a contestant over requests of these times in ms and sizes."""
    scheduler, has_grid, joins = CONTESTANTS[contestant]
    grid = [math.ceil(scenario.most / STEP**n) for n in range(GRID if has_grid else 1)]
    if contestant == "equal shapes":
        grid = [int(size) for size in np.unique(sizes)]
    profile = scenario.profile(grid) if contestant == "joining" else None
    if profile is not None:
        grid = [size for (size,) in profile.size_classes]
    core = scheduler(scenario.system(grid, objective, joins=joins, profile=profile))
    core.system = scenario.system(grid, objective, joins=joins)  # what virtual gpu-lets take
    return simulate(core, times, np.zeros(len(times), dtype=np.int32), sizes=sizes)


@dataclass(frozen=True)
class Row:
    """One contestant in one scenario."""

    scenario: str
    contestant: str
    attainment: float
    bound: float
    microseconds: float


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=40, help="scenarios")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--requests", type=int, default=None, help=f"per scenario (default {REQUESTS})")
    parser.add_argument("--judge", metavar="COMMIT", help="judging scenarios, by the commit that froze the rule")
    parser.add_argument("--keep", type=Path, help="a file that keeps results, one JSON object per line")
    parser.add_argument("--highest", action="store_true", help="the highest load with 99 % instead of one load each")
    parser.add_argument("--overload", action="store_true", help="small and large requests beyond capacity")
    parser.add_argument("--only", action="append", choices=CONTESTANTS, help="these contestants alone; repeatable")


def main() -> None:
    chosen = arguments(__doc__ or "", more)
    print_machine()
    seed = int(chosen.judge[:12], 16) if chosen.judge else DESIGN_SEED
    requests = chosen.requests or (2_000 if chosen.quick else REQUESTS)
    numbers = range(chosen.first, chosen.first + (8 if chosen.quick else chosen.count))
    kind = f"judging, frozen in {chosen.judge[:12]}" if chosen.judge else "design"
    print(f"{len(numbers)} scenarios ({kind}), {requests:,} requests each\n")
    if chosen.highest:
        show_highest([draw(seed, number) for number in numbers], requests)
        return
    if chosen.overload:
        show_overload([draw(seed, number) for number in numbers], requests)
        return
    kept = {(row.scenario, row.contestant): row for row in _read(chosen.keep)}
    rows = []
    for scenario in (draw(seed, number) for number in numbers):
        for contestant in chosen.only or CONTESTANTS:
            row = kept.get((scenario.name, contestant))
            if row is None:
                row = Row(scenario.name, contestant, *attained(scenario, contestant, scenario.load, requests))
                if chosen.keep:
                    with chosen.keep.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            rows.append(row)
    show(rows, {name: draw(seed, int(name.split("/")[1])) for name in dict.fromkeys(row.scenario for row in rows)})


def _read(path: Path | None) -> Iterable[Row]:
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            yield Row(**json.loads(line))


def show(rows: list[Row], scenarios: dict[str, Scenario]) -> None:
    """Print the contestants, and the scenarios in which joining is furthest behind."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.scenario, {})[row.contestant] = row
    names = list(dict.fromkeys(row.contestant for row in rows))
    print(f"{'':16s}{'mean in time':>14s}{'mean regret':>14s}{'largest':>10s}{'within 1':>10s}{'us/request':>12s}")
    for name in names:
        behind = [max(by[n].attainment for n in names) - by[name].attainment for by in found.values()]
        print(
            f"{name:16s}{100 * statistics.mean(by[name].attainment for by in found.values()):13.2f}%"
            f"{100 * statistics.mean(behind):14.2f}{100 * max(behind):10.1f}"
            f"{100 * sum(b <= POINT for b in behind) / len(behind):9.0f}%"
            f"{statistics.median(by[name].microseconds for by in found.values()):12.0f}"
        )
    bound = statistics.mean(next(iter(by.values())).bound for by in found.values())
    print(f"{'bound':16s}{100 * bound:13.2f}%\n")
    if "joining" not in names or len(names) < 2:
        return
    lost = {
        name: max(by[n].attainment for n in names if n != "joining") - by["joining"].attainment
        for name, by in found.items()
    }
    print("scenario        cost      arrivals  GPUs  sigma  load   SLO/l(1)  bound  " + "  ".join(names))
    for name, _ in sorted(lost.items(), key=lambda item: -item[1]):
        each, by = scenarios[name], found[name]
        slack = each.slo_ms / each.cost(1, round(each.median))
        figures = "  ".join(f"{100 * by[n].attainment:{max(5, len(n))}.1f}" for n in names)
        print(
            f"{name:16s}{each.cost_kind:10s}{each.arrivals:10s}{each.gpus:4d}{each.sigma:7.2f}{each.load:6.2f}"
            f"{slack:10.1f}{100 * by['joining'].bound:8.1f}  {figures}"
        )


def show_highest(scenarios: list[Scenario], requests: int) -> None:
    """Print the highest load at which padding to the largest and joining serve 99 %, and their ratio."""
    ratios = []
    for scenario in scenarios:
        loads = [_highest(scenario, name, requests) for name in ("largest", "joining")]
        ratios.append(loads[1] / loads[0])
        print(f"{scenario.name:16s}{scenario.cost_kind:10s}" + "".join(f"{load:8.3f}" for load in (*loads, ratios[-1])))
    print(f"median ratio {statistics.median(ratios):.2f}, least {min(ratios):.2f}")


def show_overload(scenarios: list[Scenario], requests: int) -> None:
    """Print by objective which part of the requests is in time, of all and by size from small to large."""
    print(f"{'objective':12s}{'all':>8s}" + "".join(f"{100 * part:.0f} %".rjust(10) for part in PARTS))
    objectives: tuple[Objective, ...] = ("total", "each")
    for objective in objectives:
        rows = []
        for scenario in scenarios:
            load = float(np.random.default_rng([scenario.seed, 2]).uniform(*OVERLOAD))
            times, sizes, _ = scenario.offered(load, requests)
            result = simulated(scenario, "joining", times, sizes, objective)
            place = np.searchsorted(np.quantile(sizes, np.cumsum(PARTS[:-1])), sizes[:, 0])
            in_time = result.outcome == Outcome.OK
            groups = [result.measured, *(result.measured & (place == part) for part in range(len(PARTS)))]
            rows.append([float(in_time[group].mean()) for group in groups])
        means = [statistics.mean(column) for column in zip(*rows, strict=True)]
        print(f"{objective:12s}{100 * means[0]:7.1f}%" + "".join(f"{100 * mean:9.1f}%" for mean in means[1:]))


def _highest(scenario: Scenario, contestant: str, requests: int) -> float:
    """Return the highest load with 99 % in time, within 2 %."""
    low, high = 0.01, 1.5
    while high / low > 1.02:  # halves the gap of the logarithms
        middle = math.sqrt(low * high)
        if attained(scenario, contestant, middle, requests)[0] >= LEAST_PART:
            low = middle
        else:
            high = middle
    return low


if __name__ == "__main__":
    main()
