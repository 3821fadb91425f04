"""`tenuto explain`: why a plan is as it is, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from tenuto.cli.common import ClusterArguments, cluster_arguments, json_option, printed_as_json, say
from tenuto.cli.tables import print_table
from tenuto.errors import refused
from tenuto.placement import Plan
from tenuto.placement.application import Application
from tenuto.placement.expectation.sharing import describe_sizes
from tenuto.placement.explaining import LESS_PCT, Explained, ModelExplained, StageExplained, explain
from tenuto.placement.generates import TokenSlo

_PLACE_COLUMNS = 3  # format: the columns that say where a replica is; nothing is promised to an offline one


@click.command("explain", short_help="Explain why a plan is as it is, and what would change it.")
@click.argument("plan_file", metavar="PLAN")
@click.argument("models", metavar="[MODEL]…", nargs=-1)
@cluster_arguments
@json_option
def command(plan_file: str, models: tuple[str, ...], where: ClusterArguments) -> None:
    """Explain why PLAN is as it is, and what would change it.

    For each model: where it runs, what it costs, and how far its rate and SLO may go. For the plan: which model is late
    first when all rates grow, and what one more GPU would bring. Every figure was found by trying.

    Example: tenuto explain plan.yaml resnet50
    """
    plan = Plan.load(plan_file)
    known = [spec.name for spec in plan.models]
    for name in models:
        if name not in known:
            raise refused("MODEL", name, "is not in the plan", f"Name one of {', '.join(known)}.")
    profiles, gpus = where.ground(plan)
    explained = explain(plan, gpus, profiles, models)
    if not printed_as_json(asdict(explained)):
        _print(explained, plan)
        if plan.drained:
            say(f"drained, and not used in these figures: {', '.join(plan.drained)}")


def _print(explained: Explained, plan: Plan) -> None:
    sized = {r.name: r for gpulet in plan.gpulets for r in gpulet.models if r.by_size}
    for model in explained.models:
        _print_model(model, plan.model(model.name).slo)
        if model.name in sized:
            say(f"  assumes {describe_sizes(plan.model(model.name), sized[model.name])}")
    for app in plan.applications:
        if app.offline:
            say(f"{app.name}: offline, its stages run in time that no other request needs")
        else:
            _print_stages(app, [each for each in explained.stages if each.application == app.name])
    if explained.growth is not None:
        say(
            f"all rates may grow by {100 * (explained.growth - 1):.0f} %; "
            f"then {', '.join(explained.breaks)} is late first"
        )
    if explained.enough is not None:
        gpus = ",".join(f"{kind}:{count}" for kind, count in explained.enough.items())
        price = "" if explained.enough_cost is None else f", {explained.enough_cost:,.2f} $/h"
        say(f"would serve all as asked: {gpus}{price}")
    for more in explained.one_more:
        what = f"one {more.gpu_type} more"
        if more.why_not is not None:
            say(f"{what}: the policy cannot tell: {more.why_not}")
            continue
        cost = "" if more.cost_per_hour is None else f", {more.cost_per_hour:,.2f} $/h for the plan"
        below = f", still below: {', '.join(more.below)}" if more.below else ", every model as asked"
        gained = more.goodput_rps - plan.expected.goodput_rps
        gain = f"{gained:,.4g} rps more in time" if gained > 0.0 else "no request more in time"
        say(f"{what}: {gain}{cost}{below}")


def _print_stages(application: Application, stages: Sequence[StageExplained]) -> None:
    say(f"{application.name}: {application.rate_rps:,.4g} rps in {application.slo_ms:,.4g} ms")
    print_table(
        ("  stage", "asks", "budget ms", "takes ms", "GPUs", "$/h", "10 % faster saves"),
        (
            (
                f"  {each.stage}",
                each.model,
                f"{each.budget_ms:,.4g}",
                "-" if each.takes_ms is None else f"{each.takes_ms:.4g}",
                f"{each.gpus:.3g}",
                "-" if each.cost_per_hour is None else f"{each.cost_per_hour:,.3g}",
                "-" if each.saves is None else f"{100 * each.saves:.1f} %",
            )
            for each in stages
        ),
        left=("  stage", "asks"),
    )
    best = max(stages, key=lambda each: each.saves or 0.0)
    if best.saves:
        say(f"  speed up {best.stage} first: a tenth less time saves {100 * best.saves:.1f} % of all stages' GPU time")


def _print_model(model: ModelExplained, slo: TokenSlo | None) -> None:
    def slo_text(slo_ms: float) -> str:
        if slo is None:
            return f"{slo_ms:,.4g} ms"
        times = slo_ms / model.slo_ms
        return f"{times * slo.ttft_ms:,.4g} ms to the first token and {times * slo.tpot_ms:,.4g} ms for each further"

    if model.is_offline:
        at_most = "" if model.idle_rps is None else f": at most {model.idle_rps:,.4g} rps"
        say(f"{model.name}: offline, in time that no other request needs{at_most}")
    else:
        _print_promise(model, slo_text)
    columns = _PLACE_COLUMNS if model.is_offline else None
    print_table(
        (
            "  gpu-let",
            "type",
            "share",
            "batch",
            "takes ms",
            "may wait ms",
            "slowed",
            "busy",
            "carries rps",
            "rps without it",
            f"with {LESS_PCT:g} % less",
        )[:columns],
        (
            (
                f"  {r.gpulet}",
                r.gpu_type,
                "all" if r.share_pct is None else f"{r.share_pct:g} %",
                f"{r.batch} of {r.largest_batch}",
                "-" if r.takes_ms is None else f"{r.takes_ms:.4g}",
                "-" if r.waits_ms is None else f"{r.waits_ms:.4g}",
                f"{100 * (r.slowdown - 1):.0f} %",
                f"{100 * r.busy:.0f} %",
                f"{r.carried_rps:,.4g}",
                f"{r.without_rps:,.4g}",
                "-" if r.less_share_rps is None else f"{r.less_share_rps:,.4g}",
            )[:columns]
            for r in model.replicas
        ),
        left=("  gpu-let", "type"),
    )


def _print_promise(model: ModelExplained, slo_text: Callable[[float], str]) -> None:
    cost = "" if model.cost_per_hour is None else f", {model.cost_per_hour:,.3g} $/h"
    million = model.cost_per_million
    each = "" if million is None else f", {million:,.3g} $ per million"
    say(f"{model.name}: {model.promised_rps:,.4g} of {model.rate_rps:,.4g} rps in {slo_text(model.slo_ms)}{cost}{each}")
    if model.most_rps is not None and model.least_slo_ms is not None:
        say(f"  holds up to {model.most_rps:,.4g} rps, or down to an SLO of {slo_text(model.least_slo_ms)}, by itself")
    elif model.enough_rps is None and model.enough_slo_ms is None:
        say(f"  {model.why_below or 'not served'}")
    else:
        say(f"  {model.why_below or 'below what is asked'}")
        ways = [] if model.enough_rps is None else [f"at {model.enough_rps:,.4g} rps"]
        ways += [] if model.enough_slo_ms is None else [f"with an SLO of {slo_text(model.enough_slo_ms)}"]
        say(f"  would be in time {' or '.join(ways)}")
