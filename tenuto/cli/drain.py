"""`tenuto drain`: move everything off a node before it is maintained, make before break."""

from __future__ import annotations

import click

from tenuto.cli.common import ClusterArguments, json_option, printed_as_json, tell
from tenuto.cli.deploying import address_option, agrees_to_losses, operations, yes_option
from tenuto.placement.shown.table import why_below, why_unserved


@click.command("drain", short_help="Move everything off a node, make before break.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@click.option(
    "--profiles",
    "profile_names",
    multiple=True,
    metavar="FILE|NAME",
    help="What models cost. Default: what the controller plans with, else the profiles of the GPU types.",
)
@yes_option
@address_option
@json_option
def command(nodes: tuple[str, ...], profile_names: tuple[str, ...], yes: bool, address: str | None) -> int:
    """Let NODE, a rack or a GPU, hold nothing: what is on it starts elsewhere first, and all else stays.

    The controller plans nothing onto it until `tenuto undrain NODE`. Exit code 1: it could not be reached; the plan
    before runs again.

    Example: tenuto drain n1
    """
    from tenuto.deployments.control.near import planned_without

    with operations(address) as running:
        found = running.running()
        places = tuple(dict.fromkeys((*found.plan.drained, *nodes)))
        profiles, gpus = running.ground()
        if profile_names or not list(profiles):
            profiles, _ = ClusterArguments(profile_names=profile_names).ground(found.plan)
        plan = planned_without(found.plan, places, profiles, gpus)
        for name, why in (*why_unserved(plan), *why_below(plan)):
            tell(f"{name}: {why}")
        tell(plan.notes[-1])
        why = f"drain {', '.join(nodes)}"
        reached = running.deploy(found.near(plan), why, by="drain", agrees=agrees_to_losses(yes=yes))
    printed_as_json({"reached": reached, "drained": places})
    return 0 if reached else 1
