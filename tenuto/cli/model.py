"""`tenuto model`: add, remove and update models of a running deployment, and try versions of them; the controller finds
them their place."""

from __future__ import annotations

from collections.abc import Mapping
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
        entries: list[dict[str, Any]] = running.ask(lambda controller: controller.models())
    if printed_as_json({"models": entries}):
        return
    print_table(
        ("model", "share", "declared rps", "SLO ms"),
        ((e["name"], _part(e), f"{e['rate_rps']:g}", _slo(e)) for e in entries),
    )


def _slo(entry: Mapping[str, Any]) -> str:
    slo = entry.get("slo")
    return f"{entry['slo_ms']:g}" if slo is None else f"{slo['ttft_ms']:g}, {slo['tpot_ms']:g} a token"


def _part(entry: Mapping[str, Any]) -> str:
    """Return in words which requests a version gets; for the main version, which takes the rest, nothing."""
    share = f"{entry['share_pct']:g} %" if "share_pct" in entry else ""
    return f"copies of {share or 'all'}" if entry.get("shadow") else share


@command.command("add", short_help="Serve one more model.")
@click.argument("entry", metavar="MODEL")
@address_option
def add(entry: str, address: str | None) -> None:
    """Add MODEL, an entry of a workload file or a file with one.

    Example: tenuto model add '{name: resnet50, rate_rps: 100, slo_ms: 50}'
    """
    spec = _entry(entry)
    with operations(address) as running:
        running.ask(lambda controller: controller.set_model(spec, add=True))
    say("added; `tenuto control log` says when it is served")


@command.command("update", short_help="Change a model's rate, SLO, weight or source.")
@click.argument("entry", metavar="MODEL")
@address_option
def update(entry: str, address: str | None) -> None:
    """Replace the entry of a model by MODEL.

    Example: tenuto model update '{name: resnet50, rate_rps: 300, slo_ms: 50}'
    """
    spec = _entry(entry)
    with operations(address) as running:
        running.ask(lambda controller: controller.set_model(spec, add=False))
    say("updated; `tenuto control log` says what it changes")


@command.command("remove", short_help="Stop serving a model.")
@click.argument("name")
@address_option
def remove(name: str, address: str | None) -> None:
    """Remove the model NAME.

    Example: tenuto model remove resnet50
    """
    with operations(address) as running:
        running.ask(lambda controller: controller.remove_model(name))
    say("removed; `tenuto control log` says when its gpu-lets are free")


@command.command("canary", short_help="Send a version some of a model's requests, or copies.")
@click.argument("name")
@click.argument("version")
@click.option(
    "--share", type=float, metavar="PCT", help="Percentage of the requests that name no version.  [--shadow: 100]"
)
@click.option("--shadow", is_flag=True, help="Send it copies of requests; its answers go nowhere.")
@click.option("--entry", metavar="ENTRY", help="Keys in which it differs, as in a workload file; or a file with them.")
@address_option
def canary(name: str, version: str, share: float | None, shadow: bool, entry: str | None, address: str | None) -> None:
    """Send VERSION of the model NAME a share of the requests that name no version.

    A new version gets its gpu-lets first; they start beside what serves. All keys that ENTRY does not have are those of
    the main version, which takes the rest of the requests. When the new version loses more requests than the main
    version, the controller takes it back.

    Example: tenuto model canary resnet50 2 --share 5 --entry '{weights_path: /models/resnet50-2.safetensors}'
    """
    if share is None and not shadow:
        raise refused("--share", None, "is missing", "Say which percentage of the requests it gets, or --shadow.")
    terms = {**({"shadow": True} if shadow else {}), **({} if share is None else {"share_pct": share})}
    given = {} if entry is None else _entry(entry)
    with operations(address) as running:
        told = running.ask(lambda controller: controller.set_version(name, version, terms, given))
    say(f"{told['name']} is to have {_part(told)}; `tenuto control log` says when it has")


@command.command("promote", short_help="Send a version all requests, in place of the one before.")
@click.argument("name")
@click.argument("version")
@address_option
def promote(name: str, version: str, address: str | None) -> None:
    """Make VERSION the main version of the model NAME; the version before ends.

    The version before serves until the new one has the gpu-lets that it needs. `tenuto rollback` goes back.

    Example: tenuto model promote resnet50 2
    """
    with operations(address) as running:
        running.ask(lambda controller: controller.promote(name, version))
    say("promoted; `tenuto control log` says when it has all requests")


@command.command("take-back", short_help="Send a version nothing more.")
@click.argument("name")
@click.argument("version")
@address_option
def take_back(name: str, version: str, address: str | None) -> None:
    """Send VERSION of the model NAME nothing from now on, and end it.

    Example: tenuto model take-back resnet50 2
    """
    with operations(address) as running:
        running.ask(lambda controller: controller.take_back(name, version))
    say("taken back; `tenuto control log` says when its gpu-lets are free")
