"""`tenuto control`: pause, resume and question the controller of a running deployment."""

from __future__ import annotations

import time

import click

from tenuto.cli.common import json_option, printed_as_json, say
from tenuto.cli.deploying import address_option, operations
from tenuto.cli.tables import number, print_table


@click.group("control", short_help="Pause, resume and question the controller of a running deployment.")
def command() -> None:
    """Operate the controller that `tenuto deploy --control` started.

    Example: tenuto control log
    """


@command.command("pause", short_help="Change nothing until resumed; a change under way is finished.")
@address_option
def pause(address: str | None) -> None:
    """Let the controller watch and change nothing.

    Example: tenuto control pause
    """
    with operations(address) as running:
        running.controller.pause(True)
    say("paused")


@command.command("resume", short_help="Change plans again.")
@address_option
def resume(address: str | None) -> None:
    """Let the controller change plans again.

    Example: tenuto control resume
    """
    with operations(address) as running:
        running.controller.pause(False)
    say("resumed")


@command.command("status", short_help="Show what the controller knows and does.")
@address_option
@json_option
def status(address: str | None) -> None:
    """Show measured rates, what is planned for, and the change under way.

    Example: tenuto control status
    """
    with operations(address) as running:
        state = running.controller.state()
    if printed_as_json(state):
        return
    print_table(
        ("model", "measured rps", "planned for rps"),
        ((name, number(rate), number(state.planned_for_rps.get(name))) for name, rate in state.rates_rps.items()),
    )
    doing = "changes nothing: paused" if state.paused else "no change under way"
    if state.change is not None:
        doing = f"a change for {time.time() - state.change.begun_at_s:.0f} s: {state.change.why}"
    say(f"mode {state.mode}, policy {state.policy}; {doing}")


@command.command("log", short_help="Print what the controller noticed, decided and did.")
@click.option("--limit", default=50, type=click.IntRange(1, 500), help="Entries, the newest.")
@address_option
@json_option
def log(limit: int, address: str | None) -> None:
    """Print the log, oldest first.

    Example: tenuto control log --limit 20
    """
    with operations(address) as running:
        lines = running.controller.log(limit)
    if printed_as_json({"log": lines}):
        return
    for line in lines:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.at_s))
        say(f"{at}  {line.kind}: {line.text}")
