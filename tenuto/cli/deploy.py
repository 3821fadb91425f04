"""`tenuto deploy`: run a plan on a Ray cluster in place of the plan before, without losing a request."""

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
    "deploy", cls=GroupedVerb, short_help="Run a plan on a Ray cluster; new gpu-lets start before old ones end."
)
@serving_arguments
@click.option("--why", default="", show_default="PLAN", metavar="TEXT", help="Reason, which the history keeps.")
@click.option("--replace", is_flag=True, help="First end everything that runs, also foreign Serve applications.")
@yes_option
@address_option
@json_option
def command(arguments: ServingArguments, why: str, replace: bool, yes: bool, address: str | None) -> int:
    """Deploy PLAN on a running Ray cluster, where it runs on when this command ends.

    When a plan runs already, new gpu-lets start beside the old ones as far as there is room; they take over, and then
    the old ones end. If new gpu-lets do not become ready, they are removed again. A setting without an option here
    stays as it runs; when nothing runs yet, it is as PLAN says, else the default below. When PLAN no longer serves a
    model that is served now, --yes is needed, or the command asks. Exit code 1: the plan before runs again.

    Example: tenuto deploy plan.yaml --emulate
    """
    deployment = arguments.deployment()
    plan = deployment.plan
    ground = arguments.ground(plan)
    with operations(address) as running:
        reached = running.deploy(
            deployment,
            why or arguments.plan_file,
            ground=ground,
            replace=replace,
            unchanged=arguments.left_open(),
            agrees=agrees_to_losses(yes=yes),
        )
        version, url = running.history.latest(), running.base_url
    number = version.number if version is not None else None
    if not printed_as_json({"reached": reached, "version": number, "url": url}) and reached:
        at = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
        tell(f"version {number} runs at {url}; see `tenuto status{at}`, end it with `tenuto delete`")
    return 0 if reached else 1
