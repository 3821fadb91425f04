"""`tenuto control`: pause, resume and query the controller of a running deployment."""

from __future__ import annotations

import time

import click

from tenuto.cli.common import json_option, output_option, printed_as_json, say, write_file
from tenuto.cli.deploying import address_option, agrees_to_losses, asked_of_controller, operations, yes_option
from tenuto.cli.tables import number, print_table
from tenuto.placement import Plan


@click.group("control", short_help="Pause, resume and query the controller of a running deployment.")
def command() -> None:
    """Operate the controller, which plans and acts by itself only when `tenuto deploy --control` says so.

    Example: tenuto control log
    """


@command.command("pause", short_help="Let the controller change nothing until it is resumed.")
@address_option
def pause(address: str | None) -> None:
    """Let the controller watch but change nothing. A change that is under way is finished.

    Example: tenuto control pause
    """
    asked_of_controller(address, lambda controller: controller.pause(paused=True))
    say("paused")


@command.command("resume", short_help="Change plans again.")
@address_option
def resume(address: str | None) -> None:
    """Let the controller change plans again.

    Example: tenuto control resume
    """
    asked_of_controller(address, lambda controller: controller.pause(paused=False))
    say("resumed")


@command.command("status", short_help="Show the controller's measured rates, plan and present change.")
@address_option
@json_option
def status(address: str | None) -> None:
    """Show the measured rates, the rates of the present plan, and the change that is under way.

    Example: tenuto control status
    """
    state = asked_of_controller(address, lambda controller: controller.state())
    if printed_as_json(state):
        return
    print_table(
        ("model", "measured rps", "planned for rps"),
        ((name, number(rate), number(state.planned_for_rps.get(name))) for name, rate in state.rates_rps.items()),
    )
    doing = "changes nothing: paused" if state.paused else "no change under way"
    if state.change is not None:
        doing = f"a change for {time.time() - state.change.begun_at_s:.0f} s: {state.change.why}"
    if state.cutting:
        doing += f"; to be cut yet: {', '.join(state.cutting)}"
    say(f"mode {state.mode}, policy {state.policy}; {doing}")
    for note in state.gpu_notes:
        say(note)


@command.command("plan", short_help="Show or write the plan that the controller advises.")
@output_option("Write the plan here.")
@address_option
@json_option
def plan(output: str | None, address: str | None) -> None:
    """Print what the controller would change, on how many GPUs and at what price, and write its plan.

    Example: tenuto control plan -o advised.yaml
    """
    advice = asked_of_controller(address, lambda controller: controller.advice())
    if output is not None:
        write_file(output, advice.plan.dump())
    if not printed_as_json({"why": advice.text, "plan": advice.plan.to_data()}):
        say(advice.text)


@command.command("apply", short_help="Carry out the plan that the controller advises.")
@click.argument("plan_file", metavar="[PLAN]", required=False)
@yes_option
@address_option
def apply(plan_file: str | None, yes: bool, address: str | None) -> int:
    """Change to the plan that the controller advises, or to PLAN, which it advised before. Declared rates stay.

    Exit code 1: the plan could not be reached, and the plan before runs again.

    Example: tenuto control apply advised.yaml
    """
    from tenuto.deployments.control.interface import AdvisedPlan

    advised = None if plan_file is None else Plan.load(plan_file)
    with operations(address) as running:
        advice = (
            running.controller().advice() if advised is None else AdvisedPlan(advised, f"advised before: {plan_file}")
        )
        deployment = running.running()
        reached = running.deploy(
            deployment.near(advice.plan), advice.text, by="apply", agrees=agrees_to_losses(yes=yes)
        )
    return 0 if reached else 1


@command.command("log", short_help="Print what the controller noticed, decided and did.")
@click.option("--limit", default=50, type=click.IntRange(1, 500), help="Entries, the newest.")
@address_option
@json_option
def log(limit: int, address: str | None) -> None:
    """Print the log, oldest first.

    Example: tenuto control log --limit 20
    """
    lines = asked_of_controller(address, lambda controller: controller.log(limit))
    if printed_as_json({"log": lines}):
        return
    for line in lines:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.at_s))
        say(f"{at}  {line.kind}: {line.text}")
