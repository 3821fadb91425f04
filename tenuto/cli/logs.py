"""`tenuto logs`: show the logs of the processes of the running deployment."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase

import click

from tenuto.cli.common import json_option, printed_as_json, say
from tenuto.cli.deploying import address_option, operations
from tenuto.errors import one_of, refused
from tenuto.placement import Plan

_LOOK_S = 1.0  # pace: time between two looks


@click.command("logs", short_help="Show the logs of gpu-lets, gateways, dispatchers and the controller.")
@click.argument("names", nargs=-1, metavar="[MODEL|PROCESS]…")
@click.option(
    "--last", default=20, type=click.IntRange(min=0), metavar="N", help="Show the last N lines of each process."
)
@click.option(
    "-f", "--follow", is_flag=True, help="Then show new lines until Ctrl-C, also of processes that start later."
)
@address_option
@json_option
def command(names: tuple[str, ...], last: int, follow: bool, address: str | None) -> None:
    """Show the last log lines of all processes of the running deployment, on all nodes, or only of the named ones.

    Name processes by their kind (`gateway`, `dispatcher`, `gpulet`, `control`), or a gpu-let by its id in `tenuto
    status` (`n0/0/a`). A MODEL stands for the gpu-lets that host it. Each line says which process wrote it.

    Example: tenuto logs resnet50 gateway --follow
    """
    from tenuto.deployments.serve.process_logs import LogReader, process_logs

    reader = LogReader(last)
    with operations(address) as running:
        applications = _applications(names, running.running().plan)
        while True:
            logs = [
                log for log in process_logs() if not names or any(fnmatchcase(log.application, a) for a in applications)
            ]
            lines = list(reader.read(logs))
            if not follow and printed_as_json({"lines": lines}):
                return
            for line in lines:
                say(line)
            if not follow:
                return
            time.sleep(_LOOK_S)


def _applications(names: tuple[str, ...], plan: Plan) -> list[str]:
    """Return patterns for the Serve applications that the names stand for.

    Raises:
        InvalidInputError: a name is neither a process nor a model.
    """
    from tenuto.deployments.serve.config import (
        CONTROL_APPLICATION,
        DISPATCHER_PREFIX,
        ENTRY_APPLICATION,
        GPULET_PREFIX,
        application_name,
    )

    known = {
        "gateway": [ENTRY_APPLICATION],
        "dispatcher": [DISPATCHER_PREFIX + "*"],
        "gpulet": [GPULET_PREFIX + "*"],
        "control": [CONTROL_APPLICATION],
        **{gpulet.id: [application_name(gpulet.id)] for gpulet in plan.gpulets},
        **{spec.name: [application_name(host.id) for host in plan.hosts_of(spec.name)] for spec in plan.models},
    }
    for name in names:
        if name not in known:
            raise refused("PROCESS", name, "is neither a process nor a model of the deployment", one_of(name, known))
    return [application for name in names for application in known[name]]
