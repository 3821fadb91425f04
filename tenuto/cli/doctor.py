"""`tenuto doctor`: check whether this machine is ready to serve."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json, say


@click.command(name="doctor", short_help="Check this machine, one line per check, with the repair command.")
@json_option
def command() -> int:
    """Check Python, packages, Ray, GPUs, CUDA MPS, memory and ports.

    The exit code is 3 when something must be repaired.

    Example: tenuto doctor
    """
    from tenuto.deployments.machines.environment import diagnose

    checks = diagnose()
    if not printed_as_json({"checks": checks}):
        for check in checks:
            cure = f"  ->  {check.cure}" if check.cure else ""
            say(f"{check.state:4s}  {check.name:18s}  {check.found}{cure}")
    return 3 if any(check.state == "fail" for check in checks) else 0
