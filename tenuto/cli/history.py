"""`tenuto history`: list the plans that ran, when and why."""

from __future__ import annotations

import time

import click

from tenuto.cli.common import json_option, output_option, printed_as_json, write_file
from tenuto.cli.deploying import address_option, operations
from tenuto.cli.tables import print_table
from tenuto.errors import EnvironmentFaultError


@click.command("history", short_help="List the plans that ran on a cluster.")
@click.option("--version", "number", type=int, metavar="N", help="With -o: the version to write; default: the last.")
@output_option("Write the plan of a version.")
@address_option
@json_option
def command(number: int | None, output: str | None, address: str | None) -> None:
    """List every version of the deployment: when it ran, which command made it, and why.

    Example: tenuto history
    """
    with operations(address) as running:
        versions = running.history.all()
        chosen = running.history.get(number) if number is not None else versions[-1] if versions else None
    if output is not None and chosen is not None:
        write_file(output, chosen.deployment.plan.dump())
        return
    listed = [
        {"number": v.number, "at_s": v.at_s, "by": v.by, "why": v.why, "plan": v.deployment.plan.to_data()}
        for v in versions
    ]
    if printed_as_json({"versions": listed}):
        return
    if chosen is None:
        raise EnvironmentFaultError("nothing was deployed on this cluster yet. Use `tenuto deploy PLAN`.")
    print_table(
        ("version", "at", "by", "gpu-lets", "GPUs", "why"),
        (
            (
                str(v.number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v.at_s)),
                v.by,
                str(len(v.deployment.plan.gpulets)),
                str(len(v.deployment.plan.used_gpus)),
                v.why,
            )
            for v in versions
        ),
        left=("at", "by", "why"),
    )
