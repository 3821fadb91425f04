"""`tenuto diff`: what going from one plan to another costs, gpu-let by gpu-let, and in which steps it is done."""

from __future__ import annotations

from typing import Any

import click

from tenuto.cli.common import json_option, printed_as_json, say
from tenuto.cli.deploying import address_option, operations
from tenuto.cli.tables import print_table
from tenuto.placement import Plan


@click.command("diff", short_help="Show what going over to a plan costs, gpu-let by gpu-let.")
@click.argument("plan_file", metavar="PLAN")
@click.option("--from", "from_file", metavar="FILE", help="Plan to go from; default: the one that runs.")
@address_option
@json_option
def command(plan_file: str, from_file: str | None, address: str | None) -> None:
    """Show what `tenuto deploy PLAN` would do: which gpu-lets keep their process, change in place, start and stop.

    Example: tenuto diff new.yaml --from old.yaml
    """
    from tenuto.deployments.control.fit import gpus_of, renamed
    from tenuto.deployments.control.worth import Durations, stages
    from tenuto.deployments.serve.diff import diff

    wanted = Plan.load(plan_file)
    if from_file is not None:
        running = Plan.load(from_file)
    else:
        with operations(address) as found:
            running = found.running().plan
    target = renamed(wanted, running)
    rates = {spec.name: spec.rate_rps for spec in wanted.models}
    way = stages(running, target, gpus_of(running, target), rates, Durations(1.0, 1.0))
    changes = diff(running, target).changes
    there = frozenset(gpulet.id for gpulet in running.gpulets)  # they serve while they load
    without = [
        [
            spec.name
            for spec in plan.models
            if running.hosts_of(spec.name) and not any(g.id in ready | there for g in plan.hosts_of(spec.name))
        ]
        for plan, ready, _ in way
    ]
    data: dict[str, Any] = {
        "changes": [{"gpulet": c.gpulet, "kind": c.kind, "reasons": list(c.reasons)} for c in changes],
        "steps": [
            {
                "gpulets": sorted(g.id for g in plan.gpulets),
                "starting": sorted({g.id for g in plan.gpulets} - ready),
                "unserved": gone,
            }
            for (plan, ready, _), gone in zip(way, without, strict=True)
        ],
    }
    if printed_as_json(data):
        return
    print_table(
        ("gpu-let", "change", "why"),
        ((c.gpulet, c.kind, "; ".join(c.reasons) or "-") for c in changes),
        left=("change", "why"),
    )
    for number, step in enumerate(data["steps"], 1):
        starting = ", ".join(step["starting"]) or "nothing"
        loss = f"; unserved meanwhile: {', '.join(step['unserved'])}" if step["unserved"] else ""
        line = f"step {number} of {len(way)}: {starting} starts or loads{loss}"
        say(line)
    if not way:
        say("nothing changes")
