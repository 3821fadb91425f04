"""`tenuto plan`: find, validate, explain, compare, draw and write a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

import click

from tenuto.batching.core.build import from_plan
from tenuto.cli.common import (
    ClusterArguments,
    Target,
    cluster_arguments,
    json_option,
    notice,
    output_option,
    printed_as_json,
    say,
    write_file,
)
from tenuto.cli.tables import print_table
from tenuto.cli.watching import planning_watched
from tenuto.deployments.serve.executor_choice import ExecutorChoice
from tenuto.errors import InvalidInputError, Problem, first_line, raise_if_any, refused
from tenuto.options import split_pairs
from tenuto.placement import Cluster, Plan, Policy, Workload, load_policy
from tenuto.placement.expectation.outlook import Traffic
from tenuto.placement.network_files import network_problems
from tenuto.placement.placement_constraints import bearable, is_at, place_problems
from tenuto.placement.placement_constraints import without as cluster_without
from tenuto.placement.plan import PlannedGpu
from tenuto.placement.plan_edits import drained, with_the_rest
from tenuto.placement.planner import PlanTask, RunningPlan, enough_for_all, make_plan, plan_on_fewest
from tenuto.placement.planner.fault_tolerance import preferences_missed
from tenuto.placement.planner.fixed_cost import check_inputs
from tenuto.placement.policy import DEFAULT_POLICY
from tenuto.placement.shown.table import (
    PlanRow,
    PlanTotals,
    compare_rows,
    losses_told,
    rows_of,
    totals_of,
    why_below,
    why_unserved,
)
from tenuto.placement.slo_rules import load_workload
from tenuto.profiles import Profiles
from tenuto.profiles.shipped import shipped_for

T = TypeVar("T")

STREAMS = "each gpu-let takes the next batch while one executes, and copies overlap with execution"
HIDDEN = "`hidden ms` of a full batch's latency are copies"
NOTHING_HIDDEN = "nothing says how long copies take, so that none count as hidden"


class _Faults:
    """Runs steps that may each find wrong input, so that the user sees all problems at once."""

    def __init__(self) -> None:
        self.found: list[Problem | str] = []

    def attempt(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except InvalidInputError as error:
            self.found += error.problems or (str(error),)
            return None


@click.command("plan")
@click.argument("workload_file", metavar="WORKLOAD")
@click.option(
    "--policy",
    "policy_name",
    default=DEFAULT_POLICY,
    metavar="NAME|MODULE:CLASS|FILE.py:CLASS",
    help="Placement policy; see `tenuto policies`.",
)
@click.option(
    "--compare",
    metavar="NAME,NAME…",
    help="Plan with several policies and print the plans side by side. Each policy uses the first profile that has all "
    "it needs.",
)
@click.option(
    "--from",
    "from_file",
    type=click.Path(dir_okay=False),
    metavar="PLAN",
    help="Keep gpu-lets of this plan where they are, as far as every model is served as well as by a new plan.",
)
@click.option(
    "--at-most", type=click.IntRange(0), metavar="N", help="With --from: at most N gpu-lets may start or load a model."
)
@click.option("--without", multiple=True, metavar="NODE", help="Do not use this node, rack or GPU; repeatable.")
@click.option("--fewest-gpus", is_flag=True, help="Use no more GPUs than it takes to serve all models as asked.")
@cluster_arguments
@click.option("--option", "options", multiple=True, metavar="K=V", help="Option of the policy; repeatable.")
@output_option("Write the plan as a Serve config for `serve deploy`.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["serve", "rayservice"]),
    default="serve",
    help="Format of the -o file: a Serve config for `serve deploy` and `tenuto`, or a part of a Kubernetes RayService.",
)
@click.option(
    "--executor",
    type=click.Choice(get_args(ExecutorChoice)),
    default="auto",
    help="Whether gpu-lets of the written plan run models with torch, or emulate GPUs.",
)
@click.option("--picture", type=Target(), metavar="FILE.svg", help="Draw the GPUs with their gpu-lets.")
@click.option(
    "--strict",
    is_flag=True,
    envvar="TENUTO_STRICT",
    help="Exit with 1 unless every model is served as asked. TENUTO_STRICT=1 sets this for all plans, as in CI.",
)
@json_option
def command(
    workload_file: str,
    policy_name: str,
    compare: str | None,
    from_file: str | None,
    at_most: int | None,
    without: tuple[str, ...],
    fewest_gpus: bool,
    where: ClusterArguments,
    options: tuple[str, ...],
    output: str | None,
    file_format: str,
    executor: str,
    picture: str | None,
    strict: bool,
) -> int:
    """Find and validate a plan for WORKLOAD on a cluster.

    When the plan does not serve every model as asked, the last line says what would, or why more GPUs do not help. Exit
    code 1: no model is served in time; with --strict, some model is not served as asked. Long searches show their
    progress on stderr. Ctrl-C ends such a search with the best plan so far; a second Ctrl-C ends it without a plan.

    Example: tenuto plan workload.yaml --policy symphony --gpus v100:4 -o plan.yaml
    """
    names = [name.strip() for name in compare.split(",") if name.strip()] if compare else [policy_name]
    if compare and not names:
        raise refused("--compare", compare, "names no policy", "Write for example tenuto,symphony.")
    if compare and from_file:
        raise refused("--compare", compare, "is for plans made anew", "Choose one policy with --policy for --from.")
    if at_most is not None and from_file is None:
        raise refused("--at-most", at_most, "counts changes of a plan", "Name it with --from.")
    if compare and (output or picture):
        cure = "Choose one policy with --policy for -o and --picture."
        raise refused("--compare", compare, "writes no plan and no picture", cure)
    if file_format != "serve" and not output:
        raise refused("--format", file_format, "says how a plan is written", "Name a file with -o.")
    workload, cluster, profiles, policies = _inputs(workload_file, names, where, options, strict_options=not compare)
    if fewest_gpus and (from_file or cluster.elastic):
        rule = "leaves GPUs of a fixed cluster idle, to which --from moves nothing and --elastic does not buy"
        raise refused("--fewest-gpus", None, rule, "Leave the other option away.")
    old = Plan.load(from_file) if from_file else None
    if old is not None and any(gpu.instance is not None for gpu in old.gpus):  # near it is inside its instances
        cluster = cluster.cut_as(old.gpus).as_cut
    without = tuple(dict.fromkeys((*(old.drained if old is not None else ()), *without)))
    whole, cluster, whole_workload = cluster, cluster_without(cluster, without), workload
    if without:
        raise_if_any(place_problems(whole_workload, whole))
        workload = bearable(whole_workload, cluster.gpus)
    from tenuto.batching.planning.losses import LossTrials

    trial, planned = LossTrials(), plan_on_fewest if fewest_gpus else make_plan
    if compare:
        tasks = {name: PlanTask(policy, workload, cluster, profiles, trial) for name, policy in policies.items()}
        orders = [profiles, *_other_orders(profiles, where.profile_names, cluster)]
        return _compare(tasks, orders, planned, strict=strict)
    running = None if old is None else RunningPlan(old, Traffic.declared(workload.models), most_changes=at_most)
    task = PlanTask(policies[policy_name], workload, cluster, profiles, trial, running)
    with planning_watched(task.policy):
        plan = planned(task)
    if without:
        plan = drained(with_the_rest(plan, whole_workload), whole, without)
    if output:
        write_file(output, _document(plan, executor, file_format))
    if picture:
        from tenuto.placement.shown.picture import draw

        write_file(picture, draw(plan), option="--picture")
    if not printed_as_json(plan.to_data()):
        _print_plan(plan)
        is_whole = len(workload.models) == len(whole_workload.models)
        if plan.unserved_reasons and not cluster.elastic and old is None and is_whole:
            _say_what_is_enough(task, is_file=where.gpus is None)
    return _code([plan], strict=strict)


def _code(plans: Iterable[Plan], *, strict: bool) -> int:
    """Return the exit code: 1 for a plan that serves no model in time, and with --strict also for one that does not
    serve every model as asked."""
    return int(
        any(plan.models and (not plan.expected.goodput_rps or (strict and plan.unserved_reasons)) for plan in plans)
    )


def _say_what_is_enough(task: PlanTask, *, is_file: bool) -> None:
    """Print on how many GPUs the same policy serves every model as asked; or which models no number of GPUs serves, and
    why; or why this cannot be told. GPUs of a cluster file may be special, so only their number is printed."""
    try:
        with planning_watched(task.policy):
            enough, how = enough_for_all(task), "--elastic"
            if not enough.unserved and not is_file:
                gpus = _short_form(enough.gpus)
                given = make_plan(task.on(Cluster.parse(gpus)))
                if enough.unserved_reasons and given.unserved_reasons:  # a larger fixed cluster may still serve more
                    larger = plan_on_fewest(task.on(Cluster.parse(_short_form(enough.gpus, times=2))))
                    if not larger.unserved_reasons:
                        devices = {*larger.devices(larger.used_gpus)}
                        gpus = _short_form(gpu for gpu in larger.gpus if gpu.device in devices)
                        given = make_plan(task.on(Cluster.parse(gpus)))
                if not given.unserved_reasons or (enough.unserved_reasons and not given.unserved):
                    enough, how = given, f"--gpus {gpus}"
    except InvalidInputError as error:
        rule = error.problems[0].rule if error.problems else first_line(error)
        say(f"how many GPUs would serve all models is not known: {rule}")
        return
    below = why_below(enough)
    if enough.unserved:
        say(f"no number of these GPUs serves: {', '.join(enough.unserved)}")
    elif below:
        name, why = below[0]
        used = f"with {len(enough.gpus)} {task.policy.name} uses {enough.expected.gpus_used}"
        say(f"more GPUs do not help: {used}, and {name} gets {why}")
    else:
        cost = enough.expected.cost_per_hour
        price = "" if cost is None else f", {cost:,.2f} $/h"
        say(f"would serve all as asked: {enough.expected.gpus_used} GPUs{price}: {how}")


def _short_form(gpus: Iterable[PlannedGpu], times: int = 1) -> str:
    """Return the value of `--gpus` for the GPUs of a plan, each so many times."""
    kinds = {gpu.device: (gpu.whole_type, ":mig" if gpu.mig == "managed" else "") for gpu in gpus}
    return ",".join(f"{kind}:{times * count}{cut}" for (kind, cut), count in Counter(kinds.values()).items())


def _inputs(
    workload_file: str, names: list[str], where: ClusterArguments, options: tuple[str, ...], *, strict_options: bool
) -> tuple[Workload, Cluster, Profiles, dict[str, Policy]]:
    """Read all inputs and raise one `InvalidInputError` with the problems of all of them."""
    faults = _Faults()
    cluster = faults.attempt(where.cluster)
    values = faults.attempt(partial(split_pairs, options)) or {}
    policies = {name: faults.attempt(partial(_policy, name, values, strict_options)) for name in names}
    if not strict_options:
        known = {key for policy in policies.values() if policy is not None for key in _parameters(policy)}
        for key in values.keys() - known if all(policies.values()) else ():
            cure = f"Their options: {', '.join(sorted(known)) or 'none'}."
            faults.found.append(Problem(f"--option {key}", values[key], "no compared policy has this option", cure))
    types = cluster.gpu_types if cluster else ()
    profiles = faults.attempt(partial(where.profiles, types))
    workload = faults.attempt(partial(load_workload, workload_file, cluster, profiles))
    if workload and cluster and profiles is not None:
        faults.attempt(partial(check_inputs, workload, cluster, profiles))
        places = {spec.name: f"models.{index}" for index, spec in enumerate(workload.models)}
        problems, unread = network_problems(workload, cluster, profiles, places)
        faults.found += problems
        for line in unread:
            notice(line)
    raise_if_any(faults.found)
    if workload is None or cluster is None or profiles is None:  # never so after raise_if_any; for the type checker
        raise InvalidInputError("incomplete input. Correct the problems above.")
    return workload, cluster, profiles, {name: policy for name, policy in policies.items() if policy is not None}


def _other_orders(profiles: Profiles, names: tuple[str, ...], cluster: Cluster) -> list[Profiles]:
    """Return the same profiles in other orders: each of the given ones first. Without given ones, it is each of those
    shipped for the GPU types."""
    first = list(profiles)
    others = first[1:] if names else shipped_for(cluster.gpu_types, except_for=first)
    return [Profiles([other, *(profile for profile in first if profile is not other)]) for other in others]


def _compare(
    tasks: dict[str, PlanTask], orders: list[Profiles], planned: Callable[[PlanTask], Plan], *, strict: bool
) -> int:
    """Plan with every policy and print the plans. Each policy uses the first order of profiles that has what it needs.

    Raises:
        InvalidInputError: some policies could plan with no order; the plans of the others are printed before.
    """
    plans: dict[str, Plan] = {}
    used: dict[str, list[str]] = {}
    refused: dict[str, InvalidInputError] = {}
    for name, task in tasks.items():
        for profiles in orders:
            try:
                with planning_watched(task.policy):
                    plans[name] = planned(replace(task, profiles=profiles))
            except InvalidInputError as error:
                refused.setdefault(name, error)
                continue
            used[name] = [profile.name for profile in profiles]
            break
    failed = {name: error for name, error in refused.items() if name not in plans}
    errors = {name: str(error) for name, error in failed.items()}
    data = {name: plan.to_data() for name, plan in plans.items()}
    if not printed_as_json({"plans": data, "profiles": used, "errors": errors}) and plans:
        _print_comparison(plans, used)
    if failed:
        lines = [f"--compare {name}: {line}" for name, error in failed.items() for line in str(error).splitlines()]
        raise InvalidInputError(lines)
    return _code(plans.values(), strict=strict)


def _policy(name: str, options: dict[str, Any], strict: bool) -> Policy:
    """Load a policy. When policies are compared, an option goes to all that have it."""
    if strict:
        return load_policy(name, options)
    parameters = _parameters(load_policy(name))
    return load_policy(name, {key: value for key, value in options.items() if key in parameters})


def _parameters(policy: Policy) -> set[str]:
    return set(getattr(type(policy).__init__, "__kwdefaults__", None) or {})


def _document(plan: Plan, executor: str, file_format: str) -> str:
    """Return the Serve config with the plan, or the part of a RayService with it."""
    from tenuto.deployments.serve.deployment import Deployment
    from tenuto.deployments.serve.rayservice import rayservice
    from tenuto.documents import dump_yaml

    if file_format == "rayservice":
        return rayservice(plan, executor)
    return dump_yaml(Deployment.model_validate({"plan": plan, "executor": executor}).config().to_data())


def _number(value: float | None) -> str:
    """Show four significant digits, thousands in full."""
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _print_plan(plan: Plan) -> None:
    offline = [spec.name for spec in plan.models if spec.offline]
    rows = rows_of(plan)
    hidden = ("hidden ms",) if plan.streaming else ()
    if rows:
        print_table(
            (
                "GPU",
                "type",
                "gpu-let",
                "share",
                "model",
                "batch",
                "latency ms",
                *hidden,
                "SLO ms",
                "rate rps",
                "memory MiB",
            ),
            _cells(rows, with_hidden=plan.streaming),
            left=("type", "gpu-let", "share", "model"),
        )
    if plan.drained:
        say(f"drained: {', '.join(plan.drained)}")
    idle = [gpu.id for gpu in plan.gpus if not plan.on_gpu(gpu.id) and not is_at(gpu, plan.drained)]
    if idle:
        say(f"idle: {_shortened(idle)}")
    for name, reason in why_unserved(plan):
        say(f"unserved: {name}: {reason}")
    for name, reason in why_below(plan):
        say(f"below: {name}: {reason}")
    for note in (*plan.notes, *(from_plan(plan, check_slos=False).without_gap(offline) if offline else ())):
        say(f"note: {note}")
    for line in losses_told(plan):
        say(line)
    for name, why in preferences_missed(plan).items():
        say(f"prefers: {name}: {why}")
    for assumption in plan.expected.assumptions:
        say(f"assumes: {assumption}")
    if plan.streaming:
        say(f"streaming: {STREAMS}; {HIDDEN if any(row.hidden_ms for row in rows) else NOTHING_HIDDEN}")
    say(f"{plan.policy.name}: {_totals(totals_of(plan))}")


def _cells(rows: Sequence[PlanRow], *, with_hidden: bool) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row. A cell that is equal to the one above is left empty."""
    previous = ("", "")
    for row in rows:
        share = "all" if row.share_pct is None else f"{row.share_pct:g} %"
        place = (row.gpu, row.gpulet)
        yield (
            *((row.gpu, row.gpu_type) if row.gpu != previous[0] else ("", "")),
            *((row.gpulet, share) if place != previous else ("", "")),
            row.model,
            str(row.batch_size),
            _number(row.latency_ms),
            *((_number(row.hidden_ms),) if with_hidden else ()),
            _number(row.slo_ms),
            _number(row.rate_rps),
            _number(row.memory_mib),
        )
        previous = place


def _shortened(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 8 else f"{', '.join(ids[:8])} and {len(ids) - 8} more"


def _totals(totals: PlanTotals) -> str:
    cost = "" if totals.cost_per_hour is None else f", {totals.cost_per_hour:,.2f} $/h"
    believed = ""
    if totals.believed_rps is not None and abs(totals.believed_rps - totals.goodput_rps) > 0.01 * totals.goodput_rps:
        believed = f" ({_number(totals.believed_rps)} believed by the policy)"
    return (
        f"{_number(totals.goodput_rps)} of {_number(totals.offered_rps)} rps expected{believed}, "
        f"{totals.served} of {totals.models} models, "
        f"{totals.gpus_used} of {totals.gpus} GPUs{cost}"
    )


def _print_comparison(plans: dict[str, Plan], used: dict[str, list[str]]) -> None:
    totals = [totals_of(plan) for plan in plans.values()]
    rows = [(model, *(cells[name] for name in plans)) for model, cells in compare_rows(plans)]
    rows += [
        ("expected rps", *(_number(t.goodput_rps) for t in totals)),
        ("believed rps", *(_number(t.believed_rps) for t in totals)),
        ("offered rps", *(_number(t.offered_rps) for t in totals)),
        ("models served", *(f"{t.served} of {t.models}" for t in totals)),
        ("GPUs used", *(f"{t.gpus_used} of {t.gpus}" for t in totals)),
        ("$/hour", *(_number(t.cost_per_hour) for t in totals)),
    ]
    # A policy that lacks something in the first profile used another order of profiles.
    if len({tuple(names) for names in used.values()}) > 1:
        rows.append(("profiles", *(", ".join(used[name]) for name in plans)))
    print_table(("", *plans), rows, left=tuple(plans))
    if any(plan.streaming for plan in plans.values()):
        say(f"streaming: {STREAMS}")
    for name, plan in plans.items():
        for model, reason in why_unserved(plan):
            say(f"{name}: unserved: {model}: {reason}")
        for model, reason in why_below(plan):
            say(f"{name}: below: {model}: {reason}")
