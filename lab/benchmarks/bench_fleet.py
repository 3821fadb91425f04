"""A fleet planned from nothing and again: how long, how many GPUs, how much moves.

Fleets and demand are drawn from a seed. Each cell has `--cell` GPUs of one type of three (with `--mixed` of all, node
by node). Models are those of `bench_elastic` with rates of a lognormal law, and the demand takes about `--load` of the
fluid. Each line says seconds and CPU seconds; the peak memory of this process and of its largest worker; the GPUs that
plans use and their price, against the fluid (as if GPUs could be cut at will, so that no plan goes below it) and
against the same with the tenth more load that every full promise stands; models below their rate, and cells that were
planned.
With `--joint` the same demand is planned on one cell of all GPUs.

Run: python lab/benchmarks/bench_fleet.py [--cells 100] [--models 2000] [--seeds 1] [--joint]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bench_elastic import FASTER, PRICES
from placement_scenes import NETWORKS, machine, thesis

from tenuto.placement import Cluster, Plan, PolicyUsed, Workload
from tenuto.placement.demand import ModelGroup, fluid_of, group_models, room_of
from tenuto.placement.expectation.outlook import MORE
from tenuto.placement.fleet.fleet_plan import CellState, FleetPlan, FleetTask, plan_fleet
from tenuto.profiles import Profile, Profiles

NODE = 4  # GPUs of a node


@dataclass(frozen=True)
class Scene:
    """A fleet with its demand."""

    workload: Workload
    cells: tuple[CellState, ...]
    profiles: Profiles

    @property
    def joint(self) -> Cluster:
        """All GPUs as one cluster."""
        return Cluster.of(gpu for cell in self.cells for gpu in cell.cluster.gpus)


@dataclass(frozen=True)
class Took:
    """How long a plan took; a machine with other load takes longer, and the same CPU seconds."""

    wall_s: float
    cpu_s: float


def draw(
    seed: int,
    cells: int,
    gpus: int,
    models: int | Mapping[str, float],
    load: float,
    *,
    mixed: bool,
    slower: float = 1.0,
    kind: str = "",
) -> Scene:
    """Return the fleet of a seed. Models may be given by name with how many GPUs each takes in terms of the others.
    Batches take `slower` times as long, SLOs are as much longer, and rates lower; all GPUs are of one `kind` where it
    is given."""
    rng = random.Random(f"fleet {seed}")
    [measured] = thesis()
    rows = {
        kind: {row: measured.models[row].scaled(slower * rng.uniform(*FASTER[kind])) for row in NETWORKS}
        for kind in FASTER
    }
    profiles = Profiles(
        Profile.model_validate(measured.model_copy(update={"name": f"made-up-{k}", "gpu_type": k, "models": rows[k]}))
        for k in FASTER
    )
    states = []
    for index in range(cells):
        one, nodes = kind or rng.choice([*FASTER]), []
        for node in range(-(-gpus // NODE)):
            gpu = rng.choice([*FASTER]) if mixed else one
            group = {"type": gpu, "count": min(NODE, gpus - NODE * node), "price_per_hour": PRICES[gpu]}
            nodes.append({"name": f"c{index}n{node}", "gpus": [group]})
        states.append(CellState(f"c{index}", Cluster.model_validate({"nodes": nodes})))
    entries = []
    for name in [f"m{index}" for index in range(models)] if isinstance(models, int) else models:
        row = rng.choice(NETWORKS)
        profile = profiles.get(row, "v100")
        slo_ms = max(slower * rng.choice((50, 100, 150, 200, 300)), 2.5 * profile.latency_ms(1))
        fitting = [size for size in profile.batch_sizes() if profile.latency_ms(size) <= slo_ms / 2]
        most = max(map(profile.throughput_rps, fitting))
        rate = most * (rng.lognormvariate(0.0, 1.0) if isinstance(models, int) else models[name])
        entries.append({"name": name, "profile": row, "slo_ms": slo_ms, "rate_rps": rate})
    scene = Scene(Workload.model_validate({"models": entries}), tuple(states), profiles)
    room = room_of(scene.joint)
    whole = sum(count * kind[1] for kind, count in room.items())
    for _ in range(4):  # what a rate takes depends on it
        fluid = fluid_of(group_models(scene.workload, scene.joint, profiles), room)
        scene = replace(scene, workload=scene.workload.scaled(load * whole / fluid.cost))
    return scene


def fluid_gpus(scene: Scene, more: float = 1.0) -> float:
    """Return what the fluid costs an hour."""
    groups = group_models(scene.workload, scene.joint, scene.profiles)
    scaled = [
        ModelGroup(g.models, (), {n: {k: more * gpus for k, gpus in needs.items()} for n, needs in g.gpus.items()})
        for g in groups
    ]
    return fluid_of(scaled, room_of(scene.joint)).cost


def planned(scene: Scene, plans: dict[str, Plan], policy: str, at_most: float = 1.0) -> tuple[FleetPlan, Took]:
    """Return the plan of a scene where these plans run, and how long it took."""
    cells = tuple(
        replace(
            cell, rates_rps={s.name: s.rate_rps for s in plans[cell.name].models}, running=partial(plans.get, cell.name)
        )
        if cell.name in plans
        else cell
        for cell in scene.cells
    )
    task = FleetTask(
        scene.workload, cells, PolicyUsed(name=policy), scene.profiles, at_most, len(os.sched_getaffinity(0))
    )
    since, cpu_s = time.perf_counter(), used_cpu_s()
    done = plan_fleet(task)
    return done, Took(time.perf_counter() - since, used_cpu_s() - cpu_s)


def used_cpu_s() -> float:
    """Return the CPU seconds of this process and of its workers that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def moved(before: dict[str, Plan], after: dict[str, Plan]) -> float:
    """Return the part of all replicas that lie in a cell where their model was not, or are new there."""

    def replicas(plan: Plan | None) -> dict[tuple[str, str], int]:
        counts: dict[tuple[str, str], int] = {}
        for gpulet in plan.gpulets if plan is not None else ():
            for replica in gpulet.models:
                counts[gpulet.id, replica.name] = 1
        return counts

    total = sum(len(replicas(plan)) for plan in before.values())
    started = sum(len(replicas(plan).keys() - replicas(before.get(name)).keys()) for name, plan in after.items())
    return started / total


def show(what: str, scene: Scene, done: FleetPlan, plans: dict[str, Plan], took: Took, more: str = "") -> None:
    """Print a line."""
    cost = sum(plan.expected.cost_per_hour or 0.0 for plan in plans.values())
    used = sum(plan.expected.gpus_used for plan in plans.values())
    below = {name for plan in plans.values() for name in plan.unserved_reasons}
    promised = sum(plan.expected.goodput_rps for plan in plans.values()) / scene.workload.rate_rps
    bound, stands = fluid_gpus(scene), fluid_gpus(scene, 1.0 + MORE)
    peak = [resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        f"{what:<22} {took.wall_s:6.1f} s (CPU {took.cpu_s:.1f} s), {peak[0]:.2f} + {peak[1]:.2f} GiB, {used:,} GPUs, "
        f"{cost:,.0f} $/h = {cost / bound:.3f} of the fluid, {cost / stands:.3f} with the margin; "
        f"{100 * promised:.2f} % promised, {len(below)} below, {len(done.plans)} cells planned, "
        f"{len(done.spread.lacking)} lack room{more}",
        flush=True,
    )


def changed(scene: Scene, part: float, seed: int) -> Scene:
    """Return the scene with other rates, half to twice as high, of so many of the models that they have this part of
    the demand."""
    rng, left = random.Random(f"change {seed} {part}"), part * scene.workload.rate_rps
    specs, factors = [*scene.workload.models], dict[str, float]()
    for spec in rng.sample(specs, len(specs)):
        if left <= 0.0:
            break
        left -= spec.rate_rps
        factors[spec.name] = 2.0 ** rng.uniform(-1.0, 1.0)
    models = tuple(spec.with_rate_scaled(factors.get(spec.name, 1.0)) for spec in specs)
    return replace(scene, workload=scene.workload.model_copy(update={"models": models}))


def run(seed: int, given: argparse.Namespace) -> None:
    """Print the lines of a seed."""
    scene = draw(seed, given.cells, given.cell, given.models, given.load, mixed=given.mixed, kind=given.kind)
    first, took = planned(scene, {}, given.policy)
    plans = dict(first.plans)
    show(f"seed {seed}: first plan", scene, first, plans, took)
    if given.joint:
        one = replace(scene, cells=(CellState("all", scene.joint),))
        joint, took = planned(one, {}, given.policy)
        show(f"seed {seed}: joint plan", one, joint, dict(joint.plans), took)
    for part in given.parts:
        other = changed(scene, part, seed)
        again, took = planned(other, plans, given.policy, given.at_most)
        after = {**plans, **again.plans}
        share = moved(plans, dict(again.plans))
        show(
            f"seed {seed}: {100 * part:g} % changed",
            other,
            again,
            after,
            took,
            f", {100 * share:.2f} % of the replicas start",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the lines of every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--cell", type=int, default=100, help="GPUs of a cell")
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--load", type=float, default=0.7, help="part of the price of all GPUs that the fluid takes")
    parser.add_argument("--mixed", action="store_true", help="GPUs of all types in each cell")
    parser.add_argument("--kind", choices=FASTER, default="", help="all GPUs of this type")
    parser.add_argument("--policy", default="tenuto")
    parser.add_argument("--at-most", type=float, default=1.0)
    parser.add_argument("--parts", type=float, nargs="*", default=[0.01, 0.2])
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args(arguments)
    print(machine("numpy", "highspy"))
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        run(seed, given)


if __name__ == "__main__":
    main()
