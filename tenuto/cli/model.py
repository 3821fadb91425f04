"""`tenuto model`: add, remove and update models of a running deployment, and try versions of them; the controller finds
them their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.common import Number, json_option, notice, printed_as_json, say, tell
from tenuto.cli.deploying import address_option, asked_of_controller, operations
from tenuto.cli.tables import print_table
from tenuto.deployments.control.version_edits import Edits, promoted, with_models, with_version
from tenuto.documents import load_document, parse_document
from tenuto.errors import raise_if_any, refused
from tenuto.files import parse_yaml
from tenuto.placement import Cluster, Workload
from tenuto.placement.network_files import network_problems
from tenuto.placement.workload import ModelSpec

if TYPE_CHECKING:
    from tenuto.deployments.control.controller_client import ControllerClient
    from tenuto.deployments.control.operations import Operations
    from tenuto.deployments.control.version_edits import Edited

no_wait_option = click.option(
    "--no-wait", is_flag=True, help="Return at once; `tenuto control log` says when it is carried out."
)


@click.group("model", short_help="Add, remove and update models of a running deployment.")
def command() -> None:
    """Change the workload of a deployment whose controller plans (`tenuto deploy --control`).

    Example: tenuto model add '{name: resnet50, rate_rps: 100, slo_ms: 50}'
    """


def _entry(text: str) -> dict[str, Any]:
    """Read a model's entry, as in a workload file, from a file or from the argument itself."""
    path = Path(text)
    entry = load_document(path) if len(text) < 256 and path.is_file() else parse_yaml(text, "MODEL")
    if not isinstance(entry, dict):
        cure = "Write for example '{name: resnet50, rate_rps: 100, slo_ms: 50}', or name a file with that."
        raise refused("MODEL", text, "is neither a file nor a model's entry", cure)
    return entry


def _edited(
    address: str | None,
    make: Callable[[ControllerClient], Edited],
    done: str,
    *,
    no_wait: bool,
    edits: Callable[[Workload], Edits] | None = None,
) -> int:
    """Have the workload changed, say how that ended, and return the exit code. With `edits`, which returns the new
    entries, the networks' files are read before, as `tenuto plan` does."""
    with operations(address) as running:
        if edits is not None:
            _check_networks(running, edits)
        undone = running.edit(make, waits=not no_wait)
    if undone:
        tell(f"{undone}. See `tenuto control log`.")
    elif no_wait:
        say(f"to be {done}; `tenuto control log` says when it is")
    else:
        say(done)
    return 1 if undone else 0


def _check_networks(running: Operations, edits: Callable[[Workload], Edits]) -> None:
    """Raise `InvalidInputError` where the files of edited models speak against them; name those that were not read."""
    declared = running.controller().workload()
    changes = edits(declared)
    if all(spec is None or spec.source is None for spec in changes.values()):
        return
    specs = {**{spec.name: spec for spec in declared.models}, **changes}
    profiles, gpus = running.planner_inputs()
    problems, unread = network_problems(
        with_models(declared, [spec for spec in specs.values() if spec is not None]),
        Cluster.of(gpus),
        profiles,
        {name: "model" for name, spec in changes.items() if spec is not None},
    )
    for line in unread:
        notice(line)
    raise_if_any(problems)


@command.command("list", short_help="List the models of the workload.")
@address_option
@json_option
def listing(address: str | None) -> None:
    """List the entries of the workload.

    Example: tenuto model list
    """
    workload = asked_of_controller(address, lambda controller: controller.workload())
    entries = [spec.model_dump(mode="json", exclude_defaults=True) for spec in workload.models]
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


def _set(address: str | None, entry: dict[str, Any], *, add: bool, done: str, no_wait: bool) -> int:
    """Add a model or replace its entry, and return the exit code."""

    def edits(_: Workload) -> Edits:
        spec = parse_document(ModelSpec, entry, origin="model")
        return {spec.name: spec}

    return _edited(address, lambda control: control.set_model(entry, add=add), done, no_wait=no_wait, edits=edits)


@command.command("add", short_help="Serve one more model.")
@click.argument("entry", metavar="MODEL")
@no_wait_option
@address_option
def add(entry: str, no_wait: bool, address: str | None) -> int:
    """Add MODEL, an entry of a workload file or a file with one.

    It returns when the model is served. Exit code 1: it is not, and the last line says why.

    Example: tenuto model add '{name: resnet50, rate_rps: 100, slo_ms: 50}'
    """
    return _set(address, _entry(entry), add=True, done="added", no_wait=no_wait)


@command.command("update", short_help="Change a model's rate, SLO, weight or source.")
@click.argument("entry", metavar="MODEL")
@no_wait_option
@address_option
def update(entry: str, no_wait: bool, address: str | None) -> int:
    """Replace the entry of a model by MODEL.

    It returns when the model is served so. Exit code 1: it is not, and the last line says why.

    Example: tenuto model update '{name: resnet50, rate_rps: 300, slo_ms: 50}'
    """
    return _set(address, _entry(entry), add=False, done="updated", no_wait=no_wait)


@command.command("remove", short_help="Stop serving a model.")
@click.argument("name")
@no_wait_option
@address_option
def remove(name: str, no_wait: bool, address: str | None) -> int:
    """Remove the model NAME.

    It returns when its gpu-lets are free. Exit code 1: they are not, and the last line says why.

    Example: tenuto model remove resnet50
    """
    return _edited(address, lambda controller: controller.remove_model(name), "removed", no_wait=no_wait)


@command.command("canary", short_help="Send a version some of a model's requests, or copies.")
@click.argument("name")
@click.argument("version")
@click.option(
    "--share", type=Number(), metavar="PCT", help="Percentage of the requests that name no version.  [--shadow: 100]"
)
@click.option("--shadow", is_flag=True, help="Send it copies of requests; its answers go nowhere.")
@click.option("--entry", metavar="ENTRY", help="Keys in which it differs, as in a workload file; or a file with them.")
@no_wait_option
@address_option
def canary(
    name: str, version: str, share: float | None, shadow: bool, entry: str | None, no_wait: bool, address: str | None
) -> int:
    """Send VERSION of the model NAME a share of the requests that name no version.

    A new version gets its gpu-lets first; they start beside what serves. All keys that ENTRY does not have are those of
    the main version, which takes the rest of the requests. When the new version loses more requests than the main
    version, the controller takes it back. The command returns when the version gets its requests. Exit code 1: it does
    not, and the last line says why.

    Example: tenuto model canary resnet50 2 --share 5 --entry '{weights_path: /models/resnet50-2.safetensors}'
    """
    if share is None and not shadow:
        raise refused("--share", None, "is missing", "Say which percentage of the requests it gets, or --shadow.")
    terms = {**({"shadow": True} if shadow else {}), **({} if share is None else {"share_pct": share})}
    given = {} if entry is None else _entry(entry)
    done = f"sent {_part(terms)} as version {version}"
    return _edited(
        address,
        lambda control: control.set_version(name, version, terms, given),
        done,
        no_wait=no_wait,
        edits=lambda workload: with_version(workload, name, version, terms, given),
    )


@command.command("promote", short_help="Send a version all requests, in place of the one before.")
@click.argument("name")
@click.argument("version")
@no_wait_option
@address_option
def promote(name: str, version: str, no_wait: bool, address: str | None) -> int:
    """Make VERSION the main version of the model NAME; the version before ends.

    The version before serves until the new one has the gpu-lets that it needs. The command returns when the new one has
    all requests, and the one before has ended. Exit code 1: it has not, and the last line says why. `tenuto rollback`
    goes back.

    Example: tenuto model promote resnet50 2
    """
    return _edited(
        address,
        lambda controller: controller.promote(name, version),
        "promoted",
        no_wait=no_wait,
        edits=lambda workload: promoted(workload, name, version),
    )


@command.command("take-back", short_help="Send a version nothing more.")
@click.argument("name")
@click.argument("version")
@no_wait_option
@address_option
def take_back(name: str, version: str, no_wait: bool, address: str | None) -> int:
    """Send VERSION of the model NAME nothing from now on, and end it.

    It returns when the version has ended. Exit code 1: it has not, and the last line says why.

    Example: tenuto model take-back resnet50 2
    """
    return _edited(address, lambda controller: controller.take_back(name, version), "taken back", no_wait=no_wait)
