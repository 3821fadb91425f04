"""`tenuto merge -o FILE`: measure merged programs joint batch by joint batch, and write what plans need of them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tenuto.cli.profile_book import ProfileBook
from tenuto.profiles.measuring.measure import Measurement

if TYPE_CHECKING:
    from tenuto.profiles.measuring.memory import MemoryMeter
    from tenuto.profiles.networks.catalogue import LoadedModel
    from tenuto.profiles.networks.merging.merge import MergedModels
    from tenuto.profiles.networks.merging.report import MergeReport

__all__ = ["joint_table", "measure_into"]


def measure_into(
    book: ProfileBook,
    merged: list[MergedModels],
    report: MergeReport,
    models: dict[str, LoadedModel],
    *,
    sources: Mapping[str, str],
    options: Mapping[str, Any],
    batch_sizes: tuple[int, ...],
    shares: tuple[float, ...],
    repetitions: int,
    meter: MemoryMeter,
    console: Console,
) -> list[list[dict[str, Any]]]:
    """Measure every cluster, write its rows and those of its models, and return the times of each by split.

    `merged` and `models` are emptied: the memory of a merged program can be told only once the originals are gone,
    and only where there is one program.
    """
    from tenuto.profiles.measuring.merged_programs import measure_joint, measure_memory, profiles_of
    from tenuto.profiles.measuring.worker import describe_machine
    from tenuto.profiles.networks.merging.runner import MergedRunner

    def tell(text: str) -> None:
        console.print(f"tenuto: measuring {text}", markup=False)

    machine = describe_machine("cpu")
    signatures = {name: loaded.signature for name, loaded in models.items()}
    runners = [MergedRunner(found, cluster, signatures) for found, cluster in zip(merged, report.clusters, strict=True)]
    measured = [
        measure_joint(runner, models, batch_sizes, shares=shares, repetitions=repetitions, report=tell)
        for runner in runners
    ]
    merged.clear()
    models.clear()
    gc.collect()
    for runner, times in zip(runners, measured, strict=True):
        memory_mib: dict[int, float] = {}
        if len(runners) == 1:
            console.print("tenuto: measuring the merged program's memory", markup=False)
            runner.settle()
            gc.collect()
            memory_mib = measure_memory(runner, batch_sizes, meter)
        for name, profile in profiles_of(runner, times, memory_mib, sources, options).items():
            book.machine(machine)
            book.finish(
                Measurement(name, profile, "cpu", machine["hardware"], machine["memory_mib"], machine["versions"])
            )
    return [[one.to_data() for one in times] for times in measured]


def joint_table(joint: list[dict[str, Any]]) -> Table:
    """Return the times of a cluster's joint batches as a table."""
    table = Table(box=None, header_style="bold")
    for heading in ("joint batch", "share", "split", "apart ms", "together ms", "change"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for row in joint:
        split = ", ".join(f"{count} {name}" for name, count in row["split"].items())
        change = 100.0 * (row["together_ms"] / row["apart_ms"] - 1.0)
        table.add_row(
            str(row["batch_size"]), f"{row['share_pct']:g} %", split, f"{row['apart_ms']:.1f}",
            f"{row['together_ms']:.1f}", f"{change:+.0f} %",
        )  # fmt: skip
    return table
