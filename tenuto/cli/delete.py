"""`tenuto delete`: drain and remove what is deployed."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json, tell
from tenuto.cli.deploying import address_option, operations


@click.command("delete", short_help="Drain and remove what is deployed on a cluster.")
@address_option
@json_option
def command(address: str | None) -> None:
    """Let requests in flight end, and remove every application of Tenuto and the history; Ray and others stay.

    Example: tenuto delete
    """
    with operations(address) as running:
        gone = running.delete()
    if printed_as_json({"removed": gone}):
        return
    tell(f"removed {len(gone)} applications" if gone else "nothing was deployed")
