"""`tenuto delete`: drain and remove what is deployed."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json, tell
from tenuto.cli.deploying import address_option, agree, operations, yes_option


@click.command("delete", short_help="Drain and remove what is deployed on a cluster.")
@yes_option
@address_option
@json_option
def command(yes: bool, address: str | None) -> None:
    """Let open requests end, and remove all applications of Tenuto.

    Ray, other applications and the history stay. Without --address and --yes, this command prints what it found and
    asks.

    Example: tenuto delete --yes
    """
    with operations(address) as running:
        what = running.describe()
        if what:
            agree(f"{what} is drained and removed", yes=yes or address is not None)
        gone = running.delete()
    if printed_as_json({"removed": gone}):
        return
    tell(f"removed {len(gone)} applications" if gone else "nothing was deployed")
