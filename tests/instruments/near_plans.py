"""Random workloads that change at random, planned anew and near what runs by any policy, and what is wrong with it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tenuto.batching.planning.losses import LossTrials
from tenuto.errors import InvalidInputError
from tenuto.placement import Cluster, Gpulet, Plan, Workload, load_policy, solve
from tenuto.placement.expectation.outlook import IN_FULL, Traffic, expected_of
from tenuto.placement.plan import Expected
from tenuto.placement.planner import PlanTask, RunningPlan
from tenuto.placement.planner.completion import check_plan, complete
from tenuto.placement.planner.fault_tolerance import SLIGHT
from tenuto.placement.planner.minimal_change import changes_of, plan_with_fewest_changes
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import load_shipped

IGNITER = "tenuto_lab.baselines.igniter.igniter:Igniter"
POLICIES = ("tenuto", "symphony", "gpulet", IGNITER)
LIMITS = (None, 0, 1, 2, 3)
NETWORKS = (
    "alexnet",
    "bert",
    "densenet121",
    "efficientnet_b7",
    "gpt2",
    "inception_v3",
    "mobilenet_v2",
    "resnet50",
    "vgg19",
)
SAID = re.compile(
    r"near what runs: ([\d.,e+]+) rps on (\d+) GPUs(, [\d.,]+ \$/h)?, changes: (\d+); made anew: .*: (\d+)"
)


@dataclass
class Judged:
    """What is wrong with the plans of a case, how many changes they make, and sums over all."""

    faults: list[str] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)


def judged(seed: int, policy: str, **options: str) -> Judged:
    """Return what is wrong with plans near one that runs: more changes than allowed; a plan that breaks a rule; a note
    with other figures than are counted; less service than anew where that takes no more changes than are allowed; a
    change that is for nothing; of a policy that tries its plans, a promise that its trial does not keep."""
    before, after, on, left, profiles = changed_scene(seed, policy)
    loaded = load_policy(policy, options)
    old, anew = solve(loaded, before, on, profiles), solve(loaded, after, left, profiles)
    rates = {spec.name: spec.rate_rps for spec in after.models}
    least = {name: min(model.goodput_rps, IN_FULL * rates[name]) for name, model in anew.expected.models.items()}
    losses, found = LossTrials(), Judged()
    for at_most in LIMITS:
        try:
            running = RunningPlan(old, Traffic.declared(after.models), most_changes=at_most)
            plan = plan_with_fewest_changes(PlanTask(loaded, after, left, profiles, losses, running), anew)
        except InvalidInputError as error:
            found.sums["refused"] += 1
            if at_most is None or "changes at least" not in str(error):
                found.faults.append(f"{at_most}: {error}")
            continue
        changes = changes_of(old, plan)
        found.changes.append(changes)
        check_plan(plan, left)
        task = PlanTask(loaded, after, left, profiles)
        completed = partial(complete, task=task, parts={}, at_most=0)
        wrong = [*_told_wrongly(plan, changes), *_needless(old, plan, least, completed)]
        if loaded.abilities.tries_plans and plan.expected.models != anew.expected.models:
            wrong += [f"promises more of {name} than its trial serves" for name in _promised_too_much(plan, losses)]
        if Plan.from_data(plan.to_data()) != plan:
            wrong.append("another plan after a round trip")
        if at_most is not None and changes > at_most:
            wrong.append(f"{changes} changes")
        anew_changes = int(plan.notes[-1].rpartition(": ")[2])
        if at_most is None or anew_changes <= at_most:
            wrong += [f"serves less of {name} than anew" for name in _lacking(plan, least)]
        if at_most is None:
            found.sums.update(near=changes, gpus_near=plan.expected.gpus_used, gpus_anew=anew.expected.gpus_used)
            found.sums["anew"] += anew_changes
        found.sums["plans"] += 1
        found.faults += [f"{at_most}: {fault}" for fault in wrong]
    return found


def changed_scene(seed: int, policy: str) -> tuple[Workload, Workload, Cluster, Cluster, Profiles]:
    """Return a workload before and after a change, the cluster before and after, and the profiles."""
    profiles, networks = Profiles([load_shipped("thesis-v100")]), NETWORKS
    if policy == IGNITER:  # whose coefficients only its own profile has
        profiles, networks = Profiles([load_shipped("igniter-v100")]), ("alexnet", "resnet50", "vgg19", "ssd")
    rng = random.Random(seed)
    gpus, count = rng.randint(2, 6), rng.randint(2, 6)
    load = rng.uniform(0.2, 0.9) * gpus / count

    def model(index: int) -> dict[str, Any]:
        row = rng.choice(networks)
        profile = profiles.get(row, "v100")
        slo_ms = max(rng.choice((50, 100, 150, 200, 300)), 2.5 * profile.latency_ms(1, 100.0))
        size = max(b for b in profile.batch_sizes() if b == 1 or profile.latency_ms(b, 100.0) <= slo_ms / 2)
        rate = load * rng.uniform(0.3, 1.7) * profile.throughput_rps(size)
        return {"name": f"{row}-{index}", "profile": row, "rate_rps": round(rate, 3), "slo_ms": round(slo_ms, 3)}

    before = [model(index) for index in range(count)]
    after = [entry | {"rate_rps": round(entry["rate_rps"] * rng.uniform(0.4, 1.8), 3)} for entry in before]
    if rng.random() < 0.3:
        after.append(model(count))
    if rng.random() < 0.3:
        after.pop(rng.randrange(count))
    left = gpus - 1 if rng.random() < 0.3 else gpus
    first, second = (Workload.model_validate({"models": models}) for models in (before, after))
    return first, second, Cluster.parse(f"v100:{gpus}"), Cluster.parse(f"v100:{left}"), profiles


def _lacking(plan: Plan, least: Mapping[str, float]) -> list[str]:
    """Return the models of which a plan promises less than these rates."""
    got = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    rates = {spec.name: spec.rate_rps for spec in plan.models}
    return [name for name, rate in least.items() if got.get(name, 0.0) < rate - 2.0 * SLIGHT * rates[name]]


def _promised_too_much(plan: Plan, losses: LossTrials) -> list[str]:
    """Return the models that a trial serves by more than a percent of their rate less than promised."""
    served, rates = losses(plan), {spec.name: spec.rate_rps for spec in plan.models}
    assert served is not None
    promised = {name: model.goodput_rps / rates[name] for name, model in plan.expected.models.items()}
    return [name for name, part in promised.items() if part > served[name] + 0.01]


def _told_wrongly(plan: Plan, changes: int) -> Iterator[str]:
    said = SAID.fullmatch(plan.notes[-1])
    promised = plan.expected.goodput_rps
    if said is None:
        yield f"no price: {plan.notes[-1]}"
    elif (int(said[2]), int(said[4])) != (len({gpulet.gpu for gpulet in plan.gpulets}), changes):
        yield f"{changes} changes: {said[0]}"
    elif abs(float(said[1].replace(",", "")) - promised) > 1e-3 * promised:
        yield f"{promised} rps: {said[0]}"


def _needless(old: Plan, plan: Plan, least: Mapping[str, float], completed: Callable[[Plan], Plan]) -> Iterator[str]:
    """Yield the changes without which every model is promised as much, or what it is to get, with the latencies that
    batches then have beside their neighbours."""
    then = {gpulet.id: {replica.name for replica in gpulet.models} for gpulet in old.gpulets}
    got = {name: model.goodput_rps for name, model in plan.expected.models.items()}
    wanted = {name: min(rate, least.get(name, rate)) for name, rate in got.items()}
    for gpulet in plan.gpulets:
        if changes_of(old, plan.model_copy(update={"gpulets": (gpulet,)})):
            kept = tuple(replica for replica in gpulet.models if replica.name in then.get(gpulet.id, ()))
            reverted: tuple[Gpulet, ...] = (gpulet.model_copy(update={"models": kept, "merge": ()}),) if kept else ()
            gpulets = (*(other for other in plan.gpulets if other.id != gpulet.id), *reverted)
            without = completed(plan.model_copy(update={"gpulets": gpulets, "notes": (), "expected": Expected()}))
            if not _lacking(without.model_copy(update={"expected": expected_of(without)}), wanted):
                yield f"the change of {gpulet.id} is for nothing"
