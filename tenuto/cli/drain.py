"""`tenuto drain`: move everything off a node before it is maintained, make before break."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.common import ClusterArguments, json_option, printed_as_json, profiles_option, tell, with_options
from tenuto.cli.deploying import address_option, agree, operations, yes_option
from tenuto.placement.plan import PolicyUsed

if TYPE_CHECKING:
    from tenuto.deployments.control.change_preview import ChangePreview
    from tenuto.deployments.control.operations import Operations
    from tenuto.deployments.serve.deployment import Deployment


def draining_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say on which GPUs, with which profiles and by which policy gpu-lets may move."""
    return with_options(
        command,
        click.argument("nodes", nargs=-1, required=True, metavar="NODE…"),
        profiles_option("the controller's, else the shipped profiles of the GPU types"),
        click.option(
            "--policy", metavar="NAME", help="Policy for the new plan. Default: the controller's, else the plan's."
        ),
        yes_option,
        address_option,
        json_option,
    )


def go_without(
    running: Operations,
    deployment: Deployment,
    places: tuple[str, ...],
    profile_names: tuple[str, ...],
    policy: str | None,
    why: str,
    *,
    yes: bool,
) -> bool:
    """Make and deploy a plan that leaves some places empty. Print what moves; ask first if models lose requests."""
    from tenuto.deployments.control.settings import ControlSettings
    from tenuto.placement.planner import plan_without_places
    from tenuto.placement.planner.minimal_change import less_by

    profiles, gpus = running.planner_inputs()
    if profile_names or not list(profiles):
        profiles, _ = ClusterArguments(profile_names=profile_names).ground(deployment.plan)
    used = (
        ControlSettings.model_validate(deployment.control or {}).policy if policy is None else PolicyUsed(name=policy)
    )
    lost = running.lost_gpus((*deployment.plan.gpus, *gpus))
    plan = plan_without_places(deployment.plan, places, profiles, gpus, lost=lost, used=used)

    def ask(preview: ChangePreview) -> None:
        for change in preview.changes:
            if change.kind not in ("unchanged", "route-only"):
                tell(f"{change.gpulet}: {change.kind}: {'; '.join(change.reasons)}")
        # Gpu-lets on GPUs that are lost for other reasons do not count: they are lost already.
        remaining = [gpulet for gpulet in deployment.plan.gpulets if not {*gpulet.gpus} & {*lost}]
        less = less_by(deployment.plan.model_copy(update={"gpulets": tuple(remaining)}), plan)
        losses = [f"{name} keeps {left:,.4g} of {rate:,.4g} rps" for name, (rate, left) in less.items()]
        interrupted = dict.fromkeys(name for step in preview.steps for name in step.unserved)
        losses += [f"{name} is not served until its new gpu-lets are ready" for name in interrupted]
        if losses:
            agree(f"too little room elsewhere: {', '.join(losses)}", yes=yes)

    return running.deploy(deployment.near(plan), why, by=why.partition(" ")[0], agrees=ask)


@click.command("drain", short_help="Move all gpu-lets off a node; new ones start before old ones end.")
@draining_arguments
def command(
    nodes: tuple[str, ...], profile_names: tuple[str, ...], policy: str | None, yes: bool, address: str | None
) -> int:
    """Move all gpu-lets off NODE, which may also be a rack or a GPU.

    They start elsewhere before they end on NODE; all other gpu-lets stay. The command prints what moves, and asks if a
    model loses requests. It ends when no gpu-let is left on NODE. The controller plans nothing there until `tenuto
    undrain NODE`. Exit code 1: the new plan could not be reached, and the plan before runs again.

    Example: tenuto drain n1
    """
    with operations(address) as running:
        deployment = running.await_settled()
        before = deployment.plan.drained
        places = tuple(dict.fromkeys((*before, *nodes)))
        for name in (name for name in nodes if name in before):
            tell(f"{name} is drained already")
        why = f"drain {', '.join(name for name in places if name not in before)}"
        reached = places == before or go_without(running, deployment, places, profile_names, policy, why, yes=yes)
        if reached:
            also = running.await_empty(deployment.plan, places)
            stays = f"; until its Ray ends, there stay: {', '.join(also)}" if also else ""
            tell(f"no gpu-let is left on {', '.join(places)}{stays}")
    printed_as_json({"reached": reached, "drained": places})
    return 0 if reached else 1
