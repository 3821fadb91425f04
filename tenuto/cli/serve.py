"""`tenuto serve`: bring a plan up, keep it up, drain on Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import click

from tenuto.cli.common import tell
from tenuto.cli.deploying import ServingArguments, serving_arguments

if TYPE_CHECKING:
    from tenuto.deployments.control.operations import Ground
    from tenuto.deployments.serve.deployment import Deployment

_LOOK_S = 5.0  # between looks whether another command has deleted what runs


@click.command(name="serve", short_help="Start a plan on Ray Serve and wait until it is healthy; Ctrl-C drains.")
@serving_arguments
@click.option("--replace", is_flag=True, help="End first what runs there, foreign Serve applications included.")
@click.option(
    "--address", metavar="ADDRESS", help="Ray cluster to use; default: a running one, else a local Ray is started."
)
def command(asked: ServingArguments, replace: bool, address: str | None) -> None:
    """Start a plan on Ray Serve, wait until it is healthy, and serve until Ctrl-C.

    Without a running Ray cluster a local one is started, and stopped at the end. Another terminal can operate it:
    `tenuto deploy`, `diff`, `history`, `rollback`, `control`.

    Example: tenuto serve plan.yaml --emulate
    """
    deployment = asked.deployment()
    ground = asked.ground(deployment.read_plan())
    stop = threading.Event()
    _stop_on_signals(stop)
    _run(deployment, ground, asked.plan_file, stop, address, replace=replace)


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())


def _run(
    deployment: Deployment, ground: Ground | None, what: str, stop: threading.Event, address: str | None, *,
    replace: bool,
) -> None:  # fmt: skip
    from tenuto.deployments.control.operations import begin, end_all, is_deployed, refuse_running
    from tenuto.deployments.serve.endpoint import get_json
    from tenuto.deployments.serve.launcher import Launcher

    gpus = deployment.read_plan().gpus
    with Launcher(progress=tell) as launcher:
        launcher.connect(num_gpus=sum(gpu.type != "cpu" for gpu in gpus), address=address)
        _stop_on_signals(stop)  # `ray.init` puts a handler of its own for SIGTERM, which ends the process at once
        if not stop.is_set():
            if replace:
                end_all()
            else:
                refuse_running(tell)
            begin(launcher, deployment, what, "serve", ground, ends_with_caller=True)
            status = get_json(f"{launcher.operator_url}/status")
            for gpulet in status["gpulets"]:
                models = ", ".join(f"{name} (batch {size})" for name, size in gpulet["models"].items())
                tell(f"{gpulet['id']} on {gpulet['device']}, pid {gpulet['pid']}: {models}")
            tell(
                f"serving at {launcher.base_url}, documentation at {launcher.base_url}/docs, live page at "
                f"{launcher.operator_url}. Ctrl-C drains."
            )
            looked_s = time.monotonic()
            while not stop.wait(0.5):
                if time.monotonic() - looked_s > _LOOK_S:
                    looked_s = time.monotonic()
                    if not is_deployed():
                        tell("deleted by another command")
                        break
        tell("draining")
    tell("stopped")
