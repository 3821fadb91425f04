"""What each fitted number is worth: what is lost when it is halved and when it is doubled.

The numbers are those that `tenuto lab constants --origin fitted` lists, wherever they stand. Each is changed in the
source of its module, as a process of its own imports it. Scenes are chosen by the room: random schedules, plans of
random workloads (whole GPUs, MIG, GPUs that are bought, models that generate), or the controller over two waves. Every
figure is one of which more is better, in percent; the change of its mean is printed with its standard error. A number
with less than its error both ways, over enough scenes, does not earn its place.

    python lab/benchmarks/bench_constants.py [--list] [--only NAME ...] [--rooms schedule,plan] [--count 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

from tenuto_lab.house.changed import import_changed
from tenuto_lab.house.constants import NumericConstant, find_constants
from tenuto_lab.house.sources import checkout, read_sources

SCENES = (
    ("batching/core", "schedule"),
    ("batching/rehearsal", "schedule"),
    ("batching/planning/cutting", "mig"),
    ("batching/planning/sliced", "mig"),
    ("placement/planner/gpu_slices", "generate"),
    ("batching/planning/token_trials", "generate"),
    ("batching/planning/buying", "buy"),
    ("batching/planning", "plan"),
    ("placement/generation", "generate"),
    ("placement/planner/generation", "generate"),
    ("placement/planner/mixed", "generate"),
    ("placement/planner/fault", "generate"),
    ("placement/expectation", "promise"),
    ("placement", "plan"),
    ("deployments/control/lengths", "none"),
    ("deployments/control/change_cost", "none"),
    ("placement/planner/change_cost", "none"),
    ("deployments/control", "waves"),
)
"""The scene of a number, by the first line that its place begins with; of others there is none in virtual time."""


def scene_of(constant: NumericConstant) -> str:
    """Return the scene that shows what a number is worth; `none`: it takes a live system, a GPU or a second machine."""
    return next((scene for prefix, scene in SCENES if constant.place.startswith(prefix)), "none")


# --- scenes: what a number is measured by. Their imports are inside, behind the change of the number ------------------


def schedule(seed: int, count: int) -> Iterator[float]:
    """Yield the part in time of random schedules."""
    from regret_scenarios import draw, run

    for number in range(count):
        yield 100.0 * run(draw(seed, number, 10_000), "deferred")[0].attainment


def plan(seed: int, count: int) -> Iterator[float]:
    """Yield the part in time of random workloads, on plans of policy `tenuto`."""
    from bench_promises import scenes, served

    from tenuto.errors import TenutoError
    from tenuto.placement import load_policy, solve

    for scene in scenes(1000 * seed, count):
        try:
            made = solve(load_policy("tenuto", {}), scene.workload, scene.cluster, scene.profiles)
            found = served(made, scene.workload, 30.0).values()
        except TenutoError:
            yield 0.0
            continue
        yield 100.0 * sum(ok for _, ok in found) / sum(offered for offered, _ in found)


def promise(seed: int, count: int) -> Iterator[float]:
    """Yield how near the promise of a plan of policy `ffd` is to what it serves, 100 where it is the same."""
    from bench_promises import scenes, served

    from tenuto.placement import load_policy, solve

    for scene in scenes(1000 * seed, count):
        made = solve(load_policy("ffd", {}), scene.workload, scene.cluster, scene.profiles)
        found = served(made, scene.workload, 30.0).values()
        apart = made.expected.goodput_rps - sum(ok for _, ok in found)
        yield 100.0 - 100.0 * abs(apart) / sum(offered for offered, _ in found)


def buy(seed: int, count: int) -> Iterator[float]:
    """Yield by how many percent GPUs that are bought cost less, as a logarithm, less the part that is not in time."""
    from bench_elastic import judge, scene

    from tenuto.placement import load_policy, solve

    for number in range(count):
        drawn = scene(1000 * seed + number)
        made = solve(load_policy("tenuto", {}), drawn.workload, drawn.cluster, drawn.profiles)
        run = judge(drawn.workload).run(made)
        yield 100.0 * (float(run.ok_rps.sum() / run.offered_rps.sum()) - math.log(made.expected.cost_per_hour or 1.0))


def mig(seed: int, count: int) -> Iterator[float]:
    """Yield the mean part in time on two thirds of the GPUs that `parvagpu` takes, cut into MIG instances."""
    from bench_mig import attainment, drawn, planned

    from tenuto.placement import Cluster

    for number in range(count):
        workload = drawn(1000 * seed + number).model_copy(update={"objective": "each"})
        fewest, _ = planned("parvagpu", workload)
        gpus = max(1, math.floor(2 * (fewest.expected.gpus_used or 1) / 3))
        made, _ = planned("tenuto", workload, Cluster.parse(f"a100-80gb:{gpus}:mig"))
        yield 100.0 * statistics.mean(attainment(workload, made, "deferred", 10.0, seed).values())


def generate(seed: int, count: int) -> Iterator[float]:
    """Yield the mean part in time of models that generate and others on the same GPUs, as full as these get."""
    from bench_mixed import Planner, drawn

    from tenuto.loadgen.simulated import Simulation

    for number in range(count):
        scene = drawn(1000 * seed + number)
        made = Planner().plan(scene.of("both", 0.8), scene.gpus)
        if made is None:
            yield 0.0
            continue
        run = Simulation.of_plan(made, duration_s=60.0, seed=seed).run().summary()
        yield 100.0 * statistics.mean(figures["attainment"] for figures in run["models"].values())


def waves(seed: int, count: int) -> Iterator[float]:
    """Yield the part in time under the controller while rates go up and down twice, less the GPUs held, in percent."""
    from bench_controller import five_models, stepped, wave

    from tenuto.batching.registry import make_scheduler
    from tenuto.deployments.control.settings import ControlSettings
    from tenuto.deployments.control.virtual import ControlledCluster, ControlledLoad
    from tenuto.loadgen.schedule import make_schedule
    from tenuto.outcome import Outcome
    from tenuto.placement import Cluster, load_policy, solve
    from tenuto.profiles import Profiles
    from tenuto.profiles.shipped import load_shipped

    profiles, cluster = Profiles([load_shipped("igniter-v100")]), Cluster.parse("v100:4")
    options = {"merge_without_free": True}
    settings = ControlSettings.model_validate({"mode": "act", "policy": {"name": "gpulet", "options": options}})
    for number in range(count):
        factors = [wave(20.0 * (place + 0.5)) for place in range(90)]
        specs = stepped(five_models(100.0), dict.fromkeys([spec.name for spec in five_models(1.0).models], factors))
        drawn = make_schedule(specs, 1800.0, 1000 * seed + number)
        declared = five_models(100.0 * factors[0] * 1.3)
        run = ControlledCluster(
            ControlledLoad(drawn.names, drawn.times_ms, drawn.model_index, 1800.0),
            declared,
            solve(load_policy("gpulet", options), declared, cluster, profiles),
            cluster.gpus,
            profiles,
            settings,
            lambda system: make_scheduler("deferred", system, {"rehearse": False}),
        ).run()
        ended = run.ended().sum(axis=0)
        yield 100.0 * float(ended[Outcome.OK] / ended.sum()) - 100.0 * run.share_s / 1800.0 / 4.0


MEASURED: dict[str, Callable[[int, int], Iterator[float]]] = {
    "schedule": schedule,
    "plan": plan,
    "promise": promise,
    "buy": buy,
    "mig": mig,
    "generate": generate,
    "waves": waves,
}


# --- the command ------------------------------------------------------------------------------------------------------


def measured(scene: str, seed: int, count: int, change: tuple[NumericConstant, float] | None) -> list[float] | None:
    """Return the figures of a scene, by a process of its own in which one number is another; None where it fails."""
    asked = [asdict(change[0]), change[1]] if change else None
    words = [sys.executable, __file__, "--measure", json.dumps([scene, seed, count, asked])]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"# {change and change[0].name}: {ended.stderr.strip().splitlines()[-1:]}", file=sys.stderr, flush=True)
        return None
    figures: list[float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def measure(text: str) -> None:
    """Print the figures that another process asked for."""
    scene, seed, count, asked = json.loads(text)
    if asked:
        import_changed(checkout(), NumericConstant(**asked[0]), asked[1])
    print(json.dumps(list(MEASURED[scene](seed, count))))


def difference(before: list[float] | None, after: list[float] | None) -> str:
    """Return the mean change with its standard error."""
    if before is None or after is None:
        return "refused"
    apart = [b - a for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return f"{statistics.mean(apart):+.2f} ± {error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the numbers and their scenes, and end")
    parser.add_argument("--only", nargs="*", default=[], help="names of numbers, of any origin")
    parser.add_argument("--rooms", default="", help="scenes that are run, separated by commas")
    parser.add_argument("--count", type=int, default=20, help="scenes for each number")
    parser.add_argument("--seed", type=int, default=1, help="of the scenes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.measure)
        return
    every = list(find_constants(source for source in read_sources(checkout()) if source.is_machine))
    found = [c for c in every if (c.name in chosen.only if chosen.only else c.origin == "fitted")]
    rooms = set(chosen.rooms.split(",")) if chosen.rooms else {*MEASURED}
    if chosen.list:
        for constant in found:
            print(f"{scene_of(constant):9s} {constant.place} {constant.name} = {constant.value}  {constant.said}")
        print(f"{len(found)} numbers")
        return
    from scenes import print_machine

    print_machine()
    print("| number | value | scene | halved | doubled |\n|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(chosen.processes) as pool:
        for scene in MEASURED:
            if scene not in rooms or not (own := [c for c in found if scene_of(c) == scene]):
                continue
            began = time.monotonic()
            changes = [None, *((constant, factor) for constant in own for factor in (0.5, 2.0))]
            figures = list(pool.map(partial(measured, scene, chosen.seed, chosen.count), changes))
            for place, constant in enumerate(own):
                halved, doubled = (difference(figures[0], figures[1 + 2 * place + side]) for side in (0, 1))
                print(f"| `{constant.name}` | {constant.value} | {scene} | {halved} | {doubled} |")
            mean = statistics.mean(figures[0]) if figures[0] else math.nan
            print(f"# {scene}: mean {mean:.2f}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
