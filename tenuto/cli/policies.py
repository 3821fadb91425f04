"""`tenuto policies`: the placement policies of all installed packages, one line each."""

from __future__ import annotations

import click
from rich.markup import escape
from rich.table import Table

from tenuto.cli.common import emit_json, stdout_console
from tenuto.placement import policy_names

__all__ = ["command"]


@click.command("policies")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(as_json: bool) -> None:
    """List the placement policies with what they do and where they come from.

    Example: tenuto policies
    """
    policies = policy_names()
    if as_json:
        emit_json({
            "policies": [
                {"name": name, "summary": _text(kind, "summary"), "source": _text(kind, "source")}
                for name, kind in policies.items()
            ]
        })
        return
    table = Table(box=None, header_style="bold")
    for heading in ("policy", "summary", "source"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "policy")
    for name, kind in policies.items():
        table.add_row(name, escape(_text(kind, "summary")), escape(_text(kind, "source")))
    stdout_console().print(table)


def _text(kind: type, attribute: str) -> str:
    """Return a class attribute of a policy, empty where a user's own class leaves it out."""
    return str(getattr(kind, attribute, ""))
