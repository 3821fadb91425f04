"""Compares achieved occupancy by the hardware's counters with our estimate from launch configurations, by kernel.

One batch runs under Nsight Compute, and the importer of profiles reads the result. A step of `scripts/gpu_check`; it
needs `ncu` and permission to read the counters.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tenuto.errors import EnvironmentFaultError
from tenuto.profiles.measuring.kernels.metrics import kernel_metrics
from tenuto.profiles.measuring.kernels.occupancy import estimated_occupancy_pct
from tenuto.profiles.measuring.kernels.record import Device, Kernel
from tenuto_lab.gpu_check.results import Results, in_words, step_parser
from tenuto_lab.kernels.nsight_compute import METRICS, load_ncu


def main(arguments: Sequence[str] | None = None) -> int:
    """Write `ncu.csv` and `occupancy.json`; return 1 if the counters cannot be read."""
    parser = step_parser("occupancy", __doc__)
    parser.add_argument("--limit-s", type=float, default=150.0, help="for ncu")
    given = parser.parse_args(arguments)
    results = Results(given.output)
    gpu = results.read("inventory.json")
    try:
        _record(results, given.model, given.batch_size, given.option, given.limit_s)
        report = load_ncu(results.path("ncu.csv"))
        major, minor = map(int, str(gpu["compute_capability"]).split("."))
        found = compare(report.kernels, Device(str(gpu["type"]), (major, minor), int(gpu["sm_count"])))
    except Exception as error:  # counters that are not permitted come in many forms
        found = {"failed": in_words(error)}
        print(found["failed"], file=sys.stderr)
    results.write("occupancy.json", {"model": given.model, "batch_size": given.batch_size, **found})
    return 1 if "failed" in found else 0


def _record(results: Results, model: str, rows: int, options: Sequence[str], limit_s: float) -> None:
    program = shutil.which("ncu")
    if program is None:
        raise EnvironmentFaultError("ncu is not installed. Install Nsight Compute.")
    target = [
        sys.executable,
        "-P",
        "-m",
        "tenuto_lab.gpu_check.one_batch",
        model,
        "--batch-size",
        str(rows),
        *(word for option in (*options, "cuda_graphs=false") for word in ("--option", option)),
    ]
    command = [
        program,
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--metrics",
        ",".join(METRICS),
        "--log-file",
        str(results.path("ncu.csv")),
        *target,
    ]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(f"ncu did not end within {limit_s:g} s. Give --limit-s.") from None
    if done.returncode != 0 or not results.path("ncu.csv").exists():
        words = (done.stderr or done.stdout).strip().splitlines()
        if results.path("ncu.csv").exists():  # ncu's own errors go where its results would
            words += [
                line for line in results.path("ncu.csv").read_text(encoding="utf-8").splitlines() if "==ERROR==" in line
            ]
        raise EnvironmentFaultError(f"ncu ended with code {done.returncode}: {words[-1] if words else 'no message'}.")


def compare(kernels: Sequence[Kernel], device: Device) -> dict[str, Any]:
    """Return both occupancies of a batch, the mean by time and the largest, and how far single kernels are apart."""
    rows = [
        (k, k.achieved_occupancy_pct, estimated_occupancy_pct(k, device.limits, device.sm_count))
        for k in kernels
        if k.achieved_occupancy_pct is not None
    ]
    if not rows:
        raise EnvironmentFaultError("ncu measured no occupancy. Run it as root, or permit the counters to users.")
    measured = kernel_metrics([k for k, _, _ in rows], device)
    blind = [Kernel(**{**vars(k), "achieved_occupancy_pct": None}) for k, _, _ in rows]
    estimated = kernel_metrics(blind, device)
    gaps = [found - guessed for _, found, guessed in rows]
    keys = ("wavg_ach_occ_pct", "achieved_occupancy_pct")
    return {
        "kernels": len(kernels),
        "measured": {key: measured[key] for key in keys},
        "estimated": {key: estimated[key] for key in keys},
        "median_gap_points": round(statistics.median(gaps), 2),
        "median_absolute_gap_points": round(statistics.median(map(abs, gaps)), 2),
        "per_kernel": [
            {"name": k.name[:80], "us": round(k.duration_us, 2), "measured": found, "estimated": round(guessed, 2)}
            for k, found, guessed in rows
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
