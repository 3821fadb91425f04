"""`tenuto undrain`: let a drained node hold gpu-lets again."""

from __future__ import annotations

import click

from tenuto.cli.common import printed_as_json
from tenuto.cli.deploying import operations
from tenuto.cli.drain import draining_arguments, go_without
from tenuto.errors import refused


@click.command("undrain", short_help="Let a drained node hold gpu-lets again.")
@draining_arguments
def command(
    nodes: tuple[str, ...], profile_names: tuple[str, ...], policy: str | None, yes: bool, address: str | None
) -> int:
    """Let a node, rack or GPU that `tenuto drain` emptied be used again.

    Models that had too little room get gpu-lets there at once. Everything else stays until the controller or the next
    plan uses the node. Exit code 1: the new plan could not be reached.

    Example: tenuto undrain n1
    """
    with operations(address) as running:
        deployment = running.await_settled()
        drained = deployment.plan.drained
        for name in nodes:
            if name not in drained:
                raise refused("node", name, "is not drained", f"Drained: {', '.join(drained) or 'nothing'}.")
        left = tuple(name for name in drained if name not in nodes)
        why = f"undrain {', '.join(nodes)}"
        reached = go_without(running, deployment, left, profile_names, policy, why, yes=yes)
    printed_as_json({"reached": reached, "drained": left})
    return 0 if reached else 1
