"""`tenuto policies`: the placement policies of all installed packages, one line each."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json
from tenuto.cli.tables import print_table
from tenuto.placement import policy_names


@click.command("policies", short_help="List the placement policies.")
@json_option
def command() -> None:
    """List the placement policies: what they do, the paper they come from, and where we deviate from it.

    Example: tenuto policies
    """
    policies = policy_names()
    rows = [
        {"name": name, **{key: _text(kind, key) for key in ("summary", "source", "readings")}}
        for name, kind in policies.items()
    ]
    if printed_as_json({"policies": rows}):
        return
    print_table(
        ("policy", "summary", "source, and how ours reads it"),
        ((name, _text(kind, "summary"), _source_of(kind)) for name, kind in policies.items()),
        left=("summary", "source, and how ours reads it"),
    )


def _source_of(kind: type) -> str:
    return "\n".join(filter(None, (_text(kind, "source"), _text(kind, "readings"))))


def _text(kind: type, attribute: str) -> str:
    """Return a class attribute of a policy; empty if a user's own class does not have it."""
    return str(getattr(kind, attribute, ""))
