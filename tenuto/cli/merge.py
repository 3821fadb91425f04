"""`tenuto merge`: find operators that several models can run together, and measure whether that pays here."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tenuto.cli.common import (
    Numbers,
    command_line,
    json_option,
    named_values,
    notice,
    output_option,
    printed_as_json,
    say,
    tell,
)
from tenuto.cli.tables import print_table
from tenuto.documents import parse_pairs
from tenuto.errors import Problem, one_of, raise_if_any
from tenuto.profiles.measuring.memory_meter import ResidentMemory
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.networks.cpu_share import calm_openmp


@click.command("merge", short_help="Find operators that models with equal weights can share; measure the gain.")
@click.argument("models", nargs=-1, required=True, metavar="NAME=MODEL…")
@click.option("--weights", "weights", multiple=True, metavar="NAME=FILE", help="Local weights of a model; repeatable.")
@click.option("--option", "options", multiple=True, metavar="K=V", help="Option of every model, such as image_size=64.")
@click.option("--seed", type=int, default=0, help="Seed of random weights.")
@output_option("Write or complete this profile for `tenuto plan --profiles`.")
@click.option(
    "--batch-sizes",
    "sizes",
    type=Numbers(int, 1, 4096),
    default="1,2,4,8,16",
    metavar="B,B…",
    help="Sizes of joint batches to measure; a size counts the requests of all models.",
)
@click.option("--shares", type=Numbers(int, 1, 100), default="100", metavar="PCT,PCT…", help="Shares of the CPU.")
@json_option
def command(
    models: tuple[str, ...],
    weights: tuple[str, ...],
    options: tuple[str, ...],
    seed: int,
    output: str | None,
    sizes: tuple[int, ...],
    shares: tuple[int, ...],
) -> int:
    """Merge operator graphs as USHER (OSDI 2024, §3.4) does, on this processor, and report the result.

    MODEL is a catalogue name or `package.module:factory`. NAME tells two copies apart; one copy needs none. The exit
    code is 1 when nothing could be merged.

    Every joint batch is measured twice: split evenly over the models, and all of one model. With -o FILE, the row
    `base+tuned` of FILE has the slowest of these; the rows `base` and `tuned` have the models by themselves. If the
    NAMEs are those of the workload, `tenuto plan --profiles FILE` plans with all three.

    Example: tenuto merge base=resnet50 tuned=resnet50 --weights tuned=tuned.safetensors -o merged.yaml
    """
    sources = named_values(
        "MODEL", tuple(text if "=" in text else f"{text.rpartition('.')[2]}={text}" for text in models)
    )
    files = named_values("--weights", weights)
    raise_if_any(
        [
            Problem("--weights", name, "is no name of a model", one_of(name, sources))
            for name in files
            if name not in sources
        ]
    )
    parsed = parse_pairs(options)
    writer = None if output is None else ProfileWriter(Path(output), command=shlex.join(command_line()), resume=True)

    calm_openmp(os.environ)
    from tenuto.profiles.measuring.merged_programs import measure_clusters
    from tenuto.profiles.networks.merging.merge import merge_models
    from tenuto.profiles.networks.models import build

    meter = ResidentMemory()
    loaded = {}
    for name, source in sources.items():
        tell(f"building {name} ({source})")
        loaded[name] = build(source, weights_path=files.get(name), seed=seed, options=parsed)
    tell("tracing and merging")
    begun = time.monotonic()
    merged, report = merge_models(loaded)
    data = {**asdict(report), "merging_s": time.monotonic() - begun, "device": "cpu"}
    measured = measure_clusters(
        merged,
        loaded,
        batch_sizes=sizes,
        shares=shares,
        say=lambda text: tell(f"measuring {text}"),
        writer=writer if merged else None,
        sources=sources,
        options=parsed,
        meter=meter,
    )
    for cluster, times in zip(data["clusters"], measured, strict=True):
        cluster["joint"] = [one.to_data() for one in times]
        even = max(times, key=lambda one: (one.batch_size, len(one.split)))
        cluster["pays"] = even.together.median_ms < 0.98 * even.apart.median_ms
    if writer is not None and measured:
        notice(f"wrote {writer.path}")
    if not printed_as_json(data):
        _print(data)
    return 0 if measured else 1


def _print(data: dict[str, Any]) -> None:
    for cluster in data["clusters"]:
        print_table(
            ("operator", "weight", "parameters"),
            (
                (operator["kind"], " | ".join(sorted(set(operator["names"].values()))), f"{operator['parameters']:,}")
                for operator in cluster["operators"]
            ),
            left=("weight",),
        )
        print_table(
            ("joint batch", "share", "split", "apart ms", "together ms", "change"),
            (
                (
                    str(row["batch_size"]),
                    f"{row['share_pct']:g} %",
                    ", ".join(f"{count} {name}" for name, count in row["split"].items()),
                    f"{row['apart_ms']:.1f}",
                    f"{row['together_ms']:.1f}",
                    f"{100.0 * (row['together_ms'] / row['apart_ms'] - 1.0):+.0f} %",
                )
                for row in cluster["joint"]
            ),
            left=("split",),
        )
        verdict = "it pays" if cluster["pays"] else "it does not pay here"
        say(
            f"{' + '.join(cluster['models'])}: {cluster['operators_before']} operators with weights become "
            f"{cluster['operators_after']}; weights {cluster['memory_before_mib']:.1f} -> "
            f"{cluster['memory_after_mib']:.1f} MiB; largest relative error {cluster['worst_error']:.1e}; the largest "
            f"batch, evenly split, on {data['device']}: {verdict}"
        )
    for name, reason in data["unmerged"].items():
        say(f"{name} stays as it is: {reason}")
