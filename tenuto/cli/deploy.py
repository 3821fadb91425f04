"""`tenuto deploy`: make a plan the one that runs on a Ray cluster, without losing a request of the one before."""

from __future__ import annotations

import click

from tenuto.cli.common import GroupedVerb, json_option, printed_as_json, tell
from tenuto.cli.deploying import (
    ServingArguments,
    address_option,
    agrees_to_losses,
    operations,
    serving_arguments,
    yes_option,
)


@click.command(
    "deploy", cls=GroupedVerb, short_help="Make a plan the one that runs on a Ray cluster, make before break."
)
@serving_arguments
@click.option("--why", default="", show_default="PLAN", metavar="TEXT", help="What for; kept in the history.")
@click.option("--replace", is_flag=True, help="Begin anew: end what runs first, foreign Serve applications included.")
@yes_option
@address_option
@json_option
def command(asked: ServingArguments, why: str, replace: bool, yes: bool, address: str | None) -> int:
    """Deploy PLAN on a running Ray cluster; it stays when this command ends.

    Where a plan runs already, new gpu-lets start beside the old ones, as far as there is room, take over, and the old
    ones end. New ones that do not become ready are taken back. What no option says stays as it runs; where nothing
    runs, it is as PLAN says, else the default below. A plan that serves a model no more is deployed with --yes, or
    after asking. Exit code 1: the plan before runs again.

    Example: tenuto deploy plan.yaml --emulate
    """
    wanted = asked.deployment()
    plan = wanted.plan
    ground = asked.ground(plan)
    with operations(address) as running:
        reached = running.deploy(
            wanted,
            why or asked.plan_file,
            ground=ground,
            replace=replace,
            kept=asked.left_open(),
            agrees=agrees_to_losses(yes=yes),
        )
        version, url = running.history.latest(), running.base_url
    number = version.number if version is not None else None
    if not printed_as_json({"reached": reached, "version": number, "url": url}) and reached:
        at = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
        tell(f"version {number} runs at {url}; see `tenuto status{at}`, end it with `tenuto delete`")
    return 0 if reached else 1
