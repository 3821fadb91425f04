"""What several verbs share: reading cluster and profile arguments, printing data and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tenuto.errors import InvalidInputError, Problem
from tenuto.placement import Cluster
from tenuto.profiles import Profile, Profiles

__all__ = [
    "cluster_from",
    "cluster_options",
    "emit_json",
        "profiles_from",
    "progress_console",
    "stdout_console",
]


def progress_console() -> Console:
    """Return the console for progress and notices, on stderr."""
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """Return the console for results; wide enough for tables when piped into a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def emit_json(data: Any) -> None:
    """Print one JSON document on stdout, keys in the given order."""
    json.dump(data, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --gpus, --cluster, --elastic and --profiles to a verb."""
    for decorate in (
        click.option(
            "--profiles",
            "profile_names",
            multiple=True,
            metavar="FILE|NAME",
            help="Profile file or shipped profile; repeatable, earlier ones win. Default: those of the GPU types.",
        ),
        click.option("--elastic", is_flag=True, help="Use as many GPUs of these types as needed; cost counts."),
        click.option("--cluster", "cluster_file", metavar="FILE", help="Cluster file instead of --gpus."),
        click.option("--gpus", metavar="TYPE:COUNT[,…]", help="Short form of a one-node cluster, such as v100:4."),
    ):
        function = decorate(function)
    return function


def cluster_from(gpus: str | None, cluster_file: str | None, elastic: bool) -> Cluster:
    """Return the cluster from the command line's arguments; raises `InvalidInputError` when none or both are given."""
    if (gpus is None) == (cluster_file is None):
        raise InvalidInputError(
            Problem("--gpus", gpus, "give exactly one of --gpus and --cluster", "Write for example --gpus v100:4.")
        )
    if gpus is not None:
        return Cluster.parse(gpus, elastic=elastic)
    cluster = Cluster.load(str(cluster_file))
    return cluster.model_copy(update={"elastic": True}) if elastic else cluster


def profiles_from(names: Iterable[str], gpu_types: Iterable[str]) -> Profiles:
    """Load profiles given by file or shipped name; without any, the shipped defaults of the GPU types.

    Raises:
        InvalidInputError: neither a file nor a shipped profile; the message lists the shipped ones.
    """
    from tenuto.profiles.shipped import default_profiles, load_shipped, shipped_names

    loaded: list[Profile] = []
    for name in names:
        if name in shipped_names():
            loaded.append(load_shipped(name))
        elif Path(name).exists():
            loaded.append(Profile.load(name))
        else:
            raise InvalidInputError(
                Problem(
                    "--profiles",
                    name,
                    "neither a file nor a shipped profile",
                    f"Shipped profiles: {', '.join(shipped_names())}.",
                )
            )
    if not loaded:
        for gpu_type in gpu_types:
            loaded += default_profiles(gpu_type)
    return Profiles(loaded)
