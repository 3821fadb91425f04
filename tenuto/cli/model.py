"""`tenuto model`: add, remove and update models of a running deployment; the controller finds them their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import yaml

from tenuto.cli.common import json_option, printed_as_json, say
from tenuto.cli.deploying import address_option, operations
from tenuto.cli.tables import print_table
from tenuto.errors import InvalidInputError, refused


@click.group("model", short_help="Add, remove and update models of a running deployment.")
def command() -> None:
    """Change the workload of a deployment that has a controller.

    Example: tenuto model add '{name: resnet50, rate_rps: 100, slo_ms: 50}'
    """


def _entry(text: str) -> dict[str, Any]:
    """Read a model's entry, as in a workload file, from a file or from the argument itself."""
    path = Path(text)
    raw = path.read_text(encoding="utf-8") if len(text) < 256 and path.is_file() else text
    try:
        entry = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise InvalidInputError(f"MODEL: {error}. Write it as in a workload file.") from error
    if not isinstance(entry, dict):
        cure = "Write for example '{name: resnet50, rate_rps: 100, slo_ms: 50}', or name a file with that."
        raise refused("MODEL", text, "is neither a file nor a model's entry", cure)
    return entry


@command.command("list", short_help="List the models of the workload.")
@address_option
@json_option
def listing(address: str | None) -> None:
    """List the entries of the workload.

    Example: tenuto model list
    """
    with operations(address) as running:
        entries: list[dict[str, Any]] = running.controller.models()
    if printed_as_json({"models": entries}):
        return
    print_table(
        ("model", "declared rps", "SLO ms"),
        ((entry["name"], f"{entry['rate_rps']:g}", f"{entry['slo_ms']:g}") for entry in entries),
    )


@command.command("add", short_help="Serve one more model.")
@click.argument("entry", metavar="MODEL")
@address_option
def add(entry: str, address: str | None) -> None:
    """Add MODEL, an entry of a workload file or a file with one.

    Example: tenuto model add '{name: resnet50, rate_rps: 100, slo_ms: 50}'
    """
    with operations(address) as running:
        running.controller.set_model(_entry(entry), add=True)
    say("added; `tenuto control log` says when it is served")


@command.command("update", short_help="Change a model's rate, SLO, weight or source.")
@click.argument("entry", metavar="MODEL")
@address_option
def update(entry: str, address: str | None) -> None:
    """Replace the entry of a model by MODEL.

    Example: tenuto model update '{name: resnet50, rate_rps: 300, slo_ms: 50}'
    """
    with operations(address) as running:
        running.controller.set_model(_entry(entry), add=False)
    say("updated; `tenuto control log` says what it changes")


@command.command("remove", short_help="Stop serving a model.")
@click.argument("name")
@address_option
def remove(name: str, address: str | None) -> None:
    """Remove the model NAME.

    Example: tenuto model remove resnet50
    """
    with operations(address) as running:
        running.controller.remove_model(name)
    say("removed; `tenuto control log` says when its gpu-lets are free")
