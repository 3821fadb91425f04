"""Kernels with undisturbed times from Nsight Systems: `nsys stats -r cuda_gpu_trace --format csv FILE.nsys-rep`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tenuto.errors import InvalidInputError, Problem, refused
from tenuto.profiles.measuring.kernels.record import Kernel
from tenuto_lab.kernels.csv_table import BYTES, MICROSECONDS, number, read_export, read_rows, unit_factor

_EXPORT = "nsys stats -r cuda_gpu_trace --format csv FILE.nsys-rep"
_NEEDED = ("Start", "Duration", "GrdX", "GrdY", "GrdZ", "BlkX", "BlkY", "BlkZ", "Reg/Trd", "StcSMem", "DymSMem", "Name")
_HEADING = re.compile(r"^(?P<name>[^(:]+?)\s*(?:\((?P<unit>[^)]*)\)|:.*)?$")


def load_nsys(path: str | Path) -> tuple[Kernel, ...]:
    """Read an export; see `parse_nsys` for the errors."""
    return parse_nsys(read_export(path), origin=str(path))


def parse_nsys(text: str, *, origin: str = "nsys CSV") -> tuple[Kernel, ...]:
    """Return the kernels of a GPU trace in order of start; copies and fills, which have no grid, are left out.

    Shared memory printed in MB has three decimals only: a block's is known within half a kilobyte then.

    Raises:
        InvalidInputError: a column or unit is missing or unknown, or there are no kernels.
    """
    header, *rows = read_rows(text, ("Start", "Duration", "Name"), origin=origin, export=_EXPORT)
    names, units = [], {}
    for heading in header:
        match = _HEADING.match(heading)
        name = match["name"] if match else heading
        names.append(name)
        units[name] = (match["unit"] or "") if match else ""
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise InvalidInputError(
            [Problem(f"{origin}: {name}", "", "column is missing", f"Export with `{_EXPORT}`.") for name in missing]
        )
    factors = {
        name: unit_factor(units[name], kind, path=f"{origin}: {name}")
        for name, kind in (("Start", MICROSECONDS), ("Duration", MICROSECONDS), ("StcSMem", BYTES), ("DymSMem", BYTES))
    }
    kernels = []
    for line, cells in enumerate(rows, start=1):
        row = dict(zip(names, cells, strict=True))
        if row["GrdX"].strip():
            kernels.append(_kernel(row, factors, f"{origin}: row {line}"))
    if not kernels:
        raise refused(origin, 0, "holds no kernels", "Trace at least one batch with `nsys -t cuda`.")
    return tuple(sorted(kernels, key=lambda kernel: kernel.start_us))


def _kernel(row: Mapping[str, str], factors: Mapping[str, float], path: str) -> Kernel:
    values: dict[str, float] = {}
    for name in _NEEDED[:-1]:
        value = number(row[name], path=f"{path}: {name}")
        if value is None:
            rule = f"has no {name}"
            raise refused(path, row["Name"], rule, "Export again; the file was cut off.")
        values[name] = value * factors.get(name, 1.0)
    strm = number(row.get("Strm", ""), path=f"{path}: Strm")
    return Kernel(
        name=row["Name"],
        grid=(int(values["GrdX"]), int(values["GrdY"]), int(values["GrdZ"])),
        block=(int(values["BlkX"]), int(values["BlkY"]), int(values["BlkZ"])),
        start_us=values["Start"],
        duration_us=values["Duration"],
        registers_per_thread=int(values["Reg/Trd"]),
        shared_memory_bytes=round(values["StcSMem"] + values["DymSMem"]),
        stream=None if strm is None else int(strm),
    )
