"""`tenuto serve`: bring a plan up, keep it up, drain on Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from tenuto.cli.common import GroupedVerb, tell
from tenuto.cli.deploying import ServingArguments, check_texts, given_options, keep_drained, serving_arguments
from tenuto.errors import EnvironmentFaultError, TenutoError

if TYPE_CHECKING:
    from tenuto.deployments.control.operations import Ground
    from tenuto.deployments.process.foreground import Orders
    from tenuto.deployments.serve.deployment import Deployment

_LOOK_S = 1.0  # pace: time between looks at what runs; a loss must be reported within 3 s
_ANSWER_S = 2.0  # limit: time for the answer to a status
_LOST_S = 30.0  # limit: a cluster that has not answered for this long counts as lost


@click.command(
    "serve", cls=GroupedVerb, short_help="Start a plan on Ray Serve and wait until it is healthy; Ctrl-C drains."
)
@serving_arguments
@click.option("--replace", is_flag=True, help="First end everything that runs there, also foreign Serve applications.")
@click.option(
    "--address", metavar="ADDRESS", help="Ray cluster to use. Default: RAY_ADDRESS, else a local Ray is started."
)
def command(arguments: ServingArguments, replace: bool, address: str | None) -> int:
    """Start a plan on Ray Serve, wait until it is healthy, and serve until Ctrl-C.

    A setting without an option here is as PLAN says, else the default below. Without a running Ray cluster, a local one
    is started, and stopped at the end. Operate the deployment from another terminal: `tenuto deploy`, `diff`,
    `history`, `rollback`, `control`. On SIGHUP the plan file is read again, and its plan takes over. A second Ctrl-C
    ends everything at once. Exit code 3: a part of Ray that it needs was lost.

    Example: tenuto serve plan.yaml --emulate
    """
    from tenuto.cli import exit_code
    from tenuto.deployments.process.foreground import run_in_front

    deployment = arguments.deployment()
    ground = arguments.ground(deployment.plan)

    def serve(orders: Orders) -> int:
        try:
            return exit_code(lambda: _serve(arguments, deployment, ground, orders, address, replace=replace))
        finally:
            sys.stderr.flush()

    sys.stderr.flush()  # otherwise both processes would write what is in the buffer
    return run_in_front(serve, tell)


def _serve(
    arguments: ServingArguments,
    deployment: Deployment,
    ground: Ground | None,
    orders: Orders,
    address: str | None,
    *,
    replace: bool,
) -> None:
    from tenuto.deployments.control.operations import begin, end_all, refuse_running
    from tenuto.deployments.process.foreground import Stopped, leave_signals_to_the_foreground
    from tenuto.deployments.process.ray_address import cluster_address
    from tenuto.deployments.serve.endpoint import get_told
    from tenuto.deployments.serve.launcher import Launcher
    from tenuto.deployments.wire.status import SystemStatus

    gpus = deployment.plan.gpus
    with Launcher(progress=tell) as launcher:
        try:
            launcher.connect(num_gpus=sum(gpu.type != "cpu" for gpu in gpus), address=address)
            leave_signals_to_the_foreground()
            orders.await_look()  # so that it knows Ray's processes, whichever of them dies
            if launcher.owns_ray:
                check_texts(deployment, is_here=True)
            else:
                orders.joined()
            if replace:
                end_all()
            else:
                refuse_running(tell)
            begin(
                launcher,
                deployment,
                arguments.plan_file,
                "serve",
                ground,
                ends_with_caller=True,
                progress=tell,
                sleep=orders.sleep,
            )
            for gpulet in get_told(f"{launcher.operator_url}/status", SystemStatus).gpulets:
                models = ", ".join(f"{name} (batch {size})" for name, size in gpulet.models.items())
                tell(f"{gpulet.id} on {gpulet.device}, pid {gpulet.pid}: {models}")
            grpc = f", gRPC at {deployment.host}:{deployment.grpc_port}" if deployment.grpc_port else ""
            tell(
                f"serving at {launcher.base_url}{grpc}, documentation at {launcher.base_url}/docs, live page at "
                f"{launcher.operator_url}, on the Ray at {cluster_address()}. Ctrl-C drains."
            )
            orders.serving()
            _keep(arguments, orders)
        except Stopped:
            pass
        except Exception:
            orders.await_look()  # when a process of Ray died, that is the cause
            raise
        finally:
            orders.ending()
        tell("draining")
    tell("stopped")


def _keep(arguments: ServingArguments, orders: Orders) -> None:
    """Serve until a stop is ordered, or until another command has deleted the deployment.

    Raises:
        EnvironmentFaultError: the cluster is lost.
        Stopped: a stop was ordered.
    """
    from tenuto.deployments.control.operations import is_deployed
    from tenuto.deployments.process.limits import within

    heard_at, is_silent = time.monotonic(), False
    while True:
        orders.sleep(_LOOK_S)
        if orders.take_reload():
            _reload(arguments, orders)
        try:
            if not within(_ANSWER_S, is_deployed):
                tell("deleted by another command")
                return
        except Exception as error:  # Ray and Serve raise many kinds
            silent_s = time.monotonic() - heard_at
            if silent_s > _LOST_S:
                raise EnvironmentFaultError(f"Ray has not answered for {silent_s:.0f} s; {error}") from error
            if not is_silent:
                tell("Ray or Serve does not answer; what runs goes on as far as it can")
            is_silent = True
            continue
        if is_silent:
            tell("Ray and Serve answer again")
        heard_at, is_silent = time.monotonic(), False


def read_again(arguments: ServingArguments, given: Collection[str]) -> tuple[Deployment, Ground | None]:
    """Return what the files say now, for arguments of which the `given` ones were typed; see `ServingArguments`."""
    with click.Context(command) as context:
        context.params = dict.fromkeys(given)
        for name in given:
            context.set_parameter_source(name, ParameterSource.COMMANDLINE)
        deployment = arguments.deployment()
        return deployment, arguments.ground(deployment.plan)


def _reload(arguments: ServingArguments, orders: Orders) -> None:
    """Read the files again and deploy what they say. If that fails, the present plan runs on."""
    from tenuto.deployments.control.operations import Operations
    from tenuto.deployments.process.apart import run_apart

    tell(f"reading {arguments.plan_file} again")
    try:
        deployment, ground = run_apart(read_again, arguments, given_options())
        with Operations(None, tell, sleep=orders.sleep) as running:
            reached = running.deploy(deployment, arguments.plan_file, by="reload", ground=ground, agrees=keep_drained)
    except TenutoError as error:
        tell(f"nothing was reloaded: {error}")
    else:
        tell(
            f"{arguments.plan_file} is served"
            if reached
            else "its plan could not be reached; the plan before runs again"
        )
