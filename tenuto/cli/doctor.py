"""`tenuto doctor`: is this machine ready to serve."""

from __future__ import annotations

from dataclasses import asdict

import click

from tenuto.cli.common import emit_json, json_option, stdout_console


@click.command(name="doctor", short_help="Check this machine, one line per check, with the repair command.")
@json_option
def command(as_json: bool) -> int:
    """Check Python, packages, Ray, GPUs, CUDA MPS, memory and ports.

    Exit code 3 when something must be repaired.

    Example: tenuto doctor
    """
    from tenuto.deployments.machines.environment import diagnose

    checks = diagnose()
    if as_json:
        emit_json({"checks": [asdict(check) for check in checks]})
    else:
        console = stdout_console()
        for check in checks:
            cure = f"  ->  {check.cure}" if check.cure else ""
            console.print(f"{check.state:4s}  {check.name:18s}  {check.found}{cure}", soft_wrap=True, markup=False)
    return 3 if any(check.state == "fail" for check in checks) else 0
