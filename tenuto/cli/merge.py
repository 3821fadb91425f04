"""`tenuto merge`: find operators that several models can run together, and measure whether that pays here."""

from __future__ import annotations

import os
import shlex
import time
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
from tenuto.errors import Problem, one_of, raise_if_any, refused
from tenuto.profiles.measuring.memory_meter import ResidentMemory
from tenuto.profiles.measuring.profile_writer import ProfileWriter
from tenuto.profiles.networks.cpu_share import calm_openmp


@click.command("merge", short_help="Find operators that models with equal weights can share; measure the gain.")
@click.argument("models", nargs=-1, required=True, metavar="NAME=MODEL…")
@click.option("--weights", "weights", multiple=True, metavar="NAME=FILE", help="Local weights of a model; repeatable.")
@click.option(
    "--reseed",
    "reseeded",
    multiple=True,
    metavar="NAME=PREFIX,…",
    help="Give the model's parameters with these prefixes new random weights, as after fine-tuning; repeatable.",
)
@click.option("--option", "options", multiple=True, metavar="K=V", help="Option of every model, such as image_size=64.")
@click.option("--seed", type=int, default=0, help="Seed of random weights.")
@click.option("--batch-size", type=click.IntRange(1), default=4, help="Batch size of each model when timing.")
@click.option("--repetitions", type=click.IntRange(1), default=7, help="Timed runs, merged and apart in turns.")
@output_option("Measure the merged programs too, and write or complete this profile for `tenuto plan --profiles`.")
@click.option(
    "--batch-sizes",
    "sizes",
    type=Numbers(int, 1, 4096),
    default="1,2,4,8,16",
    metavar="B,B…",
    help="With -o: sizes of joint batches to measure; a size counts the requests of all models.",
)
@click.option(
    "--shares", type=Numbers(int, 1, 100), default="100", metavar="PCT,PCT…", help="With -o: shares of the CPU."
)
@json_option
def command(
    models: tuple[str, ...],
    weights: tuple[str, ...],
    reseeded: tuple[str, ...],
    options: tuple[str, ...],
    seed: int,
    batch_size: int,
    repetitions: int,
    output: str | None,
    sizes: tuple[int, ...],
    shares: tuple[int, ...],
) -> int:
    """Merge operator graphs as USHER (OSDI 2024, §3.4) does, on this processor, and report the result.

    MODEL is a catalogue name or `package.module:factory`. NAME tells two copies apart; one copy needs none. The exit
    code is 1 when nothing could be merged.

    With -o FILE every joint batch is measured twice: split evenly over the models, and all of one model. In FILE, the
    row `base+tuned` has the slowest of these; the rows `base` and `tuned` have the models by themselves. If the NAMEs
    are those of the workload, `tenuto plan --profiles FILE` plans with all three.

    Example: tenuto merge base=resnet50 tuned=resnet50 --reseed tuned=layer4,fc --option image_size=64 -o merged.yaml
    """
    sources = named_values(
        "MODEL", tuple(text if "=" in text else f"{text.rpartition('.')[2]}={text}" for text in models)
    )
    files, prefixes = named_values("--weights", weights), named_values("--reseed", reseeded)
    problems = [
        Problem(option, name, "is no name of a model", one_of(name, sources))
        for option, given in (("--weights", files), ("--reseed", prefixes))
        for name in given
        if name not in sources
    ]
    raise_if_any(problems)
    parsed = parse_pairs(options)
    writer = None if output is None else ProfileWriter(Path(output), command=shlex.join(command_line()), resume=True)

    calm_openmp(os.environ)
    from tenuto.profiles.measuring.merged_programs import measure_into, measure_joint
    from tenuto.profiles.networks.merging.joint_network import MergedNetwork
    from tenuto.profiles.networks.merging.merge import merge_models
    from tenuto.profiles.networks.models import build

    meter = ResidentMemory()
    models_by_name, loaded = {}, {}
    for name, source in sources.items():
        tell(f"building {name} ({source})")
        made = build(source, weights_path=files.get(name), seed=seed, options=parsed)
        _reseed(made.module, name, prefixes.get(name, ""), seed)
        models_by_name[name] = made
        loaded[name] = (made.module, made.signature)
        del made
    tell("tracing and merging")
    begun = time.monotonic()
    merged, report = merge_models(loaded)
    data = {**report.to_data(), "merging_s": time.monotonic() - begun, "batch_size": batch_size, "device": "cpu"}
    for cluster_models, cluster in zip(merged, data["clusters"], strict=True):
        tell(f"timing {', '.join(cluster_models.names)}")
        network = MergedNetwork(
            [cluster_models], {name: models_by_name[name].signature for name in cluster_models.names}
        )
        split = dict.fromkeys(cluster_models.names, batch_size)
        (timed,) = measure_joint(network, models_by_name, [split], repetitions=repetitions)
        apart, together = timed.apart.median_ms, timed.together.median_ms
        cluster |= {"apart_ms": apart, "together_ms": together, "pays": together < 0.98 * apart}
        del cluster_models, network
    if writer is not None and merged:
        loaded.clear()
        joint = measure_into(
            writer,
            merged,
            models_by_name,
            sources=sources,
            options=parsed,
            batch_sizes=sizes,
            shares=shares,
            repetitions=repetitions,
            meter=meter,
            say=lambda text: tell(f"measuring {text}"),
        )
        for cluster, times in zip(data["clusters"], joint, strict=True):
            cluster["joint"] = [one.to_data() for one in times]
        notice(f"wrote {writer.path}")
    if not printed_as_json(data):
        _print(data)
    return 0 if data["clusters"] else 1


def _reseed(module: Any, name: str, prefixes: str, seed: int) -> None:
    """Give the parameters of these prefixes new random values of the same spread."""
    import torch

    generator = torch.Generator().manual_seed(seed + 1)
    for prefix in filter(None, prefixes.split(",")):
        mine = [p for key, p in module.named_parameters() if key == prefix or key.startswith(f"{prefix}.")]
        if not mine:
            known = sorted({key.split(".")[0] for key, _ in module.named_parameters()})
            raise refused(f"--reseed {name}", prefix, "is no prefix of its parameters", f"It has {', '.join(known)}.")
        with torch.no_grad():
            for parameter in mine:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * float(parameter.std(correction=0) or 0.01))


def _print(data: dict[str, Any]) -> None:
    for cluster in data["clusters"]:
        print_table(
            ("operator", "weight", "numbers"),
            (
                (operator["kind"], " | ".join(sorted(set(operator["names"].values()))), f"{operator['parameters']:,}")
                for operator in cluster["operators"]
            ),
            left=("weight",),
        )
        pct = 100.0 * (cluster["together_ms"] / cluster["apart_ms"] - 1.0)
        verdict = "it pays" if cluster["pays"] else "it does not pay here"
        say(
            f"{' + '.join(cluster['models'])}: {cluster['operators_before']} operators with weights become "
            f"{cluster['operators_after']}; weights "
            f"{cluster['memory_before_mib']:.1f} -> {cluster['memory_after_mib']:.1f} MiB; largest relative error "
            f"{cluster['worst_error']:.1e}\nbatches of {data['batch_size']} of each on {data['device']}: "
            f"{cluster['apart_ms']:.1f} ms apart, {cluster['together_ms']:.1f} ms together ({pct:+.0f} %): {verdict}"
        )
        if "joint" in cluster:
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
    for name, reason in data["unmerged"].items():
        say(f"{name} stays as it is: {reason}")
