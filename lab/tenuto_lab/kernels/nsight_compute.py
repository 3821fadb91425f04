"""Kernels with measured occupancy, L2 and DRAM use from Nsight Compute: `ncu --import FILE --csv --page raw`.

Nsight Compute runs kernels one after the other and repeats them. So its durations are right, and its start times are
not: the kernels are returned back to back. When the times of a whole batch matter, match the kernels to a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.profiles.measuring.kernels.record import Kernel
from tenuto_lab.kernels.csv_table import BYTES, MICROSECONDS, dim3, number, read_export, read_rows, unit_factor

_EXPORT = "ncu --import FILE.ncu-rep --csv --page raw"
METRICS = (
    "gpu__time_duration.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_static",
    "launch__shared_mem_per_block_dynamic",
)
"""The metrics that Nsight Compute should collect."""

_DURATION = ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration")
_OCCUPANCY = ("sm__warps_active.avg.pct_of_peak_sustained_active",)
_L2 = (
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.avg.pct_of_peak_sustained_elapsed",
)
_DRAM = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum.pct_of_peak_sustained_elapsed",
)
_SHARED = ("launch__shared_mem_per_block_static", "launch__shared_mem_per_block_dynamic")


@dataclass(frozen=True)
class NcuReport:
    """Kernels in launch order, back to back, and the compute capability they ran on."""

    kernels: tuple[Kernel, ...]
    compute_capability: tuple[int, int] | None


def load_ncu(path: str | Path) -> NcuReport:
    """Read an export; see `parse_ncu` for the errors."""
    return parse_ncu(read_export(path), origin=str(path))


def parse_ncu(text: str, *, origin: str = "ncu CSV") -> NcuReport:
    """Return the kernels of a raw-page CSV.

    Raises:
        InvalidInputError: not a raw page, a metric or unit is missing or unknown, or there are no kernels.
    """
    header, *rows = read_rows(text, ("ID", "Kernel Name", "Block Size", "Grid Size"), origin=origin, export=_EXPORT)
    if "Metric Name" in header:
        raise refused(origin, "Metric Name", "is the details page, one row per metric", f"Export with `{_EXPORT}`.")
    where = {name: index for index, name in enumerate(header)}
    wanted = {"duration": _DURATION, "occupancy": _OCCUPANCY, "L2": _L2, "DRAM": _DRAM}
    found = {key: next((n for n in names if n in where), None) for key, names in wanted.items()}
    missing = [names[0] for key, names in wanted.items() if found[key] is None]
    if missing:
        raise InvalidInputError(
            [
                Problem(
                    f"{origin}: {name}",
                    "",
                    "column is missing",
                    f"Collect --set full, or --metrics {','.join(METRICS)}.",
                )
                for name in missing
            ]
        )
    if not rows or rows[0][where["ID"]].strip():
        rule = "has no row of units below the header"
        raise refused(origin, "", rule, f"Export with `{_EXPORT}`.")
    units = dict(zip(header, rows[0], strict=True))
    factor = unit_factor(units[str(found["duration"])], MICROSECONDS, path=f"{origin}: {found['duration']}")
    for key in ("occupancy", "L2", "DRAM"):
        unit_factor(units[str(found[key])], {"%": 1.0, "pct": 1.0}, path=f"{origin}: {found[key]}")
    shared = {n: unit_factor(units[n].partition("/")[0], BYTES, path=f"{origin}: {n}") for n in _SHARED if n in where}
    kernels: list[Kernel] = []
    now_us = 0.0
    for line, row in enumerate(rows[1:], start=1):
        kernel = _kernel(dict(zip(header, row, strict=True)), found, factor, shared, now_us, f"{origin}: kernel {line}")
        kernels.append(kernel)
        now_us = kernel.end_us
    if not kernels:
        raise refused(origin, 0, "holds no kernels", "Profile at least one batch with ncu.")
    return NcuReport(tuple(kernels), _capability(dict(zip(header, rows[1], strict=True))))


def _kernel(
    row: Mapping[str, str],
    found: Mapping[str, str | None],
    factor: float,
    shared: Mapping[str, float],
    now_us: float,
    path: str,
) -> Kernel:
    values = {key: number(row[str(name)], path=f"{path}: {name}") for key, name in found.items()}
    duration = values["duration"]
    if duration is None:
        rule = "has no duration"
        raise refused(path, row["Kernel Name"], rule, "Profile it again; ncu could not measure it.")
    registers = number(row.get("launch__registers_per_thread", ""), path=path)
    sizes = [number(row[name], path=path) for name in shared]
    known = [size * each for size, each in zip(sizes, shared.values(), strict=True) if size is not None]
    return Kernel(
        name=row["Kernel Name"],
        grid=dim3(row["Grid Size"], path=f"{path}: Grid Size"),
        block=dim3(row["Block Size"], path=f"{path}: Block Size"),
        start_us=now_us,
        duration_us=duration * factor,
        registers_per_thread=None if registers is None else int(registers),
        shared_memory_bytes=round(sum(known)) if len(known) == len(_SHARED) else None,
        achieved_occupancy_pct=values["occupancy"],
        l2_util_pct=values["L2"],
        dram_util_pct=values["DRAM"],
    )


def _capability(row: Mapping[str, str]) -> tuple[int, int] | None:
    major, separator, minor = row.get("CC", "").partition(".")
    return (int(major), int(minor)) if separator and major.isdigit() and minor.isdigit() else None
