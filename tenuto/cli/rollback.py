"""`tenuto rollback`: go back to a plan that ran before."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json, tell
from tenuto.cli.deploying import address_option, agrees_to_losses, operations, yes_option


@click.command("rollback", short_help="Go back to a plan that ran before; new gpu-lets start before old ones end.")
@click.argument("number", type=int, required=False, metavar="[VERSION]")
@yes_option
@address_option
@json_option
def command(number: int | None, yes: bool, address: str | None) -> int:
    """Go back to VERSION; by default, to the last version with another plan than the one that runs.

    Settings that only a new start can change, such as ports, stay as they are; the command names those that VERSION had
    otherwise.

    Example: tenuto rollback
    """
    with operations(address) as running:
        version, reached = running.rollback(number, agrees=agrees_to_losses(yes=yes))
    if not printed_as_json({"reached": reached, "version": version.number}):
        again = f"the plan of version {version.number} runs again"
        tell(again if reached else "it could not be reached; nothing changed")
    return 0 if reached else 1
