"""`tenuto profiles`: the profiles that come with Tenuto."""

from __future__ import annotations

import click

from tenuto.cli.common import json_option, printed_as_json
from tenuto.cli.tables import print_table


@click.command(name="profiles", short_help="List the profiles that come with Tenuto.")
@json_option
def command() -> None:
    """List the shipped profiles with their GPU type, models and source.

    Example: tenuto profiles --json
    """
    from tenuto.profiles.shipped import default_profiles, load_shipped, shipped_names

    profiles = [load_shipped(name) for name in shipped_names()]
    defaults = {profile.name for kind in {p.gpu_type for p in profiles} for profile in default_profiles(kind)}
    rows = [
        {
            "name": p.name,
            "gpu_type": p.gpu_type,
            "default": p.name in defaults,
            "models": sorted(p.models),
            "source": p.source,
            "doubts": list(p.doubts),
        }
        for p in profiles
    ]
    if printed_as_json({"profiles": rows}):
        return
    print_table(
        ("name", "GPU type", "default", "models", "source"),
        ((p.name, p.gpu_type, "yes" if p.name in defaults else "", str(len(p.models)), p.source) for p in profiles),
        left=("GPU type", "default", "source"),
    )
