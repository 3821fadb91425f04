"""`tenuto undrain`: a drained node may hold gpu-lets again."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json
from tenuto.cli.deploying import address_option, operations
from tenuto.errors import refused


@click.command("undrain", short_help="Let a drained node hold gpu-lets again.")
@click.argument("nodes", nargs=-1, required=True, metavar="NODE…")
@address_option
@json_option
def command(nodes: tuple[str, ...], address: str | None) -> int:
    """Let what `tenuto drain` emptied be used again: by the controller, or by the next plan.

    Nothing moves at once. Exit code 1: it could not be reached.

    Example: tenuto undrain n1
    """
    with operations(address) as running:
        found = running.running()
        drained = found.plan.drained
        for name in nodes:
            if name not in drained:
                raise refused("node", name, "is not drained", f"Drained: {', '.join(drained) or 'nothing'}.")
        plan = found.plan.model_copy(update={"drained": tuple(name for name in drained if name not in nodes)})
        reached = running.deploy(found.near(plan), f"undrain {', '.join(nodes)}", by="undrain")
    printed_as_json({"reached": reached, "drained": plan.drained})
    return 0 if reached else 1
