"""`tenuto advice`: how many GPUs the advice would add or release in each window of a simulated run."""

from __future__ import annotations

from dataclasses import asdict

import click

from tenuto.cli.common import NumberRange, printed_as_json
from tenuto.cli.tables import percent, print_table
from tenuto.cli.virtual import VirtualArguments, virtual_arguments
from tenuto_lab.advice_series import advice_over_time
from tenuto_lab.autoscale import AutoscaleOptions


@click.command("advice", short_help="Scaling advice over the time of a simulated run.")
@virtual_arguments
@click.option("--window-s", type=NumberRange(min=0, min_open=True), default=10.0, help="Length of a window in seconds.")
def command(arguments: VirtualArguments, window_s: float) -> None:
    """Run PLAN or WORKLOAD as `tenuto simulate` does, and print the advice of every window without following it.

    Example: tenuto advice workload.yaml --gpus v100:4 --window-s 5
    """
    options = AutoscaleOptions(window_s=window_s)
    series = advice_over_time(arguments.simulation().run().result, options)
    if printed_as_json({"advice": [asdict(advice) for advice in series]}):
        return
    print_table(
        ("until s", "GPUs", "requests", "bad", "idle", "GPUs to add (+) or release (-)"),
        (
            (
                f"{advice.end_s:g}",
                str(advice.gpus),
                f"{advice.requests:,}",
                percent(advice.bad_rate),
                percent(advice.idle_fraction),
                f"{advice.delta_gpus:+d}",
            )
            for advice in series
        ),
    )
